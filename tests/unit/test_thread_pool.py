"""The threads of a process: one pool for all its executors, which take turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import overlord as ov
from overlord.concurrency.event_loop import EventLoop, ThreadExecutor
from overlord.concurrency.thread_pool import Task, WorkerThreads

WAIT_S = 20.0  # the limit of every wait; a test that passes never waits so long


def names(prefix: str) -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith(prefix))


@pytest.fixture
def loops() -> Iterator[list[EventLoop]]:
    made = [EventLoop(f"pool-{k}") for k in range(2)]
    for loop in made:
        loop.start(lambda error: None)
    yield made
    for loop in made:
        loop.stop()


class Gate:
    """Work that waits until the gate opens, and records who did it."""

    def __init__(self) -> None:
        self.open, self.begun = threading.Event(), threading.Semaphore(0)
        self.order: list[str] = []

    def work(self, name: str) -> Any:
        def run() -> None:
            self.begun.release()
            assert self.open.wait(WAIT_S)
            self.order.append(name)

        return run


def task(owner: str, gate: Gate, done: threading.Semaphore) -> Task:
    def run(task: Task) -> None:
        task.work()
        done.release()

    return Task(owner, run, lambda *_: None, gate.work(owner), "work", lambda *_: None)


def test_owners_take_turns_however_much_one_of_them_has_queued() -> None:
    threads, gate, done = WorkerThreads("pool-test"), Gate(), threading.Semaphore(0)
    for owner in ("train", "evaluate"):
        threads.join(owner, 1)
    for _ in range(20):
        threads.put(task("train", gate, done), urgent=True)
    for _ in range(3):
        threads.put(task("evaluate", gate, done), urgent=False)
    gate.open.set()
    for _ in range(23):
        assert done.acquire(timeout=WAIT_S)
    threads.close(WAIT_S)
    last = max(i for i, name in enumerate(gate.order) if name == "evaluate")
    assert last <= 6, f"urgent work of another owner came first: {gate.order}"
    assert names("pool-test") == []


def test_an_urgent_task_goes_before_others_of_its_owner() -> None:
    threads, first, done = WorkerThreads("pool-test"), Gate(), threading.Semaphore(0)
    threads.join("a", 1)
    threads.put(task("a", first, done), urgent=False)
    assert first.begun.acquire(timeout=WAIT_S)  # the only thread is busy
    order: list[str] = []
    for name, urgent in (("normal", False), ("urgent", True)):

        def run(task: Task, name: str = name) -> None:
            order.append(name)
            done.release()

        threads.put(
            Task("a", run, lambda *_: None, lambda: None, name, lambda *_: None), urgent=urgent
        )
    first.open.set()
    for _ in range(3):
        assert done.acquire(timeout=WAIT_S)
    threads.close(WAIT_S)
    assert order == ["urgent", "normal"]


def test_executors_share_the_threads_of_the_process(loops: list[EventLoop]) -> None:
    gate, done = Gate(), threading.Semaphore(0)
    executors = [
        ThreadExecutor(n, loop, inline_s=0.0) for n, loop in zip((2, 3), loops, strict=True)
    ]
    for executor in executors:
        for k in range(8):
            executor.submit(f"{k}", gate.work("any"), lambda *_: done.release())
    for _ in range(3):
        assert gate.begun.acquire(timeout=WAIT_S)
    assert len(names("overlord-worker-")) == 3, "as many as the largest executor has, not the sum"
    gate.open.set()
    for _ in range(16):
        assert done.acquire(timeout=WAIT_S)
    for executor in executors:
        executor.close(WAIT_S)
    assert names("overlord-worker-") == []


def test_closing_one_executor_drops_its_work_and_leaves_that_of_others(
    loops: list[EventLoop],
) -> None:
    gate, kept, dropped = Gate(), threading.Semaphore(0), list[int]()
    stays, goes = (ThreadExecutor(1, loop, inline_s=0.0) for loop in loops)
    stays.submit("first", gate.work("first"), lambda *_: kept.release())
    assert gate.begun.acquire(timeout=WAIT_S)
    goes.submit("queued", lambda: dropped.append(1), lambda *_: dropped.append(2))
    stays.submit("second", gate.work("second"), lambda *_: kept.release())
    goes.close(WAIT_S)
    goes.close(WAIT_S)  # nothing more happens
    goes.submit("late", lambda: dropped.append(3), lambda *_: dropped.append(4))
    gate.open.set()
    for _ in range(2):
        assert kept.acquire(timeout=WAIT_S)
    assert gate.order == ["first", "second"]
    assert dropped == []
    stays.close(WAIT_S)
    assert names("overlord-worker-") == []


def slow_rows(n: int) -> Any:
    """Rows of a function: user code runs in the threads, and never on the event loop."""
    return [{"tokens": [1 + k % 50] * (1 + k % 9)} for k in range(n)]


def keep(columns: Any) -> Any:
    return columns


def test_a_training_and_an_evaluation_session_share_threads_and_both_make_progress() -> None:
    batch = ov.Batch(samples=4, context=64)
    source = ov.Source.from_dataset("rows", slow_rows(40), transforms=[ov.Map(keep), ov.Tokens()])
    train = ov.Job(name="train", sources=[source], batch=batch, until=60)
    with ov.launch(train, workers=2) as training:
        trained = training.client(0)
        next(trained)
        with ov.launch(ov.evaluation(source, batch), workers=2) as evaluating:
            evaluated = evaluating.client(0)
            steps = [(next(trained).step, next(evaluated).step) for _ in range(9)]
            workers = len(names("overlord-worker-"))
            assert 1 <= workers <= 2, names("overlord-worker-")
            assert len(names("overlord-loop-")) == 2, "an event loop for each session"
        assert steps == [(k + 1, k) for k in range(9)]
        assert next(trained).step == 10, "the end of one session leaves the other"
        assert len(list(trained)) == 49
    assert names("overlord-worker-") + names("overlord-loop-") == []
