"""Microbatches of hybrid plans: the pieces of samples that each rank of a ring holds.

A microbatch is a task of its rank. It has the rank's piece of every sample of the task, sample
after sample, first chunk before second. Besides the keys of ``pack.py``, whose document bounds are
those of whole samples, it has

    cu_seqlens_local   int32 [n+1]  where the piece of each sample begins in the arrays
    document_lengths   int64 [n]    whole samples, with padding if there is any
    cp_ranks           int32 [d]    ranks of the ring, in ring order: numbers of the dp x cp axis
    cp_rank            int32 []     position of this rank among them
    local_cp_size      int32 []     their number
    offload            float32 []   share of the activations that goes to host memory
    task_index         int32 []     number of the microbatch, equal on all ranks of the ring
    task_order         int64 []     number of the task in the global order of the step

A task without samples has one document of padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from overlord import ring
from overlord.constructor.pack import (
    BatchArrays,
    Documents,
    documents,
    new_buffer,
    with_document_arrays,
)
from overlord.constructor.runs import run_arrays
from overlord.mesh import Batch
from overlord.plan.pieces import RankTasks, tasks_of_ranks
from overlord.plan.plan import LoadingPlan
from overlord.plan.tasks import PlanTasks
from overlord.sample import Ragged, ranges


class BuiltPieces(NamedTuple):
    """The microbatches of some ranks, rank after rank."""

    arrays: BatchArrays
    samples: np.ndarray  # rows of the plan, microbatch after microbatch
    bounds: np.ndarray  # int64 [microbatches + 1]: samples of each microbatch
    first: np.ndarray  # int64 [ranks + 1]: microbatches of each rank


def build_pieces(
    plan: LoadingPlan,
    doc: np.ndarray,
    tokens: Ragged,
    ranks: Sequence[int],
    batch: Batch,
    allocate: Callable[[int], np.ndarray] = new_buffer,
    weights: Ragged | None = None,
) -> BuiltPieces:
    """Build all microbatches of these ranks of a hybrid plan, as read-only arrays.

    ``doc[i]``: row of ``tokens`` with the whole sample i. ``weights``: as in ``StepDocuments``.
    """
    tasks, mine = plan.tasks, tasks_of_ranks(plan, np.asarray(ranks, np.int64))
    assert tasks is not None, "expected a hybrid plan"
    n = len(mine.task)
    bounds = np.searchsorted(mine.microbatch, np.arange(n + 1))
    at = doc[mine.samples]
    start = tokens.offsets[at]
    docs = documents(
        start,
        tokens.offsets[at + 1] - start,
        mine.microbatch,
        n,
        plan.source[mine.samples],
        batch,
        1,
    )
    of = np.repeat(np.arange(n), np.diff(docs.first))
    d = tasks.table.sizes()[mine.task]
    if multiple := tasks.rules.multiple:
        size = ring.padded(docs.content.clip(1), d[of], multiple)
        docs = docs._replace(size=size, true=np.where(docs.content > 0, docs.content, size))
    base, held = ring.runs(docs.size, d[of], mine.position[of])
    document = np.repeat(np.arange(len(of)), 2)
    some = held.ravel() > 0
    arrays = run_arrays(
        tokens.values,
        docs,
        document[some],
        base.ravel()[some],
        held.ravel()[some],
        batch,
        allocate,
        None if weights is None else weights.values,
    )
    local = held.sum(axis=1)
    cut = np.concatenate((np.zeros(1, np.int64), np.cumsum(local)))[docs.first]
    made = with_document_arrays(docs, arrays, 1, batch, cut)
    return BuiltPieces(
        _with_rings(made, docs, local, mine, tasks), mine.samples, bounds, mine.bounds
    )


def _with_rings(
    made: BatchArrays, docs: Documents, local: np.ndarray, mine: RankTasks, tasks: PlanTasks
) -> BatchArrays:
    """Return the arrays with those that describe the ring of each microbatch."""
    table, n = tasks.table, len(mine.task)
    d = table.sizes()[mine.task]
    count = np.diff(docs.first)
    sums = np.concatenate((np.zeros(1, np.int64), np.cumsum(local)))
    bounds = docs.first + np.arange(n + 1)
    one = list(range(n + 1))
    members = np.concatenate((np.zeros(1, np.int64), np.cumsum(d)))
    added: list[tuple[str, np.ndarray, list[int]]] = [
        (
            "cu_seqlens_local",
            (
                sums[ranges(docs.first[:-1], count + 1)]
                - np.repeat(sums[docs.first[:-1]], count + 1)
            ).astype(np.int32),
            bounds.tolist(),
        ),
        ("document_lengths", docs.size.astype(np.int64), docs.first.tolist()),
        ("cp_ranks", table.task_rank[ranges(table.task_ptr[mine.task], d)], members.tolist()),
        ("cp_rank", mine.position.astype(np.int32), one),
        ("local_cp_size", d.astype(np.int32), one),
        ("offload", table.offload[mine.task], one),
        ("task_index", table.index[mine.task], one),
        ("task_order", table.order[mine.task], one),
    ]
    for _, array, _ in added:
        array.flags.writeable = False
    return BatchArrays(
        {**made.arrays, **{name: array for name, array, _ in added}},
        [*made.starts, *(starts for _, _, starts in added)],
        made.single | {name for name, _, starts in added if starts is one},
    )
