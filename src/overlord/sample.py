"""Samples as arrays: permanent ids, ragged columns, and the buffer that a strategy gets.

No object per sample exists on a hot path. A step of 262,144 samples is seven numpy columns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from overlord.errors import PlanError

if TYPE_CHECKING:
    from overlord.mesh import Batch


# Metadata of sources with loss weights: float64, per document, the sum of its labels' weights.
LOSS_WEIGHTS = "loss_weights"
# Where samples are cut into pieces: float64, per document, its runs of equal weights, each as a
# number of tokens and their weight.
LOSS_RUNS = "loss_runs"
# Job.sync -> objective of balancing
OBJECTIVES = {"microbatch": "microbatch", "step": "iteration"}
# mean row length from which copying rows one by one is cheaper than gathering by index
SLICE_FROM = 1024


class SampleId(NamedTuple):
    """The permanent id of a sample: the same on every machine and in every run of the job."""

    source: str
    epoch: int
    file: int  # ordinal in the sorted listing
    row: int  # row number; byte offset for lines and tar members
    part: int = 0  # number of the piece, if on_long="split" split the sample

    def __str__(self) -> str:
        return f"{self.source}/e{self.epoch}/f{self.file}/r{self.row}" + (
            f"/p{self.part}" if self.part else ""
        )


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """A column of variable-length rows; row i is ``values[offsets[i]:offsets[i+1]]``."""

    values: np.ndarray
    offsets: np.ndarray  # int64, one more than rows; offsets[0] need not be 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return self.offsets[1:] - self.offsets[:-1]  # np.diff takes five times as long

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return self.values.itemsize

    @property
    def nbytes(self) -> int:
        # item() returns Python ints in a third of the time
        return (self.offsets.item(-1) - self.offsets.item(0)) * self.values.itemsize

    def slice(self, start: int, stop: int) -> Ragged:
        """Return rows ``start`` to ``stop - 1`` as views, without a copy."""
        return Ragged(self.values, self.offsets[start : stop + 1])

    def compact(self) -> Ragged:
        """Return a copy of the rows, so that the memory they are views of can be freed."""
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        return Ragged(self.values[first:last].copy(), self.offsets - first)

    def take(self, rows: np.ndarray) -> Ragged:
        """Return a copy of the chosen rows, in the given order."""
        return self._copy(self.offsets[:-1][rows], self.lengths[rows])

    def take_spans(self, rows: np.ndarray, first: np.ndarray, count: np.ndarray) -> Ragged:
        """Return a copy of ``count[i]`` values of row ``rows[i]``, from value ``first[i]`` on."""
        starts = self.offsets[:-1][rows] + first
        if (starts + count > self.offsets[1:][rows]).any() or (first < 0).any():
            raise ValueError("expected spans inside their rows, got one that ends behind its row")
        return self._copy(starts, count)

    def _copy(self, starts: np.ndarray, lengths: np.ndarray) -> Ragged:
        """Return a copy of ``lengths[i]`` values from value ``starts[i]`` on, as row i."""
        offsets = np.zeros(len(starts) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # long rows, such as files: an index would be eight times their bytes
        if offsets[-1] > SLICE_FROM * len(starts):
            values = np.empty(int(offsets[-1]), self.values.dtype)
            for a, b, at in zip(
                offsets.tolist(), offsets[1:].tolist(), starts.tolist(), strict=False
            ):
                values[a:b] = self.values[at : at + b - a]
            return Ragged(values, offsets)
        index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Ragged(self.values[index], offsets)

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        if not parts:
            return Ragged(np.zeros(0, np.int64), np.zeros(1, np.int64))
        if len(parts) == 1:
            return parts[0]
        starts = [int(p.offsets[0]) for p in parts]
        sizes = [int(p.offsets[-1]) - s for p, s in zip(parts, starts, strict=True)]
        values = np.concatenate(
            [p.values[s : s + n] for p, s, n in zip(parts, starts, sizes, strict=True)]
        )
        shifts = np.cumsum([0, *sizes[:-1]]) - starts
        offsets = np.concatenate(
            [p.offsets[:-1] + shift for p, shift in zip(parts, shifts, strict=True)]
            + [[len(values)]]
        )
        return Ragged(values, offsets)

    @staticmethod
    def from_rows(rows: Sequence[Any], dtype: Any = None) -> Ragged:
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        # an empty list would turn integers into floats
        arrays = [np.asarray(row, dtype) for row in rows if len(row)]
        return Ragged(np.concatenate(arrays) if arrays else np.zeros(0, dtype or np.int64), offsets)


class RaggedSpans(Ragged):
    """A ragged column whose rows are anywhere in an array: row i is ``held[starts[i]:stops[i]]``.

    ``values`` and ``offsets`` are those of a copy with adjacent rows, made at the first access.
    """

    __slots__ = ("_copy_of_rows", "_offsets", "held", "starts", "stops")
    __setattr__ = object.__setattr__  # a frozen dataclass refuses attributes of subclasses

    def __init__(self, held: np.ndarray, starts: np.ndarray, stops: np.ndarray):
        self.held, self.starts, self.stops = held, starts, stops
        self._offsets: np.ndarray | None = None
        self._copy_of_rows: np.ndarray | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the rows alone, as a column of adjacent rows."""
        return Ragged, (self.values, self.offsets)

    @property
    def offsets(self) -> np.ndarray:
        if self._offsets is None:
            self._offsets = _offsets_of(self.lengths)
        return self._offsets

    @property
    def values(self) -> np.ndarray:
        if self._copy_of_rows is None:
            self._copy_of_rows = _joined([self.held], np.zeros(len(self), np.int64), self)
        return self._copy_of_rows

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.held[self.starts[i] : self.stops[i]]

    @property
    def lengths(self) -> np.ndarray:
        return self.stops - self.starts

    @property
    def itemsize(self) -> int:
        return self.held.itemsize

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum()) * self.held.itemsize

    def slice(self, start: int, stop: int) -> Ragged:
        return RaggedSpans(self.held, self.starts[start:stop], self.stops[start:stop])

    def compact(self) -> Ragged:
        return Ragged(self.values, self.offsets)

    def take(self, rows: np.ndarray) -> Ragged:
        return RaggedSpans(self.held, self.starts[rows], self.stops[rows]).compact()


class RaggedParts(Ragged):
    """Several ragged columns as one, in the order of the parts.

    ``values`` and ``offsets`` are those of ``Ragged.concat(parts)``. The values are copied at the
    first access. Row i is ``pieces[piece[i]][starts[i]:stops[i]]``.
    """

    __slots__ = ("_copy_of_rows", "_offsets", "piece", "pieces", "starts", "stops")
    __setattr__ = object.__setattr__

    def __init__(self, parts: Sequence[Ragged]):
        """``parts`` must not be empty."""
        spans = [spans_of(part) for part in parts]
        self.pieces = [s.held for s in spans]
        self.starts = np.concatenate([s.starts for s in spans])
        self.stops = np.concatenate([s.stops for s in spans])
        self.piece = np.repeat(np.arange(len(spans)), [len(s.starts) for s in spans])
        self._offsets = _offsets_of(self.stops - self.starts)
        self._copy_of_rows: np.ndarray | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the rows alone, as a column of adjacent rows."""
        return Ragged, (self.values, self.offsets)

    @property
    def offsets(self) -> np.ndarray:
        return self._offsets

    @property
    def values(self) -> np.ndarray:
        if self._copy_of_rows is None:
            self._copy_of_rows = _joined(self.pieces, self.piece, self)
        return self._copy_of_rows

    @property
    def nbytes(self) -> int:
        counts = np.bincount(self.piece, self.stops - self.starts, len(self.pieces))
        sizes = np.array([piece.itemsize for piece in self.pieces])
        return int((counts * sizes).sum())


def spans_of(rows: Ragged) -> RaggedSpans:
    """Return the rows of a column as spans of its values, without a copy."""
    if isinstance(rows, RaggedSpans):
        return rows
    return RaggedSpans(rows.values, rows.offsets[:-1], rows.offsets[1:])


def _offsets_of(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _joined(
    pieces: Sequence[np.ndarray], piece: np.ndarray, rows: RaggedSpans | RaggedParts
) -> np.ndarray:
    """Return a copy of the values of all rows, one row after another; adjacent rows as one run."""
    if not len(piece):
        return np.concatenate([held[:0] for held in pieces])
    breaks = (rows.starts[1:] != rows.stops[:-1]) | (piece[1:] != piece[:-1])
    first = np.append(0, np.flatnonzero(breaks) + 1)
    last = np.append(first[1:], len(piece)) - 1
    runs = zip(
        piece[first].tolist(), rows.starts[first].tolist(), rows.stops[last].tolist(), strict=True
    )
    # Also an empty array of each piece: the type depends on the columns, not on their rows.
    return np.concatenate([*(held[:0] for held in pieces), *(pieces[k][a:b] for k, a, b in runs)])


class Items(NamedTuple):
    """Items of documents, such as images: the bytes of each item, document by document."""

    bytes: Ragged  # uint8, item after item
    counts: np.ndarray  # int64: items of each document

    @property
    def first(self) -> np.ndarray:
        """The number of each document's first item, then the total: int64 [documents + 1]."""
        first = np.zeros(len(self.counts) + 1, np.int64)
        np.cumsum(self.counts, out=first[1:])
        return first

    def slice(self, start: int, stop: int) -> Items:
        """Return the items of documents ``start`` to ``stop - 1``, as views."""
        counts = self.counts[start:stop]
        before = int(self.counts[:start].sum())
        return Items(self.bytes.slice(before, before + int(counts.sum())), counts)

    def take(self, documents: np.ndarray) -> Items:
        """Return a copy of the items of the chosen documents, in the given order."""
        return Scattered([self.bytes], self.counts).take(documents)

    @staticmethod
    def none(documents: int) -> Items:
        return Items(
            Ragged(np.zeros(0, np.uint8), np.zeros(1, np.int64)), np.zeros(documents, np.int64)
        )

    @staticmethod
    def concat(parts: Sequence[Items]) -> Items:
        if not parts:
            return Items.none(0)
        some = [p.bytes for p in parts if len(p.bytes)] or [parts[0].bytes]
        return Items(Ragged.concat(some), np.concatenate([p.counts for p in parts]))


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """The payload of documents: tokens, items such as images, and loss weights of the tokens.

    ``items`` and ``weights`` are None if no document has any. ``weights`` has the offsets of
    ``tokens``.
    """

    tokens: Ragged
    items: Items | None = None
    weights: Ragged | None = None  # uint8 if all are 0 or 1, else float32

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return (
            self.tokens.nbytes
            + (0 if self.items is None else self.items.bytes.nbytes)
            + (0 if self.weights is None else self.weights.nbytes)
        )

    def bytes_before(self, document: int) -> int:
        """Return the bytes of the documents before ``document``."""
        if self.items is not None or self.weights is not None:
            return self.slice(0, document).nbytes
        offsets = self.tokens.offsets
        return (offsets.item(document) - offsets.item(0)) * self.tokens.itemsize

    def adjacent(self) -> Content:
        """Return the documents with adjacent tokens, copied if they are spans of other memory."""
        if not isinstance(self.tokens, RaggedSpans):
            return self
        return Content(self.tokens.compact(), self.items, self.weights)

    def slice(self, start: int, stop: int) -> Content:
        """Return documents ``start`` to ``stop - 1`` as views, without a copy."""
        return Content(
            self.tokens.slice(start, stop),
            None if self.items is None else self.items.slice(start, stop),
            None if self.weights is None else self.weights.slice(start, stop),
        )

    def compact(self) -> Content:
        """Return a copy of the documents, so that the memory they are views of can be freed."""
        items = (
            None
            if self.items is None
            else Items(self.items.bytes.compact(), self.items.counts.copy())
        )
        weights = None if self.weights is None else self.weights.compact()
        return Content(self.tokens.compact(), items, weights)

    def take(self, documents: np.ndarray) -> Content:
        """Return a copy of the chosen documents, in the given order."""
        return Content(
            self.tokens.take(documents),
            None if self.items is None else self.items.take(documents),
            None if self.weights is None else self.weights.take(documents),
        )

    def take_items(self, rows: np.ndarray) -> Ragged:
        """Return a copy of the chosen items, in the given order.

        ``rows`` counts items over all documents.
        """
        return (self.items or Items.none(len(self))).bytes.take(rows)

    @staticmethod
    def pick(parts: Sequence[Content], documents: np.ndarray) -> Content:
        """Return a copy of the chosen documents of several contents, in the given order.

        ``documents`` counts over all contents. Items are copied once, whatever the number of
        contents.
        """
        tokens = Ragged.concat([p.tokens for p in parts]).take(documents)
        weights = Content.weights_of(parts)
        return Content(
            tokens,
            None if (scattered := Scattered.of(parts)) is None else scattered.take(documents),
            None if weights is None else weights.take(documents),
        )

    @staticmethod
    def concat(parts: Sequence[Content]) -> Content:
        """Return the documents of all contents, in order; a single content itself, without a copy.

        ``parts`` must not be empty. If only some contents have items, the documents of the others
        get none.
        """
        if len(parts) == 1:
            return parts[0]
        tokens, items = Ragged.concat([p.tokens for p in parts]), None
        if any(p.items is not None for p in parts):
            items = Items.concat(
                [Items.none(len(p)) if p.items is None else p.items for p in parts]
            )
        return Content(tokens, items, Content.weights_of(parts))

    @staticmethod
    def weights_of(parts: Sequence[Content]) -> Ragged | None:
        """Return the weights of several contents, joined as their tokens are; None if none has any.

        The tokens of a content without weights have the weight 1.
        """
        if all(p.weights is None for p in parts):
            return None
        return Ragged.concat(
            [ones_like(p.tokens) if p.weights is None else p.weights for p in parts]
        )


class Scattered:
    """The items of several contents, as one column without a copy."""

    def __init__(self, parts: Sequence[Ragged], counts: np.ndarray):
        self.parts, self.counts = parts, counts  # items of each document
        self._bounds = [0, *np.cumsum([len(p) for p in parts]).tolist()]

    @staticmethod
    def of(parts: Sequence[Content]) -> Scattered | None:
        """Return the items of several contents; None if ``items`` is None in all of them."""
        if all(p.items is None for p in parts):
            return None
        counts = [np.zeros(len(p), np.int64) if p.items is None else p.items.counts for p in parts]
        return Scattered(
            [p.items.bytes for p in parts if p.items is not None and len(p.items.bytes)],
            np.concatenate(counts),
        )

    def __len__(self) -> int:
        return self._bounds[-1]

    def __getitem__(self, i: int) -> np.ndarray:
        k = bisect_right(self._bounds, i) - 1
        return self.parts[k][i - self._bounds[k]]

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts)

    @property
    def first(self) -> np.ndarray:
        """The number of each document's first item, then the total: int64 [documents + 1]."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    def rows(self, documents: np.ndarray) -> np.ndarray:
        """Return the item numbers of all items of these documents, document by document: int64."""
        counts = self.counts[documents]
        ends = np.cumsum(counts)
        return np.repeat(self.first[documents] - ends + counts, counts) + np.arange(
            int(counts.sum())
        )

    def take(self, documents: np.ndarray) -> Items:
        return Items(
            Ragged.from_rows([self[i] for i in self.rows(documents).tolist()], np.uint8),
            self.counts[documents],
        )


def ones_like(tokens: Ragged) -> Ragged:
    """Return the weight 1 for every token."""
    offsets = tokens.offsets - tokens.offsets[0]
    return Ragged(np.ones(int(offsets[-1]), np.uint8), offsets)


Column = np.ndarray | Ragged  # one value per sample, or several, such as image sizes


def ranges(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return start[i], start[i] + 1, ... for every i, concatenated."""
    before = np.cumsum(length) - length
    return np.repeat(start - before, length) + np.arange(int(length.sum()))


def take_rows(column: Column, rows: np.ndarray) -> Column:
    return column.take(rows) if isinstance(column, Ragged) else column[rows]


def cut_rows(column: Column, start: int, stop: int) -> Column:
    """Return rows ``start`` to ``stop - 1`` of a column, as views."""
    return column.slice(start, stop) if isinstance(column, Ragged) else column[start:stop]


def join_rows(parts: Sequence[Column]) -> Column:
    """Return the concatenation of columns.

    If some hold lists and others numbers, a number counts as a list of one.
    """
    if Ragged not in set(map(type, parts)):
        return np.concatenate(parts)  # type: ignore[arg-type]
    return Ragged.concat(
        [p if isinstance(p, Ragged) else Ragged(p, np.arange(len(p) + 1)) for p in parts]
    )


def no_items(rows: int, dtype: Any = np.int64) -> Ragged:
    """Return a ragged column in which no row has an item."""
    return Ragged(np.zeros(0, dtype), np.zeros(rows + 1, np.int64))


def _read_only(column: Column) -> Column:
    if isinstance(column, Ragged) or not column.flags.writeable:
        return column
    view = column.view()
    view.flags.writeable = False
    return view


class Columns(dict[str, Column]):
    """Metadata by name, as user functions get it.

    The error for a missing name lists the known ones.
    """

    def __init__(self, columns: Mapping[str, Column], step: int = -1):
        super().__init__({name: _read_only(c) for name, c in columns.items()})
        self.step = step

    def __missing__(self, name: Any) -> Column:
        raise PlanError(
            f"expected metadata of {', '.join(sorted(self))}, got {name!r}",
            self.step,
            "select it, or add it with ov.Meta",
        )


def loader_is_hidden(what: str, step: int) -> PlanError:
    """Return the error for a strategy that reads the loader of a sample."""
    return PlanError(
        f"expected a strategy that does not read loaders, got a read of {what}: the stream would "
        "change with the number of loaders",
        step,
        "place samples by metadata; session.graph(step).loader shows the loaders of a planned step",
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Buffer:
    """The input of a strategy: ids and metadata of samples, one row each, without payload.

    The rows are in stream order.

    In a running job the planner has drawn already: the rows are the samples of the step, in the
    order of the draw. A buffer made by hand (``from_columns``) holds candidates, and
    ``DGraph.mix(schedule)`` draws from them.
    """

    names: tuple[str, ...]  # source names; column `source` indexes them
    source: np.ndarray  # int32
    epoch: np.ndarray  # int32
    file: np.ndarray  # int32
    row: np.ndarray  # int64
    part: np.ndarray  # int32
    meta: Mapping[str, Column]  # "tokens", "bytes" and your own
    batch: Batch
    step: int = 0
    drawn: bool = False
    substep: np.ndarray | None = None  # int32: sub-draw of each row under mix_every="microbatch"
    weights: Mapping[str, float] = field(default_factory=dict)  # target weights of the draw
    # metadata that sources of the job have, but no sample of this step
    absent: tuple[str, ...] = ()
    # metadata with a value for each document; empty: each sample of the job is one document
    documents: tuple[str, ...] = ()
    # look-ahead: samples to choose, [sub-draw][source]; the rows are candidates, source by source
    wanted: tuple[tuple[int, ...], ...] = ()
    age: np.ndarray | None = None  # int32: steps each candidate was passed over
    max_age: int = 8  # a candidate of this age is taken first
    scores: np.ndarray | None = None  # from the job's schedule: the lowest are taken first
    overflow: str = "grow"  # "defer": samples that do not fit are left for a later step
    # packing="concat": a row is a piece of a sample, and the pieces of chunk 0 come first
    chunk: np.ndarray | None = None  # int64, rising
    offset: np.ndarray | None = None  # int64: tokens of the sample before the piece
    remaining: np.ndarray | None = None  # int64: tokens of the sample after the piece
    # when ranks wait for each other: after every "microbatch", or once a "step"
    sync: str = "microbatch"
    model: Any = None  # the job's ``Model``, by which strategies balance

    def __len__(self) -> int:
        return len(self.source)

    @property
    def objective(self) -> str:
        """The default objective of ``DGraph.balance``, which follows from ``sync``.

        Raise ``PlanError`` for an unknown ``sync``.
        """
        if self.sync not in OBJECTIVES:
            raise PlanError(
                f"buffer.sync: expected one of {', '.join(OBJECTIVES)}, got {self.sync!r}",
                self.step,
                "set Job.sync",
            )
        return OBJECTIVES[self.sync]

    @property
    def loader(self) -> Any:
        """Not available: reading it raises ``PlanError``, as a strategy must ignore loaders."""
        raise loader_is_hidden("buffer.loader", self.step)

    def __repr__(self) -> str:
        counts = (
            np.bincount(self.source, minlength=len(self.names))
            if len(self)
            else np.zeros(len(self.names), int)
        )
        shown = ", ".join(f"{n}: {c}" for n, c in list(zip(self.names, counts, strict=True))[:6])
        more = ", ..." if len(self.names) > 6 else ""
        state = "drawn" if self.drawn else "candidates"
        return (
            f"Buffer(step {self.step}, {len(self)} samples {state}; {shown}{more}; meta "
            f"{', '.join(self.meta)})"
        )

    def __getitem__(self, i: int) -> SampleId:
        return SampleId(
            self.names[int(self.source[i])],
            int(self.epoch[i]),
            int(self.file[i]),
            int(self.row[i]),
            int(self.part[i]),
        )

    def column(self, name: str) -> Column:
        """Return one metadata column.

        If all samples of this step lack it (a step of text in a job with images), return a column
        without items. Raise ``PlanError`` if no source of the job has it.
        """
        if name in self.absent:
            return no_items(len(self))
        if not isinstance(name, str) or name not in self.meta:
            how = "ov.Images or ov.Meta" if str(name).startswith("image_") else "ov.Meta"
            raise PlanError(
                f"expected metadata of {', '.join(sorted(self.meta))}, got {name!r}",
                self.step,
                f"add it with {how}",
            )
        return self.meta[name]

    def take(self, rows: np.ndarray) -> Buffer:
        """Return a buffer of the chosen rows, in the given order."""
        picked = {n: getattr(self, n)[rows] for n in ("source", "epoch", "file", "row", "part")}
        meta = Columns({n: take_rows(c, rows) for n, c in self.meta.items()}, self.step)
        optional: dict[str, Any] = {
            n: c[rows] for n in OPTIONAL if (c := getattr(self, n)) is not None
        }
        return replace(self, **picked, **optional, meta=meta)

    @staticmethod
    def from_columns(
        columns: Mapping[str, Mapping[str, Any]],
        *,
        batch: Batch,
        step: int = 0,
        sync: str = "microbatch",
        model: Any = None,
    ) -> Buffer:
        """Return a buffer made from columns by source, as in ``{"web": {"tokens": [5, 9]}}``.

        A list of lists becomes a ragged column.

        Every source must have the same columns, except ragged ones: samples of a source without
        such a column have no items. ``sync``, ``model``: as in ``Job``.
        """
        if not hasattr(batch, "context"):
            raise PlanError(
                f"Buffer.from_columns: expected a Batch, got {batch!r}",
                step,
                "pass batch=ov.Batch(samples=..., context=...)",
            )
        from overlord.given_columns import columns_of  # it imports this module

        given = {name: columns_of(cols, name, step) for name, cols in columns.items()}
        sizes = [len(next(iter(cols.values()))) if cols else 0 for cols in given.values()]
        for (name, cols), size in zip(given.items(), sizes, strict=True):
            if any(len(c) != size for c in cols.values()):
                raise PlanError(
                    f"source {name!r}: expected columns of one length, got lengths "
                    f"{', '.join(map(str, sorted({len(c) for c in cols.values()})))}",
                    step,
                    "pass one value per sample in every column",
                )
        meta: dict[str, Column] = {}
        for key in sorted({key for cols in given.values() for key in cols}):
            missing = [name for name, cols in given.items() if key not in cols]
            if missing and not any(isinstance(cols.get(key), Ragged) for cols in given.values()):
                raise PlanError(
                    f"source {missing[0]!r}: expected metadata {key!r}, got none",
                    step,
                    "set the same columns for every source",
                )
            meta[key] = join_rows(
                [
                    cols.get(key, no_items(size))
                    for cols, size in zip(given.values(), sizes, strict=True)
                ]
            )
        n = sum(sizes)
        row = np.concatenate([np.arange(s) for s in sizes]) if sizes else np.zeros(0)
        zeros = np.zeros(n, np.int32)
        return Buffer(
            names=tuple(columns),
            source=np.repeat(np.arange(len(sizes)), sizes).astype(np.int32),
            epoch=zeros,
            file=zeros,
            row=row.astype(np.int64),
            part=zeros,
            meta=Columns(meta, step),
            batch=batch,
            step=step,
            sync=sync,
            model=model,
        )


IDS = ("source", "epoch", "file", "row", "part")
OPTIONAL = ("substep", "age", "scores", "chunk", "offset", "remaining")  # columns of a Buffer
