"""A trainer without computation: it takes steps, and counts samples, tokens and waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from overlord.observe.rates import RateWindow
from overlord.process.resources import pss_bytes

if TYPE_CHECKING:
    from overlord.client.client import Client, Step
    from overlord.plan.plan import LoadingPlan

T = TypeVar("T")
MEMORY_EVERY = 8  # steps between two readings of the PSS, each of which takes milliseconds


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """One step, as all watched ranks received it."""

    plan: LoadingPlan
    steps: tuple[Step, ...]  # one per watched rank
    wait_s: float  # seconds until the last of these ranks received it

    @property
    def tokens(self) -> int:
        """The tokens of the step, over all ranks."""
        return int(self.plan.tokens.sum())


@dataclass(slots=True)
class Meter:
    """Counters of a watched run; the measured time begins with the creation of the meter."""

    steps: int = 0
    tokens: int = 0
    wait_s: float = 0.0
    first_wait_s: float = 0.0
    last_wait_s: float = 0.0
    peak_pss: int = 0
    started: float = field(default_factory=time.perf_counter)
    ended: float = 0.0  # 0: the run has not ended
    # By source: sum over steps of the wanted share.
    wanted: np.ndarray = field(default_factory=lambda: np.zeros(0))
    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # by source
    source_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    _recent_tokens: RateWindow = field(default_factory=RateWindow)
    _recent_steps: RateWindow = field(default_factory=RateWindow)

    def add(self, taken: Taken) -> None:
        """Add a taken step to the counters."""
        if not self.steps:
            self.first_wait_s = taken.wait_s
        self.steps += 1
        self.tokens += taken.tokens
        now = time.perf_counter()
        self._recent_tokens.add(now, self.tokens)
        self._recent_steps.add(now, self.steps)
        self.wait_s += taken.wait_s
        self.last_wait_s = taken.wait_s
        self._count(taken.plan)
        if self.steps % MEMORY_EVERY == 1:
            self.peak_pss = max(self.peak_pss, pss_bytes())

    def _count(self, plan: LoadingPlan) -> None:
        """Add the samples of a plan to the counters by source.

        The planner's totals are not used, since they include steps that are not taken yet.
        """
        n = len(plan.names)
        if not len(self.samples):
            self.wanted, self.samples, self.source_tokens = (
                np.zeros(n),
                np.zeros(n, np.int64),
                np.zeros(n, np.int64),
            )
        weights = np.array(
            [float(plan.extra.get("weights", {}).get(name, 0.0)) for name in plan.names]
        )
        self.wanted += weights / (weights.sum() or 1.0)
        self.samples += np.bincount(plan.begun, minlength=n)
        self.source_tokens += np.bincount(plan.source, weights=plan.tokens, minlength=n).astype(
            np.int64
        )

    def stop(self) -> None:
        """End the measured time, and read the PSS once more."""
        self.ended = time.perf_counter()
        self.peak_pss = max(self.peak_pss, pss_bytes())

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second since the meter was made, including the wait for the first step."""
        return self.tokens / max(1e-9, (self.ended or time.perf_counter()) - self.started)

    @property
    def recent_tokens_per_s(self) -> float:
        """Tokens per second over the last seconds; the mean of the run before the second step."""
        return self._recent_tokens.rate(time.perf_counter()) or self.tokens_per_s

    def seconds_left(self, steps: int) -> float | None:
        """Return the seconds until ``steps`` are taken, at the recent rate; None if unknown."""
        rate = self._recent_steps.rate(time.perf_counter())
        return (steps - self.steps) / rate if rate > 0 else None

    @property
    def wait_ms(self) -> float:
        """Mean wait in ms of all steps but the first, whose wait includes opening files."""
        return 1e3 * (self.wait_s - self.first_wait_s) / max(1, self.steps - 1)


class StepSource(Protocol):
    """The methods of a session that ``watch`` calls."""

    def client(self, rank: int) -> Client: ...
    def plan(self, step: int) -> LoadingPlan: ...


def watch(session: StepSource, ranks: Sequence[int], steps: int | None = None) -> Iterator[Taken]:
    """Yield each step once all these ranks took it, until ``steps`` are taken or the data ends."""
    clients = [session.client(rank) for rank in ranks]
    for _ in count() if steps is None else range(steps):
        start = time.perf_counter()
        try:
            taken = [next(client) for client in clients]
        except StopIteration:
            return
        yield Taken(session.plan(taken[0].step), tuple(taken), time.perf_counter() - start)


def interruptible(work: Callable[[], T], meanwhile: Callable[[], None] = lambda: None) -> T:
    """Run ``work`` in a thread, wait for it, and return its result or raise its error.

    The main thread can then handle Ctrl-C at once, even while native code runs in the thread.
    ``meanwhile`` is called ten times a second in the main thread.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as fault:
            outcome.append((None, fault))

    thread = threading.Thread(target=run, name="overlord-work", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        meanwhile()
    result, fault = outcome[0]
    if fault is not None:
        raise fault
    return result
