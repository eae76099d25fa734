"""The half of ``ProcessHost`` that keeps stand-bys: which loader is followed where, who takes over,
who is to be told.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from overlord.cluster.standby_plan import StandbyPlan
from overlord.cluster.status import Asked
from overlord.messages.control import LoaderStart
from overlord.setup.partition import loads_of
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")


class Shadowing(Asked):
    """In the pump."""

    _kits: dict[int, frozenset[int]]
    _shadows: StandbyPlan
    _bytes: dict[int, float]  # of every loader, roughly

    def _plan_shadows(self, blueprint: PreparedJob) -> None:
        """Who is to have one: the loaders of all sources, or of those that cost more than the
        mean.
        """
        kind, wanted = blueprint.options.shadows, dict[int, float]()
        self._bytes = {}
        if kind != "none":
            loads = loads_of(blueprint)
            mean, first = sum(load.cost for load in loads) / len(loads), 0
            for load, n in zip(loads, self.hosting.loaders, strict=True):
                mine = dict.fromkeys(range(first, first + n), load.memory / n)
                first += n
                self._bytes |= mine
                wanted |= mine if kind == "all" or load.cost > mean else {}
            if self.hosting.n_hosts == 1:
                log.warning(
                    "shadows=%r: there is one loader host, and no other where its "
                    "loaders could have a stand-by",
                    kind,
                )
        self._shadows = StandbyPlan(wanted, self._source)

    def _source(self, loader: int) -> int:
        return int(np.searchsorted(np.cumsum(self.hosting.loaders), loader, side="right"))

    def _loaders_on(self, h: int) -> list[int]:
        return [
            loader for loader in range(sum(self.hosting.loaders)) if self._cutter.host(loader) == h
        ]

    def _living(self) -> set[int]:
        return {h for h, remote in list(self._loaders.items()) if remote.joined and not remote.lost}

    def _covered(self, h: int) -> bool:
        """Whether others have all that a loader host has, or had."""
        return self._shadows.covers(self._loaders_on(h), self._living() - {h})

    def _promote(self, dead: Collection[int]) -> None:
        """Loaders of hosts that are gone are those of their shadows' hosts from now on."""
        living = self._living() - set(dead)
        for h in dead:
            for loader, heir in self._shadows.promote(self._loaders_on(h), living).items():
                self._cutter.move(loader, heir)
        self._shadows.forget(living)
        self._cutter.follow(self._shadows.where)

    def _fill_shadows(self, only: int | None = None) -> list[int]:
        """New stand-bys for those that want one, on this host alone or on any; their loaders."""
        held = dict.fromkeys(self._living() if only is None else self._living() & {only}, 0.0)
        for loader, n in self._bytes.items():
            if (h := self._cutter.host(loader)) in held:
                held[h] += n
        nodes = {h: remote.node for h, remote in list(self._loaders.items())}
        made = self._shadows.fill(
            self._cutter.host, held, lambda h, source: source in self._kits.get(h, ()), nodes
        )
        self._cutter.follow(self._shadows.where)
        return made

    def _follow(self, openings: Mapping[int, LoaderStart]) -> None:
        """Tell hosts which loaders they follow, and from where."""
        for loader, h in self._shadows.where.items():
            if loader in openings:
                self._loaders[h].out.append(("follow", openings[loader]))

    def _follow_from_here(self, loaders: Collection[int]) -> None:
        """In mid-run, from the step that is planned next."""
        for loader in loaders:
            self._loaders[self._shadows.where[loader]].out += self._following(loader)

    def _following(self, loader: int) -> list[Any]:
        """What a host is told that is to follow a loader from here on."""
        cursor, generation, refill = self.planner.opening(loader)
        source = self._source(loader)
        opening = self.blueprint.openings(source, cursor)[
            loader - sum(self.hosting.loaders[:source])
        ]
        return [("follow", replace(opening, generation=generation)), refill]
