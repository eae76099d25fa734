"""Parsers of image headers, without decoding a pixel.

They support JPEG, PNG, WebP and GIF. Files come from the web, and some are hostile. Each parser
only moves forward, allocates nothing of a size that a file claims, and reads a bounded number of
segments. An image whose header shows that it cannot be decoded is refused here, before it is
planned. Such images are truncated, too large, or a rare kind of JPEG.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

# Most segments or chunks of a file that are read. Photographs with depth maps and profiles have
# some hundreds, PNGs a few thousand.
MAX_SEGMENTS = 2**16
# A JPEG marker must end within this many bytes after its first 0xff; the bytes between are fill.
MAX_FILL = 64
# Most scans of a progressive JPEG. Each costs a pass over all pixels; encoders write about ten.
MAX_SCANS = 100
EXIF_BYTES = 2**16  # most bytes that are searched for the orientation


class BadImage(ValueError):
    """Raised for bytes that cannot be used as an image; ``reason`` goes to the quarantine."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Upper limits of the size and the decoding cost of an image.

    The largest real photographs have about 100 million pixels.
    """

    max_pixels_in: int = 178_956_970
    max_decoded_bytes: int = 2**31  # memory that decoding takes, as estimated
    max_file_bytes: int = 2**26
    max_aspect: float = 200.0  # ratio of the long side to the short side


DEFAULT_LIMITS = ImageLimits()


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Header of an image file.

    ``width`` and ``height`` are those of the upright image, ``stored`` those in the file.
    """

    width: int
    height: int
    mode: str  # L, LA, P, RGB, RGBA, CMYK
    format: str  # JPEG, PNG, WEBP, GIF
    frames: int = 1  # frames of an animation; 2 for a GIF of two or more
    bits: int = 8  # bits per channel
    orientation: int = 1  # EXIF orientation: 5 to 8 swap width and height
    scans: int = 1  # passes of a progressive JPEG, or 7 of an interlaced PNG

    @property
    def stored(self) -> tuple[int, int]:
        """(width, height) in the file, before the orientation is applied."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)

    @property
    def decoded_bytes(self) -> int:
        """Estimate of the bytes that decoding takes.

        Decoding takes up to eight bytes per pixel for work and result, or sixteen with 16 bits per
        channel. Progressive JPEGs (coefficients of all scans) and WebP (three canvases) take 12.
        """
        each = (
            12
            if self.format == "WEBP" or (self.format == "JPEG" and self.scans > 1)
            else 8 * max(1, self.bits // 8)
        )
        return self.width * self.height * each


def header(data: Any, limits: ImageLimits = DEFAULT_LIMITS) -> ImageHeader:
    """Return size, mode and frames of an image in ``data`` (bytes or an array of them).

    Raises only BadImage.
    """
    view = memoryview(data).cast("B")
    if len(view) > limits.max_file_bytes:
        raise BadImage(
            f"expected a file of at most max_file_bytes={limits.max_file_bytes} bytes, got "
            f"{len(view)}"
        )
    start = bytes(view[:16])
    try:
        if start[:3] == b"\xff\xd8\xff":
            parsed = _jpeg(view)
        elif start[:8] == b"\x89PNG\r\n\x1a\n":
            parsed = _png(view)
        elif start[:4] == b"RIFF" and start[8:12] == b"WEBP":
            parsed = _webp(view)
        elif start[:6] in (b"GIF87a", b"GIF89a"):
            parsed = _gif(view)
        else:
            raise BadImage(
                f"expected a JPEG, PNG, WebP or GIF file, got {_describe_bytes(view, start)}"
            )
    except (struct.error, IndexError):  # read past the end
        raise BadImage(
            f"expected a complete image header, got a file truncated after {len(view)} bytes"
        ) from None
    _check_limits(parsed, limits)
    return parsed


def _check_limits(parsed: ImageHeader, limits: ImageLimits) -> None:
    width, height = parsed.width, parsed.height
    if not width or not height:
        raise BadImage(f"expected an image with pixels, got {width} x {height}")
    if width * height > limits.max_pixels_in:
        raise BadImage(
            f"expected at most max_pixels_in={limits.max_pixels_in} pixels, got {width} x {height}"
        )
    if parsed.decoded_bytes > limits.max_decoded_bytes:
        raise BadImage(
            f"expected decoding to need at most max_decoded_bytes={limits.max_decoded_bytes}, got "
            f"about {parsed.decoded_bytes} bytes"
        )
    if max(width, height) > limits.max_aspect * min(width, height):
        raise BadImage(
            f"expected sides with a ratio of at most max_aspect={limits.max_aspect:g}, got "
            f"{width} x {height} pixels"
        )


_KINDS = (
    (b"BM", "a BMP file"),
    (b"II*\0", "a TIFF file"),
    (b"MM\0*", "a TIFF file"),
    (b"\0\0\x01\0", "an icon"),
    (b"%PDF", "a PDF file"),
    (b"\xff\x0a", "a JPEG XL file"),
    (b"\0\0\0\x0cjP", "a JPEG 2000 file"),
    (b"PK\x03\x04", "a zip file"),
    (b"\x1f\x8b", "gzip"),
)


def _describe_bytes(view: memoryview, start: bytes) -> str:
    """Describe the start of a file of an unknown format, for the reason in the quarantine."""
    if not start:
        return "no bytes"
    if start[4:8] == b"ftyp":
        return f"a file of the kind {start[8:12].decode('latin-1')!r} (AVIF, HEIC or video)"
    for magic, kind in _KINDS:
        if start.startswith(magic):
            return kind
    text = bytes(view[:256]).lstrip()
    if text[:1] == b"<":
        return f"markup, {text[:40].decode('latin-1')!r}"
    return f"{len(view)} bytes that begin with {start!r}"


# JPEG

_SOF = {0xC0: "baseline", 0xC1: "sequential", 0xC2: "progressive"}
_OTHER_SOF = {
    0xC3: "lossless",
    0xC5: "hierarchical",
    0xC6: "hierarchical",
    0xC7: "hierarchical lossless",
    0xC9: "arithmetic",
    0xCA: "arithmetic",
    0xCB: "arithmetic lossless",
    0xCD: "hierarchical",
    0xCE: "hierarchical",
    0xCF: "hierarchical lossless",
}
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length
_JPEG_MODES = {1: "L", 3: "RGB", 4: "CMYK"}


def _jpeg(view: memoryview) -> ImageHeader:
    at, frame, orientation = 2, None, 0
    for _ in range(MAX_SEGMENTS):
        marker, at = _marker(view, at)
        if marker in _ALONE:
            continue
        if marker == 0xD9 or marker == 0xD8:
            raise BadImage(f"expected an image in the JPEG, got the marker 0xff{marker:02x} first")
        size = view[at] << 8 | view[at + 1]
        if size < 2:
            raise BadImage(f"expected a JPEG segment of at least 2 bytes, got {size}")
        if marker in _SOF or marker in _OTHER_SOF:
            frame = frame or _jpeg_frame(view, at, marker)
        elif marker == 0xE1 and not orientation and bytes(view[at + 2 : at + 8]) == b"Exif\0\0":
            orientation = orientation_of(bytes(view[at + 8 : at + size]))
        elif marker == 0xDA:
            return _jpeg_header(view, at, frame, orientation or 1)
        at += size
    raise BadImage(f"expected at most {MAX_SEGMENTS} segments before the image of a JPEG, got more")


def _marker(view: memoryview, at: int) -> tuple[int, int]:
    """Return the JPEG marker at ``at`` and the offset after it. Raises BadImage."""
    if view[at] != 0xFF:
        raise BadImage(f"expected a JPEG marker at byte {at}, got 0x{view[at]:02x}")
    for i in range(at + 1, at + 1 + MAX_FILL):
        if view[i] != 0xFF:
            return view[i], i + 1
    raise BadImage(f"expected a JPEG marker at byte {at}, got {MAX_FILL} or more fill bytes")


def _jpeg_frame(view: memoryview, at: int, marker: int) -> tuple[int, int, int, int]:
    if marker in _OTHER_SOF:
        raise BadImage(
            f"expected a baseline, sequential or progressive JPEG, got a {_OTHER_SOF[marker]} one"
        )
    bits, height, width, channels = struct.unpack_from(">BHHB", view, at + 2)
    if bits != 8:
        raise BadImage(f"expected a JPEG with 8 bits per channel, got {bits}")
    if channels not in _JPEG_MODES:
        raise BadImage(f"expected a JPEG with 1, 3 or 4 channels, got {channels}")
    if not height:
        raise BadImage("expected the height of the JPEG before its image, got 0")
    return marker, width, height, channels


def _jpeg_header(
    view: memoryview, at: int, frame: tuple[int, int, int, int] | None, orientation: int
) -> ImageHeader:
    if frame is None:
        raise BadImage("expected the size of the JPEG before its image, got the image first")
    marker, width, height, channels = frame
    raw = None
    # Most files end with their image; some have more data after it.
    if view[-2] != 0xFF or view[-1] != 0xD9:
        raw = bytes(view[at:])
        if b"\xff\xd9" not in raw:
            raise BadImage(
                "expected the end-of-image marker of the JPEG, got the end of a truncated file"
            )
    scans = 1
    # Inside the coded pixels 0xFF never precedes 0xDA, so counting these pairs counts scans.
    if marker == 0xC2:
        scans = 1 + (raw or bytes(view[at:])).count(b"\xff\xda")
        if scans > MAX_SCANS:
            raise BadImage(f"expected a progressive JPEG of at most {MAX_SCANS} scans, got {scans}")
    upright = (height, width) if orientation >= 5 else (width, height)
    return ImageHeader(*upright, _JPEG_MODES[channels], "JPEG", 1, 8, orientation, scans)


def orientation_of(tiff: bytes) -> int:
    """Return the EXIF orientation, 1 to 8, or 1 if it cannot be read."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        at = struct.unpack_from(order + "I", tiff, 4)[0]
        entries = struct.unpack_from(order + "H", tiff, at)[0]
        for i in range(entries):
            tag, kind, count = struct.unpack_from(order + "HHI", tiff, at + 2 + 12 * i)
            if tag == 0x0112 and count == 1 and kind in (1, 3, 4):
                orientation: int = struct.unpack_from(
                    order + {1: "B", 3: "H", 4: "I"}[kind], tiff, at + 10 + 12 * i
                )[0]
                return orientation if 1 <= orientation <= 8 else 1
    except struct.error:
        pass
    return 1


# PNG

_PNG_MODES = {
    0: ("L", (1, 2, 4, 8, 16)),
    2: ("RGB", (8, 16)),
    3: ("P", (1, 2, 4, 8)),
    4: ("LA", (8, 16)),
    6: ("RGBA", (8, 16)),
}


def _png(view: memoryview) -> ImageHeader:
    size, name, width, height, bits, colour, packing, filtering, interlace = struct.unpack_from(
        ">I4sIIBBBBB", view, 8
    )
    if size != 13 or name != b"IHDR":
        raise BadImage(f"expected a PNG that begins with IHDR, got {name!r} of {size} bytes")
    mode, depths = _PNG_MODES.get(colour, ("", ()))
    if bits not in depths or packing or filtering or interlace > 1:
        raise BadImage(
            "expected a PNG of a valid kind, got "
            f"{bits} bits of colour type {colour}, compression {packing}, filter {filtering} and "
            f"interlace {interlace}"
        )
    frames, orientation = _png_chunks(view)
    upright = (height, width) if orientation >= 5 else (width, height)
    return ImageHeader(*upright, mode, "PNG", frames, bits, orientation, 7 if interlace else 1)


def _png_chunks(view: memoryview) -> tuple[int, int]:
    """Return the number of frames and the orientation, after reading all chunks.

    Raises BadImage if the file is truncated, which only its end shows.
    """
    at, frames, orientation, pixels = 33, 1, 1, False
    unpack, total = struct.Struct(">I4s").unpack_from, len(view)
    for _ in range(MAX_SEGMENTS):
        if at + 8 > total:
            raise BadImage(
                "expected the chunk IEND of the PNG, got the end of the file: it is truncated"
            )
        size, name = unpack(view, at)
        if name == b"IDAT":
            pixels = True
        elif name == b"IEND":
            if not pixels:
                raise BadImage("expected a chunk IDAT in the PNG, got none")
            return frames, orientation
        elif name == b"acTL" and not pixels:
            frames = max(1, struct.unpack_from(">I", view, at + 8)[0])
        elif name == b"eXIf":
            orientation = orientation_of(bytes(view[at + 8 : at + 8 + min(size, EXIF_BYTES)]))
        at += size + 12
    raise BadImage(f"expected a PNG of at most {MAX_SEGMENTS} chunks, got more")


# WebP


def _webp(view: memoryview) -> ImageHeader:
    end = 8 + struct.unpack_from("<I", view, 4)[0]
    if end > len(view):
        raise BadImage(f"expected a WebP of {end} bytes, got {len(view)}: it is truncated")
    size_and_mode, frames, orientation, pictures, at = None, 1, 1, 0, 12
    for _ in range(MAX_SEGMENTS):
        if at + 8 > end:
            break
        name, size = struct.unpack_from("<4sI", view, at)
        name, at = bytes(name), at + 8
        if at + size > end:
            raise BadImage(
                f"expected a WebP chunk of {size} bytes, got {end - at}: it is truncated"
            )
        if size_and_mode is None:
            size_and_mode = _webp_size(view, at, name)
        pictures += name in (b"VP8 ", b"VP8L", b"ANMF")
        if name == b"ANMF":
            frames = pictures
        elif name == b"EXIF":
            exif = bytes(view[at : at + min(size, EXIF_BYTES)])
            orientation = orientation_of(exif.removeprefix(b"Exif\0\0"))
        at += size + (size & 1)
    if size_and_mode is None or not pictures:
        raise BadImage("expected a chunk with pixels in the WebP, got none")
    width, height, mode = size_and_mode
    upright = (height, width) if orientation >= 5 else (width, height)
    return ImageHeader(*upright, mode, "WEBP", frames, 8, orientation)


def _webp_size(view: memoryview, at: int, name: bytes) -> tuple[int, int, str]:
    """Return width, height and mode from the first chunk of a WebP. Raises BadImage."""
    if name == b"VP8 ":
        if bytes(view[at + 3 : at + 6]) != b"\x9d\x01\x2a":
            raise BadImage(
                "expected a key frame at the start of the WebP image, got "
                f"{bytes(view[at + 3 : at + 6])!r}"
            )
        width, height = struct.unpack_from("<HH", view, at + 6)
        return width & 0x3FFF, height & 0x3FFF, "RGB"
    if name == b"VP8L":
        signature, bits = struct.unpack_from("<BI", view, at)
        if signature != 0x2F:
            raise BadImage(
                "expected the signature 0x2f at the start of the lossless WebP image, got "
                f"0x{signature:02x}"
            )
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, "RGBA" if bits >> 28 & 1 else "RGB"
    if name == b"VP8X":
        flags, low_w, high_w, low_h, high_h = struct.unpack_from("<B3xHBHB", view, at)
        return (
            (high_w << 16 | low_w) + 1,
            (high_h << 16 | low_h) + 1,
            "RGBA" if flags & 0x10 else "RGB",
        )
    raise BadImage(f"expected a WebP that begins with VP8, VP8L or VP8X, got the chunk {name!r}")


# GIF


def _gif(view: memoryview) -> ImageHeader:
    """Return the header of a GIF; its size covers the screen and the first picture."""
    width, height, flags = struct.unpack_from("<HHB", view, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    pictures = blocks = 0
    for _ in range(MAX_SEGMENTS):
        kind = view[at] if at < len(view) else -1
        if kind == 0x2C:
            pictures += 1
            if pictures == 2:
                break
            x, y, w, h, flags = struct.unpack_from("<HHHHB", view, at + 1)
            width, height = max(width, x + w), max(height, y + h)
            at, blocks = _blocks(
                view, at + 11 + (3 << (flags & 7) + 1 if flags & 0x80 else 0), blocks
            )
        elif kind == 0x21:
            at, blocks = _blocks(view, at + 2, blocks)
        elif kind == 0x3B or (kind < 0 and pictures):  # many files lack the trailer
            break
        else:
            raise BadImage(
                f"expected a picture in the GIF, got the end of a truncated file at byte {at}"
                if kind < 0
                else f"expected a known GIF block at byte {at}, got 0x{kind:02x}"
            )
    if not pictures:
        raise BadImage("expected a picture in the GIF, got none")
    return ImageHeader(width, height, "P", "GIF", pictures)


def _blocks(view: memoryview, at: int, count: int) -> tuple[int, int]:
    """Return the offset after the run of data blocks at ``at``, and ``count`` plus their number.

    Raises BadImage if the file ends before the run, or has too many blocks.
    """
    while count < 4 * MAX_SEGMENTS:
        if at >= len(view):
            raise BadImage(
                f"expected a data block of the GIF at byte {at}, got the end of the file: "
                "it is truncated"
            )
        if not view[at]:
            return at + 1, count
        at, count = at + 1 + view[at], count + 1
    raise BadImage(f"expected a GIF of at most {4 * MAX_SEGMENTS} blocks, got more")
