"""The start of a job's workers, and the choice of their nodes on a cluster."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, Protocol

import numpy as np

from overlord.cluster.constructor_worker import ConstructorWorker
from overlord.cluster.loader_worker import LoaderWorker
from overlord.cluster.worker import Worker, WorkerConfig
from overlord.concurrency.platform import Platform
from overlord.constructor.assembler import BUILD_AHEAD
from overlord.job.hooks import CONSTRUCTOR, LOADER
from overlord.messages.control import LoaderStart
from overlord.messages.launcher import (
    RedirectWorker,
    RetireWorker,
    StartConstructorWorker,
    StartLoaderWorker,
)
from overlord.process.code import sendable
from overlord.ray.node_choice import (
    Layout,
    Node,
    Spot,
    Surplus,
    at_most,
    choose,
    constructors_by_node,
    labels_wanted,
    moves,
    node_without_ranks,
    spot_for_restart,
    surplus,
    without_job,
)
from overlord.rpc.actors import ActorHandle, ActorSystem
from overlord.rpc.peers import RpcServer
from overlord.scaling.loader_placement import LoaderPlacement
from overlord.setup.options import CORES_PER_CONSTRUCTOR, Options, n_cores, ring_bytes
from overlord.setup.partition import scales
from overlord.setup.prepared_job import READ_AHEAD, PreparedJob, ReaderSpec

log = logging.getLogger("overlord")

# ----------------------------------------------------------------------------
# The nodes of a job's workers on a cluster: chosen at their start, and reviewed while they run.
#
# ``ray/node_choice.py`` decides, as pure functions. ``NodePlacement`` holds the resources of the
# nodes, the workers placed so far, and the times.

# seconds until the free resources of a node no longer include those that were just requested
SETTLED_S = 5.0
REVIEW_S = 2.0  # seconds between two reviews
PROPOSE_AGAIN_S = 60.0  # seconds until a worker that was to move and did not is proposed again

# Called with the numbers of the loader workers that are to move, and with a callback to call if the
# move is accepted. It is not accepted while another migration is in progress.
Move = Callable[[list[int], Callable[[], None]], None]


class NodePlacement:
    """The nodes of one job's workers. Runs on: any thread."""

    def __init__(self, control: ActorSystem, layout: Callable[[], Layout]):
        self._control, self._layout = control, layout
        self._placed: dict[str, Spot] = {}  # by worker
        self._memory: dict[str, int] = {}  # bytes that a placed worker needs, by worker
        # nodes without the workers of this job, when their free resources had last settled
        self._nodes: dict[str, Node] = {}
        self._last_start = -math.inf
        # workers that are to move by the last review -> the new node, and the node they leave
        self._wanted: dict[str, tuple[str, str]] = {}
        self._moved: dict[str, float] = {}  # workers whose move was accepted -> the time
        # nodes with ranks whose share is exceeded -> the time since when, and the surplus
        self._crowded: dict[str, tuple[float, Surplus]] = {}
        self._lock = Lock()  # several threads start workers

    def place(self, name: str, memory: int) -> dict[str, Any]:
        """Return the node and resources of a worker, as arguments of ``spawn``.

        ``memory`` is in bytes. A restarted worker keeps its node, if that is alive. The result is
        empty without a cluster.
        """
        if not (nodes := self._living_nodes()):
            return {}
        layout = self._layout()
        with self._lock:
            if time.monotonic() - self._last_start > SETTLED_S:
                self._nodes = {}  # the current free resources include all requests
            before = self._placed.get(name)
            if before is None or (spot := spot_for_restart(before, nodes)) is None:
                spot = choose(name, self._without_job(nodes, name), layout, self._placed, memory)
            self._placed[name], self._memory[name], self._last_start = (
                spot,
                memory,
                time.monotonic(),
            )
        asked = {"cpus": spot.cores, "memory": float(spot.memory), **spot.resources}
        return {"node": spot.node or labels_wanted(nodes, layout) or None, "resources": asked}

    def coordinator(self, restarts: bool) -> dict[str, Any]:
        """Return the node of the coordinator, as an argument of ``spawn``.

        ``restarts``: a lost coordinator is restarted. Then it is a node without ranks; the result
        is empty if there is none, or without ``rank_nodes``. Otherwise it is the node of this
        process, so that the job depends on no further node. The coordinator requests no resources.
        """
        if not restarts:
            here = getattr(self._control, "node_here", str)()
            return {"node": here} if here else {}
        found = (
            node_without_ranks(nodes, layout)
            if (nodes := self._living_nodes()) and (layout := self._layout()).rank_nodes
            else None
        )
        return {} if found is None else {"node": found.id}

    def forget(self, name: str) -> None:
        """Remove a worker that has ended and is not restarted."""
        with self._lock:
            self._placed.pop(name, None)
            self._memory.pop(name, None)

    def memory_of(self, name: str) -> int | None:
        """Return the bytes that a worker was placed with; None for an unknown worker."""
        return self._memory.get(name)

    def review(self) -> list[str]:
        """Log the nodes whose share is exceeded; return the loader workers that are to move.

        The next review returns them again, until ``accept`` is called for them.
        """
        nodes, layout, now = self._living_nodes(), self._layout(), time.monotonic()
        with self._lock:
            if not nodes or now - self._last_start <= SETTLED_S:
                return []
            self._nodes = {}
            free = self._without_job(nodes)
            self._report(surplus(free, layout, self._placed, self._memory), now)
            found = moves(free, layout, self._placed, self._memory)
            self._moved = {name: at for name, at in self._moved.items() if name in self._placed}
            names = {n.id: n.name or n.address for n in nodes}
            self._wanted = {
                worker: (names[spot.node], names.get(self._placed[worker].node, ""))
                for worker, spot in found.items()
                if now - self._moved.get(worker, -math.inf) > PROPOSE_AGAIN_S
            }
            return list(self._wanted)

    def accept(self, workers: Sequence[str]) -> None:
        """Record that workers move, and log it.

        A worker that has not moved after ``PROPOSE_AGAIN_S`` is proposed again.
        """
        with self._lock:
            for worker in workers:
                if worker in self._wanted:
                    to, at = self._wanted.pop(worker)
                    self._moved[worker] = time.monotonic()
                    log.warning(
                        "%s moves to node %s, which has room: node %s exceeds sidecar=%g",
                        worker,
                        to,
                        at,
                        self._layout().share,
                    )

    def metrics(self) -> dict[str, Any]:
        """Return the nodes with ranks that run more workers than ``sidecar`` allows.

        The result is empty without a cluster.
        """
        now, share = time.monotonic(), self._layout().share
        with self._lock:
            if not self._placed:
                return {}
            rows = [
                {
                    "node": s.node.name or s.node.address,
                    "hosts": s.workers,
                    "allowed": s.allowed,
                    "for_s": now - since,
                }
                for since, s in self._crowded.values()
            ]
        return {"sidecar": share, "exceeded": rows}

    def _living_nodes(self) -> list[Node]:
        return getattr(self._control, "nodes", list)()

    def _without_job(self, nodes: Sequence[Node], name: str = "") -> list[Node]:
        """Return the nodes, with resources of this job's workers except ``name`` counted as idle.

        The caller holds the lock.
        """
        living: Collection[str] = getattr(self._control, "asked", dict)()
        ours = [
            spot for worker, spot in self._placed.items() if worker in living and worker != name
        ]
        free = [without_job(n, [s for s in ours if s.node == n.id]) for n in nodes]
        self._nodes = {n.id: self._nodes.get(n.id, n) for n in free}
        return [at_most(n, self._nodes[n.id]) for n in free]

    def _report(self, found: Sequence[Surplus], now: float) -> None:
        crowded = {s.node.id: s for s in found if s.has_ranks}
        for node, s in crowded.items():
            if node not in self._crowded:
                log.warning(
                    "node %s runs %d workers of this job, and sidecar=%g allows %d; loader workers "
                    "move when another node has room",
                    s.node.name or s.node.address,
                    s.workers,
                    self._layout().share,
                    s.allowed,
                )
        for node, (since, s) in self._crowded.items():
            if node not in crowded:
                log.warning(
                    "node %s runs no more workers than sidecar allows; it exceeded that for %.0f s",
                    s.node.name or s.node.address,
                    now - since,
                )
        self._crowded = {
            node: (self._crowded.get(node, (now, s))[0], s) for node, s in crowded.items()
        }


def watch(
    placement: NodePlacement, machine: Platform, control: ActorSystem, move: Move
) -> Callable[[], None]:
    """Review the placement every ``REVIEW_S``; return the function that ends the reviews.

    Reviews run in a thread of their own, since a cluster may be slow to answer. Without a cluster
    there are none.
    """
    if not getattr(control, "nodes", list)():
        return lambda: None

    def review() -> None:
        try:
            if found := placement.review():
                move(
                    [int(name.rpartition("/")[2]) for name in found],
                    lambda: placement.accept(found),
                )
        except Exception:  # moves can wait for the next review
            log.exception("node placement not reviewed; the next review is in %g s", REVIEW_S)

    return machine.every(REVIEW_S, review, "overlord places")


# ----------------------------------------------------------------------------
# The worker factory: starts the workers of a job.
#
# A process receives code only at its start, so the factory stays in the launching process. The
# coordinator requests workers by number.

# memory of a worker before it has read anything: Python, pyarrow, and libraries of a cluster
PROCESS_BYTES = 2**27
# steps to read ahead with several workers: they are not equally fast at every step
MULTI_WORKER_READ_AHEAD = 8


def n_constructors(prepared: PreparedJob) -> int:
    """Return the number of constructor workers of a job."""
    buckets = len(list(prepared.job.place.buckets("DP")))
    return prepared.options.constructor_hosts or min(
        buckets, max(1, n_cores() // CORES_PER_CONSTRUCTOR)
    )


def constructors_of(prepared: PreparedJob, workers: int | None = None) -> list[int]:
    """Return the constructor worker of every data-parallel group.

    ``workers`` is the number of constructor workers; by default that of the job.
    """
    named = tuple(prepared.options.rank_nodes or ())
    nodes_of = [
        [named[rank] for rank in ranks if rank < len(named)]
        for ranks in prepared.job.place.buckets("DP")
    ]
    return constructors_by_node(nodes_of, n_constructors(prepared) if workers is None else workers)


def read_ahead_of(loader_placement: LoaderPlacement, scaled: bool = False) -> int:
    """Return the number of steps to read ahead of the draw, if no launch option sets it.

    ``scaled``: workers may be added later.
    """
    return MULTI_WORKER_READ_AHEAD if loader_placement.n_hosts > 1 or scaled else READ_AHEAD


def loader_threads(options: Options, loader_placement: LoaderPlacement) -> int:
    """Return the number of threads of every loader worker.

    Threads are not cores: see ``scaling/loader_placement.py``.
    """
    if loader_placement.threads and options.workers is None:
        return loader_placement.threads
    return max(1, (options.workers or n_cores()) // loader_placement.n_hosts)


def settings_of(
    prepared: PreparedJob,
    loader_placement: LoaderPlacement,
    token: str,
    generation: int,
    machine: Platform | None = None,
) -> WorkerConfig:
    """Return the settings that all workers share."""
    options = prepared.options
    return WorkerConfig(
        name=prepared.job.name,
        token=token,
        generation=generation,
        workers=loader_threads(options, loader_placement),
        open_files=max(1, options.open_files // loader_placement.n_hosts),
        open_bytes=max(1, options.open_bytes // loader_placement.n_hosts),
        ring_bytes=ring_bytes(options),
        check=options.check,
        feedback_lag=prepared.job.feedback_lag,
        one_worker=scales(prepared),
        build_ahead=options.build_ahead or BUILD_AHEAD,
        broadcast=options.broadcast,
        failover=options.failover,
        narrow=not prepared.job.hooks_of(CONSTRUCTOR),
        machine=machine or Platform(),
    )


def layout_of(prepared: PreparedJob, constructor_of: Sequence[int]) -> Layout:
    """Return the layout of the launch options, with the ranks of each constructor worker."""
    buckets, options = list(prepared.job.place.buckets("DP")), prepared.options
    served = [
        tuple(r for b, c in enumerate(constructor_of) if c == worker for r in buckets[b])
        for worker in range(max(constructor_of) + 1)
    ]
    return replace(layout_asked(options), ranks_of=tuple(served))


def layout_asked(options: Options) -> Layout:
    """Return the layout that the launch options describe."""
    return Layout(
        rank_nodes=tuple(options.rank_nodes or ()),
        share=options.sidecar,
        reserve=options.reserve,
        labels=dict(options.node_labels or {}),
        resources=dict(options.node_resources or {}),
    )


class WorkerStarter(Protocol):
    """The interface that starts workers without waiting for them and returns their handles."""

    loader_placement: LoaderPlacement
    token: str

    def constructor(self, c: int) -> ActorHandle:
        """Start a constructor worker."""

    def loader_worker(
        self,
        h: int,
        sources: Collection[int],
        openings: Sequence[LoaderStart],
        constructors: Mapping[int, str],
        instead_of: int | None = None,
    ) -> ActorHandle:
        """Start a loader worker. ``instead_of``: the worker whose loaders it is to read, if any."""

    def end(self, h: int, handle: ActorHandle) -> None:
        """End a loader worker that is not needed any more; may block."""


class WorkerFactory:
    """The ``WorkerStarter`` of the launching process, which has the workers' code and settings.

    ``prepared`` returns the current prepared job: sources may have been added.
    """

    def __init__(
        self,
        control: ActorSystem,
        prepared: Callable[[], PreparedJob],
        settings: WorkerConfig,
        loader_placement: LoaderPlacement,
        constructor_of: Sequence[int],
    ):
        self.loader_placement, self.token = loader_placement, settings.token
        self._control, self._prepared, self._settings = control, prepared, settings
        self._constructor_of = np.asarray(constructor_of)
        job = prepared().job
        self._hooks, self._seed = job.hooks_of(LOADER), job.seed  # a source may be added, no hook
        self._incarnations = itertools.count(1)
        self.placement = NodePlacement(
            control, lambda: layout_of(self._prepared(), self._constructor_of.tolist())
        )
        self._reader_specs: dict[
            int, ReaderSpec
        ] = {}  # of sources whose code was checked to be sendable

    def constructor(self, c: int) -> ActorHandle:
        prepared = self._prepared()
        job, ranks, hooks = (
            prepared.job,
            list(prepared.job.place.buckets("DP")),
            prepared.job.hooks_of(CONSTRUCTOR),
        )
        buckets = {b: tuple(ranks[b]) for b in np.flatnonzero(self._constructor_of == c).tolist()}
        return self._spawn(
            f"constructor-worker/{c}",
            PROCESS_BYTES,
            ConstructorWorker,
            c,
            self._settings,
            buckets,
            job.batches if job.stages else job.batch,
            job.document_multiple,
            hooks,
            prepared.images,
        )

    def loader_worker(
        self,
        h: int,
        sources: Collection[int],
        openings: Sequence[LoaderStart],
        constructors: Mapping[int, str],
        instead_of: int | None = None,
    ) -> ActorHandle:
        reader_specs = {i: self._reader_spec(i) for i in sorted(sources)}
        memory = self._memory_of(h if instead_of is None else instead_of)
        return self._spawn(
            f"loader-worker/{h}",
            memory,
            LoaderWorker,
            h,
            replace(self._settings, incarnation=next(self._incarnations)),
            reader_specs,
            openings,
            constructors,
            self._hooks,
            self._seed,
        )

    def _spawn(
        self, name: str, memory: int, factory: Callable[..., Worker], *args: Any
    ) -> ActorHandle:
        """Place a worker and start it.

        If the start fails, the placement is removed, unless the worker was placed before: then the
        start is retried there.
        """
        is_new = self.placement.memory_of(name) is None
        where = self.placement.place(name, memory)
        try:
            return self._control.spawn(factory, *args, name=name, **where)
        except BaseException:
            if is_new:
                self.placement.forget(name)
            raise

    def _memory_of(self, h: int) -> int:
        known = self.placement.memory_of(f"loader-worker/{h}")
        return (
            PROCESS_BYTES + sum(self.loader_placement.memory[h : h + 1]) if known is None else known
        )

    def end(self, h: int, handle: ActorHandle) -> None:
        self.placement.forget(handle.name)
        self._control.kill(handle)

    def _reader_spec(self, i: int) -> ReaderSpec:
        prepared = self._prepared()
        if (
            i not in self._reader_specs
            or self._reader_specs[i].pipeline is not prepared.pipelines[i]
        ):  # the source was replaced: an earlier one of this number was not added
            self._reader_specs[i] = sendable(
                prepared.reader_spec(i), f"source {prepared.job.sources[i].name!r}"
            )
        return self._reader_specs[i]


class RemoteWorkerFactory:
    """The ``WorkerStarter`` of a coordinator: it requests workers from the launching process.

    The workers then connect to this process.
    """

    def __init__(
        self,
        peers: RpcServer,
        send: Callable[[Any], None],
        loader_placement: LoaderPlacement,
        token: str,
    ):
        self.loader_placement, self.token = loader_placement, token
        self._peers, self._send = peers, send

    def constructor(self, c: int) -> ActorHandle:
        handle, lease_id = self._peers.expect(f"constructor-worker/{c}")
        self._send(StartConstructorWorker(lease_id, c))
        return handle

    def loader_worker(
        self,
        h: int,
        sources: Collection[int],
        openings: Sequence[LoaderStart],
        constructors: Mapping[int, str],
        instead_of: int | None = None,
    ) -> ActorHandle:
        handle, lease_id = self._peers.expect(f"loader-worker/{h}")
        message = StartLoaderWorker(
            lease_id, h, sorted(sources), list(openings), dict(constructors), instead_of
        )
        self._send(message)
        return handle

    def end(self, h: int, handle: ActorHandle) -> None:
        self._send(RetireWorker(h))

    def living(self, name: str) -> ActorHandle:
        """Redirect a running worker to this coordinator and return its handle.

        The worker was started for another coordinator, or in advance.
        """
        handle, lease_id = self._peers.expect(name)
        self._send(RedirectWorker(lease_id, name))
        return handle
