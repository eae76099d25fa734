"""The byte format of an image item, and the pixels made from it.

An *item* is a prefix of 96 bytes (the parameters: grid, crop, mean, ...), followed by the stored
file or by ready pixels. The pixels are a pure function of the item, so every process that makes
them gets the same bits.

Pixels are ``[patches, 3 * patch * patch]``. Patches are in row order. With ``merge`` > 1 the
``merge`` x ``merge`` patches of one backbone token are adjacent, in row order, and these squares
are in row order. Inside a patch the order is channel, row, column.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlord.transforms.image_header import BadImage as BadImage

PREFIX_BYTES = 96
ENCODED, READY = 0, 1  # format of the bytes after the prefix
DTYPES = ("uint8", "float16", "float32")
CHANNELS = 3
# Most tokens of an image, far above the limit of any encoder. The grid in an item determines the
# size of the buffers for its pixels, so it needs a bound.
MAX_TOKENS = 2**16

_MAGIC, _VERSION = b"OVIM", 1
_PREFIX = struct.Struct("<4sBBBBHBB3I4I3d3d2I")
_FLIP, _SCALED = 1, 2
assert _PREFIX.size == PREFIX_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Parameters of the pixels of an item. ``box`` and ``size`` are pixels of the upright image."""

    form: int = ENCODED
    patch: int
    merge: int
    dtype: str
    grid: tuple[int, int, int]  # t, h, w in patches
    box: tuple[int, int, int, int]  # x, y, width, height of the crop
    size: tuple[int, int]  # width, height of the image
    flip: bool = False
    scaled: bool = True
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)

    @property
    def shape(self) -> tuple[int, int]:
        t, h, w = self.grid
        return t * h * w, CHANNELS * self.patch * self.patch

    @property
    def nbytes(self) -> int:
        """Number of bytes of the pixels."""
        patches, dim = self.shape
        return patches * dim * np.dtype(self.dtype).itemsize

    def pack(self) -> bytes:
        flags = self.flip * _FLIP | self.scaled * _SCALED
        return _PREFIX.pack(
            _MAGIC,
            _VERSION,
            self.form,
            CHANNELS,
            DTYPES.index(self.dtype),
            self.patch,
            self.merge,
            flags,
            *self.grid,
            *self.box,
            *self.mean,
            *self.std,
            *self.size,
        )


def read_prefix(item: np.ndarray) -> Prefix:
    """Return the prefix of an item. Raises BadImage: the item may come from another process."""
    if len(item) < PREFIX_BYTES:
        raise BadImage(f"expected an image item of at least {PREFIX_BYTES} bytes, got {len(item)}")
    magic, version, form, channels, code, patch, merge, flags, *rest = _PREFIX.unpack_from(
        item.data
    )
    if magic != _MAGIC or version != _VERSION:
        raise BadImage(
            f"expected an image item of version {_VERSION}, got {magic!r} of version {version}"
        )
    grid, box, mean, std, size = (
        tuple(rest[a:b]) for a, b in ((0, 3), (3, 7), (7, 10), (10, 13), (13, 15))
    )
    if (
        form not in (ENCODED, READY)
        or channels != CHANNELS
        or code >= len(DTYPES)
        or not patch
        or not merge
    ):
        raise BadImage(
            f"expected an image item of a known form, got form {form}, {channels} channels, "
            f"type {code}, patch {patch}, merge {merge}"
        )
    if (
        grid[0] != 1
        or not all(side and side % merge == 0 for side in grid[1:])
        or grid[1] * grid[2] > MAX_TOKENS * merge * merge
    ):
        raise BadImage(
            f"expected an image grid of one frame, multiples of merge={merge} and at most "
            f"{MAX_TOKENS} tokens, got {grid}"
        )
    x, y, w, h = box
    if not w or not h or x + w > size[0] or y + h > size[1]:
        raise BadImage(
            f"expected a crop inside the image of {size[0]} x {size[1]} pixels, got {box}"
        )
    if not all(abs(v) < 1e9 for v in mean + std) or not all(abs(v) > 1e-9 for v in std):
        raise BadImage(
            "expected a mean and a std in range (below 1e9, std above 1e-9, without sign), got "
            f"{mean} and {std}"
        )
    return Prefix(
        form=form,
        patch=patch,
        merge=merge,
        dtype=DTYPES[code],
        grid=grid,
        box=box,
        size=size,
        flip=bool(flags & _FLIP),
        scaled=bool(flags & _SCALED),
        mean=mean,
        std=std,
    )


def item_grid(item: np.ndarray) -> tuple[int, int, int]:
    """Return the grid of an item: (t, h, w) in patches."""
    return read_prefix(item).grid


def item_shape(item: np.ndarray) -> tuple[int, int, str]:
    """Return the shape that ``fill`` writes: (patches, numbers per patch, type of a number)."""
    prefix = read_prefix(item)
    return (*prefix.shape, prefix.dtype)


def fill(item: np.ndarray, out: np.ndarray) -> None:
    """Write the pixels of an item to ``out``.

    Raises BadImage; ``out`` may then be partly written.
    """
    prefix = read_prefix(item)
    assert (*out.shape, out.dtype) == (*prefix.shape, prefix.dtype), (
        f"expected {prefix.dtype} {prefix.shape}, got {out.dtype} {out.shape}"
    )
    if prefix.form == READY:
        if len(item) != PREFIX_BYTES + prefix.nbytes:
            raise BadImage(
                f"expected {prefix.nbytes} bytes of pixels in the image item, got "
                f"{len(item) - PREFIX_BYTES}"
            )
        np.copyto(out, item[PREFIX_BYTES:].view(prefix.dtype).reshape(prefix.shape))
        return
    from overlord.transforms.image_decode import decode  # Pillow is needed only here

    patchify(decode(item[PREFIX_BYTES:], prefix), prefix, out)


def make_ready(item: np.ndarray) -> np.ndarray:
    """Return the item with pixels instead of the stored file, or unchanged if decoding fails.

    A broken item fails where it is used: the outcome of a sample must not depend on where its
    pixels are made.
    """
    prefix = read_prefix(item)
    if prefix.form == READY:
        return item
    made = np.empty(PREFIX_BYTES + prefix.nbytes, np.uint8)
    made[:PREFIX_BYTES] = item[:PREFIX_BYTES]
    made[5] = READY
    try:
        fill(item, made[PREFIX_BYTES:].view(prefix.dtype).reshape(prefix.shape))
    except BadImage:
        return item
    return made


def patchify(image: np.ndarray, prefix: Prefix, out: np.ndarray) -> None:
    """Convert bytes ``[height, width]`` or ``[height, width, 3]`` to patches of numbers.

    A number is ``byte * (1 / (255 * std)) - mean / std``.
    """
    (_, gh, gw), p, m = prefix.grid, prefix.patch, prefix.merge
    if image.ndim == 2:
        image = np.broadcast_to(image[:, :, None], (*image.shape, CHANNELS))
    if prefix.flip:
        image = image[:, ::-1]
    squares = image.reshape(gh // m, m, p, gw // m, m, p, CHANNELS).transpose(0, 3, 1, 4, 6, 2, 5)
    if prefix.dtype == "uint8":
        np.copyto(out.reshape(squares.shape), squares)
        return
    # The bytes are reordered before conversion, since they have a quarter of the size of floats.
    planes = np.ascontiguousarray(squares).reshape(gh * gw, CHANNELS, p * p)
    scale, shift = _affine(prefix)
    into: Any = out.reshape(planes.shape)
    if prefix.dtype == "float32":
        np.multiply(planes, scale, out=into)
        into += shift
        return
    for a in range(0, len(planes), 256):  # computed in float32 and rounded once at the end
        some = planes[a : a + 256] * scale
        some += shift
        into[a : a + 256] = some


def unpatchify(
    pixels: np.ndarray,
    grid: tuple[int, int, int],
    patch: int,
    merge: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> np.ndarray:
    """Return the image of patches as bytes ``[height, width, 3]``: the inverse of ``patchify``."""
    _, gh, gw = grid
    values = pixels.astype(np.float32)
    if pixels.dtype != np.uint8:
        values = values.reshape(gh * gw, CHANNELS, patch * patch)
        values = 255 * (values * np.array(std)[:, None] + np.array(mean)[:, None])
    squares = values.reshape(gh // merge, gw // merge, merge, merge, CHANNELS, patch, patch)
    image = squares.transpose(0, 2, 5, 1, 3, 6, 4).reshape(gh * patch, gw * patch, CHANNELS)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


def _affine(prefix: Prefix) -> tuple[np.ndarray, np.ndarray]:
    mean, std = np.array(prefix.mean), np.array(prefix.std)
    return (1.0 / (255.0 * std)).astype(np.float32)[:, None], (-mean / std).astype(np.float32)[
        :, None
    ]
