"""Views: the arrays that a rank receives of its bucket's microbatches.

They follow from mesh, axis and broadcasts of a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from overlord.mesh import BUCKET_AXES, Mesh

SPLITS = ("zigzag", "zigzag_whole", "contiguous", "none")
FIRST = ("tokens", "position_ids")  # keys of the first pipeline stage
# keys of the last one; all other keys go to every stage
LAST = ("labels", "loss_mask", "source_ids")


@dataclass(frozen=True, slots=True)
class View:
    """The arrays of a bucket's microbatches that a rank receives.

    ``cp > 1``: slice ``cp_rank`` of ``cp`` slices. ``nothing``: no arrays at all.
    """

    first: bool = True  # with the keys of the first pipeline stage
    last: bool = True
    cp: int = 1
    cp_rank: int = 0
    split: str = "zigzag"
    nothing: bool = False  # another rank fetches, and the trainer broadcasts

    @property
    def sliced(self) -> bool:
        return self.cp > 1 and self.split != "none" and not self.nothing

    def has(self, key: str) -> bool:
        return (
            not self.nothing and (self.first or key not in FIRST) and (self.last or key not in LAST)
        )


ALL = View()
NOTHING = View(first=False, last=False, nothing=True)


def view_of(place: Mesh, axis: str, broadcast: tuple[str, ...], rank: int, split: str) -> View:
    """Return the view of a rank, for buckets along ``axis``.

    If cp is not an axis of buckets, the rank gets a slice along cp. If pp is not one, each stage
    gets only its own keys.

    A rank that fetches for others of its bucket gets the union of their keys and slices, and these
    others get nothing. Without ``broadcast`` the result is the rank's own view.
    """
    return views_of(place, axis, broadcast, split)[rank]


@lru_cache(maxsize=64)
def views_of(place: Mesh, axis: str, broadcast: tuple[str, ...], split: str) -> tuple[View, ...]:
    """Return the view of every rank of a mesh, as from ``view_of``. Equal views are one object."""
    queue_of = place.seats(axis, broadcast) - place.first_rank
    stage, slice_ = place.along("pp"), place.along("cp")
    staged, sliced = (
        place.pp > 1 and "pp" not in BUCKET_AXES[axis],
        place.cp > 1 and "cp" not in BUCKET_AXES[axis] and split != "none",
    )
    first, last = np.zeros(len(queue_of), bool), np.zeros(len(queue_of), bool)
    np.logical_or.at(first, queue_of, not staged or stage == 0)
    np.logical_or.at(last, queue_of, not staged or stage == place.pp - 1)
    lowest, highest = np.full(len(queue_of), place.cp), np.full(len(queue_of), -1)
    np.minimum.at(lowest, queue_of, slice_)
    np.maximum.at(highest, queue_of, slice_)
    made: dict[View, View] = {}
    views = []
    for rank, queue in enumerate(queue_of.tolist()):
        view = NOTHING
        if queue == rank:
            stages = bool(first[rank]), bool(last[rank])
            view = (
                View(*stages, place.cp, int(slice_[rank]), split)
                if sliced and lowest[rank] == highest[rank]
                else View(*stages)
            )
        views.append(made.setdefault(view, view))
    return tuple(views)
