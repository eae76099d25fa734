"""Who has left a broadcast, and why: written into torchrun's store, so that nobody waits in a
collective for one who will not come.

A last frame would do for the fetcher alone, and it would hang where nobody listens any more. A note
hangs nowhere, is there for a device's broadcasts too, and outlives the process that wrote it,
unless that one keeps the store.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from overlord.errors import ActorLost
from overlord.session.rendezvous import LOOK_S, _Board
from overlord.torch.process_groups import Service

LONGEST = 200  # characters of an error's text


@dataclass(frozen=True, slots=True, kw_only=True)
class Departed:
    """One who left: after so many frames, and in these words."""

    rank: int
    frames: int
    why: str


class Departures:
    """The notes of one group, each read once."""

    def __init__(self, board: _Board, service: Service):
        self._board, self._service, self._left, self._lock = (
            board,
            service,
            list[Departed](),
            threading.Lock(),
        )

    def leave(self, frames: int, step: int, fault: BaseException | None) -> None:
        if fault is None:
            why = (
                f"it closed its client before step {step}; all ranks of a broadcast take the "
                "same steps"
            )
        else:
            why = f"it left before step {step} with {in_short(fault)}"
        self._board.add_note(self._name, {"rank": self._service.rank, "frames": frames, "why": why})

    def before(self, frame: int) -> ActorLost | None:
        """Whoever left and has no part in this frame any more, the fetcher before others."""
        gone = [left for left in self._all() if left.frames <= frame]
        if not gone:
            return None
        first = next((left for left in gone if left.rank == self._service.fetcher), gone[0])
        whose = ", which fetches for this one," if first.rank == self._service.fetcher else ""
        return ActorLost(f"rank {first.rank}{whose}", first.why)

    def wait_for_others(self, seconds: float) -> None:
        """Until all others of the group have left too, or so long."""
        deadline = time.monotonic() + seconds
        while len(self._all()) < len(self._service.members) - 1 and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    def _all(self) -> list[Departed]:
        with self._lock:
            while (said := self._board.note(self._name, len(self._left) + 1)) is not None:
                self._left.append(Departed(**said))
            return [left for left in self._left if left.rank != self._service.rank]

    @property
    def _name(self) -> str:
        return f"farewells/{self._service.fetcher}"


def in_short(fault: BaseException) -> str:
    """An error's name and the first line of its text."""
    text = shortened(next(iter(str(fault).splitlines()), ""))
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


def shortened(text: str) -> str:
    """Cut between words."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rsplit(' ', 1)[0]} ..."
