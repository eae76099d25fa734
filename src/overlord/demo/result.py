"""The measurements of a demo run, from which the demo prints and draws every number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.drill.tables import drill_document
from overlord.job.job import Job
from overlord.plan.plan import LoadingPlan
from overlord.planning.strategies import STRATEGIES
from overlord.sample import Buffer

if TYPE_CHECKING:
    from overlord.drill.run import DrillReport

COMPARED = ("vanilla", "packed", "llm_balance")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrategyResult:
    """The placements of one strategy over all steps of the run."""

    loads: tuple[np.ndarray, ...]  # cost by [rank, microbatch], one array per step
    bucket: np.ndarray  # imbalance by rank, per step
    microbatch: np.ndarray  # imbalance by microbatch, per step
    fill: np.ndarray  # share of the microbatches' capacity that holds tokens, per step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DemoResult:
    """The measurements of a finished run."""

    command: str
    names: tuple[str, ...]
    ranks: int
    samples: int  # samples per step
    context: int
    changed_at: int | None  # step at which the mixture changed
    lengths: Mapping[str, np.ndarray]  # tokens of every sample drawn, by source
    wanted: np.ndarray  # [step, source]: share of samples
    realised: np.ndarray  # [step, source]: share of samples
    bound: np.ndarray  # by step: a lower bound of the imbalance of any placement
    compared: Mapping[str, StrategyResult]  # by strategy
    quarantined: Mapping[str, int]
    on_long: str  # ``on_long`` of the job
    lost: Mapping[str, int]  # tokens that on_long truncated or dropped, by source
    tokens: int
    tokens_per_s: float
    wait_ms: float  # mean wait for a step, without the first one
    first_wait_ms: float
    compute_ms: float  # mean time per step that the stand-in trainer slept
    peak_bytes: int  # largest memory (PSS) of the process during the run
    before_bytes: int  # memory of the process before the job was launched
    drill: DrillReport | None = None  # the same job in several processes, with faults

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.wanted)

    @property
    def example_step(self) -> int:
        """The step with the median imbalance without planning: neither best nor worst case."""
        return int(np.argsort(self.compared["vanilla"].bucket, kind="stable")[self.steps // 2])


def demo_document(result: DemoResult, out: Path) -> dict[str, Any]:
    """Return the measurements of a demo in the folder ``out`` as a JSON document."""
    drill = result.drill
    return {
        "job": out / "job.yaml",
        "report": out / "report.html",
        "steps": result.steps,
        "tokens": result.tokens,
        "tokens_per_s": result.tokens_per_s,
        "wait_ms": result.wait_ms,
        "first_wait_ms": result.first_wait_ms,
        "peak_bytes": result.peak_bytes,
        "quarantined": result.quarantined,
        "lost_tokens": result.lost,
        "strategies": {
            name: {
                "bucket": found.bucket.mean(),
                "microbatch": found.microbatch.mean(),
                "fill": found.fill.mean(),
            }
            for name, found in result.compared.items()
        },
        "drill": None if drill is None else drill_document(drill),
    }


def buffer_of(plan: LoadingPlan, job: Job) -> Buffer:
    """Return the samples of a plan as a buffer, so that another strategy can place them."""
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


def compare(plans: Sequence[LoadingPlan], job: Job) -> dict[str, StrategyResult]:
    """Place the samples of each plan by every strategy in ``COMPARED``; the job is not run."""
    buffers = [buffer_of(plan, job) for plan in plans]
    return {
        name: _summary([STRATEGIES[name](buffer, job.place) for buffer in buffers])
        for name in COMPARED
    }


def _summary(plans: Sequence[LoadingPlan]) -> StrategyResult:
    found = [plan.imbalance() for plan in plans]
    return StrategyResult(
        loads=tuple(plan.loads() for plan in plans),
        bucket=np.array([f["bucket"] for f in found]),
        microbatch=np.array([f["microbatch"] for f in found]),
        fill=np.array([plan.fill() for plan in plans]),
    )


def mixes(plans: Sequence[LoadingPlan]) -> tuple[np.ndarray, np.ndarray]:
    """Return the wanted and the realised share of samples, by [step, source]."""
    wanted = np.array(
        [[plan.extra["weights"][name] for name in plan.names] for plan in plans], float
    )
    counts = np.array(
        [np.bincount(plan.source, minlength=len(plan.names)) for plan in plans], float
    )
    return wanted / wanted.sum(axis=1, keepdims=True), counts / counts.sum(axis=1, keepdims=True)


def lengths_by_source(plans: Sequence[LoadingPlan]) -> dict[str, np.ndarray]:
    """Return the lengths in tokens of all samples, by source; a source may have none."""
    source = np.concatenate([plan.source for plan in plans])
    tokens = np.concatenate([plan.tokens for plan in plans])
    return {name: tokens[source == i] for i, name in enumerate(plans[0].names)}
