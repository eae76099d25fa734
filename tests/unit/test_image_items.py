"""Pixels of items against plain formulas: every kind of file, every step from bytes to patches."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from overlord.transforms.image_header import BadImage, header
from overlord.transforms.image_items import (
    PREFIX_BYTES,
    READY,
    Prefix,
    fill,
    item_grid,
    item_shape,
    make_ready,
    read_prefix,
)
from overlord.transforms.images import MEAN, STD
from tests.pictures import FILES, alpha, deep, jpeg, photo, png, saved, seen_through, turned


def item_of(data: bytes, grid: tuple[int, int] = (2, 4), **options: Any) -> np.ndarray:
    found = header(data)
    size = (found.width, found.height)
    given = {
        "patch": 7,
        "merge": 2,
        "dtype": "float32",
        "box": (0, 0, *size),
        "size": size,
        "mean": MEAN,
        "std": STD,
        **options,
    }
    return np.frombuffer(Prefix(grid=(1, *grid), **given).pack() + data, np.uint8)


def made(item: np.ndarray) -> np.ndarray:
    patches, dim, dtype = item_shape(item)
    out = np.full((patches, dim), 77, dtype)
    fill(item, out)
    return out


def as_image(pixels: np.ndarray, prefix: Prefix) -> np.ndarray:
    """Patches put together again, one by one: [height, width, 3]."""
    (_, gh, gw), p, m = prefix.grid, prefix.patch, prefix.merge
    image, k = np.empty((gh * p, gw * p, 3), pixels.dtype), 0
    for square_y in range(gh // m):
        for square_x in range(gw // m):
            for y in range(square_y * m, square_y * m + m):
                for x in range(square_x * m, square_x * m + m):
                    image[y * p : y * p + p, x * p : x * p + p] = (
                        pixels[k].reshape(3, p, p).transpose(1, 2, 0)
                    )
                    k += 1
    return image


def plain(
    image: Image.Image, width: int, height: int, box: tuple[int, int, int, int] | None = None
) -> np.ndarray:
    """The whole work in six lines of Pillow and numpy."""
    image = ImageOps.exif_transpose(image).convert("RGB")
    if box is not None:
        image = image.crop((box[0], box[1], box[0] + box[2], box[1] + box[3]))
    small = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC)).astype(np.float64)
    return (small / 255 - np.array(MEAN)) / np.array(STD)


OPAQUE = [
    n
    for n in FILES
    if n.startswith(("jpeg", "webp", "png", "gif"))
    and not any(w in n for w in ("rgba", "la", "see-", "16 bit 0", "16 bit 4", "16 bit 6"))
]


@pytest.mark.parametrize("name", OPAQUE)
def test_pixels_are_what_pillow_and_a_plain_formula_make(name: str) -> None:
    item = item_of(FILES[name])
    wanted = plain(Image.open(io.BytesIO(FILES[name])), 28, 14)
    assert np.abs(as_image(made(item), read_prefix(item)) - wanted).max() < 2e-6
    assert item_grid(item) == (1, 2, 4)
    assert item_shape(item) == (8, 147, "float32")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_turned_image_is_upright(kind: str, orientation: int) -> None:
    data = turned(orientation, kind)
    wanted = plain(Image.open(io.BytesIO(data)), 28, 14)
    item = item_of(data)
    assert np.abs(as_image(made(item), read_prefix(item)) - wanted).max() < 2e-6


def bytes_of(data: bytes, size: tuple[int, int]) -> np.ndarray:
    """An image as it is, neither resized nor normalised: [height, width, 3]."""
    item = item_of(data, grid=(size[1] // 2, size[0] // 2), patch=2, merge=1, dtype="uint8")
    return as_image(made(item), read_prefix(item))


def test_what_is_transparent_stands_on_white() -> None:
    a = alpha()[:, :, None].astype(int)
    for kind, options, image in (
        ("PNG", {}, seen_through()),
        ("WEBP", {"lossless": True, "exact": True}, seen_through()),
        ("PNG", {}, seen_through().convert("LA")),
    ):
        rgb = np.asarray(image.convert("RGB")).astype(int)
        wanted = (rgb * a + 255 * (255 - a)) / 255
        assert np.abs(bytes_of(saved(image, kind, **options), (30, 20)) - wanted).max() <= 0.51
    clear = np.zeros((20, 30, 4), np.uint8)
    assert (bytes_of(saved(clear, "PNG"), (30, 20)) == 255).all()


def test_a_colour_of_a_palette_that_is_transparent_is_white() -> None:
    data = FILES["png see-through palette"]
    image = Image.open(io.BytesIO(data))
    found, index = bytes_of(data, (30, 20)), np.asarray(image)
    assert (index == 3).any()
    assert (found[index == 3] == 255).all()
    assert np.array_equal(found[index != 3], np.asarray(image.convert("RGB"))[index != 3])


@pytest.mark.parametrize("colour", [0, 2, 4, 6])
def test_of_sixteen_bits_the_upper_eight_are_kept(colour: int) -> None:
    found = bytes_of(deep(colour=colour), (30, 20)).astype(int)
    upper = photo(20, 30).astype(int)
    if colour in (0, 4):
        upper = np.repeat(upper[:, :, :1], 3, axis=2)
    if colour in (4, 6):
        a = (photo(20, 30)[:, :, 1:2] if colour == 4 else photo(20, 30, 1)[:, :, :1]).astype(int)
        upper = (upper * a + 255 * (255 - a)) / 255
    assert np.abs(found - upper).max() <= 0.51


def test_an_interlaced_png_is_the_same_image() -> None:
    assert np.array_equal(bytes_of(FILES["png interlaced"], (30, 20)), photo(20, 30))


@pytest.mark.parametrize("name", ["apng", "webp animated", "gif animated"])
def test_of_an_animation_the_first_picture_is_taken(name: str) -> None:
    wanted = np.asarray(Image.open(io.BytesIO(FILES[name])).convert("RGB"))
    assert np.array_equal(bytes_of(FILES[name], (30, 20)), wanted)


def test_a_crop_is_cut_before_it_is_resized_and_a_flip_mirrors_the_result() -> None:
    data = png(40, 60)
    item = item_of(data, box=(13, 5, 30, 22))
    mirrored = item_of(data, box=(13, 5, 30, 22), flip=True)
    wanted = plain(Image.open(io.BytesIO(data)), 28, 14, (13, 5, 30, 22))
    assert np.abs(as_image(made(item), read_prefix(item)) - wanted).max() < 2e-6
    assert np.array_equal(
        as_image(made(mirrored), read_prefix(item)),
        as_image(made(item), read_prefix(item))[:, ::-1],
    )


def test_types_hold_the_same_image() -> None:
    data = jpeg()
    whole, half, raw = (made(item_of(data, dtype=d)) for d in ("float32", "float16", "uint8"))
    assert (whole.dtype, half.dtype, raw.dtype) == (np.float32, np.float16, np.uint8)
    assert np.array_equal(half, whole.astype(np.float16))
    mean, std = (np.repeat(np.array(v), 49) for v in (MEAN, STD))
    assert np.abs((raw / 255 - mean) / std - whole).max() < 2e-6


def test_merged_patches_stand_together_row_by_row() -> None:
    """Every patch of one colour: its number by rows of the image."""
    colours = np.arange(32, dtype=np.uint8).reshape(4, 8).repeat(7, 0).repeat(7, 1)
    rgb = np.stack([colours, colours + 100, colours + 200], axis=2)
    found = made(item_of(saved(rgb, "PNG"), grid=(4, 8), dtype="uint8"))
    assert found[:, 0].tolist()[:12] == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13]
    assert (
        found.reshape(32, 3, 49) == found[:, 0][:, None, None] + np.array([0, 100, 200])[:, None]
    ).all()
    assert made(item_of(saved(rgb, "PNG"), grid=(4, 8), dtype="uint8", merge=1))[
        :, 0
    ].tolist() == list(range(32))


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("name", ["jpeg", "png palette", "webp", "jpeg turned 6"])
def test_ready_pixels_are_bit_equal_to_those_made_later(name: str, dtype: str) -> None:
    item = item_of(FILES[name], dtype=dtype)
    ready = make_ready(item)
    assert read_prefix(ready).form == READY
    assert len(ready) == PREFIX_BYTES + read_prefix(item).nbytes
    shifted = np.concatenate([np.zeros(3, np.uint8), ready])[3:]  # items lie anywhere in a buffer
    assert np.array_equal(made(shifted).view(np.uint8), made(item).view(np.uint8))
    assert make_ready(ready) is ready


def test_pixels_are_the_same_every_time_and_the_item_is_left_alone() -> None:
    item = item_of(FILES["jpeg"])
    item.flags.writeable = False
    assert made(item).tobytes() == made(item).tobytes()


def test_a_large_jpeg_is_decoded_smaller_by_a_rule_that_the_item_shows() -> None:
    """A quarter of the size, and then resized: close to the whole image resized; the same where
    nothing is gained, or not wanted.
    """
    data = jpeg(400, 600, quality=95)
    wanted = plain(Image.open(io.BytesIO(data)), 28, 14)
    exact, scaled = item_of(data, scaled=False), item_of(data)
    assert np.abs(as_image(made(exact), read_prefix(exact)) - wanted).max() < 2e-6
    found = as_image(made(scaled), read_prefix(scaled))
    assert 0 < np.abs(found - wanted).max() < 0.2
    near = item_of(jpeg(27, 55))  # less than twice what is wanted of one side
    assert np.array_equal(made(near), made(item_of(jpeg(27, 55), scaled=False)))


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_crop_of_a_jpeg_decoded_smaller_shows_the_same_part(orientation: int) -> None:
    data = turned(orientation, height=500, width=700)
    width, height = (700, 500) if orientation == 1 else (500, 700)
    box = (width // 3, height // 3, width // 2, height // 2)
    wanted = plain(Image.open(io.BytesIO(data)), 28, 14, box)
    item = item_of(data, box=box)
    assert np.abs(as_image(made(item), read_prefix(item)) - wanted).mean() < 0.02


def test_a_file_that_turns_out_broken_is_a_bad_image_and_stays_an_item() -> None:
    data = png(40, 60)
    broken = bytearray(data)
    broken[len(data) // 2] ^= 0xFF
    half = jpeg(200, 200)
    for bad in (bytes(broken), half[: len(half) // 2] + b"\xff\xd9"):
        item = item_of(bad)
        with pytest.raises(BadImage, match="that can be decoded"):
            made(item)
        assert make_ready(item) is item


def test_bytes_of_another_image_than_was_planned_are_refused() -> None:
    item = np.concatenate(
        [item_of(png(40, 60))[:PREFIX_BYTES], np.frombuffer(png(41, 60), np.uint8)]
    )
    with pytest.raises(
        BadImage, match="expected an image of 60 x 40 pixels, as planned, got 60 x 41"
    ):
        made(item)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda item: item[:50], "expected an image item of at least 96 bytes"),
        (lambda item: b"XXXX" + item[4:], "expected an image item of version 1"),
        (lambda item: item[:4] + b"\2" + item[5:], "of version 2"),
        (lambda item: item[:5] + b"\7" + item[6:], "expected an image item of a known form"),
        (lambda item: item[:12] + b"\0" * 12 + item[24:], "expected an image grid"),
        (
            lambda item: item[:16] + (2**10).to_bytes(4, "little") * 2 + item[24:],
            r"expected an image grid .*, got \(1, 1024, 1024\)",
        ),
        (lambda item: item[:24] + b"\xff" * 16 + item[40:], "expected a crop inside the image"),
        (lambda item: item[:40] + b"\xff" * 8 + item[48:], "expected a mean and a std in range"),
        (lambda item: item[:64] + b"\0" * 24 + item[88:], "expected a mean and a std in range"),
        (lambda item: item[:5] + b"\1" + item[6:], "bytes of pixels in the image item"),
    ],
)
def test_a_prefix_that_makes_no_sense_is_refused(change: Any, reason: str) -> None:
    item = np.frombuffer(change(item_of(FILES["png"]).tobytes()), np.uint8)
    with pytest.raises(BadImage, match=reason):
        fill(item, np.zeros((8, 147), np.float32))


def test_what_a_program_set_for_its_own_images_changes_nothing_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packages that people import tell Pillow to take files that are cut short; workers of the
    process runtime do not import them.
    """
    whole = png(40, 60)
    broken = (
        whole[: len(whole) // 2]
        + bytes([whole[len(whole) // 2] ^ 0xFF])
        + whole[len(whole) // 2 + 1 :]
    )
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for _ in range(2):
        with pytest.raises(BadImage, match="expected a PNG that can be decoded"):
            made(item_of(broken))
        assert Image.open(io.BytesIO(broken)).convert("RGB").size == (60, 40), (
            "and for the program it is as it expected"
        )
    assert made(item_of(whole)).any()


def test_large_images_do_not_warn() -> None:
    """Pillow warns of a size that a program may have set for itself; limits are ours."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = 100
    try:
        assert made(item_of(FILES["png"])).shape == (8, 147)
        assert made(item_of(FILES["jpeg cmyk"])).shape == (8, 147)
    finally:
        Image.MAX_IMAGE_PIXELS = before


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from overlord.errors import TransformError

    monkeypatch.delitem(sys.modules, "overlord.transforms.image_decode", raising=False)
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(
        TransformError,
        match=r"expected the package simplejpeg .*; pip install 'overlord-data\[image\]'",
    ):
        made(item_of(FILES["jpeg"]))


def test_patches_equal_those_of_hugging_faces_processor() -> None:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processor = module.Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 16)
    for data in (jpeg(90, 70), png(30, 200), jpeg(200, 210)):
        found = processor(images=[Image.open(io.BytesIO(data))], return_tensors="np")
        ((_, gh, gw),) = found["image_grid_thw"].tolist()
        one = found["pixel_values"].reshape(gh * gw, 3, 2, 196)  # two equal frames
        assert np.array_equal(one[:, :, 0], one[:, :, 1])
        item = item_of(data, grid=(gh, gw), patch=14, scaled=False)
        assert np.abs(made(item).reshape(gh * gw, 3, 196) - one[:, :, 0]).max() < 1e-5
