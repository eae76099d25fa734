"""The index of an MDS dataset (``index.json``): its shards, their files and their columns.

The index is not trusted: names of files stay below its folder, no shard occurs twice, and sizes
and counts must fit each other before a shard is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from overlord.sources.base import BadFile

NAME = "index.json"
_VERSION = 2  # the only one that Streaming writes
MAX_BYTES = 2**32 - 1  # of a shard, whose offsets have 32 bits
_REMEDY = "write the dataset again, or exclude it: its index.json is not one of MDSWriter"

# ----------------------------------------------------------------------------
# Encodings of columns.

_SCALARS = {
    "int": "<i8",
    **{f"{kind}{bits}": f"<{kind[0]}{bits // 8}" for kind in ("int", "uint") for bits in (8, 16)},
    **{f"{kind}{bits}": f"<{kind[0]}{bits // 8}" for kind in ("int", "uint") for bits in (32, 64)},
    **{f"float{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
}
_VARIABLE = ("bytes", "str", "json", "str_int", "str_float", "str_decimal", "pil", "jpeg", "png")
_LISTS = ("jpeg_array", "jpegarray", "list[pil]", "list[jpeg]", "list[png]")
REFUSED = "pkl"


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the values of a column are stored: ``ndarray:int32:2,3`` has a type and a shape."""

    kind: str  # name of the encoding; "scalar" for numbers, "" if it is not known
    dtype: np.dtype | None = None  # of numbers and arrays; None: each array has its own
    shape: tuple[int, ...] | None = None  # of arrays; None: each array has its own

    @property
    def size(self) -> int | None:
        """Bytes of a value; None if they vary."""
        if self.dtype is None or (self.kind == "ndarray" and self.shape is None):
            return None
        count = 1
        for n in self.shape or ():
            count *= n
        return count * self.dtype.itemsize


@lru_cache(maxsize=1024)
def parse_encoding(text: str) -> Encoding:
    """Return the encoding of a text; its kind is empty if the text is not known."""
    kind, _, rest = text.partition(":")
    if not rest and kind in _SCALARS:
        return Encoding("scalar", np.dtype(_SCALARS[kind]))
    if not rest and kind in (*_VARIABLE, *_LISTS, REFUSED):
        return Encoding(kind)
    name, _, dims = rest.partition(":")
    if kind != "ndarray" or (name and (name == "int" or name not in _SCALARS)):
        return Encoding("")
    shape = None
    if dims:
        parts = dims.split(",")
        if not all(p.isascii() and p.isdigit() and len(p) < 11 and int(p) for p in parts):
            return Encoding("")
        shape = tuple(map(int, parts))
    return Encoding("ndarray", np.dtype(_SCALARS[name]) if name else None, shape)


# ----------------------------------------------------------------------------
# Shards.


class _FileInfo(msgspec.Struct):
    basename: str
    bytes: int


class _Entry(msgspec.Struct):
    format: str
    samples: int
    raw_data: _FileInfo
    version: int = 0
    zip_data: _FileInfo | None = None
    compression: str | None = None
    column_names: list[str] = []
    column_encodings: list[str] = []
    column_sizes: list[int | None] = []


class _Format(msgspec.Struct):
    format: str = "mds"


class _Index(msgspec.Struct):
    version: int
    shards: list[msgspec.Raw]


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of shards, in the order of their values in a sample."""

    names: tuple[str, ...]
    texts: tuple[str, ...]  # encodings as written
    sizes: tuple[int | None, ...]  # bytes of a value; None: stored with each sample

    def encoding(self, name: str) -> Encoding:
        return parse_encoding(self.texts[self.names.index(name)])


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard: a file of samples, which may exist compressed, plain, or both."""

    samples: int
    raw: str  # path of the plain file
    nbytes: int  # of the plain file
    packed: str | None  # path of the compressed file
    packed_bytes: int
    compression: str  # without a level; empty if there is none
    columns: Columns

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths at which the shard may exist, the preferred one first."""
        return (self.raw,) if self.packed is None else (self.raw, self.packed)


@dataclass(frozen=True, slots=True)
class MdsIndex:
    shards: tuple[Shard, ...]
    by_path: dict[str, Shard]


def parse_index(data: bytes, folder: str) -> MdsIndex:
    """Return the shards of an ``index.json`` in ``folder``. Raises BadFile."""
    try:
        index = msgspec.json.decode(data, type=_Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFile(f"expected the index of an MDS dataset, got: {error}", _REMEDY) from error
    if index.version != _VERSION:
        raise BadFile(f"expected version {_VERSION}, got {index.version}", _REMEDY)
    seen: dict[tuple[Any, ...], Columns] = {}  # most shards have the same columns
    shards, by_path = [], dict[str, Shard]()
    for k, raw in enumerate(index.shards):
        try:
            shard = _shard(raw, folder, seen)
        except BadFile as error:
            raise BadFile(f"shard {k}: {error.problem}", error.remedy) from error
        for path in shard.paths:
            if path in by_path:
                raise BadFile(f"shard {k}: expected every file once, got {path} again", _REMEDY)
            by_path[path] = shard
        shards.append(shard)
    return MdsIndex(tuple(shards), by_path)


def _shard(raw: msgspec.Raw, folder: str, seen: dict[tuple[Any, ...], Columns]) -> Shard:
    try:
        if (kind := msgspec.json.decode(raw, type=_Format).format) != "mds":
            raise BadFile(
                f"expected the format mds, got {kind!r:.40}",
                "write the dataset with MDSWriter; lines of JSON are read with format='jsonl'",
            )
        entry = msgspec.json.decode(raw, type=_Entry)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadFile(f"expected a shard of an MDS dataset, got: {error}", _REMEDY) from error
    if entry.version != _VERSION:
        raise BadFile(f"expected version {_VERSION}, got {entry.version}", _REMEDY)
    nbytes, samples, packed = entry.raw_data.bytes, entry.samples, entry.zip_data
    if not 0 <= nbytes <= MAX_BYTES or not 0 <= samples <= max(0, nbytes // 4 - 2):
        raise BadFile(
            f"expected at most {MAX_BYTES} bytes with an offset of 4 bytes for each sample, got "
            f"{nbytes} bytes and {samples} samples",
            _REMEDY,
        )
    return Shard(
        samples,
        _path(folder, entry.raw_data.basename),
        nbytes,
        None if packed is None else _path(folder, packed.basename),
        0 if packed is None else packed.bytes,
        (entry.compression or "").partition(":")[0],
        _columns(entry, seen),
    )


def _path(folder: str, name: str) -> str:
    """Return the path of a file of the dataset. Raises BadFile if it leaves the folder."""
    parts = name.split("/")
    if not name or "\0" in name or "\\" in name or any(p in ("", ".", "..") for p in parts):
        raise BadFile(f"expected the name of a file below {folder}, got {name!r:.80}", _REMEDY)
    return f"{folder}/{name}"


def _columns(entry: _Entry, seen: dict[tuple[Any, ...], Columns]) -> Columns:
    names, texts, sizes = entry.column_names, entry.column_encodings, entry.column_sizes
    key = (tuple(names), tuple(texts), tuple(sizes))
    if (known := seen.get(key)) is not None:
        return known
    if not len(names) == len(texts) == len(sizes) == len(set(names)):
        raise BadFile(
            "expected an encoding and a size for each column, and every name once, got columns "
            f"{', '.join(names)} with {len(texts)} encodings and {len(sizes)} sizes",
            _REMEDY,
        )
    for name, text, size in zip(names, texts, sizes, strict=True):
        encoding = parse_encoding(text)
        # Readers of Streaming would read a size of 0 as a size that varies.
        wrong = size is not None and not 0 < size <= MAX_BYTES
        if wrong or (encoding.kind and size != encoding.size):
            raise BadFile(
                f"column {name!r}: expected {encoding.size or 'no fixed number of'} bytes for "
                f"{text!r}, got {size}",
                _REMEDY,
            )
    return seen.setdefault(key, Columns(*key))


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def index_paths(paths: Sequence[str]) -> list[str]:
    """Return where the indexes of shards may be, those nearest to the root first.

    A merged dataset has one index above the folders of its shards, and may keep theirs.
    """
    folders = {folder_of(path) for path in paths}
    split = [folder.split("/") for folder in folders]
    shared = [len(set(level)) == 1 for level in zip(*split, strict=False)]
    root = shared.index(False) if False in shared else len(shared)
    every = {"/".join(parts[:n]) for parts in split for n in range(root, len(parts) + 1)}
    return [f"{folder}/{NAME}" for folder in sorted(every, key=lambda f: (f.count("/"), f))]
