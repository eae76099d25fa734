"""The worker processes of a job, seen from the launching process.

The launching process starts and ends them, since it has their code. It redirects each worker to
the coordinator, and reports the death of a worker to it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from overlord.cluster.supervisor import TICKS
from overlord.cluster.worker_factory import (
    MULTI_WORKER_READ_AHEAD,
    WorkerFactory,
    constructors_of,
    read_ahead_of,
    settings_of,
)
from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, OverlordError
from overlord.messages.control import Cursor
from overlord.messages.launcher import (
    KillProcess,
    RedirectWorker,
    StartConstructorWorker,
    StartLoaderWorker,
    WorkerDisconnected,
)
from overlord.rpc.actors import ActorHandle, ActorSystem
from overlord.rpc.peers import fault_of
from overlord.setup.partition import loader_placement_of, scales
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")

START_S = 120.0  # for workers to start: they open their sources first, and a store may be slow
DISCONNECTED_S = 1.0  # for a worker to exit after its connection ended; then it is killed


# ----------------------------------------------------------------------------
# Detect workers that are stopped (SIGSTOP) during their start.
#
# They do not answer heartbeats yet. A start may take long, since sources are opened and a store may
# be slow. So a stopped process is detected from outside, in ``/proc/<pid>/stat``.


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, such as SIGSTOP.

    False also if the process has ended, or if the system has no ``/proc``.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


class StartupWatchdog:
    """The detection of starting workers that are stopped by a signal.

    One thread calls ``overdue`` TICKS times in ``lost_after_s``.
    """

    def __init__(self, control: ActorSystem, lost_after_s: float):
        self._control, self._lost_after_s = control, lost_after_s
        # set by actor systems whose processes get their id later, or run on other machines
        self._pid_here: Callable[[ActorHandle], int] | None = getattr(control, "pid_here", None)
        self._starting: dict[ActorHandle, Future[Any]] = {}  # first heartbeats of starting workers
        self._ticks: dict[ActorHandle, int] = {}  # consecutive calls that found the worker stopped
        self._given_up: dict[str, str] = {}  # reasons of the kills, by name

    def watch(self, handle: ActorHandle) -> None:
        """Watch a starting worker, if its process id can be known here. Runs on: any thread."""
        if handle.pid is not None or self._pid_here is not None:
            self._starting[handle] = self._control.call(handle, "beat")

    def overdue(self) -> list[ActorHandle]:
        """Return the starting workers that more than TICKS consecutive calls have found stopped.

        The caller must kill them. Each worker is returned once.
        """
        found = []
        for handle, heartbeat in list(self._starting.items()):
            if heartbeat.done():
                del self._starting[handle]
                self._ticks.pop(handle, None)
                continue
            pid = handle.pid or 0 if self._pid_here is None else self._pid_here(handle)
            self._ticks[handle] = self._ticks.get(handle, 0) + 1 if pid and is_stopped(pid) else 0
            if self._ticks[handle] > TICKS:
                self._given_up[handle.name] = (
                    f"it was stopped for {self._lost_after_s:g} s while it was being started"
                )
                del self._starting[handle], self._ticks[handle]
                found.append(handle)
        return found

    def reason_of(self, name: str, reason: str) -> str:
        """Return ``reason``, or for a worker that ``overdue`` returned, its own reason once."""
        return self._given_up.pop(name, reason)


# ----------------------------------------------------------------------------
# Start, redirect and end the workers.


class LaunchedWorkers:
    """The worker processes of a job, started and ended as a coordinator requests.

    ``coordinator`` returns the current coordinator. Requests of earlier ones are ignored: a new
    coordinator takes over all living workers, and requests the missing ones. Runs on: any thread.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        generation: int,
        control: ActorSystem,
        platform: Platform,
        coordinator: Callable[[], ActorHandle | None],
    ):
        self.placement = loader_placement_of(prepared)
        self.prepared = prepared.with_loaders(
            self.placement.loaders, read_ahead_of(self.placement, scales(prepared))
        )
        self.token = secrets.token_urlsafe(24)
        self._control, self._platform, self._coordinator = control, platform, coordinator
        self.constructor_of = np.array(constructors_of(prepared))
        self.factory = WorkerFactory(
            control,
            lambda: self.prepared,
            settings_of(prepared, self.placement, self.token, generation, platform),
            self.placement,
            self.constructor_of.tolist(),
        )
        self.handles: dict[str, ActorHandle] = {}
        n_workers, n_sources = self.placement.n_hosts, len(prepared.job.sources)
        self.sources_of = {h: tuple(range(n_sources)) for h in range(n_workers)}
        # addresses of constructor workers to which workers of added sources connect at their start
        self.linked: dict[int, dict[int, str]] = {}
        self._next_number = n_workers  # numbers are never reused
        self._leases: dict[str, int] = {}  # lease ids of workers at the current coordinator
        self._address: tuple[str, str] = ("", "")  # address and token of the current coordinator
        # workers of new sources while they start: no coordinator uses them yet
        self._preparing: set[str] = set()
        # the worker of the last source that was prepared, and the job without that source
        self._without: tuple[int, PreparedJob | None] = (-1, None)
        # lost workers with reason and time, until a coordinator reports their recovery
        self._lost: dict[str, tuple[str, float]] = {}
        self.watchdog = StartupWatchdog(control, prepared.options.lost_after_s)
        self._lock = threading.Lock()  # guards handles and placement
        # held while a process starts, so that ``hand_over`` returns every worker
        self.spawning = threading.RLock()
        self.closed = False

    # coordinators

    def hand_over(self) -> tuple[str, ...]:
        """Return the names of living workers, and void the leases of the last coordinator.

        Workers that are being prepared for an added source are left out. The caller holds
        ``spawning``.
        """
        self._leases = {}
        with self._lock:
            return tuple(
                name
                for name, handle in self.handles.items()
                if handle.alive and name not in self._preparing
            )

    def redirect_to(self, address: str, token: str) -> None:
        """Set the address of the coordinator that workers are redirected to."""
        self._address = (address, token)

    # requests of the coordinator

    def start_constructor(self, coordinator: ActorHandle, request: StartConstructorWorker) -> None:
        number = request.number
        self._start(coordinator, request.lease_id, lambda: self.factory.constructor(number))

    def start_loader(self, coordinator: ActorHandle, request: StartLoaderWorker) -> None:
        # a coordinator that takes over later needs the sources of a new worker
        self.sources_of.setdefault(request.number, tuple(request.sources))
        self._start(
            coordinator,
            request.lease_id,
            lambda: self.factory.loader_worker(
                request.number,
                request.sources,
                request.starts,
                request.constructors,
                request.instead_of,
            ),
        )

    def redirect(self, coordinator: ActorHandle, request: RedirectWorker) -> None:
        self._start(coordinator, request.lease_id, lambda: self._living(request.worker))

    def _living(self, name: str) -> ActorHandle:
        if (worker := self.handles.get(name)) is None:
            raise ActorLost(name, "it was retired")
        return worker

    def _start(
        self, coordinator: ActorHandle, lease_id: int, start: Callable[[], ActorHandle]
    ) -> None:
        with self.spawning:
            if coordinator is not self._coordinator():
                return
            try:
                worker = start()
                if worker is not self.handles.get(worker.name):
                    self.watchdog.watch(worker)
            except Exception as fault:
                reason = f"it could not be started: {fault}"
                self._control.tell(coordinator, "died", lease_id, reason, fault)
                return
            with self._lock:
                self.handles[worker.name] = worker
        self._lease(coordinator, lease_id, worker)

    def _lease(self, coordinator: ActorHandle, lease_id: int, worker: ActorHandle) -> None:
        """Redirect a worker to the coordinator, and report a later death of the worker to it."""
        self._leases[worker.name] = lease_id
        self._control.tell(worker, "redirect", *self._address, lease_id)

        def died(worker: ActorHandle, reason: str) -> None:
            self.note_lost(worker.name, reason)
            if coordinator is self._coordinator() and not self.closed:
                reason = self.watchdog.reason_of(worker.name, reason)
                fault = fault_of(self._control, worker)
                self._control.tell(coordinator, "died", lease_id, reason, fault)

        self._control.on_death(worker, died)

    def kill(self, coordinator: ActorHandle, request: KillProcess) -> None:
        """Kill a worker for the coordinator.

        The death of a worker that has already exited is reported again. Otherwise the coordinator
        would wait for the report forever.
        """
        lease_id, name = request.lease_id, request.worker
        worker = self.handles.get(name)
        if self._leases.get(name) != lease_id:
            self._control.tell(coordinator, "died", lease_id, "another worker has its name")
        elif worker is None or not worker.alive:
            reason, _ = self._lost.get(name, ("it had already exited", 0.0))
            self._control.tell(coordinator, "died", lease_id, reason)
        else:
            self.end(worker)

    def disconnected(self, notice: WorkerDisconnected) -> None:
        """Kill a worker whose connection ended and that does not exit within DISCONNECTED_S.

        Usually the connection ends because the worker died, which is reported separately.
        """
        name = notice.worker
        if self._leases.get(name) != notice.lease_id:
            return  # another worker has the name now
        if (worker := self.handles.get(name)) is not None:
            self._platform.thread(
                lambda: self._kill_disconnected(worker, notice.reason), f"overlord cut {name}"
            )

    def _kill_disconnected(self, worker: ActorHandle, why: str) -> None:
        deadline = time.monotonic() + DISCONNECTED_S
        while worker.alive and time.monotonic() < deadline and not self.closed:
            time.sleep(0.005)
        if worker.alive and not self.closed:
            log.warning("%s killed: its connection to the coordinator ended: %s", worker.name, why)
            self._kill(worker)

    def retire(self, number: int) -> None:
        """End a loader worker that is not needed; it is not reported as lost."""
        self.sources_of.pop(number, None)
        with self._lock:
            worker = self.handles.pop(f"loader-worker/{number}", None)
        if worker is not None:
            with contextlib.suppress(OverlordError):
                self.factory.end(number, worker)

    def moved(self, worker_of: Sequence[int]) -> None:
        """Record the worker of every loader.

        Loaders of a source that ``joined`` has not recorded yet are ignored.
        """
        with self._lock:
            n = sum(self.placement.loaders)
            self.placement = replace(self.placement, host_of=tuple(worker_of[:n]))

    # ends

    def end(self, worker: ActorHandle) -> None:
        """Kill a worker in a thread: Ray may need seconds for each."""
        self._platform.thread(lambda: self._kill(worker), f"overlord kill {worker.name}")

    def _kill(self, worker: ActorHandle) -> None:
        with contextlib.suppress(OverlordError):
            self._control.kill(worker)

    def end_stopped(self) -> None:
        """Kill workers that were stopped (SIGSTOP) during their start for too long."""
        for handle in self.watchdog.overdue():
            log.warning("%s killed: it was stopped during its start", handle.name)
            self.end(handle)

    # losses

    def note_lost(self, name: str, why: str, silent_s: float = 0.0) -> None:
        """Record the loss of a worker. ``silent_s``: seconds since its last answer.

        The first reason counts: if a silent worker is killed, the kill is not the cause.
        """
        if not self.closed and name in self.handles:
            self._lost.setdefault(name, (why, time.monotonic() - silent_s))

    def recovered(self, name: str) -> None:
        """Remove the loss of a worker whose recovery a coordinator has reported."""
        self._lost.pop(name, None)

    def take_recovered(self) -> dict[str, tuple[str, float]]:
        """Remove and return the losses of workers that are alive again: reason and time by name."""
        names = [n for n in list(self._lost) if n in self.handles and self.handles[n].alive]
        # a coordinator may have reported some of them already
        found = {name: self._lost.pop(name, None) for name in names}
        return {name: loss for name, loss in found.items() if loss is not None}

    # added sources

    def prepare(self, prepared: PreparedJob, constructors: Callable[[], Mapping[int, str]]) -> int:
        """Start a loader worker for the last source of a job, wait for it, and return its number.

        ``constructors`` returns the addresses of constructor workers by number.
        """
        source, number = len(prepared.job.sources) - 1, self._next_number
        self._next_number += 1
        name, before = f"loader-worker/{number}", self.prepared
        loaders = (*self.placement.loaders, prepared.loaders_of(source))
        self.prepared = prepared.with_loaders(loaders, MULTI_WORKER_READ_AHEAD)
        self.sources_of[number], self._without = (source,), (number, before)
        try:
            starts = self.prepared.loader_starts(source, Cursor())
            self.linked[number] = addresses = dict(constructors())
            worker = self.factory.loader_worker(number, [source], starts, addresses)
            with self._lock:
                self._preparing.add(name)
                self.handles[name] = worker
            self._control.get(self._control.call(worker, "do", []), START_S)
        except BaseException:
            self.drop(number)
            raise
        finally:
            self._preparing.discard(name)
        return number

    def drop(self, number: int) -> None:
        """End the worker of a source that is not added."""
        self.sources_of.pop(number, None)
        self.linked.pop(number, None)
        of, before = self._without
        if of == number and before is not None:  # a restarted coordinator must not have the source
            self.prepared = before
        worker = self.handles.pop(f"loader-worker/{number}", None)
        if worker is not None and not self.closed:
            self.factory.end(number, worker)

    def joined(self, number: int, loaders: int) -> None:
        """Record that a source was added, with ``loaders`` loaders in a worker of its own."""
        with self._lock:
            had = self.placement
            self.placement = replace(
                had,
                loaders=(*had.loaders, loaders),
                host_of=(*had.host_of, *[number] * loaders),
                n_hosts=had.n_hosts + 1,
            )
