"""What runs a source's transforms, in two stages, and what happens to rows that cannot be transformed.

The *slice stage* is everything up to the last piece of user code. Its batches are always the slices of the stream, so
that a function that looks at its whole batch gives the same rows in every run. The *row stage* is the rest: the result
of a row depends on that row alone, so a loader may run it on any rows it likes, as late as it likes.

Between the two stand only the columns that the row stage reads, in types it can read: slices of JSON lines may disagree
on types, and a row must meet the same fate whether the rows beside it have the right type or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from overlord.errors import TransformError
from overlord.hashing import digest, key64, keyed_hash
from overlord.sample import Ragged
from overlord.transforms.base import Block, Filter, Map, Meta, RowIds, Select, Staged, Tokens, Transform
from overlord.transforms.columns import (
    HIDDEN,
    Bad,
    Unfit,
    as_bool,
    as_number,
    as_row,
    check_ids,
    check_numbers,
    check_texts,
    column,
    from_values,
    ids_column,
    plain_numbers,
    read_ids,
    read_numbers,
    read_texts,
    to_columns,
    to_rows,
)
from overlord.transforms.text import Encoder, Tokenize, build_encoder

IDS = "tokens"  # the column that holds the ids, whatever it was called in the file
NO_IDS = "add Tokenize(...) or Tokens(column=...) to the transforms, or let the last Map return 'tokens'"


class Pipeline:
    """The transforms of one source, checked and ready. Pickles as its arguments; tokenizers are loaded once per process."""

    def __init__(self, source: str, transforms: Sequence[Transform], *, seed: int, context: int, on_long: str) -> None:
        self.source, self.transforms = source, tuple(transforms)
        self.seed, self.context, self.on_long = seed, context, on_long
        code = [i for i, t in enumerate(self.transforms) if t.user_code]
        self._cut = code[-1] + 1 if code else 0
        self.holds_lock: bool = any(t.holds_lock for t in self.transforms)
        self.columns: tuple[str, ...] | None = self._raw_columns()
        names = self._meta_names()
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise TransformError(source, "Meta", f"the name {twice[0]!r} is used twice", "metadata needs names of its own")
        self._needs = self._between()
        self._encoders: dict[int, Encoder] = {i: build_encoder(t, source) for i, t in enumerate(self.transforms) if isinstance(t, Tokenize)}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.source, self.transforms, self.seed, self.context, self.on_long)

    def __repr__(self) -> str:
        cut = [repr(t) for t in self.transforms]
        return f"Pipeline({self.source!r}: {' > '.join(cut[: self._cut]) or 'nothing'} | {' > '.join(cut[self._cut :]) or 'nothing'})"

    @property
    def fingerprint(self) -> str:
        """Of the transforms alone; seed, context and on_long are fields of the job and fingerprinted there."""
        return digest(*(t.fingerprint() for t in self.transforms))

    @property
    def has_slice_stage(self) -> bool:
        return self._cut > 0

    def slice_stage(self, table: pa.Table, ids: RowIds) -> Staged:
        """Runs user code over one slice of the stream. Without user code the slice itself comes back."""
        frame = _Frame(table)
        for position in range(self._cut):
            self._run(position, frame, ids)
        self._settle(frame)
        return Staged(frame.table, frame.index, sorted(frame.bad), frame.dropped)

    def row_stage(self, table: pa.Table) -> Block:
        """Samples from rows that went through the slice stage, in any batches."""
        frame = _Frame(table)
        for position in range(self._cut, len(self.transforms)):
            if not isinstance(self.transforms[position], Select):  # what stands between the stages is selected already
                self._run(position, frame, None)
        if not frame.table.num_rows:
            return _nothing(self._meta_names(), frame.bad)
        try:
            tokens, bad = read_ids(frame.table, IDS)
        except Unfit as fault:
            raise TransformError(self.source, "tokens", str(fault), NO_IDS) from None
        lengths = tokens.lengths
        for i in np.flatnonzero(lengths == 0):
            bad.setdefault(int(i), "no tokens")
        if self.on_long == "quarantine":
            for i in np.flatnonzero(lengths > self.context):
                bad.setdefault(int(i), f"{lengths[i]} tokens are more than the context of {self.context}")
        keep = frame.report(bad)
        return self._block(frame, tokens, keep)

    def _block(self, frame: _Frame, tokens: Ragged, keep: np.ndarray) -> Block:
        starts, lengths = tokens.offsets[:-1][keep], tokens.lengths[keep]
        pieces = np.ones(len(keep), np.int64)
        if self.on_long == "truncate":
            lengths = np.minimum(lengths, self.context)
        elif self.on_long == "split":
            pieces = -(-lengths // self.context)
        row = np.repeat(np.arange(len(keep)), pieces)  # of every sample, among the kept rows
        part = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        size = np.minimum(lengths[row] - part * self.context, self.context) if len(row) > len(keep) else lengths
        offsets = np.zeros(len(row) + 1, np.int64)
        np.cumsum(size, out=offsets[1:])
        packed = Ragged(_gather(tokens.values, starts, lengths), offsets)
        meta = {"tokens": size, "bytes": size * self._id_bytes()}
        for name in self._meta_names():
            meta[name] = frame.table.column(HIDDEN + name).to_numpy()[keep][row]
        return Block(frame.index[keep][row], part.astype(np.int32), packed, meta, sorted(frame.bad))

    def _id_bytes(self) -> int:
        """Fixed for the source. Files of other widths may share a batch with this row, and then it is held as wide as they are."""
        return max((e.dtype.itemsize for e in self._encoders.values()), default=4)

    def _meta_names(self) -> list[str]:
        return [t.name for t in self.transforms if isinstance(t, Meta)]

    def _between(self) -> list[tuple[Transform | None, str, Callable[[pa.Table, str], None]]]:
        """What the row stage reads: by which transform, which column, and how its type is checked."""
        rest = self.transforms[self._cut :]
        needs: list[tuple[Transform | None, str, Callable[[pa.Table, str], None]]] = []
        for t in rest:
            if not isinstance(t, Select):
                check = check_texts if isinstance(t, Tokenize) else check_ids if isinstance(t, Tokens) else check_numbers
                needs += [(t, name, check) for name in _used(t)]
        if not any(isinstance(t, (Tokenize, Tokens)) for t in rest):
            needs.append((None, IDS, check_ids))
        return needs

    def _settle(self, frame: _Frame) -> None:
        hidden = [name for name in frame.table.column_names if name.startswith(HIDDEN)]
        for t, name, check in self._needs:
            try:
                check(frame.table, name)
            except Unfit as fault:
                who = f"{t!r}" if t else NO_IDS
                frame.drop(dict.fromkeys(range(frame.table.num_rows), f"{who}: {fault}"))
                frame.table = frame.table.select([])
                return
        names = dict.fromkeys(name for _, name, _ in self._needs)
        if [*names, *hidden] != frame.table.column_names:
            frame.table = frame.table.select([*names, *hidden])

    # Building: what is needed from the file, and what cannot work whatever the file holds.

    def _raw_columns(self) -> tuple[str, ...] | None:
        """Raw columns in order of first use; None where user code sees all there are."""
        needed: dict[str, None] = {}
        made = False  # ids, by Tokenize or Tokens
        known: set[str] | None = None  # all the columns there are, once a Select has said so
        everything = mapped = False
        for t in self.transforms:
            uses = _used(t)
            if known is None and not mapped:  # what comes behind a Map may be the Map's own
                needed |= dict.fromkeys(c for c in uses if not (made and c == IDS))
            elif known is not None and (lost := [c for c in uses if c not in known]):
                self._refuse(t, f"column {lost[0]!r} does not get past an earlier Select", f"add {lost[0]!r} to that Select")
            if isinstance(t, (Tokenize, Tokens)):
                if made:
                    self._refuse(t, "an earlier Tokenize or Tokens has made the ids already", "keep one of them")
                made, known = True, None if known is None else known | {IDS}
            elif isinstance(t, Select):
                known = {*t.columns, IDS} if made else set(t.columns)
            elif t.user_code:
                everything = everything or (known is None and not mapped)
                mapped, known = (True, None) if isinstance(t, Map) else (mapped, known)
        if not made and known is not None and IDS not in known:
            raise TransformError(self.source, "transforms", "nothing makes token ids", NO_IDS)
        if not made and known is None and not mapped:
            needed |= {IDS: None}
        return None if everything else tuple(needed)

    def _refuse(self, t: Transform, problem: str, remedy: str = "") -> NoReturn:
        raise TransformError(self.source, repr(t), problem, remedy)

    # Running one transform over what is there.

    def _run(self, position: int, frame: _Frame, ids: RowIds | None) -> None:
        t = self.transforms[position]
        if not frame.table.num_rows:
            return
        try:
            if isinstance(t, Tokenize):
                _tokenize(frame, t.text, self._encoders[position])
            elif isinstance(t, Tokens):
                frame.put(IDS, column(frame.table, t.column, "lists of token ids"))
            elif isinstance(t, Select):
                _select(frame, t, made=[IDS] if any(isinstance(p, (Tokenize, Tokens)) for p in self.transforms[:position]) else [])
            elif isinstance(t, Meta):
                self._meta(frame, t)
            elif isinstance(t, Filter):
                self._filter(frame, t)
            elif isinstance(t, Map):
                assert ids is not None, "a Map is user code and runs in the slice stage"
                self._map(frame, t, position, ids)
        except Unfit as fault:
            self._refuse(t, str(fault))

    def _meta(self, frame: _Frame, t: Meta) -> None:
        if isinstance(t.value, str):
            numbers, bad = read_numbers(frame.table, t.value)
        elif t.rows:
            results = self._each(frame, t, t.value, as_number)
            numbers, bad = plain_numbers(np.asarray(results), t.name, {}) if results else (np.zeros(0, np.int64), {})
        else:
            array = np.asarray(self._whole(frame, t, t.value))
            if array.shape != (frame.table.num_rows,) or array.dtype.kind not in "biuf":
                self._refuse(t, f"wanted {frame.table.num_rows} numbers, one a row, found {array.dtype} of shape {array.shape}")
            numbers, bad = plain_numbers(array, t.name, {})
        frame.put(HIDDEN + t.name, pa.array(numbers))
        frame.drop(bad)

    def _filter(self, frame: _Frame, t: Filter) -> None:
        keep = np.asarray(self._each(frame, t, t.fn, as_bool) if t.rows else self._whole(frame, t, t.fn))
        if not frame.table.num_rows:
            return
        if keep.shape != (frame.table.num_rows,) or keep.dtype != np.bool_:
            self._refuse(t, f"wanted {frame.table.num_rows} booleans, one a row, found {keep.dtype} of shape {keep.shape}")
        frame.dropped += len(keep) - int(keep.sum())
        frame.keep(keep)

    def _map(self, frame: _Frame, t: Map, position: int, ids: RowIds) -> None:
        if t.rows:
            chance = self._generators(frame, position, ids) if t.rng else None
            rows = self._each(frame, t, t.fn, as_row, chance)
            names = dict.fromkeys(name for row in rows for name in row)
            made: Any = {name: [row.get(name) for row in rows] for name in names}
        else:
            made = self._whole(frame, t, t.fn)
        n = frame.table.num_rows
        if not n:
            return
        if not isinstance(made, Mapping) or not all(isinstance(name, str) and hasattr(c, "__len__") for name, c in made.items()):
            self._refuse(t, f"wanted a dict of columns, found {type(made).__name__}", "return {name: array or list, ...}")
        if wrong := [f"{name!r}: {len(c)}" for name, c in made.items() if len(c) != n]:
            self._refuse(t, f"wanted {n} rows in every column, found {', '.join(wrong)}", "drop rows with Filter, not with Map")
        bad: Bad = {}
        columns = {name: frame.table.column(name) for name in frame.table.column_names if name.startswith(HIDDEN)}
        for name, values in made.items():
            columns[name], faults = from_values(values, name)
            bad = faults | bad
        frame.table = pa.table(columns)
        frame.drop({i: f"{t!r}: {reason}" for i, reason in bad.items()})

    def _generators(self, frame: _Frame, position: int, ids: RowIds) -> Iterator[np.random.Generator]:
        """A generator per row, keyed by who the row is: the same whatever ran before it, here or elsewhere."""
        keys = keyed_hash(key64("map", self.seed, self.source, position), ids.epoch, ids.file, ids.row[frame.index])
        return (np.random.Generator(np.random.Philox(key=int(key))) for key in keys)

    def _whole(self, frame: _Frame, t: Transform, fn: Callable[..., Any]) -> Any:
        """``fn`` over all rows at once. If it raises, the rows that fail alone are reported and the others go again."""
        try:
            return fn(to_columns(frame.table))
        except MemoryError:
            raise
        except Exception as fault:
            bad: Bad = {}
            for i in range(frame.table.num_rows):
                try:
                    fn(to_columns(frame.table.slice(i, 1)))
                except MemoryError:
                    raise
                except Exception as alone:
                    bad[i] = _reason(t, alone)
            if not bad:
                problem = f"fails on a batch of {frame.table.num_rows} rows, on none of them alone: {_said(fault)}"
                raise TransformError(self.source, repr(t), problem) from fault
        frame.drop(bad)
        return self._whole(frame, t, fn) if frame.table.num_rows else []

    def _each(
        self, frame: _Frame, t: Transform, fn: Callable[..., Any], check: Callable[[Any], Any], chance: Iterator[Any] | None = None
    ) -> list[Any]:
        """``fn`` row by row; a row that fails, or gives what it should not, is reported and left out."""
        bad: Bad = {}
        results = []
        for i, row in enumerate(_rows(frame.table)):
            rng = next(chance) if chance is not None else None
            try:
                row = row() if callable(row) else row
                results.append(check(fn(row) if rng is None else fn(row, rng)))
            except MemoryError:
                raise
            except Exception as fault:
                bad[i] = _reason(t, fault)
        frame.drop(bad)
        return results


class _Frame:
    """Rows on their way through a stage: which input rows they are, and what became of the others."""

    __slots__ = ("bad", "dropped", "index", "table")

    def __init__(self, table: pa.Table) -> None:
        self.table, self.index = table, np.arange(table.num_rows)
        self.bad: list[tuple[int, str]] = []
        self.dropped = 0

    def put(self, name: str, values: pa.Array) -> None:
        at = self.table.column_names.index(name) if name in self.table.column_names else -1
        self.table = self.table.append_column(name, values) if at < 0 else self.table.set_column(at, name, values)

    def report(self, bad: Mapping[int, str]) -> np.ndarray:
        """Notes the bad rows and returns the others, as positions in the table."""
        self.bad += [(int(self.index[i]), reason) for i, reason in bad.items()]
        mask = np.ones(self.table.num_rows, bool)
        mask[list(bad)] = False
        return np.flatnonzero(mask)

    def drop(self, bad: Mapping[int, str]) -> None:
        if bad:
            self.take(self.report(bad))

    def keep(self, mask: np.ndarray) -> None:
        if not mask.all():
            self.take(np.flatnonzero(mask))

    def take(self, rows: np.ndarray) -> None:
        self.table, self.index = self.table.take(pa.array(rows)), self.index[rows]


def _rebuild(source: str, transforms: tuple[Transform, ...], seed: int, context: int, on_long: str) -> Pipeline:
    return Pipeline(source, transforms, seed=seed, context=context, on_long=on_long)


def _used(t: Transform) -> tuple[str, ...]:
    if isinstance(t, Tokenize):
        return (t.text,)
    if isinstance(t, Tokens):
        return (t.column,)
    if isinstance(t, Select):
        return t.columns
    return (t.value,) if isinstance(t, Meta) and isinstance(t.value, str) else ()


def _nothing(names: list[str], bad: list[tuple[int, str]]) -> Block:
    none = np.zeros(0, np.int64)
    meta = dict.fromkeys(("tokens", "bytes", *names), none)
    # uint8: joined with any other ids, it leaves their type as it is
    return Block(none, np.zeros(0, np.int32), Ragged(np.zeros(0, np.uint8), np.zeros(1, np.int64)), meta, sorted(bad))


def _gather(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The given ranges, in order and joined; runs of ranges that touch are moved whole, and a single run is a view."""
    if not len(starts):
        return values[:0]
    stops = starts + lengths
    breaks = np.flatnonzero(starts[1:] != stops[:-1])
    first, last = starts[np.r_[0, breaks + 1]], stops[np.r_[breaks, len(stops) - 1]]
    runs = [values[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)]
    return runs[0] if len(runs) == 1 else np.concatenate(runs)


def _tokenize(frame: _Frame, text: str, encoder: Encoder) -> None:
    texts, bad = read_texts(frame.table, text)
    if bad:
        texts = [texts[i] for i in range(len(texts)) if i not in bad]
        frame.drop(bad)
    try:
        ids = encoder.encode(texts)
    except BaseException as fault:
        if not _is_row_fault(fault):
            raise
        ids = _encode_each(frame, texts, encoder)
    frame.put(IDS, ids_column(ids))


def _encode_each(frame: _Frame, texts: list[str], encoder: Encoder) -> Ragged:
    bad: Bad = {}
    parts = []
    for i, text in enumerate(texts):
        try:
            parts.append(encoder.encode([text]))
        except BaseException as fault:
            if not _is_row_fault(fault):
                raise
            bad[i] = f"cannot be tokenized: {_said(fault)}"
    frame.drop(bad)
    return Ragged.concat(parts)


def _is_row_fault(fault: BaseException) -> bool:
    """A Rust panic is no Exception to Python, and yet the text's fault."""
    return (isinstance(fault, Exception) and not isinstance(fault, MemoryError)) or type(fault).__name__ == "PanicException"


def _select(frame: _Frame, t: Select, made: list[str]) -> None:
    for name in t.columns:
        column(frame.table, name, "any type")
    hidden = [name for name in frame.table.column_names if name.startswith(HIDDEN)]
    frame.table = frame.table.select([*t.columns, *(name for name in made if name not in t.columns), *hidden])


def _rows(table: pa.Table) -> Iterator[Any]:
    """Rows as dicts; where the table does not convert (text that is no UTF-8), as calls that each convert or fail alone."""
    try:
        yield from to_rows(table)
    except UnicodeDecodeError:
        for i in range(table.num_rows):
            yield lambda i=i: to_rows(table.slice(i, 1))[0]


def _said(fault: BaseException) -> str:
    text = f"{type(fault).__name__}: {fault}" if str(fault) else type(fault).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def _reason(t: Transform, fault: BaseException) -> str:
    return f"{t!r}: {_said(fault)}"
