"""One budget for a machine: how it is split, what is too small, and that in a run nothing is held
beyond it.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import overlord as ov
from overlord.errors import JobError
from overlord.scaling import profile
from overlord.scaling.profile import (
    BUILDER_BYTES,
    LEAST,
    WINDOW_BYTES,
    WORKER_BYTES,
    Budget,
    format_bytes,
    parse_bytes,
    split,
)
from overlord.session.runtime import with_memory_bounds
from overlord.setup.options import Options
from tests.internals import pooled_buffers, waits_for_samples
from tests.laws import examples
from tests.properties.test_budget import Held, job_of


@given(st.integers(1, 2**45), st.integers(1, 400), st.integers(0, 16), st.integers(0, 4))
@examples(60)
def test_the_parts_of_a_budget_never_exceed_it_and_a_larger_one_gives_no_part_less(
    total: int, loaders: int, hosts: int, builders: int
) -> None:
    def parts(b: Budget) -> list[int]:
        return [b.processes, b.windows, b.buffer_bytes, b.open_bytes, b.shared_bytes]

    def made(nbytes: int) -> Budget:
        return split(nbytes, loaders=loaders, loader_hosts=hosts, constructor_hosts=builders)

    least = made(10**15)
    if total < least.processes + least.windows + LEAST:
        with pytest.raises(ValueError, match="expected at least"):
            made(total)
        return
    found, more = made(total), made(total + 2**20)
    assert sum(parts(found)) <= total
    assert min(found.buffer_bytes, found.open_bytes, found.shared_bytes) >= LEAST // 5
    assert found.ring_bytes * max(1, found.hosts) <= found.shared_bytes
    assert all(a <= b for a, b in zip(parts(found), parts(more), strict=True))


def test_processes_and_windows_are_set_aside_first() -> None:
    made = split(2**30, loaders=4, loader_hosts=2, constructor_hosts=3)
    assert (made.processes, made.windows, made.hosts) == (
        2 * WORKER_BYTES + 3 * BUILDER_BYTES,
        4 * WINDOW_BYTES,
        5,
    )
    rest = 2**30 - made.processes - made.windows
    assert (made.buffer_bytes, made.open_bytes, made.shared_bytes) == (
        int(0.4 * rest),
        int(0.2 * rest),
        int(0.4 * rest),
    )
    assert made.ring_bytes == made.shared_bytes // 5
    assert format_bytes(2**30 + 1) == "1.1 GB", "what is asked for is enough"
    assert str(split(2**30, loaders=4)).startswith("1 GB: windows 32 MB, samples ready"), (
        "what is nothing is not told"
    )


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("64GB", 64 * 2**30),
        ("512 MiB", 2**29),
        ("1.5g", 3 * 2**29),
        ("100", 100),
        (2**20, 2**20),
        ("7B", 7),
        ("2tb", 2**41),
    ],
)
def test_sizes_are_read_as_people_write_them(said: int | str, meant: int) -> None:
    assert parse_bytes(said) == meant


@pytest.mark.parametrize(
    "said",
    ["much", "", "GB", "-3GB", 0, -1, True, None, 1.5, "1e9", "0", "5XB", "1.2.3G", "KB", "3KK"],
)
def test_what_is_no_size_is_refused_in_words(said: object) -> None:
    with pytest.raises(ValueError, match="expected bytes, as in '64GB'"):
        parse_bytes(said)  # type: ignore[arg-type]


def test_a_budget_that_is_too_small_says_what_is_needed() -> None:
    job = job_of([3], 3)
    with pytest.raises(
        JobError,
        match=r"memory: expected at least 40 MB, got 30 MB: the windows of 3 loaders take 24 MB, "
        r"and reading ahead takes at least 16 MB",
    ):
        ov.launch(job, memory="30MB")
    with pytest.raises(JobError, match=r"memory: expected at least .*: . processes take"):
        ov.launch(job, runtime="process", memory="50MB")
    with pytest.raises(JobError, match="memory: expected bytes"):
        ov.launch(job, memory="plenty")


def test_what_was_said_apart_makes_its_part_only_smaller() -> None:
    made = with_memory_bounds(
        "local", job_of([3], 3), Options(memory="1GB", buffer_bytes=2**20, open_bytes=2**40)
    )
    assert made.buffer_bytes == 2**20
    assert made.open_bytes == split(2**30, loaders=3).open_bytes
    assert made.ring_bytes == split(2**30, loaders=3).ring_bytes
    assert with_memory_bounds("local", job_of([3], 3), Options()) == Options()


@given(
    st.integers(2_000, 60_000),
    st.integers(1, 3),
    st.sampled_from([(3,), (1, 40), (200,)]),
    st.integers(0, 2**20),
)
@example(4_919, 1, (1, 40), 904)  # bytes after a pop were estimated by the mean length
@examples(30)
def test_in_a_run_nothing_is_held_beyond_the_budget(
    total: int, sources: int, lengths: tuple[int, ...], seed: int
) -> None:
    """Beyond it: a block of rows that was being evaluated, and the one slab or open file that alone
    is larger.
    """
    with pytest.MonkeyPatch.context() as patch:  # of the size of these jobs
        patch.setattr(profile, "WINDOW_BYTES", 256)
        patch.setattr(profile, "LEAST", 512)
        job = job_of(list(lengths), sources)
        options = with_memory_bounds("local", job, Options(memory=total, read_ahead=64))
    held = Held(
        job,
        seed,
        **{
            name: getattr(options, name)
            for name in ("memory", "buffer_bytes", "open_bytes", "ring_bytes", "read_ahead")
        },
    )
    largest, full = 0, False

    def look() -> None:
        nonlocal largest, full
        slabs, handles = held.host.building.slabs, held.blueprint.handles.metrics()
        largest = max([largest, *(slab.nbytes for slab in pooled_buffers(slabs))])
        assert options.ring_bytes is not None
        assert slabs.nbytes <= max(options.ring_bytes, largest)
        assert handles["bytes"] <= options.open_bytes or handles["open"] == 1
        if not waits_for_samples(held.host.planner):
            assert held.ready <= options.buffer_bytes + held.blocks
            full = full or held.ready > options.buffer_bytes // 4

    held.run(look)
    assert full or total > 20_000 or len(lengths) == 1, "the law is tried where the budget matters"
