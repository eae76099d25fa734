"""Retries with back-off for transient storage errors of disks, mounts and object stores.

Retries do not affect the stream: a successful read returns the indexed bytes, whenever it succeeds.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from overlord.errors import WouldBlock
from overlord.sources.base import StorageUnreachable
from overlord.sources.timeouts import TIMEOUTS

log = logging.getLogger("overlord")

T = TypeVar("T")
UNLIMITED = 10**9  # attempts: only the deadline ends them
# Attempts for failures that a faulty proxy causes once and a wrong configuration always.
FEW_ATTEMPTS = 3
_BUSY = (
    "the store is busy, down or cannot be reached; no data is skipped for it: resume when it "
    "responds"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt. ``text`` contains no secret."""

    kind: str  # kind that is counted: a status, an errno, or a word
    text: str
    remedy: str = _BUSY
    tries: int = UNLIMITED


@dataclass(frozen=True, slots=True)
class Clock:
    """Time, sleep and randomness, replaceable in tests."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    # Spreads the retries of many readers; it affects only the time of a retry.
    jitter: Callable[[], float] = random.random
    # CPU seconds of a thread.
    cpu_s: Callable[[int], float] = lambda thread: thread_cpu_s(thread)
    # CPU seconds of the calling thread, a hundred times cheaper.
    own_cpu_s: Callable[[], float] = time.thread_time


def thread_cpu_s(thread: int) -> float:
    """Return the CPU seconds of a thread.

    They distinguish a hanging read from one that decompresses a large file. If the system does not
    tell, every read counts as hanging.
    """
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as stat:
            return int(stat.read().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


CLOCK = Clock()


@dataclass(slots=True, eq=False)
class Attempt:
    """One storage operation in progress."""

    path: str
    began: float
    thread: int
    cpu_s: float  # CPU seconds of the thread at the start
    failures: list[Failure] = field(default_factory=list)
    last: float = 0.0  # time of the last observed progress
    last_worked: float = -1.0

    def idle_s(self, clock: Clock) -> float:
        """Return the seconds without progress: the thread used no CPU time at all."""
        now, cpu_s = clock.now(), clock.cpu_s(self.thread)
        if cpu_s != self.last_worked:
            self.last, self.last_worked = now, cpu_s
        return now - self.last


class StorageStats:
    """Counters of the storage operations of one source, in the process that executes them."""

    def __init__(self, source: str = "", clock: Clock = CLOCK) -> None:
        self.source, self.clock = source, clock
        self.requests = self.bytes = self.retries = self.given_up = 0
        self.waited_s = 0.0
        self.no_wait = False  # the current caller must not wait
        self.errors: Counter[str] = Counter()
        self._in_progress: list[Attempt] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[StorageStats], tuple[str]]:
        return StorageStats, (self.source,)  # another process has its own counters

    def begin(self, path: str) -> Attempt:
        now, thread, cpu_s = self.clock.now(), threading.get_native_id(), self.clock.own_cpu_s()
        attempt = Attempt(path, now, thread, cpu_s, last=now, last_worked=cpu_s)
        with self._lock:
            self._in_progress.append(attempt)
        return attempt

    def end(self, attempt: Attempt) -> None:
        with self._lock:
            if attempt in self._in_progress:
                self._in_progress.remove(attempt)
                self.waited_s += self._waited(attempt)

    def _waited(self, attempt: Attempt) -> float:
        seconds = self.clock.now() - attempt.began
        if not attempt.failures and seconds < TIMEOUTS.slow_s:
            return 0.0
        return max(0.0, seconds - self.clock.cpu_s(attempt.thread) + attempt.cpu_s)

    def count_request(self, again: bool) -> None:
        with self._lock:
            self.requests += 1
            self.retries += again

    def add_bytes(self, nbytes: int) -> None:
        with self._lock:
            self.bytes += nbytes

    def count_failure(self, kind: str, put_off: bool = False) -> None:
        with self._lock:
            self.errors[kind] += 1
            self.retries += put_off

    def count_given_up(self) -> None:
        with self._lock:
            self.given_up += 1

    def oldest(self) -> Attempt | None:
        """Return the oldest operation in progress, if there is one."""
        with self._lock:
            return min(self._in_progress, key=lambda a: a.began, default=None)

    def metrics(self) -> dict[str, Any]:
        """Return the counters of requests to an object store."""
        with self._lock:
            return {
                "requests": self.requests,
                "bytes": self.bytes,
                "retries": self.retries,
                "errors": dict(self.errors),
            }

    def trouble(self) -> dict[str, Any]:
        """Return the counters of storage problems.

        ``waited_s`` includes operations in progress.
        """
        with self._lock:
            waited = self.waited_s + sum(map(self._waited, self._in_progress))
            return {
                "retries": self.retries,
                "errors": dict(self.errors),
                "waited_s": waited,
                "given_up": self.given_up,
            }


def retry_call(
    call: Callable[[], T],
    classify: Callable[[Exception], Failure | None],
    *,
    path: str,
    operation: str,
    stats: StorageStats,
    give_up_error: Callable[[str, str, Sequence[Failure], float], StorageUnreachable],
) -> T:
    """Call ``call`` until it succeeds, the failure is permanent, or the deadline passes.

    Raised errors contain no secret. An error for which ``classify`` returns None is not a storage
    error and is raised unchanged.
    """
    clock, limit, attempt = stats.clock, deadline_s(), stats.begin(path)
    failures = attempt.failures
    try:
        while True:
            stats.count_request(again=bool(failures))
            failure: Failure | None
            try:
                result = call()
                if failures:
                    log.warning(
                        "%s: recovered after %.1f s (%d attempts)",
                        _where(stats, path),
                        clock.now() - attempt.began,
                        len(failures) + 1,
                    )
                return result
            except Exception as error:
                if (failure := classify(error)) is None:
                    raise
            # Outside of the except clause: the library's error may quote a signed request, so it
            # must not be chained.
            failures.append(failure)
            stats.count_failure(failure.kind, put_off=stats.no_wait)
            if stats.no_wait:
                raise WouldBlock
            pause = min(
                TIMEOUTS.first_pause_s * 2 ** min(len(failures) - 1, 20), TIMEOUTS.longest_pause_s
            ) * (0.5 + clock.jitter() / 2)
            took = clock.now() - attempt.began
            if sum(f.kind == failure.kind for f in failures) >= failure.tries or took >= limit:
                stats.count_given_up()
                raise give_up_error(path, operation, failures, took)
            if len(failures) == 1:
                log.warning(
                    "%s: %s; retrying for up to %g s", _where(stats, path), failure.text, limit
                )
            clock.sleep(min(pause, limit - took))  # the last attempt is at the deadline
    finally:
        stats.end(attempt)


def attempts_text(failures: Sequence[Failure], took_s: float) -> str:
    return f" after {len(failures)} tries in {took_s:.1f} s" if len(failures) > 1 else ""


def kinds_text(failures: Sequence[Failure]) -> str:
    counts = ", ".join(f"{kind} x{n}" for kind, n in Counter(f.kind for f in failures).items())
    return f" (seen: {counts})" if len(failures) > 1 else ""


def deadline_s() -> float:
    return seconds_of("OVERLORD_STORE_DEADLINE_S", TIMEOUTS.deadline_s)


def seconds_of(variable: str, otherwise: float) -> float:
    given = os.environ.get(variable, "")
    try:
        value = float(given) if given else otherwise
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise StorageUnreachable(
            f"{variable}: expected a number of seconds above 0, got {given!r}",
            "fix the environment variable",
            "setup",
        )
    return value


def _where(stats: StorageStats, path: str) -> str:
    return f"source {stats.source!r}, {path}" if stats.source else path
