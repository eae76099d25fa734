"""Decoding of an image file to upright RGB of the requested size.

The rules are complete, so that another implementation can make the same pixels. Colour profiles are
ignored. CMYK is converted to RGB by Pillow's plain formula. Palettes are resolved. Transparent
pixels are composed on white. From 16 bits the upper 8 are kept. From an animation the first picture
is used. The EXIF orientation is applied before the crop. The crop is resized by Pillow's bicubic
filter with antialiasing. The decoder follows from the file alone: libjpeg-turbo by simplejpeg for
JPEGs of 1 or 3 channels, else Pillow.
"""

from __future__ import annotations

import threading
from io import BytesIO
from typing import Any

import numpy as np

from overlord.checks import pip_install
from overlord.errors import TransformError
from overlord.transforms.image_header import BadImage, ImageHeader, ImageLimits, header
from overlord.transforms.image_items import Prefix

# A JPEG may be decoded at 1/2, 1/4 or 1/8 of its size if the result is still this many times as
# large as requested.
GAP = 2
_TOLERATED = ("extraneous bytes",)  # defects of a JPEG that do not affect its pixels

try:
    import simplejpeg
    from PIL import (
        GifImagePlugin,
        Image,
        ImageFile,
        JpegImagePlugin,
        PngImagePlugin,
        WebPImagePlugin,
    )
except ImportError as fault:
    raise TransformError(
        "",
        "Images",
        f"expected the package {fault.name} to decode images, got none",
        pip_install("image"),
    ) from fault

# Opener of each format. ``Image.open`` is not used: it tries formats one by one, and warns of large
# images by a global setting.
_OPEN: dict[str, Any] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
}
# Limits without effect: the loader has checked the limits of the source when it planned the image.
_NO_LIMITS = ImageLimits(
    max_pixels_in=2**62, max_decoded_bytes=2**62, max_file_bytes=2**62, max_aspect=float("inf")
)
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(data: np.ndarray, prefix: Prefix) -> np.ndarray:
    """Return the crop of an image in the requested size. Raises BadImage.

    The result is uint8 ``[height, width, 3]``, or ``[height, width]`` for a grey image.
    """
    width, height = prefix.size
    image_header = header(data, _NO_LIMITS)
    if (image_header.width, image_header.height) != prefix.size:
        raise BadImage(
            f"expected an image of {width} x {height} pixels, as planned, got "
            f"{image_header.width} x {image_header.height}"
        )
    (_, gh, gw), p = prefix.grid, prefix.patch
    wanted = (gw * p, gh * p)
    scale = (
        _scale(prefix, wanted)
        if image_header.format == "JPEG" and image_header.mode != "CMYK"
        else 1
    )
    try:
        image, scale = _pixels(data, image_header, scale)
        image = _upright(image, image_header.orientation)
        resized = _resized(image, prefix, wanted, scale)
    except (BadImage, MemoryError):
        raise
    except Exception as fault:  # decoders raise any exception on a broken file
        raise BadImage(
            f"expected a {image_header.format} that can be decoded, got "
            f"{type(fault).__name__}: {fault!s:.200}"
        ) from fault
    return np.asarray(resized)


def _resized(image: Any, prefix: Prefix, wanted: tuple[int, int], scale: int) -> Any:
    """Return the crop in the requested size.

    A full-size image is cropped first, so that pixels around the crop do not affect it.
    """
    x, y, w, h = prefix.box
    box = (x, y, x + w, y + h)
    if scale == 1:  # resizing a box to its own size is a plain crop
        image, box = image.resize((w, h), box=box) if (w, h) != image.size else image, (0, 0, w, h)
    return image.resize(wanted, Image.Resampling.BICUBIC, box=tuple(side / scale for side in box))


def _scale(prefix: Prefix, wanted: tuple[int, int]) -> int:
    """Return the factor (1, 2, 4 or 8) by which a JPEG is reduced while it is decoded.

    The factor follows from the item, so it is the same in every process.
    """
    if not prefix.scaled:
        return 1
    _, _, w, h = prefix.box
    return next((s for s in (8, 4, 2) if w >= GAP * s * wanted[0] and h >= GAP * s * wanted[1]), 1)


def _pixels(data: np.ndarray, image_header: ImageHeader, scale: int) -> tuple[Any, int]:
    """Return an image of mode L or RGB in stored orientation, and the factor of its reduction."""
    width, height = image_header.stored
    if image_header.format == "JPEG" and image_header.mode != "CMYK":
        array = _jpeg(data, image_header, scale)
        if array is not None:
            image = Image.fromarray(array[:, :, 0] if image_header.mode == "L" else array)
        else:
            image, scale = _pillow(data, image_header), 1
    else:
        image = _pillow(data, image_header)
    if image.size != (-(-width // scale), -(-height // scale)):
        raise BadImage(
            f"expected an image of {width} x {height} pixels, as in its header, got "
            f"{image.size[0]} x {image.size[1]} at 1/{scale} of its size"
        )
    return image, scale


def _jpeg(data: np.ndarray, image_header: ImageHeader, scale: int) -> np.ndarray | None:
    """Return the pixels of a JPEG at 1/scale of its size; None if only Pillow can decode it."""
    width, height = (-(-side // scale) for side in image_header.stored)
    options = {
        "colorspace": "GRAY" if image_header.mode == "L" else "RGB",
        "min_height": height,
        "min_width": width,
        "min_factor": scale,
    }
    try:
        array: np.ndarray = simplejpeg.decode_jpeg(data, **options)
    except ValueError as fault:
        if "subsampling" in str(fault):
            return None
        if not any(tolerated in str(fault) for tolerated in _TOLERATED):
            raise
        array = simplejpeg.decode_jpeg(data, **options, strict=False)
    return array


class _TruncatedFlag:
    """Value for Pillow's LOAD_TRUNCATED_IMAGES that is false in threads that decode here.

    In other threads it has the original value. The program or an imported package may set that
    flag. The outcome of a broken file must not depend on the process that decodes it.
    """

    def __init__(self, value: Any):
        self._value = value

    def __bool__(self) -> bool:
        return bool(self._value) and not getattr(_thread, "decoding", False)


_thread = threading.local()


def _pillow(data: np.ndarray, image_header: ImageHeader) -> Any:
    if not isinstance(flag := ImageFile.LOAD_TRUNCATED_IMAGES, _TruncatedFlag) and flag:
        ImageFile.LOAD_TRUNCATED_IMAGES = _TruncatedFlag(flag)
    _thread.decoding = True
    try:
        image = _OPEN[image_header.format](BytesIO(data.data))
        if image.size != image_header.stored:
            raise BadImage(
                "expected an image of {} x {} pixels, as in its header, got {} x {}".format(
                    *image_header.stored, *image.size
                )
            )
        image.load()
    finally:
        _thread.decoding = False
    return _to_l_or_rgb(image)


def _to_l_or_rgb(image: Any) -> Any:
    """Convert any mode of the four formats to L or RGB."""
    if image.mode in ("I;16", "I;16B", "I;16L", "I"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    if image.mode == "1":
        return image.convert("L")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def _upright(image: Any, orientation: int) -> Any:
    return image.transpose(_TURNS[orientation]) if orientation > 1 else image
