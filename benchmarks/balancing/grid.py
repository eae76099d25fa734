"""One step through every balancing method: imbalance, fill, microbatches, CPU time and bounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from balancing.bounds import iteration_bound, microbatch_bound
from overlord.errors import PlanError
from overlord.mesh import Batch, ClientPlaceTree
from overlord.plan.plan import LoadingPlan
from overlord.planning.graph.dgraph import DGraph
from overlord.planning.strategies import DENSE_12B, packed, vanilla
from overlord.sample import Buffer
from profiles import draw

Method = Callable[[Buffer, ClientPlaceTree], LoadingPlan]
BIGGEST_DIFFERENCING = 5_000  # samples: karmarkar_karp is a Python loop over (samples x ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The size of one step."""

    profile: str
    context: int
    ranks: int
    per_rank: int  # samples

    @property
    def samples(self) -> int:
        return self.ranks * self.per_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one method for one step."""

    case: Case
    seed: int
    method: str
    bucket: float  # slowest rank over the mean, ranks meet once a step
    sync: float  # the same when they meet after every microbatch
    bucket_bound: float
    sync_bound: float
    microbatches: int
    fill: float
    cpu_ms: float
    overfull: int  # microbatches above the context
    way: str  # how the planner went, where it has several


def balanced(
    method: str, *, group_size: int | None = None, level: str = "both", objective: str = "iteration"
) -> Method:
    """Return a strategy that is built from the package's primitives."""

    def plan(buffer: Buffer, place: ClientPlaceTree) -> LoadingPlan:
        graph = (
            DGraph.from_buffer(buffer, place, meta="tokens")
            .mix()
            .distribute("DP", group_size)
            .cost(DENSE_12B)
        )
        return graph.balance(method, level=level, objective=objective).plan()

    return plan


METHODS: dict[str, Method] = {
    "vanilla": vanilla,
    "packed": packed,
    "greedy": balanced("greedy"),
    "microbatch": balanced("greedy", objective="microbatch"),
    "karmarkar_karp": balanced("karmarkar_karp"),
    "zigzag": balanced("zigzag"),
    "interleaved": balanced("greedy", level="interleaved"),
    "groups of 8": balanced("greedy", group_size=8),
    "groups of 64": balanced("greedy", group_size=64),
}


def applies(method: str, case: Case) -> bool:
    """Return whether a method is run.

    A group of all ranks is no group, and differencing is left out where it takes seconds.
    """
    if method.startswith("groups of "):
        return case.ranks > int(method.rsplit(" ", 1)[1])
    return method != "karmarkar_karp" or case.samples <= BIGGEST_DIFFERENCING


def available(methods: Iterable[str]) -> list[str]:
    """Return the methods that this version of the package has."""
    tiny = draw("coyo", 256, seed=0, context=4096).buffer(
        Batch(samples=256, context=4096), images=False
    )
    return [method for method in methods if _works(method, tiny, ClientPlaceTree(dp=128))]


def _works(method: str, buffer: Buffer, place: ClientPlaceTree) -> bool:
    try:
        METHODS[method](buffer, place)
    except PlanError as e:
        if "not available" in e.problem:
            return False
        raise
    return True


def measure(case: Case, seed: int, methods: Iterable[str]) -> list[Outcome]:
    """Run all methods on the same step."""
    samples = draw(case.profile, case.samples, seed=seed, context=case.context)
    buffer = samples.buffer(Batch(samples=case.samples, context=case.context), images=False)
    place, tokens = ClientPlaceTree(dp=case.ranks), samples.tokens()
    costs = DENSE_12B({"tokens": tokens})
    bounds = (
        iteration_bound(costs, case.ranks),
        microbatch_bound(costs, tokens, case.ranks, case.context),
    )
    return [
        _outcome(case, seed, method, buffer, place, bounds)
        for method in methods
        if applies(method, case)
    ]


def _outcome(
    case: Case,
    seed: int,
    method: str,
    buffer: Buffer,
    place: ClientPlaceTree,
    bounds: tuple[float, float],
) -> Outcome:
    start = time.process_time()
    plan = METHODS[method](buffer, place)
    cpu_ms = 1e3 * (time.process_time() - start)
    imbalance, held = plan.validate().imbalance(), tokens_held(plan)
    return Outcome(
        case=case,
        seed=seed,
        method=method,
        bucket=imbalance["bucket"],
        sync=imbalance["microbatch"],
        bucket_bound=bounds[0],
        sync_bound=bounds[1],
        microbatches=plan.n_microbatches,
        fill=plan.fill(),
        cpu_ms=cpu_ms,
        overfull=int((held > case.context).sum()),
        way=way_of(plan),
    )


def tokens_held(plan: LoadingPlan) -> np.ndarray:
    """Return the tokens of every microbatch, counted from the samples, not read from the plan."""
    main = plan.main
    return np.bincount(
        main.bins(),
        weights=plan.tokens[main.sample],
        minlength=main.n_buckets * main.n_microbatches,
    )


def way_of(plan: LoadingPlan) -> str:
    said = [step for step in plan.extra["trail"] if step.startswith(("balance", "pack"))]
    return said[-1].split(": ", 1)[1].rsplit(", M=", 1)[0] if said else ""
