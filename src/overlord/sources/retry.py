"""Trying again: what storage cannot give now it may give in a while. One way for disks, mounts and
stores.

Nothing of it is seen in the stream: a read that succeeds gives the bytes that were indexed, however
often it was tried, and when.
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
# Of one read or listing with all its retries: long enough for a store's bad minute, shorter than a
# collective's time-out.
DEADLINE_S = 120.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
SLOW_S = 1.0  # what takes longer has waited for storage, though nothing failed
SLACK_S = 1.0  # beyond the deadline, before somebody else gives up: a last try may be under way
FOR_EVER = 10**9  # tries: only the deadline ends them
FEW = 3  # tries of what a faulty proxy does once and a wrong set-up always
_BUSY = (
    "the store is busy, down or cannot be reached; no data is skipped for it: resume when it "
    "answers"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed try. ``text`` holds no secret."""

    kind: str  # as counted: a status, an errno, or a word
    text: str
    remedy: str = _BUSY
    tries: int = FOR_EVER


@dataclass(frozen=True, slots=True)
class Clock:
    """Time, sleep and chance, so that tests need none of them."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = (
        random.random
    )  # spreads many readers' tries; it decides when, never what
    worked: Callable[[int], float] = lambda thread: worked_s(
        thread
    )  # seconds that a thread has had a core
    worked_here: Callable[[], float] = (
        time.thread_time
    )  # the same of this thread, a hundred times cheaper


def worked_s(thread: int) -> float:
    """What tells a read that hangs from one that unpacks a large file. Where the system does not
    say, all count as hanging.
    """
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as stat:
            return int(stat.read().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


CLOCK = Clock()


@dataclass(slots=True, eq=False)
class Attempt:
    """One thing that is wanted of storage, while it is not there yet."""

    path: str
    began: float
    thread: int
    worked: float  # seconds that the thread had a core by then
    seen: list[Failure] = field(default_factory=list)
    last: float = 0.0  # when it was last seen to get on
    last_worked: float = -1.0

    def idle_s(self, clock: Clock) -> float:
        """How long nothing has moved: the thread had no core, not for a moment."""
        now, worked = clock.now(), clock.worked(self.thread)
        if worked != self.last_worked:
            self.last, self.last_worked = now, worked
        return now - self.last


class StorageStats:
    """What one source asked of its storage, and what came of it. Counted in the process that
    asked.
    """

    def __init__(self, source: str = "", clock: Clock = CLOCK) -> None:
        self.source, self.clock = source, clock
        self.requests = self.bytes = self.retries = self.given_up = 0
        self.waited_s = 0.0
        self.hasty = False  # whoever asks now must not wait
        self.errors: Counter[str] = Counter()
        self._under_way: list[Attempt] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[StorageStats], tuple[str]]:
        return StorageStats, (self.source,)  # another process counts for itself

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
        """What has been waited for longest, if anything is."""
        with self._lock:
            return min(self._under_way, key=lambda a: a.began, default=None)

    def metrics(self) -> dict[str, Any]:
        """Of a store: what was asked of it."""
        with self._lock:
            return {
                "requests": self.requests,
                "bytes": self.bytes,
                "retries": self.retries,
                "errors": dict(self.errors),
            }

    def trouble(self) -> dict[str, Any]:
        """Of any storage: what went wrong, and what it cost. ``waited_s`` counts what is under
        way.
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
    """Calls until it works, the failure is one that lasts, or the deadline passes. What is raised
    holds no secret; what ``why`` knows nothing about is no fault of storage, and raised as it is.
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
                        "%s: well again after %.1f s and %d tries",
                        _where(tally, path),
                        clock.now() - attempt.began,
                        len(seen) + 1,
                    )
                return result
            except Exception as error:
                if (failure := why(error)) is None:
                    raise
            # Outside of the except clause: the library's error, which may quote a signed request,
            # must not ride along.
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
                    "%s: %s; it is tried again for up to %g s",
                    _where(tally, path),
                    failure.text,
                    limit,
                )
            clock.sleep(min(pause, limit - took))  # the last try is at the deadline
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
            "mend the environment",
            "setup",
        )
    return value


def _where(tally: StorageStats, path: str) -> str:
    return f"source {tally.source!r}, {path}" if tally.source else path
