"""Values as bytes: a header and columns. Only a closed set of types can be decoded."""

from __future__ import annotations

import builtins
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from types import GenericAlias, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from overlord import errors
from overlord.checks import did_you_mean
from overlord.documents import SampleDocuments
from overlord.errors import FrameError
from overlord.mesh import Batch, ClientPlaceTree
from overlord.messages import batches, control, data, launcher
from overlord.messages.control import EncodedState, StreamState
from overlord.plan.plan import Assignment, LoadingPlan
from overlord.plan.tasks import PlanTasks, TaskRules, TaskTable
from overlord.sample import Buffer, SampleId
from overlord.transport.frame import pack, unpack
from overlord.transport.value_codec import (
    ARRAY,
    ERROR,
    OPEN_PLAIN,
    OPENERS,
    PACKERS,
    PLAIN,
    RECORD,
    SMALL,
    TUPLE,
    Check,
    Packer,
    Refused,
    Tree,
    check_for,
    decode,
    describe_value,
    encode,
    open_small,
    open_value,
    pack_array,
    pack_value,
    wants,
)

# ----------------------------------------------------------------------------
# Fast paths for the most frequent record fields.
#
# These fields are a column, a tuple of hundreds of integers, and a weight per source. A fast path
# returns ``NOT`` if it does not apply; the general codec then handles the value. So no fast path
# decides which values are valid. ``msgspec.convert`` checks tuples in C. It is stricter than
# necessary: a numpy number in a tuple goes through the general codec.

NOT: Any = object()

FastDecoder = Callable[[Any, list[np.ndarray]], Any]

_PLAIN: dict[Any, frozenset[type]] = {
    int: frozenset({int}),
    float: frozenset({float, int}),
    bool: frozenset({bool}),
    str: frozenset({str}),
    bytes: frozenset({bytes}),
    type(None): frozenset({type(None)}),
    Any: OPEN_PLAIN,
    object: OPEN_PLAIN,
}
_NUMBERS: dict[Any, Any] = {
    int: int,
    float: int | float,
    bool: bool,
}  # a float field keeps integers as integers


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def plain_types(annotation: Any) -> frozenset[type]:
    """Return the types whose values match the annotation without a further check."""
    return frozenset().union(*(_PLAIN.get(m, frozenset()) for m in members(annotation)))


def opener_for(annotation: Any) -> FastDecoder | None:
    """Return a fast path from the header to a value that matches the annotation, or None."""
    for member in members(annotation):
        origin, args = get_origin(member), get_args(member)
        if member is np.ndarray:
            return _open_array
        if origin is tuple and args[1:] == (Ellipsis,) and (args[0] in _NUMBERS or args[0] is str):
            return _items_opener(GenericAlias(tuple, (_NUMBERS.get(args[0], str), ...)))
        if (
            origin is tuple
            and args[1:] == (Ellipsis,)
            and (each := opener_for(args[0])) is not None
        ):
            return _each_opener(each)
        if origin in (dict, Mapping) and args[0] is str and args[1] in _NUMBERS:
            return _mapping_opener(GenericAlias(dict, (str, _NUMBERS[args[1]])))
        if origin in (dict, Mapping) and args[0] is str and np.ndarray in members(args[1]):
            return _open_arrays
    return None


def packer_for(annotation: Any) -> Callable[[Any], Any] | None:
    """Return a fast path from a tuple of numbers to the header, or None."""
    for member in members(annotation):
        args = get_args(member)
        if get_origin(member) is tuple and args[1:] == (Ellipsis,) and args[0] in _NUMBERS:
            return _items_packer(GenericAlias(tuple, (_NUMBERS[args[0]], ...)))
    return None


def _open_array(tree: Any, columns: list[np.ndarray]) -> Any:
    if type(tree) is list and tree:
        if tree[0] == ARRAY and len(tree) == 2:
            i = tree[1]
            if type(i) is int and 0 <= i < len(columns):
                return columns[i]
        elif tree[0] == SMALL and type(tree[0]) is int:
            return open_small(tree)
    return NOT


def _open_arrays(tree: Any, columns: list[np.ndarray]) -> Any:
    if type(tree) is not dict:
        return NOT
    found = {}
    for key, item in tree.items():
        found[key] = array = _open_array(item, columns)
        if array is NOT or type(key) is not str:
            return NOT
    return found


def _items_opener(wanted: Any) -> FastDecoder:
    def fast(tree: Any, columns: list[np.ndarray]) -> Any:
        if type(tree) is not list or not tree or type(tree[0]) is not int or tree[0] != TUPLE:
            return NOT
        try:
            return msgspec.convert(tree[1:], wanted)
        except msgspec.ValidationError:
            return NOT

    return fast


def _each_opener(each: FastDecoder) -> FastDecoder:
    def fast(tree: Any, columns: list[np.ndarray]) -> Any:
        if type(tree) is not list or not tree or type(tree[0]) is not int or tree[0] != TUPLE:
            return NOT
        found = tuple([each(item, columns) for item in tree[1:]])
        return NOT if any(value is NOT for value in found) else found

    return fast


def _mapping_opener(wanted: Any) -> FastDecoder:
    def fast(tree: Any, columns: list[np.ndarray]) -> Any:
        if type(tree) is not dict:
            return NOT
        try:
            return msgspec.convert(tree, wanted)
        except msgspec.ValidationError:
            return NOT

    return fast


def _items_packer(wanted: Any) -> Callable[[Any], Any]:
    def fast(value: Any) -> Any:
        if type(value) is not tuple:
            return NOT
        try:
            return [TUPLE, *msgspec.convert(value, wanted)]
        except msgspec.ValidationError:
            return NOT

    return fast


# ----------------------------------------------------------------------------
# Records on the wire: registered frozen dataclasses and NamedTuples, identified by class name.
#
# Field names are not sent, but their checksum is. A record is rejected if its sender has other
# fields, or if a field does not match its annotation.

T = TypeVar("T", bound=type)
_SAME_VERSION = "run the same version of Overlord on both sides"


class _Field(NamedTuple):
    """The three ways to decode a field, in the order in which they are tried."""

    plain: frozenset[type]  # types of values that are valid without a check
    fast: FastDecoder | None
    check: Check | None  # of a value from the general codec; None: any value is valid
    wanted: str  # the annotation as text, for errors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A registered class of records: field names, layout checksum and decoders."""

    cls: type
    make: Callable[..., Any]
    names: tuple[str, ...]
    layout: int  # checksum of the names
    fields: tuple[_Field, ...]
    by_name: bool  # some fields are keyword-only, so all are passed by name


KINDS: dict[str, _Kind] = {}


def register(cls: T) -> T:
    """Register a record class (a frozen dataclass or a NamedTuple) under its name; return it.

    Both sides must register it. Raise ``TypeError`` for another kind of class, and if the name
    belongs to another class.
    """
    if cls.__name__ in KINDS and KINDS[cls.__name__].cls is not cls:
        known = KINDS[cls.__name__].cls
        raise TypeError(
            f"register: a record {cls.__name__} is already registered by {known.__module__}; "
            "rename the new one"
        )
    if is_dataclass(cls):
        if not cls.__dataclass_params__.frozen or not all(f.init for f in fields(cls)):  # type: ignore[attr-defined]
            raise TypeError(
                "register: expected a frozen dataclass with all fields as arguments, "
                f"got {cls.__name__}; set frozen=True, and init=False for no field"
            )
        names, by_name = tuple(f.name for f in fields(cls)), any(f.kw_only for f in fields(cls))
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        names, by_name = tuple(cls._fields), False
    else:
        raise TypeError(
            f"register: expected a frozen dataclass or a NamedTuple, got {cls.__name__}; "
            "declare it as one of these"
        )
    hints = get_type_hints(
        cls, localns={name: kind.cls for name, kind in KINDS.items()} | {cls.__name__: cls}
    )
    found = tuple(
        _Field(
            plain_types(hints[n]),
            opener_for(hints[n]),
            check_for(hints[n]),
            _annotation_text(hints[n]),
        )
        for n in names
    )
    kind = _Kind(
        cls=cls,
        make=_maker(cls),
        names=names,
        layout=zlib.crc32(",".join(names).encode()),
        fields=found,
        by_name=by_name,
    )
    KINDS[cls.__name__] = kind
    PACKERS[cls] = _packer(kind, [packer_for(hints[n]) for n in names])
    return cls


def _maker(cls: type) -> Callable[..., Any]:
    """Return the constructor of a class, without the check of its arguments' names, if it has one.

    The checksum of a received record is that of its names.
    """
    if (init := getattr(cls.__init__, "__wrapped__", None)) is None:  # type: ignore[misc]
        return cls

    def make(*values: Any, **named: Any) -> Any:
        record: Any = object.__new__(cls)
        init(record, *values, **named)
        return record

    return make


def _annotation_text(annotation: Any) -> str:
    return (
        annotation.__name__
        if isinstance(annotation, type) and not hasattr(annotation, "__args__")
        else str(annotation)
    )


def _values_of(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda record: tuple(getattr(record, name) for name in names)


def _packer(kind: _Kind, shortcuts: Sequence[Callable[[Any], Any] | None]) -> Packer:
    head = (RECORD, kind.cls.__name__, kind.layout)
    values_of = _values_of(kind.names)

    def pack(record: Any, columns: list[np.ndarray], depth: int) -> Tree:
        out: list[Any] = [*head]
        try:
            for value in values_of(record):
                if type(value) in PLAIN:
                    out.append(value)
                elif type(value) is np.ndarray:
                    out.append(pack_array(value, columns))
                else:
                    shortcut = shortcuts[len(out) - len(head)]
                    packed = shortcut(value) if shortcut is not None else NOT
                    out.append(
                        packed if packed is not NOT else pack_value(value, columns, depth + 1)
                    )
        except Refused as e:
            raise e.inside(f".{kind.names[len(out) - len(head)]}") from None
        return out

    return pack


def _open_record(tree: list[Any], columns: list[np.ndarray], depth: int) -> Any:
    kind = _kind(tree)
    values: list[Any] = []
    try:
        for (plain, fast, check, wanted), item in zip(kind.fields, tree[3:], strict=True):
            value = (
                item if type(item) in plain else fast(item, columns) if fast is not None else NOT
            )
            if value is NOT:
                value = open_value(item, columns, depth)
                if check is not None and not check(value):
                    raise Refused(f"expected {wanted}, got {describe_value(value)}", _SAME_VERSION)
            values.append(value)
    except Refused as e:
        raise e.inside(f".{kind.names[len(values)]}") from None
    try:
        return (
            kind.make(**dict(zip(kind.names, values, strict=True)))
            if kind.by_name
            else kind.make(*values)
        )
    except Exception as e:
        raise Refused(
            f"expected a valid {kind.cls.__name__}, got {type(e).__name__}: {e}", _SAME_VERSION
        ) from e


def _kind(tree: list[Any]) -> _Kind:
    name = tree[1] if len(tree) > 1 else None
    kind = KINDS.get(name) if type(name) is str else None
    if kind is None:
        near = did_you_mean(name, KINDS) if type(name) is str else ""
        raise Refused(
            f"expected a known record, got {describe_value(name)}{near}",
            "register it on both sides",
        )
    if tree[2:3] != [kind.layout] or len(tree) != len(kind.names) + 3:
        wanted = (
            f"expected a {name} of {', '.join(kind.names) or 'no fields'}, got a record with other "
            "fields"
        )
        raise Refused(wanted, _SAME_VERSION)
    return kind


OPENERS[RECORD] = _open_record


# ----------------------------------------------------------------------------
# Exceptions on the wire.
#
# Exceptions of Overlord and of Python keep type, arguments and notes. Other exceptions are sent
# as text.

MAX_TEXT = 20_000  # characters of an exception that becomes text

KNOWN: dict[str, type[Exception]] = {
    cls.__name__: cls
    for home in (builtins, errors)
    for cls in vars(home).values()
    if isinstance(cls, type) and issubclass(cls, Exception) and cls.__module__ == home.__name__
}


def _pack_error(error: BaseException, columns: list[np.ndarray], depth: int) -> Tree:
    name, before = type(error).__name__, len(columns)
    if KNOWN.get(name) is type(error):
        try:
            # The args of an OSError do not contain its file name.
            args = error.__reduce__()[1] if isinstance(error, OSError) else error.args
            return _packed_error(name, args, error, columns, depth)
        except Refused:  # an argument that cannot be encoded
            del columns[before:]
    return _packed_error(
        "OverlordError", (f"{type(error).__qualname__}: {_text(error)}",), error, columns, depth
    )


def _packed_error(
    name: str, args: Any, error: BaseException, columns: list[np.ndarray], depth: int
) -> Tree:
    found = getattr(error, "__notes__", ())
    notes = (
        [note for note in found if type(note) is str] if isinstance(found, (list, tuple)) else []
    )
    return [ERROR, name, _sendable(pack_value(tuple(args), columns, depth + 1)), _sendable(notes)]


def _text(error: BaseException) -> str:
    try:
        return str(error)[:MAX_TEXT]
    except Exception as e:
        return f"an exception whose text raises {type(e).__name__}"


def _sendable(tree: Tree) -> Tree:
    """Return ``tree`` with invalid Unicode (as in file names) escaped, so that it can be sent."""
    if type(tree) is str:
        return tree if tree.isascii() else tree.encode("utf-8", "backslashreplace").decode()
    if type(tree) is list:
        return [_sendable(item) for item in tree]
    return (
        {_sendable(key): _sendable(item) for key, item in tree.items()}
        if type(tree) is dict
        else tree
    )


def _open_error(tree: list[Any], columns: list[np.ndarray], depth: int) -> Exception:
    name, args, notes = wants(tree, str, list, list)
    if name not in KNOWN or args[:1] != [TUPLE] or any(type(note) is not str for note in notes):
        raise Refused(
            f"expected a known exception with its arguments and notes, got {name!r:.60}",
            _SAME_VERSION,
        )
    values = open_value(args, columns, depth)
    try:
        error = KNOWN[name](*values)
        str(error)  # an exception whose text cannot be built would fail where it is printed
    except Exception as e:
        raise Refused(
            f"expected valid arguments of {name}, got {type(e).__name__}: {e}", _SAME_VERSION
        ) from e
    for note in notes:
        error.add_note(note)
    return error


PACKERS[BaseException] = _pack_error
OPENERS[ERROR] = _open_error


# ----------------------------------------------------------------------------
# The format, and the registration of the classes of all messages.
#
# The codec does not use pickle: only a closed set of types can be decoded, whatever the bytes
# contain.
#
# The header is MessagePack. Numbers, strings, bytes and None are encoded as themselves, and a
# dict as a map. Every MessagePack array starts with a tag: list, tuple, column, record and so on.
# Decoding imports nothing and runs nothing that the bytes name. It builds only registered records
# and known exceptions, and checks their fields against their annotations.

__all__ = ["decode", "encode", "register"]

_VALUES: tuple[type, ...] = (SampleId, Batch, Buffer, ClientPlaceTree, Assignment, LoadingPlan)
for _cls in (*_VALUES, PlanTasks, TaskRules, TaskTable, SampleDocuments):
    register(_cls)
for _module in (control, data, batches, launcher):
    for _cls in vars(_module).values():
        if isinstance(_cls, type) and _cls.__module__ == _module.__name__:
            register(_cls)


# ----------------------------------------------------------------------------
# Stream states as opaque bytes: many components forward them, few decode them.


def encode_state(state: StreamState) -> EncodedState:
    """Return a stream state as opaque bytes, with its step."""
    return EncodedState(state.step, np.frombuffer(b"".join(pack(*encode(state))), np.uint8))


def decode_state(encoded: EncodedState) -> StreamState:
    """Return a decoded stream state.

    Raise ``FrameError`` if the bytes are invalid, or contain the state of another step.
    """
    frame = unpack(np.ascontiguousarray(encoded.data))
    state = decode(frame.header, frame.columns)
    if not isinstance(state, StreamState) or state.step != encoded.step:
        raise FrameError(
            f"expected the state of step {encoded.step}, got {type(state).__name__} of step "
            f"{getattr(state, 'step', None)}",
            remedy=_SAME_VERSION,
        )
    return state
