"""Image files of every kind that a source may hold, made with Pillow."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def photo(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return smooth colours with some noise, as a photograph has: bytes [height, width, 3]."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), np.uint8)
    smooth = np.asarray(
        Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    ).astype(np.int16)
    return (smooth + rng.integers(-6, 7, smooth.shape)).clip(0, 255).astype(np.uint8)


def saved(image: Any, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(out, kind, **options)
    return out.getvalue()


def jpeg(height: int = 40, width: int = 60, seed: int = 0, **options: Any) -> bytes:
    return saved(photo(height, width, seed), "JPEG", **{"quality": 90, **options})


def png(height: int = 40, width: int = 60, seed: int = 0, **options: Any) -> bytes:
    return saved(photo(height, width, seed), "PNG", **options)


def turned(orientation: int, kind: str = "JPEG", height: int = 40, width: int = 60) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(photo(height, width), kind, exif=exif)


def moving(kind: str, frames: int = 3) -> bytes:
    first, *rest = (Image.fromarray(photo(20, 30, seed)) for seed in range(frames))
    return saved(first, kind, save_all=True, append_images=rest)


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_of(
    width: int,
    height: int,
    bits: int,
    colour: int,
    rows: bytes,
    interlace: int = 0,
    more: bytes = b"",
) -> bytes:
    """Return a hand-made PNG, of sizes and kinds that Pillow does not write."""
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlace)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + more
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def interlaced(height: int = 20, width: int = 30, seed: int = 0) -> bytes:
    """Return an Adam7 PNG of ``photo``; Pillow reads such files and does not write them."""
    image, rows = photo(height, width, seed), b""
    for x, y, dx, dy in (
        (0, 0, 8, 8),
        (4, 0, 8, 8),
        (0, 4, 4, 8),
        (2, 0, 4, 4),
        (0, 2, 2, 4),
        (1, 0, 2, 2),
        (0, 1, 1, 2),
    ):
        part = image[y::dy, x::dx]
        rows += b"".join(b"\0" + line.tobytes() for line in part) if part.size else b""
    return png_of(width, height, 8, 2, rows, interlace=1)


def deep(height: int = 20, width: int = 30, colour: int = 0) -> bytes:
    """Return a PNG of 16 bits a channel: upper bytes are ``photo``, lower bytes are noise."""
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    upper = np.concatenate([photo(height, width), photo(height, width, 1)], axis=2)[:, :, :channels]
    lower = np.random.default_rng(7).integers(0, 256, upper.shape, np.uint8)
    lines = np.stack([upper, lower], axis=-1).reshape(height, -1)
    return png_of(width, height, 16, colour, b"".join(b"\0" + line.tobytes() for line in lines))


def alpha(height: int = 20, width: int = 30) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (height, width), np.uint8)


def seen_through() -> Image.Image:
    image = Image.fromarray(photo(20, 30))
    image.putalpha(Image.fromarray(alpha()))
    return image


def see_through_palette() -> bytes:
    image = Image.fromarray(photo(20, 30)).quantize(16)
    return saved(image, "PNG", transparency=3)


FILES: dict[str, bytes] = {
    "jpeg": jpeg(),
    "jpeg progressive": jpeg(progressive=True),
    "jpeg 4:4:4": jpeg(subsampling=0),
    "jpeg grey": saved(photo(40, 60)[:, :, 0], "JPEG"),
    "jpeg cmyk": saved(Image.fromarray(photo(40, 60)).convert("CMYK"), "JPEG"),
    "jpeg odd": jpeg(37, 53),
    "jpeg one pixel": jpeg(1, 1),
    "jpeg and more behind it": jpeg() + b"\0" * 100 + b"trailer",
    **{f"jpeg turned {k}": turned(k) for k in range(1, 9)},
    "png turned": turned(6, "PNG"),
    "webp turned": turned(8, "WEBP"),
    "png": png(),
    "png grey": saved(photo(20, 30)[:, :, 1], "PNG"),
    "png palette": saved(Image.fromarray(photo(20, 30)).quantize(16), "PNG"),
    "png see-through palette": see_through_palette(),
    "png rgba": saved(seen_through(), "PNG"),
    "png la": saved(seen_through().convert("LA"), "PNG"),
    "png one bit": saved(Image.fromarray(photo(20, 30)).convert("1"), "PNG"),
    "png interlaced": interlaced(),
    **{f"png 16 bit {c}": deep(colour=c) for c in (0, 2, 4, 6)},
    "apng": moving("PNG"),
    "webp": saved(photo(40, 60), "WEBP"),
    "webp lossless": saved(photo(40, 60), "WEBP", lossless=True),
    "webp rgba": saved(seen_through(), "WEBP"),
    "webp lossless rgba": saved(seen_through(), "WEBP", lossless=True),
    "webp animated": moving("WEBP"),
    "gif": saved(photo(20, 30), "GIF"),
    "gif animated": moving("GIF"),
}
ANIMATED = ("apng", "webp animated", "gif animated")
BAD: dict[str, tuple[bytes, str]] = {  # name -> bytes, what the reason says
    "nothing": (b"", "no bytes"),
    "garbage": (bytes(range(200)), "that begin with"),
    "html": (b"<!DOCTYPE html><html>404</html>", "markup"),
    "text": (b"not found", "that begin with"),
    "bmp": (saved(photo(4, 4), "BMP"), "a BMP file"),
    "avif": (b"\0\0\0\x1cftypavif\0\0\0\0", "AVIF"),
    "png bomb": (
        png_of(60000, 60000, 8, 2, b"\0" * 100),
        "expected at most max_pixels_in=178956970 pixels, got 60000 x 60000",
    ),
    "png of no height": (png_of(10, 0, 8, 2, b""), "expected an image with pixels, got 10 x 0"),
    "png cut": (png()[:-20], "truncated"),
    "png header only": (png()[:20], "truncated"),
    "png of a wrong kind": (png_of(4, 4, 3, 2, b""), "expected a PNG of a valid kind, got 3 bits"),
    "ribbon": (png_of(9000, 4, 8, 2, b""), "max_aspect"),
    "jpeg cut": (jpeg()[:-300], "truncated"),
    "jpeg start only": (jpeg()[:30], "truncated"),
    "jpeg mark only": (b"\xff\xd8\xff", "truncated"),
    "jpeg lossless": (jpeg().replace(b"\xff\xc0", b"\xff\xc3", 1), "lossless"),
    "jpeg arithmetic": (jpeg().replace(b"\xff\xc0", b"\xff\xc9", 1), "arithmetic"),
    "jpeg fill": (b"\xff\xd8" + b"\xff" * 10**6, "fill bytes"),
    "jpeg ended": (
        b"\xff\xd8\xff\xd9" + b"\0" * 99,
        "expected an image in the JPEG, got the marker 0xffd9 first",
    ),
    "jpeg scans": (jpeg(progressive=True)[:-2] + b"\xff\xda" * 200 + b"\xff\xd9", "scans"),
    "webp without its mark": (
        saved(photo(40, 60), "WEBP", lossless=True).replace(b"\x2f", b"\x00", 1),
        "expected the signature 0x2f",
    ),
    "webp cut": (saved(photo(40, 60), "WEBP")[:-50], "truncated"),
    "gif cut": (saved(photo(20, 30), "GIF")[:100], "truncated"),
    "gif header only": (b"GIF89a" + b"\0" * 7, "truncated"),
}
