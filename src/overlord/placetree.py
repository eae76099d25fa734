"""ClientPlaceTree: the trainer's mesh as the loader sees it.

Ranks are numbered with the outermost axis slowest; ``order`` names the axes from outermost to innermost, as a torch
DeviceMesh does. A *bucket* is a group of ranks that consumes the same microbatches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from overlord.errors import JobError

AXES = ("pp", "dp", "cp", "tp")
BUCKET_AXES = {"DP": ("dp",), "CP": ("dp", "cp"), "WORLD": AXES, "PP": ("pp",), "TP": ("tp",)}


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
        if not isinstance(self.order, (list, tuple)) or sorted(map(str, self.order)) != sorted(AXES):
            problems.append(f"place.order: wanted each of {', '.join(AXES)} once, found {self.order!r}")
        if problems:
            raise JobError(problems, "place")
        object.__setattr__(self, "order", tuple(self.order))

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in self.order)

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def replace(self, **degrees: int) -> ClientPlaceTree:
        return replace(self, **degrees)  # type: ignore[arg-type]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis."""
        if not 0 <= rank < self.world:
            raise JobError([f"rank {rank} is outside 0..{self.world - 1} of {self}"], "place")
        at = np.unravel_index(rank, self._shape)
        return {axis: int(i) for axis, i in zip(self.order, at, strict=True)}

    def rank(self, **at: int) -> int:
        """The rank at a place; axes left out stand at 0. The inverse of ``coordinate``."""
        wrong = [f"{axis}={i!r} is outside {self}" for axis, i in at.items() if axis not in AXES or not 0 <= i < getattr(self, axis)]
        if wrong:
            raise JobError(wrong, "place")
        return int(np.ravel_multi_index([at.get(axis, 0) for axis in self.order], self._shape))

    def buckets(self, axis: str = "DP") -> list[list[int]]:
        """Ranks by bucket. ``DP``: one bucket per replica; ``CP``: every (dp, cp) pair; ``WORLD``: every rank, in rank order."""
        n = self.n_buckets(axis)
        if axis == "WORLD":
            return [[rank] for rank in range(n)]
        grid = np.arange(self.world).reshape(self._shape)
        inner = [a for a in self.order if a not in BUCKET_AXES[axis]]
        moved = grid.transpose([self.order.index(a) for a in (*BUCKET_AXES[axis], *inner)])
        return moved.reshape(n, -1).tolist()

    def n_buckets(self, axis: str = "DP") -> int:
        """How many buckets the axis has, without listing ranks."""
        if axis not in BUCKET_AXES:
            raise JobError([f"unknown axis {axis!r}; known: {', '.join(BUCKET_AXES)}"], "place")
        return math.prod(getattr(self, a) for a in BUCKET_AXES[axis])

    def __str__(self) -> str:
        return "x".join(f"{axis}{getattr(self, axis)}" for axis in self.order)
