"""The start of a coordinator: the first of a session, or one that takes over a lost one's workers.

The launching process starts workers at the coordinator's request. A coordinator that takes over
reads its state from the journal, adopts the living workers, and rolls back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from overlord.cluster.coordinator import Coordinator
from overlord.cluster.coordinator_config import CoordinatorConfig, Incarnation
from overlord.cluster.rebalance import FIRST_SCALED
from overlord.cluster.worker_factory import RemoteWorkerFactory
from overlord.cluster.worker_pool import START_S, WorkerHandle
from overlord.concurrency.event_loop import EventLoop
from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, DataStall, OverlordError
from overlord.journal.replay import Recovered
from overlord.messages.control import Attach, Detach, DropLoader, StreamState
from overlord.messages.launcher import RetireWorker, WaitingForWorkers, WorkerGivenUp
from overlord.planning.schedule.base import learns
from overlord.planning.schedule.by_stage import job_schedule
from overlord.rpc.actors import ActorHandle
from overlord.rpc.peers import RpcServer

# seconds for constructor workers to return the last steps of their clients; later answers are
# ignored, and only the journal counts
TAKEN_S = 5.0
TRIES = 3  # attempts to start a worker, which may die meanwhile
AWAITED_S = 1.0  # after this time the workers that did not answer are reported
# the method that the coordinator calls when it takes a worker over
FIRST_CALLS = {"constructor-worker": "address", "loader-worker": "metrics"}

Send = Callable[[Any], None]  # a message to the launching process


def last_acked(found: Recovered, taken: Sequence[int | None]) -> int:
    """Return the last step that every rank took.

    ``taken`` has the last step of each rank, None if unknown. The result is the step of the
    journal, or a later one if every rank is known to have taken it.
    """
    known = [step for step in taken if step is not None]
    return max(found.acked, min(known)) if known and len(known) == len(taken) else found.acked


def first_coordinator(
    config: CoordinatorConfig,
    peers: RpcServer,
    event_loop: EventLoop,
    starter: RemoteWorkerFactory,
    platform: Platform | None = None,
) -> Coordinator:
    """Return the first coordinator of a session, whose workers have started."""
    coordinator = Coordinator(
        config.prepared,
        config.state,
        peers,
        event_loop,
        platform or Platform(),
        starter,
        Incarnation(),
    )
    return coordinator.start()


class Takeover:
    """The takeover of a lost coordinator's workers by a new coordinator.

    ``found`` is the content of the journal. ``send`` sends messages to the launching process. After
    construction ``coordinator`` has its workers. Once its journal is open, ``roll_back`` starts to
    plan.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        peers: RpcServer,
        event_loop: EventLoop,
        starter: RemoteWorkerFactory,
        found: Recovered,
        platform: Platform | None = None,
        *,
        send: Send,
    ):
        self._config, self._peers, self._starter, self._send = config, peers, starter, send
        self._platform = platform or Platform()
        self._answers: dict[str, Any] = {}  # answers of living workers to their first call
        self._open_loaders: dict[int, set[int]] = {}  # loaders that each loader worker has open
        # the state after the last step that all ranks took, as it was planned
        self.acked_state: StreamState | None = None
        self.acked_by_rank: dict[int, int] = {}  # rank -> the last step it took, where known
        self._handles = {name: starter.living(name) for name in config.living}
        self._ask_living()
        state, prepared = config.state, config.prepared
        if not found.empty:
            taken = self._taken_since()
            self.acked_by_rank = {
                rank: step
                for rank, step in zip(config.attached, taken, strict=True)
                if step is not None and step >= 0
            }
            # Where the mixture learns, a step counts once the reports before it have arrived. The
            # workers send both again after the rollback.
            last = last_acked(found, [] if learns(job_schedule(config.prepared.job)) else taken)
            state, self.acked_state = found.state(last), found.bare(last)
            prepared = prepared.first(len(found.names), found.fingerprint).with_floor(
                found.next_step
            )  # type: ignore[assignment]
        starter.loader_placement = config.placement_of(len(prepared.specs))
        self.coordinator = Coordinator(
            prepared,
            state,
            peers,
            event_loop,
            self._platform,
            starter,
            Incarnation(config.incarnation, found.planned),
        )
        with self.coordinator.closed_on_error():
            self._adopt_workers()
            for rank in config.attached:
                self.coordinator.take_over_rank(rank)
            self.coordinator.begin()

    def claim(self, name: str) -> ActorHandle:
        """Return the handle of a running worker that was prepared for an added source."""
        handle = self._handles.pop(name, None)
        return self._starter.living(name) if handle is None else handle

    # living workers

    def _ask_living(self) -> None:
        """Call all living workers concurrently; give up those that do not answer in time."""
        peers = self._peers
        calls = {name: self._ask(handle) for name, handle in self._handles.items()}
        begun, lost_after_s = self._platform.now(), self._config.prepared.options.lost_after_s
        for until_s in sorted({min(AWAITED_S, lost_after_s / 2), lost_after_s}):
            for name in [name for name in calls if name not in self._answers]:
                try:
                    self._answers[name] = self._answer_by(name, calls[name], begun + until_s)
                except DataStall:
                    continue
                except OverlordError:  # it died meanwhile, or cannot answer
                    del calls[name]
            self._send(WaitingForWorkers([name for name in calls if name not in self._answers]))
        silent = {
            name: self._handles.pop(name)
            for name in list(self._handles)
            if name not in self._answers
        }
        for name in [name for name in silent if name in calls]:
            self._send(WorkerGivenUp(name, f"it answered nothing for {lost_after_s:g} s"))
        # a name is taken until its process has exited: the next start of that name waits for it
        with contextlib.suppress(OverlordError):
            peers.kill_all([handle for handle in silent.values() if handle.alive])
        self._send(WaitingForWorkers([]))

    def _ask(self, handle: ActorHandle) -> Future[Any]:
        return self._peers.call(handle, FIRST_CALLS[handle.name.partition("/")[0]])

    def _answer_by(self, name: str, future: Future[Any], deadline: float) -> Any:
        """Return the answer of a worker; repeat a call that a busy event loop refused."""
        while True:
            try:
                return self._peers.get(future, max(0.0, deadline - self._platform.now()))
            except DataStall:
                if self._platform.now() >= deadline or not future.done():
                    raise
                future = self._ask(self._handles[name])

    def _taken_since(self) -> list[int | None]:
        """Return the last step that each attached rank took; None if its worker does not answer."""
        groups = self._config.prepared.job.place.buckets("DP")
        group_of = {rank: b for b, ranks in enumerate(groups) for rank in ranks}
        calls = []
        for rank in self._config.attached:
            name = f"constructor-worker/{self._config.constructor_of[group_of[rank]]}"
            handle = self._handles.get(name)
            calls.append(None if handle is None else self._peers.call(handle, "taken", rank))
        found: list[int | None] = []
        lost_after_s = self._config.prepared.options.lost_after_s
        deadline = self._platform.now() + min(TAKEN_S, lost_after_s)
        for future in calls:
            try:
                found.append(
                    None
                    if future is None
                    else int(self._peers.get(future, max(0.0, deadline - self._platform.now())))
                )
            except OverlordError:
                found.append(None)
        return found

    # the workers of the job

    def _adopt_workers(self) -> None:
        """Give the coordinator its workers: adopt living ones, and start the others."""
        pool, placement, starter = self.coordinator.pool, self.coordinator.placement, self._starter
        placement.sources_of = {h: frozenset(sources) for h, sources in self._config.sources_of}
        cs = range(placement.n_constructors)
        found = self._adopt_or_start(
            {f"constructor-worker/{c}": lambda c=c: starter.constructor(c) for c in cs}  # type: ignore[misc]
        )
        for c, (worker, address) in zip(cs, found.values(), strict=True):
            pool.constructors[c], pool.addresses[c] = worker, address
        for h in list(placement.sources_of):
            if self._is_spare(h):
                del placement.sources_of[h]
                self._send(RetireWorker(h))
        wanted = {
            h: (h, sources, (), pool.addresses)
            for h, sources in sorted(placement.sources_of.items())
            if min(sources) < len(placement.loaders)
        }
        found = self._adopt_or_start(
            {
                f"loader-worker/{h}": lambda args=args: starter.loader_worker(*args)  # type: ignore[misc]
                for h, args in wanted.items()
            }
        )
        for h, (worker, metrics) in zip(wanted, found.values(), strict=True):
            pool.loaders[h], worker.node = worker, metrics["node"]
            self._open_loaders[h] = {row["loader"] for row in metrics["loaders"]}
        # a worker may have been retired before the launching process was sent the move
        placement.replace_missing(pool.loaders)

    def _is_spare(self, h: int) -> bool:
        """Return whether a worker of the autoscaler has no loader, is not alive and is not needed.

        Its start may have failed. A worker that alone can open a source is needed: it may have
        replaced others before the launching process was informed.
        """
        placement = self.coordinator.placement
        others = {
            source
            for other, sources in placement.sources_of.items()
            if other != h
            for source in sources
        }
        there = f"loader-worker/{h}" in self._handles or h in placement.worker_of
        return h >= FIRST_SCALED and not there and others.issuperset(placement.sources_of[h])

    def _adopt_or_start(
        self, starts: Mapping[str, Callable[[], ActorHandle]]
    ) -> dict[str, tuple[WorkerHandle, Any]]:
        """Return workers of one kind, and their answers to the first call; start missing ones.

        Missing workers start concurrently, each with at most TRIES attempts.
        """
        pool = self.coordinator.pool
        found = {
            name: (pool.watch(self._handles.pop(name)), self._answers[name])
            for name in starts
            if name in self._handles
        }
        for tries_left in reversed(range(TRIES)):
            workers = {
                name: pool.watch(start()) for name, start in starts.items() if name not in found
            }
            calls = {name: self._ask(worker.handle) for name, worker in workers.items()}
            deadline = self._platform.now() + START_S
            for name, worker in workers.items():
                timeout_s = max(0.0, deadline - self._platform.now())
                try:
                    found[name] = (worker, self._peers.get(calls[name], timeout_s))
                except (ActorLost, DataStall) as fault:
                    if not tries_left or (isinstance(fault, ActorLost) and fault.name != name):
                        raise
                    worker.lost = fault.reason if isinstance(fault, ActorLost) else str(fault)
                    if worker.handle.alive:
                        pool.kill(worker.handle)
        return {name: found[name] for name in starts}

    def roll_back(self) -> Coordinator:
        """Roll all workers back to the state of this coordinator, and return it.

        The attached ranks may differ from those that constructor workers have recorded.
        """
        coordinator = self.coordinator
        pool, placement = coordinator.pool, coordinator.placement
        for rank in sorted(placement.bucket_of):
            message = Attach(rank) if rank in coordinator.attached else Detach(rank)
            pool.constructors[placement.constructor(rank)].out.append(message)
        coordinator.rollback(self._config.reason)
        for h, opened in self._open_loaders.items():  # loaders that moved, or former standbys
            follows = {k for k, w in coordinator.standby.worker_of.items() if w == h}
            unused = sorted(opened - {*placement.loaders_on(h)} - follows)
            pool.send(h, *map(DropLoader, unused))
        coordinator.rebalancer.retire_idle(h for h in pool.loaders if h >= FIRST_SCALED)
        coordinator.run()
        return coordinator
