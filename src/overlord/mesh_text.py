"""A mesh as a text tree with its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# branches of a printed tree, or ranks of a list with gaps, before the rest is only counted
SHOWN = 4


def branches(axes: Sequence[str], grid: np.ndarray, indent: str = "") -> list[str]:
    """Return the lines of a tree with a branch for each coordinate of the first axis.

    The last two axes share a line. Branches beyond ``SHOWN`` are summarized.
    """
    axis, n = axes[0], len(grid)
    if len(axes) == 1:
        return [f"{indent}└─ {_leaf(axis, grid)}"]
    lines = []
    for i in range(min(n, SHOWN)):
        last = i == n - 1
        lines.append(
            f"{indent}{'└─' if last else '├─'} {axis} {i}"
            + (f", {_leaf(axes[1], grid[i])}" if len(axes) == 2 else "")
        )
        if len(axes) > 2:
            lines += branches(axes[1:], grid[i], indent + ("   " if last else "│  "))
    if n > SHOWN:
        lines.append(
            f"{indent}└─ ... {n - SHOWN} more {axis}, ranks "
            f"{ranks_text(np.sort(grid[SHOWN:], axis=None))}"
        )
    return lines


def _leaf(axis: str, ranks: np.ndarray) -> str:
    return (
        f"{axis} 0: rank {ranks[0]}"
        if len(ranks) == 1
        else f"{axis} 0-{len(ranks) - 1}: ranks {ranks_text(ranks)}"
    )


def ranks_text(ranks: np.ndarray) -> str:
    """Return ranks as text: "0-7" if consecutive, all if at most ``SHOWN``, else some of them."""
    found = [int(r) for r in ranks]
    if len(found) > 1 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]}-{found[-1]}"
    return (
        " ".join(map(str, found))
        if len(found) <= SHOWN
        else f"{' '.join(map(str, found[: SHOWN - 1]))} ... {found[-1]}"
    )
