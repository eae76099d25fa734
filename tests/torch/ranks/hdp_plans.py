"""Batches of documents, random plans that put them on rings, and what each rank receives of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from overlord import ring
from overlord.plan.tasks import TaskRules, TaskTable
from overlord.torch.microbatch_info import IGNORE

VOCABULARY = 13


@dataclass(frozen=True)
class Plan:
    """Documents on tasks; document i belongs to task ``task[i]``."""

    lengths: tuple[int, ...]
    task: tuple[int, ...]
    rings: tuple[tuple[int, ...], ...]
    index: tuple[int, ...]
    stages: int = 1

    def table(self, ranks: int) -> TaskTable:
        made = TaskTable.of(self.rings, self.index)
        return made.check(
            TaskRules(ranks=ranks, stages=self.stages),
            task=np.array(self.task, np.int64),
            tokens=np.array(self.lengths, np.int64),
        )


def document(number: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and shifted labels of a document; every seventh token has no label."""
    rng = np.random.default_rng((number, length))
    tokens = rng.integers(0, VOCABULARY, length)
    labels = np.concatenate((tokens[1:], [IGNORE]))
    labels[rng.integers(0, 7, length) == 0] = IGNORE
    return tokens, labels


def valid_tokens(plan: Plan) -> int:
    every = [document(i, n)[1] for i, n in enumerate(plan.lengths)]
    return max(1, sum(int((labels != IGNORE).sum()) for labels in every))


def microbatches(plan: Plan, ranks: int, rank: int, pad: int = 0) -> list[dict[str, Any]]:
    """What the HDP rank receives, in the order in which it runs it. ``pad``: documents are padded
    to multiples of 2 x ring size x this number; 0: not at all.
    """
    table = plan.table(ranks)
    return [_microbatch(plan, table, int(t), rank, pad) for t in table.tasks(rank)]


def _microbatch(plan: Plan, table: TaskTable, task: int, rank: int, pad: int) -> dict[str, Any]:
    members = table.ranks(task)
    d, position = len(members), members.tolist().index(rank)
    mine = [i for i, t in enumerate(plan.task) if t == task]
    lengths = np.array([plan.lengths[i] for i in mine], np.int64)
    whole = ring.padded(lengths, d, pad) if pad else lengths
    columns = {"tokens": [], "labels": [], "position_ids": []}
    for i, n, room in zip(mine, lengths, whole, strict=True):
        tokens, labels = document(i, int(n))
        columns["tokens"].append(np.pad(tokens, (0, room - n)))
        columns["labels"].append(np.pad(labels, (0, room - n), constant_values=IGNORE))
        columns["position_ids"].append(np.arange(room))
    bounds = np.concatenate(([0], np.cumsum(whole))).astype(np.int32)
    here = ring.token_index(bounds, d, position)
    return {
        name: torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts])[here])
        for name, parts in columns.items()
    } | {
        "cu_seqlens": np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        "cu_seqlens_padded": bounds,
        "cu_seqlens_local": ring.local_bounds(bounds, d, position),
        "cp_ranks": members,
        "cp_rank": np.int32(position),
        "index": np.int64(table.index[task]),
        "order": np.int64(table.order[task]),
        "offload": np.float32(table.offload[task]),
    }


# random plans

lengths = st.lists(
    st.one_of(st.just(1), st.integers(1, 9), st.integers(5, 60)), min_size=1, max_size=9
)


@st.composite
def plans_of(draw: st.DrawFn, documents: tuple[int, ...], ranks: int, stages: int) -> Plan:
    """Any rings in any order, unequal counts, idle ranks; with stages no gaps, by empty tasks."""
    task = [draw(st.integers(0, len(documents) - 1)) for _ in documents]
    names = {t: i for i, t in enumerate(dict.fromkeys(task))}
    rings: list[tuple[int, ...]] = []
    index: list[int] = []
    following = [0] * ranks
    number = {}
    for t in names:
        members = draw(st.permutations(range(ranks)))[: draw(st.integers(1, ranks))]
        at = max(following[r] for r in members)
        if stages == 1:
            at += draw(st.integers(0, 1))
        else:
            for r in members:
                while following[r] < at:
                    rings.append((r,))
                    index.append(following[r])
                    following[r] += 1
        number[t] = len(rings)
        rings.append(tuple(members))
        index.append(at)
        for r in members:
            following[r] = at + 1
    return Plan(documents, tuple(number[t] for t in task), tuple(rings), tuple(index), stages)


@st.composite
def two_plans(draw: st.DrawFn, world: int) -> tuple[Plan, Plan]:
    """Two plans of one batch, each with its own rings and number of stages."""
    documents = tuple(draw(lengths))
    possible = [p for p in (1, 2, 3) if world % p == 0]
    first, second = (draw(st.sampled_from(possible)) for _ in range(2))
    return (
        draw(plans_of(documents, world // first, first)),
        draw(plans_of(documents, world // second, second)),
    )
