"""Notes in torchrun's store about ranks that have left a broadcast.

A note keeps other ranks from waiting in a collective for a rank that has left. A last frame could
come only from the fetcher, and sending it would block if no rank receives any more. A note never
blocks and works for broadcasts of a device too. It survives its writer, unless that process hosts
the store.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from overlord.errors import ActorLost
from overlord.session.rendezvous import POLL_S, _Board
from overlord.torch.process_groups import Service

LONGEST = 200  # characters of an error's text


@dataclass(frozen=True, slots=True, kw_only=True)
class Departed:
    """A rank that has left the broadcast."""

    rank: int
    frames: int  # number of frames that it took part in
    why: str


class Departures:
    """The departure notes of one group; this rank reads each note from the store once."""

    def __init__(self, board: _Board, service: Service):
        self._board, self._service, self._departed, self._lock = (
            board,
            service,
            list[Departed](),
            threading.Lock(),
        )

    def leave(self, frames: int, step: int, fault: BaseException | None) -> None:
        """Write the note that this rank leaves before ``step``; ``fault``: the reason, if any.

        ``frames``: number of frames that it took part in.
        """
        if fault is None:
            why = (
                f"it closed its client before step {step}; all ranks of a broadcast take the "
                "same steps"
            )
        else:
            why = f"it left before step {step} with {error_text(fault)}"
        self._board.add_note(self._name, {"rank": self._service.rank, "frames": frames, "why": why})

    def before(self, frame: int) -> ActorLost | None:
        """Return the error for a rank that left before this frame; None if none left.

        If several ranks left, the error names the fetcher if it is one of them.
        """
        gone = [one for one in self._all() if one.frames <= frame]
        if not gone:
            return None
        first = next((one for one in gone if one.rank == self._service.fetcher), gone[0])
        whose = ", which fetches for this one," if first.rank == self._service.fetcher else ""
        return ActorLost(f"rank {first.rank}{whose}", first.why)

    def wait_for_others(self, seconds: float) -> None:
        """Wait until all other ranks of the group have left too, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while len(self._all()) < len(self._service.members) - 1 and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _all(self) -> list[Departed]:
        with self._lock:
            while (note := self._board.note(self._name, len(self._departed) + 1)) is not None:
                self._departed.append(Departed(**note))
            return [one for one in self._departed if one.rank != self._service.rank]

    @property
    def _name(self) -> str:
        return f"departures/{self._service.fetcher}"


def error_text(fault: BaseException) -> str:
    """Return the name of an error and the first line of its text."""
    text = shortened(next(iter(str(fault).splitlines()), ""))
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


def shortened(text: str) -> str:
    """Return a text; one of more than ``LONGEST`` characters is cut between words, with ``...``."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rsplit(' ', 1)[0]} ..."
