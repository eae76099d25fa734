"""``ProcessHost`` where the planner has a process of its own: hosts are asked for by name, and
those that live are taken over.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from overlord.cluster.coordinator import ProcessHost
from overlord.cluster.coordinator_config import CoordinatorConfig
from overlord.cluster.plan_history import PlanHistory
from overlord.cluster.rebalance import PER_PLANNER
from overlord.cluster.recovery import START_S
from overlord.cluster.source_moves import SCALED
from overlord.cluster.status import WorkerHandle
from overlord.cluster.supervisor import Retired
from overlord.concurrency.event_loop import EventLoop
from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, DataStall, OverlordError
from overlord.journal.replay import Recovered
from overlord.messages.control import Attach, Consumed, Detach, LoaderStart, StreamState
from overlord.planning.schedule.base import learns
from overlord.rpc.actors import ActorHandle
from overlord.rpc.peers import RpcServer
from overlord.scaling.loader_placement import LoaderPlacement
from overlord.setup.prepared_job import PreparedJob

TAKEN_S = (
    5.0  # for a constructor host to say what its clients took; else only what is written counts
)
TRIES = 3  # of taking over a host: it may die meanwhile
AWAITED_S = 1.0  # after which people are told who of those that live is waited for
ANSWERS = {
    "constructor-host": "address",
    "loader-host": "figures",
}  # what a host is asked when it is taken over
PLANNERS = 2**40  # generations between two planners: each may go back a million times


class RemoteWorkerFactory:
    """The starter of a planner elsewhere: hosts are asked for by name and number, and come by
    themselves.
    """

    def __init__(
        self, peers: RpcServer, say: Callable[..., None], hosting: LoaderPlacement, token: str
    ):
        self.hosting, self.token = hosting, token
        self._peers, self._say = peers, say

    def constructor(self, c: int) -> ActorHandle:
        handle, ticket = self._peers.expect(f"constructor-host/{c}")
        self._say("constructor", ticket, c)
        return handle

    def loader_host(
        self,
        h: int,
        sources: Collection[int],
        openings: Sequence[LoaderStart],
        constructors: Mapping[int, str],
        instead_of: int | None = None,
    ) -> ActorHandle:
        handle, ticket = self._peers.expect(f"loader-host/{h}")
        self._say(
            "loader-host",
            ticket,
            h,
            sorted(sources),
            list(openings),
            dict(constructors),
            instead_of,
        )
        return handle

    def end(self, h: int, handle: ActorHandle) -> None:
        self._say("ended", h)

    def living(self, name: str) -> ActorHandle:
        """One that was started for another planner, or before this one wanted it."""
        handle, ticket = self._peers.expect(name)
        self._say("meet", ticket, name)
        return handle


def behind(found: Recovered, taken: Sequence[int | None]) -> int:
    """The last step that every rank took: as it is written, or further, where all are known to have
    gone on since. What is written is of the ranks of this launch, since no other has opened the
    journal after it.
    """
    known = [step for step in taken if step is not None]
    return max(found.acked, min(known)) if known and len(known) == len(taken) else found.acked


class PlannerHost(ProcessHost):
    """The host of a planner elsewhere. ``found``: what the journal says, for one that comes in the
    place of another; ``say``: what it waits for then, whom it gave up, and that it asks for all
    that was reported until now (``all_reported`` answers).
    """

    def __init__(
        self,
        kit: CoordinatorConfig,
        peers: RpcServer,
        pump: EventLoop,
        starter: RemoteWorkerFactory,
        found: Recovered | None = None,
        machine: Platform | None = None,
        *,
        say: Callable[..., None],
    ):
        self._say_word = say
        self._kit, self._asking, self._found, self._clock = (
            kit,
            starter,
            found,
            machine or Platform(),
        )
        self._handles: dict[str, ActorHandle] = {}
        self._answers: dict[str, Any] = {}  # of hosts that live
        self._listed: tuple[Any, int, int] = (
            None,
            0,
            0,
        )  # of which planner, and how many of its quarantined and spoiled rows were told
        self._recovered = 0
        self.stood: StreamState | None = (
            None  # behind the last step that all took, as it was when that was planned
        )
        self.stands: dict[
            int, int
        ] = {}  # the last step that each rank took, of those that could be asked
        self._had: dict[int, set[int]] = {}  # loaders of a loader host that was taken over
        self._aside: dict[
            int, WorkerHandle
        ] = {}  # hosts of sources that were refused, and may be asked for again at a later step
        self._learns = learns(kit.blueprint.job.mixture)
        self._unsure: list[
            Consumed
        ] = []  # taken, and what was reported before that is perhaps still on its way
        self._asked_of, self._mark = (
            0,
            kit.incarnation * PLANNERS,
        )  # how many of them it was asked for last, and how that is known
        state, blueprint = kit.state, kit.blueprint
        if found is not None:
            self._handles = {name: starter.living(name) for name in kit.living}
            self._ask_living(peers)
            if not found.empty:
                since = self._taken_since(peers)
                self.stands = {
                    r: step
                    for r, step in zip(kit.attached, since, strict=True)
                    if step is not None and step >= 0
                }
                stands_at = behind(found, [] if self._learns else since)
                state, self.stood = found.state(stands_at), found.bare(stands_at)
                if self._learns:
                    self._unsure = [Consumed(r, step) for r, step in self.stands.items()]
                blueprint = blueprint.first(len(found.names), found.fingerprint).floored(
                    found.next_step
                )  # type: ignore[assignment]
            starter.hosting = kit.hosting_of(len(blueprint.specs))
        super().__init__(blueprint, state, peers, pump, kit.session, machine, starter)
        self._told_hosts = self._cutter.hosts()

    @property
    def attached(self) -> frozenset[int]:
        return frozenset(self._attached)

    # taking over

    def _ask_living(self, peers: RpcServer) -> None:
        """All at the same time: those that answer nothing for as long as a part may be silent are
        given up together.
        """
        asked = {
            name: peers.call(handle, ANSWERS[name.partition("/")[0]])
            for name, handle in self._handles.items()
        }
        begun, lost_after_s = self._clock.now(), self._kit.blueprint.options.lost_after_s
        for until_s in sorted({min(AWAITED_S, lost_after_s / 2), lost_after_s}):
            for name in [name for name in asked if name not in self._answers]:
                try:
                    self._answers[name] = self._answer_by(peers, name, asked[name], begun + until_s)
                except DataStall:
                    continue
                except OverlordError:  # it died meanwhile, or cannot say what it has
                    del asked[name]
            self._say_word("awaits", [name for name in asked if name not in self._answers])
        silent = {
            name: self._handles.pop(name)
            for name in list(self._handles)
            if name not in self._answers
        }
        for name in [name for name in silent if name in asked]:
            self._say_word("gave up", name, f"it answered nothing for {lost_after_s:g} s")
        with contextlib.suppress(
            OverlordError
        ):  # a name is not free before its process is gone: who starts another says so
            peers.kill_all([handle for handle in silent.values() if handle.alive])
        self._say_word("awaits", [])

    def _answer_by(self, peers: RpcServer, name: str, future: Future[Any], deadline: float) -> Any:
        """A host whose pump is busy may say so before its time is over."""
        while True:
            try:
                return peers.get(future, max(0.0, deadline - self._clock.now()))
            except DataStall:
                if self._clock.now() >= deadline or not future.done():
                    raise
                future = peers.call(self._handles[name], ANSWERS[name.partition("/")[0]])

    def _taken_since(self, peers: RpcServer) -> list[int | None]:
        """The last step that each attached rank took, as its constructor host says; None where that
        cannot be asked.
        """
        buckets = {
            rank: b
            for b, ranks in enumerate(self._kit.blueprint.job.place.buckets("DP"))
            for rank in ranks
        }
        asked = []
        for rank in self._kit.attached:
            handle = self._handles.get(
                f"constructor-host/{self._kit.constructor_of[buckets[rank]]}"
            )
            asked.append(None if handle is None else peers.call(handle, "taken", rank))
        found: list[int | None] = []
        deadline = self._clock.now() + min(TAKEN_S, self._kit.blueprint.options.lost_after_s)
        for future in asked:
            try:
                found.append(
                    None
                    if future is None
                    else int(peers.get(future, max(0.0, deadline - self._clock.now())))
                )
            except OverlordError:
                found.append(None)
        return found

    def _spawn(self) -> None:
        if self._found is None:
            super()._spawn()
            return
        self._kits = {h: frozenset(sources) for h, sources in self._kit.kits}
        cs = range(int(self._constructor_of.max()) + 1)
        found = self._have(
            {f"constructor-host/{c}": lambda c=c: self._asking.constructor(c) for c in cs}  # type: ignore[misc]
        )
        for c, (remote, address) in zip(cs, found.values(), strict=True):
            self._constructors[c], self._addresses[c] = remote, address
        for h in list(self._kits):
            if self._is_spare(h):
                del self._kits[h]
                self._say_word("ended", h)
        hs = {
            h: (h, sources, (), self._addresses)
            for h, sources in sorted(self._kits.items())
            if min(sources) < len(self.hosting.loaders)
        }
        found = self._have(
            {
                f"loader-host/{h}": lambda args=args: self._asking.loader_host(*args)  # type: ignore[misc]
                for h, args in hs.items()
            }
        )
        for h, (remote, figures) in zip(hs, found.values(), strict=True):
            self._loaders[h], self._had[h] = remote, {row["loader"] for row in figures["loaders"]}
            remote.node = figures["node"]
        for loader in (
            k for k, h in enumerate(self._cutter.hosts().tolist()) if h not in self._loaders
        ):  # it ended, and nobody was told
            self._cutter.move(
                loader, min(h for h in self._loaders if self._source(loader) in self._kits[h])
            )
        self.past = PlanHistory(
            self.planner.state(), self.blueprint.job.feedback_lag, self._found.planned
        )
        self._base = self._kit.incarnation * PLANNERS
        self._plan_spreading(SCALED + self._kit.incarnation * PER_PLANNER)
        for rank in self._kit.attached:
            self._attached.add(rank)
            self._served[self._bucket_of[rank]] += 1
            self.planner.handle(
                Attach(rank)
            )  # what it would do is not done: this planner only stands for the one that was lost

    def _is_spare(self, h: int) -> bool:
        """It was to read a source beside others, has nothing yet, and is not there: perhaps it
        could not be started. One that took the place of others stays: nobody else can open what
        they had, though it may not be known yet that it has it.
        """
        others = {
            source for other, sources in self._kits.items() if other != h for source in sources
        }
        there = f"loader-host/{h}" in self._handles or h in self._cutter.hosts()
        return h >= SCALED and not there and others.issuperset(self._kits[h])

    def _have(
        self, starts: Mapping[str, Callable[[], ActorHandle]]
    ) -> dict[str, tuple[WorkerHandle, Any]]:
        """Hosts of a kind, by name, and their answers: those that live, and others for the rest,
        which are started together.
        """
        found = {
            name: (self._watched(self._handles.pop(name)), self._answers[name])
            for name in starts
            if name in self._handles
        }
        for left in reversed(range(TRIES)):
            remotes = {
                name: self._watched(start()) for name, start in starts.items() if name not in found
            }
            asked = {
                name: remote.call(self._control, ANSWERS[name.partition("/")[0]])
                for name, remote in remotes.items()
            }
            deadline = self._clock.now() + START_S
            for name, remote in remotes.items():
                try:
                    found[name] = (
                        remote,
                        self._control.get(asked[name], max(0.0, deadline - self._clock.now())),
                    )
                except (ActorLost, DataStall) as fault:
                    if not left or (isinstance(fault, ActorLost) and fault.name != name):
                        raise
                    remote.lost = fault.reason if isinstance(fault, ActorLost) else str(fault)
                    if remote.handle.alive:
                        self._kill(remote.handle)
        return {name: found[name] for name in starts}

    def take_over(self) -> None:
        """All hosts are there: they go back with this planner. Who takes part may not be what they
        were told last.
        """
        every = set(self._bucket_of)
        for rank in sorted(every):
            self._constructor(rank).out.append(
                Attach(rank) if rank in self._attached else Detach(rank)
            )
        for report in self._kit.reports:  # written with the plan that comes next, if one came
            if self.planner.in_time(report):  # else a plan that is written has used it
                self.event(report)
        self.go_back(self._kit.reason)
        for h, had in self._had.items():  # some moved since, or were followed there
            follows = {loader for loader, where in self._shadows.where.items() if where == h}
            self._loaders[h].out += [
                ("drop", loader) for loader in sorted(had - {*self._loaders_on(h)} - follows)
            ]
        self._leave_idle(h for h in self._loaders if h >= SCALED)
        self._ask_for_reports()
        self.run()

    # What trainers report comes by way of the launching process, what they took straight from
    # constructor hosts. A step counts as taken
    # when all that was reported before it is here: else a plan could be made without a report that
    # was said in time.

    def _count(self, taken: list[Consumed]) -> None:
        if not self._learns:
            super()._count(taken)
        elif taken:
            self._unsure += taken
            self._ask_for_reports()

    def _ask_for_reports(self) -> None:
        if self._unsure and not self._asked_of:
            self._asked_of, self._mark = len(self._unsure), self._mark + 1
            self._say_word("reports", self._mark)

    def all_reported(self, mark: int) -> None:
        """In the pump: what was on its way when it was asked for has come."""
        if mark != self._mark or not self._asked_of:
            return  # asked by a planner before this one
        sure, self._unsure, self._asked_of = (
            self._unsure[: self._asked_of],
            self._unsure[self._asked_of :],
            0,
        )
        self._ask_for_reports()
        super()._count([c for c in sure if c.rank in self._attached])
        self.run()
        self._was_taken()  # of the last steps no plan says so

    # a source that joins

    def adopt_source(self, blueprint: PreparedJob, h: int) -> None:
        self.blueprint = blueprint
        self._kits[h] = frozenset([len(blueprint.job.sources) - 1])
        name = f"loader-host/{h}"
        if (remote := self._aside.pop(h, None)) is None:
            remote = self._watched(
                self._handles.pop(name) if name in self._handles else self._asking.living(name),
                joined=False,
            )
        self._loaders[h] = remote
        self._link_again(remote)  # a constructor host may be another since it was started

    def give_back_source(self, blueprint: PreparedJob, h: int) -> None:
        """The planner has refused it, and nothing has changed."""
        self.blueprint = blueprint
        self._kits.pop(h)
        self._aside[h] = self._loaders.pop(h)

    def leave_source(self, h: int) -> None:
        """It has joined, and that could not be written: the job is about to end, and whoever
        prepared its host ends that.
        """
        remote = self._loaders[h]
        remote.lost = "its source could not join"
        self._supervisor.handle(Retired(remote.handle.name), self._machine.now())

    # what the launching process keeps, since it would be lost with this one

    def news(self) -> Iterator[tuple[Any, ...]]:
        ledger = self.planner.ledger
        of, bad, spoiled = self._listed if self._listed[0] is ledger else (ledger, 0, 0)
        if len(ledger.quarantine) > bad or len(ledger.spoiled) > spoiled:
            rows = list(itertools.islice(ledger.quarantine, bad, None))
            late = [row for _, row in itertools.islice(ledger.spoiled, spoiled, None)]
            yield ("bad", rows, late)
        self._listed = (of, len(ledger.quarantine), len(ledger.spoiled))
        if len(self.recoveries) > self._recovered:
            yield from (("recovered", row) for row in self.recoveries[self._recovered :])
            self._recovered = len(self.recoveries)
        if not np.array_equal(hosts := self._cutter.hosts(), self._told_hosts):
            self._told_hosts = hosts
            yield ("hosting", hosts.tolist())
