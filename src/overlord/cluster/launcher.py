"""The launcher: starts and ends all processes of a job whose coordinator has its own process.

It starts another coordinator when one is lost. It does not decide which workers are needed: the
coordinator requests them, and calls them directly.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from overlord.cluster.coordinator_actor import WRITTEN, CoordinatorActor
from overlord.cluster.coordinator_config import CoordinatorConfig
from overlord.cluster.launched_workers import START_S, LaunchedWorkers
from overlord.cluster.supervisor import worn_out
from overlord.cluster.worker_factory import watch
from overlord.concurrency.event_loop import ThreadQueue
from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, DataStall, JournalError, JournalTaken, OverlordError
from overlord.messages.control import Report, StreamState
from overlord.messages.launcher import (
    CoordinatorFailed,
    JobFailed,
    KillProcess,
    PlacementChanged,
    RedirectWorker,
    RetireWorker,
    SessionEvent,
    StartConstructorWorker,
    StartLoaderWorker,
    StepProgress,
    WaitingForWorkers,
    WorkerDisconnected,
    WorkerGivenUp,
    WorkerRecovered,
)
from overlord.process.shutdown import CloseOnce
from overlord.rpc.actors import ActorHandle, ActorSystem
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")

# ----------------------------------------------------------------------------
# Heartbeats of a coordinator in its own process, as its launcher polls them.

# within which a coordinator must answer: one that sleeps with the whole machine is not lost
TICKS = 4
AT_S = 0.5  # for a blocked coordinator to report where it is


class CoordinatorHeartbeat:
    """Kills a coordinator that does not answer, or whose event loop is blocked.

    Its death is then handled like any other. ``on_tick`` is called before every poll. Runs on: a
    thread of its own, except where stated.
    """

    def __init__(self, control: ActorSystem, lost_after_s: float, on_tick: Callable[[], None]):
        self._control, self._lost_after_s, self._on_tick = control, lost_after_s, on_tick
        self._watched: ActorHandle | None = None
        self._killed: tuple[ActorHandle | None, str] = (None, "")  # the last one, and the cause
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self.run, name="overlord-planner-beats", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def watch(self, coordinator: ActorHandle) -> None:
        """Poll this coordinator from now on: its process runs. Runs on: any thread."""
        self._watched = coordinator

    def cause(self, coordinator: ActorHandle | None) -> str | None:
        """Return why a coordinator was killed here; None if it was not. Runs on: any thread."""
        killed, why = self._killed
        return why if killed is coordinator else None

    def run(self) -> None:
        silent, answers, beat, of = 0, False, Future[Any](), self._watched
        beat.set_result(True)
        while not self._stop.wait(self._lost_after_s / TICKS):
            self._on_tick()
            coordinator = self._watched
            moves = coordinator is not of or _moves(beat)
            # the last answer may be under way
            silent, answers = (0, False) if moves else (silent + 1, answers or beat.done())
            if silent >= TICKS and coordinator is not None:
                for_s = f"for {self._lost_after_s:g} s"
                blocked = self._blocked(coordinator, for_s) if answers else ""
                self.kill(coordinator, blocked or f"it answered nothing {for_s}")
            if (coordinator is not of or beat.done()) and coordinator is not None:
                beat = self._control.call(coordinator, "beat")
            of = coordinator

    def _blocked(self, coordinator: ActorHandle, for_s: str) -> str:
        """Describe what a blocked event loop executes, if its process answers."""
        try:
            at = f": {self._control.get(self._control.call(coordinator, 'doing'), AT_S)}"
        except Exception:
            at = ""
        return f"it plans, and does not come to an end {for_s}{at}"

    def kill(self, coordinator: ActorHandle, why: str) -> None:
        log.warning("the planner is killed: %s", why)
        self._killed = (coordinator, why)
        with contextlib.suppress(OverlordError):
            self._control.kill(coordinator)


def _moves(beat: Future[Any]) -> bool:
    """Return whether a coordinator has answered, and its event loop has run."""
    return beat.done() and (beat.exception() is not None or bool(beat.result()))


PLANNER = "planner"
BOOT_S = 30.0  # for the coordinator's process alone
# for the coordinator to answer, though it may be restarted meanwhile; a caller of the event loop
# waits for 30 s
ASK_S = 25.0
LEAVE_S = 1.0
LOST = "the planner was lost: "


# ----------------------------------------------------------------------------
# The launcher: starts and ends the processes of a job, and restarts its coordinator.


class Launcher:
    """Starts the coordinator of a job, restarts it after a loss, and passes calls to it.

    ``workers`` starts and ends workers for it. ``on_event`` receives the coordinator's events for
    the session, on a thread of this class.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        generation: int,
        on_event: Callable[[SessionEvent], None],
        control: ActorSystem,
        platform: Platform,
    ):
        self.control, self._platform = control, platform
        self.planner: ActorHandle | None = None  # the present one; it may be starting
        self.workers = LaunchedWorkers(
            prepared, generation, control, platform, lambda: self.planner
        )
        self._heartbeat = CoordinatorHeartbeat(
            control, prepared.options.lost_after_s, self.workers.end_stopped
        )
        self.attached: set[int] = set()
        # the ranks that the present coordinator was given at its start
        self._attached_at_start: frozenset[int] = frozenset()
        self.acked = self._progress = -1  # the last step that all ranks took; as reported
        self.watched = False
        self.reports: dict[tuple[int, int], Report] = {}  # accepted lately, by step and rank
        self._session, self._on_event = generation, on_event
        self._incarnation = self._restarts = 0
        self._reason = ""
        # for a coordinator whose predecessor died before it wrote anything
        self._initial: StreamState | None = None
        self._launch = ""  # of the journal
        self._opened = False  # the journal has the start of this session
        self._lock = threading.Condition()  # guards ``planner`` and ``_ready``
        self._ready = self._closed = False
        self.absent = ""  # why the coordinator cannot be called, human-readable
        self._written: dict[ActorHandle, list[float]] = {}  # journal counts of each coordinator
        self._over: Exception | None = None
        # separate queues: notifications may block on session locks, starts of workers must not
        self._requests = ThreadQueue(1, "launcher")
        self._notices = ThreadQueue(1, "planner-events")
        self._ending = CloseOnce()
        self._stop_reviews: Callable[[], None] = lambda: None

    @property
    def prepared(self) -> PreparedJob:
        """The job with all sources so far."""
        return self.workers.prepared

    # the coordinator

    def begin(self, state: StreamState | None) -> None:
        """Start the first coordinator and all workers that it requests."""
        self._initial = state
        self._start_planner()
        self._is_ready()
        self._heartbeat.start()
        self._stop_reviews = watch(
            self.workers.factory.placement, self._platform, self.control, self._relocate
        )

    def _start_planner(self) -> int:
        """Start a coordinator and return the last step before its start."""
        workers = self.workers
        with workers.spawning, self._lock:
            living = workers.hand_over()
            config = CoordinatorConfig.of(
                self.prepared,
                state=self._initial,
                loader_placement=workers.placement,
                token=workers.token,
                session=self._session,
                incarnation=self._incarnation,
                reason=self._reason,
                constructor_of=tuple(workers.constructor_of.tolist()),
                living=living if self._incarnation else (),
                sources_of=tuple(workers.sources_of.items()),
                attached=tuple(sorted(self.attached)),
                opened=self._opened,
                watched=self.watched,
                reports=tuple(self.reports.values()),
                machine=self._platform,
                launch=self._launch,
            )
            self._attached_at_start = frozenset(config.attached)
            planner = self.planner = self.control.spawn(
                CoordinatorActor, config, name=PLANNER, **workers.factory.placement.planner()
            )
        self.control.on_death(planner, self._planner_died)
        workers.watchdog.watch(planner)
        workers.redirect_to(*self.control.get(self.control.call(planner, "where"), BOOT_S))
        self._listen(planner)
        self._heartbeat.watch(planner)
        acked: int = self.control.get(self.control.call(planner, "begin"), self._begin_s)
        return acked

    @property
    def _begin_s(self) -> float:
        """Seconds for a coordinator to start with all its workers.

        Some of them may have to be given up first, and others started.
        """
        return 2 * START_S + 2 * self.prepared.options.lost_after_s

    def _is_ready(self) -> None:
        """Accept calls from now on; raise if the coordinator died during its start."""
        with self._lock:
            planner = self.planner
            assert planner is not None
            if planner.alive:
                self._ready, self.absent = True, ""
                self._lock.notify_all()
                self._send_attached()
                return
        self.control.get(
            self.control.call(planner, "beat"), BOOT_S
        )  # raises the reason of its death

    def _send_attached(self) -> None:
        """Send the ranks that were attached and detached while the coordinator started.

        Runs under the lock, before any other call: those clients may have stopped waiting.
        """
        now = frozenset(self.attached)
        for rank in sorted(self._attached_at_start - now):
            self.tell("detach", rank)
        if new := sorted(now - self._attached_at_start):
            self.tell("attach", new)

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
        cause = self._heartbeat.cause(planner)
        return self.workers.watchdog.why(PLANNER, reason) if cause is None else cause

    def _start_again(self, reason: str) -> None:
        # ``unopened``: the error of a journal that could not be opened, with which the job ends
        since, unopened = time.monotonic(), None
        while not self._closed:
            with self._lock:
                self._restarts += 1
                self._incarnation += 1
                if not self.prepared.options.failover:
                    return self._give_up(ActorLost(PLANNER, reason))
                if self._restarts > (most := self.prepared.options.max_restarts):
                    return self._give_up(
                        unopened or worn_out(ActorLost(PLANNER, reason), most, self._did())
                    )
            log.warning("the planner is lost: %s; restarting it", reason)
            try:
                self._reason = f"{LOST}{reason}"
                acked = self._start_planner()
                self._is_ready()
                return self._report_recovery(reason, since, acked)
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

    def _report_recovery(self, reason: str, since: float, acked: int) -> None:
        """Report the recovery of the coordinator and of workers that were lost with it.

        The new coordinator does not know that they were lost.
        """
        now = time.monotonic()
        for name, (why, when) in {
            PLANNER: (reason, since),
            **self.workers.take_recovered(),
        }.items():
            log.warning(
                "%s recovered after %.2f s%s",
                name,
                now - when,
                "" if name == PLANNER else f", with the planner; it was lost: {why}",
            )
            self._notify(WorkerRecovered(name, why, now - when, acked))

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
        deadline, lost = self._platform.now() + timeout_s, False
        while True:
            planner = self._wait_for_planner(deadline, timeout_s)
            if lost and done():
                return None
            try:
                return self.control.get(
                    self.control.call(planner, method, *args),
                    max(0.0, deadline - self._platform.now()),
                )
            except ActorLost as fault:
                if fault.name != PLANNER:
                    raise
                lost = True
                self._platform.sleep(0.005)  # its death is reported in a moment

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

    def _relocate(self, workers: list[int], accept: Callable[[], None]) -> None:
        """Ask the coordinator to replace loader workers; the next review asks a restarting one."""
        if (planner := self.planner) is None:
            return

        def answered(future: Future[bool]) -> None:
            if future.exception() is None and future.result():
                accept()

        with contextlib.suppress(ActorLost, DataStall):
            self.control.call(planner, "relocate", workers).add_done_callback(answered)

    def _wait_for_planner(self, deadline: float, timeout_s: float) -> ActorHandle:
        with self._lock:
            self._lock.wait_for(
                lambda: self._ready or self._over or self._closed,
                max(0.0, deadline - self._platform.now()),
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
        def received(future: Future[Any]) -> None:
            if future.exception() is None and planner is self.planner:
                events = future.result()
                self._requests.do(lambda: self._receive(planner, events))
                self._listen(planner)

        self.control.call(planner, "events").add_done_callback(received)

    def _receive(self, planner: ActorHandle, events: Sequence[Any]) -> None:
        for event in events:
            if self._closed or planner is not self.planner:
                return
            try:
                self._execute(planner, event)
            except Exception:
                log.exception("request of the planner failed: %.200r", event)

    def _execute(self, planner: ActorHandle, event: Any) -> None:
        match event:
            case StartConstructorWorker():
                self.workers.start_constructor(planner, event)
            case StartLoaderWorker():
                self.workers.start_loader(planner, event)
            case RedirectWorker():
                self.workers.redirect(planner, event)
            case PlacementChanged(worker_of=worker_of):
                # on this queue: workers that are not named any more may be retired next
                self.workers.moved(worker_of)
            case RetireWorker(number=number):
                self.workers.retire(number)
            case KillProcess():
                self.workers.kill(planner, event)
            case WorkerDisconnected():
                self.workers.disconnected(event)
            case WaitingForWorkers(workers=names):
                self._is_awaited(names)
            case WorkerGivenUp(worker=name, reason=why):
                log.warning("%s killed: %s", name, why)
                self.workers.note_lost(name, why, self.prepared.options.lost_after_s)
            case StepProgress(acked=acked, written=counts):
                self._written[planner] = counts
                self.acked = max(acked, self.acked)
                if acked > self._progress:
                    self._progress, self._restarts = acked, 0
            case CoordinatorFailed(error=error):
                log.error("the planner stopped: %s", error)
                self._end_planner()
            case WorkerRecovered(worker=name):
                self.workers.recovered(name)
                self._notify(event)
            case _:
                self._notify(event)

    def _notify(self, event: SessionEvent) -> None:
        """Pass an event on to the session, in order."""
        self._notices.do(lambda: self._on_event(event))

    # the end

    def close(self) -> None:
        with self._lock:
            self._closed = self.workers.closed = True
            self._lock.notify_all()
        self._heartbeat.stop()
        self._stop_reviews()
        self._ending.run(
            lambda: [
                self._stop_planner,
                lambda: self.control.shutdown(LEAVE_S),
                self._requests.close,
                self._notices.close,
            ]
        )

    def _stop_planner(self) -> None:
        if self._ready and self.planner is not None:
            with contextlib.suppress(OverlordError):
                self.control.get(self.control.call(self.planner, "leave", self.acked), LEAVE_S)
