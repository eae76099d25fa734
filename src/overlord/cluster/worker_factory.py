"""Starts the workers of a job, and chooses their nodes on a cluster."""

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
from overlord.job.hooks import CONSTRUCTOR, LOADER, of_kind
from overlord.messages.control import LoaderStart
from overlord.process.forkserver import sendable
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
from overlord.scaling.loader_placement import LoaderPlacement
from overlord.setup.options import CORES_PER_CONSTRUCTOR, Options, n_cores, ring_bytes
from overlord.setup.partition import scales
from overlord.setup.prepared_job import READ_AHEAD, PreparedJob, ReaderSpec

log = logging.getLogger("overlord")

# ----------------------------------------------------------------------------
# Where the hosts of a job are on the nodes of a cluster: chosen when they start, reviewed while
# they run.
#
# ``placing.py`` decides, purely. This file holds the figures of the nodes, the hosts placed so
# far, and the clock.

SETTLED_S = 5.0  # until what was asked of a cluster is missing from the figures of its nodes
REVIEW_S = 2.0  # between two reviews
AGAIN_S = 60.0  # until a host that should have moved is proposed again

# Takes the numbers of the loader hosts that are to move, and what to call once the move is
# accepted. Another change may be under way.
Move = Callable[[list[int], Callable[[], None]], None]


class NodePlacement:
    """The hosts of one job by node. Runs on: any thread."""

    def __init__(self, control: ActorSystem, layout: Callable[[], Layout]):
        self._control, self._layout = control, layout
        self._placed: dict[str, Spot] = {}  # hosts by name
        self._memory: dict[str, int] = {}  # bytes that each of them needs
        self._nodes: dict[
            str, Node
        ] = {}  # as they would be without this job, when their figures had last settled
        self._last_start = -math.inf
        self._wanted: dict[
            str, tuple[str, str]
        ] = {}  # hosts that are to move by the last review: the node, and the node they leave
        self._moved: dict[str, float] = {}  # hosts whose move was accepted, and when
        self._crowded: dict[
            str, tuple[float, Surplus]
        ] = {}  # nodes with ranks whose share is exceeded, since when
        self._lock = Lock()  # hosts are started by several threads

    def place(self, name: str, memory: int) -> dict[str, Any]:
        """Return node and resources of a host, as arguments of ``spawn``. A host that is started
        again stays, if its node is there.
        """
        if not (nodes := self._living_nodes()):
            return {}
        layout = self._layout()
        with self._lock:
            if (
                time.monotonic() - self._last_start > SETTLED_S
            ):  # all that was asked for is in the figures of now
                self._nodes = {}
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

    def planner(self) -> dict[str, Any]:
        """Return the node of the planner, which asks for nothing: one without ranks where there is
        one, else any.
        """
        found = (
            node_without_ranks(nodes, layout)
            if (nodes := self._living_nodes()) and (layout := self._layout()).rank_nodes
            else None
        )
        return {} if found is None else {"node": found.id}

    def forget(self, name: str) -> None:
        """The host has ended, and nobody starts it again."""
        with self._lock:
            self._placed.pop(name, None)
            self._memory.pop(name, None)

    def memory_of(self, name: str) -> int | None:
        """Return the bytes that a host was placed with; None for one that is not known."""
        return self._memory.get(name)

    def review(self) -> list[str]:
        """Report nodes whose share is exceeded, and return the loader hosts that are to move to
        nodes with room.

        They are returned again by the next review, until ``accept`` says that they move.
        """
        nodes, layout, now = self._living_nodes(), self._layout(), time.monotonic()
        with self._lock:
            if not nodes or now - self._last_start <= SETTLED_S:
                return []
            self._nodes = {}
            free = self._without_job(nodes)
            self._report(surplus(free, layout, self._placed, self._memory), now)
            found = moves(free, layout, self._placed, self._memory)
            self._moved = {host: when for host, when in self._moved.items() if host in self._placed}
            names = {n.id: n.name or n.address for n in nodes}
            self._wanted = {
                host: (names[spot.node], names.get(self._placed[host].node, ""))
                for host, spot in found.items()
                if now - self._moved.get(host, -math.inf) > AGAIN_S
            }
            return list(self._wanted)

    def accept(self, hosts: Sequence[str]) -> None:
        """Report that hosts move. They are proposed again after ``AGAIN_S``, where nothing came of
        it.
        """
        with self._lock:
            for host in hosts:
                if host in self._wanted:
                    to, at = self._wanted.pop(host)
                    self._moved[host] = time.monotonic()
                    log.warning(
                        "%s moves to node %s, which has room: node %s runs more hosts than it may",
                        host,
                        to,
                        at,
                    )

    def figures(self) -> dict[str, Any]:
        """Return the nodes with ranks that run more hosts of this job than ``sidecar`` allows;
        empty without a cluster.
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
        """Nodes as they would be without the hosts of this job, ``name`` apart. Under the lock."""
        living: Collection[str] = getattr(self._control, "asked", dict)()
        ours = [spot for host, spot in self._placed.items() if host in living and host != name]
        free = [without_job(n, [s for s in ours if s.node == n.id]) for n in nodes]
        self._nodes = {n.id: self._nodes.get(n.id, n) for n in free}
        return [at_most(n, self._nodes[n.id]) for n in free]

    def _report(self, found: Sequence[Surplus], now: float) -> None:
        crowded = {s.node.id: s for s in found if s.has_ranks}
        for node, s in crowded.items():
            if node not in self._crowded:
                words = (
                    "node %s runs %d hosts of this job, and sidecar=%g allows %d: no other "
                    "node had room. They move when one has"
                )
                log.warning(
                    words, s.node.name or s.node.address, s.workers, self._layout().share, s.allowed
                )
        for node, (since, s) in self._crowded.items():
            if node not in crowded:
                log.warning(
                    "node %s runs no more hosts than sidecar allows, again after %.0f s",
                    s.node.name or s.node.address,
                    now - since,
                )
        self._crowded = {
            node: (self._crowded.get(node, (now, s))[0], s) for node, s in crowded.items()
        }


def watch(
    placement: NodePlacement, machine: Platform, control: ActorSystem, move: Move
) -> Callable[[], None]:
    """Review the placement every ``REVIEW_S`` in a thread of its own, since a cluster may be slow
    to answer. Returns what ends it.
    """
    if not getattr(control, "nodes", list)():
        return lambda: None

    def look() -> None:
        try:
            if found := placement.review():
                move(
                    [int(name.rpartition("/")[2]) for name in found],
                    lambda: placement.accept(found),
                )
        except Exception:  # its figures are for people, and what it proposes can wait
            log.exception(
                "the nodes of the job's hosts could not be reviewed; the next review is in %g s",
                REVIEW_S,
            )

    return machine.every(REVIEW_S, look, "overlord places")


# ----------------------------------------------------------------------------
# Starts the workers of a job.
#
# Code is sent to a process only when it starts, so the factory stays in the launching process. A
# coordinator asks for workers by number, there or from its own process.

# of a worker before it has read anything: Python, pyarrow and what a cluster adds to them
PROCESS_BYTES = 2**27
SIDE_BY_SIDE = (
    8  # steps to read ahead with several workers: they are not equally fast at every step
)


def n_constructors(prepared: PreparedJob) -> int:
    """Return the number of constructor workers of a job."""
    buckets = len(list(prepared.job.place.buckets("DP")))
    return prepared.options.constructor_hosts or min(
        buckets, max(1, n_cores() // CORES_PER_CONSTRUCTOR)
    )


def constructors_of(prepared: PreparedJob, hosts: int | None = None) -> list[int]:
    """Return the constructor worker of every data-parallel group.

    ``hosts`` is the number of constructor workers; by default that of the job.
    """
    named = tuple(prepared.options.rank_nodes or ())
    nodes_of = [
        [named[rank] for rank in ranks if rank < len(named)]
        for ranks in prepared.job.place.buckets("DP")
    ]
    return constructors_by_node(nodes_of, n_constructors(prepared) if hosts is None else hosts)


def read_ahead_of(loader_placement: LoaderPlacement, scaled: bool = False) -> int:
    """Return the steps to read ahead of the draw. ``scaled``: there may be more workers soon."""
    return SIDE_BY_SIDE if loader_placement.n_hosts > 1 or scaled else READ_AHEAD


def lanes_of(options: Options, loader_placement: LoaderPlacement) -> int:
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
        workers=lanes_of(options, loader_placement),
        open_files=max(1, options.open_files // loader_placement.n_hosts),
        open_bytes=max(1, options.open_bytes // loader_placement.n_hosts),
        ring_bytes=ring_bytes(options),
        check=options.check,
        one_worker=scales(prepared),
        build_ahead=options.build_ahead or BUILD_AHEAD,
        broadcast=options.broadcast,
        failover=options.failover,
        narrow=not of_kind(prepared.job.hooks, CONSTRUCTOR),
        machine=machine or Platform(),
    )


def layout_of(prepared: PreparedJob, constructor_of: Sequence[int]) -> Layout:
    buckets, options = list(prepared.job.place.buckets("DP")), prepared.options
    served = [
        tuple(r for b, c in enumerate(constructor_of) if c == host for r in buckets[b])
        for host in range(max(constructor_of) + 1)
    ]
    return replace(layout_asked(options), ranks_of=tuple(served))


def layout_asked(options: Options) -> Layout:
    """Return the layout that the launch options ask for."""
    return Layout(
        rank_nodes=tuple(options.rank_nodes or ()),
        share=options.sidecar,
        reserve=options.reserve,
        labels=dict(options.node_labels or {}),
        resources=dict(options.node_resources or {}),
    )


class WorkerStarter(Protocol):
    """Starts workers without waiting for them, and returns handles for calls."""

    loader_placement: LoaderPlacement
    token: str

    @property
    def placement(self) -> NodePlacement | None: ...  # on the nodes of a cluster, if known here

    def constructor(self, c: int) -> ActorHandle: ...
    def loader_worker(
        self,
        h: int,
        sources: Collection[int],
        openings: Sequence[LoaderStart],
        constructors: Mapping[int, str],
        instead_of: int | None = None,
    ) -> ActorHandle: ...  # instead_of: the worker whose loaders it is to read
    def end(
        self, h: int, handle: ActorHandle
    ) -> None: ...  # a loader worker that is not needed any more; may block


class WorkerFactory:
    """The starter of the launching process, which has the code and the settings of workers.

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
        self._incarnations = itertools.count(1)
        self.placement = NodePlacement(
            control, lambda: layout_of(self._prepared(), self._constructor_of.tolist())
        )
        self._reader_specs: dict[int, ReaderSpec] = {}  # those that are known to be sendable

    def constructor(self, c: int) -> ActorHandle:
        prepared = self._prepared()
        job, ranks, hooks = (
            prepared.job,
            list(prepared.job.place.buckets("DP")),
            of_kind(prepared.job.hooks, CONSTRUCTOR),
        )
        buckets = {b: tuple(ranks[b]) for b in np.flatnonzero(self._constructor_of == c).tolist()}
        return self._spawn(
            f"constructor-worker/{c}",
            PROCESS_BYTES,
            ConstructorWorker,
            c,
            self._settings,
            buckets,
            job.batch,
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
        job = self._prepared().job
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
            of_kind(job.hooks, LOADER),
            job.seed,
        )

    def _spawn(
        self, name: str, memory: int, factory: Callable[..., Worker], *args: Any
    ) -> ActorHandle:
        """Place a worker and start it.

        The placement of one that cannot be started is removed, unless it had one before: then it is
        tried again.
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
        ):  # a source that could not join is another by then
            self._reader_specs[i] = sendable(
                prepared.reader_spec(i), f"source {prepared.job.sources[i].name!r}"
            )
        return self._reader_specs[i]
