"""The costs, balance methods and schedules that users registered in this process, as one value.

Strategies name them, so a process that plans needs those of the launching process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from overlord.planning import schedule
from overlord.planning.balance import methods
from overlord.planning.cost import models


@dataclass(frozen=True, slots=True, eq=False)
class Registrations:
    """The registered functions, by kind and name."""

    costs: Mapping[str, Callable[..., Any]]
    methods: Mapping[str, Callable[..., Any]]
    schedules: Mapping[str, Callable[..., Any]]

    @staticmethod
    def here() -> Registrations:
        """Return those of this process."""
        return Registrations(models.registered(), methods.registered(), schedule.registered())

    def by_function(self) -> dict[str, Mapping[str, Callable[..., Any]]]:
        """Return the entries by the function that registers them."""
        return {
            "register_cost": self.costs,
            "register_balance": self.methods,
            "register_schedule": self.schedules,
        }

    def restore(self) -> None:
        """Register all of them in this process."""
        models.restore(self.costs)
        methods.restore(self.methods)
        schedule.restore(self.schedules)
