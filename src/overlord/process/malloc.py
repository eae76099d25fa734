"""How a host process has its memory: what one read has freed the next one uses, of whatever source
and in whatever thread.

Arrow's own allocator keeps freed memory apart for every thread and size: a host process does
without it. The C library keeps freed memory in *arenas*. The GNU C library assigns an arena to a
thread once, when the thread first allocates, and never assigns another. Threads that share an arena
wait for its lock at every allocation that their own cache does not serve; tokenizing allocates all
the time. Threads that have an arena each keep what they freed apart. So a host limits arenas to the
threads that it has: fewer cost throughput, more cost memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from overlord.process import cgroup

POOL = "ARROW_DEFAULT_MEMORY_POOL"  # looked at once, when Arrow is first used
ARENAS = "MALLOC_ARENA_MAX"
TUNABLES, ARENAS_TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.arena_max"
M_ARENA_MAX = -8  # of <malloc.h>
# threads of a host besides workers and links that start after its limit is set: pump, calls,
# storage watch or two servers
LATER = 4
DEFAULT = 8  # arenas per core: the limit of the GNU C library itself


@contextlib.contextmanager
def system_pool() -> Iterator[None]:
    """What is started or loaded meanwhile has Arrow take memory from the C library; the environment
    is as it was afterwards.
    """
    if POOL in os.environ:
        yield
        return
    os.environ[POOL] = "system"
    try:
        yield
    finally:
        del os.environ[POOL]


def give_back() -> None:
    """What was freed goes back to the system: for moments after which much less is needed than
    before. Loading a tokenizer is one.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the GNU C library has it
    if trim is not None:
        trim(0)


def arena_limit(workers: int, cores: int, *, links: int = 0, running: int = 1) -> int:
    """Return the number of malloc arenas for a host process: one for each of its threads, at most
    what the C library allows by itself.

    ``workers``: threads that read and transform. ``links``: threads that each serve one connection;
    a server has one thread for all of its connections. ``running``: threads that the process has
    already; Ray starts two dozen. Native pools count one thread per core: object stores have one,
    and tokenizers where it is turned on.
    """
    threads = running + workers + links + LATER + cores
    return max(workers + 1, min(threads, DEFAULT * cores))


def chosen_by_user(environ: Mapping[str, str]) -> bool:
    """Return whether the environment sets the number of arenas: ``MALLOC_ARENA_MAX``, or the
    tunable of the same meaning.
    """
    return bool(environ.get(ARENAS)) or ARENAS_TUNABLE in environ.get(TUNABLES, "")


def limit_arenas(workers: int, links: int = 0) -> int:
    """Limit the arenas of this process, before it starts its threads. Return the limit; 0: the
    user's choice or the C library's stays.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # the GNU C library has it
    if mallopt is None or chosen_by_user(os.environ):
        return 0
    limit = arena_limit(workers, cgroup.cores(), links=links, running=_running())
    return limit if mallopt(M_ARENA_MAX, limit) else 0


def _running() -> int:
    """Return the number of threads of this process, those of native libraries included."""
    try:
        return len(list(Path("/proc/self/task").iterdir()))
    except OSError:
        return 1
