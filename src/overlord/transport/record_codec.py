"""Records on the wire: registered frozen dataclasses and NamedTuples, identified by class name.

Field names are not sent, but their checksum is. A record is rejected if its sender has other
fields, or if a field does not match its annotation.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, get_type_hints

import numpy as np

from overlord.checks import did_you_mean
from overlord.transport.codec_checks import Check, check_for
from overlord.transport.fast_codec import NOT, FastDecoder, opener_for, packer_for, plain_types
from overlord.transport.value_codec import (
    OPENERS,
    PACKERS,
    PLAIN,
    RECORD,
    Packer,
    Refused,
    Tree,
    describe_value,
    open_value,
    pack_array,
    pack_value,
)

T = TypeVar("T", bound=type)


class _Field(NamedTuple):
    """The decoder of a field: its type alone, a fast path, or the general codec and a check."""

    plain: frozenset[type]
    fast: FastDecoder | None
    check: Check | None
    wanted: str  # the annotation as text, for errors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A registered class of records: field names, layout checksum and decoders."""

    cls: type
    names: tuple[str, ...]
    layout: int  # checksum of the names
    fields: tuple[_Field, ...]
    by_name: bool  # its fields are keyword-only


KINDS: dict[str, _Kind] = {}


def register(cls: T) -> T:
    """Register a record class (a frozen dataclass or a NamedTuple) under its class name.

    Both sides must register it.
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
                f"got {cls.__name__}"
            )
        names, by_name = tuple(f.name for f in fields(cls)), any(f.kw_only for f in fields(cls))
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        names, by_name = tuple(cls._fields), False
    else:
        raise TypeError(
            f"register: expected a frozen dataclass or a NamedTuple, got {cls.__name__}"
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
        names=names,
        layout=zlib.crc32(",".join(names).encode()),
        fields=found,
        by_name=by_name,
    )
    KINDS[cls.__name__] = kind
    PACKERS[cls] = _packer(kind, [packer_for(hints[n]) for n in names])
    return cls


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


def _open(tree: list[Any], columns: list[np.ndarray], depth: int) -> Any:
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
                    raise Refused(f"expected {wanted}, got {describe_value(value)}")
            values.append(value)
    except Refused as e:
        raise e.inside(f".{kind.names[len(values)]}") from None
    try:
        return (
            kind.cls(**dict(zip(kind.names, values, strict=True)))
            if kind.by_name
            else kind.cls(*values)
        )
    except Exception as e:
        raise Refused(f"expected a valid {kind.cls.__name__}, got {type(e).__name__}: {e}") from e


def _kind(tree: list[Any]) -> _Kind:
    name = tree[1] if len(tree) > 1 else None
    kind = KINDS.get(name) if type(name) is str else None
    if kind is None:
        near = did_you_mean(name, KINDS) if type(name) is str else ""
        raise Refused(
            f"expected a known record, got {describe_value(name)}{near}",
            "both sides must register it",
        )
    if tree[2:3] != [kind.layout] or len(tree) != len(kind.names) + 3:
        wanted = (
            f"expected a {name} of {', '.join(kind.names) or 'no fields'}, got one with other "
            "fields"
        )
        raise Refused(wanted, "both sides must run the same version of Overlord")
    return kind


OPENERS[RECORD] = _open
