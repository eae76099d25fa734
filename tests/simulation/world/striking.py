"""Carries out a script of faults in a cluster, and notes those that really struck."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulation.world.control import PREFIX, Birth
from tests.simulation.world.faults import LEAST, Fault
from tests.simulation.world.world import Process

if TYPE_CHECKING:
    from tests.simulation.world.cluster import Cluster

AGAIN_S = 0.2  # until a fault that found nobody is tried again
TRIES = 60


class Script:
    """The faults of a scenario, in their order. Each strikes once; what it broke is mended when its
    time is over.
    """

    def __init__(self, cluster: Cluster, faults: tuple[Fault, ...]):
        self._cluster, self._world, self._net = cluster, cluster.world, cluster.net
        self._left = list(faults)
        self._least = min(LEAST, len(faults))
        self._waiting = self._lasting = 0
        self._armed: Fault | None = None
        self.look()

    @property
    def over(self) -> bool:
        return not self._left and not self._lasting and not self._waiting

    @property
    def owes(self) -> bool:
        """Fewer have struck than must: those that are due may wait for someone they can hit, and
        the job for them.
        """
        return self._cluster.history.fired.total() < self._least

    def look(self) -> None:
        """Called when the slowest rank has moved on."""
        if (
            self._left
            and self._left[0] is not self._armed
            and self._cluster.slowest >= self._left[0].step
        ):
            self._arm(self._left[0].after_s)

    def _arm(self, after_s: float) -> None:
        fault = self._armed = self._left[0]
        self._world.at(after_s, lambda: self._strike(fault), None)

    def _strike(self, fault: Fault) -> None:
        if not self._left or self._left[0] is not fault:
            return  # it struck before, out of patience
        self._left.pop(0)
        self._waiting += 1
        self._try(fault, TRIES)
        if self._left:
            following = self._left[0]
            self._world.at(
                fault.patience_s + following.after_s, lambda: self._strike(following), None
            )
            self.look()

    def _try(self, fault: Fault, tries: int) -> None:
        cluster = self._cluster
        if cluster.over or getattr(self, f"_{fault.kind.replace(' ', '_')}")(fault):
            self._waiting -= 1
            if not cluster.over:
                cluster.history.fired[fault.kind, fault.role] += 1
                cluster.history.add(
                    self._world.now, "fault", words=f"{fault.kind}, {fault.role} {fault.which}"
                )
                cluster.report_late()
                if not self.owes:
                    cluster.release()
        elif fault.kind != "leave" and (tries or (fault.kind == "slow link" and self.owes)):
            self._world.at(AGAIN_S, lambda: self._try(fault, max(0, tries - 1)), None)
        elif (
            fault.kind != "slow link"
        ):  # all who could leave have left, perhaps: something else goes wrong instead
            cluster.call_off()
            self._try(replace(fault, kind="slow link", role="loader", seconds=0.5), TRIES)
        else:
            self._waiting -= 1
        self._see_calm()

    def _see_calm(self) -> None:
        if self.over:
            self._cluster.calm()

    def _lasts(self, fault: Fault, mend: Callable[[], None]) -> bool:
        self._lasting += 1

        def end() -> None:
            self._lasting -= 1
            mend()
            self._see_calm()

        self._world.at(fault.seconds, end, None)
        return True

    def _targets(self, role: str) -> list[Process]:
        """Those of a role that are there, by name."""
        if role == "trainer":
            return [
                self._cluster.trainers[r].process
                for r in self._cluster.ranks
                if not self._cluster.trainers[r].ended
            ]
        launched = self._cluster.launched
        if role == "planner":
            return (
                [launched.planner] if launched.host is not None and launched.planner.alive else []
            )
        control = launched.control
        return [
            p
            for name, p in sorted(
                control.processes().items(), key=lambda found: (len(found[0]), found[0])
            )
            if name.startswith(PREFIX[role]) and p.alive
        ]

    def _target(
        self, fault: Fault, struck: Callable[[Process], bool] = lambda process: False
    ) -> Process | None:
        """One of the role; one that is not ``struck`` already, where there is such a one."""
        every = self._targets(fault.role)
        found = [process for process in every if not struck(process)] or every
        return found[fault.which % len(found)] if found else None

    # the faults; each says whether it struck

    def _kill(self, fault: Fault) -> bool:
        if (target := self._target(fault)) is None:
            return False
        target.kill()
        return True

    def _kill_several(self, fault: Fault) -> bool:
        targets = self._targets(fault.role)
        for target in targets[fault.which % 2 :] or targets:
            target.kill()
        return bool(targets)

    def _bad_start(self, fault: Fault) -> bool:
        """Whoever comes in its place dies too, once or a few times."""
        births = [Birth(dies=True) for _ in range(1 + fault.which % 3)]
        return self._born(fault, births) and self._kill(fault)

    def _slow_start(self, fault: Fault) -> bool:
        births = [Birth(late_s=fault.seconds)]
        return self._born(fault, births) and self._kill(fault) and self._lasts(fault, lambda: None)

    def _born(self, fault: Fault, births: list[Birth]) -> bool:
        """What awaits the next of a role, if there is one whose place they can take."""
        if self._target(fault) is None:
            return False
        self._cluster.births.setdefault(fault.role, deque()).extend(births)
        return True

    def _stop(self, fault: Fault) -> bool:
        if (target := self._target(fault, lambda p: p.stopped)) is None or target.stopped:
            return False
        target.stop()
        self._misses(fault, target)
        return self._lasts(fault, target.wake)

    def _cut_off(self, fault: Fault) -> bool:
        if (
            target := self._target(fault, lambda p: p in self._net.cut)
        ) is None or target in self._net.cut:
            return False
        self._net.part(target)
        self._misses(fault, target)
        return self._lasts(fault, lambda: self._net.mend(target))

    def _misses(self, fault: Fault, target: Process) -> None:
        """A planner that answers nothing for long is given up by the launching process."""
        launched, patience = self._cluster.launched, self._cluster.blueprint.options.lost_after_s
        if fault.role == "planner" and fault.seconds > patience:
            self._world.at(patience, lambda: launched.give_up_planner(target), None)

    def _torn_write(self, fault: Fault) -> bool:
        disk = self._cluster.disk
        if disk is None or disk.tears or self._cluster.launched.host is None:
            return False
        disk.tears = True
        return True

    def _disk_full(self, fault: Fault) -> bool:
        disk = self._cluster.disk
        if disk is None or disk.full:
            return False
        disk.full = True
        return self._lasts(fault, lambda: setattr(disk, "full", False))

    def _cut_link(self, fault: Fault) -> bool:
        target = self._target(fault)
        wires = [
            w
            for w in self._net.wires
            if target in (w.source, w.target) and w.source.alive and w.target.alive and not w.cut
        ]
        if target is None or not wires:
            return False
        wire = wires[fault.which % len(wires)]
        wire.cut = True

        def mend() -> None:
            wire.cut = False
            wire.mend()

        return self._lasts(fault, mend)

    def _slow_link(self, fault: Fault) -> bool:
        if (target := self._target(fault, lambda p: p in self._net.slow)) is None:
            return False
        self._net.slow[target] = fault.factor

        def mend() -> None:
            self._net.slow.pop(target, None)

        return self._lasts(fault, mend)

    def _slow_disk(self, fault: Fault) -> bool:
        if (target := self._target(fault, lambda p: p.disk > 1)) is None:
            return False
        target.disk = 10 * fault.factor
        return self._lasts(fault, lambda: setattr(target, "disk", 1.0))

    def _slow_trainer(self, fault: Fault) -> bool:
        ranks = [r for r in self._cluster.ranks if not self._cluster.trainers[r].ended]
        if not ranks:
            return False
        rank = ranks[fault.which % len(ranks)]
        self._cluster.trainers[rank].slow = fault.factor
        return self._lasts(fault, lambda: setattr(self._cluster.trainers[rank], "slow", 1.0))

    def _restart(self, fault: Fault) -> bool:
        if fault.role == "job":
            return self._cluster.restart()
        ranks = [r for r in self._cluster.ranks if not self._cluster.trainers[r].ended]
        return bool(ranks) and self._cluster.crash(
            ranks[fault.which % len(ranks)], with_step=fault.which % 3 == 0
        )

    def _rewind(self, fault: Fault) -> bool:
        return self._cluster.rewind(fault.which)

    def _reshard(self, fault: Fault) -> bool:
        return self._cluster.reshard(fault.which)

    def _scale(self, fault: Fault) -> bool:
        """A source that has several loaders, and how many workers are to read it from here on."""
        launched = self._cluster.launched
        if (host := launched.host) is None:
            return False
        several = [i for i, n in enumerate(host.placement.loaders) if n > 1]
        source = several[fault.which % len(several)]
        n = (
            1
            + (len(host.placement.workers_of(source)) + fault.which // len(several))
            % host.placement.loaders[source]
        )

        def act() -> None:
            if fault.which % 5 == 4:  # as when a node with room joins
                host.rebalancer.relocate(sorted(host.placement.workers_of(source)))
            else:
                host.scale(source, n)

        launched.pump.post(act)
        return True

    def _leave(self, fault: Fault) -> bool:
        ranks = self._cluster.ranks
        return len(ranks) > 1 and self._cluster.leave(ranks[fault.which % len(ranks)])
