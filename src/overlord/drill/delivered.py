"""What the ranks of a run were handed, written down to the byte, and how two runs differ. Knows
nothing of plans.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overlord.hashing import digest

if TYPE_CHECKING:
    from overlord.client.step import Step


@dataclass(slots=True)
class Delivered:
    """Every step of every rank: a digest of its bytes, and which samples it held."""

    marks: dict[tuple[int, int], str] = field(default_factory=dict)  # (rank, step) -> digest
    samples: Counter[tuple[int, Any]] = field(default_factory=Counter)  # (rank, sample)
    order: dict[int, list[int]] = field(default_factory=dict)  # rank -> steps as they came

    def add(self, rank: int, step: Step) -> None:
        parts: list[Any] = [f"{step.step} {step.global_valid_tokens}"]
        for microbatch in (*step, *step.encoder):
            parts += [item for name in sorted(microbatch) for item in (name, microbatch[name])]
        self.marks[rank, step.step] = digest(*parts)
        self.order.setdefault(rank, []).append(step.step)
        for microbatch in step:
            self.samples.update((rank, piece.sample) for piece in microbatch.samples)

    @property
    def chain(self) -> str:
        """One digest of all of it."""
        return digest(
            *(f"{rank}/{step} {mark}" for (rank, step), mark in sorted(self.marks.items()))
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """Between an undisturbed run and a disturbed one."""

    lost: int  # samples of the first that did not come in the second
    repeated: int  # that came more often
    changed: tuple[
        tuple[int, int], ...
    ]  # (rank, step) whose bytes differ, are missing, or came though they should not
    disordered: tuple[int, ...]  # ranks whose steps came in another order

    def __bool__(self) -> bool:
        return bool(self.lost or self.repeated or self.changed or self.disordered)


def compare(wanted: Delivered, found: Delivered) -> Difference:
    lost, repeated = wanted.samples - found.samples, found.samples - wanted.samples
    changed = [
        at
        for at in sorted({*wanted.marks, *found.marks})
        if wanted.marks.get(at) != found.marks.get(at)
    ]
    disordered = [
        rank
        for rank in sorted({*wanted.order, *found.order})
        if wanted.order.get(rank) != found.order.get(rank)
    ]
    return Difference(lost.total(), repeated.total(), tuple(changed), tuple(disordered))
