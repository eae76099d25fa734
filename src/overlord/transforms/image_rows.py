"""Images of rows: from Arrow columns to planned items, and their placeholders among the tokens.

Only headers are read here, one image at a time. The bytes of files stay in Arrow memory until items
are written.
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

from overlord.checks import pip_install
from overlord.content import Items
from overlord.errors import TransformError
from overlord.sample import Column, Ragged
from overlord.sources.tables import groups, is_mixed, numpy_of
from overlord.transforms.base import Block, Transform
from overlord.transforms.columns import (
    HIDDEN,
    Bad,
    RowFrame,
    Unfit,
    ids_column,
    kind_of,
    lists,
    null_rows,
    read_ids,
)
from overlord.transforms.image_header import BadImage, header
from overlord.transforms.image_items import PREFIX_BYTES, Prefix, make_ready
from overlord.transforms.images import META, Images, random_numbers
from overlord.transforms.loss_weights import put_weights, weights_of

log = logging.getLogger("overlord")

ITEM = HIDDEN + "\x1fitem"  # numbers of the items of a row in PlannedImages
RANDOM_KEY = HIDDEN + "\x1fchance"  # seed per row, from its identity: made by the slice stage
WARN_ROWS = 1000  # rows of a source, all without an image, before a warning
IMAGE_TYPES = "images (binary, struct<bytes, path>, or lists of these)"


def find_images(source: str, transforms: Sequence[Transform]) -> Images:
    """Return the only Images transform of a source that has one.

    Raises TransformError if it cannot work. Images inserts tokens into finished ids, so no later
    transform may change these.
    """
    specs = [(i, t) for i, t in enumerate(transforms) if isinstance(t, Images)]
    at, images = specs[0]
    if len(specs) > 1:
        raise TransformError(
            source,
            repr(specs[1][1]),
            f"expected one Images in a source, got {len(specs)}",
            "name all the columns in it: column=(...)",
        )
    later = [t for t in transforms[at:] if t.user_code or t.kind in ("tokenize", "tokens")]
    if later:
        remedy = "put Images after the transform that makes ids and after your functions"
        raise TransformError(
            source,
            repr(images),
            f"expected Images after the transforms that make ids, got {later[0]!r} after it",
            remedy,
        )
    for package in ("PIL", "simplejpeg"):
        if find_spec(package) is None:
            raise TransformError(
                source,
                repr(images),
                f"expected the package {package} to decode images, got none",
                pip_install("image"),
            )
    return images


@dataclass(slots=True, eq=False)
class PlannedImages:
    """The images of a table, row by row: their parameters, and their files as Arrow views."""

    row: np.ndarray  # int64, ascending: row of each image in the table
    prefix: list[Prefix]
    file: list[np.ndarray]

    @property
    def file_bytes(self) -> np.ndarray:
        return np.fromiter((len(f) for f in self.file), np.int64, len(self.file))

    @property
    def pixel_bytes(self) -> np.ndarray:
        return np.fromiter((p.nbytes for p in self.prefix), np.int64, len(self.prefix))


def check_images(table: pa.Table, name: str) -> None:
    kind = kind_of(table, name, IMAGE_TYPES)
    inner = (
        kind.value_type
        if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)
        else kind
    )
    if pt.is_struct(inner):
        at = inner.get_field_index("bytes")
        if at < 0:
            raise Unfit(f"column {name!r}: expected a struct with a field 'bytes', got {kind}")
        inner = inner.field(at).type
    if pt.is_string(inner) or pt.is_large_string(inner):
        raise Unfit(
            f"column {name!r}: expected images as bytes, got text; convert a path or "
            "base64 to bytes with a Map"
        )
    if not (pt.is_binary(inner) or pt.is_large_binary(inner) or pt.is_null(inner)):
        raise Unfit(f"column {name!r}: expected {IMAGE_TYPES}, got {kind}")


def read_images(table: pa.Table, names: Sequence[str]) -> tuple[np.ndarray, list[np.ndarray], Bad]:
    """Return the row of each image, its bytes, and the rows that cannot be used.

    Rows ascend, and the images of a row are in the order of the columns. Raises Unfit.
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
    """Yield row numbers and their values, chunk by chunk.

    Joined chunks may exceed the 2 GB limit of one array.
    """
    mixed, first = is_mixed(kind_of(table, name, IMAGE_TYPES)), 0
    if not mixed:
        check_images(table, name)
    for chunk in table.column(name).chunks:
        if mixed:  # rows with values of other types were dropped before
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
    """Append the images of an array to ``files``, and return the row of each; nulls are skipped."""
    kind = array.type
    if pt.is_null(kind) or not len(array):
        return row[:0]
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        flat, offsets = lists(array)
        # The values of a null list are not images; usually such a list has none.
        if np.diff(offsets)[null_rows(array)].any():
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
                        f"{name}: expected the bytes of an image, got only its path {path!r:.80}",
                    )
        return _collect(data, row, name, files, bad)
    return _binaries(array, row, files)


def _binaries(array: pa.Array, row: np.ndarray, files: list[np.ndarray]) -> np.ndarray:
    _, starts, held = array.buffers()
    offset_type = np.int64 if pt.is_large_binary(array.type) else np.int32
    at = np.frombuffer(starts, offset_type)[array.offset : array.offset + len(array) + 1].tolist()
    data = (
        np.frombuffer(held, np.uint8) if held is not None and held.size else np.zeros(0, np.uint8)
    )
    nulls = set(null_rows(array).tolist())
    files += [data[at[i] : at[i + 1]] for i in range(len(array)) if i not in nulls]
    return row[[i for i in range(len(array)) if i not in nulls]] if nulls else row


def plan_images(table: pa.Table, spec: Images) -> tuple[PlannedImages, Bad]:
    """Plan every image of the table from its header; one bad image makes its row bad."""
    row, files, bad = read_images(table, spec.columns)
    limits, prefixes = spec.limits, list[Prefix]()
    counts = np.bincount(row, minlength=table.num_rows)
    number = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    random = (
        random_numbers(numpy_of(table.column(RANDOM_KEY).combine_chunks())[row], number).tolist()
        if spec.randomized
        else None
    )
    for i in np.flatnonzero(counts > spec.max_images).tolist():
        bad.setdefault(i, f"expected at most max_images={spec.max_images} images, got {counts[i]}")
    kept: list[int] = []
    for k, (i, file) in enumerate(zip(row.tolist(), files, strict=True)):
        if i in bad:
            continue
        try:
            parsed = header(file, limits)
            prefixes.append(spec.plan(parsed, random[k]) if random else spec.plan(parsed))
        except BadImage as fault:
            bad[i] = f"image {number[k]}: {fault.reason}"
            continue
        kept.append(k)
    return PlannedImages(row[kept], prefixes, [files[k] for k in kept]), bad


def run_images(frame: RowFrame, spec: Images, *, context: int, on_long: str) -> None:
    """Insert placeholders into the ids of a frame; add metadata, item numbers and the images.

    Rows with bad images or ids are removed from the frame.
    """
    images, bad = plan_images(frame.table, spec)
    rest = [n for n in frame.table.column_names if n not in spec.columns and n != RANDOM_KEY]
    frame.table = frame.table.select(rest)  # the image bytes are not copied when rows are removed
    ids, faults = read_ids(frame.table, "tokens")
    bad = faults | bad
    if spec.at == "marker":
        bad = _marker_mismatches(ids, np.bincount(images.row, minlength=len(ids)), spec) | bad
    images, ids = _drop_bad(frame, images, ids, bad)
    out = np.fromiter(
        (p.grid[1] * p.grid[2] // spec.merge**2 for p in images.prefix),
        np.int64,
        len(images.prefix),
    )
    before = ids
    ids, offset = with_placeholders(ids, images.row, out, spec)
    if (weights := weights_of(frame.table)) is not None:
        first = ids.offsets[images.row] + offset
        frame.table = put_weights(frame.table, _spread(weights, before, ids, first, out, spec))
    late: Bad = {}
    # Only the first piece has items: a placeholder in a later piece would refer to no image.
    if on_long == "split":
        for k in np.flatnonzero(offset + out > context):
            late.setdefault(
                int(images.row[k]),
                f"on_long='split': expected all images in the first piece of {context} tokens, got "
                f"one that ends at token {offset[k] + out[k]}",
            )
    patches = np.fromiter((p.shape[0] for p in images.prefix), np.int64, len(images.prefix))
    # An image whose tokens are all truncated is not encoded.
    mine = offset < context if on_long == "truncate" else np.ones(len(offset), bool)
    starts = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(np.bincount(images.row[mine], minlength=len(ids)), out=starts[1:])
    for name, values in zip(META, (patches, out, offset), strict=True):
        frame.put(HIDDEN + name, ids_column(Ragged(values[mine], starts)))
    frame.put(ITEM, ids_column(Ragged(np.flatnonzero(mine), starts)))
    frame.put("tokens", ids_column(ids))
    frame.images = images
    frame.drop(late)


def _spread(
    weights: Ragged, before: Ragged, ids: Ragged, first: np.ndarray, out: np.ndarray, spec: Images
) -> Ragged:
    """Return the weights of ids with placeholders, which have the weight 0.

    ``first``, ``out``: the first placeholder of each image in ``ids``, and their number.
    """
    kept = weights.values
    if spec.at == "marker":
        marker = spec.placeholder if spec.marker is None else spec.marker
        kept = kept[before.values != marker]
    own = np.ones(len(ids.values), bool)
    own[np.repeat(first - np.cumsum(out) + out, out) + np.arange(int(out.sum()))] = False
    values = np.zeros(len(ids.values), np.float32)
    values[own] = kept
    return Ragged(values, ids.offsets)


def _marker_mismatches(ids: Ragged, counts: np.ndarray, spec: Images) -> Bad:
    marker = spec.placeholder if spec.marker is None else spec.marker
    where = np.flatnonzero(ids.values == marker)
    marks = np.bincount(np.searchsorted(ids.offsets, where, side="right") - 1, minlength=len(ids))
    return {
        int(i): f"expected {counts[i]} markers (token {marker}), one per image, got {marks[i]}"
        for i in np.flatnonzero(marks != counts)
    }


def _drop_bad(
    frame: RowFrame, images: PlannedImages, ids: Ragged, bad: Bad
) -> tuple[PlannedImages, Ragged]:
    """Remove the bad rows from the frame, and return images and ids without them."""
    if not bad:
        return images, ids
    frame.drop(bad)
    good = np.ones(len(ids), bool)
    good[list(bad)] = False
    kept = np.flatnonzero(good[images.row])
    row = (np.cumsum(good) - 1)[images.row[kept]]
    images = PlannedImages(row, [images.prefix[k] for k in kept], [images.file[k] for k in kept])
    return images, ids.take(np.flatnonzero(good))


def with_placeholders(
    ids: Ragged, row: np.ndarray, out: np.ndarray, spec: Images
) -> tuple[Ragged, np.ndarray]:
    """Return ids with ``out`` placeholders per image, and the position of each image in its row.

    One token per image is inserted, unless it is present as the marker, and then repeated. The type
    of the ids can hold the placeholder in every batch of the source, with images or without.
    """
    id_type = np.promote_types(ids.values.dtype, np.min_scalar_type(spec.placeholder))
    values, starts = ids.values.astype(id_type, copy=False), ids.offsets
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
class ImageTotals:
    """Running totals of the images of a source: rows, bytes of files, bytes of pixels."""

    source: str
    files: int = 0
    pixels: int = 0
    rows: int = 0
    warned: bool = False

    def add(self, rows: int, files: int, pixels: int, column: object) -> None:
        """Add a block, and warn once if the source has no image at all.

        Rows without images are valid. A source without any image probably has a wrong column name,
        since a name that matches no member of a tar is not an error.
        """
        self.rows, self.files, self.pixels = (
            self.rows + rows,
            self.files + files,
            self.pixels + pixels,
        )
        if self.rows >= WARN_ROWS and not self.files and not self.warned:
            self.warned = True
            log.warning(
                "source %r: found no image in the first %d rows, column %r; in tar shards "
                "a column is the extension of members ('jpg'), "
                "'images' for all of them, or a pattern",
                self.source,
                self.rows,
                column,
            )


def add_items(
    block: Block, frame: RowFrame, chosen: Column, spec: Images, totals: ImageTotals
) -> None:
    """Add the images with the numbers ``chosen`` (a list for each sample) to the block.

    The metadata ``bytes`` counts files, never pixels: it must not depend on where pixels are made.
    """
    assert isinstance(chosen, Ragged), "numbers of items are lists"
    files, pixels = frame.images.file_bytes[chosen.values], frame.images.pixel_bytes[chosen.values]
    ends = np.concatenate([[0], np.cumsum(files + PREFIX_BYTES)])
    block.meta["bytes"] = np.asarray(block.meta["bytes"]) + np.diff(ends[chosen.offsets])
    block.image_bytes_in, block.image_bytes_out = int(files.sum()), int(pixels.sum())
    totals.add(frame.table.num_rows, block.image_bytes_in, block.image_bytes_out, spec.column)
    here = spec.place == "loader" or (spec.place == "auto" and totals.pixels <= totals.files)
    block.items = write_items(frame.images, chosen, here)


def write_items(images: PlannedImages, chosen: Ragged, ready: bool) -> Items:
    """Return the items of documents as bytes.

    ``chosen``: the numbers of the images, document by document; ``ready``: the items hold pixels,
    not files.
    """
    numbers = chosen.values[chosen.offsets[0] : chosen.offsets[-1]].tolist()
    parts: list[Any] = []
    for k in numbers:
        head = np.frombuffer(images.prefix[k].pack(), np.uint8)
        parts += (
            [make_ready(np.concatenate([head, images.file[k]]))]
            if ready
            else [head, images.file[k]]
        )
    sizes = (
        [len(p) for p in parts] if ready else [PREFIX_BYTES + len(images.file[k]) for k in numbers]
    )
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    values = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    return Items(Ragged(values, offsets), chosen.lengths)
