"""The processes of a job whose planner is one of them, as the launching process has them: it starts
and ends all, and starts another planner when that is lost. It never decides where a host is wanted:
the planner asks for hosts, and calls them itself.
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
    KillProcess,
    PlacementChanged,
    RedirectWorker,
    Report,
    RetireWorker,
    StartConstructorWorker,
    StartLoaderWorker,
    StepProgress,
    StreamState,
    WaitingForWorkers,
    WorkerDisconnected,
    WorkerGivenUp,
)
from overlord.process.shutdown import CloseOnce
from overlord.rpc.actors import ActorHandle, ActorSystem
from overlord.rpc.peers import fault_of
from overlord.setup.partition import hosting_of, scales
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")

PLANNER = "planner"
START_S = 120.0  # for hosts to be there: they open their sources first, and a store may be slow
BOOT_S = 30.0  # for the planner's process alone
# for the planner to answer, though it may have to be started again meanwhile; who asks the pump
# waits for 30
ASK_S = 25.0
CUT_S = 1.0  # between the end of a host's link and the news that it died
TICKS = (
    4  # within which a planner must answer: one that sleeps with the whole machine is not missed
)
LEAVE_S = 1.0
AT_S = 0.5  # for a planner that is stuck to say where
LOST = "the planner was lost: "


class Launcher:
    """All processes of a job by name. ``told`` gets what the planner says unasked; it is called in
    a thread of this class.
    """

    def __init__(
        self,
        blueprint: PreparedJob,
        generation: int,
        told: Callable[[tuple[Any, ...]], None],
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
        self._takes_part: frozenset[int] = (
            frozenset()
        )  # as the present planner was told when it was started
        self.kits = {
            h: tuple(range(len(blueprint.job.sources))) for h in range(self.hosting.n_hosts)
        }
        self.next_host = self.hosting.n_hosts  # a number is used once
        self.acked = self._progress = -1  # the last step that all ranks took; as planners said
        self.planner: ActorHandle | None = None  # the present one; it may be being started
        self._beating: ActorHandle | None = None
        self.watched = False
        self.reports: dict[tuple[int, int], Report] = {}  # accepted lately, by step and rank
        self._session, self._told = generation, told
        self._incarnation = self._restarts = 0
        self._reason = ""
        self._ended_for: tuple[ActorHandle | None, str] = (None, "")
        self._initial: StreamState | None = (
            None  # for a planner that died before anything was written
        )
        self._launch = ""  # as the journal knows it
        self._opened = (
            False  # the journal says where this session begins, and all planners that come know it
        )
        self._tickets: dict[str, int] = {}  # of hosts, as the present planner knows them
        self._lock = threading.Condition()  # for who is there
        self._spawning = (
            threading.RLock()
        )  # a host that is being started for a planner is known before the next planner is
        self.preparing: set[str] = (
            set()
            # hosts of sources that may join, while they start: no planner has anything to do with
            # them
            # yet
        )
        self._ready = self._closed = False
        self.absent = ""  # why the planner cannot be asked, in words
        self._written: dict[
            ActorHandle, list[float]
        ] = {}  # what each planner counted of its journal
        self._missed: dict[
            str, tuple[str, float]
        ] = {}  # hosts that died, of what and when, until a planner says that they are back
        self._over: Exception | None = None
        self._work, self._news = (
            ThreadQueue(1, "parts"),
            ThreadQueue(1, "planner-news"),
        )  # what is told may wait for locks; what is asked for must not
        self._stop, self._ending = threading.Event(), CloseOnce()
        self._stop_reviews: Callable[[], None] = lambda: None
        self._starts = StartupWatchdog(self.control, blueprint.options.lost_after_s)

    # the planner

    def begin(self, state: StreamState | None) -> None:
        """The first planner, and all hosts it asks for."""
        self._initial = state
        self._start_planner()
        self._is_ready()
        threading.Thread(target=self._beats, name="overlord-planner-beats", daemon=True).start()
        self._stop_reviews = watch(
            self.recipes.placement, self._machine, self.control, self._relocate
        )

    def _start_planner(self) -> int:
        """Behind which step it begins."""
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
        """For a planner to be there with all its hosts: some may have to be given up first, and
        others started.
        """
        return 2 * START_S + 2 * self.blueprint.options.lost_after_s

    def _is_ready(self) -> None:
        """One that died since it began, and was not missed because it was not there yet, is missed
        here.
        """
        with self._lock:
            planner = self.planner
            assert planner is not None
            if planner.alive:
                self._ready, self.absent = True, ""
                self._lock.notify_all()
                self._say_who_takes_part()
                return
        self.control.get(self.control.call(planner, "beat"), BOOT_S)  # raises what it died of

    def _say_who_takes_part(self) -> None:
        """Under the lock, before anything else is asked: who came and went while it was being
        started may have given up meanwhile.
        """
        now = frozenset(self.attached)
        for rank in sorted(self._takes_part - now):
            self.tell("detach", rank)
        if came := sorted(now - self._takes_part):
            self.tell("attach", came)

    def _planner_died(self, planner: ActorHandle, reason: str) -> None:
        """In the control plane's thread."""
        with self._lock:
            if self._closed or planner is not self.planner or not self._ready:
                return  # one that is being started is missed by who starts it
            reason = self._why(planner, reason)
            self._ready, self.absent = (
                False,
                f"the planner, which is being started again ({reason})",
            )
        threading.Thread(
            target=self._start_again, args=(reason,), name="overlord-planner-again", daemon=True
        ).start()

    def _why(self, planner: ActorHandle | None, reason: str) -> str:
        """What it died of: one that was killed here has done something else before."""
        of, why = self._ended_for
        return why if of is planner else self._starts.why(PLANNER, reason)

    def _start_again(self, reason: str) -> None:
        since, unopened = (
            time.monotonic(),
            None,
        )  # why the journal could not be opened: that is what the job ends with then
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
            log.warning("the planner is lost: %s; it is started again", reason)
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
                if isinstance(fault, JournalTaken):  # by another launch: it will not be ours again
                    with self._lock:
                        return self._give_up(fault)
        return None

    def _was_mended(self, reason: str, since: float, behind: int) -> None:
        """The planner is back, and with it the hosts that were lost together with it: it knows of
        none of them that it was missed.
        """
        now = time.monotonic()
        there = [
            name for name in list(self._missed) if name in self.hosts and self.hosts[name].alive
        ]
        found = {
            name: self._missed.pop(name, None) for name in there
        }  # a planner may have said so of some already
        lost = {PLANNER: (reason, since)} | {
            name: missed for name, missed in found.items() if missed is not None
        }
        for part, (why, when) in lost.items():
            row = {
                "part": part,
                "reason": why,
                "seconds": now - when,
                "step": behind,
                "stand_bys": False,
            }
            log.warning(
                "%s is back after %.2f s%s",
                part,
                now - when,
                "" if part == PLANNER else f", with the planner; it was lost: {why}",
            )
            self._news.do(lambda row=row: self._told(("recovered", row)))  # type: ignore[misc]

    def _miss(self, name: str, why: str, silent_s: float = 0.0) -> None:
        """From any thread. The first reason counts: one that is killed because it was silent is
        missed since then.
        """
        if not self._closed and name in self.hosts:
            self._missed.setdefault(name, (why, time.monotonic() - silent_s))

    def _is_awaited(self, names: Sequence[str]) -> None:
        """By a planner that is being started."""
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
        """Under the lock."""
        log.error("%s", error)
        self._over, self.absent = error, str(error)
        self._lock.notify_all()
        self._news.do(lambda: self._told(("over", error)))

    def _beats(self) -> None:
        """A planner that answers nothing, or does nothing, is killed; then it is missed like any
        other. One who is being started is watched too, once its process is there.
        """
        lost_after_s = self.blueprint.options.lost_after_s
        still, answers, beat, of = 0, False, Future[Any](), self._beating
        beat.set_result(True)
        while not self._stop.wait(lost_after_s / TICKS):
            self._end_stopped()
            planner = self._beating
            moves = planner is not of or _moves(beat)
            still, answers = (
                (0, False) if moves else (still + 1, answers or beat.done())
            )  # the last answer may be on its way
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
        """Its process lives, and can say what its pump is at."""
        try:
            at = f": {self.control.get(self.control.call(planner, 'doing'), AT_S)}"
        except Exception:
            at = ""
        return f"it plans, and does not come to an end {for_s}{at}"

    def _end_stopped(self) -> None:
        for handle in self._starts.look():
            log.warning("%s is killed: it was stopped while it was being started", handle.name)
            self.end(handle)

    def _end_for(self, planner: ActorHandle, why: str) -> None:
        log.warning("the planner is killed: %s", why)
        self._ended_for = (planner, why)
        with contextlib.suppress(OverlordError):
            self.control.kill(planner)

    # asking

    def ask(
        self,
        method: str,
        *args: Any,
        timeout_s: float = ASK_S,
        done: Callable[[], bool] = lambda: False,
    ) -> Any:
        """An answer of the planner; if it is lost meanwhile, of the one that comes in its place.
        ``done``: asked after a loss, whether what was said had been taken by then.
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
                self._machine.sleep(0.005)  # what it died of is told in a moment

    def open_journal(self, anew: bool, floor: int, launch: str) -> None:
        """Where this session begins is written down, before anyone takes part. If the planner that
        did so is lost before its answer is here, the next one has begun at the same place, not
        knowing of it: it writes it once more. Nothing was planned meanwhile.
        """
        self._launch = launch
        while not self._opened:
            planner = self.planner
            self.ask("open_journal", anew, floor, launch, timeout_s=self._begin_s)
            with self._lock:
                self._opened = planner is self.planner

    def tell(self, method: str, *args: Any) -> None:
        """A word that the planner may miss: one that comes in its place asks for it."""
        if (planner := self.planner) is not None:
            with contextlib.suppress(ActorLost, DataStall):
                self.control.tell(planner, method, *args)

    def _relocate(self, hosts: list[int], accept: Callable[[], None]) -> None:
        """Ask the planner to replace loader hosts; one that is being started again is asked by the
        next review.
        """
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
        """There is no planner, and there will be none."""
        return self._over is not None

    def written_before(self) -> dict[str, float]:
        """What the planners that are gone had counted of their journal, up to the last step that
        all ranks took.
        """
        before = [
            counts for planner, counts in list(self._written.items()) if planner is not self.planner
        ]
        return {
            what: sum(column)
            for what, column in zip(WRITTEN, zip(*before, strict=True), strict=False)
        }

    # what the planner says

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
                log.exception("what the planner asked for could not be done: %.200r", event)

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
            case _:
                if event[0] == "recovered":
                    self._missed.pop(event[1]["part"], None)
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
        """It starts; whoever has it started says when it is there."""
        with self._lock:
            self.preparing.add(host.name)
            self.hosts[host.name] = host

    def joined(self, h: int, loaders: int) -> None:
        """A source takes part from here on, in a host of its own."""
        with self._lock:
            had = self.hosting
            self.hosting = replace(
                had,
                loaders=(*had.loaders, loaders),
                host_of=(*had.host_of, *[h] * loaders),
                n_hosts=had.n_hosts + 1,
            )

    def send(self, planner: ActorHandle, ticket: int, host: ActorHandle) -> None:
        """A host goes to the planner, and its death is told there."""
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
        """Whoever asks does not wait for it, and neither do others that are killed: Ray may need
        seconds for each.
        """
        self._beside(lambda: self._kill(host), f"kill {host.name}")

    def _kill(self, host: ActorHandle) -> None:
        with contextlib.suppress(OverlordError):
            self.control.kill(host)

    def _beside(self, work: Callable[[], None], name: str) -> None:
        self._machine.thread(work, f"overlord {name}")

    def _kill_for(self, planner: ActorHandle, ticket: int, name: str) -> None:
        """One that is gone already cannot die any more: it is told once more that it did, or the
        planner would wait for that for ever.
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
        """Nobody misses it."""
        self.kits.pop(h, None)
        with self._lock:
            host = self.hosts.pop(f"loader-host/{h}", None)
        if host is not None:
            with contextlib.suppress(OverlordError):
                self.recipes.end(h, host)

    def _cut_off(self, host: ActorHandle | None, why: str) -> None:
        """The planner has lost its link to a host: nearly always because the host died, which is
        told by itself.
        """
        deadline = time.monotonic() + CUT_S
        while host is not None and host.alive and time.monotonic() < deadline and not self._closed:
            time.sleep(0.005)
        if host is not None and host.alive and not self._closed:
            log.warning("%s is killed: its link to the planner ended: %s", host.name, why)
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
    """Whether a planner has answered, and has done something since it did before."""
    return beat.done() and (beat.exception() is not None or bool(beat.result()))
