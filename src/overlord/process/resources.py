"""CPU cores, memory, allocation and CPU time slices of a process."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

# ----------------------------------------------------------------------------
# CPU cores and memory that this process may use: those of the machine, or of its control group.
#
# In a container ``/proc`` describes the whole machine. The limits are in the files of the control
# group (cgroup), version 1 or 2. The kernel throttles or kills a process that exceeds them.

ROOT = Path("/")  # root of the system files; tests replace it


def cores(root: Path | None = None) -> int:
    """Return the number of CPU cores that this process may use, rounded up to a whole number."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([here, *(math.ceil(quota) for quota in _quotas(root or ROOT))]))


def memory_bytes(root: Path | None = None) -> int:
    """Return the bytes that all processes in the control group of this process may use together."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        _read(f / name)
        for f in _folders(root or ROOT, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    return min(
        [
            machine,
            *(
                int(words[0])
                for words in limits
                if words and words[0].isdecimal() and int(words[0]) > 0
            ),
        ]
    )


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU cores of each control group with a limit: its CPU time per period."""
    for folder in _folders(root, "cpu"):
        words = _read(folder / "cpu.max") or _read(folder / "cpu.cfs_quota_us") + _read(
            folder / "cpu.cfs_period_us"
        )
        if (
            len(words) == 2
            and all(word.isdecimal() for word in words)
            and int(words[0])
            and int(words[1])
        ):
            yield int(words[0]) / int(words[1])


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the cgroup folders of this process: its group and all groups above it.

    The limits of all of them apply. If only its own group is mounted in a container, the path in
    ``/proc`` does not exist there, and the top folder is its group.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        named, _, path = rest.partition(":")
        if named and controller not in named.split(","):
            continue
        for top in (mounts / controller, mounts / named) if named else (mounts, mounts / "unified"):
            group = Path(path.strip("/"))
            yield from (top / part for part in (group, *group.parents))


def _read(path: Path) -> list[str]:
    """Return the first line of a file, split at white space."""
    return next((line.split() for line in _lines(path)), [])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except (OSError, ValueError):  # another version or system, or no permission
        return []


# ----------------------------------------------------------------------------
# Memory allocation of a worker process.
#
# Memory that one read frees should serve the next one, for any source and any thread. Arrow's own
# allocator keeps freed memory apart for every thread and size, so a worker process does not use it.
# The C library keeps freed memory in *arenas*. The GNU C library assigns an arena to a thread at
# its first allocation, and never assigns another.
#
# Threads that share an arena wait for its lock at every allocation that their own cache does not
# serve. Tokenizing allocates all the time. Threads with one arena each keep their freed memory
# apart. So a worker limits arenas to the number of its threads: fewer arenas cost throughput, more
# arenas cost memory.

POOL = "ARROW_DEFAULT_MEMORY_POOL"  # read once, at the first use of Arrow
ARENAS = "MALLOC_ARENA_MAX"
TUNABLES, ARENAS_TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.arena_max"
M_ARENA_MAX = -8  # of <malloc.h>
# threads of a worker process that start after the limit is set: the event loop, the calls, and the
# watcher of storage or two servers
LATER = 4
DEFAULT = 8  # arenas per core: the limit of the GNU C library itself


@contextlib.contextmanager
def system_pool() -> Iterator[None]:
    """Make Arrow use the allocator of the C library.

    This holds for processes that are started, and for an Arrow that is loaded, inside the block.
    The environment is restored afterwards. A pool that the user chose (``POOL``) stays.
    """
    if POOL in os.environ:
        yield
        return
    os.environ[POOL] = "system"
    try:
        yield
    finally:
        del os.environ[POOL]


def trim_heap() -> None:
    """Return freed memory of the C library to the system.

    Use it after a peak of memory, for example after a tokenizer was loaded.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the GNU C library has it
    if trim is not None:
        trim(0)


def arena_limit(workers: int, cores: int, *, links: int = 0, running: int = 1) -> int:
    """Return the number of malloc arenas for a worker process: one per thread.

    The limit is at most the default of the C library, but above ``workers``: the threads that read
    and transform. ``links``: threads that each serve one connection; a server has one thread for
    all of its connections. ``running``: threads that the process already has; Ray starts two dozen.
    Native thread pools count as one thread per core: object stores have a pool, and tokenizers have
    one if their parallelism is turned on.
    """
    threads = running + workers + links + LATER + cores
    return max(workers + 1, min(threads, DEFAULT * cores))


def chosen_by_user(environ: Mapping[str, str]) -> bool:
    """Return whether the user sets the number of malloc arenas by the environment.

    The variables are ``MALLOC_ARENA_MAX`` and the equivalent tunable.
    """
    return bool(environ.get(ARENAS)) or ARENAS_TUNABLE in environ.get(TUNABLES, "")


def limit_arenas(workers: int, links: int = 0) -> int:
    """Limit the arenas of this process before it starts its threads; return the limit.

    Return 0 if the choice of the user or of the C library stays.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # the GNU C library has it
    if mallopt is None or chosen_by_user(os.environ):
        return 0
    limit = arena_limit(workers, cores(), links=links, running=_thread_count())
    return limit if mallopt(M_ARENA_MAX, limit) else 0


def _thread_count() -> int:
    """Return the number of threads of this process, including those of native libraries."""
    try:
        return len(list(Path("/proc/self/task").iterdir()))
    except OSError:
        return 1


# ----------------------------------------------------------------------------
# The memory of a process, measured as its proportional set size (PSS).
#
# PSS divides shared pages among the processes that map them.


def pss_bytes(pid: int | str = "self") -> int:
    """Return the proportional set size of a process.

    Return the resident size if the system has no PSS, and 0 if it reports nothing.
    """
    return _memory_field(pid, "Pss:")


def own_bytes(pid: int | str = "self") -> int:
    """Return the bytes that the process itself has written: its PSS without the pages of files.

    The shares of file pages change with every other process that maps the same libraries. So only
    differences of this number show the effect of the process itself. If the system does not report
    it, return the resident size, or 0.
    """
    return _memory_field(pid, "Pss_Anon:")


def _memory_field(pid: int | str, name: str) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # another system, or the process has exited: use the resident size
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


# ----------------------------------------------------------------------------
# Long CPU time slices for worker threads, which then preempt no other process.
#
# With more workers than cores, the system switches between them every 3 ms. Each then finds the
# caches filled by the others: twelve that tokenize on two cores take 1.5 times the CPU of two.
# Slices of 20 ms save half of that. Other processes do not wait longer: those with the
# common, shorter slice run first. Background work does not preempt a running process when it
# wakes.

SLICE_S = 0.02
# number of the system call by machine: the C library has no function for it
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
ATTRIBUTES = "IIQiIQQQ"


def in_background(slice_s: float = SLICE_S) -> bool:
    """Give this thread, and threads that it starts, long time slices as background work.

    The share of the cores does not change. Return False if the system does not support it (Linux
    before 6.12), or if another policy was chosen for this process.
    """
    number = SCHED_SETATTR.get(platform.machine())
    if (
        number is None
        or not hasattr(os, "sched_getscheduler")
        or os.sched_getscheduler(0) != os.SCHED_OTHER
    ):
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = struct.pack(
        ATTRIBUTES,
        struct.calcsize(ATTRIBUTES),
        os.SCHED_BATCH,
        0,
        nice,
        0,
        round(slice_s * 1e9),
        0,
        0,
    )
    with contextlib.suppress(AttributeError, OSError):
        return ctypes.CDLL(None).syscall(number, 0, wanted, 0) == 0
    return False
