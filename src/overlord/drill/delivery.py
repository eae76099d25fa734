"""Record digests of the data that the ranks of a run receive, and compare two runs.

Only delivered steps count; plans are not compared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overlord.hashing import digest

if TYPE_CHECKING:
    from overlord.client.client import Step


@dataclass(slots=True)
class Delivered:
    """The deliveries of a run: digests by rank and step, samples, and the order of steps."""

    digests: dict[tuple[int, int], str] = field(default_factory=dict)  # by (rank, step)
    samples: Counter[tuple[int, Any]] = field(default_factory=Counter)  # deliveries by (rank, id)
    order: dict[int, list[int]] = field(default_factory=dict)  # rank -> steps in arrival order

    def add(self, rank: int, step: Step) -> None:
        """Record a step that a rank received."""
        content: list[Any] = [f"{step.step} {step.global_valid_tokens}"]
        for microbatch in (*step, *step.encoder):
            content += [item for name in sorted(microbatch) for item in (name, microbatch[name])]
        self.digests[rank, step.step] = digest(*content)
        self.order.setdefault(rank, []).append(step.step)
        for microbatch in step:
            self.samples.update((rank, piece.sample) for piece in microbatch.samples)

    @property
    def chain(self) -> str:
        """One digest of all steps of all ranks."""
        return digest(
            *(f"{rank}/{step} {found}" for (rank, step), found in sorted(self.digests.items()))
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences between an undisturbed and a disturbed run; false if there are none."""

    lost: int  # deliveries of samples that only the undisturbed run had
    repeated: int  # deliveries of samples that only the disturbed run had
    changed: tuple[tuple[int, int], ...]  # (rank, step) with different, missing or extra bytes
    disordered: tuple[int, ...]  # ranks whose steps arrived in another order

    def __bool__(self) -> bool:
        return bool(self.lost or self.repeated or self.changed or self.disordered)


def compare(wanted: Delivered, found: Delivered) -> Difference:
    """Return the differences between the undisturbed run ``wanted`` and the run ``found``."""
    lost, repeated = wanted.samples - found.samples, found.samples - wanted.samples
    changed = [
        at
        for at in sorted({*wanted.digests, *found.digests})
        if wanted.digests.get(at) != found.digests.get(at)
    ]
    disordered = [
        rank
        for rank in sorted({*wanted.order, *found.order})
        if wanted.order.get(rank) != found.order.get(rank)
    ]
    return Difference(lost.total(), repeated.total(), tuple(changed), tuple(disordered))
