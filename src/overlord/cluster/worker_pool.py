"""The workers of a coordinator: their handles, outboxes, addresses, starts and ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from overlord.cluster.placement import Placement
from overlord.cluster.worker_factory import WorkerStarter
from overlord.concurrency.event_loop import EventLoop
from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, DataStall, OverlordError
from overlord.messages.batches import join_refills
from overlord.messages.control import ConnectConstructor, LoaderStart
from overlord.rpc.actors import ActorHandle, ActorSystem

log = logging.getLogger("overlord")

START_S = 120.0  # for a worker to start: it opens its sources first, and a store may be slow
CLOSE_S = 1.0  # for all workers together to exit
LOADER, CONSTRUCTOR = "loader-worker", "constructor-worker"


# ----------------------------------------------------------------------------
# Handles, outboxes and starts of workers.


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """A worker process, and the messages that are sent to it at the end of the turn."""

    handle: ActorHandle
    out: list[Any] = field(default_factory=list)
    lost: str = ""  # the reason, once it is lost
    joined: bool = True  # False: the worker is being prepared, and the job does not need it yet
    asks: bool = False  # events have arrived; the end of the turn requests the next ones
    incarnation: int = 0  # number of earlier processes of this name
    heartbeat: Future[Any] | None = None  # the last requested heartbeat
    question: Future[Any] | None = None  # the last status query
    address: str = ""  # of a restarted constructor worker, for loader workers
    node: str = ""  # cluster node of a loader worker: workers of a node may be lost together
    # of a loader worker: the addresses of the constructor workers it is connected to
    linked: dict[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.handle.name

    @property
    def number(self) -> int:
        return int(self.name.partition("/")[2])

    @property
    def is_loader(self) -> bool:
        return self.name.startswith(LOADER)

    @property
    def answered(self) -> bool:
        """Whether the last requested heartbeat was answered without an error."""
        beat = self.heartbeat
        return beat is not None and beat.done() and beat.exception() is None


@dataclass(frozen=True, slots=True, eq=False)
class ProcessContext:
    """The actor system, event loop and platform of the coordinator's process."""

    control: ActorSystem
    event_loop: EventLoop
    platform: Platform


@dataclass(frozen=True, slots=True, eq=False)
class WorkerCallbacks:
    """The calls that a pool makes on the event loop.

    ``events`` receives the events of a living worker, ``lost`` a worker that the job needs, with
    the reason. ``started`` and ``start_failed(name, incarnation, reason)`` report a restart.
    """

    events: Callable[[Sequence[Any]], None]
    lost: Callable[[WorkerHandle, str], None]
    started: Callable[[WorkerHandle], None]
    start_failed: Callable[[str, int, str], None]


class WorkerPool:
    """The workers of a coordinator: their starts, messages, polls and ends.

    Runs on: event loop, except where stated.
    """

    def __init__(
        self,
        context: ProcessContext,
        starter: WorkerStarter,
        placement: Placement,
        callbacks: WorkerCallbacks,
    ):
        self._control, self._event_loop = context.control, context.event_loop
        self._platform, self._callbacks = context.platform, callbacks
        self._starter, self._placement = starter, placement
        self.loaders: dict[int, WorkerHandle] = {}
        self.constructors: dict[int, WorkerHandle] = {}
        self.restarted: dict[str, WorkerHandle] = {}  # workers that wait for the next rollback
        self.addresses: dict[int, str] = {}  # of constructor workers, for other workers
        self.closed = False

    # membership

    def workers(self) -> list[WorkerHandle]:
        """Return all workers, lost ones included, loader workers first.

        Restarted workers that wait for a rollback are not included.
        """
        return [*list(self.loaders.values()), *self.constructors.values()]

    def joined(self) -> list[WorkerHandle]:
        """Return the workers that the job needs and that are not lost, restarted ones included."""
        every = [*self.workers(), *self.restarted.values()]
        return [worker for worker in every if worker.joined and not worker.lost]

    def named(self, name: str) -> WorkerHandle | None:
        return next((worker for worker in self.workers() if worker.name == name), None)

    def living(self) -> set[int]:
        """Return the numbers of the loader workers that the job uses and that are not lost."""
        return {h for h, w in list(self.loaders.items()) if w.joined and not w.lost}

    def nodes(self) -> dict[int, str]:
        """Return the cluster nodes of loader workers, by number; empty without a cluster."""
        return {h: worker.node for h, worker in list(self.loaders.items())}

    # messages

    def send(self, h: int, *messages: Any) -> None:
        """Queue messages to a loader worker for the end of the turn."""
        self.loaders[h].out += messages

    def flush(self) -> None:
        """Send the queued messages of this turn: one call per worker."""
        for worker in (*self.constructors.values(), *self.loaders.values()):
            if worker.out or worker.asks:
                self._flush(worker)

    def _flush(self, worker: WorkerHandle) -> None:
        """Send a worker's messages; if its last events have arrived, request the next ones too."""
        messages, worker.out = join_refills(worker.out), []
        asks, worker.asks = worker.asks, False
        if worker.lost:
            return
        if asks:
            self._poll_events(worker, "turn", messages)
        else:
            self.tell(worker, messages)

    def broadcast(self, message: Any) -> None:
        """Queue a message to all loader workers for the end of the turn."""
        for worker in list(self.loaders.values()):  # another thread may add a worker
            worker.out.append(message)

    def tell(self, worker: WorkerHandle, messages: list[Any]) -> None:
        """Send messages to a worker now, not at the end of the turn, and without a reply."""
        self._control.tell(worker.handle, "do", messages)

    def call(self, worker: WorkerHandle, method: str, *args: Any) -> Future[Any]:
        return self._control.call(worker.handle, method, *args)

    def get(self, future: Future[Any], timeout_s: float) -> Any:
        return self._control.get(future, timeout_s)

    def ask(self, worker: WorkerHandle, method: str, *args: Any) -> Future[Any]:
        """Send a status query and return its future.

        While the last query of this worker is unanswered, return a future that has failed.
        """
        if worker.question is None or worker.question.done():
            worker.question = self.call(worker, method, *args)
            return worker.question
        silent = Future[Any]()
        silent.set_exception(DataStall(f"{worker.name} to answer", 0.0))
        return silent

    def ask_heartbeat(self, worker: WorkerHandle) -> None:
        """Request a heartbeat unless a request is pending."""
        if worker.heartbeat is None or worker.heartbeat.done():
            worker.heartbeat = self.call(worker, "beat")

    # events

    def watch(
        self, handle: ActorHandle, *, joined: bool = True, incarnation: int = 0
    ) -> WorkerHandle:
        """Wrap a started worker; receive its events, and detect its death. Runs on: any thread."""
        worker = WorkerHandle(handle, joined=joined, incarnation=incarnation)
        self._control.on_death(
            handle, lambda _, reason: self._event_loop.post(lambda: self._lost(worker, reason))
        )
        self._poll_events(worker, "events")
        return worker

    def _poll_events(self, worker: WorkerHandle, method: str, *args: Any) -> None:
        def answered(future: Future[Any]) -> None:
            if (error := future.exception()) is None:
                self._event_loop.post(lambda: self._received(worker, future.result()))
            elif not isinstance(error, ActorLost):
                reason = f"{type(error).__name__}: {error}"
                self._event_loop.post(lambda: self._lost(worker, reason))

        self.call(worker, method, *args).add_done_callback(answered)

    def _received(self, worker: WorkerHandle, events: Sequence[Any]) -> None:
        if not self.closed and not worker.lost:
            worker.asks = True
            self._callbacks.events(events)

    def _lost(self, worker: WorkerHandle, reason: str) -> None:
        if self.closed or worker.lost:
            return
        worker.lost = reason
        if worker.joined:  # otherwise the code that prepares it detects the loss
            self._callbacks.lost(worker, reason)

    # starting

    def start_all(self, sources: Collection[int], starts: Sequence[LoaderStart]) -> None:
        """Start all workers of a job and wait for them. Runs on: the thread of the start.

        Constructor workers start first, since loader workers connect to them. An error of a source
        is raised here, not with the first step.
        """
        for c in range(self._placement.n_constructors):
            self.constructors[c] = self.watch(self._starter.constructor(c))
        calls = {c: self.call(worker, "address") for c, worker in self.constructors.items()}
        self.addresses = {c: self.get(future, START_S) for c, future in calls.items()}
        for h in range(self._starter.loader_placement.n_hosts):
            mine = [s for s in starts if self._placement.worker(s.loader) == h]
            self._placement.sources_of[h] = frozenset(sources)
            self.loaders[h] = self._spawn_loader(h, sources, mine)
        ready = [(worker, self.call(worker, "node")) for worker in self.loaders.values()]
        for worker, future in ready:
            worker.node = self.get(future, START_S)

    def _spawn_loader(
        self,
        h: int,
        sources: Collection[int],
        starts: Sequence[LoaderStart] = (),
        instead_of: int | None = None,
        *,
        joined: bool = True,
        incarnation: int = 0,
    ) -> WorkerHandle:
        linked = dict(self.addresses)
        handle = self._starter.loader_worker(h, sources, starts, linked, instead_of)
        worker = self.watch(handle, joined=joined, incarnation=incarnation)
        worker.linked = linked
        return worker

    def wait_for(self, worker: WorkerHandle, method: str, *args: Any) -> Any:
        """Return the answer of a starting worker; kill one that does not answer within START_S."""
        try:
            return self.get(self.call(worker, method, *args), START_S)
        except DataStall:
            self.kill(worker.handle)
            raise

    def start_scaled(
        self,
        h: int,
        started: Callable[[WorkerHandle], None],
        failed: Callable[[WorkerHandle | None, str], None],
        instead_of: int | None = None,
    ) -> None:
        """Start one more loader worker in a thread; a callback receives the outcome.

        Callbacks run on the event loop. ``failed`` receives None if no process was started.
        """
        self._platform.thread(
            lambda: self._start_scaled(h, started, failed, instead_of),
            f"overlord start {LOADER}/{h}",
        )

    def _start_scaled(
        self,
        h: int,
        started: Callable[[WorkerHandle], None],
        failed: Callable[[WorkerHandle | None, str], None],
        instead_of: int | None,
    ) -> None:
        worker: WorkerHandle | None = None
        try:
            sources = self._placement.sources_of[h]
            worker = self._spawn_loader(h, sources, (), instead_of, joined=False)
            worker.node = self.wait_for(worker, "node")
        except Exception as fault:
            reason = f"{type(fault).__name__}: {fault}"
            self._event_loop.post(lambda: failed(worker, reason))
        else:
            self._event_loop.post(lambda: started(worker))

    # restarting

    def restart(self, name: str, incarnation: int) -> None:
        """Start a lost worker again, in a thread."""
        self._platform.thread(lambda: self._restart(name, incarnation), f"overlord start {name}")

    def _restart(self, name: str, incarnation: int) -> None:
        kind, _, number = name.partition("/")
        start = self._restart_constructor if kind == CONSTRUCTOR else self._restart_loader
        try:
            worker = start(int(number), incarnation)
        except Exception as fault:
            reason = f"{type(fault).__name__}: {fault}"
            if isinstance(fault, ActorLost) and fault.name == name:
                reason = fault.reason
            self._event_loop.post(lambda: self._restart_failed(name, incarnation, reason))
        else:
            self._event_loop.post(lambda: self._is_restarted(worker))

    def _restart_constructor(self, c: int, incarnation: int) -> WorkerHandle:
        worker = self.watch(self._starter.constructor(c), incarnation=incarnation)
        worker.address = self.wait_for(worker, "address")
        return worker

    def _restart_loader(self, h: int, incarnation: int) -> WorkerHandle:
        worker = self._spawn_loader(h, self._placement.sources_of[h], incarnation=incarnation)
        worker.node = self.wait_for(worker, "node")
        return worker

    def _restart_failed(self, name: str, incarnation: int, reason: str) -> None:
        if not self.closed:
            log.warning("%s not started: %s", name, reason)
            self._callbacks.start_failed(name, incarnation, reason)

    def _is_restarted(self, worker: WorkerHandle) -> None:
        """Set a restarted worker aside until the rollback, since it has no step in progress."""
        if self.closed or worker.lost:
            return
        self.restarted[worker.name] = worker
        if not worker.is_loader:  # for loader workers that are started next
            self.addresses[worker.number] = worker.address
        self._callbacks.started(worker)

    def adopt(self, worker: WorkerHandle) -> None:
        """Replace a lost worker by its restarted one."""
        (self.loaders if worker.is_loader else self.constructors)[worker.number] = worker

    def adopt_restarted(self) -> dict[str, WorkerHandle]:
        """Adopt all restarted workers and return them by name."""
        restarted, self.restarted = self.restarted, {}
        for worker in restarted.values():
            self.adopt(worker)
        return restarted

    def link(self, worker: WorkerHandle) -> None:
        """Connect a loader worker to the constructor workers whose address it does not have."""
        for c, address in self.addresses.items():
            if worker.linked.get(c) != address:
                worker.linked[c] = address
                worker.out.append(ConnectConstructor(c, address, self._starter.token))

    def link_all(self) -> None:
        """Connect all joined loader workers to constructor workers that were restarted."""
        for worker in list(self.loaders.values()):
            if worker.joined:
                self.link(worker)

    # ending

    def kill_incarnation(self, name: str, incarnation: int, reason: str) -> None:
        every = [*self.workers(), *self.restarted.values()]
        for worker in [w for w in every if w.name == name and w.incarnation == incarnation]:
            log.warning("%s killed: %s", name, reason)
            self._kill_later(worker.handle)

    def _kill_later(self, handle: ActorHandle) -> None:
        self._platform.thread(lambda: self.kill(handle), f"overlord kill {handle.name}")

    def kill(self, handle: ActorHandle) -> None:
        """Kill a worker; log a failure. Runs on: any thread."""
        try:
            self._control.kill(handle)
        except OverlordError as fault:  # a disk may block its exit; its name is taken until then
            log.warning("%s not killed: %s", handle.name, fault)

    def retire(self, h: int, worker: WorkerHandle) -> None:
        """End a loader worker that is not needed, in a thread: a disk may block it."""
        self._platform.thread(lambda: self._retire(h, worker), f"overlord end {worker.name}")

    def _retire(self, h: int, worker: WorkerHandle) -> None:
        try:
            self.end(h, worker)
        except OverlordError as fault:
            log.warning("%s not ended: %s", worker.name, fault)

    def end(self, h: int, worker: WorkerHandle) -> None:
        """End a loader worker for good. Runs on: any thread."""
        self._starter.end(h, worker.handle)

    def close(self) -> None:
        self._control.shutdown(CLOSE_S)

    # statistics

    def poll(
        self, workers: Iterable[WorkerHandle], method: str, answered: Callable[[str, Any], None]
    ) -> None:
        """Call a method of workers; pass each worker's name and answer to ``answered``.

        The answer is None for a call that failed. ``answered`` runs on the event loop.
        """
        for worker in workers:
            self.call(worker, method).add_done_callback(
                lambda future, name=worker.name: self._polled(name, future, answered)  # type: ignore[misc]
            )

    def _polled(self, name: str, future: Future[Any], answered: Callable[[str, Any], None]) -> None:
        answer = future.result() if future.exception() is None else None
        self._event_loop.post(lambda: answered(name, answer))
