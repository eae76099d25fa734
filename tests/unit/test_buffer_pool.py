"""Memory that is reused must never be memory that somebody still reads."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.buffer_pool import BufferPool
from tests.internals import pooled_buffers, runtime_of
from tests.worlds import Rows

MB = 2**20


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_that_nobody_views_is_used_again() -> None:
    pool = BufferPool()
    first = pool(MB)
    where = address(first)
    assert len(first) >= MB
    del first
    again = pool(MB)
    assert address(again) == where
    assert pool.nbytes < 2 * MB


def test_memory_that_somebody_views_is_not() -> None:
    pool = BufferPool()
    first = pool(MB)
    assert address(pool(MB)) != address(first)


def of_torch(array: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(array)


def of_dlpack(array: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_dlpack(array)


def of_arrow(array: np.ndarray) -> Any:
    import pyarrow as pa

    return pa.py_buffer(array)


class Holder:
    def __init__(self, array: np.ndarray):
        self.inner = {"a": [array[5:]]}


HOLDS: dict[str, Callable[[np.ndarray], Any]] = {
    "the array": lambda a: a,
    "a slice": lambda a: a[10:20],
    "a slice of a slice": lambda a: a[10:][:5][::2],
    "another type": lambda a: a[:1024].view(np.int64),
    "a shape": lambda a: a[:1024].reshape(4, 256).T,
    "a read-only view": lambda a: np.broadcast_to(a[:8], (3, 8)),
    "a strided trick": lambda a: np.lib.stride_tricks.sliding_window_view(a[:64], 8),
    "frombuffer": lambda a: np.frombuffer(a, np.uint8),
    "a memoryview": memoryview,
    "a cast memoryview": lambda a: memoryview(a)[8:16].cast("B"),
    "numpy's dlpack": lambda a: np.from_dlpack(a),
    "an iterator": lambda a: np.nditer(a[:8]),
    "a record": lambda a: a[:64].view([("x", np.int32), ("y", np.int32)])["y"],
    "an object's field": Holder,
    "a closure": lambda a: lambda: a,
    "an Arrow buffer": of_arrow,
    "a tensor": of_torch,
    "a tensor's slice": lambda a: of_torch(a)[3:9].view(2, 3),
    "a tensor by dlpack": of_dlpack,
    "a tensor's storage": lambda a: of_torch(a).untyped_storage(),
    "numpy of a tensor": lambda a: of_torch(a)[4:].numpy(),
}


@pytest.mark.parametrize("kind", HOLDS)
def test_whatever_holds_a_view_keeps_its_memory_and_gives_it_back_when_it_goes(kind: str) -> None:
    pool = BufferPool()
    first = pool(MB)
    where = address(first)
    held = HOLDS[kind](first)
    del first
    assert address(pool(MB)) != where
    del held
    gc.collect()
    assert where in {address(a) for a in [pool(MB), pool(MB)]}


def test_a_pool_forgets_beyond_its_budget_and_the_views_live_on() -> None:
    pool = BufferPool(max_bytes=4 * MB)
    kept = [pool(MB) for _ in range(20)]
    for i, array in enumerate(kept):
        array[:] = i
    assert pool.nbytes <= 4 * MB
    gone = weakref.ref(kept[0].base)
    assert all((array == i).all() for i, array in enumerate(kept))
    kept.clear()
    del array
    assert gone() is None, "forgotten and unused: the memory is back with the system"


def test_threads_never_get_the_same_memory_at_the_same_time() -> None:
    """Each fills what it gets with its own number, keeps it for a while, and looks whether it is
    still its own.
    """
    pool, wrong = BufferPool(max_bytes=8 * MB), []

    def work(me: int) -> None:
        rng, held = random.Random(me), []
        for turn in range(300):
            array = pool(rng.choice((1000, 5000, 5100, 40000)))
            array[:] = (me * 31 + turn) % 251
            held.append((array[rng.randrange(10) :], (me * 31 + turn) % 251))
            if len(held) > rng.randrange(1, 6):
                kept, value = held.pop(rng.randrange(len(held)))
                if not (kept == value).all():
                    wrong.append((me, turn))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_trainer_that_keeps_everything_does_not_make_the_search_long() -> None:
    pool = BufferPool()
    kept = [pool(1000) for _ in range(500)]
    assert len({address(a) for a in kept}) == 500
    assert len(pooled_buffers(pool)) <= 64


@pytest.mark.filterwarnings(
    "ignore:The given NumPy array is not writable", "ignore:__array__ implementation"
)
def test_arrays_a_trainer_keeps_are_never_overwritten() -> None:
    """A whole run with prefetch; the trainer keeps some arrays for ever, some as tensors, and lets
    most go.
    """
    torch = pytest.importorskip("torch")
    rows = Rows([{"tokens": [k % 30000] * (1 + k % 40)} for k in range(3000)])
    job = ov.Job(
        name="kept",
        sources=[ov.Source("a", rows, transforms=[ov.Tokens("tokens")], epochs=1)],
        batch=ov.Batch(samples=24, context=256, microbatches=2),
        place=ov.ClientPlaceTree(dp=2),
    )
    kept: list[tuple[Any, np.ndarray]] = []
    rng = random.Random(5)
    ways = (
        lambda a: a,
        lambda a: a[1:],
        lambda a: torch.from_numpy(a)[1:],
        lambda a: torch.from_numpy(a),
        memoryview,
    )
    with ov.launch(job, prefetch=3) as session:
        clients = [session.client(0), session.client(1)]
        for step in clients[0]:
            for mb in [*step, *next(clients[1])]:
                name = rng.choice(("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens"))
                if rng.random() < 0.2:
                    view = rng.choice(ways)(mb[name])
                    kept.append((view, np.array(np.asarray(view))))
            del mb, step
        reused = runtime_of(session).slabs.nbytes
    assert len(kept) > 50
    assert reused > 0
    for view, copy in kept:
        assert np.array_equal(np.asarray(view), copy)


def test_without_the_interpreters_lock_nothing_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    pool = BufferPool()
    views = [pool(MB) for _ in range(3)]
    assert all(view.base is None for view in views), "each owns its memory"
    assert pool.nbytes == 0


def test_a_closed_pool_holds_nothing_and_still_serves() -> None:
    pool = BufferPool()
    view = pool(MB)
    view[:] = 7
    pool.close()
    assert pool.nbytes == 0
    assert (view == 7).all()
    assert address(pool(MB)) != address(view)
