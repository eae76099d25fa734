"""Measured step times of an encoder and a backbone under vanilla, backbone and hybrid plans.

    python benchmarks/gpu/vlm.py                            # one H200: under four minutes
    python benchmarks/gpu/vlm.py --device cpu --tiny        # a smoke test, no measurement

8 ranks run one after another on one GPU. Costs of both modules are fitted to measured times first.
Then every piece of work of every rank of every plan is run, forward and backward, in a random
order. benchmarks/README.md explains the method.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault(
    "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
)  # before torch: microbatches of many sizes, no stalls
sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # its own modules, also when started from elsewhere

import numpy as np
import torch

import overlord as ov
from gpu.bench import Bench, by_microbatch, calibrate, grid, in_turn, told
from gpu.model import LLAMA_12B, TINY, TINY_VIT, VIT_1B, Encoder, Shape, Stack
from gpu.timing import default_folder, device_of, machine, median_seconds, save, table
from overlord.plan.plan import LoadingPlan
from overlord.planning.cost.fit import Fitted
from overlord.planning.strategies import vanilla, vlm
from overlord.sample import Buffer
from page import command_line
from profiles import LONGEST_IMAGE, Samples, draw

PATCH = 14 * 14 * 3  # numbers of a patch
MOST_PATCHES = 16_384  # that the encoder takes at once
Strategy = Callable[[Buffer, ov.ClientPlaceTree], LoadingPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The size of one step."""

    profile: str
    context: int
    per_rank: int  # samples
    ranks: int = 8
    merge: int = 1  # patches of an image token

    def samples(self, seed: int) -> Samples:
        return draw(
            self.profile,
            self.ranks * self.per_rank,
            seed=seed,
            context=self.context,
            merge=self.merge,
        )

    def buffer(self, seed: int) -> Buffer:
        return self.samples(seed).buffer(
            ov.Batch(samples=self.ranks * self.per_rank, context=self.context)
        )

    @property
    def passes(self) -> int:
        """The number of passes; short steps are measured more often."""
        return 2 if self.per_rank <= 16 else 1


CASES = (
    Case(profile="navit", context=8192, per_rank=16),
    Case(profile="navit", context=16_384, per_rank=16),
    Case(profile="coyo", context=8192, per_rank=72),
    Case(profile="navit", context=8192, per_rank=72, merge=4),
    Case(profile="coyo", context=8192, per_rank=72, merge=4),
)
TINY_CASES = (Case(profile="coyo", context=512, per_rank=3, ranks=4),)


@dataclass(frozen=True, slots=True)
class Costs:
    """The fitted seconds of an image and of a sample."""

    vit: Fitted
    llm: Fitted


@dataclass(frozen=True, slots=True)
class Way:
    """A strategy, and whether outputs of its encoder cross ranks.

    If they do, ranks wait for each other between encoder and backbone.
    """

    plan: Strategy
    exchanged: bool = False


def ways(costs: Costs) -> dict[str, Way]:
    """Return the strategies by their names on the page.

    ``hybrid`` is that of the paper. ``joint`` is that of the package if replicas are single ranks.
    The last one is for ranks that wait for each other after every microbatch.
    """
    return {
        "vanilla": Way(vanilla),
        "backbone": Way(backbone(costs)),
        "hybrid": Way(
            vlm(costs.vit, costs.llm, per="iteration", joint=False, objective="iteration"),
            exchanged=True,
        ),
        "joint": Way(vlm(costs.vit, costs.llm, per="iteration", joint=True, objective="iteration")),
        "hybrid, by microbatch": Way(
            vlm(costs.vit, costs.llm, per="iteration", joint=False, objective="microbatch"),
            exchanged=True,
        ),
    }


def backbone(costs: Costs) -> Strategy:
    """Return ``backbone_balance`` with other costs.

    Samples are balanced by the backbone; images stay with their sample.
    """

    def plan(buffer: Buffer, place: ov.ClientPlaceTree) -> LoadingPlan:
        drawn = ov.DGraph.from_buffer(buffer, place).mix()
        samples = (
            drawn.select("tokens")
            .distribute("DP")
            .cost(costs.llm)
            .balance("greedy", level="inter", objective="iteration")
        )
        images = (
            drawn.select("image_patches")
            .distribute("WORLD")
            .cost(costs.vit)
            .follow(samples, "none", stay=True)
        )
        return samples.plan(encoder=images)

    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The seconds of every rank in both modules, for one plan of one step."""

    case: Case
    seed: int
    strategy: str
    exchanged: bool
    microbatches: int
    encoder_by: list[list[float]] = field(
        repr=False
    )  # by rank and microbatch, or by rank alone where it runs once a step
    backbone_by: list[list[float]] = field(repr=False)

    @property
    def encoder(self) -> list[float]:
        return [sum(rank) for rank in self.encoder_by]

    @property
    def backbone(self) -> list[float]:
        return [sum(rank) for rank in self.backbone_by]

    @property
    def both(self) -> list[float]:
        return [e + b for e, b in zip(self.encoder, self.backbone, strict=True)]

    @property
    def iteration(self) -> float:
        """The time of the slowest rank.

        If outputs are exchanged, it is that of the slowest encoder plus that of the slowest
        backbone.
        """
        return max(self.encoder) + max(self.backbone) if self.exchanged else max(self.both)

    @property
    def met(self) -> float:
        """The same for ranks that wait after every microbatch: the sum of the slowest of each."""
        encoder, backbone = (np.array(by) for by in (self.encoder_by, self.backbone_by))
        if self.exchanged:
            return float(encoder.max(axis=0).sum() + backbone.max(axis=0).sum())
        backbone[:, : encoder.shape[1]] += (
            encoder  # what runs once a step runs before the first microbatch
        )
        return float(backbone.max(axis=0).sum())


def over_mean(seconds: Sequence[float]) -> float:
    return max(seconds) / float(np.mean(seconds)) if sum(seconds) else 1.0


def encoder_pieces(plan: LoadingPlan, most: int) -> list[list[list[np.ndarray]]]:
    """Return the patches of images that are encoded together, by rank and microbatch.

    For a whole step they are by rank. Memory limits the patches of a piece.
    """
    return [
        [in_turn(images, most, 0) for images in rank] for rank in by_microbatch(plan, "encoder")
    ]


def measure(vit: Bench, llm: Bench, case: Case, seed: int, costs: Costs) -> list[Outcome]:
    """Measure all plans of one step; their pieces run in one random order."""
    buffer, place, known = case.buffer(seed), ov.ClientPlaceTree(dp=case.ranks), ways(costs)
    plans = {name: way.plan(buffer, place).validate() for name, way in known.items()}
    cut = {
        name: (encoder_pieces(p, len(vit.x)), [[[m] for m in rank] for rank in by_microbatch(p)])
        for name, p in plans.items()
    }
    by_bench = [
        (bench, ranks)
        for both in cut.values()
        for bench, ranks in zip((vit, llm), both, strict=True)
    ]
    pieces = [
        bench.piece(part)
        for bench, ranks in by_bench
        for rank in ranks
        for parts in rank
        for part in parts
    ]
    seconds = iter(median_seconds(pieces, llm.device, passes=case.passes, seed=seed).tolist())
    found = []
    for name, both in cut.items():
        encoder, backbone = (
            [[sum(next(seconds) for _ in parts) for parts in rank] for rank in ranks]
            for ranks in both
        )
        found.append(
            Outcome(
                case=case,
                seed=seed,
                strategy=name,
                exchanged=known[name].exchanged,
                microbatches=plans[name].n_microbatches,
                encoder_by=encoder,
                backbone_by=backbone,
            )
        )
    return found


def expected_s(case: Case, seed: int, costs: Costs) -> float:
    """Return the estimated seconds of measuring a step."""
    samples = case.samples(seed)
    once = (
        costs.llm({"tokens": samples.tokens()}).sum()
        + costs.vit({"image_patches": samples.images.values}).sum()
    )
    return len(ways(costs)) * case.passes * float(once)


def run(
    vit: Bench,
    llm: Bench,
    cases: Sequence[Case],
    costs: Costs,
    seconds: float,
    say: Callable[[str], None],
) -> list[Outcome]:
    """Run each case once, then more steps of the cases that still fit into the time."""
    start, found, seed = time.perf_counter(), [], 0
    while seed == 0 or any(_fits(case, seed, costs, start, seconds) for case in cases):
        for case in cases:
            if seed == 0 or _fits(case, seed, costs, start, seconds):
                found += measure(vit, llm, case, seed, costs)
                say(
                    f"{case} step {seed}: "
                    + ", ".join(
                        f"{o.strategy} {o.iteration * 1e3:.0f} ms"
                        for o in found[-len(ways(costs)) :]
                    )
                )
        seed += 1
    return found


def _fits(case: Case, seed: int, costs: Costs, start: float, seconds: float) -> bool:
    return time.perf_counter() - start + 1.1 * expected_s(case, seed, costs) < seconds


HEAD = (
    "profile",
    "context",
    "patches a token",
    "samples a rank",
    "plan",
    "steps",
    "microbatches",
    "iteration ms",
    "x vanilla",
    "x backbone",
    "both over mean",
    "encoder over mean",
    "backbone over mean",
    "met ms",
    "met, x vanilla",
    "encoder, % of the work",
)
NOTES = """`iteration`: the slowest rank, encoder and backbone together. Under `hybrid` outputs of the encoder cross ranks, so it is the
slowest encoder and then the slowest backbone; the exchange itself is not part of it (one GPU has nobody to send to). `over mean`:
the slowest rank over the mean rank. `x vanilla`, `x backbone`: their iteration time over this one's. `met`: the iteration of ranks
that wait for each other after every microbatch, as sharded models do."""


def rows_of(found: Sequence[Outcome]) -> list[list[str]]:
    """Return a row for every case and strategy, with means over its steps."""
    rows = []
    for case in dict.fromkeys(o.case for o in found):
        mine = {
            s: [o for o in found if o.case == case and o.strategy == s]
            for s in dict.fromkeys(o.strategy for o in found)
        }
        times, met = (
            {s: float(np.mean([pick(o) for o in steps])) for s, steps in mine.items()}
            for pick in (_iteration, _met)
        )
        for strategy, steps in mine.items():
            ratios = [
                float(np.mean([over_mean(pick(o)) for o in steps]))
                for pick in (_both, _encoder, _backbone)
            ]
            share = sum(sum(o.encoder) for o in steps) / sum(sum(o.both) for o in steps)
            rows.append(
                [
                    case.profile,
                    f"{case.context // 1024}k",
                    str(case.merge),
                    str(case.per_rank),
                    strategy,
                    str(len(steps)),
                    f"{np.mean([o.microbatches for o in steps]):.1f}",
                    f"{times[strategy] * 1e3:.0f}",
                    *(f"{times[base] / times[strategy]:.2f}" for base in ("vanilla", "backbone")),
                    *(f"{r:.3f}" for r in ratios),
                    f"{met[strategy] * 1e3:.0f}",
                    f"{met['vanilla'] / met[strategy]:.2f}",
                    f"{100 * share:.0f}",
                ]
            )
    return rows


def _iteration(o: Outcome) -> float:
    return o.iteration


def _met(o: Outcome) -> float:
    return o.met


def _both(o: Outcome) -> list[float]:
    return o.both


def _encoder(o: Outcome) -> list[float]:
    return o.encoder


def _backbone(o: Outcome) -> list[float]:
    return o.backbone


def page(
    found: Sequence[Outcome], costs: Costs, shapes: tuple[Shape, Shape], device: torch.device
) -> str:
    head = (
        f"# Encoder and backbone on a GPU\n\n{machine(device)}\n\n    "
        f"{command_line('benchmarks/gpu/vlm.py')}"
    )
    what = (
        f"Encoder: {shapes[0]}. Backbone: {shapes[1]}. bf16, forward and backward; profiles "
        "of `benchmarks/profiles.py`."
    )
    fits = f"## The fitted costs\n\nEncoder: {told(costs.vit)}\n\nBackbone: {told(costs.llm)}\n"
    return "\n\n".join([head, what, "## Steps", table(HEAD, rows_of(found)), NOTES, fits])


def benches(
    shapes: tuple[Shape, Shape], patches: int, context: int, device: torch.device
) -> tuple[Bench, Bench]:
    vit, llm = shapes
    encoder = Bench(
        Encoder(vit, PATCH, llm.hidden), PATCH, llm.hidden, patches, device, from_data=True
    )
    return encoder, Bench(Stack(llm, context), llm.hidden, llm.hidden, context, device)


def fitted(vit: Bench, llm: Bench, cases: Sequence[Case], many: int, least_s: float) -> Costs:
    """Return the costs fitted to grids of equal documents and to microbatches of these profiles."""
    seen = [(case, case.samples(1_000)) for case in cases]
    images = [m for _, samples in seen for m in in_turn(samples.images.values, len(vit.x), many)]
    documents = [m for case, samples in seen for m in in_turn(samples.tokens(), case.context, many)]
    longest = min(LONGEST_IMAGE, len(vit.x))
    encoder, _ = calibrate(
        vit, grid([len(vit.x)], longest) + images, least_s, column="image_patches"
    )
    backbone, _ = calibrate(
        llm, grid(sorted({case.context for case in cases}), len(llm.x)) + documents, least_s
    )
    return Costs(encoder, backbone)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="models and steps that a laptop runs: a look, no measurement",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=180.0,
        help="for the steps; each case is measured once in any case",
    )
    parser.add_argument(
        "--drawn",
        type=int,
        default=8,
        help="microbatches of real lengths that the fits are made of, by case",
    )
    parser.add_argument(
        "--out", type=Path, default=default_folder(), help="folder of the page and of all figures"
    )
    return parser


def main(words: Sequence[str] | None = None) -> list[Outcome]:
    given = arguments().parse_args(words)
    device, began = device_of(given.device), time.perf_counter()
    shapes = (TINY_VIT, TINY) if given.tiny else (VIT_1B, LLAMA_12B)
    cases = TINY_CASES if given.tiny else CASES
    vit, llm = benches(
        shapes, 1024 if given.tiny else MOST_PATCHES, max(case.context for case in cases), device
    )

    def say(line: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {line}", flush=True)

    costs = fitted(vit, llm, cases, 2 if given.tiny else given.drawn, 0.0 if given.tiny else 5.0)
    say(f"fitted: {costs}")
    found = run(vit, llm, cases, costs, 0.0 if given.tiny else given.seconds, say)
    text = page(found, costs, shapes, device)
    print(text)
    if not given.tiny or "--out" in (words or sys.argv):
        print(f"saved {save('vlm', text, given.out)}")
        (given.out / "gpu-vlm.json").write_text(
            json.dumps({"costs": asdict(costs), "steps": [asdict(o) for o in found]})
        )
    return found


if __name__ == "__main__":
    main()
