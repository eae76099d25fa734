"""The time of microbatches in a module on a device, and the cost that fits these times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

import overlord as ov
from gpu.model import Packed, made
from gpu.timing import Work, median_seconds, warm_up
from overlord.plan.plan import LoadingPlan
from overlord.planning.balance import binpack
from overlord.planning.cost.fit import Fitted

FILLS = (0.25, 0.5, 1.0)  # of the most tokens, in the grid
SHORTEST = (
    64  # of the documents that a microbatch of the grid is cut into; then twice as long, and so on
)
PASSES = 5
Lengths = Sequence[int] | np.ndarray
Measured = list[tuple[np.ndarray, float]]


class Bench:
    """Runs forward and backward of ``module(x, packed)`` for up to ``most`` tokens."""

    def __init__(
        self,
        module: nn.Module,
        inputs: int,
        outputs: int,
        most: int,
        device: torch.device,
        *,
        from_data: bool = False,
    ):
        """Create the input; ``from_data``: it is data without a gradient, as pixels are."""
        self.device, self.from_data = device, from_data
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.module = made(module, device, dtype)
        drawn = torch.Generator(device=device).manual_seed(1)
        self.x, self.slope = (
            torch.randn(most, n, device=device, dtype=dtype, generator=drawn)
            for n in (inputs, outputs)
        )

    def piece(self, lengths: Lengths) -> Work:
        """Return one microbatch as a piece of work, with its bounds on the device."""
        packed = Packed.of(lengths, self.device)

        def run() -> None:
            x = self.x[: len(packed)].detach()
            self.module(x if self.from_data else x.requires_grad_(), packed).backward(
                self.slope[: len(packed)]
            )

        return run


def grid(most: Sequence[int], longest: int) -> list[np.ndarray]:
    """Return microbatches of equal documents, of different sizes, with short and long documents."""
    lengths = [SHORTEST * 2**k for k in range(32) if SHORTEST * 2**k <= longest]
    found = {
        (int(m * f), n): np.full(int(m * f) // n, n)
        for m in most
        for f in FILLS
        for n in lengths
        if n <= m * f
    }
    return list(found.values())


def in_turn(lengths: np.ndarray, most: int, count: int) -> list[np.ndarray]:
    """Return the first microbatches of these lengths, packed in order.

    A count of 0 returns all of them.
    """
    bins = binpack.next_fit(lengths, most)
    return [lengths[bins == b] for b in range(int(bins.max(initial=-1)) + 1)][: count or None]


def calibrate(
    bench: Bench, microbatches: Sequence[np.ndarray], least_s: float, column: str = "tokens"
) -> tuple[Fitted, Measured]:
    """Return the cost that fits this device, and the data of the fit."""
    largest_first = sorted(
        microbatches, key=lambda m: -m.sum()
    )  # the allocator's pool has then seen the worst
    warm_up([bench.piece(m) for m in largest_first], bench.device, least_s)
    seconds = median_seconds([bench.piece(m) for m in microbatches], bench.device, passes=PASSES)
    return ov.cost.fit(microbatches, seconds, column=column), list(
        zip(microbatches, seconds.tolist(), strict=True)
    )


def by_microbatch(plan: LoadingPlan, module: str = "backbone") -> list[list[np.ndarray]]:
    """Return lengths by [bucket][microbatch].

    A microbatch without a sample is a document of one token, as constructors deliver it.
    """
    a = plan.module(module)
    counts = np.bincount(a.bins(), minlength=a.n_buckets * a.n_microbatches)
    parts = np.split(a.size[a.order()], np.cumsum(counts)[:-1])
    if module == "backbone":
        parts = [part if len(part) else np.ones(1, np.int64) for part in parts]
    return [parts[r * a.n_microbatches : (r + 1) * a.n_microbatches] for r in range(a.n_buckets)]


def told(cost: Fitted) -> str:
    """Return the fit as text."""
    return (
        f"`seconds = {cost.linear:.4g} * sum(len) + {cost.square:.4g} * sum(len^2) + "
        f"{cost.constant:.4g}` over {cost.measurements} "
        f"microbatches; error {100 * cost.mean_error:.2f} % on average, "
        f"{100 * cost.worst_error:.1f} % at worst."
    )


COST_HEAD = ("tokens", "documents of", "ms", "fit ms", "error %")


def cost_rows(cost: Fitted, measured: Measured) -> list[list[str]]:
    return [
        [
            f"{int(m.sum())}",
            str(int(m[0])) if (m == m[0]).all() else f"{len(m)} drawn",
            f"{s * 1e3:.2f}",
            f"{cost.seconds(m) * 1e3:.2f}",
            f"{100 * (cost.seconds(m) / s - 1):+.1f}",
        ]
        for m, s in measured
    ]
