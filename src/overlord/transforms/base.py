"""Transform specifications as values, and the tables that pass between the stages.

A specification is frozen, and cheap to import and to build. Its constructor raises JobError for all
problems that it can detect without reading files. ``pipeline.py`` executes specifications; only
execution imports pyarrow and tokenizers.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from overlord.checks import names_arguments
from overlord.content import Content
from overlord.errors import JobError
from overlord.hashing import digest
from overlord.sample import LOSS_RUNS, LOSS_WEIGHTS, Column, Ragged, join_rows, take_rows

if TYPE_CHECKING:
    import pyarrow as pa

    from overlord.content import Items


IDS = "tokens"  # the column of the ids after Tokenize or Tokens
RESERVED_META = ("tokens", "bytes", LOSS_WEIGHTS, LOSS_RUNS)  # metadata that the package reports


class Transform(Protocol):
    """One step of a pipeline; with ``user_code`` the result of a row may depend on its slice."""

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


_none = functools.partial(np.zeros, 0, np.int64)


@dataclass(slots=True, eq=False)
class Block:
    """Samples in the order of their rows, ready for the loader's buffer."""

    index: np.ndarray  # int64: input row of every sample
    part: np.ndarray  # int32
    # Offsets start at 0, without unused values; a view of Arrow memory unless rows were removed.
    tokens: Ragged
    # "tokens" and "bytes" (int64) and the user's columns (int64 or float64, or ragged of these).
    meta: dict[str, Column]
    bad: list[tuple[int, str]] = field(default_factory=list)  # (input row, reason), ascending
    items: Items | None = None  # images of the samples; None: the source has none
    image_bytes_in: int = 0  # bytes of the image files
    image_bytes_out: int = 0  # bytes of the pixels of the images
    # int64: input rows that lost tokens to ``on_long``, ascending.
    long: np.ndarray = field(default_factory=_none)
    lost: np.ndarray = field(default_factory=_none)  # int64: number of tokens that each lost
    weights: Ragged | None = None  # loss weights of the tokens; None: all are 1

    def __len__(self) -> int:
        return len(self.index)


def failed_block(n: int, reason: str) -> Block:
    """Return a block in which all n rows are bad."""
    none = np.zeros(0, np.int64)
    empty = Ragged(np.zeros(0, np.uint8), np.zeros(1, np.int64))
    return Block(
        index=none,
        part=none.astype(np.int32),
        tokens=empty,
        meta={"tokens": none, "bytes": none},
        bad=[(i, reason) for i in range(n)],
    )


def merge_blocks(blocks: list[tuple[np.ndarray, Block]]) -> Block:
    """Return one block from the blocks of separate tables, in the order of their rows.

    Each block comes with the positions of its rows in the merged order.
    """
    full = [(rows, b) for rows, b in blocks if len(b.index)]
    bad = sorted((int(rows[i]), why) for rows, b in blocks for i, why in b.bad)
    at = np.concatenate([rows[b.long] for rows, b in blocks])
    long, lost = np.sort(at), np.concatenate([b.lost for _, b in blocks])[np.argsort(at)]
    if not full:
        return replace(
            blocks[0][1], bad=bad, image_bytes_in=0, image_bytes_out=0, long=long, lost=lost
        )
    index = np.concatenate([rows[b.index] for rows, b in full])
    order = np.argsort(index, kind="stable")
    contents = [Content(b.tokens, b.items, b.weights) for _, b in full]
    content = Content.concat(contents).take(order)
    return Block(
        index=index[order],
        part=np.concatenate([b.part for _, b in full])[order],
        tokens=content.tokens,
        items=content.items,
        weights=content.weights,
        meta={
            n: take_rows(join_rows([b.meta[n] for _, b in full]), order) for n in full[0][1].meta
        },
        bad=bad,
        image_bytes_in=sum(b.image_bytes_in for _, b in full),
        image_bytes_out=sum(b.image_bytes_out for _, b in full),
        long=long,
        lost=lost,
    )


@names_arguments
@dataclass(frozen=True, slots=True, repr=False)
class Tokens:
    """Use token ids from a column of lists of whole numbers, of any numeric type.

    ``loss``: a column with a weight of at least 0 for every token. The loss of predicting a token
    is multiplied by its weight; a token of weight 0 is no label. None: all weights are 1. After
    ``Pair`` it may be two columns, for the chosen and the rejected response.
    """

    column: str = "tokens"
    loss: str | tuple[str, str] | None = field(default=None, kw_only=True)
    kind: ClassVar[str] = "tokens"
    user_code: ClassVar[bool] = False
    holds_lock: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = column_problems("column", self.column)
        if isinstance(self.loss, (list, tuple)) and len(self.loss) == 2:
            object.__setattr__(self, "loss", tuple(self.loss))
            problems += [p for name in self.loss for p in column_problems("loss", name)]
        elif self.loss is not None:
            problems += column_problems("loss", self.loss)
        if not problems and self.loss == self.column:
            problems.append(f"loss: expected another column than the token ids, got {self.loss!r}")
        refuse("Tokens", problems)

    def __repr__(self) -> str:
        return f"Tokens({self.column!r}{'' if self.loss is None else f', loss={self.loss!r}'})"

    def fingerprint(self) -> str:
        loss = [] if self.loss is None else [self.loss] if isinstance(self.loss, str) else self.loss
        return digest("tokens", self.column, *loss)


@names_arguments
@dataclass(frozen=True, slots=True, repr=False)
class Map:
    """Apply a function to a slice, ``fn(columns) -> columns``, or with ``rows`` to each row.

    With ``rows`` the function is ``fn(row) -> row``, with ``rows`` and ``rng``
    ``fn(row, rng) -> row``. Its result replaces the columns. ``holds_lock``: ``fn`` is slow pure
    Python, so the source is transformed in a separate process. ``fn`` must then be a function of a
    module.
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
            problems.append("rng: expected rows=True, got False; a random Map runs row by row")
        refuse("Map", problems)

    def __repr__(self) -> str:
        return f"Map({function_name(self.fn)}{flags(self, 'rows', 'rng', 'holds_lock')})"

    def fingerprint(self) -> str:
        return digest("map", function_fingerprint(self.fn), f"{self.rows}{self.rng}")


@dataclass(frozen=True, slots=True, repr=False)
class Filter:
    """Keep the rows for which ``fn(columns)`` (with ``rows``, ``fn(row)``) returns True.

    ``fn(columns)`` returns one boolean per row. Rows that are dropped are counted, not quarantined.
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
    """Keep only these columns, and token ids of an earlier transform.

    Before a Map or Filter, only these columns are read from the file.
    """

    columns: tuple[str, ...]
    kind: ClassVar[str] = "select"
    user_code: ClassVar[bool] = False
    holds_lock: ClassVar[bool] = False

    def __init__(self, *columns: str) -> None:
        object.__setattr__(self, "columns", columns)
        problems = [p for i, c in enumerate(columns) for p in column_problems(f"columns[{i}]", c)]
        if not columns:
            problems.append("columns: expected at least one name, got none")
        if not problems and len(set(columns)) < len(columns):
            problems.append(
                "columns: expected different names, got these twice: "
                f"{', '.join(sorted({c for c in columns if columns.count(c) > 1}))}"
            )
        refuse("Select", problems)

    def __repr__(self) -> str:
        return f"Select({', '.join(map(repr, self.columns))})"

    def fingerprint(self) -> str:
        return digest("select", *self.columns)


@dataclass(frozen=True, slots=True, repr=False)
class Meta:
    """Give each sample a number for strategies, in addition to ``tokens`` and ``bytes``.

    The number comes from a column, or from a function of the columns. A column of lists gives
    several numbers per sample, one per item: ``Meta("image_patches", "image_patches")``. Such
    numbers are counts, so none may be negative. When ``on_long="split"`` splits a sample, its items
    stay with the first piece. Samples of a source without the column have no items.
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
            problems.append(f"name: expected a new name, got {self.name!r}, which every sample has")
        if not callable(self.value) and column_problems("value", self.value):
            problems.append(f"value: expected a column's name or a function, got {self.value!r}")
        if isinstance(self.value, str) and (self.rows or self.holds_lock):
            problems.append("rows, holds_lock: expected them only with a function, got a column")
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

    The digest covers the source text if there is one, else byte code and constants. Captured
    values count if they are plain (numbers, text, containers of these) or functions. Of other
    values only the type counts, since their address differs in every process. A callable object
    with a method ``fingerprint`` supplies its own digest.
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
    """Return byte code with its constants and nested functions, but without file and lines."""
    constants = [_bytecode(c) if inspect.iscode(c) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()}({', '.join(constants)}; {', '.join(code.co_names)})"


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet, as in a recursive function
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


def empty_block(names: Sequence[str], bad: list[tuple[int, str]]) -> Block:
    """Return a block of failed rows alone, with metadata of these names."""
    none = np.zeros(0, np.int64)
    meta: dict[str, Column] = dict.fromkeys(("tokens", "bytes", *names), none)
    # Ids of type uint8 do not change the type of other ids at concatenation.
    return Block(
        none,
        np.zeros(0, np.int32),
        Ragged(np.zeros(0, np.uint8), np.zeros(1, np.int64)),
        meta,
        sorted(bad),
    )
