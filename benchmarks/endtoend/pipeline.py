"""The 1F1B pipeline schedule, simulated for many pipelines at once.

The inputs are the times of every stage and microbatch.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

Op = tuple[int, int, bool]  # stage, microbatch, whether backward


def one_f_one_b(forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Return when each pipeline ends; times are [pipeline, stage, microbatch].

    A stage executes its own list in order. A forward waits for the stage before it, a backward for
    the stage after it.
    """
    n, stages, microbatches = forward.shape
    free = np.zeros((stages, n))  # when a stage has done what it was given
    done = np.zeros((2, stages, microbatches, n))
    for stage, k, back in schedule(stages, microbatches):
        start = free[stage]
        if back and stage + 1 < stages:
            start = np.maximum(start, done[1, stage + 1, k])
        elif not back and stage > 0:
            start = np.maximum(start, done[0, stage - 1, k])
        free[stage] = done[int(back), stage, k] = (
            start + (backward if back else forward)[:, stage, k]
        )
    return free.max(axis=0)


def stage_list(stage: int, stages: int, microbatches: int) -> list[Op]:
    """Return the work of a stage in order.

    It begins with forwards that fill the pipeline, continues with one forward and one backward in
    turn, and ends with the remaining backwards.
    """
    warm = min(microbatches, stages - 1 - stage)
    ops: list[Op] = [(stage, k, False) for k in range(warm)]
    for k in range(microbatches - warm):
        ops += [(stage, warm + k, False), (stage, k, True)]
    return ops + [(stage, k, True) for k in range(microbatches - warm, microbatches)]


@lru_cache
def schedule(stages: int, microbatches: int) -> tuple[Op, ...]:
    """Return the lists of all stages, merged such that each item follows those it waits for."""
    lists = [stage_list(s, stages, microbatches) for s in range(stages)]
    at, done, merged = [0] * stages, set(), []
    while len(merged) < 2 * stages * microbatches:
        before = len(merged)
        for s in range(stages):
            while at[s] < len(lists[s]):
                op = lists[s][at[s]]
                waits_for = (s + 1, op[1], True) if op[2] else (s - 1, op[1], False)
                if 0 <= waits_for[0] < stages and waits_for not in done:
                    break
                done.add(op)
                merged.append(op)
                at[s] += 1
        assert len(merged) > before, "the schedule waits for itself"
    return tuple(merged)
