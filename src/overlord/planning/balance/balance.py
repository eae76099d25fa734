"""Choose the bucket and microbatch of each item, so that ranks seldom wait for each other.

A *method* (``methods.py``) is one function from costs to bins. A placement algorithm
(``placement.py``) applies it to buckets and microbatches. ``place`` chooses the
algorithm. Cost (the time to compute a bin) and size (the tokens in it) are separate arrays.

A *bin* is one microbatch of one bucket, and an *index* is the number of a microbatch.

Objectives: ``iteration`` is for ranks that wait for each other once per step. It levels buckets
first, then the microbatches in each. ``microbatch`` is for ranks that wait after every microbatch.
It levels all bins of an index.

Levels: ``both`` balances buckets and microbatches. ``inter`` balances buckets only, with stream
order inside; with ``microbatch`` the stream is divided into runs, each balanced by itself.
``intra`` gives items to buckets in turn, and balances inside each. ``interleaved`` serves both
objectives at once: bucket totals are almost as level as with ``iteration``, indices almost as
level as with ``microbatch``. No microbatch stays empty while another of its bucket can give a
sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from overlord.checks import is_int
from overlord.errors import PlanError
from overlord.plan.plan import ROUNDING
from overlord.planning.balance import placement, stream_order
from overlord.planning.balance.methods import (
    METHODS,
    BalanceFn,
    greedy,
    karmarkar_karp,
    loads_of,
    method_named,
    none,
    register_balance,
    zigzag,
)
from overlord.planning.balance.placement import ItemPlacement, PackingProblem

__all__ = [
    "LEVELS",
    "METHODS",
    "OBJECTIVES",
    "BalanceFn",
    "ItemPlacement",
    "PackingProblem",
    "greedy",
    "karmarkar_karp",
    "method_named",
    "none",
    "place",
    "register_balance",
    "zigzag",
]

LEVELS = ("both", "inter", "intra", "interleaved")
OBJECTIVES = ("iteration", "microbatch")
ONCE = ("intra", "interleaved")  # levels that accept the objective "iteration" only
WORTH = 0.005  # least share of the step's time that an additional microbatch must save
# share of a microbatch that an additional one costs by itself (1.2 ms of 43, measured at 4k on one
# H200)
ONE_MORE = 0.03
FINE = 24  # bits of the capacity in the common unit of tokens and memory


def place(
    problem: PackingProblem,
    *,
    level: str = "both",
    objective: str = "iteration",
    keep_order: bool = False,
) -> ItemPlacement:
    """Return buckets and microbatches for all items; raise ``PlanError`` for invalid arguments.

    Capacity and memory bounds hold whatever the method does. ``keep_order``: microbatch k of all
    buckets together is run k, or sub-draw k, of the stream.
    """
    if (chunk := problem.chunk) is not None:
        whole = problem.of_chunks()
        found = place(whole, level=level, objective=objective, keep_order=keep_order)
        return replace(found, bucket=found.bucket[chunk], microbatch=found.microbatch[chunk])
    _check(problem, level, objective, keep_order)
    found = _in_memory(problem, level, objective, keep_order)
    if (n := problem.counted(found.n_microbatches)) > found.n_microbatches:
        found = _in_memory(replace(problem, microbatches=n), level, objective, keep_order)
        # empty microbatches at the end, if still needed
        found = replace(found, n_microbatches=problem.counted(found.n_microbatches))
    return found


def _in_memory(
    problem: PackingProblem, level: str, objective: str, keep_order: bool
) -> ItemPlacement:
    if problem.memory is None:
        return _place(problem, level, objective, keep_order)
    # A memory bound that holds anyway changes no plan. Otherwise both are counted as one size.
    found = _place(replace(problem, memory=None), level, objective, keep_order)
    if not within_memory(problem, found):
        found = _place(joined(problem), level, objective, keep_order)
        assert within_memory(problem, found), "the joint size bounds tokens and memory"
    return found


def _place(p: PackingProblem, level: str, objective: str, keep_order: bool) -> ItemPlacement:
    if keep_order:
        return (
            placement.first(p, (stream_order.in_runs,))
            if p.substep is None
            else stream_order.by_substep(p)
        )
    if p.method == "none" or (level == "inter" and objective == "iteration"):
        return stream_order.arrival_inside(p, placement.buckets(p, 0))
    if level == "inter":
        return placement.first(p, (placement.whole, stream_order.in_runs))
    if level == "intra":
        return placement.first(p, (placement.inside_round_robin,))
    if p.method != "greedy" and (own := _by_method(p, level, objective)) is not None:
        return own
    if level == "interleaved":
        return placement.first(p, (placement.alternating, placement.two_level, placement.tight))
    if objective == "microbatch":
        found = placement.first(p, (placement.better_flat,))
        return (
            found
            if found.algorithm in ("flat", "levelled")
            else _or_one_more(p, found, placement.better_flat, placement.waited)
        )
    return _or_one_more(
        p,
        placement.first(p, (placement.two_level, placement.tight)),
        placement.two_level,
        placement.heaviest,
    )


def _by_method(p: PackingProblem, level: str, objective: str) -> ItemPlacement | None:
    """Return the placement by the requested method, or None if it cannot keep the capacity.

    One microbatch more than the least number is tried if the problem allows it.
    """
    way = (
        placement.own_bins_swapped
        if level == "interleaved"
        else placement.own_bins
        if objective == "microbatch"
        else placement.two_level
    )
    least = p.least_microbatches()
    return next(
        (
            found
            for m in range(least, least + 1 + p.may_add(least))
            if (found := way(p, m)) is not None
        ),
        None,
    )


def _or_one_more(
    p: PackingProblem,
    found: ItemPlacement,
    way: placement.Way,
    time: Callable[[PackingProblem, ItemPlacement], float],
) -> ItemPlacement:
    """Return ``found``, or the placement with one microbatch more if that saves enough time.

    One more is tried only if the step is uneven and has more microbatches than requested already.
    """
    bound = p.bound()
    worth = bound * max(WORTH, ONE_MORE / found.n_microbatches)
    if not p.may_add(found.n_microbatches) or time(p, found) <= bound + worth:
        return found
    more = way(p, found.n_microbatches + 1)
    return found if more is None or time(p, more) + worth > time(p, found) else more


def within_memory(p: PackingProblem, found: ItemPlacement) -> bool:
    assert p.memory is not None
    bins = found.bucket.astype(np.int64) * found.n_microbatches + found.microbatch
    return (
        not len(bins)
        or float(loads_of(bins, p.memory, p.n_buckets * found.n_microbatches).max())
        <= p.memory_capacity * ROUNDING
    )


def joined(p: PackingProblem) -> PackingProblem:
    """Return the problem with tokens and memory as one size, in fractions of a microbatch.

    The size of an item is the larger of its shares of tokens and of memory. Shares add up, so
    neither bound can be broken. But items that need much of one and little of the other could
    share a bin, and are counted as if each needed both. So at worst there are twice the
    microbatches.
    """
    assert p.memory is not None
    unit = 2 ** max(0, FINE - max(1, p.capacity).bit_length())
    whole = max(1, p.capacity) * unit
    share = np.ceil(p.memory * (whole / p.memory_capacity))
    share += share * (p.memory_capacity / whole) < p.memory  # one more if rounding lost some
    sizes = np.maximum(share.astype(np.int64), p.sizes * unit if p.capacity else 0)
    return replace(p, sizes=np.minimum(sizes, whole), capacity=whole, memory=None)


def _check(p: PackingProblem, level: str, objective: str, keep_order: bool) -> None:
    for what, found, known in (("level", level, LEVELS), ("objective", objective, OBJECTIVES)):
        if found not in known:
            raise PlanError(f"balance: expected {what} {' or '.join(known)}, got {found!r}")
    method_named(p.method)
    if level != "both" and keep_order:
        raise PlanError(
            f"level {level!r}: expected keep_order=False, got True", remedy='use level "both"'
        )
    if level in ONCE and objective == "microbatch":
        raise PlanError(
            f'level {level!r}: expected objective "iteration", got "microbatch"',
            remedy='use level "both" or "inter"',
        )
    if p.group_size is not None and (not is_int(p.group_size) or p.group_size < 1):
        raise PlanError(
            f"group_size: expected a whole number of at least 1, got {p.group_size!r}",
            remedy="give the number of buckets of a group, or None",
        )
    for what, column in (("cost", p.costs), ("memory", p.memory)):
        if (
            column is not None
            and len(column)
            and not (np.isfinite(column).all() and column.min() >= 0)
        ):
            raise PlanError(
                f"{what}: expected finite numbers of at least 0, got one that is "
                "negative, infinite or NaN",
                remedy=f"correct the {what} function",
            )
    if p.capacity and len(p.sizes) and int(p.sizes.max()) > p.capacity:
        i = int(p.sizes.argmax())
        raise PlanError(
            f"item {i}: expected at most the {p.capacity} tokens of a microbatch, got "
            f"{int(p.sizes[i])} with its padding",
            remedy="raise the capacity, or leave out the item",
        )
    if (p.memory is None) != (p.memory_capacity <= 0):
        raise PlanError(
            "expected memory and memory_capacity together, got one of them",
            remedy="give cost(memory=) and balance(memory_capacity=), or neither",
        )
    if p.memory is not None and len(p.memory) and float(p.memory.max()) > p.memory_capacity:
        i = int(p.memory.argmax())
        raise PlanError(
            f"item {i}: expected at most the memory of a microbatch, "
            f"{p.memory_capacity:g}, got {float(p.memory[i]):g}",
            remedy="raise memory_capacity, or leave out the item",
        )
