"""Reader of WebDataset tar shards: consecutive members with the same key form a sample.

Each extension is a column.

``a/b.jpg`` and ``a/b.seg.png`` are the columns ``jpg`` and ``seg.png`` of the sample whose
``__key__`` is ``a/b``. Two kinds of columns hold lists, for samples of several images. ``images``
has every member with the extension of an image. A requested column with a ``*`` (``img*.jpg``) has
every member that matches. Both are in order of the names, with digits compared as numbers (``2``
before ``10``). Values are the stored bytes. Samples with pickles, links or devices are refused:
data must not execute code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from overlord.sources import tables as cols
from overlord.sources.base import (
    NO_ROWS,
    Chunks,
    File,
    RawSlice,
    ReadOptions,
    make_chunks,
    no_rows_chunk,
)
from overlord.sources.files import BLOCK
from overlord.sources.tar import BrokenTar, Member, TarCursor, members

if TYPE_CHECKING:
    from overlord.sources.files import Files

KEY = "__key__"
IMAGES = "images"
IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp", "gif")
REFUSED = (".pkl", ".pickle", ".pyd", ".pt", ".pth")  # extensions that other readers would unpickle


@dataclass(slots=True)
class Group:
    """One sample: its bytes by extension, or the reason why it is unreadable."""

    key: str
    offset: int  # offset of the header of its first member, which numbers the row
    size: int = 0  # bytes of all members, requested or not
    # None: present, but not read
    values: dict[str, bytes | None] = field(default_factory=dict)
    problem: str = ""

    def refuse(self, problem: str) -> None:
        self.problem = self.problem or problem
        self.values = dict.fromkeys(self.values)  # releases the bytes


class WebDataset:
    name = "tar"
    suffixes = (".tar",)
    indexed = False

    def chunks(self, files: Files, file: File, options: ReadOptions) -> Chunks:
        return make_chunks([(0, -1, 0, -1, file.size)]) if file.size else no_rows_chunk()

    def schema(self, files: Files, file: File, options: ReadOptions) -> dict[str, str] | None:
        return None

    def held_bytes(self, chunks: Chunks, i: int, options: ReadOptions) -> int:
        return 2 * BLOCK

    def read(
        self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions, skip: int = 0
    ) -> Iterator[RawSlice]:
        step, left = options.slice_rows, skip * options.slice_rows
        held: list[Group] = []
        with files.open(file) as handle:
            for group in _groups(TarCursor(handle, file.size), options, left):
                if left:
                    left -= 1
                elif len(held) == step:
                    out, held = _slice(held, options, False), [group]
                    yield out
                else:
                    held.append(group)
        yield _slice(held, options, True)


def _groups(cursor: TarCursor, options: ReadOptions, skip: int) -> Iterator[Group]:
    """Yield samples in file order; the bytes of the first ``skip`` samples are not read.

    Hidden members and members without an extension are skipped. Where the archive breaks, the
    current sample may lack members, so it is marked as unreadable.
    """
    group: Group | None = None
    count = 0
    try:
        for member in members(cursor) if cursor.size else ():
            key, extension = split_name(member.name)
            if not extension and not member.problem:
                continue
            if group is None or key != group.key:
                if group is not None:
                    yield group
                group, count = Group(key, member.header), count + 1
            _add(cursor, group, extension, member, options, load=count > skip)
    except BrokenTar as error:
        group = group or Group("", error.offset)
        group.refuse(error.problem)
    yield group or Group("", 0, problem=NO_ROWS)


def _add(
    cursor: TarCursor,
    group: Group,
    extension: str,
    member: Member,
    options: ReadOptions,
    load: bool,
) -> None:
    if member.problem:
        group.refuse(f"member {member.name!r} {member.problem}")
    elif member.name.lower().endswith(REFUSED):
        group.refuse(f"member {member.name!r} is a pickle, which could run code")
    elif extension in group.values:
        group.refuse(f"member {member.name!r} occurs twice")
    # All members count: the size check must not depend on the requested columns.
    group.size += member.size
    if group.size > options.max_sample_bytes:
        group.refuse(
            f"expected a sample of at most max_sample_bytes={options.max_sample_bytes} bytes, "
            "got a larger one"
        )
    if (
        load
        and not group.problem
        and (options.columns is None or any(_holds(c, extension) for c in options.columns))
    ):
        group.values[extension] = _bytes(cursor, member)
    else:
        group.values.setdefault(extension, None)


def split_name(name: str) -> tuple[str, str]:
    """Return key and extension of a member: its path, split at the first dot of the file name.

    A hidden file, or a file without a dot, has the extension "": it belongs to no sample.
    """
    folder, slash, last = name.removeprefix("./").rpartition("/")
    stem, _, extension = last.partition(".")
    return (folder + slash + stem, extension.lower()) if stem and extension else (name, "")


def _is_list(column: str) -> bool:
    return column == IMAGES or "*" in column


def _holds(column: str, extension: str) -> bool:
    """Return whether a column contains the members of an extension."""
    if column == IMAGES:
        return extension.rpartition(".")[2] in IMAGE_ENDINGS
    return fnmatchcase(extension, column) if "*" in column else extension == column


def _listed(group: Group, column: str) -> list[bytes | None]:
    names = sorted((e for e in group.values if _holds(column, e)), key=_by_number)
    return [group.values[name] for name in names]


def _by_number(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key in which digits count as numbers, so that 2 comes before 10."""
    return [
        (0, int(part), part) if part.isdecimal() else (1, 0, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    ]


def _column(groups: Sequence[Group], name: str) -> pa.Array:
    if name == KEY:
        return pa.array([g.key for g in groups], pa.string())
    if _is_list(name):
        return pa.array([_listed(g, name) for g in groups], pa.list_(pa.binary()))
    return pa.array([g.values.get(name) for g in groups], pa.binary())


def _bytes(cursor: TarCursor, member: Member) -> bytes:
    data = cursor.read(member.data, member.size)
    if len(data) != member.size:
        raise OSError(f"expected {member.size} bytes of member {member.name!r}, got {len(data)}")
    return data


def _slice(groups: Sequence[Group], options: ReadOptions, last: bool) -> RawSlice:
    good = [g for g in groups if not g.problem]
    names = (
        options.columns
        if options.columns is not None
        else (KEY, *dict.fromkeys(e for g in good for e in g.values))
    )
    arrays = {name: _column(good, name) for name in names}
    table = pa.table(arrays) if arrays else cols.empty(len(good))
    bad = [(i, g.problem) for i, g in enumerate(groups) if g.problem]
    return RawSlice(np.array([g.offset for g in groups], np.int64), table, bad, last)
