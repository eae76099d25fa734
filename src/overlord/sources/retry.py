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
from overlord.sources.base import Unreachable

log = logging.getLogger("overlord")

T = TypeVar("T")
# Seconds for one read or listing with all its retries: long enough for a bad minute of a store,
# shorter than the timeout of a collective.
DEADLINE_S = 120.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
SLOW_S = 1.0  # seconds; a slower read counts as waiting for storage, even if it did not fail
# seconds after the deadline before another thread gives up: a last attempt may be running
SLACK_S = 1.0
FOR_EVER = 10**9  # attempts: only the deadline ends them
FEW = 3  # attempts for failures that a faulty proxy causes once and a wrong configuration always
_BUSY = (
    "the store is busy, down or cannot be reached; no data is skipped for it: resume when it "
    "answers"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt. ``text`` contains no secret."""

    kind: str  # kind that is counted: a status, an errno, or a word
    text: str
    remedy: str = _BUSY
    tries: int = FOR_EVER


@dataclass(frozen=True, slots=True)
class Clock:
    """Time, sleep and randomness, replaceable in tests."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    # Spreads the retries of many readers; it affects only the time of a retry.
    chance: Callable[[], float] = random.random
    # CPU seconds of a thread.
    worked: Callable[[int], float] = lambda thread: worked_s(thread)
    # CPU seconds of the calling thread, a hundred times cheaper.
    worked_here: Callable[[], float] = time.thread_time


def worked_s(thread: int) -> float:
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
    worked: float  # CPU seconds of the thread at the start
    seen: list[Failure] = field(default_factory=list)
    last: float = 0.0  # time of the last observed progress
    last_worked: float = -1.0

    def idle_s(self, clock: Clock) -> float:
        """Return the seconds without progress: the thread used no CPU time at all."""
        now, worked = clock.now(), clock.worked(self.thread)
        if worked != self.last_worked:
            self.last, self.last_worked = now, worked
        return now - self.last


class StorageStats:
    """Counters of the storage operations of one source, in the process that executes them."""

    def __init__(self, source: str = "", clock: Clock = CLOCK) -> None:
        self.source, self.clock = source, clock
        self.requests = self.bytes = self.retries = self.given_up = 0
        self.waited_s = 0.0
        self.hasty = False  # the current caller must not wait
        self.errors: Counter[str] = Counter()
        self._under_way: list[Attempt] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[StorageStats], tuple[str]]:
        return StorageStats, (self.source,)  # another process has its own counters

    def begin(self, path: str) -> Attempt:
        now, thread, worked = self.clock.now(), threading.get_native_id(), self.clock.worked_here()
        attempt = Attempt(path, now, thread, worked, last=now, last_worked=worked)
        with self._lock:
            self._under_way.append(attempt)
        return attempt

    def end(self, attempt: Attempt) -> None:
        with self._lock:
            if attempt in self._under_way:
                self._under_way.remove(attempt)
                self.waited_s += self._waited(attempt)

    def _waited(self, attempt: Attempt) -> float:
        seconds = self.clock.now() - attempt.began
        if not attempt.seen and seconds < SLOW_S:
            return 0.0
        return max(0.0, seconds - self.clock.worked(attempt.thread) + attempt.worked)

    def asked(self, again: bool) -> None:
        with self._lock:
            self.requests += 1
            self.retries += again

    def got(self, nbytes: int) -> None:
        with self._lock:
            self.bytes += nbytes

    def failed(self, kind: str, put_off: bool = False) -> None:
        with self._lock:
            self.errors[kind] += 1
            self.retries += put_off

    def gave_up(self) -> None:
        with self._lock:
            self.given_up += 1

    def oldest(self) -> Attempt | None:
        """Return the oldest operation in progress, if there is one."""
        with self._lock:
            return min(self._under_way, key=lambda a: a.began, default=None)

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
        """Return the counters of problems of any storage.

        ``waited_s`` includes operations in progress.
        """
        with self._lock:
            waited = self.waited_s + sum(map(self._waited, self._under_way))
            return {
                "retries": self.retries,
                "errors": dict(self.errors),
                "waited_s": waited,
                "given_up": self.given_up,
            }


def persist(
    once: Callable[[], T],
    why: Callable[[Exception], Failure | None],
    *,
    path: str,
    done: str,
    tally: StorageStats,
    gave_up: Callable[[str, str, Sequence[Failure], float], Unreachable],
) -> T:
    """Call ``once`` until it succeeds, the failure is permanent, or the deadline passes.

    Raised errors contain no secret. An error that ``why`` does not classify is not a storage error
    and is raised unchanged.
    """
    clock, limit, attempt = tally.clock, deadline_s(), tally.begin(path)
    seen = attempt.seen
    try:
        while True:
            tally.asked(again=bool(seen))
            failure: Failure | None
            try:
                result = once()
                if seen:
                    log.warning(
                        "%s: recovered after %.1f s (%d attempts)",
                        _where(tally, path),
                        clock.now() - attempt.began,
                        len(seen) + 1,
                    )
                return result
            except Exception as error:
                if (failure := why(error)) is None:
                    raise
            # Outside of the except clause: the library's error may quote a signed request, so it
            # must not be chained.
            seen.append(failure)
            tally.failed(failure.kind, put_off=tally.hasty)
            if tally.hasty:
                raise WouldBlock
            pause = min(FIRST_PAUSE_S * 2 ** min(len(seen) - 1, 20), LONGEST_PAUSE_S) * (
                0.5 + clock.chance() / 2
            )
            took = clock.now() - attempt.began
            if sum(f.kind == failure.kind for f in seen) >= failure.tries or took >= limit:
                tally.gave_up()
                raise gave_up(path, done, seen, took)
            if len(seen) == 1:
                log.warning(
                    "%s: %s; retrying for up to %g s", _where(tally, path), failure.text, limit
                )
            clock.sleep(min(pause, limit - took))  # the last attempt is at the deadline
    finally:
        tally.end(attempt)


def tries_in_words(seen: Sequence[Failure], took_s: float) -> str:
    return f" after {len(seen)} tries in {took_s:.1f} s" if len(seen) > 1 else ""


def kinds_in_words(seen: Sequence[Failure]) -> str:
    counts = ", ".join(f"{kind} x{n}" for kind, n in Counter(f.kind for f in seen).items())
    return f" (seen: {counts})" if len(seen) > 1 else ""


def deadline_s() -> float:
    return seconds_of("OVERLORD_STORE_DEADLINE_S", DEADLINE_S)


def seconds_of(variable: str, otherwise: float) -> float:
    given = os.environ.get(variable, "")
    try:
        value = float(given) if given else otherwise
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise Unreachable(
            f"{variable}: expected a number of seconds above 0, got {given!r}",
            "fix the environment variable",
            "setup",
        )
    return value


def _where(tally: StorageStats, path: str) -> str:
    return f"source {tally.source!r}, {path}" if tally.source else path
