"""The part of ``ProcessHost`` that changes who reads what: sources that join, loaders that move to
other hosts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from overlord.cluster.recovery import START_S, Recovering
from overlord.cluster.supervisor import WorkerReady
from overlord.cluster.worker_factory import SIDE_BY_SIDE
from overlord.errors import ActorLost, JobError
from overlord.job.hooks import LOADER, of_kind
from overlord.messages.control import Cursor, LoaderStart, RestartLoader, RestartSource
from overlord.planning.spec import NewSource
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")

# hosts that scaling started are numbered from here on: others are counted where the job was
# launched
SCALED = 10_000


class Joining(Recovering):
    """In the pump, but for what is prepared."""

    def _start_loader_host(
        self,
        h: int,
        sources: Collection[int],
        openings: Sequence[LoaderStart],
        *,
        joined: bool = True,
    ) -> None:
        raise NotImplementedError

    def prepare_source(self, blueprint: PreparedJob) -> int:
        """A host of its own for a source that joins: code crosses only when a process starts.
        Returns its number.
        """
        # A number is used once: one that was dropped counts as lost. All hosts of the launch may
        # have been replaced since.
        i, h = (
            len(blueprint.job.sources) - 1,
            max([self.hosting.n_hosts - 1, *(h for h in self._kits if h < SCALED)]) + 1,
        )
        before, self.blueprint = (
            self.blueprint,
            blueprint.with_loaders((*self.hosting.loaders, blueprint.loaders_of(i)), SIDE_BY_SIDE),
        )
        try:
            self._start_loader_host(h, [i], self.blueprint.openings(i, Cursor()), joined=False)
            self._control.get(self._control.call(self._loaders[h].handle, "do", []), START_S)
        except BaseException:
            self.blueprint = before
            self.drop_prepared(h)
            raise
        return h

    def drop_prepared(self, h: int) -> None:
        if (remote := self._loaders.pop(h, None)) is not None:
            remote.lost = "not needed"
            self._starter.end(h, remote.handle)

    def add_source(
        self,
        new: NewSource,
        prepared: int,
        budget_bytes: int,
        joined: Callable[[], None] = lambda: None,
    ) -> None:
        if (host := self._loaders[prepared]).lost:
            raise ActorLost(host.handle.name, host.lost)
        commands = self.planner.handle(new)
        self._note(new.event)
        host.joined = True
        self._link_again(
            host
        )  # a constructor host may have been started again since it was prepared
        self._supervisor.handle(WorkerReady(host.handle.name), self._machine.now())
        n = new.source.loaders
        self._cutter.add_loaders([prepared] * n)
        self.hosting = replace(
            self.hosting,
            loaders=(*self.hosting.loaders, n),
            host_of=(*self.hosting.host_of, *[prepared] * n),
            n_hosts=len(self._loaders),
        )
        for remote in list(self._loaders.values()):
            remote.out.append(("budget", budget_bytes))
        joined()
        if self.blueprint.options.shadows == "all":
            log.warning(
                "source %r has no stand-by: no other host than its own can open it", new.source.name
            )
        self.run(commands)

    def move(self, source: int, hosts: Sequence[str]) -> None:
        """Read a source elsewhere: its k-th loader on ``hosts[k % len(hosts)]``. The stream stays
        what it is.
        """
        known = {
            remote.handle.name: h for h, remote in list(self._loaders.items()) if not remote.lost
        }
        if unknown := [name for name in hosts if name not in known]:
            raise JobError(
                [
                    f"no loader host is called {name!r}; there are {', '.join(known)}"
                    for name in unknown
                ],
                "move",
            )
        name = self.blueprint.job.names[source]
        if strangers := [host for host in hosts if source not in self._kits.get(known[host], ())]:
            problem = (
                f"{name!r} joined after {strangers[0]} was started, and code crosses only "
                "when a process starts"
            )
            raise JobError([problem], "move")
        if of_kind(self.blueprint.job.hooks, LOADER) and len(set(hosts)) > 1:
            raise JobError(
                [
                    f"a loader hook is shown all that a step takes from {name!r}: its "
                    "loaders stay on one host"
                ],
                "move",
            )
        first = sum(self.hosting.loaders[:source])
        self._moves |= {
            first + k: known[hosts[k % len(hosts)]] for k in range(self.hosting.loaders[source])
        }
        self.run(self.planner.handle(RestartSource(source)))

    def _open(self, command: RestartLoader) -> None:
        loader, host = (
            command.loader,
            self._moves.pop(command.loader, self._cutter.host(command.loader)),
        )
        if host != self._cutter.host(loader):
            self._loaders[self._cutter.host(loader)].out.append(("drop", loader))
            self._cutter.move(loader, host)
        source = self._source(loader)
        opening = self.blueprint.openings(source, command.cursor)[
            loader - sum(self.hosting.loaders[:source])
        ]
        opening = replace(opening, generation=command.generation)
        # What it holds stays, unless samples were passed over: those are gone with what was held of
        # them.
        afresh = self.planner.holds_over or not self.fails_over
        self._loaders[host].out.append(opening if afresh else ("stand", command.step, opening))
        if self._shadows.where.get(loader) == host:  # it moved to where it was followed
            self._shadows.drop(loader)
            self._follow_from_here([other for other in self._fill_shadows() if other != loader])
        self._follow({loader: opening})
