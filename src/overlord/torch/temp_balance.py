"""TempBalance: learning rates of layers from the spectra of their weights.

``TempBalance`` wraps a scheduler. Every ``every`` steps it measures how heavy-tailed the spectrum
of each weight matrix is. Blocks with lighter tails get a larger rate, the others a smaller one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from overlord.errors import JobError, StateMismatch
from overlord.torch.fused_projections import FusedRules
from overlord.torch.parameter_groups import SCALED, SplitGroups
from overlord.torch.rate_map import DIGITS, RateMap, renormalised
from overlord.torch.sharded_gram import Ranks, exponents
from overlord.torch.tail_exponent import NOT_FINITE, Estimator
from overlord.torch.weight_matrices import (
    SKIP,
    Matrix,
    MatrixRules,
    block_of,
    model_matrices,
    named_parameters,
)

log = logging.getLogger(__name__)

UNITS = ("block", "matrix")
VERSION = 1


class BalanceOptions(TypedDict, total=False):
    """Keyword arguments of ``TempBalance``; ``Settings`` explains them and has their defaults."""

    unit: Literal["block", "matrix"]
    map: Literal["linear", "sqrt", "log2", "step", "sigmoid"]
    estimator: Literal["hill", "farms", "ks", "published"]
    every: int
    smooth: int
    until: int | None
    skip: tuple[str, ...]
    renormalise: bool
    scale: tuple[float, float] | None
    tau: float
    limits: tuple[float, float]
    xmin_pos: float
    min_eigs: int
    fused: Mapping[str, tuple[int, ...]]
    scales: Literal["lr", "weight_decay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of ``TempBalance``: measured units, schedule, and map of exponents to rates.

    ``unit``: the unit that has one rate: ``"block"``, a numbered block with all its parameters, or
    ``"matrix"``, a matrix and its bias.
    ``every``: steps between measurements; ``smooth``: steps of the transition to new multipliers.
    ``until``: the step at which rates begin to return to the scheduler's; None: never.
    ``skip``: patterns of parameter names that are neither measured nor scaled.
    ``renormalise``: keep the mean multiplier, weighted by parameters, at 1.
    ``map``, ``scale``, ``tau``, ``limits``: as in ``RateMap``. ``estimator``, ``xmin_pos``,
    ``min_eigs``: as in ``Estimator``. ``fused``: sizes of the parts of fused projections.
    ``scales``: the option that is scaled; ``"weight_decay"`` is the method AlphaDecay.
    """

    unit: str = "block"
    map: str = "linear"
    estimator: str = "hill"
    every: int = 100
    smooth: int = 50
    until: int | None = None
    skip: tuple[str, ...] = SKIP
    renormalise: bool = False
    scale: tuple[float, float] | None = None
    tau: float = 10.0
    limits: tuple[float, float] = (0.1, 10.0)
    xmin_pos: float = 2.0
    min_eigs: int = 50
    fused: tuple[tuple[str, tuple[int, ...]], ...] = ()
    scales: str = "lr"

    def __post_init__(self) -> None:
        problems = []
        if self.unit not in UNITS:
            problems.append(f"unit: expected one of {', '.join(UNITS)}, got {self.unit!r}")
        if self.scales not in SCALED:
            problems.append(f"scales: expected one of {', '.join(SCALED)}, got {self.scales!r}")
        if self.every < 1:
            problems.append(f"every: expected at least 1 step, got {self.every}")
        if self.smooth < 0:
            problems.append(f"smooth: expected at least 0 steps, got {self.smooth}")
        if self.until is not None and self.until < 0:
            problems.append(f"until: expected None or at least 0 steps, got {self.until}")
        if problems:
            raise JobError(problems, "TempBalance")

    @staticmethod
    def of(options: BalanceOptions) -> Settings:
        """Return checked settings; raise ``JobError`` for unknown names and invalid values."""
        known = Settings.__dataclass_fields__
        if unknown := sorted(set(options) - set(known)):
            raise JobError(
                [f"arguments: expected names among {', '.join(known)}, got {', '.join(unknown)}"],
                "TempBalance",
            )
        given: dict[str, Any] = dict(options)
        if "fused" in given:
            given["fused"] = tuple((k, tuple(v)) for k, v in given["fused"].items())
        for name in ("skip", "scale", "limits"):
            if isinstance(given.get(name), (list, tuple)):
                given[name] = tuple(given[name])
        return Settings(**given)


class TempBalance:
    """A scheduler that scales learning rates of blocks or matrices by the spectra of their weights.

    ``optimizer``: any of torch but LBFGS. ``base_scheduler``: a scheduler of this optimizer. Call
    ``step`` in place of the scheduler's. ``__init__`` splits the groups of the optimizer; load the
    optimizer's state only after that. On several ranks every rank must call ``step``: the work is
    spread over the ranks of ``process_group``, by default all. All of them must have the same
    model. ``settings``: the fields of ``Settings``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        base_scheduler: Any,
        *,
        model: nn.Module,
        process_group: Any = None,
        **settings: Unpack[BalanceOptions],
    ):
        self.optimizer, self.base = optimizer, base_scheduler
        self.settings = Settings.of(settings)
        self._model, self._ranks = model, Ranks.of(process_group)
        self._map = RateMap(
            name=self.settings.map,
            scale=self.settings.scale,
            tau=self.settings.tau,
            limits=self.settings.limits,
        )
        self._estimator = Estimator(
            name=self.settings.estimator,
            xmin_pos=self.settings.xmin_pos,
            min_eigs=self.settings.min_eigs,
        )
        _check_supported(optimizer, base_scheduler, model)
        rules = MatrixRules(
            skip=self.settings.skip, fused=FusedRules(sizes=dict(self.settings.fused))
        )
        self._matrices, unit_of = _units(model, optimizer, self.settings.unit, rules)
        _check_agreement(self._matrices, self.settings, self._ranks)
        _check_units(self._matrices, self.settings)
        sizes: dict[str, int] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if unit := unit_of.get(id(parameter)):
                    sizes[unit] = sizes.get(unit, 0) + parameter.numel()
        self._sizes = sizes
        self._groups = SplitGroups(optimizer, unit_of, self.settings.scales)
        self._step = self._begun = 0
        self._start = dict.fromkeys(sizes, 1.0)
        self._target = dict.fromkeys(sizes, 1.0)
        self._alphas: dict[str, float] = {}

    @property
    def alphas(self) -> dict[str, float]:
        """The exponents of the last measurement by matrix; empty before the first one."""
        return dict(self._alphas)

    @property
    def unit_alphas(self) -> dict[str, float]:
        """The mean exponent of each unit in the last measurement; NaN for a unit without one."""
        means = {}
        for unit, values in self._by_unit(self._alphas).items():
            usable = [v for v in values if np.isfinite(v)]
            means[unit] = float(np.mean(usable)) if usable else float("nan")
        return means

    @property
    def multipliers(self) -> dict[str, float]:
        """The multiplier of each unit at the current step."""
        span = self.settings.smooth
        part = 1.0 if span == 0 else min(1.0, (self._step - self._begun) / span)
        if part == 1.0:
            return dict(self._target)
        return {u: a + (self._target[u] - a) * part for u, a in self._start.items()}

    def metrics(self) -> dict[str, float]:
        """Return exponents and multipliers of units as metrics, for ``client.report``."""
        alphas = {f"alpha/{u}": a for u, a in self.unit_alphas.items() if np.isfinite(a)}
        return alphas | {f"rate/{u}": m for u, m in self.multipliers.items()}

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler with its arguments, measure if it is time, and scale the rates."""
        with self._groups.unscaled():
            self.base.step(*args, **kwargs)
        self._step += 1
        until = self.settings.until
        if until is not None and self._step >= until:
            if any(m != 1.0 for m in self._target.values()):
                self._begin(dict.fromkeys(self._target, 1.0))
        elif self._step % self.settings.every == 0:
            self.measure()
        self._groups.scale(self.multipliers)

    def measure(self) -> dict[str, float]:
        """Measure all spectra, begin the transition to new multipliers, and return ``alphas``.

        ``step`` calls it every ``every`` steps. On several ranks all must call it.
        """
        parameters = named_parameters(self._model)
        found = exponents(self._matrices, parameters.__getitem__, self._estimator, self._ranks)
        names = [matrix.name for matrix in self._matrices]
        self._alphas = dict(zip(names, found.tolist(), strict=True))
        self._begin(self._targets())
        return self.alphas

    def get_last_lr(self) -> list[Any]:
        """Return the current rates of the optimizer's split groups, scaled."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [r.clone() if isinstance(r, torch.Tensor) else r for r in rates]

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state: the scheduler's, the position and all multipliers.

        The values are tuples and plain values, so that ``torch.distributed.checkpoint`` keeps
        each as one object. The state is the same on all ranks.
        """
        return {
            "version": VERSION,
            "settings": tuple(asdict(self.settings).items()),
            "step": self._step,
            "begun": self._begun,
            "start": tuple(self._start.items()),
            "target": tuple(self._target.items()),
            "alphas": tuple(self._alphas.items()),
            "groups": self._groups.options(),
            "base": (deepcopy(self.base.state_dict()),),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; raise ``StateMismatch`` if its settings or units differ.

        This sets the rates of the optimizer too, so its own state may be loaded before or after.
        """
        self._check_state(state)
        self._step, self._begun = int(state["step"]), int(state["begun"])
        self._start, self._target = dict(state["start"]), dict(state["target"])
        self._alphas = dict(state["alphas"])
        self._groups.load_options(state["groups"])
        self.base.load_state_dict(deepcopy(state["base"][0]))
        self._groups.scale(self.multipliers)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != VERSION:
            found = (f"{state.get('version')}", f"{VERSION}")
            raise StateMismatch(
                {"version": found},
                "load a result of TempBalance.state_dict()",
                "not a state of TempBalance of this version",
            )
        saved, mine = dict(state["settings"]), asdict(self.settings)
        differences = {
            name: (f"{saved.get(name)}", f"{value}")
            for name, value in mine.items()
            if _tuples(saved.get(name)) != _tuples(value)
        }
        if (units := {u for u, _ in state["target"]}) != set(self._target):
            lost, new = sorted(units - set(self._target)), sorted(set(self._target) - units)
            differences["units"] = (f"{', '.join(lost) or '-'}", f"{', '.join(new) or '-'}")
        if differences:
            raise StateMismatch(
                differences,
                "use the settings and the model of the saved run, or start without its state",
                "the state belongs to another TempBalance",
            )

    def _by_unit(self, values: Mapping[str, float]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {unit: [] for unit in self._target}
        for matrix in self._matrices:
            if matrix.name in values:
                found[_unit_name(matrix, self.settings.unit)].append(values[matrix.name])
        return found

    def _targets(self) -> dict[str, float]:
        """Return the multipliers of the last measurement.

        The multiplier of a unit without an exponent is 1. A unit with weights that are not finite
        keeps its multiplier.
        """
        kept = {
            unit: self._target[unit]
            for unit, values in self._by_unit(self._alphas).items()
            if NOT_FINITE in values
        }
        means = {u: a for u, a in self.unit_alphas.items() if u not in kept and np.isfinite(a)}
        mapped = self._map(np.array(list(means.values())))
        if self.settings.renormalise:
            mapped = renormalised(mapped, np.array([self._sizes[u] for u in means], np.float64))
        rounded = np.round(mapped, DIGITS).tolist()
        return dict.fromkeys(self._target, 1.0) | dict(zip(means, rounded, strict=True)) | kept

    def _begin(self, target: dict[str, float]) -> None:
        self._start, self._target, self._begun = self.multipliers, target, self._step


def _unit_name(matrix: Matrix, unit: str) -> str:
    return matrix.block if unit == "block" else matrix.parameter


def _units(
    model: nn.Module, optimizer: torch.optim.Optimizer, unit: str, rules: MatrixRules
) -> tuple[list[Matrix], dict[int, str]]:
    """Return the matrices of trained units, and the unit of every trained parameter by ``id``."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = named_parameters(model)
    matrices = [m for m in model_matrices(model, rules) if _unit_name(m, unit)]
    names = {_unit_name(m, unit) for m in matrices}
    unit_of: dict[int, str] = {}
    if unit == "matrix":
        for matrix in matrices:
            for target in matrix.targets:
                unit_of[id(parameters[target])] = matrix.parameter
                bias = parameters.get(f"{target.removesuffix('weight')}bias")
                if bias is not None:
                    unit_of[id(bias)] = matrix.parameter
    else:
        for name, parameter in parameters.items():
            if (block := block_of(name)) in names and not rules.skips(name):
                unit_of[id(parameter)] = block
    unit_of = {at: name for at, name in unit_of.items() if at in trained}
    used = set(unit_of.values())
    return [m for m in matrices if _unit_name(m, unit) in used], unit_of


def _tuples(value: Any) -> Any:
    """Return nested lists as tuples: a state that passed through JSON has lists."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def _check_supported(optimizer: torch.optim.Optimizer, base: Any, model: nn.Module) -> None:
    problems = []
    for method in ("step", "state_dict", "load_state_dict"):
        if not callable(getattr(base, method, None)):
            problems.append(
                f"base_scheduler: expected an object with {method}(), got {type(base).__name__}; "
                "for a constant rate use torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1)"
            )
            break
    owner = getattr(base, "optimizer", optimizer)
    if getattr(owner, "param_groups", None) is not optimizer.param_groups:
        problems.append(
            "base_scheduler: expected a scheduler of this optimizer, got one of another; make "
            "the scheduler with the optimizer that is given here"
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        problems.append(
            "model: expected whole or DTensor parameters, got FullyShardedDataParallel, whose flat "
            "parameters hold no matrices; shard it by torch.distributed.fsdp.fully_shard"
        )
    if problems:
        raise JobError(problems, "TempBalance")


def _check_units(matrices: list[Matrix], settings: Settings) -> None:
    """Raise ``JobError`` for a model without units; warn if all matrices are too small."""
    if not matrices:
        remedy = 'use unit="matrix"' if settings.unit == "block" else "check skip="
        raise JobError(
            [
                f"model: expected a {settings.unit} with weight matrices that the optimizer "
                f"trains, got none; {remedy}"
            ],
            "TempBalance",
        )
    if max(matrix.eigenvalues for matrix in matrices) < settings.min_eigs:
        log.warning(
            "all multipliers stay 1: no matrix has min_eigs=%d eigenvalues", settings.min_eigs
        )


def _check_agreement(matrices: list[Matrix], settings: Settings, ranks: Ranks) -> None:
    """Raise ``JobError`` if matrices or settings differ between ranks: collectives would hang."""
    if ranks.size == 1:
        return
    text = "\n".join([repr(settings), *(f"{m.name} {m.extents}" for m in matrices)])
    mine = (len(matrices), hashlib.sha256(text.encode()).hexdigest())
    found: list[Any] = [None] * ranks.size
    dist.all_gather_object(found, mine, group=ranks.group)
    if any(other != found[0] for other in found):
        counts = ", ".join(str(count) for count, _ in found)
        raise JobError(
            [
                "model: expected the same matrices and settings on all ranks, got different ones "
                f"({counts} matrices by rank); with pipeline stages give the process_group of the "
                "ranks that hold the same stage"
            ],
            "TempBalance",
        )
