"""Shared memory is never refilled while any process still reads it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import DataStall, FrameError, OverlordError
from overlord.transport import shared_memory
from overlord.transport.message_io import PeerSegments
from overlord.transport.shared_memory import (
    RELEASE_FLAGS,
    Lease,
    Segment,
    SharedMemoryPool,
    map_peer_memfd,
    sealed_memfd,
    segment_size,
)
from tests.internals import has_waiter, release_flags

MB = 2**20


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.fixture
def ring() -> Iterator[SharedMemoryPool]:
    ring = SharedMemoryPool(max_segments=3, name="test", wait_s=0.05)
    yield ring
    ring.close()


def of_torch(array: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(array)[5:][2:]


def of_arrow(array: np.ndarray) -> Any:
    import pyarrow as pa

    return pa.py_buffer(array)


VIEWS: dict[str, Callable[[np.ndarray], Any]] = {
    "itself": lambda a: a,
    "a slice of a slice": lambda a: a[100:][3:9][1:],
    "another type": lambda a: a[:64].view(np.int64).reshape(2, 4).T,
    "memoryview": lambda a: memoryview(a)[3:],
    "frombuffer": lambda a: np.frombuffer(a, np.int32),
    "torch": of_torch,
    "arrow": of_arrow,
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_segment_is_free_when_its_last_view_dies_and_not_before(
    ring: SharedMemoryPool, kind: str
) -> None:
    first = ring(MB)
    where = address(first)
    view = VIEWS[kind](first)
    del first
    other = ring(MB)
    assert address(other) != where
    del view, other
    taken = [ring(MB), ring(MB)]
    assert where in [address(a) for a in taken]
    assert ring.segments_made == 2


def test_sizes_that_vary_a_little_share_their_segments(ring: SharedMemoryPool) -> None:
    for nbytes in (MB, MB - 5000, MB + 40, 3 * MB // 4, MB):
        ring(nbytes)
    assert ring.segments_made <= 2


def test_a_free_segment_that_messages_have_outgrown_gives_its_place_and_one_in_use_does_not(
    ring: SharedMemoryPool,
) -> None:
    ring(MB)
    kept = ring(MB + 40)
    assert ring.n_segments == 1
    more = ring(2 * MB)
    assert ring.n_segments == 2
    del kept, more
    ring(9 * MB)  # much larger: another kind of message
    assert ring.n_segments == 3


@given(st.integers(0, 2**40))
def test_a_segment_is_large_enough_and_at_most_a_quarter_too_large(nbytes: int) -> None:
    assert nbytes <= segment_size(nbytes) <= nbytes + max(2**16, nbytes // 4)


@given(st.lists(st.tuples(st.integers(1, 3_000_000), st.integers(0, 5)), max_size=40))
def test_live_arrays_never_overlap_and_the_budget_is_kept(calls: list[tuple[int, int]]) -> None:
    ring = SharedMemoryPool(name="test", max_bytes=8_000_000, max_segments=5)
    held: np.ndarray | None = None
    live: list[tuple[int, np.ndarray]] = []
    for mark, (nbytes, drop) in enumerate(calls):
        array = ring.take(nbytes)
        if array is not None:
            assert len(array) == nbytes
            array[:: max(1, nbytes // 7)] = mark % 256
            live.append((mark, array))
        del array
        if live and drop:
            live.pop(drop % len(live))
        assert ring.nbytes <= 8_000_000
        assert ring.n_segments <= 5
        for mark_of, held in live:
            assert (held[:: max(1, len(held) // 7)] == mark_of % 256).all()
    live.clear()
    del held
    assert (
        ring.take(7_000_000) is not None
    )  # free segments that are too small make room for a large one
    ring.close()


def test_who_waits_for_a_segment_in_vain_is_told_who_has_them(ring: SharedMemoryPool) -> None:
    held = [ring(MB) for _ in range(3)]
    with pytest.raises(DataStall, match=r"pool 'test': of its 3 segments .* 3 are viewed here"):
        ring(MB)
    assert ring.take(MB) is None
    assert len(held) == 3


def sleeps(waiter: threading.Thread, ring: SharedMemoryPool) -> None:
    """Return once the pool has a waiting caller, and the thread was asleep at several checks."""
    end, looks = time.monotonic() + 30, 0
    while looks < 10:
        assert time.monotonic() < end, "it does not sleep"
        with open(f"/proc/self/task/{waiter.native_id}/stat") as stat:
            looks = (
                looks + 1
                if has_waiter(ring) and stat.read().rsplit(")", 1)[1].split()[0] == "S"
                else 0
            )
        time.sleep(0.01)


@pytest.fixture
def _nothing_but_the_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the periodic check of a waiting caller, which would run after a second."""
    patient = replace(shared_memory.TIMEOUTS, lost_wake_s=300.0)
    monkeypatch.setattr(shared_memory, "TIMEOUTS", patient)


@pytest.mark.usefixtures("_nothing_but_the_bell")
def test_who_waits_is_woken_when_a_view_dies() -> None:
    ring = SharedMemoryPool(name="test", max_segments=1, wait_s=60)
    held = [ring(MB)]
    got: list[np.ndarray] = []
    waiter = threading.Thread(target=lambda: got.append(ring(MB)))
    waiter.start()
    sleeps(waiter, ring)
    held.clear()
    waiter.join(10)
    assert len(got) == 1
    ring.close()


def test_more_than_the_pool_can_ever_hold_is_refused_at_once(ring: SharedMemoryPool) -> None:
    with pytest.raises(OverlordError, match="at most max_bytes="):
        ring(ring.max_bytes + 1)
    assert ring.take(ring.max_bytes + 1) is None


def test_views_outlive_the_pool(ring: SharedMemoryPool) -> None:
    array = ring(MB)
    array[:] = 7
    ring.close()
    assert (array == 7).all()


def test_a_forked_child_does_not_fill_what_its_parent_reads(ring: SharedMemoryPool) -> None:
    array = ring(MB)
    array[:] = 1
    del array
    again = ring(MB)
    pid = os.fork()
    if pid == 0:
        try:
            del again
            ring(MB)[:] = 9
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (again == 1).all()


# segments that a peer holds


@pytest.fixture
def shared(ring: SharedMemoryPool) -> Iterator[tuple[SharedMemoryPool, Lease, PeerSegments]]:
    """Return a pool, and this process as its peer: both sides use shared memory of the kernel."""
    lease, segments = Lease("peer"), PeerSegments()
    ring.attach(lease)
    segments.attach(lease.fd, ring.notifier.fd, RELEASE_FLAGS)
    yield ring, lease, segments
    ring.detach(lease)


def passed(
    ring: SharedMemoryPool, lease: Lease, segments: PeerSegments, array: np.ndarray
) -> np.ndarray:
    """Return the peer's view of an array of the pool."""
    found = ring.locate(array)
    assert found is not None
    segment, offset = found
    flag = ring.grant(lease, segment)
    assert flag >= 0
    if segment.id not in lease.known:
        lease.known.add(segment.id)
        segments.add(segment.id, segment.nbytes, segment.fd)
    return segments.view(segment.id, flag)[offset : offset + array.nbytes]


def test_a_segment_that_a_peer_views_is_not_filled_until_its_last_view_dies(
    shared: tuple[SharedMemoryPool, Lease, PeerSegments],
) -> None:
    ring, lease, segments = shared
    array = ring(MB)
    where = address(array)
    array[:] = 5
    theirs = passed(ring, lease, segments, array)
    twice = passed(ring, lease, segments, array)[10:]
    del array
    assert (theirs == 5).all()
    assert segments.held == 1
    assert address(ring(MB)) != where
    del theirs
    assert address(ring(MB)) != where
    del twice
    assert where in [address(a) for a in (ring(MB), ring(MB))] or where in [
        address(a) for a in [ring(MB), ring(MB)]
    ]
    assert segments.held == 0
    assert ring.segments_made == 2


@pytest.mark.usefixtures("_nothing_but_the_bell")
def test_the_notifier_of_a_peer_wakes_who_waits(
    shared: tuple[SharedMemoryPool, Lease, PeerSegments],
) -> None:
    ring, lease, segments = shared
    ring.wait_s = 60
    theirs = [passed(ring, lease, segments, ring(MB)) for _ in range(3)]
    got: list[np.ndarray] = []
    waiter = threading.Thread(target=lambda: got.append(ring(MB)))
    waiter.start()
    sleeps(waiter, ring)
    theirs.pop()
    waiter.join(10)
    assert len(got) == 1


def test_who_waits_is_told_which_peer_holds_the_segments(
    shared: tuple[SharedMemoryPool, Lease, PeerSegments],
) -> None:
    ring, lease, segments = shared
    theirs = [passed(ring, lease, segments, ring(MB)) for _ in range(3)]
    with pytest.raises(DataStall, match="peer holds 3"):
        ring(MB)
    del theirs


def test_what_a_lost_peer_may_still_read_is_not_filled_again(
    shared: tuple[SharedMemoryPool, Lease, PeerSegments],
) -> None:
    ring, lease, segments = shared
    arrays = [ring(MB) for _ in range(3)]
    for k, array in enumerate(arrays):
        array[:] = k
    theirs = [passed(ring, lease, segments, array) for array in arrays]
    del arrays, array
    ring.detach(lease)
    for _ in range(3):
        fresh = ring(MB)
        fresh[:] = 99
    assert [int(view[0]) for view in theirs] == [0, 1, 2]
    assert ring.n_segments <= 3


def test_a_peer_that_scribbles_in_its_cells_frees_nothing_but_its_own(
    shared: tuple[SharedMemoryPool, Lease, PeerSegments],
) -> None:
    ring, lease, _ = shared
    other = Lease("other")
    ring.attach(other)
    array = ring(MB)
    found = ring.locate(array)
    assert found is not None
    ring.grant(other, found[0])
    release_flags(lease)[:] = b"\xff" * RELEASE_FLAGS
    where = address(array)
    del array
    assert address(ring(MB)) != where
    ring.detach(other)


def test_a_peer_that_holds_too_many_messages_is_not_given_more(
    shared: tuple[SharedMemoryPool, Lease, PeerSegments],
) -> None:
    ring, lease, _ = shared
    array = ring(MB)
    found = ring.locate(array)
    assert found is not None
    assert [ring.grant(lease, found[0]) for _ in range(RELEASE_FLAGS)].count(-1) == 0
    assert ring.grant(lease, found[0]) == -1


def test_a_segment_the_pool_drops_is_named_so_that_the_peer_unmaps_it(
    shared: tuple[SharedMemoryPool, Lease, PeerSegments],
) -> None:
    ring, lease, segments = shared
    ring.max_bytes = 3 * MB
    passed(ring, lease, segments, ring(2 * MB))
    ring(3 * MB)
    assert list(lease.forgets) == [1]
    segments.forget(list(lease.forgets))
    assert segments.mapped == 0


# mappings


def test_nobody_can_shrink_grow_or_newly_write_a_segment() -> None:
    segment = Segment(1, MB, "test")
    for size in (0, 2 * MB):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    with pytest.raises(PermissionError):
        mmap.mmap(segment.fd, MB, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        fcntl.fcntl(
            segment.fd, 1033, 8
        )  # no further seals either, such as one against the owner's writes


def test_a_peer_maps_a_segment_read_only() -> None:
    segment = Segment(1, MB, "readonly")
    mapped = np.frombuffer(map_peer_memfd(segment.fd, MB, what="segment"), np.uint8)
    assert not mapped.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        mapped.flags.writeable = True
    with open("/proc/self/maps") as maps:
        access = [line.split()[1] for line in maps if "memfd:overlord-readonly" in line]
    assert sorted(access) == ["r--s", "rw-s"]


def unsealed(tmp_path: Any) -> int:
    fd = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MB)
    return fd


def test_a_limit_of_the_size_of_files_is_told_with_whom_it_stops_and_how_to_raise_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5120, before[1]))
    try:
        with pytest.raises(
            OverlordError,
            match=r"loader-worker/7: could not allocate 1048576 bytes of shared memory: .* is 5120 bytes: "
            r".*ulimit -f",
        ):
            SharedMemoryPool(name="loader-worker/7")(MB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def plain_file(tmp_path: Any) -> int:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, MB)
    return fd


HOSTILE: dict[str, tuple[Callable[[Any], int], str]] = {
    "memory that can shrink": (unsealed, "no seal"),
    "a plain file": (plain_file, "sealed|seal"),
    "a device": (lambda _: os.open("/dev/zero", os.O_RDWR), "another kind of file"),
    "a pipe": (lambda _: os.pipe()[0], "another kind of file"),
    "shorter than said": (
        lambda _: sealed_memfd("x", MB // 2, others_write=False)[0],
        "expected 1048576 bytes",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_could_harm_its_reader_is_not_mapped(what: str, tmp_path: Any) -> None:
    make, text = HOSTILE[what]
    fd = make(tmp_path)
    with pytest.raises(FrameError, match=text):
        map_peer_memfd(fd, MB, what="segment 1")
    os.close(fd)


def test_memory_that_is_only_announced_is_not_paid_for() -> None:
    fd = os.memfd_create("holes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2**33)
    fcntl.fcntl(fd, 1033, 2)
    map_peer_memfd(fd, 2**33, what="segment")
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


def test_nothing_lies_in_the_file_system() -> None:
    """Check the open files of this process: the folder may contain files of others."""
    before = opened()
    ring = SharedMemoryPool(name="test")
    array = ring(MB)
    assert re.fullmatch(r"/memfd:.* \(deleted\)", mapped_at(address(array)))
    assert not [path for path in opened() - before if path.startswith("/dev/shm")]
    assert len(array) == MB
    ring.close()


def opened() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def mapped_at(address: int) -> str:
    """Return the file of a mapping."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, *_, path = line.rstrip("\n").split(maxsplit=5)
            first, last = (int(at, 16) for at in span.split("-"))
            if first <= address < last:
                return path
    raise AssertionError("it is mapped nowhere")
