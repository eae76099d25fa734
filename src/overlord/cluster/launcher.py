"""The launcher: starts and ends all processes of a job whose coordinator has its own process.

It starts another coordinator when one is lost. It does not decide which workers are needed: the
coordinator requests them, and calls them directly.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from overlord.cluster.coordinator_actor import WRITTEN, CoordinatorActor
from overlord.cluster.coordinator_config import CoordinatorConfig
from overlord.cluster.node_placement import watch
from overlord.cluster.startup_watchdog import StartupWatchdog
from overlord.cluster.supervisor import worn_out
from overlord.cluster.worker_factory import (
    WorkerFactory,
    constructors_of,
    read_ahead_of,
    settings_of,
)
from overlord.concurrency.platform import Platform
from overlord.concurrency.thread_queue import ThreadQueue
from overlord.errors import ActorLost, DataStall, JournalError, JournalTaken, OverlordError
from overlord.messages.control import (
    CoordinatorFailed,
    JobFailed,
    KillProcess,
    PlacementChanged,
    RedirectWorker,
    Report,
    RetireWorker,
    SessionEvent,
    StartConstructorWorker,
    StartLoaderWorker,
    StepProgress,
    StreamState,
    WaitingForWorkers,
    WorkerDisconnected,
    WorkerGivenUp,
    WorkerRecovered,
)
from overlord.process.shutdown import CloseOnce
from overlord.rpc.actors import ActorHandle, ActorSystem
from overlord.rpc.peers import fault_of
from overlord.setup.partition import hosting_of, scales
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")

PLANNER = "planner"
START_S = 120.0  # for workers to start: they open their sources first, and a store may be slow
BOOT_S = 30.0  # for the coordinator's process alone
# for the coordinator to answer, though it may be restarted meanwhile; a caller of the event loop
# waits for 30 s
ASK_S = 25.0
CUT_S = 1.0  # between the end of a worker's connection and the report of its death
# within which a coordinator must answer: one that sleeps with the whole machine is not lost
TICKS = 4
LEAVE_S = 1.0
AT_S = 0.5  # for a blocked coordinator to report where it is
LOST = "the planner was lost: "


class Launcher:
    """All processes of a job by name.

    ``told`` receives the coordinator's events for the session, on a thread of this class.
    """

    def __init__(
        self,
        blueprint: PreparedJob,
        generation: int,
        told: Callable[[SessionEvent], None],
        control: ActorSystem,
        machine: Platform,
    ):
        self.hosting = hosting_of(blueprint)
        self.blueprint = blueprint.with_loaders(
            self.hosting.loaders, read_ahead_of(self.hosting, scales(blueprint))
        )
        self.token = secrets.token_urlsafe(24)
        self.control, self._machine = control, machine
        self.constructor_of = np.array(constructors_of(blueprint))
        settings = settings_of(blueprint, self.hosting, self.token, generation, machine)
        self.recipes = WorkerFactory(
            self.control,
            lambda: self.blueprint,
            settings,
            self.hosting,
            self.constructor_of.tolist(),
        )
        self.hosts: dict[str, ActorHandle] = {}
        self.attached: set[int] = set()
        # the ranks that the present coordinator was given at its start
        self._takes_part: frozenset[int] = frozenset()
        self.kits = {
            h: tuple(range(len(blueprint.job.sources))) for h in range(self.hosting.n_hosts)
        }
        self.next_host = self.hosting.n_hosts  # a number is used once
        self.acked = self._progress = -1  # the last step that all ranks took; as reported
        self.planner: ActorHandle | None = None  # the present one; it may be starting
        self._beating: ActorHandle | None = None
        self.watched = False
        self.reports: dict[tuple[int, int], Report] = {}  # accepted lately, by step and rank
        self._session, self._told = generation, told
        self._incarnation = self._restarts = 0
        self._reason = ""
        self._ended_for: tuple[ActorHandle | None, str] = (None, "")
        # for a coordinator whose predecessor died before it wrote anything
        self._initial: StreamState | None = None
        self._launch = ""  # of the journal
        self._opened = False  # the journal has the start of this session
        self._tickets: dict[str, int] = {}  # leases of workers with the present coordinator
        self._lock = threading.Condition()  # guards the handles and ``_ready``
        # held while a worker starts: the next coordinator is given every worker of the last one
        self._spawning = threading.RLock()
        # workers of new sources while they start: no coordinator uses them yet
        self.preparing: set[str] = set()
        self._ready = self._closed = False
        self.absent = ""  # why the coordinator cannot be called, human-readable
        self._written: dict[ActorHandle, list[float]] = {}  # journal counts of each coordinator
        # lost workers with reason and time, until a coordinator reports that they are back
        self._missed: dict[str, tuple[str, float]] = {}
        self._over: Exception | None = None
        # separate queues: notifications may block on session locks, starts of workers must not
        self._work, self._news = ThreadQueue(1, "parts"), ThreadQueue(1, "planner-news")
        self._stop, self._ending = threading.Event(), CloseOnce()
        self._stop_reviews: Callable[[], None] = lambda: None
        self._starts = StartupWatchdog(self.control, blueprint.options.lost_after_s)

    # the coordinator

    def begin(self, state: StreamState | None) -> None:
        """Start the first coordinator and all workers that it requests."""
        self._initial = state
        self._start_planner()
        self._is_ready()
        threading.Thread(target=self._beats, name="overlord-planner-beats", daemon=True).start()
        self._stop_reviews = watch(
            self.recipes.placement, self._machine, self.control, self._relocate
        )

    def _start_planner(self) -> int:
        """Start a coordinator and return the last step before its start."""
        with self._spawning, self._lock:
            there = [
                name
                for name, handle in self.hosts.items()
                if handle.alive and name not in self.preparing
            ]
            living = tuple(there) if self._incarnation else ()
            kit = CoordinatorConfig.of(
                self.blueprint,
                state=self._initial,
                hosting=self.hosting,
                token=self.token,
                session=self._session,
                incarnation=self._incarnation,
                reason=self._reason,
                constructor_of=tuple(self.constructor_of.tolist()),
                living=living,
                kits=tuple(self.kits.items()),
                attached=tuple(sorted(self.attached)),
                opened=self._opened,
                watched=self.watched,
                reports=tuple(self.reports.values()),
                machine=self._machine,
                launch=self._launch,
            )
            self._tickets, self._takes_part = {}, frozenset(kit.attached)
            planner = self.planner = self.control.spawn(
                CoordinatorActor, kit, name=PLANNER, **self.recipes.placement.planner()
            )
        self.control.on_death(planner, self._planner_died)
        self._starts.watch(planner)
        self._where: tuple[str, str] = self.control.get(self.control.call(planner, "where"), BOOT_S)
        self._listen(planner)
        self._beating = planner
        behind: int = self.control.get(self.control.call(planner, "begin"), self._begin_s)
        return behind

    @property
    def _begin_s(self) -> float:
        """Seconds for a coordinator to start with all its workers.

        Some of them may have to be given up first, and others started.
        """
        return 2 * START_S + 2 * self.blueprint.options.lost_after_s

    def _is_ready(self) -> None:
        """Accept calls from now on; raise if the coordinator died during its start."""
        with self._lock:
            planner = self.planner
            assert planner is not None
            if planner.alive:
                self._ready, self.absent = True, ""
                self._lock.notify_all()
                self._say_who_takes_part()
                return
        self.control.get(
            self.control.call(planner, "beat"), BOOT_S
        )  # raises the reason of its death

    def _say_who_takes_part(self) -> None:
        """Send the ranks that were attached and detached while the coordinator started.

        Runs under the lock, before any other call: those clients may have stopped waiting.
        """
        now = frozenset(self.attached)
        for rank in sorted(self._takes_part - now):
            self.tell("detach", rank)
        if came := sorted(now - self._takes_part):
            self.tell("attach", came)

    def _planner_died(self, planner: ActorHandle, reason: str) -> None:
        """Restart a lost coordinator. Runs on: thread of the actor system."""
        with self._lock:
            if self._closed or planner is not self.planner or not self._ready:
                return  # the thread that starts a coordinator detects its death
            reason = self._why(planner, reason)
            self._ready, self.absent = (
                False,
                f"the planner, which is being started again ({reason})",
            )
        threading.Thread(
            target=self._start_again, args=(reason,), name="overlord-planner-again", daemon=True
        ).start()

    def _why(self, planner: ActorHandle | None, reason: str) -> str:
        """Return the reason of a loss; after a kill from here, the cause of the kill."""
        of, why = self._ended_for
        return why if of is planner else self._starts.why(PLANNER, reason)

    def _start_again(self, reason: str) -> None:
        # ``unopened``: the error of a journal that could not be opened, with which the job ends
        since, unopened = time.monotonic(), None
        while not self._closed:
            with self._lock:
                self._restarts += 1
                self._incarnation += 1
                if not self.blueprint.options.failover:
                    return self._give_up(ActorLost(PLANNER, reason))
                if self._restarts > (most := self.blueprint.options.max_restarts):
                    return self._give_up(
                        unopened or worn_out(ActorLost(PLANNER, reason), most, self._did())
                    )
            log.warning("the planner is lost: %s; restarting it", reason)
            try:
                self._reason = f"{LOST}{reason}"
                behind = self._start_planner()
                self._is_ready()
                return self._was_mended(reason, since, behind)
            except Exception as fault:
                reason, unopened = (
                    f"{type(fault).__name__}: {fault}",
                    fault if isinstance(fault, JournalError) else None,
                )
                if isinstance(fault, ActorLost) and fault.name == PLANNER:
                    reason = self._why(self.planner, fault.reason)
                self._end_planner()
                if isinstance(fault, JournalTaken):  # another launch has it for good
                    with self._lock:
                        return self._give_up(fault)
        return None

    def _was_mended(self, reason: str, since: float, behind: int) -> None:
        """Report the recovery of the coordinator and of workers that were lost with it.

        The new coordinator does not know that they were lost.
        """
        now = time.monotonic()
        there = [
            name for name in list(self._missed) if name in self.hosts and self.hosts[name].alive
        ]
        # a coordinator may have reported some of them already
        found = {name: self._missed.pop(name, None) for name in there}
        lost = {PLANNER: (reason, since)} | {
            name: missed for name, missed in found.items() if missed is not None
        }
        for part, (why, when) in lost.items():
            log.warning(
                "%s recovered after %.2f s%s",
                part,
                now - when,
                "" if part == PLANNER else f", with the planner; it was lost: {why}",
            )
            self._notify(WorkerRecovered(part, why, now - when, behind))

    def _miss(self, name: str, why: str, silent_s: float = 0.0) -> None:
        """Note the loss of a worker. Runs on: any thread.

        The first reason counts: a worker that is killed for its silence is lost since then.
        """
        if not self._closed and name in self.hosts:
            self._missed.setdefault(name, (why, time.monotonic() - silent_s))

    def _is_awaited(self, names: Sequence[str]) -> None:
        """Note the workers that a starting coordinator waits for."""
        with self._lock:
            if not self._ready:
                few = ", ".join(names[:8]) + (
                    f" and {len(names) - 8} more" if len(names) > 8 else ""
                )
                whom = f", and waits for {few} to answer" if names else ""
                self.absent = (
                    "the planner, which is being started again "
                    f"({self._reason.removeprefix(LOST)}){whom}"
                )

    def _did(self) -> str:
        return (
            f"all ranks took the steps up to {self.acked}"
            if self.acked >= 0
            else "no step was taken by all ranks"
        )

    def _end_planner(self) -> None:
        if self.planner is not None:
            with contextlib.suppress(OverlordError):
                self.control.kill(self.planner)

    def _give_up(self, error: Exception) -> None:
        """End the job without another coordinator. Runs under the lock."""
        log.error("%s", error)
        self._over, self.absent = error, str(error)
        self._lock.notify_all()
        self._notify(JobFailed(error))

    def _beats(self) -> None:
        """Kill a coordinator that does not answer or whose event loop is blocked.

        Its death is then handled like any other. A starting one is watched too, once its process
        runs.
        """
        lost_after_s = self.blueprint.options.lost_after_s
        still, answers, beat, of = 0, False, Future[Any](), self._beating
        beat.set_result(True)
        while not self._stop.wait(lost_after_s / TICKS):
            self._end_stopped()
            planner = self._beating
            moves = planner is not of or _moves(beat)
            # the last answer may be under way
            still, answers = (0, False) if moves else (still + 1, answers or beat.done())
            if still >= TICKS and planner is not None:
                for_s = f"for {lost_after_s:g} s"
                self._end_for(
                    planner,
                    self._stuck(planner, for_s) if answers else f"it answered nothing {for_s}",
                )
            if (planner is not of or beat.done()) and planner is not None:
                beat = self.control.call(planner, "beat")
            of = planner

    def _stuck(self, planner: ActorHandle, for_s: str) -> str:
        """Describe what a blocked event loop executes, if its process answers."""
        try:
            at = f": {self.control.get(self.control.call(planner, 'doing'), AT_S)}"
        except Exception:
            at = ""
        return f"it plans, and does not come to an end {for_s}{at}"

    def _end_stopped(self) -> None:
        for handle in self._starts.look():
            log.warning("%s killed: it was stopped during its start", handle.name)
            self.end(handle)

    def _end_for(self, planner: ActorHandle, why: str) -> None:
        log.warning("the planner is killed: %s", why)
        self._ended_for = (planner, why)
        with contextlib.suppress(OverlordError):
            self.control.kill(planner)

    # calls

    def ask(
        self,
        method: str,
        *args: Any,
        timeout_s: float = ASK_S,
        done: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Call the coordinator; after a loss, call its successor.

        ``done`` is called after a loss and returns whether the request was already executed.
        """
        deadline, lost = self._machine.now() + timeout_s, False
        while True:
            planner = self._wait_for_planner(deadline, timeout_s)
            if lost and done():
                return None
            try:
                return self.control.get(
                    self.control.call(planner, method, *args),
                    max(0.0, deadline - self._machine.now()),
                )
            except ActorLost as fault:
                if fault.name != PLANNER:
                    raise
                lost = True
                self._machine.sleep(0.005)  # its death is reported in a moment

    def open_journal(self, anew: bool, floor: int, launch: str) -> None:
        """Have the start of this session written, before any rank is attached.

        If the coordinator is lost before its answer arrives, its successor starts at the same state
        and writes it again. Nothing was planned meanwhile.
        """
        self._launch = launch
        while not self._opened:
            planner = self.planner
            self.ask("open_journal", anew, floor, launch, timeout_s=self._begin_s)
            with self._lock:
                self._opened = planner is self.planner

    def tell(self, method: str, *args: Any) -> None:
        """Send a call without an answer. It may be lost: a successor asks for its content."""
        if (planner := self.planner) is not None:
            with contextlib.suppress(ActorLost, DataStall):
                self.control.tell(planner, method, *args)

    def _relocate(self, hosts: list[int], accept: Callable[[], None]) -> None:
        """Ask the coordinator to replace loader workers; the next review asks a restarting one."""
        if (planner := self.planner) is None:
            return

        def answered(future: Future[bool]) -> None:
            if future.exception() is None and future.result():
                accept()

        with contextlib.suppress(ActorLost, DataStall):
            self.control.call(planner, "relocate", hosts).add_done_callback(answered)

    def _wait_for_planner(self, deadline: float, timeout_s: float) -> ActorHandle:
        with self._lock:
            self._lock.wait_for(
                lambda: self._ready or self._over or self._closed,
                max(0.0, deadline - self._machine.now()),
            )
            if self._closed:
                raise OverlordError("the session is closed")
            if self._over is not None:
                raise self._over
            if not self._ready or self.planner is None:
                raise DataStall(self.absent or "the planner", timeout_s)
            return self.planner

    @property
    def is_over(self) -> bool:
        """Whether no coordinator runs, and none will be started."""
        return self._over is not None

    def written_before(self) -> dict[str, float]:
        """Return the journal counts of lost coordinators, up to the last acknowledged step."""
        before = [
            counts for planner, counts in list(self._written.items()) if planner is not self.planner
        ]
        return {
            what: sum(column)
            for what, column in zip(WRITTEN, zip(*before, strict=True), strict=False)
        }

    # events of the coordinator

    def _listen(self, planner: ActorHandle) -> None:
        def heard(future: Future[Any]) -> None:
            if future.exception() is None and planner is self.planner:
                events = future.result()
                self._work.do(lambda: self._hear(planner, events))
                self._listen(planner)

        self.control.call(planner, "events").add_done_callback(heard)

    def _hear(self, planner: ActorHandle, events: Sequence[Any]) -> None:
        for event in events:
            if self._closed or planner is not self.planner:
                return
            try:
                self._do(planner, event)
            except Exception:
                log.exception("request of the planner failed: %.200r", event)

    def _do(self, planner: ActorHandle, event: Any) -> None:
        match event:
            case StartConstructorWorker(ticket=ticket, number=c):
                self._start(planner, ticket, lambda: self.recipes.constructor(c))
            case StartLoaderWorker():
                self._start_loader(planner, event)
            case PlacementChanged(worker_of=worker_of):
                # on this queue: workers that are not named any more may be retired next
                with self._lock:  # ``joined`` reports the loaders of added sources
                    n = sum(self.hosting.loaders)
                    self.hosting = replace(self.hosting, host_of=tuple(worker_of[:n]))
            case RetireWorker(number=h):
                self._end_host(h)
            case RedirectWorker(ticket=ticket, worker=name):
                self._start(planner, ticket, lambda: self._living(name))
            case KillProcess(ticket=ticket, worker=name):
                self._kill_for(planner, ticket, name)
            case WorkerDisconnected(ticket=ticket, worker=name, reason=why):
                if self._tickets.get(name) == ticket:  # else the name has another worker by now
                    host = self.hosts.get(name)
                    self._beside(lambda: self._cut_off(host, why), f"cut {name}")
            case WaitingForWorkers(workers=names):
                self._is_awaited(names)
            case WorkerGivenUp(worker=name, reason=why):
                log.warning("%s killed: %s", name, why)
                self._miss(name, why, self.blueprint.options.lost_after_s)
            case StepProgress(acked=acked, written=counts):
                self._written[planner] = counts
                self.acked = max(acked, self.acked)
                if acked > self._progress:
                    self._progress, self._restarts = acked, 0
            case CoordinatorFailed(error=error):
                log.error("the planner stopped: %s", error)
                self._end_planner()
            case WorkerRecovered(worker=name):
                self._missed.pop(name, None)
                self._notify(event)
            case _:
                self._notify(event)

    def _notify(self, event: SessionEvent) -> None:
        """Pass an event on to the session, in order."""
        self._news.do(lambda: self._told(event))

    def _start_loader(self, planner: ActorHandle, asked: StartLoaderWorker) -> None:
        # of a new worker: a coordinator that takes over later needs its sources
        self.kits.setdefault(asked.number, tuple(asked.sources))
        self._start(
            planner,
            asked.ticket,
            lambda: self.recipes.loader_host(
                asked.number, asked.sources, asked.starts, asked.constructors, asked.instead_of
            ),
        )

    def _living(self, name: str) -> ActorHandle:
        if (host := self.hosts.get(name)) is None:
            raise ActorLost(name, "it was not needed")
        return host

    def _start(self, planner: ActorHandle, ticket: int, start: Callable[[], ActorHandle]) -> None:
        with self._spawning:
            if planner is not self.planner:
                return  # the next one asks for what it lacks
            try:
                host = start()
                if host is not self.hosts.get(host.name):
                    self._starts.watch(host)
            except Exception as fault:
                self.control.tell(
                    planner, "died", ticket, f"it could not be started: {fault}", fault
                )
                return
            with self._lock:
                self.hosts[host.name] = host
        self.send(planner, ticket, host)

    def prepared(self, host: ActorHandle) -> None:
        """Note a worker that is being prepared for a new source."""
        with self._lock:
            self.preparing.add(host.name)
            self.hosts[host.name] = host

    def joined(self, h: int, loaders: int) -> None:
        """Note that a source was added, read by its own worker."""
        with self._lock:
            had = self.hosting
            self.hosting = replace(
                had,
                loaders=(*had.loaders, loaders),
                host_of=(*had.host_of, *[h] * loaders),
                n_hosts=had.n_hosts + 1,
            )

    def send(self, planner: ActorHandle, ticket: int, host: ActorHandle) -> None:
        """Redirect a worker to the coordinator, and report its death there."""
        self._tickets[host.name] = ticket
        self.control.tell(host, "meet", *self._where, ticket)

        def died(host: ActorHandle, reason: str) -> None:
            self._miss(host.name, reason)
            if planner is self.planner and not self._closed:
                self.control.tell(
                    planner,
                    "died",
                    ticket,
                    self._starts.why(host.name, reason),
                    fault_of(self.control, host),
                )

        self.control.on_death(host, died)

    def end(self, host: ActorHandle) -> None:
        """Kill a worker in a thread: Ray may need seconds for each."""
        self._beside(lambda: self._kill(host), f"kill {host.name}")

    def _kill(self, host: ActorHandle) -> None:
        with contextlib.suppress(OverlordError):
            self.control.kill(host)

    def _beside(self, work: Callable[[], None], name: str) -> None:
        self._machine.thread(work, f"overlord {name}")

    def _kill_for(self, planner: ActorHandle, ticket: int, name: str) -> None:
        """Kill a worker for the coordinator.

        The death of one that is already gone is reported again: otherwise the coordinator would
        wait for it forever.
        """
        host = self.hosts.get(name)
        if self._tickets.get(name) != ticket:
            self.control.tell(planner, "died", ticket, "another has its name by now")
        elif host is None or not host.alive:
            self.control.tell(
                planner, "died", ticket, self._missed.get(name, ("it was gone already", 0.0))[0]
            )
        else:
            self.end(host)

    def _end_host(self, h: int) -> None:
        """End a loader worker that is not needed; it is not reported as lost."""
        self.kits.pop(h, None)
        with self._lock:
            host = self.hosts.pop(f"loader-worker/{h}", None)
        if host is not None:
            with contextlib.suppress(OverlordError):
                self.recipes.end(h, host)

    def _cut_off(self, host: ActorHandle | None, why: str) -> None:
        """Kill a worker that lost its connection to the coordinator and does not die by itself.

        Nearly always the worker died, which is reported separately.
        """
        deadline = time.monotonic() + CUT_S
        while host is not None and host.alive and time.monotonic() < deadline and not self._closed:
            time.sleep(0.005)
        if host is not None and host.alive and not self._closed:
            log.warning("%s killed: its connection to the planner ended: %s", host.name, why)
            self._kill(host)

    # the end

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._stop.set()
        self._stop_reviews()
        self._ending.go(
            lambda: [
                self._let_planner_leave,
                lambda: self.control.shutdown(LEAVE_S),
                self._work.close,
                self._news.close,
            ]
        )

    def _let_planner_leave(self) -> None:
        if self._ready and self.planner is not None:
            with contextlib.suppress(OverlordError):
                self.control.get(self.control.call(self.planner, "leave", self.acked), LEAVE_S)


def _moves(beat: Future[Any]) -> bool:
    """Return whether a coordinator has answered, and its event loop has run."""
    return beat.done() and (beat.exception() is not None or bool(beat.result()))
