"""The samples that loaders consume: ``loader_do_plan(consume=fn)``.

A step takes n samples of a source among its look-ahead candidates. The hook chooses which; the rest
stays for later steps. It runs where steps are planned and sees metadata alone. So its choice is in
the plan, which is checked, digested and journaled like any other, and recovery repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlord.errors import PlanError
from overlord.hashing import key64, keyed_hash
from overlord.job.hooks import CONSUME, Hook
from overlord.sample import IDS, Buffer, Columns, SampleId, take_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """The samples of one source that a step may take, in stream order.

    ``meta`` holds their metadata: ``tokens``, ``bytes`` and your columns. The step takes ``wanted``
    of them. ``age``: steps that passed over each; those that are ``due`` are taken first.
    """

    step: int
    source: str
    wanted: int
    epoch: np.ndarray
    file: np.ndarray
    row: np.ndarray
    part: np.ndarray
    meta: Columns  # arrays are read-only
    age: np.ndarray
    due: np.ndarray  # bool
    seed: int = 0

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, i: int) -> SampleId:
        at = (int(getattr(self, name)[i]) for name in IDS[1:])
        return SampleId(self.source, *at)

    def chance(self, purpose: str = "") -> np.ndarray:
        """Return a random number in [0, 1) for each candidate, the same in every run and step."""
        key = key64("consume", self.seed, self.source, purpose)
        hashed = keyed_hash(key, self.epoch, self.file, self.row, self.part)
        return (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def consume_problems(hooks: Sequence[Any], look_ahead: Any) -> list[str]:
    """Return why hooks cannot choose the samples of a step, as texts."""
    numbers = [i for i, hook in enumerate(hooks) if getattr(hook, "kind", "") == CONSUME]
    found = [
        f"hooks[{i}]: expected one ov.loader_do_plan(consume=fn), got a second one; join them in "
        "one function"
        for i in numbers[1:]
    ]
    if numbers and look_ahead == 1:
        found.append(
            "look_ahead: expected more than 1 for loader_do_plan(consume=fn), which chooses among "
            "candidates, got 1; set look_ahead=4, or use no such hook"
        )
    return found


def consumed_by(hook: Hook, candidates: Buffer, seed: int) -> np.ndarray:
    """Return the rows of the candidates that the step takes: ascending, ``wanted`` of each source.

    Candidates that are due come first, then those that the hook prefers.
    """
    wanted = np.sum(candidates.wanted, axis=0)
    due = np.zeros(len(candidates), bool)
    age = np.zeros(len(candidates), np.int32) if candidates.age is None else candidates.age
    due |= age >= candidates.max_age
    rows = []
    for i in np.flatnonzero(wanted).tolist():
        mine = np.flatnonzero(candidates.source == i)
        given = _of_source(candidates, mine, i, int(wanted[i]), age, due, seed)
        order = _checked(hook, hook(given, candidates.step), given)
        first = np.concatenate([np.flatnonzero(given.due), order])
        _, at = np.unique(first, return_index=True)
        rows.append(mine[first[np.sort(at)][: given.wanted]])
    return np.sort(np.concatenate(rows)) if rows else np.zeros(0, np.int64)


def _of_source(
    candidates: Buffer,
    rows: np.ndarray,
    i: int,
    wanted: int,
    age: np.ndarray,
    due: np.ndarray,
    seed: int,
) -> Candidates:
    meta = {name: take_rows(column, rows) for name, column in candidates.meta.items()}
    ids: dict[str, Any] = {name: getattr(candidates, name)[rows] for name in IDS[1:]}
    arrays = {**ids, "age": age[rows], "due": due[rows]}
    for array in arrays.values():
        array.flags.writeable = False
    return Candidates(
        step=candidates.step,
        source=candidates.names[i],
        wanted=wanted,
        meta=Columns(meta, candidates.step),
        seed=seed,
        **arrays,
    )


def _checked(hook: Hook, result: Any, given: Candidates) -> np.ndarray:
    """Return a hook's order of candidates; raise ``PlanError`` if it is invalid."""
    order = np.asarray(result) if isinstance(result, (np.ndarray, list, tuple)) else None
    n, remedy = len(given), "return numbers of candidates, the preferred ones first"
    where = f"{hook.__name__}, source {given.source!r}"
    if order is None or order.ndim != 1 or (len(order) and order.dtype.kind not in "iu"):
        kind = type(result).__name__ if order is None else f"{order.dtype} {order.shape}"
        raise PlanError(f"{where}: expected whole numbers, got {kind}", given.step, remedy)
    order = order.astype(np.int64)
    if len(order) and not 0 <= int(order.min()) <= int(order.max()) < n:
        found = f"got {int(order.min())} to {int(order.max())}"
        raise PlanError(f"{where}: expected 0 to {n - 1}, {found}", given.step, remedy)
    if len(np.unique(order)) < len(order):
        raise PlanError(f"{where}: expected each candidate once, got one twice", given.step, remedy)
    if len(order) < given.wanted:
        problem = f"expected at least the {given.wanted} samples of the draw, got {len(order)}"
        raise PlanError(f"{where}: {problem}", given.step, remedy)
    return order
