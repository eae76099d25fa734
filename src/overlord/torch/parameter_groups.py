"""Parameter groups of an optimizer, split by unit, with one option scaled after the scheduler.

The option is the learning rate or the weight decay. The scheduler steps the original groups, with
unscaled rates: it never reads a split group or a scaled rate. Multiplying a rate after
``scheduler.step()`` instead would compound under schedulers that use the previous rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from overlord.errors import JobError

PER_PARAMETER = ("params", "param_names")
RATE = "lr"
SCALED = (RATE, "weight_decay")


class SplitGroups:
    """The groups of an optimizer, split once: one group for each unit in each original group.

    All options are kept. The optimizer's state stays valid, since it is kept by parameter.
    ``unit_of``: the unit of a parameter by its ``id``; parameters without a unit are not scaled.
    ``option``: the option that ``scale`` sets.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, unit_of: Mapping[int, str], option: str = RATE
    ):
        if any(option not in group for group in optimizer.param_groups):
            raise JobError(
                [
                    f"optimizer: expected the option {option} in every group, got "
                    f"{type(optimizer).__name__} without it; use another optimizer, such as AdamW"
                ],
                "TempBalance",
            )
        self._optimizer, self._option = optimizer, option
        self._originals: list[dict[str, Any]] = []
        self._split: list[tuple[int, str]] = []  # original group and unit of every group
        groups: list[dict[str, Any]] = []
        for number, group in enumerate(optimizer.param_groups):
            self._originals.append({key: _copied(value) for key, value in group.items()})
            for unit, part in _by_unit(group, unit_of):
                groups.append(part)
                self._split.append((number, unit))
        if len(groups) > 1 and type(optimizer).__name__ == "LBFGS":
            raise JobError(
                ["optimizer: expected one that allows several groups, got LBFGS; use AdamW or SGD"],
                "TempBalance",
            )
        optimizer.param_groups[:] = groups

    @property
    def units(self) -> list[str]:
        """The unit of every split group, in order; empty text for a group without a unit."""
        return [unit for _, unit in self._split]

    @contextmanager
    def unscaled(self) -> Iterator[None]:
        """Give the optimizer its original groups with unscaled rates.

        Options that change inside, such as a scheduled momentum, are copied to the split groups.
        """
        groups = self._groups()
        before = [{k: _copied(v) for k, v in group.items()} for group in self._originals]
        self._optimizer.param_groups = self._originals
        try:
            yield
        finally:
            self._originals, self._optimizer.param_groups = self._optimizer.param_groups, groups
        for group, (number, _) in zip(groups, self._split, strict=True):
            for key, value in self._originals[number].items():
                if key in PER_PARAMETER or key == self._option:
                    continue
                if not _equal(before[number].get(key), value):
                    _assign(group, key, value)

    def scale(self, multipliers: Mapping[str, float]) -> None:
        """Set the option of every split group to its unscaled value times its unit's multiplier."""
        for group, (number, unit) in zip(self._groups(), self._split, strict=True):
            value = float(self._originals[number][self._option])
            _assign(group, self._option, value * multipliers.get(unit, 1.0))

    def options(self) -> tuple[dict[str, Any], ...]:
        """Return the options of the original groups as plain values."""
        return tuple(
            {k: _plain(v) for k, v in group.items() if k not in PER_PARAMETER}
            for group in self._originals
        )

    def load_options(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore the options of the original groups, and set all rates to their unscaled values.

        Options that are tensors are changed in place.
        """
        for group, options in zip(self._originals, saved, strict=True):
            for key, value in options.items():
                _assign(group, key, value)
        for group, (number, _) in zip(self._groups(), self._split, strict=True):
            _assign(group, RATE, self._originals[number][RATE])

    def _groups(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        if len(groups) != len(self._split):
            raise JobError(
                [
                    f"optimizer: expected the {len(self._split)} groups of the split, got "
                    f"{len(groups)}; add groups before TempBalance is made"
                ],
                "TempBalance",
            )
        return groups


def _by_unit(
    group: dict[str, Any], unit_of: Mapping[int, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each unit of a group and its part; the first part is the dictionary of the group."""
    members: dict[str, list[int]] = {}
    for at, parameter in enumerate(group["params"]):
        members.setdefault(unit_of.get(id(parameter), ""), []).append(at)
    whole = {key: group[key] for key in PER_PARAMETER if key in group}
    for number, (unit, places) in enumerate(members.items()):
        part = group if number == 0 else {k: _copied(v) for k, v in group.items()}
        for key, values in whole.items():
            part[key] = [values[at] for at in places]
        yield unit, part
    if not members:
        yield "", group


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _assign(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option; a tensor keeps its identity, which compiled optimizers rely on."""
    if isinstance(group.get(key), torch.Tensor):
        group[key].fill_(_plain(value))
    else:
        group[key] = _copied(value)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(_plain(v) for v in value) if isinstance(value, (list, tuple)) else value


def _equal(a: Any, b: Any) -> bool:
    return bool(_plain(a) == _plain(b))
