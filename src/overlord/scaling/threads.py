"""Threads of one process, in cores: code that holds the interpreter lock (GIL) uses one core per
process. Pure.

Python code holds the lock while it runs; pyarrow, tokenizers, zstd and large numpy copies release
it. The *locked part* of a source is the share of its CPU time under the lock: 1 for plain Python, 0
for code that always releases it. Amdahl's law gives the cores that its threads can use in one
process. Before a source runs, the part is an assumption; afterwards it is measured. Decision record
0022 has the reasons.
"""

from __future__ import annotations

# threads of a process that are busy at a time; more of them wait for the lock between two calls
# that release it
THREADS = 8
SECOND = 0.9  # share of a core that the second thread of a process adds, and each after it
# work items in progress per process: with fewer, threads do not compete and nothing can be measured
SIDE_BY_SIDE = 1.5
# cores per process: with fewer, threads wait for storage or other programs and not for the lock
SATURATED = 0.75


def worth(threads: float) -> float:
    """Return the cores that threads of one process use if their code releases the lock."""
    return 1 + SECOND * (min(threads, THREADS) - 1)


def locked_part(cost_s: float, free_s: float) -> float:
    """Return the assumed locked part of a sample that costs ``cost_s`` of a core, of which
    ``free_s`` are in code known to release the lock.
    """
    return max(0.0, 1 - free_s / cost_s) if cost_s > 0 else 0.0


def measured_part(in_progress: float, cores: float) -> float | None:
    """Return the locked part by the Karp-Flatt metric; None if too little work is in progress, or
    it waits for something else.

    ``in_progress``: work items that one process has started, on average. ``cores``: cores that they
    kept busy. A machine without idle cores looks the same as a lock: the result is then too high.
    """
    if in_progress < SIDE_BY_SIDE or cores < SATURATED:
        return None
    return min(1.0, max(0.0, (in_progress / cores - 1) / (in_progress - 1)))


def useful(lanes: float, locked: float) -> float:
    """Return the cores that one process can use for a source: Amdahl's law for ``lanes``
    threads.
    """
    return lanes / (1 + locked * (lanes - 1))
