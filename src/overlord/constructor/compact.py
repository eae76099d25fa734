"""Microbatches with token ids alone, whose other arrays follow from them at the first access.

The result is bit-identical to ``pack.build_arrays``, in memory that is reused for the next one.

*Compact* microbatches have their ids in one array, in their input type. They are stored and sent
(2 or 4 bytes per token instead of 28). Measured on one CPU core, 128 microbatches of 8192 tokens
from uint16, in ns of CPU per token. Documents have 150, 424 and 2000 tokens. Compact build: 1.6,
0.8, 0.4; expansion: 2.8. ``build_arrays``, with the arrays of the last steps still held: 3.8, 3.6,
2.5.

*Views* leave the ids in the payload of their step. A trainer in the process of the constructor
needs no message. Its microbatches have the per-document arrays, and views of the payload that the
loaders read. The first access of a microbatch copies its ids once, from the memory of the reader to
the array ``tokens``, with those of the next microbatches. The arrays are small enough for a CPU
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, pairwise
from typing import Any

import numpy as np

from overlord.constructor.pack import (
    BLOCK,
    IGNORE,
    NEXT_IDS,
    SLICE_FROM,
    TOKEN_BYTES,
    BatchArrays,
    Documents,
    Layout,
    allocate_arrays,
    documents,
    fill_targets,
    new_buffer,
    numbers,
    with_document_arrays,
)
from overlord.constructor.rank_views import PER_TOKEN
from overlord.content import RaggedParts
from overlord.mesh import Batch
from overlord.messages.data import CompactLayout
from overlord.plan.view import ALL, View
from overlord.sample import Ragged, ranges

IDS = "ids"  # the only per-token array; never a key of a microbatch
HIDDEN = (IDS, NEXT_IDS)  # arrays from which others are expanded
# Mean tokens per document from which a slice per document costs less than gathering by index.
JOIN_FROM = 100
PACKED = tuple(key for key in PER_TOKEN if key != "attention_mask")  # arrays of the packed layout
ITEMSIZE = {"tokens": 8, "position_ids": 8, "labels": 8, "loss_mask": 4, "attention_mask": 1}
DTYPE = {
    "tokens": np.int64,
    "position_ids": np.int64,
    "labels": np.int64,
    "loss_mask": np.float32,
    "attention_mask": np.bool_,
}


@lru_cache(maxsize=64)
def _kinds_of(keys: tuple[str, ...]) -> tuple[tuple[tuple[str, int, np.dtype], ...], int]:
    """Return name, bytes of a token and type of each array, and the bytes of a token in all."""
    kinds = tuple((key, ITEMSIZE[key], np.dtype(DTYPE[key])) for key in keys)
    return kinds, sum(itemsize for _, itemsize, _ in kinds)


def smallest_id_type(pieces: Sequence[np.ndarray]) -> np.dtype:
    """Return uint16 if all ids fit, else the common type of the pieces.

    Files often have wider types than the vocabulary needs. Types of at most 2 bytes, and types that
    are not integers, stay.
    """
    kinds = {piece.dtype for piece in pieces if len(piece)} or {pieces[0].dtype}
    kind = np.result_type(*kinds)
    if kind.itemsize <= 2 or kind.kind not in "iu":
        return kind
    fits = all(
        int(p.max()) < 2**16 and (p.dtype.kind == "u" or int(p.min()) >= 0)
        for p in pieces
        if len(p)
    )
    return np.dtype(np.uint16) if fits else kind


def build_compact(
    values: np.ndarray,
    start: np.ndarray,
    length: np.ndarray,
    microbatch: np.ndarray,
    n_microbatches: int,
    source: np.ndarray,
    batch: Batch,
    multiple: int,
    allocate: Callable[[int], np.ndarray] = new_buffer,
    continues: np.ndarray | None = None,
) -> BatchArrays:
    """Build the same microbatches as ``build_arrays``, as ``IDS`` and the per-document arrays.

    With ``continues`` there is also ``NEXT_IDS``.
    """
    docs = documents(start, length, microbatch, n_microbatches, source, batch, multiple, continues)
    total, holes = int(docs.size.sum()), docs.size - docs.content
    kind = (
        np.promote_types(values.dtype, np.min_scalar_type(batch.pad_id))
        if holes.any()
        else values.dtype
    )
    kind = kind if kind.kind in "iu" else np.dtype(np.int64)
    ids = allocate(max(1, total * kind.itemsize))[: total * kind.itemsize].view(kind)
    if total < JOIN_FROM * len(docs.size) and len(values):
        _copy_by_index(values, docs.start, docs.size, ids)
        ids[ranges(np.cumsum(docs.size) - holes, holes)] = batch.pad_id
    else:
        pad = np.full(int(holes.max(initial=0)), batch.pad_id, kind)
        np.concatenate(
            list(_documents_and_padding(values, docs.start, docs.content, holes, pad)),
            out=ids,
            casting="same_kind",
        )
    next_ids = None
    if docs.continues is not None:
        next_ids = np.full(len(docs.start), -1, np.int64)
        on = docs.continues
        next_ids[on] = values[(docs.start + docs.content)[on]]
    return with_document_arrays(docs, {IDS: ids}, 1, batch, next_ids=next_ids)


def _documents_and_padding(
    values: np.ndarray, start: np.ndarray, content: np.ndarray, holes: np.ndarray, pad: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield the content of each document, and its padding if it has any."""
    stops, gaps = (start + content).tolist(), holes.tolist()
    for a, b, hole in zip(start.tolist(), stops, gaps, strict=True):
        yield values[a:b]
        if hole:
            yield pad[:hole]


def _copy_by_index(
    values: np.ndarray, start: np.ndarray, size: np.ndarray, ids: np.ndarray
) -> None:
    """Copy short documents to ``ids``, ``BLOCK`` tokens at a time; padding stays undefined."""
    offset = np.cumsum(size) - size
    cuts = np.append(np.unique(np.searchsorted(offset, np.arange(0, len(ids), BLOCK))), len(offset))
    edges = np.append(offset, len(ids))[cuts].tolist()
    count = np.arange(max(b - a for a, b in pairwise(edges)))
    for (d, e), (a, b) in zip(pairwise(cuts.tolist()), pairwise(edges), strict=True):
        index = np.repeat(start[d:e] - offset[d:e] + a, size[d:e])
        index += count[: b - a]
        # Padding copies the ids after its document; "clip" keeps these reads inside `values`.
        ids[a:b] = np.take(values, index, mode="clip")


def layout_of(batch: Batch) -> CompactLayout:
    """Return the layout from which whole microbatches are expanded."""
    padded = batch.layout == "padded"
    return CompactLayout(
        PER_TOKEN if padded else PACKED, batch.labels, batch.context if padded else 0
    )


def for_view(
    batch: BatchArrays, layout: CompactLayout, view: View
) -> tuple[BatchArrays, CompactLayout]:
    """Return compact microbatches, and their layout, with only the keys that a view has.

    The ids stay if a key of the view is expanded from them. The view must not be sliced along cp.
    """
    if view == ALL:
        return batch, layout
    keys = tuple(key for key in layout.keys if view.has(key))
    layout = CompactLayout(keys, layout.labels, layout.context)
    wanted = {IDS: layout.has_ids, NEXT_IDS: "labels" in layout.keys}
    return batch.only(lambda key: view.has(key) and wanted.get(key, True)), layout


# ----------------------------------------------------------------------------
# Views: the ids stay in the payload.

NONE = np.zeros(0, np.int64)


# Tokens that are expanded at once. Their arrays fit the second cache of a core, and the calls into
# numpy cost little per token.
TOGETHER = 2**15


@dataclass(frozen=True, slots=True, eq=False)
class PayloadViews:
    """The documents of consecutive microbatches, as views of the payload.

    Document d is ``pieces[piece[d]][start[d]:stop[d]]``, followed by padding. Microbatch m has the
    documents ``first[m]`` to ``first[m + 1] - 1``, and the tokens ``tokens[m]`` to
    ``tokens[m + 1] - 1``.
    """

    pieces: list[np.ndarray]
    piece: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    size: np.ndarray  # int64: tokens of each document with padding
    content: np.ndarray  # int64: tokens of each document
    padded: bool  # whether some document has padding
    first: list[int]
    tokens: list[int]
    next_ids: np.ndarray | None  # label of the last token of each document; -1: none
    pad_id: int

    def nbytes(self, first: int, stop: int) -> int:
        """Return the bytes of the ids of microbatches ``first`` to ``stop - 1``."""
        return (self.tokens[stop] - self.tokens[first]) * self.pieces[0].itemsize

    def copy(self, first: int, stop: int, out: np.ndarray) -> np.ndarray:
        """Copy the ids of microbatches ``first`` to ``stop - 1``, with padding, to ``out``."""
        d, e, pieces = self.first[first], self.first[stop], self.pieces
        columns = (column[d:e].tolist() for column in (self.piece, self.start, self.stop))
        parts = [pieces[k][a:b] for k, a, b in zip(*columns, strict=True)]
        if self.padded:
            holes = (self.size[d:e] - self.content[d:e]).tolist()
            pad = np.full(max(holes, default=0), self.pad_id, np.min_scalar_type(self.pad_id))
            padding = [pad[:n] for n in holes]
            parts = list(chain.from_iterable(zip(parts, padding, strict=True)))
        if parts:
            np.concatenate(parts, out=out, casting="same_kind")
        return out

    def ids(self, first: int, stop: int) -> np.ndarray:
        """Return a copy of the ids of microbatches ``first`` to ``stop - 1``, to be sent."""
        kinds = [piece.dtype for piece in self.pieces]
        if self.padded:
            kinds.append(np.min_scalar_type(self.pad_id))
        total = self.tokens[stop] - self.tokens[first]
        return self.copy(first, stop, np.empty(total, np.result_type(*kinds)))

    def runs(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Divide microbatches ``first`` to ``stop - 1`` into runs of at most ``TOGETHER`` tokens.

        A run has at least one microbatch.
        """
        runs, begin = list[tuple[int, int]](), first
        for m in range(first + 1, stop + 1):
            if m == stop or self.tokens[m + 1] - self.tokens[begin] > TOGETHER:
                runs.append((begin, m))
                begin = m
        return runs

    def expand(
        self, first: int, stop: int, labels: str, allocate: Callable[[int], np.ndarray], room: int
    ) -> list[dict[str, np.ndarray]]:
        """Return the per-token arrays of microbatches ``first`` to ``stop - 1``, read-only.

        ``labels``: their convention. ``room``: least number of tokens to allocate.
        """
        d, e, before = self.first[first], self.first[stop], self.tokens[first]
        total = self.tokens[stop] - before
        arrays = allocate_arrays(total, lambda nbytes: allocate(max(nbytes, TOKEN_BYTES * room)))
        size, content = self.size[d:e], self.content[d:e]
        ends = size.cumsum()
        offset = ends - size
        tokens = self.copy(first, stop, arrays["tokens"])
        np.subtract(numbers(total)[:total], offset.repeat(size), out=arrays["position_ids"])
        if self.padded or labels != "shifted":
            layout = Layout(offset, content, content, size)
            holes = ranges(offset + content, size - content)
            fill_targets(arrays, NONE, holes, offset, offset, layout, labels)
        else:  # as ``fill_targets``, with fewer calls
            ends -= 1
            arrays["labels"][:-1] = tokens[1:]
            arrays["labels"][ends] = IGNORE
            arrays["loss_mask"].fill(1)
            arrays["loss_mask"][ends] = 0
        if self.next_ids is not None and labels == "shifted":
            known = np.flatnonzero(self.next_ids[d:e] >= 0)
            ends = (offset + content)[known] - 1
            arrays["labels"][ends] = self.next_ids[d:e][known]
            arrays["loss_mask"][ends] = 1
        for array in arrays.values():
            array.flags.writeable = False
        bounds = list(pairwise(at - before for at in self.tokens[first : stop + 1]))
        return [{key: array[a:b] for key, array in arrays.items()} for a, b in bounds]


def build_views(
    payload: Ragged, docs: Documents, batch: Batch, rows: np.ndarray | None = None
) -> tuple[BatchArrays, PayloadViews]:
    """Return the per-document arrays of microbatches, and the views of their ids.

    ``rows``: the payload row of each document, if it is known. An entry for each empty microbatch
    may be missing; then the rows are searched for.
    """
    if isinstance(payload, RaggedParts) and len(payload):
        # Starts count over all joined values; a document is inside one row of the payload.
        known = rows is not None and len(rows) == len(docs.start)
        row = rows if known else payload.offsets[1:-1].searchsorted(docs.start, side="right")
        assert row is not None
        pieces, piece = payload.pieces, payload.piece[row]
        start = docs.start - payload.offsets[row] + payload.starts[row]
    else:
        pieces, piece, start = [payload.values], np.zeros(len(docs.start), np.int64), docs.start
    stop = start + docs.content
    next_ids = None
    if docs.continues is not None:
        next_ids = np.full(len(docs.start), -1, np.int64)
        for d in np.flatnonzero(docs.continues).tolist():
            next_ids[d] = pieces[piece[d]][stop[d]]
    views = PayloadViews(
        pieces,
        piece,
        start,
        stop,
        docs.size,
        docs.content,
        bool((docs.size > docs.content).any()),
        docs.first.tolist(),
        np.append(0, np.cumsum(docs.size))[docs.first].tolist(),
        next_ids,
        batch.pad_id,
    )
    return with_document_arrays(docs, {}, 1, batch, next_ids=next_ids), views


# ----------------------------------------------------------------------------
# Expansion at the first access.


class ExpandedMicrobatch(Mapping[str, np.ndarray]):
    """A compact microbatch with the keys of an expanded one.

    Only the most recently accessed microbatch of a bucket stays expanded, or the run of
    ``PayloadViews.runs`` that has it. A trainer that uses microbatches in turn needs memory for
    one or two of them. Arrays that it keeps stay valid.
    """

    __slots__ = ("_arrays", "_bucket", "_cut", "_m")

    def __init__(
        self,
        bucket: Expander,
        m: int,
        cut: Mapping[str, np.ndarray],
        arrays: Mapping[str, np.ndarray],
    ):
        """``cut``: the arrays from which others are expanded. ``arrays``: those that are shown."""
        self._bucket, self._m, self._cut, self._arrays = bucket, m, cut, arrays

    def __getitem__(self, key: str) -> np.ndarray:
        array = self._arrays.get(key)
        if array is not None:
            return array
        expanded = self._bucket.last.get(self._m)
        if expanded is None:
            if key not in self._bucket.keys:
                raise KeyError(key)
            expanded = self._bucket.expand(self._m, self._cut)
        return expanded[key]

    def __contains__(self, key: object) -> bool:
        return key in self._arrays or key in self._bucket.keys

    def __iter__(self) -> Iterator[str]:
        return chain(self._bucket.keys, self._arrays)

    def __len__(self) -> int:
        return len(self._bucket.keys) + len(self._arrays)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the microbatch as plain arrays: reusable memory stays in this process."""
        return dict, (dict(self),)

    def with_arrays(self, more: Mapping[str, np.ndarray]) -> ExpandedMicrobatch:
        """Return the microbatch with additional arrays."""
        return ExpandedMicrobatch(self._bucket, self._m, self._cut, {**self._arrays, **more})


class Expander:
    """The expander of a bucket's compact microbatches; it holds the last expanded one."""

    __slots__ = (
        "_allocate",
        "_empty",
        "_first",
        "_layout",
        "_payload",
        "_room",
        "_run",
        "keys",
        "last",
    )

    def __init__(
        self,
        layout: CompactLayout,
        empty: np.ndarray,
        allocate: Callable[[int], np.ndarray],
        payload: PayloadViews | None = None,
        first: int = 0,
    ):
        """``payload``: the ids, if they are not in the cuts; its microbatch ``first`` is number 0.

        ``empty``: mask of microbatches without documents.
        """
        self._layout, self._empty, self._allocate = layout, empty, allocate
        self.keys = layout.keys  # of the arrays that are expanded
        self._payload, self._first = payload, first
        self._room = 0  # tokens of the largest microbatch: its memory fits any of them
        # The run of microbatches that each is expanded with, if the payload is here.
        self._run: dict[int, tuple[int, int]] = {}
        self.last: dict[int, dict[str, np.ndarray]] = {}  # the expanded microbatches by number

    def microbatches(self, cuts: Sequence[Mapping[str, np.ndarray]]) -> list[ExpandedMicrobatch]:
        payload, first = self._payload, self._first
        if payload is not None and self._layout.keys == PACKED:
            runs = payload.runs(first, first + len(cuts))
            self._run = {m - first: run for run in runs for m in range(*run)}
            self._room = max((payload.tokens[b] - payload.tokens[a] for a, b in runs), default=0)
        else:
            self._room = max((cut["cu_seqlens_padded"].item(-1) for cut in cuts), default=0)
        shown = cuts
        if cuts and any(key in cuts[0] for key in HIDDEN):
            shown = [{k: a for k, a in cut.items() if k not in HIDDEN} for cut in cuts]
        both = zip(cuts, shown, strict=True)
        return [ExpandedMicrobatch(self, m, *of_it) for m, of_it in enumerate(both)]

    def expand(self, m: int, cut: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.last = {}  # first, so that its memory can be reused
        at = self._first + m
        if self._payload is not None and self._run:
            a, b = self._run[m]
            run = self._payload.expand(a, b, self._layout.labels, self._allocate, self._room)
            self.last = dict(enumerate(run, a - self._first))
            return self.last[m]
        copy = None if self._payload is None else partial(self._payload.copy, at, at + 1)
        made = expand(cut, self._layout, bool(self._empty[m]), self._allocate, self._room, copy)
        self.last = {m: made}
        return made


def expand(
    cut: Mapping[str, np.ndarray],
    layout: CompactLayout,
    empty: bool,
    allocate: Callable[[int], np.ndarray] = new_buffer,
    room: int = 0,
    copy: Callable[[np.ndarray], np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Return the per-token arrays of one compact microbatch, read-only.

    ``empty``: the microbatch has no documents. ``room``: least number of tokens to allocate.
    ``copy``: fill an array with the ids, if they are not in ``cut``, and return it.
    """
    true, size = cut["cu_seqlens"], cut["cu_seqlens_padded"]
    total, made, at = size.item(-1), dict[str, np.ndarray](), 0
    kinds, token_bytes = _kinds_of(layout.keys)
    piece = allocate(max(total, room) * token_bytes)
    for key, itemsize, dtype in kinds:
        end = at + total * itemsize
        made[key], at = piece[at:end].view(dtype), end
    ids = cut[IDS].reshape(-1) if IDS in cut else None
    if copy is not None and layout.has_ids:
        ids = copy(made["tokens"] if "tokens" in made else np.empty(total, np.int64))
    if "tokens" in made:
        if copy is None:
            made["tokens"][:] = ids
        _fill_positions(made["position_ids"], size)
    if "labels" in made:
        assert ids is not None
        fills = cut["source_ids"].item(-1) < 0  # documents that only fill a fixed shape
        held = true[1:] - true[:-1] if fills or true.item(-1) < total else None
        if fills and held is not None:
            held[cut["source_ids"] < 0] = 0
        _fill_labels(made["labels"], made["loss_mask"], ids, held, size, layout.labels, empty)
        if NEXT_IDS in cut and layout.labels == "shifted":
            known = np.flatnonzero(cut[NEXT_IDS] >= 0)
            ends = (size[1:] if held is None else size[:-1] + held)[known] - 1
            made["labels"][ends] = cut[NEXT_IDS][known]
            made["loss_mask"][ends] = 1
    if "attention_mask" in made:
        made["attention_mask"].fill(True)
        made["attention_mask"][_padding(true[1:] - true[:-1], size)] = False
    for key, array in made.items():
        if layout.context:
            made[key] = array = array.reshape(-1, layout.context)
        array.flags.writeable = False
    return made


def _fill_positions(position: np.ndarray, size: np.ndarray) -> None:
    """Fill ``position`` with numbers that start at 0 in each document."""
    n, total = len(size) - 1, len(position)
    count = numbers(total)
    if total < SLICE_FROM * n:
        starts = size[:-1].astype(np.int64)
        np.subtract(count[:total], starts.repeat(size[1:] - size[:-1]), out=position)
    else:
        for a, b in pairwise(size.tolist()):
            position[a:b] = count[: b - a]


def _fill_labels(
    labels: np.ndarray,
    loss_mask: np.ndarray,
    ids: np.ndarray,
    held: np.ndarray | None,
    size: np.ndarray,
    convention: str,
    empty: bool,
) -> None:
    """Fill labels and mask of documents with ``held`` tokens each, without the padding.

    ``held``: None without padding.
    """
    if empty:
        labels.fill(IGNORE)
        loss_mask.fill(0)
        return
    shifted = convention == "shifted"
    if shifted:
        # The last label is excluded below: it ends a document, or is padding.
        labels[:-1] = ids[1:]
    else:
        labels[:] = ids
    if held is None:
        excluded = size[1:] - 1 if shifted else size[:-1]
    else:
        excluded = (size[:-1] + held - 1 if shifted else size[:-1])[held > 0]
        excluded = np.concatenate([excluded, _padding(held, size)])
    loss_mask.fill(1)
    labels[excluded] = IGNORE
    loss_mask[excluded] = 0


def _padding(held: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return the indices of padding tokens in the microbatch; ``held``: tokens of documents."""
    ends = size[:-1].astype(np.int64) + held
    return ranges(ends, size[1:] - ends)
