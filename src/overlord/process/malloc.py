"""Memory allocation of a worker process: memory freed by one read serves the next one.

This holds for any source and any thread. Arrow's own allocator keeps freed memory apart for every
thread and size, so a worker process does not use it. The C library keeps freed memory in *arenas*.
The GNU C library assigns an arena to a thread at its first allocation, and never assigns another.

Threads that share an arena wait for its lock at every allocation that their own cache does not
serve. Tokenizing allocates all the time. Threads with one arena each keep their freed memory apart.
So a worker limits arenas to the number of its threads: fewer cost throughput, more cost memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from overlord.process import cgroup

POOL = "ARROW_DEFAULT_MEMORY_POOL"  # read once, at the first use of Arrow
ARENAS = "MALLOC_ARENA_MAX"
TUNABLES, ARENAS_TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.arena_max"
M_ARENA_MAX = -8  # of <malloc.h>
# threads of a worker process that start after the limit is set: event loop, calls, and the watch
# of storage or two servers
LATER = 4
DEFAULT = 8  # arenas per core: the limit of the GNU C library itself


@contextlib.contextmanager
def system_pool() -> Iterator[None]:
    """Let Arrow allocate from the C library inside the block.

    This holds for processes that are started and modules that are loaded in the block. The
    environment is restored afterwards.
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
    """Return freed memory to the system.

    Use it when much less memory is needed from now on, as after loading a tokenizer.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the GNU C library has it
    if trim is not None:
        trim(0)


def arena_limit(workers: int, cores: int, *, links: int = 0, running: int = 1) -> int:
    """Return the number of malloc arenas for a worker process: one per thread.

    At most the default of the C library is returned. ``workers``: threads that read and transform.
    ``links``: threads that each serve one connection; a server has one thread for all of its
    connections. ``running``: threads that the process already has; Ray starts two dozen. Native
    pools count one thread per core: object stores have one, and tokenizers if it is turned on.
    """
    threads = running + workers + links + LATER + cores
    return max(workers + 1, min(threads, DEFAULT * cores))


def chosen_by_user(environ: Mapping[str, str]) -> bool:
    """Return whether the environment sets the number of arenas.

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
    limit = arena_limit(workers, cgroup.cores(), links=links, running=_running())
    return limit if mallopt(M_ARENA_MAX, limit) else 0


def _running() -> int:
    """Return the number of threads of this process, including those of native libraries."""
    try:
        return len(list(Path("/proc/self/task").iterdir()))
    except OSError:
        return 1
