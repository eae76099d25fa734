"""The launcher: starts and ends all processes of a job, and first of all its coordinator.

With a journal it restarts a coordinator that is lost. It does not decide which workers are needed:
the coordinator requests them, and calls them directly.
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
from overlord.cluster.supervisor import restart_limit_error
from overlord.cluster.worker_factory import watch
from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, DataStall, JournalError, JournalTaken, OverlordError
from overlord.messages.control import StreamState
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
# Heartbeats of a coordinator, polled by its launcher.

# Polls in ``lost_after_s``. They are counted, so that a suspended machine loses no coordinator.
TICKS = 4
ACTIVITY_S = 0.5  # seconds for a blocked coordinator to report its activity


class CoordinatorHeartbeat:
    """Periodic polls of a coordinator, which kill one that is silent or has a blocked event loop.

    The death of a killed coordinator is handled like any other. ``on_tick`` is called before every
    poll. Runs on: a thread of its own, except where stated.
    """

    def __init__(self, control: ActorSystem, lost_after_s: float, on_tick: Callable[[], None]):
        self._control, self._lost_after_s, self._on_tick = control, lost_after_s, on_tick
        self._watched: ActorHandle | None = None
        self._killed: tuple[ActorHandle, str] | None = None  # last killed one, and the cause
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self.run, name="overlord-coordinator-beats", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def watch(self, coordinator: ActorHandle) -> None:
        """Poll this coordinator from now on instead of its predecessor. Runs on: any thread."""
        self._watched = coordinator

    def cause(self, coordinator: ActorHandle | None) -> str | None:
        """Return why ``kill`` killed a coordinator; None if it did not. Runs on: any thread."""
        killed = self._killed
        return killed[1] if killed is not None and killed[0] is coordinator else None

    def run(self) -> None:
        silent, answers, beat, polled = 0, False, Future[Any](), self._watched
        beat.set_result(True)
        while not self._stop.wait(self._lost_after_s / TICKS):
            self._on_tick()
            coordinator = self._watched
            runs = coordinator is not polled or _loop_runs(beat)
            # the last answer may be in transit
            silent, answers = (0, False) if runs else (silent + 1, answers or beat.done())
            if silent >= TICKS and coordinator is not None:
                for_s = f"for {self._lost_after_s:g} s"
                blocked = self._blocked(coordinator, for_s) if answers else ""
                self.kill(coordinator, blocked or f"it answered nothing {for_s}")
            if (coordinator is not polled or beat.done()) and coordinator is not None:
                beat = self._control.call(coordinator, "beat")
            polled = coordinator

    def _blocked(self, coordinator: ActorHandle, for_s: str) -> str:
        """Describe the activity of a coordinator whose event loop is blocked."""
        try:
            at = f": {self._control.get(self._control.call(coordinator, 'activity'), ACTIVITY_S)}"
        except Exception:
            at = ""
        return f"its event loop was blocked {for_s}{at}"

    def kill(self, coordinator: ActorHandle, why: str) -> None:
        log.warning("coordinator killed: %s", why)
        self._killed = (coordinator, why)
        with contextlib.suppress(OverlordError):
            self._control.kill(coordinator)


def _loop_runs(beat: Future[Any]) -> bool:
    """Return False while a heartbeat is unanswered, or if its answer reports a blocked event loop.

    A failed call counts as True: a death is reported separately.
    """
    return beat.done() and (beat.exception() is not None or bool(beat.result()))


COORDINATOR_NAME = "planner"  # as in ``session.kill`` and ``metrics()["actors"]``
BOOT_S = 30.0  # seconds for the coordinator's process to start, without its workers
# seconds for the coordinator to answer, restart included; a caller of the event loop waits 30 s
ASK_S = 25.0
STOP_S = 1.0  # seconds for the coordinator to close its journal
LOST = "the coordinator was lost: "


# ----------------------------------------------------------------------------
# The launcher: starts a coordinator, restarts it after a loss, and executes its requests.


class Launcher:
    """The processes of a job, from the launching process: the coordinator and its workers.

    A lost coordinator is restarted from the journal; without one the job ends. ``ask`` and ``tell``
    call the current one. ``workers`` starts and ends workers. ``ask_s`` is the default timeout of
    ``ask``.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        generation: int,
        control: ActorSystem,
        platform: Platform,
        *,
        ask_s: float = ASK_S,
    ):
        self.control, self._platform, self._ask_s = control, platform, ask_s
        # receives the events for the session, on a thread of the launcher
        self.on_event: Callable[[SessionEvent], None] = lambda event: None
        self.coordinator: ActorHandle | None = None  # the current one, which may be starting
        self.workers = LaunchedWorkers(
            prepared, generation, control, platform, lambda: self.coordinator
        )
        self._heartbeat = CoordinatorHeartbeat(
            control, prepared.options.lost_after_s, self.workers.end_stopped
        )
        self.attached: set[int] = set()
        # the ranks that were attached when the current coordinator started
        self._attached_at_start: frozenset[int] = frozenset()
        # last step that all ranks took: by coordinators and clients here, and by coordinators only
        self.acked = self._progress = -1
        self.watched = False
        self._session = generation
        self._incarnation = self._restarts = 0
        self._reason = ""
        # the start state, for a coordinator whose predecessor wrote nothing
        self._initial: StreamState | None = None
        self._launch = ""  # identifies this launch in the journal
        self._opened = False  # the journal has the start of this session
        self._lock = platform.condition()  # guards ``coordinator`` and ``_ready``
        self._ready = self._closed = False
        self.absent = ""  # the reason why the coordinator cannot be called; empty if it can be
        self._written: dict[ActorHandle, list[float]] = {}  # journal counts of each coordinator
        self._over: Exception | None = None  # the error that ended the job
        # separate queues: notifications may block on session locks, starts of workers must not
        self._requests = platform.queue(1, "launcher")
        self._notices = platform.queue(1, "coordinator-events")
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
        self._start_coordinator()
        self.accept_calls()
        self._heartbeat.start()
        self._stop_reviews = watch(
            self.workers.factory.placement, self._platform, self.control, self._relocate
        )

    def _start_coordinator(self) -> int:
        """Start a coordinator with its workers; return the last step that all ranks took before."""
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
                machine=self._platform,
                launch=self._launch,
            )
            self._attached_at_start = frozenset(config.attached)
            coordinator = self.coordinator = self.control.spawn(
                CoordinatorActor,
                config,
                name=COORDINATOR_NAME,
                **workers.factory.placement.coordinator(self._restarts_coordinator),
            )
        self.control.on_death(coordinator, self._coordinator_died)
        workers.watchdog.watch(coordinator)
        workers.redirect_to(
            *self.control.get(self.control.call(coordinator, "rpc_address"), BOOT_S)
        )
        self.follow(coordinator)
        if self._restarts_coordinator:
            # otherwise a slow strategy must not end the job, and a stalled one ends it by DataStall
            self._heartbeat.watch(coordinator)
        acked: int = self.control.get(self.control.call(coordinator, "begin"), self._begin_s)
        return acked

    @property
    def _begin_s(self) -> float:
        """The timeout for a coordinator to start with all its workers, in seconds.

        The coordinator may have to wait for silent workers first, and then to start others.
        """
        return 2 * START_S + 2 * self.prepared.options.lost_after_s

    def follow(self, coordinator: ActorHandle) -> None:
        """Receive the events of a coordinator that starts, and of no other from now on.

        Calls wait until ``accept_calls``.
        """
        with self._lock:
            self.coordinator, self._ready = coordinator, False
        self._listen(coordinator)

    def accept_calls(self) -> None:
        """Accept calls from now on; raise ``ActorLost`` if the coordinator has died meanwhile."""
        with self._lock:
            coordinator = self.coordinator
            assert coordinator is not None
            if coordinator.alive:
                self._ready, self.absent = True, ""
                self._lock.notify_all()
                self._send_attached()
                return
        self.control.get(
            self.control.call(coordinator, "beat"), BOOT_S
        )  # raises the error of a dead actor

    def _send_attached(self) -> None:
        """Send the ranks that were attached and detached while the coordinator started.

        The requests of these clients may have timed out. The caller holds the lock, so that no
        other call precedes.
        """
        now = frozenset(self.attached)
        for rank in sorted(self._attached_at_start - now):
            self.tell("detach", rank)
        if new := sorted(now - self._attached_at_start):
            self.tell("attach", new)

    def _coordinator_died(self, coordinator: ActorHandle, reason: str) -> None:
        """Restart a lost coordinator in a thread. Runs on: thread of the actor system."""
        with self._lock:
            if self._closed or coordinator is not self.coordinator or not self._ready:
                return  # the thread that starts a coordinator detects its death itself
            reason = self._loss_reason(coordinator, reason)
            self._ready = False
            if not self._restarts_coordinator:
                return self._give_up(ActorLost(COORDINATOR_NAME, self._end_reason(reason)))
            self.absent = f"the coordinator, which is being restarted ({reason})"
        threading.Thread(
            target=self._restart_coordinator,
            args=(reason,),
            name="overlord-coordinator-restart",
            daemon=True,
        ).start()

    @property
    def _restarts_coordinator(self) -> bool:
        """Whether a lost coordinator is restarted: from the journal, with failover."""
        return self.prepared.job.journal is not None and self.prepared.options.failover

    def _end_reason(self, reason: str) -> str:
        """Return the reason of a loss that ends the job, with the remedy."""
        if self.prepared.job.journal is None:
            return (
                f"{reason}; the job has no journal to restart it from: set Job.journal, or launch "
                "again with resume=state, the last saved state"
            )
        return f"{reason}; failover is off: launch again with resume='auto'"

    def _loss_reason(self, coordinator: ActorHandle | None, reason: str) -> str:
        """Return ``reason``; after a kill by heartbeat or watchdog, the cause of the kill."""
        cause = self._heartbeat.cause(coordinator)
        return self.workers.watchdog.reason_of(COORDINATOR_NAME, reason) if cause is None else cause

    def _restart_coordinator(self, reason: str) -> None:
        """Start coordinators until one runs or the limit of restarts is reached."""
        # ``unopened``: the error of a journal that could not be opened; the job ends with it
        since, unopened = time.monotonic(), None
        while not self._closed:
            with self._lock:
                self._restarts += 1
                self._incarnation += 1
                if self._restarts > (most := self.prepared.options.max_restarts):
                    return self._give_up(
                        unopened
                        or restart_limit_error(
                            ActorLost(COORDINATOR_NAME, reason), most, self._progress_text()
                        )
                    )
            log.warning("coordinator lost: %s; restarting it", reason)
            try:
                self._reason = f"{LOST}{reason}"
                acked = self._start_coordinator()
                self.accept_calls()
                return self._report_recovery(reason, since, acked)
            except Exception as fault:
                reason, unopened = (
                    f"{type(fault).__name__}: {fault}",
                    fault if isinstance(fault, JournalError) else None,
                )
                if isinstance(fault, ActorLost) and fault.name == COORDINATOR_NAME:
                    reason = self._loss_reason(self.coordinator, fault.reason)
                self._kill_coordinator()
                if isinstance(fault, JournalTaken):  # another launch has taken the journal over
                    with self._lock:
                        return self._give_up(fault)
        return None

    def _report_recovery(self, reason: str, since: float, acked: int) -> None:
        """Report the recovery of the coordinator and of workers that were lost with it.

        The new coordinator has no record of these losses.
        """
        now = time.monotonic()
        for name, (why, when) in {
            COORDINATOR_NAME: (reason, since),
            **self.workers.take_recovered(),
        }.items():
            log.warning(
                "%s recovered after %.2f s%s",
                "coordinator" if name == COORDINATOR_NAME else name,
                now - when,
                "" if name == COORDINATOR_NAME else f", with the coordinator; it was lost: {why}",
            )
            self._notify(WorkerRecovered(name, why, now - when, acked))

    def _note_awaited(self, names: Sequence[str]) -> None:
        """Add the workers that a starting coordinator waits for to ``absent``."""
        with self._lock:
            if not self._ready:
                few = ", ".join(names[:8]) + (
                    f" and {len(names) - 8} more" if len(names) > 8 else ""
                )
                waits = f", and waits for {few} to answer" if names else ""
                self.absent = (
                    "the coordinator, which is being restarted "
                    f"({self._reason.removeprefix(LOST)}){waits}"
                )

    def _progress_text(self) -> str:
        return (
            f"all ranks took the steps up to {self.acked}"
            if self.acked >= 0
            else "no step was taken by all ranks"
        )

    def _kill_coordinator(self) -> None:
        if self.coordinator is not None:
            with contextlib.suppress(OverlordError):
                self.control.kill(self.coordinator)

    def _give_up(self, error: Exception) -> None:
        """End the job without another coordinator. The caller holds the lock."""
        log.error("job ended, the coordinator is not restarted: %s", error)
        self._over, self.absent = error, str(error)
        self._lock.notify_all()
        self._notify(JobFailed(error))

    # calls

    def ask(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call the coordinator and return its answer; after a loss, call its successor.

        The lost coordinator may have executed the request: it must be idempotent, or carry an id.
        Raise ``DataStall`` after ``timeout_s`` seconds.
        """
        timeout_s = self._ask_s if timeout_s is None else timeout_s
        deadline = self._platform.now() + timeout_s
        while True:
            coordinator = self._wait_for_coordinator(deadline, timeout_s)
            try:
                return self.control.get(
                    self.control.call(coordinator, method, *args),
                    max(0.0, deadline - self._platform.now()),
                )
            except ActorLost as fault:
                if fault.name != COORDINATOR_NAME:
                    raise
                self._platform.sleep(0.005)  # until its death is reported

    def open_journal(self, anew: bool, floor: int, launch: str) -> None:
        """Let the coordinator write the start of this session, before any rank is attached.

        If the coordinator is lost before its answer arrives, its successor starts at the same state
        and writes the start again. No step is planned in between.
        """
        self._launch = launch
        while not self._opened:
            coordinator = self.coordinator
            self.ask("open_journal", anew, floor, launch, timeout_s=self._begin_s)
            with self._lock:
                self._opened = coordinator is self.coordinator

    def tell(self, method: str, *args: Any) -> None:
        """Call the coordinator without a reply. The call may be lost with the coordinator.

        A successor receives the same information at its start.
        """
        if (coordinator := self.coordinator) is not None:
            with contextlib.suppress(ActorLost, DataStall):
                self.control.tell(coordinator, method, *args)

    def _relocate(self, workers: list[int], accept: Callable[[], None]) -> None:
        """Ask the coordinator to replace loader workers; the next review repeats a lost request."""
        if (coordinator := self.coordinator) is None:
            return

        def answered(future: Future[bool]) -> None:
            if future.exception() is None and future.result():
                accept()

        with contextlib.suppress(ActorLost, DataStall):
            self.control.call(coordinator, "relocate", workers).add_done_callback(answered)

    def _wait_for_coordinator(self, deadline: float, timeout_s: float) -> ActorHandle:
        with self._lock:
            self._lock.wait_for(
                lambda: self._ready or self._over or self._closed,
                max(0.0, deadline - self._platform.now()),
            )
            if self._closed:
                raise OverlordError("the session is closed; launch the job again to continue")
            if self._over is not None:
                raise self._over
            if not self._ready or self.coordinator is None:
                raise DataStall(self.absent or "the coordinator", timeout_s)
            return self.coordinator

    @property
    def is_over(self) -> bool:
        """Whether no coordinator runs, and none will be started."""
        return self._over is not None

    def written_before(self) -> dict[str, float]:
        """Return the journal counts of lost coordinators, as of their last progress reports."""
        before = [
            counts
            for coordinator, counts in list(self._written.items())
            if coordinator is not self.coordinator
        ]
        return {
            what: sum(column)
            for what, column in zip(WRITTEN, zip(*before, strict=True), strict=False)
        }

    # events of the coordinator

    def _listen(self, coordinator: ActorHandle) -> None:
        def received(future: Future[Any]) -> None:
            if future.exception() is None and coordinator is self.coordinator:
                events = future.result()
                self._requests.do(lambda: self._receive(coordinator, events))
                self._listen(coordinator)

        self.control.call(coordinator, "events").add_done_callback(received)

    def _receive(self, coordinator: ActorHandle, events: Sequence[Any]) -> None:
        for event in events:
            if self._closed or coordinator is not self.coordinator:
                return
            try:
                self._execute(coordinator, event)
            except Exception:
                log.exception("request %.200r of the coordinator failed", event)

    def _execute(self, coordinator: ActorHandle, event: Any) -> None:
        match event:
            case StartConstructorWorker():
                self.workers.start_constructor(coordinator, event)
            case StartLoaderWorker():
                self.workers.start_loader(coordinator, event)
            case RedirectWorker():
                self.workers.redirect(coordinator, event)
            case PlacementChanged(worker_of=worker_of):
                # handled on this queue, so before requests that retire workers without loaders
                self.workers.moved(worker_of)
            case RetireWorker(number=number):
                self.workers.retire(number)
            case KillProcess():
                self.workers.kill(coordinator, event)
            case WorkerDisconnected():
                self.workers.disconnected(event)
            case WaitingForWorkers(workers=names):
                self._note_awaited(names)
            case WorkerGivenUp(worker=name, reason=why):
                log.warning("%s killed: %s", name, why)
                self.workers.note_lost(name, why, self.prepared.options.lost_after_s)
            case StepProgress(acked=acked, written=counts):
                self._written[coordinator] = counts
                self.acked = max(acked, self.acked)
                if acked > self._progress:
                    self._progress, self._restarts = acked, 0
            case CoordinatorFailed(error=error):
                log.error("coordinator failed: %s; killing it", error)
                self._kill_coordinator()
            case WorkerRecovered(worker=name):
                self.workers.recovered(name)
                self._notify(event)
            case _:
                self._notify(event)

    def _notify(self, event: SessionEvent) -> None:
        """Pass an event on to the session, in order."""
        self._notices.do(lambda: self.on_event(event))

    # the end

    def close(self) -> None:
        with self._lock:
            self._closed = self.workers.closed = True
            self._lock.notify_all()
        self._heartbeat.stop()
        self._stop_reviews()
        self._ending.run(
            lambda: [
                self._stop_coordinator,
                lambda: self.control.shutdown(STOP_S),
                self._requests.close,
                self._notices.close,
            ]
        )

    def _stop_coordinator(self) -> None:
        if self._ready and self.coordinator is not None:
            with contextlib.suppress(OverlordError):
                self.control.get(self.control.call(self.coordinator, "stop", self.acked), STOP_S)
