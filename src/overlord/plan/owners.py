"""Owners of placeholders: the ranks that hold the tokens of each item of a plan. Pure.

The rows of an item replace a range of tokens of its sample. The holders of these tokens follow from
mesh, plan and batch:

    whole microbatches             one owner has all tokens: the first rank of the bucket
    slices of context parallelism  the cp ranks of the bucket; a unit (a document, or the whole
                                   microbatch, by ``Batch.cp_split``) has its chunks on them
    pieces on rings                the ranks of the sample's ring

A holder has one owner for each microbatch: its rank at stage 0, and 0 along TP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from overlord import ring
from overlord.mesh import BUCKET_AXES, Batch, Mesh
from overlord.plan.module_ranks import first_ranks
from overlord.plan.plan import Assignment, LoadingPlan
from overlord.plan.tasks import PlanTasks
from overlord.sample import ranges
from overlord.token_parts import Documents, TokenParts, slice_parts, token_parts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """The parts of items: runs of rows of one item that one rank gets. Item after item."""

    item: np.ndarray  # int64
    first: np.ndarray  # int64: rows of the item before the part
    count: np.ndarray  # int64: rows of the part; 0 for an item without rows
    owner: np.ndarray  # int64: rank that receives the rows
    microbatch: np.ndarray  # int32: the owner's microbatch, by its number in the step
    doc: np.ndarray  # int32: document in that microbatch
    offset: np.ndarray  # int64: first placeholder, from the start of the whole document
    position: np.ndarray  # int64: first placeholder, from the start of the owner's microbatch

    def __len__(self) -> int:
        return len(self.item)

    def tile(self, out: np.ndarray) -> bool:
        """Return whether the parts of each item cover its ``out`` rows once, in order."""
        opens = np.append(True, self.item[1:] != self.item[:-1])[: len(self)]
        ends = self.first + self.count
        return (
            np.array_equal(np.bincount(self.item, self.count, len(out)), out)
            and not self.first[opens].any()
            and np.array_equal(self.first[~opens], ends[:-1][~opens[1:]])
        )


def parts_of(
    plan: LoadingPlan, items: Assignment, batch: Batch | None, broadcast: bool = True
) -> Parts:
    """Return the parts of the items of a module: see ``LoadingPlan.routes``."""
    b = plan.main
    assert items.out is not None
    assert items.offset is not None
    row = np.empty(len(plan), np.int64)
    row[b.sample] = np.arange(len(b.sample))
    spans = _Spans(row[items.sample], items.offset, items.out)
    if plan.tasks is not None:
        return _on_rings(plan, plan.tasks, spans)
    mesh = b.on or plan.tree
    if batch is not None and sliced(mesh, batch, b.axis, b.broadcast if broadcast else ()):
        return _on_slices(plan, spans, mesh, batch)
    return _whole(plan, spans, mesh, batch)


def sliced(mesh: Mesh, batch: Batch, axis: str, broadcast: tuple[str, ...]) -> bool:
    """Return whether ranks along cp get slices of the microbatches of their bucket."""
    whole = batch.cp_split == "none" or "cp" in BUCKET_AXES[axis] or "CP" in broadcast
    return mesh.cp > 1 and not whole


class _Spans(NamedTuple):
    """The tokens of each item: row of its sample in the backbone, first token, number of tokens."""

    row: np.ndarray
    offset: np.ndarray
    length: np.ndarray


def _parts(b: Assignment, spans: _Spans, cut: TokenParts, **columns: np.ndarray) -> Parts:
    return Parts(
        item=cut.range,
        first=cut.first,
        count=cut.length,
        doc=b.slot[spans.row[cut.range]],
        offset=spans.offset[cut.range] + cut.first,
        **columns,
    )


def _whole(plan: LoadingPlan, spans: _Spans, mesh: Mesh, batch: Batch | None) -> Parts:
    b, row = plan.main, spans.row
    everything = TokenParts(
        range=np.arange(len(row)),
        holder=np.zeros(len(row), np.int64),
        first=np.zeros(len(row), np.int64),
        length=spans.length,
        inside=spans.offset,
    )
    return _parts(
        b,
        spans,
        everything,
        owner=first_ranks(mesh, b.axis)[b.bucket[row]],
        microbatch=b.microbatch[row],
        position=_document_starts(plan, batch)[row] + spans.offset,
    )


def _on_slices(plan: LoadingPlan, spans: _Spans, mesh: Mesh, batch: Batch) -> Parts:
    b, bins, sizes = plan.main, plan.main.bins(), _document_sizes(plan, batch)
    tokens = np.bincount(bins, sizes, b.n_buckets * b.n_microbatches).astype(np.int64)
    documents = Documents(
        _document_starts(plan, batch)[spans.row], sizes[spans.row], tokens[bins[spans.row]]
    )
    by_row = batch.layout == "padded"
    cut = slice_parts(spans.offset, spans.length, documents, mesh.cp, batch.cp_split, by_row=by_row)
    row = spans.row[cut.range]
    return _parts(
        b,
        spans,
        cut,
        owner=_slice_owners(mesh, b.axis)[b.bucket[row], cut.holder],
        microbatch=b.microbatch[row],
        position=cut.inside,
    )


def _on_rings(plan: LoadingPlan, tasks: PlanTasks, spans: _Spans) -> Parts:
    b, table = plan.main, tasks.table
    sample = b.sample[spans.row]
    task = tasks.task[sample].astype(np.int64)
    length = np.maximum(tasks.lengths(plan.tokens), 1)[sample]
    cut = token_parts(spans.offset, spans.length, length, table.sizes()[task])
    member = table.task_ptr[task[cut.range]] + cut.holder
    first, by_rank = table.members(b.n_buckets)
    number = np.empty(len(by_rank), np.int32)
    number[by_rank] = ranges(np.zeros(b.n_buckets, np.int64), np.diff(first))
    owners = first_ranks(plan.tree, b.axis)
    return _parts(
        b,
        spans,
        cut,
        owner=owners[table.task_rank[member]],
        microbatch=number[member],
        position=_piece_starts(plan, tasks, member, b.slot[spans.row[cut.range]]) + cut.inside,
    )


def _piece_starts(
    plan: LoadingPlan, tasks: PlanTasks, member: np.ndarray, slot: np.ndarray
) -> np.ndarray:
    """Return where the piece of the sample at ``slot`` begins in the microbatch of each member."""
    b, table = plan.main, tasks.table
    members, number = np.unique(member, return_inverse=True)
    task = table.task_of(members)
    of_row = tasks.task[b.sample]
    rows = np.lexsort((b.slot, of_row))
    opens = np.searchsorted(of_row[rows], np.arange(len(table) + 1))
    held = (opens[1:] - opens[:-1])[task]
    samples = b.sample[rows[ranges(opens[task], held)]]
    of = np.repeat(np.arange(len(members)), held)
    position = members - table.task_ptr[task]
    sizes = ring.sizes(tasks.lengths(plan.tokens)[samples], table.sizes()[task][of], position[of])
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    begin = np.cumsum(held) - held
    found: np.ndarray = before[begin[number] + slot] - before[begin[number]]
    return found


def _slice_owners(mesh: Mesh, axis: str) -> np.ndarray:
    """Return the first rank of each bucket and coordinate along cp: int64 [buckets, cp]."""
    group = mesh.bucket_of(axis) * mesh.cp + mesh.along("cp")
    return mesh.first_rank + np.unique(group, return_index=True)[1].reshape(-1, mesh.cp)


def _document_sizes(plan: LoadingPlan, batch: Batch | None) -> np.ndarray:
    """Return the tokens of each document of the backbone, with padding.

    Without ``batch`` it is the planned size. Constructors do not use that: it is the strategy's
    choice.
    """
    b = plan.main
    if batch is None:
        return b.size
    if batch.layout == "padded":
        return np.full(len(b.sample), batch.context)
    multiple = batch.document_multiple(plan.tree)
    return np.maximum(-(-plan.tokens[b.sample] // multiple), 1) * multiple


def _document_starts(plan: LoadingPlan, batch: Batch | None) -> np.ndarray:
    """Return the first position of each document of the backbone in its whole microbatch."""
    b = plan.main
    order, bins = b.order(), b.bins()
    size = _document_sizes(plan, batch)[order]
    before = np.cumsum(size) - size
    counts = np.bincount(bins, minlength=b.n_buckets * b.n_microbatches)
    first = np.minimum(np.cumsum(counts) - counts, max(0, len(size) - 1))
    start = np.empty(len(size), np.int64)
    start[order] = before - np.repeat(before[first], counts) if len(size) else before
    return start
