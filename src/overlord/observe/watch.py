"""Driving a session the way a trainer does, and writing down what each step brought and cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from overlord.observe.memory import pss_bytes

if TYPE_CHECKING:
    from overlord.client.step import Step
    from overlord.plan import LoadingPlan
    from overlord.runtime.session import Session

T = TypeVar("T")
MEMORY_EVERY = 8  # steps; asking the system for PSS takes milliseconds


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """One step, as all watched ranks got it."""

    plan: LoadingPlan
    steps: tuple[Step, ...]  # one per watched rank
    wait_s: float  # until the last of them had it

    @property
    def tokens(self) -> int:
        return int(self.plan.tokens.sum())


@dataclass(slots=True)
class Meter:
    """Running figures of a watched run. Times count from the moment the first step was asked for."""

    steps: int = 0
    tokens: int = 0
    wait_s: float = 0.0
    first_wait_s: float = 0.0
    last_wait_s: float = 0.0
    peak_pss: int = 0
    started: float = field(default_factory=time.perf_counter)
    after_first: float = 0.0  # when the first step had come
    first_tokens: int = 0

    def add(self, taken: Taken) -> None:
        if not self.steps:
            self.after_first, self.first_wait_s, self.first_tokens = time.perf_counter(), taken.wait_s, taken.tokens
        self.steps += 1
        self.tokens += taken.tokens
        self.wait_s += taken.wait_s
        self.last_wait_s = taken.wait_s
        if self.steps % MEMORY_EVERY == 1:
            self.peak_pss = max(self.peak_pss, pss_bytes())

    @property
    def tokens_per_s(self) -> float:
        """Over the whole run, the wait for the first step included."""
        return self.tokens / max(1e-9, time.perf_counter() - self.started)

    @property
    def wait_ms(self) -> float:
        """Mean wait of a step after the first: the first one also pays for opening files, and is told apart."""
        return 1e3 * (self.wait_s - self.first_wait_s) / max(1, self.steps - 1)


def watch(session: Session, ranks: Sequence[int], steps: int | None = None) -> Iterator[Taken]:
    """Takes steps on these ranks in turn, until there are ``steps`` of them or the data ends."""
    clients = [session.client(rank) for rank in ranks]
    for _ in count() if steps is None else range(steps):
        start = time.perf_counter()
        try:
            taken = tuple(next(client) for client in clients)
        except (StopIteration, RuntimeError) as end:
            if isinstance(end, StopIteration) or isinstance(end.__cause__, StopIteration):
                return
            raise
        yield Taken(taken[0]._stage.plan, taken, time.perf_counter() - start)


def interruptible(work: Callable[[], T]) -> T:
    """Runs work in a thread and waits for it, so that Ctrl-C is heard at once even while native code is busy."""
    box: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            box.append((work(), None))
        except BaseException as fault:
            box.append((None, fault))

    thread = threading.Thread(target=run, name="overlord-work", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    result, fault = box[0]
    if fault is not None:
        raise fault
    return result  # type: ignore[no-any-return]
