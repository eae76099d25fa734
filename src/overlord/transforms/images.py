"""Specification of the images of a source: columns, size, and place of their tokens.

The module also plans an image from its header: the grid of patches and the crop follow from the
size of the image and the identity of its sample. It opens no file. ``image_rows.py`` reads columns;
``image_decode.py`` makes pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from overlord.hashing import U64, digest, mix64
from overlord.transforms.base import column_problems, flag_problems, refuse
from overlord.transforms.image_header import BadImage, ImageHeader, ImageLimits
from overlord.transforms.image_items import DTYPES, MAX_TOKENS, Prefix

AT = ("start", "marker", "end")
PLACES = ("auto", "loader", "constructor")
ANIMATED = ("first", "quarantine")
META = ("image_patches", "image_tokens", "image_offset")  # read by planning/images.py
# Mean and standard deviation of CLIP, which most encoders use.
MEAN, STD = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
RANDOM_NUMBERS = 5  # per image: two sides and two offsets of the crop, mirrored or not
LEAST_SIDE = 0.8  # least fraction of each side that a random crop keeps


@dataclass(frozen=True, slots=True, repr=False)
class Images:
    """Convert images of one or several columns to tokens and pixels.

    Each image becomes ``placeholder`` tokens in its document and pixels for the encoder. ``place``
    selects the process that makes pixels: the loader, or the constructor after planning. With
    ``"auto"`` it is the loader if pixels are no larger than the files. ``place`` never changes the
    delivered data and is not part of the fingerprint.
    """

    column: str | tuple[str, ...] = "images"
    placeholder: int = field(kw_only=True)  # token id at the place of the encoder's output
    patch: int = field(default=14, kw_only=True)
    merge: int = field(default=2, kw_only=True)  # merge x merge patches give one token
    min_pixels: int = field(default=56 * 56, kw_only=True)
    max_pixels: int = field(default=1280 * 28 * 28, kw_only=True)
    # (height, width) of all images: cropped to the shape, then resized.
    size: tuple[int, int] | None = field(default=None, kw_only=True)
    at: str = field(default="start", kw_only=True)
    # at="marker": the token that an image replaces; None: the placeholder.
    marker: int | None = field(default=None, kw_only=True)
    mean: tuple[float, float, float] = field(default=MEAN, kw_only=True)
    std: tuple[float, float, float] = field(default=STD, kw_only=True)
    dtype: str = field(default="float32", kw_only=True)
    crop: str | None = field(default=None, kw_only=True)
    flip: bool = field(default=False, kw_only=True)  # half of the images are mirrored, at random
    # JPEGs much larger than requested are decoded at 1/2, 1/4 or 1/8 of their size.
    scaled: bool = field(default=True, kw_only=True)
    max_images: int = field(default=64, kw_only=True)
    animated: str = field(default="first", kw_only=True)
    place: str = field(default="auto", kw_only=True)
    max_pixels_in: int = field(default=ImageLimits().max_pixels_in, kw_only=True)
    max_decoded_bytes: int = field(default=ImageLimits().max_decoded_bytes, kw_only=True)
    max_file_bytes: int = field(default=ImageLimits().max_file_bytes, kw_only=True)
    max_aspect: float = field(default=ImageLimits().max_aspect, kw_only=True)
    kind: ClassVar[str] = "images"
    user_code: ClassVar[bool] = False
    holds_lock: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("column", "size", "mean", "std"):
            if isinstance(given := getattr(self, name), list):  # from YAML
                object.__setattr__(self, name, tuple(given))
        refuse("Images", self._problems())

    def _problems(self) -> list[str]:
        problems = [
            p
            for i, c in enumerate(self.columns)
            for p in column_problems(f"column[{i}]" if len(self.columns) > 1 else "column", c)
        ]
        if not self.columns or (not problems and len(set(self.columns)) < len(self.columns)):
            problems.append(
                f"column: expected a name or several different ones, got {self.column!r}"
            )
        for name, least, most in (
            ("patch", 1, 512),
            ("merge", 1, 64),
            ("placeholder", 0, 2**31 - 1),
            ("marker", 0, 2**31 - 1),
        ):
            problems += (
                [] if name == "marker" and self.marker is None else _whole(self, name, least, most)
            )
        for name in (
            "min_pixels",
            "max_pixels",
            "max_images",
            "max_pixels_in",
            "max_decoded_bytes",
            "max_file_bytes",
        ):
            problems += _whole(self, name, 1, 2**62)
        for name, known in (
            ("at", AT),
            ("dtype", DTYPES),
            ("animated", ANIMATED),
            ("place", PLACES),
            ("crop", (None, "random")),
        ):
            if getattr(self, name) not in known:
                problems.append(
                    f"{name}: expected one of {', '.join(map(str, known))}, got "
                    f"{getattr(self, name)!r}"
                )
        if self.marker is not None and self.at != "marker":
            problems.append(f'marker: expected at="marker" with it, got at={self.at!r}')
        problems += [p for name in ("mean", "std") for p in _channels(name, getattr(self, name))]
        if not _number(self.max_aspect) or self.max_aspect < 1:
            problems.append(f"max_aspect: expected a number of at least 1, got {self.max_aspect!r}")
        return (
            problems
            + flag_problems(self, "flip", "scaled")
            + (self._size_problems() if not problems else [])
        )

    def _size_problems(self) -> list[str]:
        side = self.factor
        if self.size is not None:
            whole = (
                isinstance(self.size, tuple)
                and len(self.size) == 2
                and all(isinstance(s, int) and s > 0 for s in self.size)
            )
            if not whole or any(s % side for s in self.size):
                return [
                    "size: expected (height, width), both multiples of patch * merge = "
                    f"{side}, got {self.size!r}"
                ]
            many = math.prod(self.size) > MAX_TOKENS * side * side
            return (
                [f"size: expected at most {MAX_TOKENS} tokens per image, got more with {self.size}"]
                if many
                else []
            )
        if self.max_pixels < max(side * side, self.min_pixels):
            return [
                f"max_pixels: expected at least min_pixels={self.min_pixels} and one token "
                f"of {side} x {side}, got {self.max_pixels}"
            ]
        return (
            []
            if self.max_pixels <= MAX_TOKENS * side * side
            else [
                f"max_pixels: expected at most {MAX_TOKENS} tokens per image "
                f"({MAX_TOKENS * side * side} pixels), got {self.max_pixels}"
            ]
        )

    @property
    def columns(self) -> tuple[str, ...]:
        return self.column if isinstance(self.column, tuple) else (self.column,)

    @property
    def factor(self) -> int:
        """Pixels of one side of the square that gives one token."""
        return self.patch * self.merge

    @property
    def limits(self) -> ImageLimits:
        return ImageLimits(
            max_pixels_in=self.max_pixels_in,
            max_decoded_bytes=self.max_decoded_bytes,
            max_file_bytes=self.max_file_bytes,
            max_aspect=self.max_aspect,
        )

    @property
    def randomized(self) -> bool:
        return self.crop is not None or self.flip

    def __repr__(self) -> str:
        changed = [
            f
            for f in fields(self)
            if f.name not in ("column", "placeholder") and getattr(self, f.name) != f.default
        ]
        options = "".join(f", {f.name}={getattr(self, f.name)!r}" for f in changed)
        return f"Images({self.column!r}, placeholder={self.placeholder}{options})"

    def fingerprint(self) -> str:
        return digest(
            "images",
            *(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "place"),
        )

    def plan(
        self, image_header: ImageHeader, random: Sequence[float] = (0.0,) * RANDOM_NUMBERS
    ) -> Prefix:
        """Return the parameters of the pixels of an image, from its header.

        ``random``: the image's row of ``random_numbers``, if the specification uses randomness.
        Raises BadImage for an animation that ``animated`` excludes.
        """
        if image_header.frames > 1 and self.animated == "quarantine":
            raise BadImage(f"expected a still image, got an animated {image_header.format}")
        box = self._box(image_header.width, image_header.height, random)
        height, width = self.size or fit(
            box[3],
            box[2],
            factor=self.factor,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )
        return Prefix(
            patch=self.patch,
            merge=self.merge,
            dtype=self.dtype,
            grid=(1, height // self.patch, width // self.patch),
            box=box,
            size=(image_header.width, image_header.height),
            flip=self.flip and random[4] < 0.5,
            scaled=self.scaled,
            mean=self.mean,
            std=self.std,
        )

    def _box(self, width: int, height: int, random: Sequence[float]) -> tuple[int, int, int, int]:
        """Return the crop (x, y, width, height).

        The crop is the whole image, or with a size the largest centred part of that shape. With a
        random crop it is a smaller part anywhere in the image.
        """
        w, h = width, height
        if self.size is not None:
            target_height, target_width = self.size
            w, h = (
                (max(1, height * target_width // target_height), height)
                if width * target_height > height * target_width
                else (width, max(1, width * target_height // target_width))
            )
        if self.crop is None:
            return (width - w) // 2, (height - h) // 2, w, h
        kept = [LEAST_SIDE + (1 - LEAST_SIDE) * u for u in random[:2]]
        if self.size is not None:
            kept[1] = kept[0]  # the shape stays
        w, h = max(1, math.floor(w * kept[0])), max(1, math.floor(h * kept[1]))
        return (
            math.floor((width - w + 1) * random[2]),
            math.floor((height - h + 1) * random[3]),
            w,
            h,
        )


def fit(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return (height, width) to which an image is resized.

    Both are multiples of ``factor``, their product is within the bounds, and the shape is kept as
    well as possible. All arithmetic is in whole numbers, so that every machine gets the same size.
    Each side is rounded to the nearest multiple. If the product is then too large, both sides
    shrink by the same ratio and are rounded down. If it is too small, both grow and are rounded up.
    The upper bound always holds, the lower bound only where the upper one permits it.
    """
    rows, columns = _nearest(height, factor), _nearest(width, factor)
    most, area = max_pixels // (factor * factor), factor * factor
    if rows * columns * area < min_pixels:
        rows, columns = (
            _root_up(height * min_pixels, width * area),
            _root_up(width * min_pixels, height * area),
        )
    if rows * columns > most:
        rows = max(1, math.isqrt(height * max_pixels // (width * area)))
        columns = max(1, math.isqrt(width * max_pixels // (height * area)))
        # Correct a side that could not shrink below one.
        rows, columns = (
            min(rows, most // min(columns, most)),
            min(columns, most // min(rows, most)),
        )
    return rows * factor, columns * factor


def _nearest(side: int, factor: int) -> int:
    """Return ``side / factor``, rounded to a whole number; a tie is rounded to the even one.

    The result may be 0, which ``fit`` enlarges.
    """
    whole, rest = divmod(side, factor)
    return whole + (2 * rest > factor or (2 * rest == factor and whole % 2 == 1))


def _root_up(top: int, bottom: int) -> int:
    """Return the smallest whole number whose square is at least top / bottom."""
    return math.isqrt(-(-top // bottom) - 1) + 1


def random_numbers(key: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1) for every image: float64 ``[images, RANDOM_NUMBERS]``.

    The numbers follow from the key of the image's row and the number of the image in the row.
    """
    drawn = mix64(mix64(key ^ number.astype(U64))[:, None] ^ np.arange(RANDOM_NUMBERS, dtype=U64))
    return (drawn >> U64(11)) * 2.0**-53


def _whole(spec: Any, name: str, least: int, most: int) -> list[str]:
    value = getattr(spec, name)
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return []
    return [f"{name}: expected a whole number from {least} to {most}, got {value!r}"]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _channels(name: str, value: Any) -> list[str]:
    if (
        not isinstance(value, tuple)
        or len(value) != 3
        or not all(_number(v) and abs(v) < 1e6 for v in value)
    ):
        return [
            f"{name}: expected three numbers, for red, green and blue, between -1e6 and 1e6, got "
            f"{value!r}"
        ]
    return (
        [f"std: expected three numbers of at least 1e-6, got {value!r}"]
        if name == "std" and min(value) < 1e-6
        else []
    )
