"""The arms of the experiment: TempBalance and its five controls, with one code path for all.

Multipliers come from a `TempBalance` over an optimizer that is never stepped; the arm may permute
or replace them before they scale the rates of the real optimizer.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

import overlord.torch as ot
from overlord.torch.parameter_groups import SplitGroups
from overlord.torch.weight_matrices import block_of, named_parameters
from temperature.names import BALANCED, EMBED, MEAN, PERMUTED, REVERSED

SCALE = (0.5, 1.5)


class Constant:
    """A scheduler that changes nothing."""

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Rates:
    """Scales the rates of an optimizer as one arm does."""

    def __init__(
        self,
        arm: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        *,
        every: int,
        seed: int,
        mean: float = 1.0,
        outer: tuple[str, ...] = (),
        min_eigs: int = 50,
        spectra: str = "device",
    ):
        self.arm, self._scheduler, self._every, self._seed = arm, scheduler, every, seed
        parameters = named_parameters(model)
        unit_of = {id(p): self._unit(name, outer) for name, p in parameters.items()}
        sizes: dict[str, int] = {}
        for p in parameters.values():
            sizes[unit_of[id(p)]] = sizes.get(unit_of[id(p)], 0) + p.numel()
        self._sizes, self._mean, self._outer = sizes, mean, outer
        self._balance: Any = None
        self.model = self._measured = model
        if arm in (BALANCED, PERMUTED, REVERSED):
            if spectra == "cpu":
                self._measured = copy.deepcopy(model).cpu()
            never_stepped = torch.optim.SGD(self._measured.parameters(), lr=1.0)
            self._balance = ot.TempBalance(
                never_stepped,
                Constant(),
                model=self._measured,
                estimator="farms",
                every=every,
                smooth=0,
                scale=SCALE[::-1] if arm == REVERSED else SCALE,
                skip=outer,
                min_eigs=min_eigs,
            )
        self._groups, self._optimizer = SplitGroups(optimizer, unit_of), optimizer
        self._step, self._total = 0, 0.0

    def _unit(self, name: str, outer: tuple[str, ...]) -> str:
        return next((part for part in outer if name.startswith(part)), block_of(name))

    def step(self) -> None:
        with self._groups.unscaled():
            self._scheduler.step()
        self._step += 1
        if self._balance is not None:
            if self._step % self._every == 0:
                self._copy()
            self._balance.step()
        found = self.multipliers()
        self._groups.scale(found)
        weighted = sum(found.get(u, 1.0) * n for u, n in self._sizes.items())
        self._total += weighted / sum(self._sizes.values())

    def measure(self) -> dict[str, float]:
        """Measure all spectra now; of arms that measure."""
        self._copy()
        found: dict[str, float] = self._balance.measure()
        return found

    @torch.no_grad()
    def _copy(self) -> None:
        """Copy the weights to the model that is measured."""
        if self._measured is not self.model:
            for to, p in zip(self._measured.parameters(), self.model.parameters(), strict=True):
                to.copy_(p)

    def now(self) -> list[float]:
        """The rates in force, one for each group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    @property
    def groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each group."""
        return [list(group["params"]) for group in self._optimizer.param_groups]

    def multipliers(self) -> dict[str, float]:
        if self.arm == MEAN:
            return dict.fromkeys(self._sizes, self._mean)
        if self.arm == EMBED:
            return dict.fromkeys(self._outer, SCALE[1])
        if self._balance is None:
            return {}
        found: dict[str, float] = self._balance.multipliers
        if self.arm == PERMUTED:
            drawn = np.random.default_rng((self._seed, self._step // self._every))
            values = list(found.values())
            return dict(
                zip(found, (values[i] for i in drawn.permutation(len(values))), strict=True)
            )
        return found

    @property
    def mean(self) -> float:
        """The mean multiplier so far, weighted by parameters."""
        return self._total / max(1, self._step)

    @property
    def alphas(self) -> dict[str, float]:
        return self._balance.unit_alphas if self._balance is not None else {}
