"""ClientPlaceTree: the trainer's mesh as the loader sees it.

Ranks are numbered with the outermost axis slowest; ``order`` names the axes from outermost to innermost, as a torch
DeviceMesh does. A *bucket* is a group of ranks that consumes the same microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from overlord.errors import JobError

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPlaceTree:
    """Degrees of pipeline, data, context and tensor parallelism, and how ranks are laid out over them."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        problems = [
            f"place.{axis}: wanted a whole number of at least 1, found {getattr(self, axis)!r}"
            for axis in AXES
            if not isinstance(getattr(self, axis), int) or isinstance(getattr(self, axis), bool) or getattr(self, axis) < 1
        ]
        if sorted(self.order) != sorted(AXES):
            problems.append(f"place.order: wanted each of {', '.join(AXES)} once, found {self.order!r}")
        if problems:
            raise JobError(problems, "place")
        object.__setattr__(self, "order", tuple(self.order))

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def replace(self, **degrees: int) -> ClientPlaceTree:
        return replace(self, **degrees)  # type: ignore[arg-type]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis."""
        if not 0 <= rank < self.world:
            raise JobError([f"rank {rank} is outside 0..{self.world - 1} of {self}"], "place")
        at = np.unravel_index(rank, [getattr(self, axis) for axis in self.order])
        return {axis: int(i) for axis, i in zip(self.order, at, strict=True)}

    def buckets(self, axis: str = "DP") -> list[list[int]]:
        """Ranks by bucket. ``DP``: one bucket per replica; ``CP``: every (dp, cp) pair; ``WORLD``: every rank."""
        groups = {"DP": ("dp",), "CP": ("dp", "cp"), "WORLD": ("dp", "cp", "pp", "tp"), "PP": ("pp",), "TP": ("tp",)}
        if axis not in groups:
            raise JobError([f"unknown axis {axis!r}; known: {', '.join(groups)}"], "place")
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self.coordinate(rank)
            found.setdefault(tuple(at[a] for a in groups[axis]), []).append(rank)
        return [found[key] for key in sorted(found)]

    def n_buckets(self, axis: str = "DP") -> int:
        """How many buckets the axis has, without listing ranks."""
        sizes = {"DP": self.dp, "CP": self.dp * self.cp, "WORLD": self.world, "PP": self.pp, "TP": self.tp}
        if axis not in sizes:
            raise JobError([f"unknown axis {axis!r}; known: {', '.join(sizes)}"], "place")
        return sizes[axis]

    def __str__(self) -> str:
        return "x".join(f"{axis}{getattr(self, axis)}" for axis in self.order)
