"""How a host process has its memory: what one read has freed the next one uses, of whatever source and in whatever thread.

Arrow's own allocator keeps freed memory apart for every thread and size, and the C library keeps it apart for every thread. A host of 25
sources holds 27 to 41 MB less without that, a fifth of all that it takes on Ray, and uses as much CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

POOL = "ARROW_DEFAULT_MEMORY_POOL"  # looked at once, when Arrow is first used
ARENAS = "MALLOC_ARENA_MAX"
M_ARENA_MAX = -8  # of <malloc.h>


@contextlib.contextmanager
def system_pool() -> Iterator[None]:
    """What is started or loaded meanwhile has Arrow take memory from the C library; the environment is as it was afterwards."""
    if POOL in os.environ:
        yield
        return
    os.environ[POOL] = "system"
    try:
        yield
    finally:
        del os.environ[POOL]


def give_back() -> None:
    """What was freed goes back to the system: for moments after which much less is needed than before. Loading a tokenizer is one."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the GNU C library has it
    if trim is not None:
        trim(0)


def share_arenas(workers: int) -> None:
    """``workers``: threads of this process that work at the same time. More need no memory of their own."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # the GNU C library has it
    if mallopt is not None and ARENAS not in os.environ:
        mallopt(M_ARENA_MAX, workers + 1)  # and the pump
