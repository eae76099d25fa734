"""The placement of the strategies that keep stream order: docs/stream.md, "Place", as a plain, slow
program.

It shares no code with the package. Everything is lists: a microbatch is a list of sample numbers.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

Placed = list[list[list[int]]]  # [rank][microbatch], the numbers of its samples


def vanilla(sizes: list[int], ranks: int, microbatches: int, context: int) -> Placed:
    """Assign sample i to rank i mod ranks; split a rank's samples by count."""
    mine = [list(range(r, len(sizes), ranks)) for r in range(ranks)]
    m = max([microbatches, *(len(next_fit([sizes[i] for i in own], context)) for own in mine)])
    return [cut(own, sizes, m, context, by_count=True) for own in mine]


def packed(sizes: list[int], ranks: int, microbatches: int, context: int) -> Placed:
    """Split the stream by tokens into as many pieces as ranks have microbatches; assign pieces to
    ranks in turn.
    """
    m = max(microbatches, -(-len(next_fit(sizes, context)) // ranks))
    pieces = cut(list(range(len(sizes))), sizes, ranks * m, context, by_count=False)
    return [pieces[r::ranks] for r in range(ranks)]


def next_fit(sizes: list[int], context: int) -> list[int]:
    """Return the size of each microbatch if a new one begins wherever the next sample does not
    fit.
    """
    held: list[int] = []
    for size in sizes:
        if held and held[-1] + size <= context:
            held[-1] += size
        else:
            held.append(size)
    return held


def cut(
    samples: list[int], sizes: list[int], m: int, context: int, *, by_count: bool
) -> list[list[int]]:
    mine = [sizes[i] for i in samples]
    wanted = marks(mine, m, by_count=by_count)
    if all(sum(mine[a:b]) <= context for a, b in itertools.pairwise(wanted)):
        found = wanted
    else:
        found = [0]
        for k in range(1, m):
            begin = found[-1]
            full = max(b for b in range(begin, len(mine) + 1) if sum(mine[begin:b]) <= context)
            low = min(
                b for b in range(begin, len(mine) + 1) if len(next_fit(mine[b:], context)) <= m - k
            )
            found.append(min(max(wanted[k], low, begin + 1), full, len(mine) - (m - k)))
        found.append(len(mine))
    return [samples[a:b] for a, b in itertools.pairwise(found)]


def marks(sizes: list[int], m: int, *, by_count: bool, least: int = 1) -> list[int]:
    """Return the start of each of m microbatches, and the end."""
    n, total = len(sizes), sum(sizes)
    if by_count or n <= least * m:
        return [k * (n // m) + min(k, n % m) for k in range(m + 1)]
    found = [0]
    for k in range(1, m):
        before = sum(
            Fraction(2 * sum(sizes[:i]) + sizes[i], 2) < Fraction(k * total, m) for i in range(n)
        )
        found.append(min(max(before, found[-1] + least), n - least * (m - k)))
    return [*found, n]
