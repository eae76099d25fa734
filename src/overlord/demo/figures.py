"""What the demonstration measured: every number it prints or draws is here, and comes from the
run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from overlord.job.job import Job
from overlord.plan.plan import LoadingPlan
from overlord.planning.strategies import STRATEGIES
from overlord.sample import Buffer

if TYPE_CHECKING:
    from overlord.drill.run import Report

COMPARED = ("vanilla", "packed", "llm_balance")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """One strategy over all steps of the run."""

    loads: tuple[np.ndarray, ...]  # cost by [rank, microbatch], one for each step
    bucket: np.ndarray  # imbalance by rank, one for each step
    microbatch: np.ndarray
    fill: np.ndarray  # share of the microbatches' room that holds tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Figures:
    """A finished run."""

    command: str
    names: tuple[str, ...]
    ranks: int
    samples: int  # of one step
    context: int
    changed_at: int | None  # step at which the mixture changed
    lengths: Mapping[str, np.ndarray]  # tokens of every sample drawn, by source
    wanted: np.ndarray  # [step, source]: share of samples
    realised: np.ndarray
    bound: np.ndarray  # by step: imbalance that no placement can pass
    compared: Mapping[str, Compared]
    quarantined: Mapping[str, int]
    on_long: str  # of the job
    lost: Mapping[str, int]  # tokens that it cut or dropped, by source
    tokens: int
    tokens_per_s: float
    wait_ms: float  # mean of the steps after the first
    first_wait_ms: float
    compute_ms: float  # mean time that the stand-in for a trainer slept
    peak_bytes: int
    before_bytes: int  # of the process, before the job was launched
    drill: Report | None = None  # the same job in processes, with faults

    @property
    def steps(self) -> int:
        return len(self.wanted)

    @property
    def shown(self) -> int:
        """The step whose imbalance without planning is the median: neither the best nor the worst
        case.
        """
        return int(np.argsort(self.compared["vanilla"].bucket, kind="stable")[self.steps // 2])


def buffer_of(plan: LoadingPlan, job: Job) -> Buffer:
    """The drawn samples of a plan as a strategy sees them, so that another strategy can place the
    same samples.
    """
    return Buffer(
        names=plan.names,
        source=plan.source,
        epoch=plan.epoch,
        file=plan.file,
        row=plan.row,
        part=plan.part,
        meta={"tokens": plan.tokens},
        batch=job.batch,
        step=plan.step,
        drawn=True,
        substep=plan.substep,
        sync=job.sync,
    )


def compare(plans: Sequence[LoadingPlan], job: Job) -> dict[str, Compared]:
    """The same draws placed by every strategy: no job is run twice."""
    buffers = [buffer_of(plan, job) for plan in plans]
    return {
        name: _summary([STRATEGIES[name](buffer, job.place) for buffer in buffers])
        for name in COMPARED
    }


def _summary(plans: Sequence[LoadingPlan]) -> Compared:
    found = [plan.imbalance() for plan in plans]
    return Compared(
        loads=tuple(plan.loads() for plan in plans),
        bucket=np.array([f["bucket"] for f in found]),
        microbatch=np.array([f["microbatch"] for f in found]),
        fill=np.array([plan.fill() for plan in plans]),
    )


def mixes(plans: Sequence[LoadingPlan]) -> tuple[np.ndarray, np.ndarray]:
    """Wanted and realised share of samples, by [step, source]."""
    wanted = np.array(
        [[plan.extra["weights"][name] for name in plan.names] for plan in plans], float
    )
    counts = np.array(
        [np.bincount(plan.source, minlength=len(plan.names)) for plan in plans], float
    )
    return wanted / wanted.sum(axis=1, keepdims=True), counts / counts.sum(axis=1, keepdims=True)


def lengths_by_source(plans: Sequence[LoadingPlan]) -> dict[str, np.ndarray]:
    source = np.concatenate([plan.source for plan in plans])
    tokens = np.concatenate([plan.tokens for plan in plans])
    return {name: tokens[source == i] for i, name in enumerate(plans[0].names)}
