"""A small Thrift reader for the part of a Parquet footer that an index needs.

pyarrow's getters of row groups and columns call C++ functions that may throw, although Cython
declares that they do not: the process aborts. This happens for encrypted columns and for footers
that contradict themselves. Such a getter must not be called on an unchecked footer, so this module
calls none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 64  # levels of nesting; real footers have six
# Types of the compact protocol.
_I32, _I64, _BINARY, _LIST, _SET, _MAP, _STRUCT = (5, 6, 8, 9, 10, 11, 12)
_INTEGERS = (_I32, _I64, 4)
_FIXED = {3: 1, 7: 8}  # bytes of types of a fixed size


class BrokenFooter(ValueError):
    """Raised for bytes that are not a valid Parquet footer."""


@dataclass(slots=True)
class Column:
    """One leaf column of a row group: the location and the sizes of its bytes."""

    uncompressed: int
    compressed: int
    start: int  # offset of its first page in the file
    encrypted: bool  # true also if its metadata is missing


@dataclass(slots=True)
class RowGroup:
    """One row group of a file; its columns are in the order of ``ParquetLayout.leaves``."""

    rows: int
    nbytes: int  # uncompressed bytes of all columns
    columns: list[Column]


@dataclass(slots=True)
class ParquetLayout:
    """Rows, columns and byte ranges of a Parquet file."""

    rows: int
    leaves: list[str]  # per leaf column: the name of the top-level column that holds it
    groups: list[RowGroup] = field(default_factory=list)

    @property
    def encrypted(self) -> list[str]:
        """Names of the top-level columns with an encrypted leaf, in file order."""
        hidden = {
            leaf
            for group in self.groups
            for leaf, column in zip(self.leaves, group.columns, strict=True)
            if column.encrypted
        }
        return [name for name in dict.fromkeys(self.leaves) if name in hidden]


def parse(footer: bytes) -> ParquetLayout:
    """Return the layout that a footer describes. Raises BrokenFooter.

    pyarrow may still reject a footer that this function accepts.
    """
    try:
        fields, at = _struct(footer, 0, _FILE, 0)
        if at > len(footer):
            raise IndexError
    except IndexError:
        raise BrokenFooter(
            f"expected a complete footer, got one that ends after {len(footer)} bytes"
        ) from None
    if 2 not in fields or 3 not in fields or 4 not in fields:
        raise BrokenFooter(
            "expected a schema, a number of rows and row groups in the footer (fields 2, 3 and 4), "
            f"got the fields {sorted(fields)}"
        )
    layout = ParquetLayout(fields[3], _leaves(fields[2]))
    layout.groups = [_group(g, len(layout.leaves), i) for i, g in enumerate(fields[4])]
    if sum(g.rows for g in layout.groups) != layout.rows:
        rows = sum(g.rows for g in layout.groups)
        raise BrokenFooter(
            f"expected {layout.rows} rows in the row groups of the footer, got {rows}"
        )
    return layout


def _leaves(elements: list[dict[int, Any]]) -> list[str]:
    """Return the name of the top-level column that holds each leaf, in the order of the leaves.

    ``elements`` are the nodes of the schema in depth-first order, the root first.
    """
    if not elements:
        raise BrokenFooter("expected a schema in the footer, got an empty one")
    leaves: list[str] = []
    left, at = [elements[0].get(5, 0)], 1  # remaining children per level
    name = ""
    while left:
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        if at >= len(elements):
            raise BrokenFooter(
                f"expected more elements in the schema of the footer, got only {len(elements)}"
            )
        element, at = elements[at], at + 1
        if len(left) == 1:
            name = element.get(4, b"").decode(errors="replace")
        children = element.get(5, 0)
        if children < 0 or len(left) > MAX_DEPTH:
            raise BrokenFooter(
                f"expected at most {MAX_DEPTH} levels and no negative number of children in the "
                f"schema of the footer, got {children} children at level {len(left)}"
            )
        if children:
            left.append(children)
        else:
            leaves.append(name)
    if at != len(elements):
        raise BrokenFooter(
            f"expected {at} elements in the schema of the footer, got {len(elements)}"
        )
    return leaves


def _group(fields: dict[int, Any], leaves: int, number: int) -> RowGroup:
    columns = [_column(c) for c in fields.get(1, ())]
    rows, nbytes = fields.get(3, -1), fields.get(2, -1)
    if len(columns) != leaves or rows < 0 or nbytes < 0:
        raise BrokenFooter(
            f"row group {number} of the footer: expected {leaves} columns and sizes of at least 0, "
            f"got {len(columns)} columns, {rows} rows and {nbytes} bytes"
        )
    return RowGroup(rows, nbytes, columns)


def _column(fields: dict[int, Any]) -> Column:
    meta = fields.get(3, {})
    return Column(
        meta.get(6, 0),
        meta.get(7, 0),
        meta.get(11) or meta.get(9, 0),
        8 in fields or 9 in fields or 3 not in fields,
    )


# Thrift's compact protocol. A _Keep maps the number of each field to keep of a struct to its type
# and to the _Keep of its inner struct.

_Keep = dict[int, tuple[int, Any]]
_PRESENT = -1  # a field of any type, of which only the presence is recorded
_META: _Keep = {6: (_I64, None), 7: (_I64, None), 9: (_I64, None), 11: (_I64, None)}
_COLUMN: _Keep = {3: (_STRUCT, _META), 8: (_PRESENT, None), 9: (_PRESENT, None)}
_GROUP: _Keep = {1: (_LIST, _COLUMN), 2: (_I64, None), 3: (_I64, None)}
_ELEMENT: _Keep = {4: (_BINARY, None), 5: (_I32, None)}
_FILE: _Keep = {2: (_LIST, _ELEMENT), 3: (_I64, None), 4: (_LIST, _GROUP)}


def _struct(data: bytes, at: int, keep: _Keep, depth: int) -> tuple[dict[int, Any], int]:
    """Return the fields of the struct at ``at`` that ``keep`` names, and the offset after it.

    A field of an unexpected type is skipped, as Thrift does.
    """
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, at = _integer(data, at)
        if number not in keep:
            at = _skip(data, at, kind, depth)
            continue
        wanted, inner = keep[number]
        if wanted == _PRESENT:
            fields[number], at = True, _skip(data, at, kind, depth)
        elif kind != wanted:
            at = _skip(data, at, kind, depth)
        elif kind == _STRUCT:
            fields[number], at = _struct(data, at, inner, depth + 1)
        elif kind == _LIST:
            fields[number], at = _structs(data, at, inner, depth + 1)
        elif kind == _BINARY:
            size, at = _varint(data, at)
            fields[number], at = data[at : at + size], at + size
        else:
            fields[number], at = _integer(data, at)
    return fields, at + 1


def _structs(data: bytes, at: int, keep: _Keep, depth: int) -> tuple[list[dict[int, Any]], int]:
    if data[at] & 15 != _STRUCT:
        raise BrokenFooter(
            f"expected a list of structs in the footer, got a list of type {data[at] & 15}"
        )
    size, at = _size(data, at)
    structs = []
    for _ in range(size):
        one, at = _struct(data, at, keep, depth)
        structs.append(one)
    return structs, at


def _skip(data: bytes, at: int, kind: int, depth: int) -> int:
    """Return the offset after the value of type ``kind`` at ``at``."""
    if kind in _INTEGERS:
        while data[at] > 127:
            at += 1
        return at + 1
    if kind == _BINARY:
        size, at = _varint(data, at)
        return at + size
    if kind <= 2:  # a boolean is in the header of its field
        return at
    if depth > MAX_DEPTH:
        raise BrokenFooter(f"expected at most {MAX_DEPTH} levels in the footer, got more")
    if kind == _STRUCT:
        return _skip_struct(data, at, depth + 1)
    if kind in (_LIST, _SET):
        inner = data[at] & 15
        size, at = _size(data, at)
        return _skip_list(data, at, inner, size, depth + 1)
    if kind == _MAP:
        return _skip_map(data, at, depth + 1)
    if kind in _FIXED:
        return at + _FIXED[kind]
    raise BrokenFooter(f"expected a known type in the footer, got type {kind}")


def _skip_struct(data: bytes, at: int, depth: int) -> int:
    while head := data[at]:
        at += 1
        if head < 16:
            _, at = _integer(data, at)
        kind = head & 15
        # the most frequent types are inlined: a footer has tens of thousands of such fields
        if kind in _INTEGERS:
            while data[at] > 127:
                at += 1
            at += 1
        elif kind == _BINARY and data[at] < 128:
            at += data[at] + 1
        elif kind > 2:
            at = _skip(data, at, kind, depth)
    return at + 1


def _skip_list(data: bytes, at: int, kind: int, size: int, depth: int) -> int:
    if kind in _INTEGERS:
        for _ in range(size):
            while data[at] > 127:
                at += 1
            at += 1
        return at
    for _ in range(size):
        at = at + 1 if kind <= 2 else _skip(data, at, kind, depth)
    return at


def _skip_map(data: bytes, at: int, depth: int) -> int:
    size, at = _varint(data, at)
    if not size:
        return at
    _check_size(data, at, size)
    kinds, at = (data[at] >> 4, data[at] & 15), at + 1
    for _ in range(size):
        for kind in kinds:
            at = _skip_list(data, at, kind, 1, depth)
    return at


def _size(data: bytes, at: int) -> tuple[int, int]:
    """Return the number of elements of the list at ``at``, and the offset of the first."""
    size, at = data[at] >> 4, at + 1
    if size == 15:
        size, at = _varint(data, at)
    _check_size(data, at, size)
    return size, at


def _check_size(data: bytes, at: int, size: int) -> None:
    if size > len(data) - at:  # every element takes at least one byte
        raise BrokenFooter(
            f"expected at most {max(0, len(data) - at)} elements in the rest of the footer, "
            f"got a list of {size}"
        )


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = data[at] & 127, 7
    while data[at] > 127:
        at += 1
        value |= (data[at] & 127) << shift
        shift += 7
        if shift > 70:
            raise BrokenFooter(
                "expected numbers of at most 64 bits in the footer, got a longer one"
            )
    return value, at + 1


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at)
    return (value >> 1) ^ -(value & 1), at
