"""Time of one measurement of TempBalance for Llama shapes, as a share of training time.

    python benchmarks/tempbalance_cost.py --save                # one H200: a few minutes
    python benchmarks/tempbalance_cost.py --device cpu --tiny   # shows that it runs, measures nothing

Weights are random numbers of the models' shapes. The work of 8 ranks is spread as `TempBalance`
spreads it, and every rank's share is timed on the one device, one after another; the slowest counts.
Communication is not measured: its bytes are listed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # its own modules

import numpy as np
import torch
from torch import nn

from gpu.timing import default_folder, device_of, machine, save, settle, table
from overlord.torch.sharded_gram import exponents, shares
from overlord.torch.tail_exponent import Estimator
from overlord.torch.weight_matrices import Matrix, model_matrices
from page import command_line

RANKS, EVERY, TOKENS, FLOPS = 8, 100, 4_000_000, 400e12  # of the target
TARGET = 0.01  # of the training time


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """The shapes of a model."""

    name: str
    hidden: int
    ffn: int
    layers: int
    kv: int
    vocabulary: int = 128_256

    @property
    def parameters(self) -> int:
        block = 2 * self.hidden * (self.hidden + self.kv) + 3 * self.hidden * self.ffn
        tables = 1 if self.hidden < 4096 else 2  # the small one ties its embeddings
        return self.layers * block + tables * self.vocabulary * self.hidden

    @property
    def training_s(self) -> float:
        """Between two measurements, at 6 FLOPs a parameter and token."""
        return EVERY * TOKENS * 6 * self.parameters / (RANKS * FLOPS)


MODELS = {
    "1B": Llama(name="1B", hidden=2048, ffn=8192, layers=16, kv=512),
    "8B": Llama(name="8B", hidden=4096, ffn=14_336, layers=32, kv=1024),
}
TINY = Llama(name="tiny", hidden=64, ffn=192, layers=3, kv=32, vocabulary=256)


def matrices_of(shape: Llama) -> list[Matrix]:
    """The model's matrices, without its weights."""
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList()
        for _ in range(shape.layers):
            parts = {
                "q_proj": (shape.hidden, shape.hidden),
                "k_proj": (shape.hidden, shape.kv),
                "v_proj": (shape.hidden, shape.kv),
                "o_proj": (shape.hidden, shape.hidden),
                "gate_proj": (shape.hidden, shape.ffn),
                "up_proj": (shape.hidden, shape.ffn),
                "down_proj": (shape.ffn, shape.hidden),
            }
            model.layers.append(
                nn.ModuleDict({n: nn.Linear(a, b, bias=False) for n, (a, b) in parts.items()})
            )
    return model_matrices(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One model and estimator."""

    model: str
    estimator: str
    alone_s: float  # all timed shares on one device
    slowest_s: float  # the largest share of 8 ranks
    timed: int  # shares, the most expensive by the model
    training_s: float
    reduced_bytes: int  # of Gram matrices that shards send to their owner, over all ranks
    gathered_bytes: int  # of bf16 matrices whose short side is sharded, by rank

    @property
    def share(self) -> float:
        return self.slowest_s / self.training_s


class Weights:
    """One random matrix for each shape, in bf16 as a trainer holds them."""

    def __init__(self, matrices: list[Matrix], device: torch.device):
        drawn = torch.Generator(device=device).manual_seed(0)
        self._shape = {m.parameter: m.shape for m in matrices}
        self._made = {
            shape: (torch.randn(shape, generator=drawn, device=device) * 0.02).bfloat16()
            for shape in set(self._shape.values())
        }

    def __call__(self, name: str) -> torch.Tensor:
        return self._made[self._shape[name]]


def most_expensive(
    matrices: list[Matrix], fit: Estimator, count: int
) -> list[tuple[int, list[Matrix]]]:
    """Return the ranks with the largest modelled cost and their matrices, the largest first."""
    costs = [m.cost(fit.takes_windows) for m in matrices]
    owner = shares(costs, RANKS)
    load = [sum(c for c, o in zip(costs, owner, strict=True) if o == r) for r in range(RANKS)]
    ranks = sorted(range(RANKS), key=lambda r: (-load[r], r))[:count]
    return [(r, [m for m, o in zip(matrices, owner, strict=True) if o == r]) for r in ranks]


def measure(
    shape: Llama, estimator: str, device: torch.device, passes: int, count: int = RANKS
) -> Cost:
    matrices = matrices_of(shape)
    weights, fit = Weights(matrices, device), Estimator(name=estimator)
    parts = most_expensive(matrices, fit, count)
    # libraries load and plan: the cheapest matrix of each size of problem
    by_cost = sorted(matrices, key=lambda m: -m.cost(fit.takes_windows))
    warm = _seconds(list({m.small: m for m in by_cost}.values()), weights, fit, device)
    print(f"{shape.name}, {estimator}: first matrix of each size {warm:.2f} s", flush=True)
    found = np.zeros((passes, len(parts)))
    for at in range(passes):
        for i, (rank, part) in enumerate(parts):
            found[at, i] = _seconds(part, weights, fit, device)
            print(
                f"{shape.name}, {estimator}, pass {at}: share of rank {rank} took "
                f"{found[at, i]:.3f} s, {found[at, i] / shape.training_s:.3%}",
                flush=True,
            )
    by_rank = np.median(found, axis=0)
    partial = [m for m in matrices if m.rows >= m.cols]
    return Cost(
        model=shape.name,
        estimator=estimator,
        alone_s=float(by_rank.sum()),
        slowest_s=float(by_rank.max()),
        timed=len(parts),
        training_s=shape.training_s,
        reduced_bytes=sum(4 * m.small**2 * _windows(m, estimator) for m in partial),
        gathered_bytes=sum(2 * m.rows * m.cols for m in matrices if m.rows < m.cols),
    )


def _windows(matrix: Matrix, estimator: str) -> int:
    return -(-max(matrix.rows, matrix.cols) // matrix.small) if estimator == "farms" else 1


def _seconds(part: list[Matrix], weights: Weights, fit: Estimator, device: torch.device) -> float:
    settle(device)
    start = time.perf_counter()
    found = exponents(part, weights, fit)
    settle(device)
    assert np.isfinite(found[[m.eigenvalues >= fit.min_eigs for m in part]]).all()
    return time.perf_counter() - start


def solver(device: torch.device, sizes: list[int]) -> None:
    """Print seconds of an eigenvalue problem of each size: alone, and of four at once."""
    for size in sizes:
        tall = torch.randn(4, size, size, device=device)
        grams, took = tall.mT @ tall, []
        for part in (grams[:1], grams[:1], grams, grams):
            settle(device)
            start = time.perf_counter()
            torch.linalg.eigvalsh(part)
            settle(device)
            took.append((time.perf_counter() - start) / len(part))
        print(f"side {size}: alone {took[1]:.4f} s, of four {took[3]:.4f} s each", flush=True)


HEAD = (
    "model",
    "estimator",
    "timed shares together, s",
    "slowest of 8, s",
    f"training of {EVERY} steps, s",
    "share",
    "target 1 %",
    "reduced, GB",
    "gathered, GB",
)


def page(costs: list[Cost], where: str) -> str:
    rows = [
        (
            c.model,
            c.estimator,
            f"{c.alone_s:.2f}",
            f"{c.slowest_s:.2f}",
            f"{c.training_s:.0f}",
            f"{c.share:.3%}",
            "met" if c.share <= TARGET else "missed",
            f"{c.reduced_bytes / 1e9:.1f}",
            f"{c.gathered_bytes / 1e9:.1f}",
        )
        for c in costs
    ]
    return (
        "# Cost of TempBalance\n\n"
        f"One measurement every {EVERY} steps, {RANKS} GPUs, {TOKENS / 1e6:g}M tokens a step, "
        f"{FLOPS / 1e12:g} TFLOP/s for each GPU. Times are measured, the training time is computed. "
        f"Communication is not in the times: the last columns are its bytes. {_timed(costs)}\n\n"
        f"{table(HEAD, rows)}\n\n{where}\n\nRun: `{command_line('tempbalance_cost.py')}`\n"
    )


def _timed(costs: list[Cost]) -> str:
    fewest = min(c.timed for c in costs)
    if fewest == RANKS:
        return f"All {RANKS} shares were timed."
    return f"{fewest} of {RANKS} shares were timed, the most expensive by the model."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="1B,8B")
    parser.add_argument("--estimators", default="hill,farms")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument(
        "--shares", type=int, default=RANKS, help="time the most expensive by the model only"
    )
    parser.add_argument("--solver", action="store_true", help="time the eigenvalue solver only")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: measures nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    device, costs = device_of(given.device), []
    if given.solver:
        solver(device, [64] if given.tiny else [448, 512, 1024, 2048, 4096])
        return
    shapes = [TINY] if given.tiny else [MODELS[name] for name in given.models.split(",")]
    for shape in shapes:
        for estimator in given.estimators.split(","):
            passes = 1 if given.tiny else given.passes
            costs.append(measure(shape, estimator, device, passes, given.shares))
            print(json.dumps(asdict(costs[-1])), flush=True)
    text = page(costs, machine(device))
    print(text)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(c) for c in costs], indent=1))
    if given.save and not given.tiny:
        print(f"wrote {save('tempbalance-cost', text, default_folder(), prefix='')}")


if __name__ == "__main__":
    main()
