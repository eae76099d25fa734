"""Samples as arrays: permanent ids, ragged columns, and the buffer that a strategy gets.

No object per sample exists on a hot path. A step of 262,144 samples is seven numpy columns.
"""

from __future__ import annotations

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
