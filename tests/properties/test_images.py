"""Laws of images: the size they are made, the part that is kept, and what bytes that nobody should
trust can do.
"""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.sample import Ragged
from overlord.transforms.image_header import BadImage, ImageHeader, header
from overlord.transforms.image_items import MAX_TOKENS, fill, item_shape
from overlord.transforms.image_rows import with_placeholders
from overlord.transforms.images import Images, fit, random_numbers
from tests.laws import examples
from tests.pictures import FILES

SIDES = st.integers(1, 300) | st.integers(1, 20_000)
FACTORS = st.sampled_from([1, 14, 16, 28, 32, 56])
TOKENS = st.tuples(st.integers(1, 400), st.integers(1, 4000)).map(sorted)


@given(SIDES, SIDES, FACTORS, TOKENS)
def test_a_fitted_size_is_whole_tokens_within_the_bounds(
    height: int, width: int, factor: int, tokens: list[int]
) -> None:
    least, most = (n * factor * factor for n in tokens)
    high, wide = fit(height, width, factor=factor, min_pixels=least, max_pixels=most)
    assert high % factor == wide % factor == 0
    assert min(high, wide) >= factor
    assert high * wide <= most
    if 4 * least <= most and max(height, width) <= 4 * min(height, width):
        assert high * wide >= least


@given(SIDES, SIDES, FACTORS, TOKENS)
def test_a_fitted_size_keeps_the_shape_as_well_as_whole_tokens_allow(
    height: int, width: int, factor: int, tokens: list[int]
) -> None:
    """Neither side is more than one token away from the same multiple of the image, unless a side
    would have none.
    """
    least, most = (n * factor * factor for n in tokens)
    high, wide = fit(height, width, factor=factor, min_pixels=least, max_pixels=most)
    if min(high, wide) > factor:
        assert (
            (high - factor) / (wide + factor) <= height / width <= (high + factor) / (wide - factor)
        )
    if height >= width:
        assert high >= wide


@given(SIDES, SIDES, FACTORS, TOKENS)
def test_turning_an_image_turns_its_size(
    height: int, width: int, factor: int, tokens: list[int]
) -> None:
    bounds = {
        "factor": factor,
        "min_pixels": tokens[0] * factor * factor,
        "max_pixels": tokens[1] * factor * factor,
    }
    assert fit(height, width, **bounds) == fit(width, height, **bounds)[::-1]


@given(SIDES, SIDES, st.integers(1, 300), st.integers(1, 4000))
def test_sizes_are_those_of_hugging_faces_rule_where_it_keeps_its_bounds(
    height: int, width: int, least: int, most: int
) -> None:
    rule = pytest.importorskip(
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
    ).smart_resize
    bounds = {
        "factor": 28,
        "min_pixels": min(least, most) * 784,
        "max_pixels": max(least, most) * 784,
    }
    if max(height, width) > 200 * min(height, width):
        return
    theirs = rule(height, width, **bounds)
    if theirs[0] * theirs[1] > bounds["max_pixels"]:
        return
    edge = any(
        _is_square(a * bound, b * 784)
        for bound in (bounds["min_pixels"], bounds["max_pixels"])
        for a, b in ((height, width), (width, height))
    )
    if not edge:  # there it counts in floating point, and may go either way
        assert fit(height, width, **bounds) == theirs


def _is_square(top: int, bottom: int) -> bool:
    return top % bottom == 0 and math.isqrt(top // bottom) ** 2 == top // bottom


@given(
    SIDES,
    SIDES,
    st.sampled_from([None, "random"]),
    st.sampled_from([None, (28, 28), (56, 28), (28, 280)]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 9),
)
def test_what_is_planned_lies_inside_the_image(
    width: int, height: int, crop: str | None, size: tuple[int, int] | None, key: int, number: int
) -> None:
    spec = Images(placeholder=1, crop=crop, size=size, flip=True)
    found = ImageHeader(width, height, "RGB", "PNG")
    drawn = random_numbers(np.array([key], np.uint64), np.array([number]))
    assert (drawn >= 0).all()
    assert (drawn < 1).all()
    prefix = spec.plan(found, drawn[0].tolist())
    x, y, w, h = prefix.box
    assert 0 <= x <= x + w <= width
    assert 0 <= y <= y + h <= height
    assert w >= 1
    assert h >= 1
    assert 0 < prefix.grid[1] * prefix.grid[2] <= MAX_TOKENS * prefix.merge**2
    if size is not None:
        assert prefix.grid == (1, size[0] // 14, size[1] // 14)
    if crop is None and size is None:
        assert prefix.box == (0, 0, width, height)


@given(
    st.data(),
    st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=6),
    st.sampled_from(["start", "end", "marker"]),
)
def test_placeholders_put_in_are_found_where_they_are_said_to_be(
    data: st.DataObject, rows: list[list[int]], at: str
) -> None:
    """Token 3 is the marker. With the placeholders taken out again, the text is what it was."""
    spec = Images(placeholder=9, at=at, marker=3 if at == "marker" else None)
    counts = [row.count(3) if at == "marker" else data.draw(st.integers(0, 3)) for row in rows]
    row = np.repeat(np.arange(len(rows)), counts)
    out = np.array([data.draw(st.integers(1, 5)) for _ in row], np.int64)
    ids, offset = with_placeholders(Ragged.from_rows(rows, np.uint8), row, out, spec)
    assert len(ids) == len(rows)
    for i, text in enumerate(rows):
        mine = ids[i].tolist()
        for k in np.flatnonzero(row == i):
            assert mine[offset[k] : offset[k] + out[k]] == [9] * out[k]
        assert mine.count(9) == out[row == i].sum()
        assert [t for t in mine if t != 9] == [t for t in text if at != "marker" or t != 3]
        assert sorted(offset[row == i]) == offset[row == i].tolist()


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A real file with some bytes changed, cut out, put in, or cut off; most changes near its
    start, where headers are.
    """
    data = bytearray(FILES[draw(st.sampled_from(sorted(FILES)))])
    for _ in range(draw(st.integers(1, 6))):
        at = draw(
            st.integers(0, max(0, min(len(data), draw(st.sampled_from([16, 64, 700, 10**6]))) - 1))
        )
        match draw(st.sampled_from(["set", "cut", "put", "end"])):
            case "set":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "cut":
                del data[at : at + draw(st.integers(1, 30))]
            case "put":
                data[at:at] = draw(st.binary(max_size=30))
            case "end" if draw(st.booleans()):
                del data[at:]
    return bytes(data)


@given(mutated() | st.binary(max_size=200))
@examples(400)
def test_of_any_bytes_a_header_comes_or_a_reason(data: bytes) -> None:
    try:
        found = header(data)
    except BadImage as fault:
        assert fault.reason and len(fault.reason) < 400  # noqa: PT017, PT018
    else:
        assert found.width * found.height <= 178_956_970


@given(mutated())
@examples(150)
def test_of_any_bytes_pixels_come_or_a_reason_and_memory_stays_within_what_was_planned(
    data: bytes,
) -> None:
    spec = Images(placeholder=1, patch=4, merge=1, min_pixels=16, max_pixels=1024)
    found = None
    try:
        found = header(data)
        item = np.frombuffer(spec.plan(found).pack() + data, np.uint8)
    except BadImage:
        return
    if found.width * found.height > 10**7:  # honest about its size: decoding it takes what it takes
        return
    patches, dim, dtype = item_shape(item)
    out = np.zeros((patches, dim), dtype)
    tracemalloc.start()
    try:
        fill(item, out)
    except BadImage as fault:
        assert fault.reason  # noqa: PT017
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**20 + 3 * found.decoded_bytes + 4 * out.nbytes
    assert np.isfinite(out).all()


@given(
    st.sampled_from(sorted(FILES)),
    st.lists(st.tuples(st.integers(0, 95), st.integers(0, 255)), min_size=1, max_size=4),
)
@examples(200)
def test_of_any_prefix_pixels_come_or_a_reason(name: str, changes: list[tuple[int, int]]) -> None:
    spec = Images(placeholder=1, patch=4, merge=1, min_pixels=16, max_pixels=1024)
    item = np.frombuffer(spec.plan(header(FILES[name])).pack() + FILES[name], np.uint8).copy()
    for at, value in changes:
        item[at] = value
    try:
        patches, dim, dtype = item_shape(item)
        if patches * dim > 10**6:
            return
        fill(item, np.zeros((patches, dim), dtype))
    except BadImage as fault:
        assert fault.reason  # noqa: PT017
