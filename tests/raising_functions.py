"""User code that raises. Processes of other runtimes import it by name. Every line that raises ends
in ``# here``.
"""

from __future__ import annotations

import json
import linecache
from collections.abc import Iterator
from typing import Any

import overlord as ov


def helper(value: Any) -> Any:
    raise ValueError(f"no {value}")  # here: helper


def map_row(row: dict[str, Any]) -> dict[str, Any]:
    return helper("row") if len(row["tokens"]) == 3 else row


def map_columns(columns: dict[str, Any]) -> dict[str, Any]:
    if any(len(ids) == 3 for ids in columns["tokens"]):
        return json.loads("{")  # here: map_columns
    return columns


def keep_row(row: dict[str, Any]) -> bool:
    return row["nowhere"] > 3  # here: keep_row


def meta_row(row: dict[str, Any]) -> int:
    return 1 // (len(row["tokens"]) - 3)  # here: meta_row


def leave(row: dict[str, Any]) -> dict[str, Any]:
    raise SystemExit(3)  # here: leave


def rows_of(shard: int) -> Iterator[dict[str, Any]]:
    yield {"tokens": [1, 2]}
    raise RuntimeError("the disk of shard 0 is gone")  # here: rows_of


class Shelf:
    """A dataset with one row that cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, k: int) -> dict[str, Any]:
        if k == 3:
            raise LookupError("three")  # here: Shelf
        return {"tokens": [k + 1]}


def strategy(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
    return [][buffer.step]  # here: strategy


def misplaced(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
    graph = ov.DGraph.from_buffer(buffer, place).mix()
    return graph.distribute("XP").plan()  # here: misplaced


def cost(columns: Any) -> Any:
    return columns["tokens"] / None  # here: cost


def costly(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
    return (
        ov.DGraph.from_buffer(buffer, place)
        .mix()
        .distribute("DP")
        .cost(cost)
        .balance("greedy")
        .plan()
    )


def schedule(step: int, feedback: Any) -> dict[str, float]:
    return {"web": 1.0 / (1 - step)}  # here: schedule


def popped(samples: ov.Popped) -> ov.Ragged:
    return samples.tokens + "x"  # type: ignore[operator] # here: popped


def assembled(assembly: ov.Assembly) -> Any:
    raise KeyError("labels")  # here: assembled


def place_of(mark: str) -> str:
    """Return the file and line of the code that a comment marks."""
    lines = linecache.getlines(__file__)
    found = (n for n, line in enumerate(lines, 1) if line.rstrip().endswith(f"# here: {mark}"))
    return f"{__file__}:{next(found)}, in "
