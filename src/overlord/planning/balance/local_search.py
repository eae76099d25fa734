"""Local search: exchange of items between heavy and light rows after an uneven packing.

A row is a bucket, and its items are samples or bins. Every round examines many pairs of rows at
once, and takes the first of equally good exchanges. So the result is the same on every machine.
"""

from __future__ import annotations

import numpy as np

from overlord.hashing import order_by_key
from overlord.planning.balance import binpack

# rounds of exchanges; eight samples a rank need up to 40 for 0.1 percent
SWAP_ROUNDS = 64
SWAP_LAST = 16  # exchanges of the heaviest row alone, after the rounds find no more
SWAP_MISSES = 8  # consecutive rounds without an exchange
# exchanges examined in a round; rows with many items, which need exchanges least, share fewer pairs
SWAP_CELLS = 1 << 18
# items of a row that are examined, the most expensive; with an empty place, two such rows have
# SWAP_CELLS exchanges
SWAP_ITEMS = 511


def even_out(
    rows: np.ndarray,
    costs: np.ndarray,
    n_rows: int,
    aim: float,
    *,
    sizes: np.ndarray | None = None,
    capacity: int = 0,
    moves: bool = True,
) -> np.ndarray:
    """Return the rows of items after exchanges that make rows heavier than ``aim`` lighter.

    It ends when no row is heavier, no exchange helps, or after SWAP_ROUNDS rounds. A heavy row
    swaps an item with a light row; with ``moves`` it may also give one away.

    A round pairs the heaviest rows with the lightest; after rounds without an exchange, with the
    next lightest. For every pair it takes the exchange that brings both loads closest together. No
    exchange makes the sizes of a row exceed ``capacity`` (0: none).
    """
    loads = np.bincount(rows, weights=costs, minlength=n_rows)
    if n_rows < 2 or not len(rows) or loads.max() <= aim:
        return rows
    sizes = np.zeros(len(rows), np.int64) if sizes is None else sizes
    room = (capacity or 2**62) - np.bincount(rows, weights=sizes, minlength=n_rows).astype(np.int64)
    held = _items_by_row(rows, costs, n_rows, moves)
    # an empty place is an item of no cost and no size
    c, s = (np.append(costs, 0.0), np.append(sizes, 0))
    width, missed = held.shape[1], 0
    for _ in range(SWAP_ROUNDS):
        order = binpack.by_falling(loads)
        heavy = order[: max(1, min(n_rows // 2, SWAP_CELLS // (width * width)))]
        heavy = heavy[loads[heavy] > aim]
        if not len(heavy) or missed > SWAP_MISSES:
            break
        light = order[::-1][(np.arange(len(heavy)) + missed * len(heavy)) % (n_rows // 2)]
        missed = 0 if _swap(held, c, s, loads, room, heavy, light) else missed + 1
    for _ in range(SWAP_LAST):  # the heaviest row alone, with the best of many light rows
        heaviest = int(loads.argmax())
        light = np.argsort(loads, kind="stable")[
            : max(1, min(n_rows // 2, SWAP_CELLS // (8 * width * width)))
        ]
        if loads[heaviest] <= aim or not _swap(
            held, c, s, loads, room, np.full(len(light), heaviest), light, one=True
        ):
            break
    out = np.append(rows, rows[:1])
    out[held] = np.arange(n_rows, dtype=rows.dtype)[:, None]
    return out[:-1]


def _items_by_row(rows: np.ndarray, costs: np.ndarray, n_rows: int, moves: bool) -> np.ndarray:
    """Return the items of every row as one array [rows, places], each row in stream order.

    Of a long row only the SWAP_ITEMS most expensive items are listed. ``len(rows)`` marks an empty
    place; with ``moves`` every row has at least one.
    """
    counts = np.bincount(rows, minlength=n_rows)
    order = order_by_key(rows, n_rows)
    if counts.max() > SWAP_ITEMS:
        dear = binpack.by_falling(costs)
        dear = dear[order_by_key(rows[dear], n_rows)]
        seen = np.zeros(len(rows), bool)
        seen[dear[_number(counts) < SWAP_ITEMS]] = True
        order, counts = order[seen[order]], np.minimum(counts, SWAP_ITEMS)
    held = np.full((n_rows, int(counts.max()) + moves), len(rows))
    held[rows[order], _number(counts)] = order
    return held


def _number(counts: np.ndarray) -> np.ndarray:
    """Return 0, 1, ..., count - 1 for each count, concatenated."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def _swap(
    held: np.ndarray,
    c: np.ndarray,
    s: np.ndarray,
    loads: np.ndarray,
    room: np.ndarray,
    heavy: np.ndarray,
    light: np.ndarray,
    *,
    one: bool = False,
) -> bool:
    """Apply the best exchange of every pair (heavy, light) in place; return whether there was one.

    ``one``: apply only the best exchange of all pairs.
    """
    a, b = held[heavy], held[light]
    gap = (loads[heavy] - loads[light])[:, None, None]
    less, more = c[a][:, :, None] - c[b][:, None, :], s[a][:, :, None] - s[b][:, None, :]
    allowed = (
        (less > 0)
        & (less < gap)
        & (more <= room[light][:, None, None])
        & (-more <= room[heavy][:, None, None])
    )
    off = np.where(allowed, np.abs(less - gap / 2), np.inf).reshape(len(a), -1)
    best = off.argmin(axis=1)
    nearest = off[np.arange(len(a)), best]
    k = np.flatnonzero(nearest < np.inf)
    if one:
        k = k[[nearest[k].argmin()]] if len(k) else k
    i, j = best[k] // a.shape[1], best[k] % a.shape[1]
    loads[heavy[k]] -= less[k, i, j]
    loads[light[k]] += less[k, i, j]
    room[heavy[k]] += more[k, i, j]
    room[light[k]] -= more[k, i, j]
    held[heavy[k], i], held[light[k], j] = b[k, j], a[k, i]
    return len(k) > 0
