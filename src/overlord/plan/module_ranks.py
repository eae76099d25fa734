"""The ranks of a module that has its own mesh: a part of the ranks of the job's mesh.

``distribute(axis, on=mesh)`` places a module there. Functions here have two meshes as arguments:
``place``, that of the job, and ``on``, that of the module (None: the same). Arrays have one entry
for each rank of ``place``; ranks outside of ``on`` have no bucket, no view and no fetching rank.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from overlord.errors import PlanError
from overlord.mesh import Batch, Mesh
from overlord.plan.view import NOTHING, View, views_of

OUTSIDE = -1  # entry of a rank that is not in the module's mesh


def mesh_problem(place: Mesh, on: Any) -> str:
    """Return why a module cannot be on a mesh, as text; "" if it can."""
    if not isinstance(on, Mesh):
        return f"expected an ov.Mesh, got {type(on).__name__}"
    last = on.first_rank + on.world_size - 1
    if last < place.world_size:
        return ""
    return (
        f"expected ranks 0 to {place.world_size - 1} of the job's mesh {place}, got {on}, which "
        f"has ranks {on.first_rank} to {last}"
    )


def own_mesh(place: Mesh, on: Any, step: int) -> Mesh | None:
    """Return the mesh of a module if it is not the job's; raise ``PlanError`` if it cannot be."""
    if problem := mesh_problem(place, on):
        remedy = "give the mesh of the module's ranks; Job.place has the ranks of all modules"
        raise PlanError(f"distribute(on=): {problem}", step, remedy)
    return None if on == place else on


def check_padding(place: Mesh, on: Mesh, batch: Batch, step: int) -> None:
    """Raise ``PlanError`` unless documents are padded alike on the job's mesh and the backbone's.

    Constructors pad for the job's mesh.
    """
    wanted, found = batch.document_multiple(place), batch.document_multiple(on)
    if wanted != found:
        raise PlanError(
            f"module 'backbone': expected a mesh whose documents have a multiple of {wanted} "
            f"tokens, as on {place}, got a multiple of {found} on {on}",
            step,
            f"give Job.place the cp and tp of the backbone: cp={on.cp}, tp={on.tp}",
        )


@lru_cache(maxsize=32)
def bucket_by_rank(place: Mesh, on: Mesh | None, axis: str) -> np.ndarray:
    """Return the bucket of every rank: int64, read-only, ``OUTSIDE`` for ranks without one."""
    found = place.bucket_of(axis) if on is None else _spread(place, on, on.bucket_of(axis))
    found.flags.writeable = False
    return found


@lru_cache(maxsize=32)
def fetcher_by_rank(place: Mesh, on: Mesh | None, broadcast: tuple[str, ...]) -> np.ndarray:
    """Return the rank that fetches for each rank: int64, read-only, else ``OUTSIDE``."""
    served = (on or place).served_by(broadcast)
    found = served if on is None else _spread(place, on, served)
    found.flags.writeable = False
    return found


@lru_cache(maxsize=64)
def view_by_rank(
    place: Mesh, on: Mesh | None, axis: str, broadcast: tuple[str, ...], split: str
) -> tuple[View, ...]:
    """Return the view of every rank; ranks outside of the mesh get no arrays."""
    if on is None:
        return views_of(place, axis, broadcast, split)
    before = on.first_rank
    after = place.world_size - before - on.world_size
    return (NOTHING,) * before + views_of(on, axis, broadcast, split) + (NOTHING,) * after


def first_ranks(mesh: Mesh, axis: str) -> np.ndarray:
    """Return the first rank of every bucket: coordinate 0 along all other axes."""
    return mesh.first_rank + np.unique(mesh.bucket_of(axis), return_index=True)[1]


def _spread(place: Mesh, on: Mesh, values: np.ndarray) -> np.ndarray:
    """Return values by rank of ``on`` as an array by rank of ``place``."""
    found = np.full(place.world_size, OUTSIDE, np.int64)
    found[on.first_rank : on.first_rank + on.world_size] = values
    return found
