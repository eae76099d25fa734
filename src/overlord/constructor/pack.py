"""Pack documents into the arrays of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from overlord.mesh import Batch
from overlord.sample import ranges

# ----------------------------------------------------------------------------
# All microbatches of a build as one array per key, and the rows of each microbatch.
#
# A local delivery slices views. A delivery to another process sends a few arrays instead of
# hundreds.

ONE = -1  # in ``rows``: a microbatch has a scalar, without a dimension


@dataclass(frozen=True, slots=True, eq=False)
class BatchArrays:
    """Concatenated microbatches, one array per key.

    Microbatch m has the rows from ``starts[k][m]`` up to, but not including, ``starts[k][m + 1]``
    of array k. Keys in ``single`` have one scalar per microbatch.
    """

    arrays: Mapping[str, np.ndarray]
    starts: list[list[int]]
    single: frozenset[str] = frozenset()

    @property
    def n(self) -> int:
        """The number of microbatches."""
        return len(self.starts[0]) - 1 if self.starts else 0

    def cut(self, first: int, stop: int) -> list[dict[str, np.ndarray]]:
        """Return the microbatches from ``first`` up to, not including, ``stop``, as views."""
        if not self.arrays:
            return [{} for _ in range(stop - first)]
        columns = []
        for (key, array), starts in zip(self.arrays.items(), self.starts, strict=True):
            bounds = starts[first : stop + 1]
            columns.append(
                [array[a, ...] for a in bounds[:-1]]
                if key in self.single
                else [array[a:b] for a, b in pairwise(bounds)]
            )
        return [dict(zip(self.arrays, views, strict=True)) for views in zip(*columns, strict=True)]

    def only(self, wanted: Callable[[str], bool]) -> BatchArrays:
        """Return the batch with only the keys for which ``wanted`` returns True."""
        kept = [wanted(key) for key in self.arrays]
        if all(kept):
            return self
        arrays = {
            key: array for (key, array), keep in zip(self.arrays.items(), kept, strict=True) if keep
        }
        return BatchArrays(
            arrays,
            [s for s, keep in zip(self.starts, kept, strict=True) if keep],
            self.single & arrays.keys(),
        )

    def part(self, first: int, stop: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return arrays of the microbatches from ``first`` up to, not including, ``stop``.

        Return also the number of rows of each: int64 [keys, microbatches]; ``ONE`` for a scalar.
        The arrays are views, by key.
        """
        arrays, rows, ones, counted = {}, [], [ONE] * (stop - first), dict[int, list[int]]()
        for (key, array), starts in zip(self.arrays.items(), self.starts, strict=True):
            arrays[key] = array[starts[first] : starts[stop]]
            # arrays of the same kind share one list
            if (counts := counted.get(id(starts))) is None:
                counts = counted[id(starts)] = [
                    b - a for a, b in pairwise(starts[first : stop + 1])
                ]
            rows.append(ones if key in self.single else counts)
        return arrays, np.array(rows, np.int64).reshape(len(rows), stop - first)

    @staticmethod
    def of_part(arrays: Mapping[str, np.ndarray], rows: np.ndarray) -> BatchArrays:
        """Return the batch from the result of ``part``.

        Raise ``ValueError`` if ``rows`` does not fit the arrays.
        """
        if rows.ndim != 2 or len(rows) != len(arrays):
            raise ValueError(
                f"rows: expected the shape ({len(arrays)}, microbatches), got {rows.shape}"
            )
        starts, single, before, sums, one = list[list[int]](), list[str](), None, [0], False
        # A few dozen numbers: numpy would cost more.
        for (key, array), counts in zip(arrays.items(), rows.tolist(), strict=True):
            if counts != before:  # otherwise this array is of the same kind as the previous one
                least = min(counts, default=0)
                if least < ONE:
                    raise ValueError(
                        f"{key!r}: expected numbers of rows of at least 0, or {ONE} for a scalar, "
                        f"got {least}"
                    )
                before, one = counts, least == ONE
                sums = [0, *accumulate([1 if n == ONE else n for n in counts])]
            if one:
                single.append(key)
            if sums[-1] != len(array):
                raise ValueError(
                    f"{key!r}: expected the {sums[-1]} rows of its microbatches, got {len(array)}"
                )
            starts.append(sums)
        return BatchArrays(arrays, starts, frozenset(single))

    def nbytes_of(self, first: int, stop: int) -> int:
        """Return the bytes of the microbatches from ``first`` up to, not including, ``stop``."""
        both = zip(self.arrays.values(), self.starts, strict=True)
        return sum(array[starts[first] : starts[stop]].nbytes for array, starts in both)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


# ----------------------------------------------------------------------------
# Pack documents into microbatches, in the packed and the padded layout of the batch contract.
#
# All microbatches of a step are concatenated in step-wide arrays, and a microbatch is a set of
# views of them. The cost per microbatch is a few slices, the cost per token a few vector
# operations (measured at the end of this comment).
#
# Keys of a packed microbatch with n documents, T tokens (each document's length rounded up to
# ``multiple``, summed):
#
#     tokens, position_ids, labels   int64   [T]
#     loss_mask                      float32 [T]    weight of the label; 0 where there is none
#     cu_seqlens                     int32   [n+1]  cumulative true lengths
#     cu_seqlens_padded              int32   [n+1]  cumulative padded lengths: places of documents
#                                                   in the arrays; ends with T
#     max_seqlen                     int32   []     longest padded document
#     source_ids                     int32   [n]
#
# Positions restart with each document and continue through its padding. Padding has token
# ``pad_id``, label -100, mask 0. ``labels="shifted"``: the label of a token is the next token of
# its document, and the last one has none (-100, mask 0). ``labels="unshifted"``: the label of a
# token is itself, and the first of each document, which nothing predicts, has none.
#
# In the padded layout every document is padded to ``context``, one per row: the [T] arrays become
# ``[n, context]``. ``attention_mask`` (bool ``[n, context]``) is true on documents and false on
# padding. ``cu_seqlens_padded`` counts in steps of ``context`` and ``max_seqlen`` is ``context``.
# ``cu_seqlens`` keeps the true lengths.
#
# An empty microbatch is one document of ``multiple`` pad tokens without labels, source -1. These
# tokens count as its true length (``cu_seqlens == [0, multiple]``). Attention kernels may not
# accept an empty sequence, or one whose mask is all false.
#
# Measured on one CPU core, 64 microbatches of 8192 tokens from uint16, in ns of CPU per token.
# Documents of 150 tokens: 3.3 (a loop of slice copies over documents: 12). Documents of 2000
# tokens: 1.8 (the loop: 2.3). If the arrays of the last steps are still held, as with prefetch,
# the cost is about 1 ns higher.

# In microbatches that are padded to the context, the last document has the padding.
#
# With shape="fixed" there are ``max_documents`` documents: cumulative lengths repeat the last sum,
# ``source_ids`` ends with -1, and ``max_seqlen`` is ``context``. In the padded layout rows without
# content are added.
#
# With packing="concat" a document may be a piece of a sample, which another microbatch continues.
# With shifted labels the label of its last token is then the next token of the sample.

IGNORE = -100  # a label without a loss
NEXT_IDS = "next_ids"  # hidden key of compact microbatches: the label of each document's last token
# Tokens gathered at a time, so that temporaries stay in the cache. 2**16 is as fast; all tokens at
# once is a tenth slower.
BLOCK = 2**15
# Mean tokens per document from which a slice copy per document is cheaper than gathering by index.
SLICE_FROM = 500


TOKEN_BYTES = 28  # of a token in all per-token arrays of the packed layout


def new_buffer(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


def build_arrays(
    values: np.ndarray,
    start: np.ndarray,
    length: np.ndarray,
    microbatch: np.ndarray,
    n_microbatches: int,
    source: np.ndarray,
    batch: Batch,
    multiple: int,
    allocate: Callable[[int], np.ndarray] = new_buffer,
    weights: np.ndarray | None = None,
    continues: np.ndarray | None = None,
) -> BatchArrays:
    """Build all microbatches of one or several buckets at once, as read-only arrays.

    ``allocate`` returns uninitialized bytes: a pool that reuses memory saves more than the gather
    costs. Document i is ``values[start[i] : start[i] + length[i]]`` and not empty. Documents must
    be sorted by (microbatch, slot). ``multiple``: packed documents are padded to a multiple of it.
    ``weights``: the loss weight of each of ``values``; None: all are 1. ``continues``: mask of the
    pieces of samples (packing="concat") of which ``values`` has the next token too.
    """
    docs = documents(start, length, microbatch, n_microbatches, source, batch, multiple, continues)
    total = int(docs.size.sum())
    layout = Layout(docs.start, docs.content, docs.true, docs.size, continues=docs.continues)
    arrays = per_token_arrays(values, weights, layout, total, batch, allocate)
    return with_document_arrays(docs, arrays, 1, batch)


class Documents(NamedTuple):
    """All documents of a step, including one without content for each empty microbatch."""

    start: np.ndarray  # offset in the payload
    content: np.ndarray  # tokens without padding
    true: np.ndarray  # the same, but ``multiple`` for a document without content
    size: np.ndarray  # tokens with padding
    source: np.ndarray  # number of the source; -1 for a document without content
    first: np.ndarray  # first document of each microbatch; the last entry: number of documents
    # the document is a piece of a sample, of which the next token follows in the payload
    continues: np.ndarray | None = None


class Layout(NamedTuple):
    """Documents, or runs of documents, in the order of the arrays; sizes as in ``Documents``."""

    start: np.ndarray  # offset of the document in the payload
    content: np.ndarray
    true: np.ndarray
    size: np.ndarray
    # Tokens of the document before the run; None: the documents are whole.
    base: np.ndarray | None = None
    continues: np.ndarray | None = None  # the next token of the document or sample is known


def documents(
    start: np.ndarray,
    length: np.ndarray,
    microbatch: np.ndarray,
    n_microbatches: int,
    source: np.ndarray,
    batch: Batch,
    multiple: int,
    continues: np.ndarray | None = None,
) -> Documents:
    rows = batch.documents if batch.fixed and batch.layout == "padded" else 1
    start, content, source, first, continues = _with_empty_documents(
        start, length, microbatch, n_microbatches, source, continues, rows
    )
    size = (
        np.full_like(content, batch.context)
        if batch.layout == "padded"
        else np.maximum(-(-content // multiple), 1) * multiple
    )
    true = np.where(content > 0, content, multiple)
    if batch.pads and batch.layout == "packed" and n_microbatches:
        last = first[1:] - 1
        size[last] += batch.context - np.add.reduceat(size, first[:-1])
        true = np.where(content > 0, content, size)
    assert (content <= size).all(), "expected documents of at most the context, got a longer one"
    return Documents(start, content, true, size, source, first, continues)


def per_token_arrays(
    values: np.ndarray,
    weights: np.ndarray | None,
    layout: Layout,
    total: int,
    batch: Batch,
    allocate: Callable[[int], np.ndarray],
) -> dict[str, np.ndarray]:
    """Build the per-token arrays of all documents of the layout."""
    content, size = layout.content, layout.size
    offset = np.cumsum(size) - size
    # Position of the first token of the document, even if it is not in the run.
    origin = offset if layout.base is None else offset - layout.base
    if not total:  # every chunk of the rank is empty
        return allocate_arrays(0, new_buffer)
    arrays = allocate_arrays(total, allocate)
    fill = _fill_by_index if len(values) and total < SLICE_FROM * len(size) else _fill_by_slices
    fill(
        values,
        layout.start,
        content,
        offset,
        origin,
        size,
        arrays["tokens"],
        arrays["position_ids"],
    )
    holes = ranges(offset + content, size - content)
    arrays["tokens"][holes] = batch.pad_id
    fill_targets(arrays, values, holes, offset, origin, layout, batch.labels)
    if weights is not None:
        _fill_weights(arrays, weights, offset, layout, batch.labels)
    if batch.layout == "padded":
        arrays["attention_mask"] = _attention(total, offset + layout.true, size - layout.true)
    return arrays


def with_document_arrays(
    docs: Documents,
    arrays: dict[str, np.ndarray],
    cp: int,
    batch: Batch,
    token_bounds: np.ndarray | None = None,
    next_ids: np.ndarray | None = None,
) -> BatchArrays:
    """Return the batch of per-token ``arrays``, one slice of ``cp``, with per-document arrays.

    All arrays become read-only. ``token_bounds``: the tokens of each microbatch, if they are not an
    equal share of it. ``next_ids``: the label of the last token of each document, -1 for none.
    """
    first, n_microbatches = docs.first, len(docs.first) - 1
    if batch.layout == "padded":
        arrays = {name: array.reshape(-1, batch.context // cp) for name, array in arrays.items()}
        token_bounds = first
    elif token_bounds is None:
        token_bounds = np.append(0, np.cumsum(docs.size))[first] // cp
    per_document = {"source_ids": docs.source.astype(np.int32)}
    if next_ids is not None:
        per_document[NEXT_IDS] = next_ids.astype(np.int32)
    counts = np.diff(first)
    if batch.fixed:
        counts = np.full(n_microbatches, batch.documents)
        per_document = {key: _filled(a, first, batch.documents) for key, a in per_document.items()}
        longest = np.full(n_microbatches, batch.context, np.int32)
    elif n_microbatches:
        longest = np.maximum.reduceat(docs.size, first[:-1]).astype(np.int32)
    else:
        longest = np.zeros(0, np.int32)
    cumulative = {"cu_seqlens": _cumulative(docs.true, first, counts)}
    cumulative["cu_seqlens_padded"] = (
        cumulative["cu_seqlens"]
        if np.array_equal(docs.true, docs.size)
        else _cumulative(docs.size, first, counts)
    )
    for array in (*arrays.values(), *per_document.values(), *cumulative.values(), longest):
        array.flags.writeable = False  # views made from here on are read-only too
    assert token_bounds is not None
    places = np.append(0, np.cumsum(counts))
    tokens, documents = token_bounds.tolist(), places.tolist()
    # Cumulative lengths have one more entry per microbatch than there are documents.
    sums = (places + np.arange(n_microbatches + 1)).tolist()
    starts = (
        [tokens] * len(arrays)
        + [sums] * len(cumulative)
        + [documents] * len(per_document)
        + [list(range(n_microbatches + 1))]
    )
    return BatchArrays(
        {**arrays, **cumulative, **per_document, "max_seqlen": longest},
        starts,
        frozenset({"max_seqlen"}),
    )


def build(
    values: np.ndarray,
    start: np.ndarray,
    length: np.ndarray,
    microbatch: np.ndarray,
    n_microbatches: int,
    source: np.ndarray,
    batch: Batch,
    multiple: int,
    allocate: Callable[[int], np.ndarray] = new_buffer,
    weights: np.ndarray | None = None,
) -> list[dict[str, np.ndarray]]:
    """Build the microbatches of ``build_arrays`` as a list of dicts of views."""
    made = build_arrays(
        values,
        start,
        length,
        microbatch,
        n_microbatches,
        source,
        batch,
        multiple,
        allocate,
        weights,
    )
    return made.cut(0, n_microbatches)


def valid_tokens(length: np.ndarray) -> int:
    """Return the number of tokens with a loss: all but one per document, in both conventions."""
    return int(np.maximum(np.asarray(length) - 1, 0).sum())


def _with_empty_documents(
    start: np.ndarray,
    length: np.ndarray,
    microbatch: np.ndarray,
    n_microbatches: int,
    source: np.ndarray,
    continues: np.ndarray | None,
    least: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Add documents without content to microbatches of fewer than ``least`` documents.

    Return start, length and source of all documents, the number of the first document of each
    microbatch, followed by the number of documents, and ``continues`` of all documents.
    """
    assert not len(length) or length.min() > 0, "expected documents with tokens, got an empty one"
    assert (microbatch[1:] >= microbatch[:-1]).all(), "expected documents sorted by microbatch"
    counts = np.bincount(microbatch, minlength=n_microbatches)
    first = np.zeros(n_microbatches + 1, np.int64)
    np.cumsum(np.maximum(counts, least), out=first[1:])
    if len(counts) and counts.min() < least:
        at = np.repeat(np.cumsum(counts), np.maximum(least - counts, 0))
        start, length, source = (
            np.insert(start, at, 0),
            np.insert(length, at, 0),
            np.insert(source.astype(np.int64), at, -1),
        )
        continues = None if continues is None else np.insert(continues, at, False)
    return (
        start.astype(np.int64, copy=False),
        length.astype(np.int64, copy=False),
        source,
        first,
        continues,
    )


def allocate_arrays(total: int, allocate: Callable[[int], np.ndarray]) -> dict[str, np.ndarray]:
    """Return uninitialized arrays for the tokens of a step, from one allocation.

    The allocation is large enough for huge pages, which are faster to touch first.
    """
    piece = allocate(TOKEN_BYTES * total)
    tokens, position, labels = piece[: 24 * total].view(np.int64).reshape(3, total)
    return {
        "tokens": tokens,
        "position_ids": position,
        "labels": labels,
        "loss_mask": piece[24 * total : 28 * total].view(np.float32),
    }


def _fill_by_index(
    values: np.ndarray,
    start: np.ndarray,
    content: np.ndarray,
    offset: np.ndarray,
    origin: np.ndarray,
    size: np.ndarray,
    tokens: np.ndarray,
    position: np.ndarray,
) -> None:
    """Fill tokens (undefined in padding) and positions, ``BLOCK`` tokens at a time."""
    cuts = np.append(
        np.unique(np.searchsorted(offset, np.arange(0, len(tokens), BLOCK))), len(offset)
    )
    edges = np.append(offset, len(tokens))[cuts]
    count = np.arange(int(np.diff(edges).max()))
    bounds = edges.tolist()
    for k, (d, e) in enumerate(pairwise(cuts.tolist())):
        a, b = bounds[k], bounds[k + 1]
        np.subtract(count[: b - a], np.repeat(origin[d:e] - a, size[d:e]), out=position[a:b])
        index = np.repeat(start[d:e], size[d:e])
        index += position[a:b]
        # Padding copies the ids after its document. "clip" keeps these reads inside `values`, and
        # is faster than a check.
        tokens[a:b] = np.take(values, index, mode="clip")


def _fill_by_slices(
    values: np.ndarray,
    start: np.ndarray,
    content: np.ndarray,
    offset: np.ndarray,
    origin: np.ndarray,
    size: np.ndarray,
    tokens: np.ndarray,
    position: np.ndarray,
) -> None:
    """Fill tokens and positions document by document, for long documents or empty ``values``."""
    base = offset - origin
    count = np.arange(int((base + size).max()))
    for s, n, o, b, p in zip(
        (start + base).tolist(),
        content.tolist(),
        offset.tolist(),
        base.tolist(),
        size.tolist(),
        strict=True,
    ):
        tokens[o : o + n] = values[s : s + n]
        position[o : o + p] = count[b : b + p]


def fill_targets(
    arrays: dict[str, np.ndarray],
    values: np.ndarray,
    holes: np.ndarray,
    offset: np.ndarray,
    origin: np.ndarray,
    layout: Layout,
    convention: str,
) -> None:
    """Fill labels with a (shifted) copy of all tokens, then exclude positions without a label."""
    tokens, labels, loss_mask = arrays["tokens"], arrays["labels"], arrays["loss_mask"]
    if convention == "shifted":
        # The last label is excluded below: it ends a document, or is padding.
        labels[:-1] = tokens[1:]
        ends, ended = offset + layout.content - 1, layout.content > 0
        if layout.continues is not None:  # the next token of the document is in another run
            on = layout.continues
            labels[ends[on]] = values[(layout.start + ends - origin + 1)[on]]
            ended &= ~on
        unlabelled = ends[ended]
    else:
        labels[:] = tokens
        unlabelled = offset if origin is offset else offset[offset == origin]
    loss_mask.fill(1)
    for positions in (unlabelled, holes):
        labels[positions] = IGNORE
        loss_mask[positions] = 0


def _fill_weights(
    arrays: dict[str, np.ndarray],
    weights: np.ndarray,
    offset: np.ndarray,
    layout: Layout,
    convention: str,
) -> None:
    """Multiply the loss mask by the weight of each label; a label of weight 0 is excluded."""
    labels, loss_mask = arrays["labels"], arrays["loss_mask"]
    base = np.zeros_like(offset) if layout.base is None else layout.base
    ahead = 1 if convention == "shifted" else 0  # the label is this number of tokens ahead
    for a, b in _blocks(offset, len(labels)):
        at, size = offset[a:b], layout.size[a:b]
        tokens = slice(int(at[0]), int(at[-1] + size[-1]))
        labelled = np.flatnonzero(loss_mask[tokens]) + tokens.start
        shift = np.repeat(layout.start[a:b] + base[a:b] - at + ahead, size)
        found = weights[labelled + shift[labelled - tokens.start]]
        loss_mask[labelled] = found
        labels[labelled[found == 0]] = IGNORE


def _blocks(offset: np.ndarray, total: int) -> list[tuple[int, int]]:
    """Return runs of documents of about ``BLOCK`` tokens, as (first, stop)."""
    cuts = np.unique(np.searchsorted(offset, np.arange(0, total, BLOCK)))
    return list(pairwise([*cuts[cuts < len(offset)].tolist(), len(offset)]))


def _attention(total: int, start: np.ndarray, count: np.ndarray) -> np.ndarray:
    mask = np.ones(total, np.bool_)
    mask[ranges(start, count)] = False
    return mask


def _cumulative(length: np.ndarray, first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return 0 and the cumulative document lengths of each microbatch.

    A microbatch has one more entry than ``counts``, the number of documents with those that fill
    the shape. These repeat the last sum.
    """
    sums = np.zeros(len(length) + 1, np.int64)
    np.cumsum(length, out=sums[1:])
    steps = ranges(first[:-1], counts + 1)
    if (counts > np.diff(first)).any():
        steps = np.minimum(steps, np.repeat(first[1:], counts + 1))
    return (sums[steps] - np.repeat(sums[first[:-1]], counts + 1)).astype(np.int32)


def _filled(column: np.ndarray, first: np.ndarray, n: int) -> np.ndarray:
    """Return a column by document with n entries for each microbatch, -1 where it has fewer."""
    counts = np.diff(first)
    assert not len(counts) or counts.max() <= n, "expected at most max_documents documents"
    filled = np.full(len(counts) * n, -1, column.dtype)
    filled[ranges(np.arange(len(counts)) * n, counts)] = column
    return filled


_COUNTED = [np.arange(2**13)]


def numbers(n: int) -> np.ndarray:
    """Return the numbers from 0 on, at least ``n`` of them, as a shared array."""
    if len(_COUNTED[0]) < n:
        _COUNTED[0] = np.arange(1 << (n - 1).bit_length())
    return _COUNTED[0]
