"""What trainers saw, as plain values: all that the checker reads. Nothing here knows how steps are
planned.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from overlord.client.client import Step


class Sample(NamedTuple):
    source: int
    epoch: int
    file: int
    row: int
    part: int


@dataclass(frozen=True, slots=True)
class Seen:
    """One step as one rank was handed it."""

    rank: int
    step: int
    samples: tuple[tuple[Sample, ...], ...]  # of every microbatch
    tokens: tuple[
        tuple[int, ...] | None, ...
    ]  # of every microbatch, as this rank holds them; None: it holds none
    keys: tuple[str, ...]  # names of the arrays it holds
    digest: str  # of all its arrays

    @staticmethod
    def of(step: Step) -> Seen:
        hashed: list[bytes] = []
        samples, tokens, keys = [], [], dict[str, None]()
        for mb in step:
            samples.append(tuple(map(Sample._make, mb.info.table[:, :5].tolist())))
            held: tuple[int, ...] | None = None
            for key in mb:
                array = mb[key]
                keys[key] = None
                hashed += (f"{key} {array.dtype.str} {array.shape}".encode(), array.tobytes())
                if key == "tokens":
                    held = tuple(array.ravel().tolist())
            tokens.append(held)
            hashed.append(b"|")
        hashed.append(f"{step.global_valid_tokens}".encode())
        digest = hashlib.blake2b(b"".join(hashed), digest_size=8).hexdigest()
        return Seen(step.rank, step.step, tuple(samples), tuple(tokens), tuple(keys), digest)


@dataclass(frozen=True, slots=True)
class Event:
    """``what``: begin (a trainer asks from ``step`` on), deliver, took, end, error, leave, fault,
    calm, rewind, restart, reshard (``words`` is the mesh from here on), said (what people changed
    has happened), refused (it was not to be).
    """

    t: float
    what: str
    rank: int = -1
    step: int = -1
    session: int = 0  # of the steps: rises with every rewind, reshard or restart of the job
    seen: Seen | None = None
    words: str = ""


@dataclass(slots=True)
class History:
    """Everything that was seen from outside, in order."""

    events: list[Event] = field(default_factory=list)
    fired: Counter[tuple[str, str]] = field(default_factory=Counter)  # (fault, role)

    def add(self, t: float, what: str, **more: Any) -> None:
        self.events.append(Event(t, what, **more))

    def digest(self) -> str:
        """Of all of it, moments included: two runs of a seed have the same."""
        hashed = hashlib.blake2b(digest_size=8)
        for e in self.events:
            hashed.update(
                f"{e.t!r} {e.what} {e.rank} {e.step} {e.session} "
                f"{e.seen and e.seen.digest} {e.words}\n".encode()
            )
        return hashed.hexdigest()
