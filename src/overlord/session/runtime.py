"""The ``Runtime`` protocol, and the start of a runtime: local, in processes, or on Ray."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from overlord.client.client import StepQueue
from overlord.client.sent_reports import KnownReports
from overlord.concurrency.event_loop import EventLoop, ThreadExecutor
from overlord.concurrency.platform import Platform
from overlord.errors import JobError
from overlord.job.job import Job
from overlord.journal.write_ahead import JournalStart, NullJournal
from overlord.messages.control import SentReport, SourceLost, StreamState
from overlord.planning.planner import Planner
from overlord.planning.spec import NewSource, RecentPlans
from overlord.process.shutdown import Steps, run_all
from overlord.ray.node_choice import cores_for_loading, problems, unique_names
from overlord.rpc.actors import INTERRUPTED_S, ActorSystem
from overlord.scaling.profile import parse_bytes, split
from overlord.session.local_runtime import LocalRuntime
from overlord.setup.options import CORES_PER_CONSTRUCTOR, Options, n_cores, n_workers, port_range
from overlord.setup.prepared_job import PreparedJob

if TYPE_CHECKING:
    from overlord.cluster.coordinator_actor import Counted
    from overlord.session.coordinator_client import CoordinatorClient, RemotePlans

NODE_OPTIONS = (
    "rank_nodes",
    "node_labels",
    "node_resources",
)  # options that name nodes of a cluster
RUNTIMES = {
    "local": "in this process",
    "process": "in processes of this machine",
    "ray": "on a Ray cluster",
}


class Runtime(Protocol):
    """The planner, loaders and constructors of a job at a state, wherever they run.

    Runs on: event loop, except ``prepare_source``, ``listen``, ``outside``, ``taken_by``,
    ``absent`` and ``close``, which run on any thread.
    """

    on_stage: list[Callable[[Any], None]]  # called with every planned step
    on_lost: list[Callable[[SourceLost], None]]  # called with every source whose storage failed
    on_late: list[Callable[[Any], None]]  # called with events that were applied after a timeout
    on_taken: Callable[[int, int], None]  # called with (rank, step) that a worker reports as taken
    # of this process: plans are written before any of them is executed
    journal: NullJournal

    @property
    def planner(self) -> Planner | CoordinatorClient: ...
    @property
    def plans(self) -> RecentPlans | RemotePlans: ...
    @property
    def absent(self) -> str:
        """The reason why the planner cannot be called now; empty if it can be called."""

    @property
    def actor_system(self) -> ActorSystem | None:
        """The actor system that started the workers; None without workers."""

    def begin_journal(self, start: JournalStart, prepared: PreparedJob) -> None:
        """Write the start of the stream to the journal, before any step is planned."""

    # clients
    def attach(self, mailboxes: Mapping[int, Any]) -> None: ...
    def detach(self, rank: int) -> None: ...
    def stop(self) -> None: ...
    def consumed(self, ranks: Sequence[int], step: int) -> None: ...
    def inbox(self, rank: int, next_step: int) -> StepQueue: ...
    def waiting_for(self, rank: int) -> str: ...

    # clients in other processes
    def use_buffers(self, buffers: Any) -> None:
        """Build steps in ``buffers``, which clients map, if constructors run in this process."""

    def listen(self, host: str, token: str) -> None:
        """Let constructor workers accept clients; without such workers do nothing."""

    def outside(self, rank: int) -> tuple[str, str] | None:
        """Return address and token of the constructor worker of a rank; None without workers.

        An empty token stands for the one that the client connected with. Raise ``DataStall`` while
        the worker is restarted.
        """

    def taken_by(self, rank: int) -> int | None:
        """Return the last step that a rank took, from its constructor worker; -1 before the first.

        None: there is no such worker, or it is lost. Raise ``DataStall`` if it does not answer.
        """

    # events
    def settle(self) -> None: ...
    def event(self, event: Any, number: int | None = None) -> None:
        """Apply an event once: ``number`` identifies it if it is sent again."""

    def report(self, sent: Sequence[SentReport]) -> None:
        """Apply those reports of ranks without a step queue, or of closed queues, that are new."""

    def reports(self) -> KnownReports:
        """Return the reports that states need, as far as the planner and workers have them."""

    def prepare_source(self, prepared: PreparedJob) -> Any: ...
    def drop_prepared(self, prepared: Any) -> None: ...
    def add_source(
        self,
        new: NewSource,
        prepared: Any,
        more: PreparedJob,
        joined: Callable[[], None] = ...,
        *,
        number: int | None = None,
    ) -> None: ...

    # workers
    def move(self, source: int, hosts: Sequence[str]) -> None: ...
    def scale(self, source: int, n: int) -> bool: ...
    def kill(self, name: str) -> None: ...
    def metrics(self) -> dict[str, Any]: ...

    # the end
    def on_loop_failure(self, error: Exception) -> None: ...
    def close(self) -> None: ...


def start_runtime(
    runtime: str,
    prepared: PreparedJob,
    state: StreamState | None,
    loop: EventLoop,
    generation: int = 0,
) -> Runtime:
    """Start a runtime at a state, or at the start of the stream; its commands run on ``loop``."""
    if runtime != "local":
        # for runtimes with processes only
        from overlord.cluster.launcher import Launcher
        from overlord.session.cluster_runtime import ClusterRuntime

        control, machine = start_actor_system(runtime, prepared)
        try:
            launcher = Launcher(prepared, generation, control, machine)
            return ClusterRuntime(launcher, loop, generation).begin(state)
        except BaseException:
            control.shutdown(INTERRUPTED_S)
            raise
    executor = ThreadExecutor(n_workers(prepared.options), loop)
    try:
        return LocalRuntime(prepared, executor, state, post=loop.post)
    except BaseException:
        executor.close()
        raise


def start_actor_system(runtime: str, prepared: PreparedJob) -> tuple[ActorSystem, Platform]:
    """Return the actor system that starts workers, and the platform that they use."""
    ports = port_range(prepared.options.ports)
    if runtime == "ray":
        from overlord.ray.launcher import ray_actors, worker_platform

        control = ray_actors(prepared.options.address, job=prepared.job.name, ports=ports)
        return control, worker_platform(ports)
    from overlord.rpc.process_launcher import process_actors

    return process_actors(), Platform(ports)


def with_worker_counts(runtime: str, job: Job, options: Options) -> Options:
    """Return the options with the numbers of workers for a cluster of several machines.

    They are set once, at launch: machines differ, and a restart must not change them.
    """
    if runtime != "ray":
        _refuse_nodes(options, f"runtime={runtime!r} has one machine: leave it out")
        return options
    from overlord.cluster.worker_factory import layout_asked
    from overlord.ray.cluster import CLUSTER

    if not CLUSTER.multi_machine:
        _refuse_nodes(
            options, "this machine is the whole cluster: give its address, or leave it out"
        )
        return options
    layout = layout_asked(options)
    if found := problems(nodes := CLUSTER.nodes(), layout, job.place.world_size):
        raise JobError(found, "launch")
    layout = replace(layout, rank_nodes=unique_names(nodes, layout.rank_nodes))
    cores, buckets = cores_for_loading(nodes, layout), len(list(job.place.buckets("DP")))
    by_node = len(set(layout.rank_nodes)) or max(1, cores // CORES_PER_CONSTRUCTOR)
    constructors = options.constructor_hosts or min(buckets, by_node)
    # constructor workers are placed first, with a core each
    hosts = options.hosts or max(1, cores - constructors)
    return replace(
        options,
        hosts=hosts,
        constructor_hosts=constructors,
        workers=options.workers or hosts,
        rank_nodes=layout.rank_nodes or None,
    )


def _refuse_nodes(options: Options, why: str) -> None:
    """Refuse options that name nodes where they would be ignored."""
    if named := [name for name in NODE_OPTIONS if getattr(options, name)]:
        raise JobError(
            [f"{name}: expected None, got {getattr(options, name)!r:.80}; {why}" for name in named],
            "launch",
        )


def with_memory_bounds(runtime: str, job: Job, options: Options) -> Options:
    """Return the options with the memory of one machine split into bounds of its components.

    The split assumes the largest number of workers that may run on this machine.
    """
    if options.memory is None:
        return options
    loaders = sum((options.loaders or {}).get(name, 1) for name in job.names) * (
        1 if options.shadows == "none" else 2
    )
    hosts = builders = 0
    if runtime != "local":
        per_host = (
            -(-len(job.sources) // options.sources_per_host) if options.sources_per_host else 1
        )
        hosts = max(per_host, min(options.hosts or n_cores(), loaders))
        builders = options.constructor_hosts or max(1, n_cores() // CORES_PER_CONSTRUCTOR)
    try:
        found = split(
            parse_bytes(options.memory),
            loaders=loaders,
            loader_hosts=hosts,
            constructor_hosts=builders,
        )
    except ValueError as problem:
        raise JobError([f"memory: {problem}"], "launch") from None
    return replace(
        options,
        buffer_bytes=min(options.buffer_bytes, found.buffer_bytes),
        open_bytes=min(options.open_bytes, found.open_bytes),
        ring_bytes=min(options.ring_bytes or found.ring_bytes, found.ring_bytes),
    )


def hold_cluster(runtime: str, address: str | None) -> Callable[[], None]:
    """Hold the Ray cluster of a session until the returned function is called.

    A cluster takes seconds to start, so all runtimes of a session share it. Other runtimes than
    "ray" need none: then the function does nothing.
    """
    if runtime != "ray":
        return lambda: None
    from overlord.ray.cluster import CLUSTER

    CLUSTER.hold(address)

    steps: Steps = [CLUSTER.leave, CLUSTER.settle, lambda: atexit.unregister(release)]

    def release() -> None:
        run_all(steps)

    atexit.register(release)  # at exit Ray ends its processes and leaves its files
    return release


def end_processes(runtime: Runtime) -> None:
    """End the processes that an interrupted ``close`` of the runtime left running."""
    if (actors := runtime.actor_system) is not None:
        actors.shutdown(INTERRUPTED_S)


def counted(runtime: Runtime) -> Planner | Counted:
    """Return the counts of a remote planner at one moment, or a local planner, which has them."""
    planner = runtime.planner
    return planner if isinstance(planner, Planner) else planner.counted()
