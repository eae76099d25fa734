"""Classify errors of files on disks and mounts as transient or permanent, with remedies.

A failing disk reports an errno. Invalid data are reported by the formats, and no retry repairs
them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TypeVar

from overlord.sources.base import BadFile, File, StorageUnreachable
from overlord.sources.retry import CLOCK, Clock, Failure, attempts_text, kinds_text
from overlord.sources.timeouts import TIMEOUTS

T = TypeVar("T")
# Kinds of local file systems.
DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay", "tmpfs", "ramfs"}
MOUNTS = Path("/proc/self/mountinfo")

UNDER_RUN = (
    "training data must not change under a run; put the file back with its time (cp -p, "
    "rsync -a), or start a new run"
)
_RESTORE = "put it back, or start a new run without it"
_PERMISSION = "let the user that runs the job read it"
_DISK = "check the disk or the mount; no data is skipped for it: resume when it responds"
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_DENIED = (errno.EACCES, errno.EPERM)
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


@cache
def is_disk(device: int) -> bool:
    """Return whether a file system is local, so that it responds or fails.

    A remote mount may hang for any time.
    """
    try:
        return file_system_kind(device, MOUNTS.read_text(errors="replace")) in DISKS
    except OSError:
        return False


def file_system_kind(device: int, mounts: str) -> str:
    """Return the kind of a file system from the lines of mountinfo (proc(5)); "" if not listed."""
    name = f"{os.major(device)}:{os.minor(device)}"
    lines = (line for line in mounts.splitlines() if line.split(" ", 3)[2:3] == [name])
    return next((line.partition(" - ")[2].split(" ", 1)[0] for line in lines), "")


def check_same_file(file: File) -> os.stat_result:
    """Raise unless the file is the indexed one.

    Its inode does not count: a restored copy has another one.
    """
    try:
        status = os.stat(file.path)
    except ValueError as error:  # a name that no file can have
        raise BadFile(f"expected a usable path, got {error}") from error
    if not stat.S_ISREG(status.st_mode):
        what = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise StorageUnreachable(
            f"the file changed since the source was indexed: expected a file, got {what}",
            UNDER_RUN,
            "changed",
        )
    if status.st_size != file.size or not _same_time(file.mtime_ns, status.st_mtime_ns):
        difference = (
            f"expected {file.size} bytes of {_time_text(file.mtime_ns)}, got {status.st_size} "
            f"bytes of {_time_text(status.st_mtime_ns)}"
        )
        raise StorageUnreachable(
            f"the file changed since the source was indexed: {difference}", UNDER_RUN, "changed"
        )
    return status


def _same_time(indexed_ns: int, found_ns: int) -> bool:
    """Return whether times agree: copy tools may truncate them to microseconds or seconds."""
    return any(found_ns == indexed_ns // unit * unit for unit in (1, 10**3, 10**6, 10**9))


def _time_text(ns: int) -> str:
    try:
        when = datetime.fromtimestamp(ns // 10**9, UTC)
    except (OverflowError, ValueError, OSError):
        return f"time {ns}"
    return f"{when:%Y-%m-%d %H:%M:%S}.{ns % 10**9:09d}".rstrip("0").rstrip(".")


def classify(error: Exception) -> Failure | None:
    """Classify an error of a running job, or return None if the data are at fault.

    The file existed when it was indexed, so every error of the operating system may be transient.
    """
    if isinstance(error, StorageUnreachable):
        return Failure(error.kind, error.problem, error.remedy)
    if not isinstance(error, OSError) or error.errno is None:
        return None
    text = os.strerror(error.errno)
    if error.errno in _GONE:
        return Failure("gone", f"the file is gone since the source was indexed ({text})", _RESTORE)
    if error.errno in _DENIED:
        return Failure("denied", f"the file is no longer readable ({text})", _PERMISSION)
    return Failure(
        errno.errorcode.get(error.errno, str(error.errno)), f"cannot be read: {text}", _DISK
    )


def retry_briefly(call: Callable[[], T], clock: Clock = CLOCK) -> T:
    """Call ``call`` with a few retries, for reads at launch.

    A user is waiting, so a missing file is reported at once. An unstable mount gets a few attempts.
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


def give_up_error(
    path: str, operation: str, failures: Sequence[Failure], took_s: float
) -> StorageUnreachable:
    last = failures[-1]
    return StorageUnreachable(
        last.text + attempts_text(failures, took_s) + kinds_text(failures), last.remedy, last.kind
    )
