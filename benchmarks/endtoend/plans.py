"""The plan of every strategy for the same step, and the resulting tokens per second."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from endtoend.setups import CARD_FLOPS, Pair, Setup
from endtoend.times import BACKWARD, loads_of, seconds
from overlord.mesh import Batch
from overlord.plan.plan import LoadingPlan
from overlord.planning.balance import binpack
from overlord.planning.balance.balance import ItemPlacement
from overlord.planning.graph.dgraph import DGraph
from overlord.planning.strategies import packed, vanilla, vlm
from overlord.sample import Buffer
from profiles import Samples, draw

STRATEGIES = ("vanilla", "packed", "backbone", "both levels", "hybrid", "ours")
ROOM = 1.35  # samples drawn for one that a filled step is expected to hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Tokens per second and GPU of one model pair under one assumption set, by strategy.

    Each value is the mean over the seeds.
    """

    setup: Setup
    profile: str
    context: int
    pair: Pair
    speed: dict[str, float]
    ideal: float  # no card ever waits: no bubble, every image and token computed once, evenly
    chosen: str  # what "ours" was, most often

    def gain(self, strategy: str = "ours", over: str = "vanilla") -> float:
        return self.speed[strategy] / self.speed[over]


def predict(
    setup: Setup, profile: str, context: int, pairs: Sequence[Pair], seeds: Iterable[int]
) -> list[Prediction]:
    """Predict all model pairs on the same steps."""
    tokens, times, ideals, names = (
        0,
        {pair: dict.fromkeys(STRATEGIES, 0.0) for pair in pairs},
        dict.fromkeys(pairs, 0.0),
        [],
    )
    for seed in seeds:
        samples = step_of(setup, profile, context, seed)
        buffer = samples.buffer(Batch(samples=len(samples), context=context))
        tokens += int(samples.tokens().sum())
        fixed = {"vanilla": vanilla(buffer, setup.place), "packed": packed(buffer, setup.place)}
        for pair in pairs:
            found, ideal, chosen = step_seconds(setup, pair, buffer, fixed)
            names.append((pair, chosen))
            ideals[pair] += ideal
            for strategy, s in found.items():
                times[pair][strategy] += s
    return [
        Prediction(
            setup=setup,
            profile=profile,
            context=context,
            pair=pair,
            chosen=_most([c for p, c in names if p == pair]),
            ideal=tokens / ideals[pair] / setup.cards,
            speed={name: tokens / s / setup.cards for name, s in times[pair].items()},
        )
        for pair in pairs
    ]


def step_of(setup: Setup, profile: str, context: int, seed: int) -> Samples:
    """Return the samples of a step.

    There are a fixed number per rank, or as many as the stream packs into ``filled`` microbatches
    of every rank.
    """
    runs = setup.ranks if setup.one_source else 0
    if setup.per_rank:
        return draw(
            profile,
            setup.ranks * setup.per_rank,
            seed=seed,
            context=context,
            merge=setup.merge,
            runs=runs,
        )
    bins = setup.filled * setup.ranks
    mean = float(draw(profile, 4096, seed=seed, context=context, merge=setup.merge).tokens().mean())
    many = draw(
        profile,
        int(ROOM * bins * context / mean) + 1,
        seed=seed,
        context=context,
        merge=setup.merge,
        runs=runs,
    )
    bin_of = binpack.next_fit(many.tokens(), context)
    assert bin_of[-1] >= bins, "too few samples were drawn"
    return many.take(np.flatnonzero(bin_of < bins))


def step_seconds(
    setup: Setup, pair: Pair, buffer: Buffer, fixed: dict[str, LoadingPlan]
) -> tuple[dict[str, float], float, str]:
    """Return seconds by strategy, those of an ideal step, and the faster of our strategies."""
    objective, place, found = (
        "microbatch" if setup.sync == "microbatch" else "iteration",
        setup.place,
        {},
    )
    inter, both = (
        backbone_plan(pair, buffer, setup, level, objective) for level in ("inter", "both")
    )
    for name, plan in {**fixed, "backbone": inter, "both levels": both}.items():
        encoded = encoded_once(plan, buffer) if setup.encoder == "own group once" else plan
        found[name] = seconds(loads_of(encoded, pair, setup, exchanged=False), setup, setup.encoder)
    per = (
        "iteration" if setup.encoder == "own group once" else "microbatch"
    )  # as the trainer runs its encoder anyway
    paper = vlm(pair.vit, pair.llm, per=per, joint=False, objective=objective)(buffer, place)
    loads = loads_of(paper, pair, setup, exchanged=True)
    found["hybrid"] = seconds(loads, setup)
    once = vlm(pair.vit, pair.llm, per="iteration", joint=False, objective=objective)(buffer, place)
    joint = vlm(pair.vit, pair.llm, per="microbatch", joint=True, objective=objective)(
        buffer, place
    )
    ours = {
        "encoder once a step": seconds(loads_of(once, pair, setup, exchanged=True), setup),
        "joint": seconds(loads_of(joint, pair, setup, exchanged=False), setup),
    }
    if setup.sync == "1F1B":
        apart = vlm(pair.vit, pair.llm, per="iteration", joint=True, objective=objective)(
            buffer, place
        )
        ours["joint, encoder once a step"] = seconds(
            loads_of(apart, pair, setup, exchanged=False), setup
        )
    chosen = min(ours, key=lambda name: ours[name])
    found["ours"] = ours[chosen]
    ideal = (1 + BACKWARD) * loads.total / setup.cards / CARD_FLOPS
    return {strategy: found[strategy] for strategy in STRATEGIES}, ideal, chosen


def backbone_plan(
    pair: Pair, buffer: Buffer, setup: Setup, level: str, objective: str
) -> LoadingPlan:
    """Return the plan of ``backbone_balance`` with the costs of the model pair.

    Samples are balanced by the backbone; images stay in their group, in turn.
    """
    drawn = DGraph.from_buffer(buffer, setup.place).mix()
    samples = (
        drawn.select("tokens")
        .distribute("DP")
        .cost(pair.llm)
        .balance("greedy", level=level, objective=objective)
    )
    images = (
        drawn.select("image_patches")
        .distribute("WORLD")
        .cost(pair.vit)
        .follow(samples, "none", stay=True)
    )
    return samples.broadcast_at("TP").plan(encoder=images)


def encoded_once(plan: LoadingPlan, buffer: Buffer) -> LoadingPlan:
    """Return the same plan with the images of a step assigned in turn to the GPUs of their rank.

    The images of all microbatches are encoded together.
    """
    assert plan.place is not None
    drawn, main = DGraph.from_buffer(buffer, plan.place).mix(), plan.main
    found = ItemPlacement(
        bucket=main.bucket,
        microbatch=main.microbatch,
        n_microbatches=main.n_microbatches,
        algorithm="as planned",
    )
    samples = drawn.select("tokens").distribute("DP").placed(found, "placed", main.capacity)
    return samples.plan(
        encoder=drawn.select("image_patches")
        .distribute("WORLD")
        .follow(samples, "none", per="iteration", stay=True)
    )


def _most(names: list[str]) -> str:
    return max(dict.fromkeys(names), key=names.count)
