"""The launching process of a simulated job, and the coordinator's, which is started again where
there is a journal to come back from.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from overlord.cluster.constructor_worker import ConstructorWorker
from overlord.cluster.coordinator import Coordinator
from overlord.cluster.coordinator_actor import CoordinatorActor
from overlord.cluster.coordinator_config import CoordinatorConfig
from overlord.cluster.job_sources import PlannerJob
from overlord.cluster.takeover import Takeover, first_coordinator
from overlord.cluster.worker import EventQueue
from overlord.cluster.worker_factory import (
    WorkerFactory,
    constructors_of,
    read_ahead_of,
    settings_of,
)
from overlord.concurrency.event_loop import EventLoop
from overlord.errors import ActorLost, DataStall, OverlordError
from overlord.journal.job_journal import JobJournal
from overlord.journal.replay import Recovered
from overlord.journal.write_ahead import JournalStart
from overlord.messages.control import LoaderStart, Report, SetMixture, Skip, StreamState
from overlord.messages.data import checked_report
from overlord.planning.mixture import EventLog
from overlord.planning.registrations import Registrations
from overlord.rpc.actors import ActorHandle
from overlord.rpc.peers import RpcServer
from overlord.setup.prepared_job import PreparedJob
from tests.internals import resume_by_journal
from tests.simulation.world.control import START_S, Family, SimControl
from tests.simulation.world.disk import SimDisk, writer_of
from tests.simulation.world.layout import placement_of
from tests.simulation.world.people import Elsewhere, Errand, Hand
from tests.simulation.world.virtual import SimMachine
from tests.simulation.world.world import Killed, Process

if TYPE_CHECKING:
    from tests.simulation.world.cluster import Cluster

log = logging.getLogger("overlord")


class Living:
    """Starts workers for a coordinator, and finds those that live for its successor.

    ``kits``: what loader workers can open, for the coordinator that comes next.
    """

    placement = None  # nodes are not simulated

    def __init__(
        self, factory: WorkerFactory, control: SimControl, kits: dict[int, tuple[int, ...]]
    ):
        self._factory, self._control, self._kits = factory, control, kits
        self.loader_placement, self.token = factory.loader_placement, factory.token

    def constructor(self, c: int) -> ActorHandle:
        return self._factory.constructor(c)

    def loader_worker(
        self,
        h: int,
        sources: Collection[int],
        openings: Sequence[LoaderStart],
        constructors: Mapping[int, str],
        instead_of: int | None = None,
    ) -> ActorHandle:
        self._kits.setdefault(h, tuple(sources))
        return self._factory.loader_worker(h, sources, openings, constructors, instead_of)

    def end(self, h: int, handle: ActorHandle) -> None:
        self._kits.pop(h, None)
        self._factory.end(h, handle)

    def living(self, name: str) -> ActorHandle:
        return self._control.adopt(name)


class Launched:
    """A session: everything from one launch, or one move to a state, to the next."""

    def __init__(
        self, cluster: Cluster, state: StreamState | None, session: int, *, anew: bool = False
    ):
        self.cluster, self.session = cluster, session
        self.world = cluster.world
        self.process = self.world.start("session")
        self.family = Family(self.process)
        self.log = EventLog(cluster.blueprint.job.feedback_lag)
        self.said: dict[tuple[int, int], Report] = {}
        self._errands: deque[Errand] = deque()  # of the session's event loop, one after the other
        self.event_numbers = itertools.count(1)
        self.n_reports = 0  # that trainers sent
        self.incarnation, self.over = -1, False
        self.blueprint, self.hosting = cluster.blueprint, placement_of(cluster.scenario)
        self.kits = {
            h: tuple(range(len(cluster.blueprint.job.sources))) for h in range(self.hosting.n_hosts)
        }
        self.constructor_of = constructors_of(cluster.blueprint)
        self._bucket_of = {
            rank: b
            for b, ranks in enumerate(cluster.blueprint.job.place.buckets("DP"))
            for rank in ranks
        }
        self.token = secrets.token_urlsafe(24)
        self._given = self._initial = state
        self._anew, self.told = anew, False
        self._launch = ""  # as its journal knows it, once its first planner has opened that
        self.planner = self.process
        self.host: Coordinator | None = None
        self.begun = (
            False  # the first planner is there: whoever launches it has the session in hand
        )
        self._hand: Hand | None = None
        self._elsewhere = Elsewhere(self) if cluster.scenario.sayings else None
        self.start_planner()

    def again(self) -> Launched:
        """The same launch once more."""
        other = Launched(self.cluster, self._given, self.session, anew=self._anew)
        other.told, other.said, other.log = self.told, self.said, self.log
        other.n_reports = self.n_reports
        return other

    # the coordinator

    def start_planner(self, reason: str = "") -> None:
        self.incarnation += 1
        world, net = self.world, self.cluster.net
        self.planner = world.start("planner")
        self.process.on_end.append(self.planner.kill)
        planner, incarnation = self.planner, self.incarnation
        if self.cluster.disk is not None:
            self.planner.on_end.append(
                lambda: world.at(
                    world.delay(0.002), lambda: self._missed(planner, incarnation), self.process
                )
            )
        if self._elsewhere is not None:
            self._elsewhere.starts(self.planner)
        self.machine = SimMachine(world, net, self.planner)
        self.pump = self.machine.event_loop("planner")
        self.control = SimControl(world, net, self.planner, self.family)
        self.control.outlive, self.control.births = (
            self.cluster.scenario.outlives,
            self.cluster.births,
        )
        births = self.cluster.births.get("planner")
        world.spawn(
            self.planner,
            lambda: self._begin(reason),
            births.popleft().befalls(self.planner, START_S) if births else 0.0,
        )

    def _missed(self, planner: Process, incarnation: int) -> None:
        """The planner is gone: another takes its place, with the workers that live."""
        if not self.over and incarnation == self.incarnation and self.cluster.launched is self:
            if not incarnation and self.host is None:
                self.cluster.not_launched(
                    self, ActorLost("planner", "it died before the job had begun")
                )
                return
            log.warning("the planner is lost; it is started again")
            self.host = None
            self.start_planner("the planner was lost")

    def give_up_planner(self, planner: Process) -> None:
        """It does not answer: it is killed, or, where that does not reach it, lives on and is not
        heard any more.
        """
        if planner is not self.planner or not planner.alive or self.over:
            return
        if self.cluster.scenario.outlives and (planner.stopped or planner in self.cluster.net.cut):
            self._missed(planner, self.incarnation)
        else:
            planner.kill()

    def _begin(self, reason: str) -> None:
        incarnation, pump = self.incarnation, self.pump
        try:
            host = self._make_host(reason)
        except OverlordError as error:
            if incarnation == self.incarnation:
                self.cluster.not_launched(self, error)
            return
        if incarnation != self.incarnation:
            return  # it was given up meanwhile
        self.host, self.begun = host, True
        if self._elsewhere is None:
            pump.start(self.cluster.broke)
        else:
            events = EventQueue(self.machine.now)
            actor = CoordinatorActor(
                self.kit, events=events, event_loop=pump, rpc=cast(RpcServer, self.control)
            )
            actor.serve(host)
            self._elsewhere.is_there(actor)
            pump.start(self.cluster.broke, events.answer)
        if not self.incarnation:
            pump.post(lambda: host.attach(self.cluster.ranks))
        self.cluster.people.look()

    def _make_host(self, reason: str) -> Coordinator:
        cluster = self.cluster
        if cluster.disk is None:
            given = self._given_to_planner(self._initial, reason, self.blueprint)
            return first_coordinator(*given, self.machine)  # type: ignore[arg-type]
        journal, found = self._open_journal(cluster.disk)
        if self.incarnation:
            given = self._given_to_planner(self._initial, reason, self.blueprint)
            takeover = Takeover(*given, found, self.machine, send=lambda message: None)  # type: ignore[arg-type]
            host = takeover.coordinator
            host.journal = journal
            if not found.empty:
                journal.write_start(host.planner.state(), host.prepared)
            else:
                _begin_journal(host, JournalStart(journal, anew=self._anew))
            return takeover.roll_back()
        blueprint, state, beginning = (
            self.blueprint,
            self._initial,
            JournalStart(journal, anew=self._anew and not found.empty),
        )
        if not self._anew and not found.empty:
            blueprint, state, beginning = resume_by_journal(self.blueprint, journal, found, ())
            self._initial, self.blueprint = state, blueprint
            assert state is not None
            cluster.resumed(self, state)
        given = self._given_to_planner(state, reason, blueprint.with_floor(beginning.floor))
        host = first_coordinator(*given, self.machine)  # type: ignore[arg-type]
        _begin_journal(host, beginning)
        host.journal = journal
        return host

    def _open_journal(self, disk: SimDisk) -> tuple[JobJournal, Recovered]:
        journal, found = JobJournal.resumed(
            disk.place(self.planner),
            self.blueprint.job.name,
            launch=self._launch,
            make_writer=writer_of(self.planner),
        )
        self._launch = journal.launch
        journal.start(self.pump.post)
        return journal, found

    def _given_to_planner(
        self, state: StreamState | None, reason: str, blueprint: PreparedJob
    ) -> tuple[CoordinatorConfig, SimControl, EventLoop, Living]:
        blueprint = blueprint.with_loaders(self.hosting.loaders, read_ahead_of(self.hosting))
        settings = settings_of(blueprint, self.hosting, self.token, self.session)
        factory = WorkerFactory(
            self.control, lambda: blueprint, settings, self.hosting, self.constructor_of
        )
        starter = Living(factory, self.control, self.kits)
        self.kit = CoordinatorConfig(
            prepared=PlannerJob(blueprint),
            registered=Registrations.here(),
            state=state,
            loader_placement=self.hosting,
            token=self.token,
            session=self.session,
            incarnation=self.incarnation,
            reason=reason,
            constructor_of=tuple(self.constructor_of),
            living=tuple(self.family.living()),
            sources_of=tuple(self.kits.items()),
            attached=tuple(self.cluster.ranks) if self.incarnation else (),
            machine=self.machine,
        )
        return self.kit, self.control, self.pump, starter

    # what trainers ask

    def address_for(self, rank: int) -> tuple[str, str]:
        """Where a rank's steps come from, known to whoever started the constructors, planner or
        not.
        """
        if not self.process.alive:
            raise ActorLost("the session", "nobody answers at the front door")
        name = f"constructor-worker/{self.constructor_of[self._bucket_of[rank]]}"
        actor = self.family.actor(name)
        if not isinstance(actor, ConstructorWorker):
            raise DataStall(f"{name} to be started", 0.0)
        return actor.address(), self.token

    def report(self, rank: int, step: int) -> Report:
        """What a trainer reports of a step: it is in the states that are saved from now on."""
        report = checked_report(rank, step, self.cluster.scenario.report(rank, step), step + 1)
        self.said[report.step, report.rank] = report
        return report

    def counted_twice(self) -> str:
        """What the coordinator has applied more often than it was sent; empty if nothing."""
        if (host := self.host) is None:
            return ""
        changes = [e for e in host.planner.state().events if isinstance(e, (SetMixture, Skip))]
        asked = self.cluster.people.asked  # a script may say the same twice, and means it
        if twice := [e for e in changes if changes.count(e) > asked.count(e)]:
            return f"{twice[0]}"
        if (received := host.planner.feedback["received"]) > self.n_reports:
            return f"{received} reports were received, and {self.n_reports} were sent"
        return ""

    # People speak by the event loop of this process: the next event when the one before it is
    # answered, by this planner or the next.

    def _send(self, errand: Errand) -> None:
        self._errands.append(errand)
        if len(self._errands) == 1:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._errands:
            errand = self._errands[0]
            self.world.spawn(self.process, lambda: self._run(errand))

    def _run(self, errand: Errand) -> None:
        errand.work()
        self._errands.popleft()
        self._pass_on()

    def say(
        self, event: SetMixture | Skip, answered: Callable[[OverlordError | None], None]
    ) -> None:
        """Of whoever has the session in hand, and waits: in the turn of its event loop."""
        assert self._elsewhere is not None
        hand = self._hand = self._hand or Hand(self, self._elsewhere)

        def work() -> None:
            try:
                hand.say(event)
            except OverlordError as error:
                answered(error)
            else:
                answered(None)

        self._send(Errand(work))

    def detach(self, rank: int) -> None:
        if (host := self.host) is not None:
            self.pump.post(lambda: host.detach(rank))

    def end(self, *, killed: bool = False) -> None:
        """The session is closed, or everything is killed at once."""
        self.over = True
        if not killed and self.host is not None:
            self.host.close()
            taken = self.host.planner.taken
            with contextlib.suppress(
                Killed
            ):  # a last write that is torn ends the coordinator, which was to end anyway
                self.host.journal.close(-1 if taken is None else taken)
        self.process.kill()


def _begin_journal(host: Coordinator, start: JournalStart) -> None:
    try:
        start.append(host.planner.state(), host.prepared)
    except BaseException:
        host.close()
        raise
