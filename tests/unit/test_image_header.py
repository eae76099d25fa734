"""Headers of image files: what they say, and what is refused before a pixel is decoded."""

from __future__ import annotations

import io
import pickle
import tracemalloc

import numpy as np
import pytest
from PIL import Image, ImageOps

from overlord.transforms.image_header import BadImage, ImageLimits, header
from tests.pictures import ANIMATED, BAD, FILES, chunk, jpeg, moving, png_of, turned


@pytest.mark.parametrize("name", FILES)
def test_a_header_says_the_size_that_pillow_finds_after_turning_the_image_upright(
    name: str,
) -> None:
    found = header(FILES[name])
    image = Image.open(io.BytesIO(FILES[name]))
    assert found.stored == image.size
    assert (found.width, found.height) == ImageOps.exif_transpose(image).size
    assert found.format == image.format
    assert (found.frames > 1) == (getattr(image, "n_frames", 1) > 1) == (name in ANIMATED)


@pytest.mark.parametrize("name", FILES)
def test_a_header_is_the_same_from_bytes_an_array_and_a_view_inside_another_array(
    name: str,
) -> None:
    data = FILES[name]
    inside = np.frombuffer(b"xyz" + data + b"xyz", np.uint8)[3:-3]
    assert (
        header(data)
        == header(np.frombuffer(data, np.uint8))
        == header(inside)
        == header(memoryview(data))
    )


def test_modes_bits_and_scans_are_reported() -> None:
    kinds = {name: header(FILES[name]) for name in FILES}
    assert {kinds[n].mode for n in ("jpeg", "png", "webp", "png 16 bit 2")} == {"RGB"}
    assert [
        kinds[n].mode
        for n in ("jpeg cmyk", "jpeg grey", "png palette", "png la", "png rgba", "webp rgba", "gif")
    ] == ["CMYK", "L", "P", "LA", "RGBA", "RGBA", "P"]
    assert [kinds[n].bits for n in ("png one bit", "png", "png 16 bit 0")] == [1, 8, 16]
    assert (kinds["jpeg"].scans, kinds["png interlaced"].scans) == (1, 7)
    assert 1 < kinds["jpeg progressive"].scans < 20
    assert [header(moving("PNG", n)).frames for n in (2, 5)] == [2, 5]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_orientation_of_exif_is_read_from_every_format_that_has_it(
    kind: str, orientation: int
) -> None:
    found = header(turned(orientation, kind))
    assert found.orientation == orientation
    assert (found.width, found.height) == ((60, 40) if orientation < 5 else (40, 60))


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_image_is_refused_with_a_reason(name: str) -> None:
    data, reason = BAD[name]
    with pytest.raises(BadImage, match=reason):
        header(data)


@pytest.mark.parametrize("name", FILES)
def test_every_file_cut_short_anywhere_is_refused_or_keeps_its_size(name: str) -> None:
    """Bytes behind the image may be missing, nothing else."""
    data = FILES[name]
    whole = header(data)
    for n in {*range(0, min(len(data), 200)), *range(200, len(data) - 1, 97), len(data) - 1}:
        try:
            found = header(data[:n])
        except BadImage:
            continue
        assert (found.width, found.height) == (whole.width, whole.height)
        assert n > 0.3 * len(data)  # a GIF whose first picture is whole


def test_limits_are_the_callers() -> None:
    data = jpeg(40, 60)
    for limits, reason in (
        (
            ImageLimits(max_pixels_in=2399),
            "expected at most max_pixels_in=2399 pixels, got 60 x 40",
        ),
        (ImageLimits(max_file_bytes=100), "expected a file of at most max_file_bytes=100 bytes"),
        (ImageLimits(max_aspect=1.4), "expected sides with a ratio of at most max_aspect=1.4"),
        (
            ImageLimits(max_decoded_bytes=9999),
            "expected decoding to need at most max_decoded_bytes=9999",
        ),
    ):
        with pytest.raises(BadImage, match=reason):
            header(data, limits)
    assert header(data, ImageLimits(max_pixels_in=2400, max_aspect=1.5)).width == 60


def test_a_bomb_costs_no_memory() -> None:
    data, _ = BAD["png bomb"]
    tracemalloc.start()
    with pytest.raises(BadImage):
        header(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**16


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8" + b"\xff\xe0\0\2" * 10**6,
        b"\xff\xd8\xff" + b"\xd0\xff" * 10**6,
        png_of(9, 9, 8, 2, b"", more=chunk(b"tEXt", b"") * 10**5),
        b"GIF89a" + b"\1\0\1\0\0\0\0" + b"\x21\xfe" + b"\1a" * 10**6 + b"\0",
        b"RIFF" + (2**24).to_bytes(4, "little") + b"WEBP" + b"JUNK\0\0\0\0" * 2**21,
    ],
)
def test_a_file_of_endless_small_parts_is_given_up(data: bytes) -> None:
    with pytest.raises(BadImage):
        header(data)


def test_a_reason_travels_between_processes() -> None:
    assert pickle.loads(pickle.dumps(BadImage("why"))).reason == "why"
