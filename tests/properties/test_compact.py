"""Laws of the compact form: what is widened of it is to the bit what would have been built wide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlord.buffer_pool import BufferPool
from overlord.constructor import compact as module
from overlord.constructor.build import BucketBatch
from overlord.constructor.compact import (
    IDS,
    Expander,
    build_compact,
    build_views,
    for_view,
    layout_of,
    smallest_id_type,
)
from overlord.constructor.pack import BatchArrays, build_arrays, documents, new_buffer
from overlord.constructor.rank_views import of_stage
from overlord.content import RaggedParts
from overlord.plan.view import View
from overlord.sample import Ragged
from tests.properties.test_pack import steps

VIEWS = [View(first=first, last=last) for first in (True, False) for last in (True, False)]


@st.composite
def unweighted(draw: st.DrawFn) -> dict[str, Any]:
    """Documents without loss weights, also of fixed shape and as pieces that continue."""
    step = draw(steps())
    del step["weights"]
    if draw(st.booleans()):
        room = 12 * step["batch"].context  # all documents in one microbatch, padded
        step["batch"] = replace(step["batch"], context=room, shape="fixed", max_documents=12)
    if draw(st.booleans()) and step["batch"].layout == "packed":
        n = len(step["start"])
        room = 12 * step["batch"].context
        step["batch"] = replace(step["batch"], context=room, packing="concat")
        step["values"] = np.append(step["values"], 5).astype(step["values"].dtype)
        step["continues"] = np.array(
            draw(st.lists(st.booleans(), min_size=n, max_size=n)), np.bool_
        )
    return step


@contextmanager
def ways(joined: bool, sliced: bool) -> Iterator[None]:
    """Which of two ways documents are laid, and positions are counted."""
    usual = module.JOIN_FROM, module.SLICE_FROM
    try:
        module.JOIN_FROM, module.SLICE_FROM = 0 if joined else 10**9, 0 if sliced else 10**9
        yield
    finally:
        module.JOIN_FROM, module.SLICE_FROM = usual


def opened(step: Mapping[str, Any], view: View, slab: Any = new_buffer) -> list[Any]:
    """Through a message and back, as a client gets it."""
    given = {key: value for key, value in step.items() if key != "weights"}  # they stay wide
    wide, form = for_view(build_compact(**given), layout_of(step["batch"]), view)
    n = step["n_microbatches"]
    empty = np.bincount(step["microbatch"], minlength=n) == 0
    return Expander(form, empty, slab).microbatches(BatchArrays.of_part(*wide.part(0, n)).cut(0, n))


def payload_of(step: Mapping[str, Any], parted: bool) -> Ragged:
    """The ids as one column, or cut wherever no document goes across, as readers hand them on."""
    values, start, stop = step["values"], step["start"], step["start"] + step["length"]
    if step.get("continues") is not None:
        stop = stop + 1  # the next token is read too
    edges = [
        at
        for at in sorted({0, len(values), *start.tolist()})
        if not ((start < at) & (at < stop)).any()
    ]
    whole = Ragged(values, np.array(edges))
    if not parted or len(edges) < 3:
        return whole
    # of types as different as those of sources
    parts = [whole.slice(k, k + 1) for k in range(len(whole))]
    parts[0] = Ragged(parts[0][0].astype(np.int64), np.array([0, edges[1]]))
    return RaggedParts(parts)


# a step, the view of a rank, two ways of sending it, and the padding id
STEPS = (
    unweighted(),
    st.sampled_from(VIEWS),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 7, 2**16]),
)


@given(*STEPS)
def test_what_stays_in_the_payload_equals_what_is_built_wide(
    step: dict[str, Any], view: View, parted: bool, sent: bool, pad_id: int
) -> None:
    """Whoever reads it: a client of this process, or one to whom it is sent."""
    step |= {"batch": replace(step["batch"], pad_id=pad_id, layout="packed"), "weights": None}
    n, batch, payload = step["n_microbatches"], step["batch"], payload_of(step, parted)
    wanted = of_stage(build_arrays(**step), view).cut(0, n)
    given = {k: v for k, v in step.items() if k not in ("values", "weights", "allocate")}
    wide, views = build_views(payload, documents(**{"continues": None, **given}), batch)
    wide, form = for_view(wide, layout_of(batch), view)
    counts = np.bincount(step["microbatch"], minlength=n)
    bucket = BucketBatch(
        np.arange(len(step["start"])), np.append(0, np.cumsum(counts)), wide, form=form
    )
    bucket = replace(bucket, payload=views, allocate=BufferPool())
    if sent:
        bucket = replace(bucket, wide=BatchArrays.of_part(*bucket.part()), payload=None)
    for a, b in zip(bucket.microbatches, wanted, strict=True):
        assert {key: (x.dtype, x.tolist()) for key, x in a.items()} == {
            key: (x.dtype, x.tolist()) for key, x in b.items()
        }
        assert not any(x.flags.writeable for x in a.values())


@given(*STEPS)
def test_what_is_widened_equals_what_is_built_wide(
    step: dict[str, Any], view: View, joined: bool, sliced: bool, pad_id: int
) -> None:
    step |= {"batch": replace(step["batch"], pad_id=pad_id), "weights": None}
    wanted = of_stage(build_arrays(**step), view).cut(0, step["n_microbatches"])
    with ways(joined, sliced):
        for a, b in zip(opened(step, view), wanted, strict=True):
            assert list(a) == list(b)
            assert len(a) == len(b)
            assert IDS not in a
            for key, array in b.items():
                assert key in a
                assert (a[key].dtype, a[key].shape) == (array.dtype, array.shape)
                assert np.array_equal(a[key], array)
                assert not a[key].flags.writeable


@given(
    unweighted(),
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sampled_from(["tokens", "labels", "loss_mask", "position_ids"]),
            st.booleans(),
        )
    ),
)
def test_what_is_kept_stays_what_it_was(
    step: dict[str, Any], asked: list[tuple[int, str, bool]]
) -> None:
    """Memory is used again for the next microbatch, but never under an array that somebody
    holds.
    """
    step["weights"] = None
    wanted = build_arrays(**step).cut(0, step["n_microbatches"])
    found, kept = opened(step, View(), BufferPool()), []
    for m, key, keeps in asked:
        m %= len(found)
        assert np.array_equal(found[m][key], wanted[m][key])
        if keeps:
            kept.append((m, key, found[m][key]))
    for m, key, array in kept:
        assert np.array_equal(array, wanted[m][key])


@given(
    st.lists(st.lists(st.integers(0, 2**17)), min_size=1),
    st.sampled_from([np.uint16, np.uint32, np.int32, np.int64]),
)
def test_ids_keep_their_values_in_the_narrowest_type(pieces: list[list[int]], dtype: Any) -> None:
    arrays = [np.array(piece).astype(dtype) for piece in pieces]
    whole = np.concatenate(arrays)
    kind = smallest_id_type([*arrays, np.zeros(0, np.int64)])
    assert np.array_equal(whole.astype(kind), whole)
    if whole.size and whole.max() < 2**16:
        assert kind == np.uint16


def test_an_id_below_zero_is_not_narrowed_away() -> None:
    pieces = [np.array([-1, 5], np.int32)]
    assert smallest_id_type(pieces) == np.int32
