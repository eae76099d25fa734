"""Sort and pack arrays into bins: the inner loops of balancing, exact on every machine.

LPT (longest processing time first) takes items by falling cost and puts each into the lightest bin.
One heap step per item is too slow in Python for a quarter of a million samples, so rounds place
many items at once. Let bins be sorted by load ``l``, and ``c`` the costs of the next items. Item j
goes to bin j as long as ``l[j] < min over i < j of l[i] + c[i]``. Until then no bin that was just
filled is the lightest again. Every sort is stable and every tie goes to the lowest bin. So heap and
rounds give the same bins, on every machine.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from overlord.hashing import RADIX_FROM, order_by_key, position_in_key, radix_order

# below this a heap step per item is cheaper than numpy rounds (measured with 16 and 64 items a bin)
FEW_BINS = 24
MANY_BINS = 12  # from this number on one pass over all bins is cheaper than one pass for each
# after 64 rounds, the heap is faster if rounds have placed fewer than 32 items on average
FEW_ROUNDS, WORTH_A_ROUND = (64, 32)
NOWHERE = -1  # bin of an item without room


def by_falling(values: np.ndarray) -> np.ndarray:
    """Return the stable order by falling value of non-negative float64 numbers.

    It takes half the time of argsort: the bits of non-negative floats sort like the floats, and
    numpy radix-sorts 16-bit keys, so four passes suffice.
    """
    if len(values) < RADIX_FROM:
        return (-np.asarray(values, np.float64)).argsort(kind="stable")
    # + 0.0 turns -0.0 into 0.0
    bits = ~(np.ascontiguousarray(values, np.float64) + 0.0).view(np.uint64)
    return radix_order(bits, 4)


def by_falling_size(sizes: np.ndarray) -> np.ndarray:
    """Return the stable order by falling value of non-negative integers.

    Integers below 2^16 need a single pass.
    """
    if len(sizes) and int(sizes.max()) < 2**16:
        return (~sizes.astype(np.uint16)).argsort(kind="stable")
    return by_falling(sizes.astype(np.float64))


def by_falling_like(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return ``by_falling(values)``; ``order`` is the result if the values fall along it.

    Costs often fall with sizes. Then one sort serves both, and a comparison of neighbours shows it.
    """
    v = values[order]
    later = v[1:] < v[:-1]
    if later.all() or (later | ((v[1:] == v[:-1]) & (order[1:] > order[:-1]))).all():
        return order
    return by_falling(values)


def total(values: np.ndarray) -> float:
    """Return the sum in the given order.

    ``sum`` adds in an order of numpy's choice, and the last digit could change a plan.
    """
    return float(values.cumsum()[-1]) if len(values) else 0.0


def lpt(
    costs: np.ndarray,
    n_bins: int,
    capacity: int = 0,
    sizes: np.ndarray | None = None,
    start: np.ndarray | None = None,
    order: np.ndarray | None = None,
) -> np.ndarray:
    """Return the bin of every item by LPT; ``start``: initial loads of the bins.

    With a capacity (0: none) it is the lightest bin with room. If no bin has room for an item, it
    and all cheaper items have NOWHERE. ``order``: ``by_falling(costs)``, if it is known.
    """
    order = by_falling(costs) if order is None else order
    c = costs[order]
    loads = np.zeros(n_bins) if start is None else start.copy()
    bins = np.empty(len(c), np.int32)
    # items without cost change no load: distribute them evenly instead
    n = len(c) if not len(c) or c[-1] > 0 else int(np.searchsorted(-c, 0.0))
    place = _by_heap if n_bins < FEW_BINS else _by_rounds
    bins[order[:n]] = place(c[:n], loads)
    bins[order[n:]] = np.arange(len(c) - n, dtype=np.int32) % np.int32(n_bins)
    # A placement found without the capacity that happens to keep it is the same with it.
    if (
        capacity
        and sizes is not None
        and len(c)
        and np.bincount(bins, weights=sizes, minlength=n_bins).max() > capacity
    ):
        loads = np.zeros(n_bins) if start is None else start.copy()
        bins[order] = _with_room(
            c, sizes[order].astype(np.int64), loads, np.full(n_bins, capacity, np.int64)
        )
    return bins


def _with_room(c: np.ndarray, s: np.ndarray, loads: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return the bin of every item, given by falling cost: each gets the lightest bin with room.

    ``loads`` and ``room`` of the bins change. Items without cost count a little, or they would all
    go into one bin.
    """
    crowded = _by_heap_with_room if len(loads) < FEW_BINS else _by_rounds_with_room
    return crowded(np.maximum(c, max(float(c[0]), 1.0) * 2.0**-40), s, loads, room)


def settle(
    bins: np.ndarray, costs: np.ndarray, sizes: np.ndarray, n_bins: int, capacity: int
) -> np.ndarray:
    """Return ``bins`` after moving the cheapest items of overfull bins to the lightest with room.

    Items in NOWHERE are moved, too. Items that find no room have NOWHERE.
    """
    order = by_falling(costs)
    order = order[order_by_key(bins[order] + 1, n_bins + 1)]  # NOWHERE comes first
    counts = np.bincount(bins + 1, minlength=n_bins + 1)
    ends = np.cumsum(sizes[order], dtype=np.int64)
    before = np.concatenate([[0], ends])[np.cumsum(counts) - counts]
    stays = (ends - np.repeat(before, counts) <= capacity) & (bins[order] >= 0)
    kept, moved = order[stays], order[~stays]
    moved = moved[by_falling(costs[moved])]
    loads = np.bincount(bins[kept], weights=costs[kept], minlength=n_bins)
    room = capacity - np.bincount(bins[kept], weights=sizes[kept], minlength=n_bins).astype(
        np.int64
    )
    settled = bins.astype(np.int32)
    if len(moved):
        settled[moved] = _with_room(costs[moved], sizes[moved].astype(np.int64), loads, room)
    return settled


def _by_heap(c: np.ndarray, loads: np.ndarray) -> np.ndarray:
    heap = [(load, b) for b, load in enumerate(loads.tolist())]
    heapify(heap)
    bins = []
    for cost in c.tolist():
        load, b = heap[0]
        bins.append(b)
        heapreplace(heap, (load + cost, b))
    return np.array(bins, np.int32)


def _by_rounds(c: np.ndarray, loads: np.ndarray) -> np.ndarray:
    bins, at, rounds = np.empty(len(c), np.int32), 0, 0
    while at < len(c):
        rounds += 1
        # loads are so uneven that few bins get all remaining items
        if rounds > FEW_ROUNDS and at < WORTH_A_ROUND * rounds:
            bins[at:] = _by_heap(c[at:], loads)
            break
        items = c[at : at + len(loads)]
        order = loads.argsort(kind="stable")[: len(items)]
        light = loads[order]
        filled = light + items
        # Item j + 1 does not go to its bin if a bin that was just filled is at most as heavy.
        stop = np.minimum.accumulate(filled[:-1]) <= light[1:]
        m = int(stop.argmax()) + 1 if len(stop) else 1
        if m == 1 and not (len(stop) and stop[0]):
            m = len(items)
        bins[at : at + m] = order = order[:m]
        loads[order] = filled[:m]
        at += m
    return bins


def _by_heap_with_room(
    c: np.ndarray, s: np.ndarray, loads: np.ndarray, room: np.ndarray
) -> np.ndarray:
    heap = [(load, b) for b, load in enumerate(loads.tolist())]
    heapify(heap)
    left = room.tolist()
    bins = np.full(len(c), NOWHERE, np.int32)
    for i, (cost, size) in enumerate(zip(c.tolist(), s.tolist(), strict=True)):
        full = []
        while heap and left[heap[0][1]] < size:
            full.append(heappop(heap))
        if not heap:
            break
        load, b = heap[0]
        bins[i], left[b] = b, left[b] - size
        heapreplace(heap, (load + cost, b))
        for entry in full:
            heappush(heap, entry)
    return bins


def _by_rounds_with_room(
    c: np.ndarray, s: np.ndarray, loads: np.ndarray, room: np.ndarray
) -> np.ndarray:
    """Place like ``_by_rounds``, over the bins that have room for the round's first item.

    A fuller bin may have room for a smaller item of the same round and be lighter; it waits for the
    next round. Ending the round there instead took 16 times as many rounds (262k items) and won
    0.03 percent.
    """
    bins, at = np.full(len(c), NOWHERE, np.int32), 0
    smallest = np.minimum.accumulate(s[::-1])[::-1]
    alive = np.arange(len(loads))
    while at < len(c):
        alive = alive[room[alive] >= smallest[at]]  # drop bins too full for all later items
        order = alive[room[alive] >= s[at]]
        order = order[np.argsort(loads[order], kind="stable")][: len(c) - at]
        if not len(order):
            break
        k = len(order)
        light, size = loads[order], s[at : at + k]
        filled = light + c[at : at + k]
        stop = room[order] < size
        stop[1:] |= light[1:] >= np.minimum.accumulate(filled)[:-1]
        m = int(stop.argmax()) if stop.any() else k
        bins[at : at + m] = order[:m]
        loads[order[:m]] = filled[:m]
        room[order[:m]] -= size[:m]
        at += m
    return bins


def pack_inside(
    parent: np.ndarray,
    costs: np.ndarray,
    sizes: np.ndarray,
    *,
    n_parents: int,
    n_bins: int,
    capacity: int = 0,
    tight: bool = False,
) -> np.ndarray:
    """Return the bin of every item inside its parent, by LPT in all parents at once.

    Round r places the r-th item of each parent that has one. Items without room have NOWHERE.

    ``tight``: by falling size into the fullest bin with room, for parents that are almost full.
    """
    order = by_falling(sizes if tight else costs)
    order = order[order_by_key(parent[order], n_parents)]
    counts = np.bincount(parent, minlength=n_parents)
    first = np.cumsum(counts) - counts
    # parents by falling count: those with an r-th item are a prefix
    busiest = np.argsort(-counts, kind="stable")
    first, alive = (
        first[busiest],
        np.searchsorted(-counts[busiest], -np.arange(counts.max(initial=0))),
    )
    c, s = costs[order], sizes[order].astype(np.float64)
    load = np.zeros((n_bins, n_parents))
    room = np.full((n_bins, n_parents), capacity or np.inf, np.float64)
    ranked = np.empty(len(c), np.int32)
    index = np.arange(n_parents)
    for r, k in enumerate(alive.tolist()):
        items = first[:k] + r
        cost, size = c[items], s[items]
        bins, found = _choose(load, room, k, size, tight)
        load[bins, index[:k]] += cost
        room[bins, index[:k]] -= size
        ranked[items] = np.where(found, bins, NOWHERE)
    out = np.empty(len(c), np.int32)
    out[order] = ranked
    return out


def _choose(
    load: np.ndarray, room: np.ndarray, k: int, size: np.ndarray, tight: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for the first k parents, the lightest bin with room, and whether there is one.

    ``tight``: the bin with the least room instead of the lightest.
    """
    score = room if tight else load
    if len(load) >= MANY_BINS:
        masked = np.where(room[:, :k] >= size, score[:, :k], np.inf)
        bins = masked.argmin(axis=0)
        return bins, masked[bins, np.arange(k)] < np.inf
    best = np.where(room[0, :k] >= size, score[0, :k], np.inf)
    bins = np.zeros(k, np.int64)
    for b in range(1, len(load)):
        mine = np.where(room[b, :k] >= size, score[b, :k], np.inf)
        bins[mine < best] = b
        np.minimum(best, mine, out=best)
    return bins, best < np.inf


def fill_up(
    left: np.ndarray,
    costs: np.ndarray,
    sizes: np.ndarray,
    *,
    n_bins: int,
    capacity: int,
    most: float,
) -> np.ndarray:
    """Fill bins as far as possible with the items ``left``, which are sorted by falling size.

    Return the bin of each, NOWHERE for items that are not taken.

    In every round each bin takes the largest item left that it has room for; no bin costs more than
    ``most`` in total. So long items share bins, which then hold as much work as their capacity
    allows.
    """
    bins, room, slack = (
        np.arange(n_bins),
        np.full(n_bins, capacity, np.int64),
        np.full(n_bins, most),
    )
    size, cost = sizes[left], costs[left]
    # highest cost from each item on, negated like the sizes: both columns rise
    small, cheap = (-size, -np.maximum.accumulate(cost[::-1])[::-1])
    taken, gone = np.full(len(left), NOWHERE, np.int32), np.zeros(0, np.int64)
    while (n_left := len(left) - len(gone)) > 0:
        wants = np.maximum(small.searchsorted(-room), cheap.searchsorted(-slack))
        wants -= gone.searchsorted(wants)  # among the items that are not taken
        going = wants < n_left  # the other bins have no room for any item left
        if not going.all():
            bins, room, slack, wants = bins[going], room[going], slack[going], wants[going]
            if not len(bins):
                break
        free = gone - np.arange(len(gone))  # items left before each taken one
        first = int(free.searchsorted(0, side="right"))  # the first item that is not taken
        rounds = (
            1
            if wants.any()
            else _sure_rounds(room, slack, int(size[first]), -float(cheap[first]), n_left)
        )
        if rounds > 1:  # all bins take the next items
            order, pick = np.arange(len(bins)), np.arange(rounds * len(bins)).reshape(rounds, -1)
        else:
            order, count = wants.argsort(kind="stable"), np.arange(len(bins))
            # if two bins choose one item, the second takes the next item
            pick = np.maximum.accumulate(wants[order] - count) + count
            order, pick = order[pick < n_left], pick[None, pick < n_left]
        item = pick + free.searchsorted(pick, side="right")
        taken[item] = bins[order]
        room[order] -= size[item].sum(axis=0)
        if len(item) == 1:
            slack[order] -= cost[item[0]]
        else:  # in the order of rounds
            slack[order] = np.subtract.accumulate(np.vstack([slack[order], cost[item]]))[-1]
        gone = np.sort(np.concatenate([gone, item.reshape(-1)]))
    return taken


def _sure_rounds(room: np.ndarray, slack: np.ndarray, size: int, cost: float, n_items: int) -> int:
    """Return a number of rounds, at least 1, in which every bin has room for its next item.

    ``size`` is that of the largest item left, ``cost`` that of the most expensive one.
    """
    by_size = int(room.min()) // size if size else n_items
    # a little less: slack is rounded when it shrinks
    by_cost = int(min(0.999 * float(slack.min()) / cost, n_items)) if cost else n_items
    return max(1, min(n_items // len(room), by_size, by_cost))


def next_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of every item in order; a new bin begins whenever the next does not fit."""
    ends = np.cumsum(sizes).tolist()
    cuts, at, base = [0], 0, 0
    while at < len(ends):
        at = bisect_right(ends, base + capacity, at)
        assert at > cuts[-1], "an item larger than the capacity"
        base = ends[at - 1]
        cuts.append(at)
    return np.repeat(np.arange(len(cuts) - 1, dtype=np.int32), np.diff(cuts))


def next_fit_inside(
    parent: np.ndarray, sizes: np.ndarray, n_parents: int, capacity: int
) -> np.ndarray:
    """Return the bin of every item inside its parent, by ``next_fit`` in arrival order.

    One search per bin number serves all parents.
    """
    order = order_by_key(parent, n_parents)
    counts = np.bincount(parent, minlength=n_parents)
    stop = np.cumsum(counts)
    at = stop - counts
    ends = np.concatenate([[0], np.cumsum(sizes[order])])
    opens = np.zeros(len(order) + 1, np.int32)  # first items of bins
    while (going := at < stop).any():
        at = np.where(
            going,
            np.minimum(np.searchsorted(ends, ends[at] + capacity, side="right") - 1, stop),
            at,
        )
        opens[at[at < stop]] = 1
    number = np.cumsum(opens[:-1], dtype=np.int32)
    base = (
        number[np.minimum(stop - counts, max(0, len(order) - 1))]
        if len(order)
        else np.zeros(n_parents, np.int32)
    )
    bins = np.empty(len(order), np.int32)
    bins[order] = number - np.repeat(base, counts)
    return bins


def best_fit(sizes: np.ndarray, n_bins: int, capacity: int, *, lowest: bool = False) -> np.ndarray:
    """Return the bin of every item, placed by falling size into the fullest bin with room.

    It packs tightest (fill .995) and balances worst, so it is the last resort. Items without room
    have NOWHERE.

    Of bins with equal room it takes the one filled last. With ``lowest``, it takes the one with the
    lowest number, as ``pack_inside`` does.
    """
    order = by_falling(sizes.astype(np.float64))
    bins = np.full(len(sizes), NOWHERE, np.int32)
    pop, push = (heappop, heappush) if lowest else (list.pop, list.append)
    # bins by room, the lowest on top
    held = {capacity: list(range(n_bins) if lowest else range(n_bins - 1, -1, -1))}
    rooms = [capacity]  # the keys of `held`, rising
    for i, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        k = bisect_left(rooms, size)
        if k == len(rooms):
            break
        room = rooms[k]
        bins[i] = b = pop(held[room])
        if not held[room]:
            del held[room], rooms[k]
        if room - size not in held:
            held[room - size] = []
            insort(rooms, room - size)
        push(held[room - size], b)
    return bins


# ----------------------------------------------------------------------------
# Distribute a step over its microbatches, so that none is empty while another can give a sample.
#
# Runs keep stream order. Marks divide the items of a parent (a bucket, or the whole step) evenly
# by count or by size. A mark that breaks the capacity moves as little as the capacity demands.

LITTLE = 0.005  # share of the step that samples in otherwise empty microbatches may cost


def cut_inside(
    parent: np.ndarray,
    sizes: np.ndarray,
    *,
    n_parents: int,
    n_bins: int,
    capacity: int = 0,
    by_count: bool,
) -> np.ndarray:
    """Return the bin of every item: the items of a parent, in order, are divided into ``n_bins``.

    ``n_bins`` must be at least what next fit needs in every parent. A capacity of 0 means none. A
    parent with at least ``n_bins`` items has no empty bin. In a parent with fewer, every item has a
    bin of its own.
    """
    order, counts = order_by_key(parent, n_parents), np.bincount(parent, minlength=n_parents)
    size = sizes[order].astype(np.int64, copy=False)
    ends = np.concatenate([[0], np.cumsum(size)])
    first = np.cumsum(counts) - counts
    marks = even_marks(size, counts, n_bins, by_count=by_count)
    if capacity:
        held = np.diff(ends[first[:, None] + marks], axis=1)
        for p in np.flatnonzero((held > capacity).any(axis=1)).tolist():
            inside = (ends[first[p] : first[p] + counts[p] + 1] - ends[first[p]]).tolist()
            marks[p] = _within(inside, marks[p].tolist(), capacity)
    bins = np.empty(len(order), np.int32)
    bins[order] = np.repeat(
        np.tile(np.arange(n_bins, dtype=np.int32), n_parents), np.diff(marks, axis=1).reshape(-1)
    )
    return bins


def even_marks(
    size: np.ndarray, counts: np.ndarray, n_bins: int, *, by_count: bool, least: int = 1
) -> np.ndarray:
    """Return the first item of each bin in each parent: int64 [parents, n_bins + 1].

    ``size`` holds the items parent by parent, ``counts`` their number in each parent. The division
    is even by size, or ``by_count``. Every bin gets at least ``least`` items; a parent with too few
    is divided by count.
    """
    k, n = np.arange(n_bins + 1), counts[:, None]
    equal = k * (n // n_bins) + np.minimum(k, n % n_bins)
    if by_count:
        return equal
    item = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(size)
    total = np.bincount(item, weights=size, minlength=len(counts)).astype(np.int64)
    middle = 2 * (ends - (np.cumsum(total) - total)[item]) - size
    bins = np.minimum(middle * n_bins // (2 * np.maximum(total, 1))[item], n_bins - 1)
    held = np.bincount(item * n_bins + bins, minlength=len(counts) * n_bins).reshape(-1, n_bins)
    marks = np.concatenate([np.zeros((len(counts), 1), np.int64), np.cumsum(held, axis=1)], axis=1)
    marks = np.maximum.accumulate(marks - least * k, axis=1) + least * k
    marks = np.minimum(marks, n - least * (n_bins - k))
    return np.where(n <= least * n_bins, equal, marks)


def _within(ends: list[int], marks: list[int], capacity: int) -> list[int]:
    """Return the marks of one parent, moved as little as the capacity demands.

    ``ends`` is the running sum of its sizes, from 0 on.
    """
    n, m = len(ends) - 1, len(marks) - 1
    low = [0] * m + [n]  # an earlier start of bin k leaves no room for the rest
    for k in range(m - 1, 0, -1):
        low[k] = bisect_left(ends, ends[low[k + 1]] - capacity, 0, low[k + 1])
    found = [0] * m + [n]
    for k in range(1, m):
        begin = found[k - 1]
        full = bisect_right(ends, ends[begin] + capacity, begin) - 1
        found[k] = min(max(marks[k], low[k], begin + 1), full, n - (m - k))
    assert ends[n] - ends[found[m - 1]] <= capacity, "fewer bins than next fit needs"
    return found


def spread(
    bucket: np.ndarray,
    microbatch: np.ndarray,
    costs: np.ndarray,
    n_buckets: int,
    m: int,
    bound: float | None = None,
) -> np.ndarray:
    """Return the microbatches after filling empty ones from others of the same bucket.

    A microbatch with several samples gives one; bucket totals do not change. ``bound``: the lower
    bound of the step's time, for ranks that wait after every microbatch. A sample then moves only
    if it makes no index slower, or all indices together by LITTLE of the step at most.
    """
    bins, limit = bucket.astype(np.int64) * m + microbatch, None
    if np.bincount(bins, minlength=n_buckets * m).min() > 0:
        return microbatch
    if bound is not None:
        loads = np.bincount(bins, weights=costs, minlength=n_buckets * m).reshape(n_buckets, m)
        limit = np.maximum(loads.max(axis=0), LITTLE * bound / m)
    filled = none_empty(bins, costs, n_buckets, m, limit)
    return microbatch if filled is bins else (filled % m).astype(np.int32)


def none_empty(
    bins: np.ndarray,
    costs: np.ndarray,
    n_parents: int,
    n_bins: int,
    limit: np.ndarray | None = None,
) -> np.ndarray:
    """Return ``bins`` after moving a cheap item of the same parent into each empty bin.

    The most expensive item of each bin stays, so that no bin becomes empty. ``bins`` counts over
    the parents: bin b of parent p is ``p * n_bins + b``. One item fits any bin, so no capacity is
    broken. ``limit``: bin b of any parent takes no item more expensive than ``limit[b]``.
    """
    counts = np.bincount(bins, minlength=n_parents * n_bins)
    empty = (counts == 0).reshape(n_parents, n_bins)
    gives = (counts > 1).reshape(n_parents, n_bins).any(axis=1) & empty.any(axis=1)
    if not gives.any():
        return bins
    order = by_falling(costs)
    order = order[order_by_key(bins[order], n_parents * n_bins)]
    spare = gives[bins[order] // n_bins]
    # the most expensive item of each bin stays
    spare[(np.cumsum(counts) - counts)[counts > 0]] = False
    items = np.sort(order[spare])
    items = items[by_falling(costs[items])[::-1]]
    parent = bins[items] // n_bins
    nth, wanted = position_in_key(parent, n_parents), empty.sum(axis=1)
    taken = nth < wanted[parent]
    items, parent, nth = items[taken], parent[taken], nth[taken]
    # the cheapest go to the bins with the highest limits
    column = np.arange(n_bins) if limit is None else by_falling(limit)
    nth_empty = np.argsort(~empty[:, column], axis=1, kind="stable")
    bin_of = column[nth_empty[parent, nth]]
    if limit is not None:
        fits = costs[items] <= limit[bin_of]
        items, parent, bin_of = items[fits], parent[fits], bin_of[fits]
    filled = bins.copy()
    filled[items] = parent * n_bins + bin_of
    return filled
