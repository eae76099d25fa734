"""Who starts the hosts of a job. Recipes hold code, and code crosses between processes only when
one is started: so they stay with the process that launched the job, and whoever plans, there or
elsewhere, asks for hosts by number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from overlord.cluster.constructor_worker import ConstructorWorker
from overlord.cluster.loader_worker import LoaderWorker
from overlord.cluster.node_placement import NodePlacement
from overlord.cluster.worker import Worker, WorkerConfig
from overlord.concurrency.platform import Platform
from overlord.constructor.assembler import BUILD_AHEAD
from overlord.job.hooks import CONSTRUCTOR, LOADER, of_kind
from overlord.messages.control import LoaderStart
from overlord.process.pickle_check import sendable
from overlord.ray.node_choice import Layout, constructors_by_node
from overlord.rpc.actors import ActorHandle, ActorSystem
from overlord.scaling.loader_placement import LoaderPlacement
from overlord.setup.options import CORES_PER_CONSTRUCTOR, Options, n_cores, ring_bytes
from overlord.setup.partition import scales
from overlord.setup.prepared_job import READ_AHEAD, PreparedJob, ReaderSpec

PROCESS_BYTES = (
    2**27
)  # of a host before it has read anything: Python, pyarrow and what a cluster puts beside them
SIDE_BY_SIDE = 8  # steps, where several hosts read: they are not equally fast at every step


def n_constructors(blueprint: PreparedJob) -> int:
    """Return the number of constructor workers of a job."""
    buckets = len(list(blueprint.job.place.buckets("DP")))
    return blueprint.options.constructor_hosts or min(
        buckets, max(1, n_cores() // CORES_PER_CONSTRUCTOR)
    )


def constructors_of(blueprint: PreparedJob, hosts: int | None = None) -> list[int]:
    """The constructor host of every data-parallel group, of ``hosts``: all that the job has where
    that is not said.
    """
    named = tuple(blueprint.options.rank_nodes or ())
    nodes_of = [
        [named[rank] for rank in ranks if rank < len(named)]
        for ranks in blueprint.job.place.buckets("DP")
    ]
    return constructors_by_node(nodes_of, n_constructors(blueprint) if hosts is None else hosts)


def read_ahead_of(hosting: LoaderPlacement, scaled: bool = False) -> int:
    """Steps' worth of samples beyond the draw. ``scaled``: there may be more hosts soon."""
    return SIDE_BY_SIDE if hosting.n_hosts > 1 or scaled else READ_AHEAD


def lanes_of(options: Options, hosting: LoaderPlacement) -> int:
    """Return the number of threads of every loader host. Threads are not cores: see
    ``scaling/threads.py``.
    """
    if hosting.threads and options.workers is None:
        return hosting.threads
    return max(1, (options.workers or n_cores()) // hosting.n_hosts)


def settings_of(
    blueprint: PreparedJob,
    hosting: LoaderPlacement,
    token: str,
    generation: int,
    machine: Platform | None = None,
) -> WorkerConfig:
    """What all hosts are told when they are started."""
    options = blueprint.options
    return WorkerConfig(
        name=blueprint.job.name,
        token=token,
        generation=generation,
        workers=lanes_of(options, hosting),
        open_files=max(1, options.open_files // hosting.n_hosts),
        open_bytes=max(1, options.open_bytes // hosting.n_hosts),
        ring_bytes=ring_bytes(options),
        check=options.check,
        one_worker=scales(blueprint),
        build_ahead=options.build_ahead or BUILD_AHEAD,
        broadcast=options.broadcast,
        failover=options.failover,
        narrow=not of_kind(blueprint.job.hooks, CONSTRUCTOR),
        machine=machine or Platform(),
    )


def layout_of(blueprint: PreparedJob, constructor_of: Sequence[int]) -> Layout:
    buckets, options = list(blueprint.job.place.buckets("DP")), blueprint.options
    served = [
        tuple(r for b, c in enumerate(constructor_of) if c == host for r in buckets[b])
        for host in range(max(constructor_of) + 1)
    ]
    return replace(layout_asked(options), ranks_of=tuple(served))


def layout_asked(options: Options) -> Layout:
    """What was said of nodes where the job was launched."""
    return Layout(
        rank_nodes=tuple(options.rank_nodes or ()),
        share=options.sidecar,
        reserve=options.reserve,
        labels=dict(options.node_labels or {}),
        resources=dict(options.node_resources or {}),
    )


class WorkerStarter(Protocol):
    """Starts hosts, and does not wait for them; the handles are of the control plane by which they
    are called.
    """

    hosting: LoaderPlacement
    token: str

    def constructor(self, c: int) -> ActorHandle: ...
    def loader_host(
        self,
        h: int,
        sources: Collection[int],
        openings: Sequence[LoaderStart],
        constructors: Mapping[int, str],
        instead_of: int | None = None,
    ) -> ActorHandle: ...  # instead_of: the host whose loaders it is to have
    def end(
        self, h: int, handle: ActorHandle
    ) -> None: ...  # a loader host that is not needed any more; it may wait


class WorkerFactory:
    """The starter of the launching process: all that a host is made of. ``blueprint``: the one of
    now; sources may have joined.
    """

    def __init__(
        self,
        control: ActorSystem,
        blueprint: Callable[[], PreparedJob],
        settings: WorkerConfig,
        hosting: LoaderPlacement,
        constructor_of: Sequence[int],
    ):
        self.hosting, self.token = hosting, settings.token
        self._control, self._blueprint, self._settings = control, blueprint, settings
        self._constructor_of = np.asarray(constructor_of)
        self._born = itertools.count(1)
        self.placement = NodePlacement(
            control, lambda: layout_of(self._blueprint(), self._constructor_of.tolist())
        )
        self._kits: dict[int, ReaderSpec] = {}  # those that can be sent, once that is known

    def constructor(self, c: int) -> ActorHandle:
        blueprint = self._blueprint()
        job, ranks, hooks = (
            blueprint.job,
            list(blueprint.job.place.buckets("DP")),
            of_kind(blueprint.job.hooks, CONSTRUCTOR),
        )
        buckets = {b: tuple(ranks[b]) for b in np.flatnonzero(self._constructor_of == c).tolist()}
        return self._spawn(
            f"constructor-host/{c}",
            PROCESS_BYTES,
            ConstructorWorker,
            c,
            self._settings,
            buckets,
            job.batch,
            job.document_multiple,
            hooks,
            blueprint.images,
        )

    def loader_host(
        self,
        h: int,
        sources: Collection[int],
        openings: Sequence[LoaderStart],
        constructors: Mapping[int, str],
        instead_of: int | None = None,
    ) -> ActorHandle:
        job = self._blueprint().job
        kits = {i: self._kit(i) for i in sorted(sources)}
        memory = self._memory_of(h if instead_of is None else instead_of)
        return self._spawn(
            f"loader-host/{h}",
            memory,
            LoaderWorker,
            h,
            replace(self._settings, born=next(self._born)),
            kits,
            openings,
            constructors,
            of_kind(job.hooks, LOADER),
            job.seed,
        )

    def _spawn(
        self, name: str, memory: int, factory: Callable[..., Worker], *args: Any
    ) -> ActorHandle:
        """Place a host and start it. One that cannot be started leaves no place behind, unless it
        had one before: it is tried again.
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
        known = self.placement.memory_of(f"loader-host/{h}")
        return PROCESS_BYTES + sum(self.hosting.memory[h : h + 1]) if known is None else known

    def end(self, h: int, handle: ActorHandle) -> None:
        self.placement.forget(handle.name)
        self._control.kill(handle)

    def _kit(self, i: int) -> ReaderSpec:
        blueprint = self._blueprint()
        if (
            i not in self._kits or self._kits[i].pipeline is not blueprint.pipelines[i]
        ):  # a source that could not join is another by then
            self._kits[i] = sendable(blueprint.kit(i), f"source {blueprint.job.sources[i].name!r}")
        return self._kits[i]
