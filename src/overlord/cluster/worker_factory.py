"""Starts the workers of a job.

Code is sent to a process only when it starts, so the factory stays in the launching process. A
coordinator asks for workers by number, there or from its own process.
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

    Threads are not cores: see ``scaling/threads.py``.
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
