"""Storage errors: classification as transient or permanent, remedies, retries with back-off."""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from overlord.errors import WouldBlock
from overlord.sources.base import BadFile, File, StorageUnreachable
from overlord.sources.timeouts import TIMEOUTS
from overlord.uris import scrub

log = logging.getLogger("overlord")

# ----------------------------------------------------------------------------
# Retries with back-off for transient storage errors of disks, mounts and object stores.
#
# Retries do not affect the stream: a successful read returns the indexed bytes, whenever it
# succeeds.

T = TypeVar("T")
UNLIMITED = 10**9  # number of attempts if only the deadline ends them
# Number of attempts for failures that a retry may cure (a faulty proxy) or never cures (a wrong
# configuration).
FEW_ATTEMPTS = 3
_BUSY = (
    "check the store: it is busy, down or unreachable; no data is skipped: resume when it responds"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt. ``text`` contains no secret."""

    kind: str  # key in the counters of errors: an HTTP status, the name of an errno, or a word
    text: str
    remedy: str = _BUSY
    tries: int = UNLIMITED  # attempts that may fail with this kind before the call is given up


@dataclass(frozen=True, slots=True)
class Clock:
    """Time, sleep and randomness, replaceable in tests."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    # Spreads the retries of many readers; it affects only the time of a retry.
    jitter: Callable[[], float] = random.random
    # CPU seconds of a thread, by its native id.
    cpu_s: Callable[[int], float] = lambda thread: thread_cpu_s(thread)
    # CPU seconds of the calling thread; a hundred times cheaper than cpu_s.
    own_cpu_s: Callable[[], float] = time.thread_time


def thread_cpu_s(thread: int) -> float:
    """Return the CPU seconds of a thread by its native id, or 0.0 if the system reports none.

    CPU time distinguishes a hanging read from one that decompresses a large file. Without it every
    slow read counts as hanging.
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
    began: float  # clock time of the first attempt
    thread: int  # native id
    cpu_s: float  # CPU seconds of the thread at the start
    failures: list[Failure] = field(default_factory=list)
    last: float = 0.0  # clock time of the last observed progress
    last_worked: float = -1.0  # CPU seconds of the thread at that time

    def idle_s(self, clock: Clock) -> float:
        """Return the seconds since a call of this method last observed new CPU time."""
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
        self.no_wait = False  # if true, a failure raises WouldBlock and is not retried
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

    def count_request(self, is_retry: bool) -> None:
        with self._lock:
            self.requests += 1
            self.retries += is_retry

    def add_bytes(self, nbytes: int) -> None:
        with self._lock:
            self.bytes += nbytes

    def count_failure(self, kind: str, postponed: bool = False) -> None:
        with self._lock:
            self.errors[kind] += 1
            self.retries += postponed

    def count_given_up(self) -> None:
        with self._lock:
            self.given_up += 1

    def oldest(self) -> Attempt | None:
        """Return the oldest operation in progress, or None."""
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

    def problem_metrics(self) -> dict[str, Any]:
        """Return the counters of storage problems.

        ``waited_s`` counts operations that failed or were slow, without their CPU time. It includes
        operations in progress.
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

    Raises the result of ``give_up_error``, which contains no secret. With ``stats.no_wait`` the
    first failure raises WouldBlock instead. An error for which ``classify`` returns None is not a
    storage error and is raised unchanged.
    """
    clock, limit, attempt = stats.clock, deadline_s(), stats.begin(path)
    failures = attempt.failures
    try:
        while True:
            stats.count_request(is_retry=bool(failures))
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
            # This is outside of the except clause since the library's error may quote a signed
            # request: the raised error must not be chained to it.
            failures.append(failure)
            stats.count_failure(failure.kind, postponed=stats.no_wait)
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
            clock.sleep(min(pause, limit - took))  # the last attempt begins at the deadline
    finally:
        stats.end(attempt)


def attempts_text(failures: Sequence[Failure], took_s: float) -> str:
    return f" after {len(failures)} attempts in {took_s:.1f} s" if len(failures) > 1 else ""


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
            f"{variable}: expected a finite number of seconds above 0, got {given!r}",
            "fix the environment variable",
            "setup",
        )
    return value


def _where(stats: StorageStats, path: str) -> str:
    return f"source {stats.source!r}, {path}" if stats.source else path


# ----------------------------------------------------------------------------
# Classify errors of files on disks and mounts as transient or permanent, with remedies.
#
# A failing disk reports an errno. Invalid data are reported by the formats, and no retry repairs
# them.

# File systems on local devices or in memory, as mountinfo names them.
DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay", "tmpfs", "ramfs"}
MOUNTS = Path("/proc/self/mountinfo")

RESTORE_FILE = (
    "training data must not change during a run; restore the file with its time (cp -p, "
    "rsync -a), or start a new run"
)
_RESTORE = "restore it, or start a new run without it"
_PERMISSION = "grant read permission to the user that runs the job"
_DISK = "check the disk or the mount; no data is skipped: resume when it responds"
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_DENIED = (errno.EACCES, errno.EPERM)
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


@cache
def is_disk(device: int) -> bool:
    """Return whether the file system of a device (``st_dev``) is local, so that it never hangs.

    A remote mount may hang for any time. An unknown file system counts as remote.
    """
    try:
        return file_system_kind(device, MOUNTS.read_text(errors="replace")) in DISKS
    except OSError:
        return False


def file_system_kind(device: int, mounts: str) -> str:
    """Return the type of a device's file system from the text of mountinfo (proc(5)), else ""."""
    name = f"{os.major(device)}:{os.minor(device)}"
    lines = (line for line in mounts.splitlines() if line.split(" ", 3)[2:3] == [name])
    return next((line.partition(" - ")[2].split(" ", 1)[0] for line in lines), "")


def check_same_file(file: File) -> os.stat_result:
    """Return the status of the file. Raises StorageUnreachable if its size or time changed.

    The inode is ignored, since a restored copy has another one. An error of the operating system
    is raised unchanged.
    """
    try:
        status = os.stat(file.path)
    except ValueError as error:  # for example a null byte
        raise BadFile(f"expected a valid path, got: {error}", "fix the path") from error
    if not stat.S_ISREG(status.st_mode):
        what = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise StorageUnreachable(
            f"the file changed since the source was indexed: expected a file, got {what}",
            RESTORE_FILE,
            "changed",
        )
    if status.st_size != file.size or not _same_time(file.mtime_ns, status.st_mtime_ns):
        difference = (
            f"expected {file.size} bytes of {_time_text(file.mtime_ns)}, got {status.st_size} "
            f"bytes of {_time_text(status.st_mtime_ns)}"
        )
        raise StorageUnreachable(
            f"the file changed since the source was indexed: {difference}", RESTORE_FILE, "changed"
        )
    return status


def _same_time(indexed_ns: int, found_ns: int) -> bool:
    """Return whether the times agree; copy tools may truncate to us, ms or s."""
    return any(found_ns == indexed_ns // unit * unit for unit in (1, 10**3, 10**6, 10**9))


def _time_text(ns: int) -> str:
    try:
        when = datetime.fromtimestamp(ns // 10**9, UTC)
    except (OverflowError, ValueError, OSError):
        return f"time {ns}"
    return f"{when:%Y-%m-%d %H:%M:%S}.{ns % 10**9:09d}".rstrip("0").rstrip(".")


def classify_file_error(error: Exception) -> Failure | None:
    """Classify an error of a file read in a running job; None if storage is not at fault.

    The file existed when it was indexed, so every error of the operating system may be transient.
    """
    if isinstance(error, StorageUnreachable):
        return Failure(error.kind, error.problem, error.remedy)
    if not isinstance(error, OSError) or error.errno is None:
        return None
    text = os.strerror(error.errno)
    if error.errno in _GONE:
        problem = f"the file disappeared after the source was indexed ({text})"
        return Failure("gone", problem, _RESTORE)
    if error.errno in _DENIED:
        return Failure("denied", f"the file is no longer readable ({text})", _PERMISSION)
    return Failure(
        errno.errorcode.get(error.errno, str(error.errno)), f"could not be read: {text}", _DISK
    )


def retry_briefly(call: Callable[[], T], clock: Clock = CLOCK) -> T:
    """Call ``call`` with at most two retries, for reads at launch.

    A user is waiting, so a missing file or a missing permission is reported at once.
    """
    for pause in TIMEOUTS.launch_pauses_s:
        try:
            return call()
        except OSError as error:
            if isinstance(error, StorageUnreachable) and error.kind != "short read":
                raise
            if not isinstance(error, StorageUnreachable) and (
                error.errno is None or error.errno in (*_GONE, *_DENIED)
            ):
                raise
        clock.sleep(pause)
    return call()


def file_give_up_error(
    path: str, operation: str, failures: Sequence[Failure], took_s: float
) -> StorageUnreachable:
    last = failures[-1]
    return StorageUnreachable(
        last.text + attempts_text(failures, took_s) + kinds_text(failures), last.remedy, last.kind
    )


# ----------------------------------------------------------------------------
# Classify errors of object stores as transient or permanent, with remedies.

_STATUS = re.compile(r"status code: (\d{3})(?: ([A-Za-z -]+))?")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_KIND = re.compile(r"\bkind: (\w+)")
_TRANSIENT_CODES = {
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "InternalError",
    "ServiceUnavailable",
    "OperationAborted",
    "ConditionalRequestConflict",
}
_SHOWN = 300  # most characters of a library's text in an error

_RESTORE_OBJECT = "training data must not change during a run; restore it, or start a new run"
_KEYS = (
    "check the keys and their permissions; they come from the environment (AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY, ...)"
)
_RANGES = (
    "a proxy between this machine and the store does not serve byte ranges; connect to the "
    "store directly"
)


class WrongResponse(Exception):
    """Raised when a request succeeds, but its response does not hold the requested bytes."""

    def __init__(self, kind: str, problem: str):
        super().__init__(kind, problem)
        self.kind, self.problem = kind, problem


def classify_store_error(error: Exception) -> Failure:
    """Classify an error of obstore by its text, since obstore has few error classes."""
    if isinstance(error, WrongResponse):
        return _classify_response(error)
    text, shown = str(error), _first_line(str(error))
    status, code = _STATUS.search(text), (_CODE.search(text) or ["", ""])[1]
    if isinstance(error, StorageUnreachable):
        return Failure(error.kind, error.problem, error.remedy, 1)
    if "non-partial response" in text:
        return Failure(
            "whole object", "expected a range, got the whole object", _RANGES, FEW_ATTEMPTS
        )
    if "UnexpectedRange" in text:
        return Failure("other range", shown, _RANGES, FEW_ATTEMPTS)
    if "BadScheme" in text:
        return Failure(
            "setup",
            "expected an https endpoint, got plain http",
            "set AWS_ALLOW_HTTP=true to allow it",
            1,
        )
    if "169.254.16" in text or "metadata.google" in text:
        return Failure(
            "denied",
            "expected keys in the environment or a role of this machine, got neither",
            _KEYS,
            FEW_ATTEMPTS,
        )
    if status is not None:
        return _by_status(
            int(status[1]),
            code,
            f"{status[1]} {(status[2] or '').strip()}{f', {code}' if code else ''}",
        )
    if isinstance(error, FileNotFoundError):
        return Failure("gone", shown, _RESTORE_OBJECT, 1)
    kinds = _KIND.findall(text)
    if "Timeout" in kinds or "TimedOut" in text:
        return Failure("timeout", "no byte was received within the read timeout")
    if "IncompleteBody" in text or "UnexpectedEof" in kinds:
        return Failure("short body", "expected the whole body of the response, got a part of it")
    if {"Interrupted", "Connect"} & set(kinds):
        return Failure("connection", shown)
    return Failure(type(error).__name__, shown, tries=FEW_ATTEMPTS)


def classify_mid_run(error: Exception) -> Failure:
    """Classify an error of a running job: a missing, changed or denied object is retried too.

    The object existed when it was indexed, so it may be restored. Keys may be renewed.
    """
    failure = classify_store_error(error)
    return (
        replace(failure, tries=UNLIMITED)
        if failure.kind in ("gone", "changed", "denied")
        else failure
    )


def _by_status(status: int, code: str, shown: str) -> Failure:
    if status in (408, 429) or (status >= 500 and status != 501) or code in _TRANSIENT_CODES:
        return Failure(str(status), shown)
    if status == 404:
        return Failure(
            "gone",
            shown,
            "check the name of the bucket" if code == "NoSuchBucket" else _RESTORE_OBJECT,
            1,
        )
    if status in (412, 416):  # 416 means a shorter object: no read exceeds the indexed size
        return Failure("changed", shown, _RESTORE_OBJECT, 1)
    if status in (401, 403) or code in ("ExpiredToken", "InvalidToken"):
        return Failure("denied", shown, _KEYS, 1)
    if 300 <= status < 400:
        return Failure(
            "setup",
            shown,
            "set AWS_REGION, or ?region= in the URI: the bucket is in another region",
            1,
        )
    return Failure(
        str(status), shown, "check endpoint, bucket and region: the store refuses the request", 1
    )


def _classify_response(error: WrongResponse) -> Failure:
    if error.kind == "changed":
        return Failure("changed", error.problem, _RESTORE_OBJECT, 1)
    if error.kind == "other range":
        return Failure(error.kind, error.problem, _RANGES, FEW_ATTEMPTS)
    return Failure(error.kind, error.problem)


def store_give_up_error(
    path: str, operation: str, failures: Sequence[Failure], took_s: float
) -> StorageUnreachable:
    """Return the error after the last attempt: operation, attempts, duration, causes and remedy."""
    last, tried = failures[-1], attempts_text(failures, took_s)
    if last.kind == "gone":
        return StorageUnreachable(
            f"the object does not exist ({last.text}){tried}", last.remedy, last.kind
        )
    if last.kind == "changed":
        return StorageUnreachable(
            f"the object changed since it was indexed ({last.text}){tried}", last.remedy, last.kind
        )
    return StorageUnreachable(
        f"could not be {operation}{tried}: {last.text}" + kinds_text(failures),
        last.remedy,
        last.kind,
    )


def _first_line(text: str) -> str:
    """Return the library's text in one line, without its dump of the request and secrets."""
    line = " ".join(text.split("\nDebug source", 1)[0].split())
    return scrub(line)[:_SHOWN]
