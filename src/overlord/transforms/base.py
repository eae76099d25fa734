"""Transform specifications as values, and the execution of user functions over rows."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa

from overlord.checks import where_raised
from overlord.errors import JobError, TransformError
from overlord.hashing import digest
from overlord.sample import Column, Ragged
from overlord.sources.tables import arrow_of
from overlord.transforms.columns import (
    Bad,
    check_meta,
    from_values,
    numbers_of,
    plain_numbers,
    read_meta,
    retyped,
    to_columns,
    to_rows,
    unfit_rows,
    without_dictionaries,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from overlord.sample import Column, Items, Ragged

# ----------------------------------------------------------------------------
# Transform specifications as values, and the tables that pass between the stages.
#
# A specification is frozen and cheap to import and to build. It reports problems at construction
# as far as they show without reading files. ``pipeline.py`` executes specifications; pyarrow and
# tokenizers are imported only there.

RESERVED_META = ("tokens", "bytes")  # every sample has these


class Transform(Protocol):
    """One step of a pipeline. ``user_code``: the result of a row may depend on its batch."""

    kind: ClassVar[str]

    @property
    def user_code(self) -> bool: ...

    @property
    def holds_lock(self) -> bool: ...

    def fingerprint(self) -> str: ...


@dataclass(frozen=True, slots=True, eq=False)
class RowIds:
    """Identity of the rows of a slice: the fields of ``SampleId`` that may seed randomness."""

    epoch: int
    file: int
    row: np.ndarray  # int64


@dataclass(slots=True, eq=False)
class StagedRows:
    """Output of the slice stage for one slice.

    ``index`` and ``bad`` refer to rows of the input slice.
    """

    table: pa.Table
    index: np.ndarray  # int64: input row of every row of ``table``
    bad: list[tuple[int, str]] = field(default_factory=list)  # (input row, reason), ascending
    dropped: int = 0  # rows dropped by a Filter: counted, never quarantined


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class Block:
    """Samples in stream order of their rows, ready for the loader's buffer."""

    index: np.ndarray  # int64: input row of every sample
    part: np.ndarray  # int32
    # starts at 0 without unused values; a view of Arrow memory unless rows had to be removed
    tokens: Ragged
    # "tokens" and "bytes" (int64) and the user's columns (int64 or float64, or ragged of these).
    meta: dict[str, Column]
    bad: list[tuple[int, str]] = field(default_factory=list)  # (input row, reason), ascending
    items: Items | None = None  # images of the samples; None: the source has none
    image_bytes_in: int = 0  # bytes of their files
    image_bytes_out: int = 0  # bytes of their pixels
    # int64: input rows that lost tokens to ``on_long``, ascending.
    long: np.ndarray = field(default_factory=_none)
    lost: np.ndarray = field(default_factory=_none)  # int64: number of tokens that each lost

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True, slots=True, repr=False)
class Tokens:
    """Token ids that are already in a column of lists, of any integer type."""

    column: str = "tokens"
    kind: ClassVar[str] = "tokens"
    user_code: ClassVar[bool] = False
    holds_lock: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse("Tokens", column_problems("column", self.column))

    def __repr__(self) -> str:
        return f"Tokens({self.column!r})"

    def fingerprint(self) -> str:
        return digest("tokens", self.column)


@dataclass(frozen=True, slots=True, repr=False)
class Map:
    """A function over a slice, ``fn(columns) -> columns``; with ``rows``, ``fn(row) -> row``.

    With ``rows`` and ``rng`` it is ``fn(row, rng) -> row``.

    The result of ``fn`` replaces the columns. ``holds_lock``: ``fn`` is slow pure Python, so the
    source should be transformed in a separate process. ``fn`` must then be a function of a module.
    """

    fn: Callable[..., Any]
    rows: bool = field(default=False, kw_only=True)
    rng: bool = field(default=False, kw_only=True)
    holds_lock: bool = field(default=False, kw_only=True)
    kind: ClassVar[str] = "map"
    user_code: ClassVar[bool] = True

    def __post_init__(self) -> None:
        problems = function_problems(self.fn) + flag_problems(self, "rows", "rng", "holds_lock")
        if self.rng is True and self.rows is not True:
            problems.append("rng: a random Map works row by row; add rows=True")
        refuse("Map", problems)

    def __repr__(self) -> str:
        return f"Map({function_name(self.fn)}{flags(self, 'rows', 'rng', 'holds_lock')})"

    def fingerprint(self) -> str:
        return digest("map", function_fingerprint(self.fn), f"{self.rows}{self.rng}")


@dataclass(frozen=True, slots=True, repr=False)
class Filter:
    """Keep the rows for which ``fn(columns)`` (with ``rows``, ``fn(row)``) returns True.

    Count the others.
    """

    fn: Callable[..., Any]
    rows: bool = field(default=False, kw_only=True)
    holds_lock: bool = field(default=False, kw_only=True)
    kind: ClassVar[str] = "filter"
    user_code: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse("Filter", function_problems(self.fn) + flag_problems(self, "rows", "holds_lock"))

    def __repr__(self) -> str:
        return f"Filter({function_name(self.fn)}{flags(self, 'rows', 'holds_lock')})"

    def fingerprint(self) -> str:
        return digest("filter", function_fingerprint(self.fn), str(self.rows))


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Select:
    """Keep only these columns. Before a Map or Filter, only these are read from the file."""

    columns: tuple[str, ...]
    kind: ClassVar[str] = "select"
    user_code: ClassVar[bool] = False
    holds_lock: ClassVar[bool] = False

    def __init__(self, *columns: str) -> None:
        object.__setattr__(self, "columns", columns)
        problems = [p for i, c in enumerate(columns) for p in column_problems(f"columns[{i}]", c)]
        if not columns:
            problems.append("columns: expected at least one")
        if not problems and len(set(columns)) < len(columns):
            problems.append(
                "columns: "
                f"{', '.join(sorted({c for c in columns if columns.count(c) > 1}))} named "
                "twice"
            )
        refuse("Select", problems)

    def __repr__(self) -> str:
        return f"Select({', '.join(map(repr, self.columns))})"

    def fingerprint(self) -> str:
        return digest("select", *self.columns)


@dataclass(frozen=True, slots=True, repr=False)
class Meta:
    """A number per sample for strategies, next to ``tokens`` and ``bytes``.

    It is a column, or a function of the columns.

    A column of lists gives several numbers per sample, one per item: ``Meta("image_patches",
    "image_patches")``. They count something, so none may be negative. When ``on_long="split"``
    splits a sample, its items stay with the first piece. Samples of a source without the column
    have no items.
    """

    name: str
    # A column name, or fn(columns) -> one value per row; with rows, fn(row) -> value.
    value: str | Callable[..., Any]
    rows: bool = field(default=False, kw_only=True)
    holds_lock: bool = field(default=False, kw_only=True)
    kind: ClassVar[str] = "meta"

    def __post_init__(self) -> None:
        problems = column_problems("name", self.name) + flag_problems(self, "rows", "holds_lock")
        if self.name in RESERVED_META:
            problems.append(f"name: every sample has {self.name!r} already; choose another")
        if not callable(self.value) and column_problems("value", self.value):
            problems.append(f"value: expected a column's name or a function, got {self.value!r}")
        if isinstance(self.value, str) and (self.rows or self.holds_lock):
            problems.append("rows, holds_lock: only for a function")
        refuse("Meta", problems)

    @property
    def user_code(self) -> bool:
        return callable(self.value)

    def __repr__(self) -> str:
        shown = repr(self.value) if isinstance(self.value, str) else function_name(self.value)
        return f"Meta({self.name!r}, {shown}{flags(self, 'rows', 'holds_lock')})"

    def fingerprint(self) -> str:
        body = self.value if isinstance(self.value, str) else function_fingerprint(self.value)
        return digest(
            "meta", self.name, "fn" if callable(self.value) else "column", body, str(self.rows)
        )


def refuse(where: str, problems: list[str]) -> None:
    if problems:
        raise JobError(problems, where)


def column_problems(name: str, value: Any) -> list[str]:
    return [] if isinstance(value, str) and value else [f"{name}: expected a name, got {value!r}"]


def function_problems(fn: Any) -> list[str]:
    return [] if callable(fn) else [f"fn: expected a function, got {fn!r}"]


def flag_problems(spec: Any, *names: str) -> list[str]:
    return [
        f"{n}: expected True or False, got {getattr(spec, n)!r}"
        for n in names
        if not isinstance(getattr(spec, n), bool)
    ]


def flags(spec: Any, *names: str) -> str:
    return "".join(f", {n}=True" for n in names if getattr(spec, n))


def function_name(fn: Any) -> str:
    if isinstance(fn, functools.partial):
        return f"partial({function_name(fn.func)})"
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


def function_fingerprint(fn: Any) -> str:
    """Return a digest that is the same for the same code and captured constants, in any process.

    It covers the source text if there is one, else byte code and constants. Captured values count
    if they are plain (numbers, text, tuples of them). Other values are ignored: their address
    differs in every process.
    """
    if isinstance(fn, functools.partial):
        return digest(
            "partial",
            function_fingerprint(fn.func),
            _constant_text(fn.args),
            _constant_text(fn.keywords),
        )
    own = getattr(fn, "fingerprint", None)
    if callable(own) and not inspect.isclass(fn):
        return digest("own", str(own()))
    if inspect.ismethod(fn):
        return digest("method", function_fingerprint(fn.__func__), _object_fingerprint(fn.__self__))
    if inspect.isfunction(fn):
        cells = [_constant_text(_cell(cell)) for cell in fn.__closure__ or ()]
        return digest(
            "function",
            _code_text(fn),
            _constant_text(fn.__defaults__),
            _constant_text(fn.__kwdefaults__),
            *cells,
        )
    if inspect.isbuiltin(fn) or inspect.isclass(fn):
        return digest("named", f"{getattr(fn, '__module__', '')}.{function_name(fn)}")
    return digest("object", _object_fingerprint(fn))


def _object_fingerprint(thing: Any) -> str:
    cls = thing if inspect.isclass(thing) else type(thing)
    try:
        text = inspect.getsource(cls)
    except (OSError, TypeError):
        text = f"{cls.__module__}.{cls.__qualname__}"
    state = {} if inspect.isclass(thing) else getattr(thing, "__dict__", {})
    return digest(text, *(f"{name}={_constant_text(state[name])}" for name in sorted(state)))


def _code_text(fn: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(fn))
    except (OSError, TypeError):
        return fn.__qualname__ + _bytecode(fn.__code__)


def _bytecode(code: Any) -> str:
    """Return byte code with its constants, nested functions included, but without its location."""
    constants = [_bytecode(c) if inspect.iscode(c) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()}({', '.join(constants)}; {', '.join(code.co_names)})"


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet bound: a recursive function
        return None


def _constant_text(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_constant_text, value))}]"
    if isinstance(value, dict):
        items = (f"{_constant_text(k)}: {_constant_text(v)}" for k, v in value.items())
        return f"{{{', '.join(sorted(items))}}}"
    if inspect.isfunction(value):
        return _code_text(value)
    return type(value).__qualname__


# ----------------------------------------------------------------------------
# Rows inside a stage, and the execution of user functions over them.
#
# A failing row never affects the others.


class RowFrame:
    """Rows inside a stage: their input rows, and the outcome of the removed ones."""

    __slots__ = ("at", "bad", "dropped", "images", "index", "table")

    def __init__(self, table: pa.Table) -> None:
        self.table, self.index = without_dictionaries(table), np.arange(table.num_rows)
        self.bad: list[tuple[int, str]] = []
        self.dropped = 0
        self.at = -1  # the row that a user function is processing; -1: all rows
        self.images: Any = None  # images of the rows (image_rows.PlannedImages), once they are read

    def put(self, name: str, values: pa.Array) -> None:
        at = self.table.column_names.index(name) if name in self.table.column_names else -1
        self.table = (
            self.table.append_column(name, values)
            if at < 0
            else self.table.set_column(at, name, values)
        )

    def report(self, bad: Mapping[int, str]) -> np.ndarray:
        """Record the bad rows and return the others, as positions in the table."""
        self.bad += [(int(self.index[i]), reason) for i, reason in bad.items()]
        mask = np.ones(self.table.num_rows, bool)
        mask[list(bad)] = False
        return np.flatnonzero(mask)

    def drop(self, bad: Mapping[int, str]) -> None:
        if bad:
            self.take(self.report(bad))

    def drop_all(self, reason: str) -> None:
        self.drop(dict.fromkeys(range(self.table.num_rows), reason))

    def keep(self, mask: np.ndarray) -> None:
        if not mask.all():
            self.take(np.flatnonzero(mask))

    def take(self, rows: np.ndarray) -> None:
        self.table, self.index = self.table.take(arrow_of(rows)), self.index[rows]


def run_whole(
    frame: RowFrame, t: Transform, fn: Callable[..., Any], check: Callable[[Any, int], Any]
) -> Any:
    """Call ``fn`` with all rows.

    If it raises, call it with each row alone and report the rows on which it raises.
    ``check(result, rows)`` validates a result. An invalid result is a fault of the function, not of
    a row, and ends the job.
    """
    try:
        result = fn(to_columns(frame.table))
    except MemoryError:
        raise
    except Exception:
        return _run_alone(frame, t, fn, check)
    return check(result, frame.table.num_rows)


def _run_alone(
    frame: RowFrame, t: Transform, fn: Callable[..., Any], check: Callable[[Any, int], Any]
) -> Any:
    bad: Bad = {}
    alone = []
    for i in range(frame.table.num_rows):
        frame.at = i
        try:
            result = fn(to_columns(frame.table.slice(i, 1)))
        except MemoryError:
            raise
        except Exception as fault:
            bad[i] = f"{t!r}: {error_text(fault)}"
        else:
            alone.append(check(result, 1))
    frame.at = -1
    frame.drop(bad)
    if alone and isinstance(alone[0], Mapping):
        return join_rows([{name: values[0] for name, values in row.items()} for row in alone])
    return [values[0] for values in alone]


def join_rows(rows: list[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns, in order of first appearance; a missing value is null."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def run_each(
    frame: RowFrame,
    t: Transform,
    fn: Callable[..., Any],
    check: Callable[[Any], Any],
    generators: Iterator[Any] | None = None,
) -> list[Any]:
    """Call ``fn`` row by row.

    A row that fails or returns an invalid value is reported and removed.
    """
    bad: Bad = {}
    results = []
    for i, row in enumerate(_rows(frame.table)):
        frame.at = i
        rng = next(generators) if generators is not None else None
        try:
            row = row() if callable(row) else row
            results.append(check(fn(row) if rng is None else fn(row, rng)))
        except MemoryError:
            raise
        except Exception as fault:
            bad[i] = f"{t!r}: {error_text(fault)}"
    frame.at = -1
    frame.drop(bad)
    return results


def _rows(table: pa.Table) -> Iterator[Any]:
    """Yield rows as dicts.

    If the table does not convert (text that is not UTF-8), yield calls that convert one row each.
    """
    try:
        yield from to_rows(table)
    except UnicodeDecodeError:
        for i in range(table.num_rows):
            yield lambda i=i: to_rows(table.slice(i, 1))[0]


def error_text(fault: BaseException) -> str:
    text = f"{type(fault).__name__}: {fault}" if str(fault) else type(fault).__name__
    return (text if len(text) <= 200 else text[:197] + "...") + where_raised(fault)


# ----------------------------------------------------------------------------
# Validation of the results of user functions over whole slices.
#
# An invalid result is a fault of the function, not of a row: it raises TransformError.


def value_per_row(
    source: str, t: Transform, kinds: str, expected: str
) -> Callable[[Any, int], np.ndarray]:
    """Return a check for one value per row, of one of the numpy ``kinds``."""

    def check(result: Any, rows: int) -> np.ndarray:
        try:
            values = np.asarray(result)
        except ValueError:  # lists of several lengths
            problem = f"expected {rows} {expected}, one a row, got {type(result).__name__}"
            raise TransformError(source, repr(t), problem) from None
        if values.shape != (rows,) or values.dtype.kind not in kinds:
            problem = (
                f"expected {rows} {expected}, one a row, got {values.dtype} of shape {values.shape}"
            )
            raise TransformError(source, repr(t), problem)
        return values

    return check


def meta_per_row(source: str, t: Transform) -> Callable[[Any, int], Any]:
    """Return a check for one number, or one list of numbers, per row."""
    numbers = value_per_row(source, t, "biuf", "numbers")

    def check(result: Any, rows: int) -> Any:
        if isinstance(result, Ragged):
            result = [result[i] for i in range(len(result))]
        lists = isinstance(result, (list, tuple)) and any(
            isinstance(v, (list, tuple, np.ndarray)) for v in result
        )
        if lists and len(result) == rows:
            return list(result)
        values = numbers(result, rows)
        # An array of all values would round large whole numbers.
        return result if isinstance(result, (list, tuple)) else values

    return check


def columns_per_row(source: str, t: Transform) -> Callable[[Any, int], Mapping[str, Any]]:
    """Return a check for a dict of columns with one value per row."""

    def check(result: Any, rows: int) -> Mapping[str, Any]:
        plain = isinstance(result, Mapping) and bool(result)
        if not plain or not all(
            isinstance(name, str) and hasattr(c, "__len__") for name, c in result.items()
        ):
            problem = f"expected a dict of columns, got {type(result).__name__}"
            raise TransformError(source, repr(t), problem, "return {name: array or list, ...}")
        if wrong := [f"{name!r}: {len(c)}" for name, c in result.items() if len(c) != rows]:
            problem = f"expected {rows} rows in every column, got {', '.join(wrong)}"
            raise TransformError(source, repr(t), problem, "drop rows with Filter, not with Map")
        checked: Mapping[str, Any] = result
        return checked

    return check


def meta_values(made: Any, name: str) -> tuple[Column, Bad]:
    """Return the results of a user function for all rows as numbers, or lists of numbers."""
    if isinstance(made, np.ndarray):
        return plain_numbers(made, name, {})
    if not any(isinstance(v, list | tuple | np.ndarray) for v in made):
        return numbers_of(made, name)
    values, misfits = from_values(made, name)
    table = pa.table({name: values})
    unfit, retype = unfit_rows(table, name, check_meta)
    if retype:
        table = retyped(table, name, unfit)
    column, bad = read_meta(table, name)
    return column, bad | unfit | misfits
