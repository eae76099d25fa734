"""Training of a model as one arm does: on CUDA, a whole step is one CUDA graph.

Batches, rates and the position are tensors, so a step reads nothing from the host. The host computes
the rates of the steps up to the next measurement in advance; they depend on nothing that is trained.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from temperature.arms import Rates

WARM_UP = 3  # steps before the capture: libraries load, the optimizer makes its state


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where and how runs are executed."""

    device: torch.device
    data: Path  # files that are made once
    text: Path | None = None  # a folder of text; by default installed packages
    graph: bool = True  # on CUDA
    spectra: str = "device"  # or "cpu"


def kept(path: Path, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the arrays of a file, which is made at the first call."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{np.random.default_rng().integers(1 << 60)}.npz")
        np.savez_compressed(partial, **make())  # type: ignore[arg-type]
        partial.replace(path)
    with np.load(path) as found:
        return dict(found)


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return a linear warm-up of 5 % of the steps, then a cosine."""
    warm = max(1, steps // 20)
    linear = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=warm)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warm))
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [linear, cosine], milestones=[warm])


def rates_of(cell: dict[str, Any], model: nn.Module, place: Place, outer: tuple[str, ...]) -> Rates:
    """Return the rates of a run, over an optimizer that never changes a weight."""
    host = torch.optim.SGD(model.parameters(), lr=cell["lr"])
    scheduler = schedule(host, cell["steps"])
    host.step()  # there are no gradients: it only tells the scheduler that steps have begun
    return Rates(
        cell["arm"],
        model,
        host,
        scheduler,
        every=cell["every"],
        seed=cell["seed"],
        mean=cell.get("mean", 1.0),
        outer=outer,
        min_eigs=8 if cell["tiny"] else 50,
        spectra=place.spectra,
    )


class Training:
    """The steps of one run.

    ``loss_of`` returns the loss of a row of ``batches``, which has one row for each step.
    """

    def __init__(
        self,
        model: nn.Module,
        rates: Rates,
        loss_of: Callable[[torch.Tensor], torch.Tensor],
        batches: torch.Tensor,
        *,
        every: int,
        clip: float | None = None,
        **options: Any,
    ):
        self.model, self._rates, self.loss_of, self._clip = model, rates, loss_of, clip
        self.batches, self._every, device = batches, every, batches.device
        self.on_cuda = device.type == "cuda"
        count = len(rates.now())
        self.table = torch.zeros(every, count, device=device)  # rates of the coming steps
        self._now = torch.zeros(count, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)  # in the run
        self.row = torch.zeros(1, dtype=torch.int64, device=device)  # in the table
        self.losses = torch.zeros(len(batches), device=device)
        groups = [
            {"params": parameters, "lr": self._now[i]} for i, parameters in enumerate(rates.groups)
        ]
        if self.on_cuda:
            # fused kernels take no complex parameters
            whole = all(p.is_floating_point() for p in model.parameters())
            options |= {"fused": True} if whole else {"foreach": True}
            options |= {"capturable": True}
        self._optimizer = torch.optim.AdamW(groups, **options)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.reason = "not asked for"

    @property
    def graph(self) -> bool:
        """Whether steps are replays of a graph."""
        return self._graph is not None

    def step(self) -> None:
        """Do one step; all it reads and writes are tensors on the device."""
        self._optimizer.zero_grad(set_to_none=True)
        self._now.copy_(self.table.index_select(0, self.row)[0])
        loss = self.loss_of(self.batches.index_select(0, self._at)[0])
        loss.backward()
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self.losses.index_copy_(0, self._at, loss.detach().float().reshape(1))
        self._at.add_(1)
        self.row.add_(1)

    def capture(self) -> None:
        """Make a graph of a step; if that fails, steps stay eager and ``reason`` says why."""
        if not self.on_cuda:
            self.reason = "no CUDA"
            return
        before = [p.detach().clone() for p in self.model.parameters()]
        try:
            self.warm_up()
            self.reset(before)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()
            self._graph, self.reason = graph, ""
        except Exception as error:  # any: the run continues without a graph
            self.reason = f"{type(error).__name__}: {error}"[:300]
            with suppress(RuntimeError, AssertionError):
                torch.cuda.synchronize()
        self.reset(before)

    def run(self) -> None:
        """Do all steps."""
        done, total = 0, len(self.batches)
        while done < total:
            count = min(self._every, total - done)
            coming = [self._rates.now()]
            for _ in range(count - 1):
                self._rates.step()
                coming.append(self._rates.now())
            self.table[:count].copy_(torch.tensor(coming))
            self.row.zero_()
            for _ in range(count):
                if self._graph is not None:
                    self._graph.replay()
                else:
                    self.step()
            done += count
            if done < total:
                self._rates.step()  # measures

    def close(self) -> None:
        """Free the graph and its memory."""
        self._graph = None
        self._optimizer.zero_grad(set_to_none=True)

    def warm_up(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._at.zero_()
                self.row.zero_()
                self.step()
        torch.cuda.current_stream().wait_stream(side)

    @torch.no_grad()
    def reset(self, before: list[torch.Tensor]) -> None:
        """Undo all steps. Gradients of a captured step are kept: the graph owns them."""
        for parameter, value in zip(self.model.parameters(), before, strict=True):
            parameter.copy_(value)
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()
        for counter in (self._at, self.row, self.losses):
            counter.zero_()
        if self._graph is None:
            self._optimizer.zero_grad(set_to_none=True)


def trained(training: Training, place: Place) -> dict[str, Any]:
    """Execute a run; return whether it was a graph, and if not why."""
    if place.graph:
        training.capture()
    training.run()
    found: dict[str, Any] = {"graph": training.graph}
    return found if training.graph else found | {"eager": training.reason}


def freed(device: torch.device) -> None:
    """Free the memory of a run."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
