"""Pieces of a hybrid plan: the tokens of each sample that each rank of its ring holds. Pure.

The plan stores one row per sample, and the ring of its task. Everything about ranks follows from
both: bounds of pieces, tokens and cost of a rank, microbatches of a rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from overlord import ring
from overlord.errors import PlanError
from overlord.plan.host_pools import check_host_memory
from overlord.plan.plan import Assignment, LoadingPlan
from overlord.plan.tasks import PlanTasks
from overlord.sample import ranges

AXES = ("DP", "CP")  # axes of buckets whose ranks can form rings
MAX_PIECES = 2**28  # far above any step, and below what would exhaust memory


def pieces_of(plan: LoadingPlan) -> Assignment:
    """Return the backbone with a row for each sample and rank of its ring.

    ``size`` is the piece, ``cost`` an equal share, ``microbatch`` the index of the task.
    """
    tasks, a = plan.tasks, plan.main
    assert tasks is not None, "expected a hybrid plan"
    table = tasks.table
    task = tasks.task[a.sample].astype(np.int64)
    d = table.sizes()[task]
    item = np.repeat(np.arange(len(task)), d)
    position = np.arange(len(item)) - np.repeat(np.cumsum(d) - d, d)
    d = d[item]
    return replace(
        a,
        sample=a.sample[item],
        bucket=table.task_rank[table.task_ptr[task][item] + position],
        microbatch=a.microbatch[item],
        slot=a.slot[item],
        size=ring.sizes(a.size[item], d, position),
        cost=a.cost[item] / d,
    )


class RankTasks(NamedTuple):
    """The microbatches of some ranks, rank after rank, and the samples of each in slot order."""

    bounds: np.ndarray  # int64 [ranks + 1]: microbatches of each rank
    task: np.ndarray  # int64 [microbatches]: row of the table
    position: np.ndarray  # int64 [microbatches]: place of the rank in the ring
    samples: np.ndarray  # int64: rows of the plan
    microbatch: np.ndarray  # int64: of each of these rows


def tasks_of_ranks(plan: LoadingPlan, ranks: np.ndarray) -> RankTasks:
    """Return the microbatches of these ranks (buckets) in the order in which each runs them."""
    tasks, a = plan.tasks, plan.main
    assert tasks is not None, "expected a hybrid plan"
    table = tasks.table
    first, members = table.members(a.n_buckets)
    counts = first[ranks + 1] - first[ranks]
    bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    members = members[ranges(first[ranks], counts)]
    task = table.task_of(members)
    of_item = tasks.task[a.sample]
    by_task = np.lexsort((a.slot, of_item))
    start = np.searchsorted(of_item[by_task], np.arange(len(table) + 1))
    held = (start[1:] - start[:-1])[task]
    return RankTasks(
        bounds=bounds,
        task=task,
        position=members - table.task_ptr[task],
        samples=a.sample[by_task[ranges(start[task], held)]],
        microbatch=np.repeat(np.arange(len(task)), held),
    )


def _kept_tokens(plan: LoadingPlan, tasks: PlanTasks) -> np.ndarray:
    """Return the tokens whose activations stay on the fullest rank of each task: float64."""
    held, table = pieces_of(plan), tasks.table
    key = tasks.task[held.sample].astype(np.int64) * plan.main.n_buckets + held.bucket
    each, number = np.unique(key, return_inverse=True)
    tokens = np.bincount(number, weights=held.size, minlength=len(each))
    most = np.zeros(len(table))
    np.maximum.at(most, each // plan.main.n_buckets, tokens)
    return most * (1 - tasks.offload_share * table.offload.astype(np.float64))


def check_tasks(plan: LoadingPlan, tasks: PlanTasks) -> None:
    """Raise ``PlanError`` unless tasks obey their rules and agree with the samples' placement."""
    a, step = plan.main, plan.step
    if a.axis not in AXES:
        raise PlanError(
            f"tasks: expected buckets along {' or '.join(AXES)}, got {a.axis}",
            step,
            'call .distribute("CP") before .split()',
        )
    if tasks.rules.ranks != a.n_buckets:
        raise PlanError(
            f"tasks: expected rules for the {a.n_buckets} buckets, got {tasks.rules.ranks} ranks",
            step,
            "call .split() on a graph that is distributed over this mesh",
        )
    if plan.place is not None and tasks.rules.stages < plan.place.pp:
        raise PlanError(
            f"tasks: expected rules for {plan.place.pp} pipeline stages, got {tasks.rules.stages}",
            step,
            "call .split() on a graph of this mesh",
        )
    capacity = tasks.rules.capacity or int(tasks.rules.memory_capacity)
    if a.capacity != capacity:
        raise PlanError(
            f"tasks: expected a capacity of {capacity}, got {a.capacity}",
            step,
            "give .split() and the plan one capacity",
        )
    of = tasks.task[(tasks.task >= 0) & (tasks.task < len(tasks.table))]
    if (n := float(tasks.table.sizes()[of].sum(dtype=np.float64))) > MAX_PIECES:
        raise PlanError(f"tasks: expected at most {MAX_PIECES} pieces, got {n:.0f}", step)
    tasks.table.check(tasks.rules, task=tasks.task, tokens=plan.tokens, step=step)
    if tasks.rules.memory_capacity:
        memory = _kept_tokens(plan, tasks)
        tasks.table.check(tasks.rules, memory=memory, step=step)
    held = tasks.table.held(tasks.task, tasks.lengths(plan.tokens))
    check_host_memory(tasks.table, tasks.rules, held, step)
    if (end := tasks.end) is not None and (
        end.shape != (a.n_buckets,) or not (np.isfinite(end).all() and (end >= 0).all())
    ):
        raise PlanError(
            f"tasks: expected a time of at least 0 for each of {a.n_buckets} ranks, got "
            f"{end.dtype} of shape {end.shape}",
            step,
            "leave out end=, or give every rank its time",
        )
    task = tasks.task[a.sample]
    owner = tasks.table.task_rank[tasks.table.task_ptr[:-1]][task]
    for what, column, wanted in (
        ("bucket", a.bucket, owner),
        ("microbatch", a.microbatch, tasks.table.index[task]),
        ("size", a.size, tasks.lengths(plan.tokens)[a.sample]),
    ):
        if (wrong := column != wanted).any():
            i = int(wrong.argmax())
            raise PlanError(
                f"tasks: expected {what} {wanted[i]} for sample {plan.sample_id(int(a.sample[i]))} "
                f"of task {task[i]}, got {column[i]}",
                step,
                "take bucket, microbatch and size from the task",
            )
