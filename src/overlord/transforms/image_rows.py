"""Images of rows: from Arrow columns to planned items, and their placeholders among the tokens.

Only headers are read here, one image at a time; bytes of files stay where Arrow has them until
items are written out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from overlord.errors import TransformError
from overlord.extras import pip_install
from overlord.sample import Column, Items, Ragged
from overlord.sources.arrow_numpy import numpy_of
from overlord.sources.mixed_columns import groups, is_mixed
from overlord.transforms.base import Block, Transform
from overlord.transforms.columns import (
    HIDDEN,
    Bad,
    Unfit,
    ids_column,
    kind_of,
    lists,
    null_rows,
    read_ids,
)
from overlord.transforms.image_header import BadImage, header
from overlord.transforms.image_items import PREFIX_BYTES, Prefix, make_ready
from overlord.transforms.images import META, Images, chances
from overlord.transforms.row_functions import Frame

log = logging.getLogger("overlord")

ITEM = HIDDEN + "\x1fitem"  # which items a row has
CHANCE = HIDDEN + "\x1fchance"  # a key per row, made where it is still known who the row is
MANY_ROWS = 1000  # of a source, all without an image: it is told
WANTED = "images (binary, struct<bytes, path>, or lists of these)"


def find_images(source: str, transforms: Sequence[Transform]) -> Images | None:
    """The one Images of a source. It works on finished ids, so that nothing behind it may change
    them.
    """
    found = [(i, t) for i, t in enumerate(transforms) if isinstance(t, Images)]
    if not found:
        return None
    at, images = found[0]
    if len(found) > 1:
        raise TransformError(
            source,
            repr(found[1][1]),
            "a source has one Images",
            "name all the columns in it: column=(...)",
        )
    behind = [t for t in transforms[at:] if t.user_code or t.kind in ("tokenize", "tokens")]
    if behind:
        remedy = "put Images behind what makes ids and behind functions of yours"
        raise TransformError(source, repr(images), f"it stands before {behind[0]!r}", remedy)
    for package in ("PIL", "simplejpeg"):
        if find_spec(package) is None:
            raise TransformError(
                source,
                repr(images),
                f"the package {package} is not installed",
                pip_install("image"),
            )
    return images


@dataclass(slots=True, eq=False)
class Laid:
    """The images of a table's rows, row by row: what is to be made of each, and its file as a view
    of Arrow's memory.
    """

    row: np.ndarray  # int64, ascending
    prefix: list[Prefix]
    file: list[np.ndarray]

    @property
    def file_bytes(self) -> np.ndarray:
        return np.fromiter((len(f) for f in self.file), np.int64, len(self.file))

    @property
    def pixel_bytes(self) -> np.ndarray:
        return np.fromiter((p.nbytes for p in self.prefix), np.int64, len(self.prefix))


def check_images(table: pa.Table, name: str) -> None:
    kind = kind_of(table, name, WANTED)
    inner = (
        kind.value_type
        if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)
        else kind
    )
    if pt.is_struct(inner):
        at = inner.get_field_index("bytes")
        if at < 0:
            raise Unfit(
                f"column {name!r} has the type {kind}; a struct of images wants a field 'bytes'"
            )
        inner = inner.field(at).type
    if pt.is_string(inner) or pt.is_large_string(inner):
        raise Unfit(
            f"column {name!r} holds text, and images are expected as bytes; a path or "
            "base64 is not followed: a Map can turn it to bytes"
        )
    if not (pt.is_binary(inner) or pt.is_large_binary(inner) or pt.is_null(inner)):
        raise Unfit(f"column {name!r} has the type {kind}; {WANTED} expected")


def read_images(table: pa.Table, names: Sequence[str]) -> tuple[np.ndarray, list[np.ndarray], Bad]:
    """(row of each image, its bytes, rows that cannot be used): rows ascending, the images of a row
    in the order of the columns.
    """
    rows: list[np.ndarray] = [np.zeros(0, np.int64)]
    files: list[np.ndarray] = []
    bad: Bad = {}
    for name in names:
        for at, array in _arrays(table, name):
            rows.append(_collect(array, at, name, files, bad))
    row = np.concatenate(rows)
    if bool((row[1:] >= row[:-1]).all()):
        return row, files, bad
    order = np.argsort(row, kind="stable")
    return row[order], [files[i] for i in order], bad


def _arrays(table: pa.Table, name: str) -> Iterator[tuple[np.ndarray, pa.Array]]:
    """Rows and their values, chunk by chunk: joined they may pass the 2 GB that one array can
    hold.
    """
    mixed, first = is_mixed(kind_of(table, name, WANTED)), 0
    if not mixed:
        check_images(table, name)
    for chunk in table.column(name).chunks:
        if mixed:  # the rows that hold no images were dropped before
            yield from ((rows + first, array) for rows, array in groups(chunk)[0])
        else:
            yield (
                np.arange(first, first + len(chunk)),
                chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk,
            )
        first += len(chunk)


def _collect(
    array: pa.Array, row: np.ndarray, name: str, files: list[np.ndarray], bad: Bad
) -> np.ndarray:
    """Puts the images of an array to ``files`` and returns their rows. Nulls are no images."""
    kind = array.type
    if pt.is_null(kind) or not len(array):
        return row[:0]
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        flat, offsets = lists(array)
        if np.diff(offsets)[
            null_rows(array)
        ].any():  # what stands behind a null list may be anything; mostly it is nothing
            there = array.is_valid()
            row, (flat, offsets) = row[numpy_of(there)], lists(array.filter(there))
        return _collect(flat, np.repeat(row, np.diff(offsets)), name, files, bad)
    if pt.is_struct(kind):
        held = array.flatten()
        data = held[kind.get_field_index("bytes")]
        if (at := kind.get_field_index("path")) >= 0 and data.null_count:
            for i in np.flatnonzero(~numpy_of(data.is_valid())):
                if (path := held[at][int(i)].as_py()) is not None:
                    bad.setdefault(
                        int(row[i]),
                        f"{name} holds only the path {path!r:.80} of an image; its bytes "
                        "must be in the column",
                    )
        return _collect(data, row, name, files, bad)
    return _binaries(array, row, files)


def _binaries(array: pa.Array, row: np.ndarray, files: list[np.ndarray]) -> np.ndarray:
    _, starts, held = array.buffers()
    wide = np.int64 if pt.is_large_binary(array.type) else np.int32
    at = np.frombuffer(starts, wide)[array.offset : array.offset + len(array) + 1].tolist()
    data = (
        np.frombuffer(held, np.uint8) if held is not None and held.size else np.zeros(0, np.uint8)
    )
    gone = set(null_rows(array).tolist())
    files += [data[at[i] : at[i + 1]] for i in range(len(array)) if i not in gone]
    return row[[i for i in range(len(array)) if i not in gone]] if gone else row


def lay_out(table: pa.Table, spec: Images) -> tuple[Laid, Bad]:
    """Every image of the table by its header. A row is bad for the first of its images that is."""
    row, files, bad = read_images(table, spec.columns)
    limits, prefixes = spec.limits, list[Prefix]()
    counts = np.bincount(row, minlength=table.num_rows)
    number = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    chance = (
        chances(numpy_of(table.column(CHANCE).combine_chunks())[row], number).tolist()
        if spec.by_chance
        else None
    )
    for i in np.flatnonzero(counts > spec.max_images).tolist():
        bad.setdefault(i, f"{counts[i]} images are more than max_images={spec.max_images}")
    kept: list[int] = []
    for k, (i, file) in enumerate(zip(row.tolist(), files, strict=True)):
        if i in bad:
            continue
        try:
            found = header(file, limits)
            prefixes.append(spec.plan(found, chance[k]) if chance else spec.plan(found))
        except BadImage as fault:
            bad[i] = f"image {number[k]}: {fault.reason}"
            continue
        kept.append(k)
    return Laid(row[kept], prefixes, [files[k] for k in kept]), bad


def run_images(frame: Frame, spec: Images, *, context: int, on_long: str) -> None:
    """Puts placeholders into the ids of a frame, and three lists of numbers and the item numbers
    beside them.
    """
    laid, bad = lay_out(frame.table, spec)
    rest = [n for n in frame.table.column_names if n not in spec.columns and n != CHANCE]
    frame.table = frame.table.select(rest)  # the bytes need not move when rows are left out
    ids, faults = read_ids(frame.table, "tokens")
    bad = faults | bad
    if spec.at == "marker":
        bad = _unmarked(ids, np.bincount(laid.row, minlength=len(ids)), spec) | bad
    laid, ids = _without(frame, laid, ids, bad)
    out = np.fromiter(
        (p.grid[1] * p.grid[2] // spec.merge**2 for p in laid.prefix), np.int64, len(laid.prefix)
    )
    ids, offset = with_placeholders(ids, laid.row, out, spec)
    late: Bad = {}
    if (
        on_long == "split"
    ):  # the pieces behind the first have no items: a placeholder there would stand for nothing
        for k in np.flatnonzero(offset + out > context):
            end = (
                f"an image ends at token {offset[k] + out[k]}, behind the first piece of {context}"
            )
            late.setdefault(
                int(laid.row[k]), f"{end}; on_long='split' keeps images in the first piece"
            )
    patches = np.fromiter((p.shape[0] for p in laid.prefix), np.int64, len(laid.prefix))
    mine = (
        offset < context if on_long == "truncate" else np.ones(len(offset), bool)
    )  # of an image cut off whole nothing is left to encode
    starts = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(np.bincount(laid.row[mine], minlength=len(ids)), out=starts[1:])
    for name, values in zip(META, (patches, out, offset), strict=True):
        frame.put(HIDDEN + name, ids_column(Ragged(values[mine], starts)))
    frame.put(ITEM, ids_column(Ragged(np.flatnonzero(mine), starts)))
    frame.put("tokens", ids_column(ids))
    frame.laid = laid
    frame.drop(late)


def _unmarked(ids: Ragged, counts: np.ndarray, spec: Images) -> Bad:
    marker = spec.placeholder if spec.marker is None else spec.marker
    where = np.flatnonzero(ids.values == marker)
    marks = np.bincount(np.searchsorted(ids.offsets, where, side="right") - 1, minlength=len(ids))
    return {
        int(i): f"{counts[i]} images and {marks[i]} markers (token {marker})"
        for i in np.flatnonzero(marks != counts)
    }


def _without(frame: Frame, laid: Laid, ids: Ragged, bad: Bad) -> tuple[Laid, Ragged]:
    """The same without the bad rows."""
    if not bad:
        return laid, ids
    frame.drop(bad)
    good = np.ones(len(ids), bool)
    good[list(bad)] = False
    kept = np.flatnonzero(good[laid.row])
    row = (np.cumsum(good) - 1)[laid.row[kept]]
    laid = Laid(row, [laid.prefix[k] for k in kept], [laid.file[k] for k in kept])
    return laid, ids.take(np.flatnonzero(good))


def with_placeholders(
    ids: Ragged, row: np.ndarray, out: np.ndarray, spec: Images
) -> tuple[Ragged, np.ndarray]:
    """Ids with ``out`` placeholders for every image, and where each image's begin in its row.

    One token per image is put in (or stands there: the markers), and then repeated. Ids widen to
    hold the placeholder in every batch of the source, with images or without.
    """
    wide = np.promote_types(ids.values.dtype, np.min_scalar_type(spec.placeholder))
    values, starts = ids.values.astype(wide, copy=False), ids.offsets
    if spec.at == "marker":
        where = np.flatnonzero(values == (spec.placeholder if spec.marker is None else spec.marker))
    else:
        before = starts[row] if spec.at == "start" else starts[row + 1]
        where = before + np.arange(len(row))
        values = np.insert(values, before, spec.placeholder)
        starts = starts + np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(ids)))])
    if not len(where):
        return Ragged(values, starts), np.zeros(0, np.int64)
    if spec.at == "marker" and spec.marker is not None:
        values = values.copy()
        values[where] = spec.placeholder
    times = np.ones(len(values), np.int64)
    times[where] = out
    ends = np.concatenate([[0], np.cumsum(times)])
    return Ragged(np.repeat(values, times), ends[starts]), ends[where] - ends[starts[row]]


@dataclass(slots=True)
class SeenImages:
    """What the images of a source came to so far: bytes of files and of pixels, which "auto" goes
    by, and how many rows had none.
    """

    source: str
    files: int = 0
    pixels: int = 0
    rows: int = 0
    told: bool = False

    def add(self, rows: int, files: int, pixels: int, column: object) -> None:
        """Rows without images are fine. A source without any is likely a wrong name, since in a tar
        a name that fits no member is no error: it is said, once.
        """
        self.rows, self.files, self.pixels = (
            self.rows + rows,
            self.files + files,
            self.pixels + pixels,
        )
        if self.rows >= MANY_ROWS and not self.files and not self.told:
            self.told = True
            log.warning(
                "source %r: none of its first %d rows has an image in %r; in tar shards "
                "a column is the ending of members ('jpg'), "
                "'images' for all of them, or a pattern",
                self.source,
                self.rows,
                column,
            )


def add_items(block: Block, frame: Frame, chosen: Column, spec: Images, so_far: SeenImages) -> None:
    """The images of the block's samples. ``chosen``: their numbers.

    The metadata ``bytes`` counts files, never pixels: it must not depend on where pixels are made.
    """
    assert isinstance(chosen, Ragged), "numbers of items are lists"
    files, pixels = frame.laid.file_bytes[chosen.values], frame.laid.pixel_bytes[chosen.values]
    ends = np.concatenate([[0], np.cumsum(files + PREFIX_BYTES)])
    block.meta["bytes"] = np.asarray(block.meta["bytes"]) + np.diff(ends[chosen.offsets])
    block.image_bytes_in, block.image_bytes_out = int(files.sum()), int(pixels.sum())
    so_far.add(frame.table.num_rows, block.image_bytes_in, block.image_bytes_out, spec.column)
    here = spec.place == "loader" or (spec.place == "auto" and so_far.pixels <= so_far.files)
    block.items = write_items(frame.laid, chosen, here)


def write_items(laid: Laid, chosen: Ragged, ready: bool) -> Items:
    """Items of documents as bytes. ``chosen``: their numbers, document by document; ``ready``: with
    their pixels made.
    """
    numbers = chosen.values[chosen.offsets[0] : chosen.offsets[-1]].tolist()
    parts: list[Any] = []
    for k in numbers:
        head = np.frombuffer(laid.prefix[k].pack(), np.uint8)
        parts += (
            [make_ready(np.concatenate([head, laid.file[k]]))] if ready else [head, laid.file[k]]
        )
    sizes = (
        [len(p) for p in parts] if ready else [PREFIX_BYTES + len(laid.file[k]) for k in numbers]
    )
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    values = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    return Items(Ragged(values, offsets), chosen.lengths)
