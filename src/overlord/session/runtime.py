"""Where the cores of a session live: in this process, in processes of this machine, or on a Ray
cluster. The session does not see the difference.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from overlord.client.client import StepQueue
from overlord.cluster.plan_history import RecentPlans
from overlord.concurrency.event_loop import EventLoop, ThreadExecutor
from overlord.concurrency.platform import Platform
from overlord.errors import JobError
from overlord.job.job import Job
from overlord.journal.write_ahead import NullJournal
from overlord.messages.control import Report, StreamState
from overlord.planning.planner import Planner
from overlord.planning.spec import NewSource
from overlord.process.shutdown import Steps, in_turn
from overlord.ray.node_choice import by_one_name, cores_for_loading, problems
from overlord.rpc.actors import HURRY_S, ActorSystem
from overlord.scaling.memory_budget import parse_bytes, split
from overlord.session.local_runtime import local_runtime
from overlord.setup.options import CORES_PER_CONSTRUCTOR, Options, n_cores, n_workers, port_range
from overlord.setup.prepared_job import PreparedJob

if TYPE_CHECKING:
    from overlord.cluster.coordinator_actor import Counted
    from overlord.session.cluster_runtime import CoordinatorClient, RemotePlans

OF_NODES = ("rank_nodes", "node_labels", "node_resources")  # options that name nodes of a cluster
RUNTIMES = {
    "local": "in this process",
    "process": "in processes of this machine",
    "ray": "on a Ray cluster",
}


class Runtime(Protocol):
    """What a session needs of its cores. All but ``prepare_source`` and ``close`` run in the
    pump.
    """

    @property
    def planner(self) -> Planner | CoordinatorClient: ...
    @property
    def plans(self) -> RecentPlans | RemotePlans: ...

    on_stage: list[Any]
    on_lost: list[Any]
    on_late: list[
        Any
    ]  # told of events that were given up by who said them, and have happened since
    journal: NullJournal  # of the session: what is planned is written before anyone acts on it

    def settle(self) -> None: ...
    def attach(self, mailboxes: Mapping[int, Any]) -> None: ...
    def detach(self, rank: int) -> None: ...
    def stop(self) -> None: ...
    def consumed(self, ranks: Any, step: int) -> None: ...
    def event(self, event: Any) -> None: ...
    def report(self, report: Report) -> bool | None: ...
    def prepare_source(self, blueprint: PreparedJob) -> Any: ...
    def drop_prepared(self, prepared: Any) -> None: ...
    def add_source(
        self, new: NewSource, prepared: Any, budget_bytes: int, joined: Callable[[], None] = ...
    ) -> None: ...
    def inbox(self, rank: int, next_step: int) -> StepQueue: ...
    def waiting_for(self, rank: int) -> str: ...
    def move(self, source: int, hosts: Sequence[str]) -> None: ...
    def spread(self, source: int, n: int) -> bool: ...
    def kill(self, name: str) -> None: ...
    def figures(self) -> dict[str, Any]: ...
    def broke(self, error: Exception) -> None: ...
    def close(self) -> None: ...


def make_engine(
    runtime: str,
    blueprint: PreparedJob,
    state: StreamState | None,
    pump: EventLoop,
    generation: int = 0,
) -> Runtime:
    """Cores at a state, ready to be pumped."""
    if runtime != "local":
        return _apart(*make_control(runtime, blueprint), blueprint, state, pump, generation)
    executor = ThreadExecutor(n_workers(blueprint.options), pump)
    try:
        return local_runtime(blueprint, executor, state)
    except BaseException:
        executor.close()
        raise


def _apart(
    control: ActorSystem,
    machine: Platform,
    blueprint: PreparedJob,
    state: StreamState | None,
    pump: EventLoop,
    generation: int,
) -> Runtime:
    from overlord.cluster.coordinator import (
        ProcessHost,
    )  # processes and sockets: for those who ask for them
    from overlord.session.cluster_runtime import ClusterRuntime

    options = blueprint.options
    try:
        if blueprint.job.journal is not None and options.failover:
            # a planner that can come back can be lost
            return ClusterRuntime(
                blueprint, state, pump, generation, control=control, machine=machine
            )
        return ProcessHost(blueprint, state, control, pump, generation, machine)
    except BaseException:
        control.shutdown(HURRY_S)
        raise


def make_control(runtime: str, blueprint: PreparedJob) -> tuple[ActorSystem, Platform]:
    """Who starts the parts of a job, and what a part has from the machine it comes to."""
    ports = port_range(blueprint.options.ports)
    if runtime == "ray":
        from overlord.ray.launcher import RayActorSystem

        control = RayActorSystem(blueprint.options.address, job=blueprint.job.name, ports=ports)
        return control, control.machine
    from overlord.rpc.process_launcher import ProcessActorSystem

    return ProcessActorSystem(), Platform(ports)


def sized(runtime: str, job: Job, options: Options) -> Options:
    """How many hosts, for a cluster of several machines: said once, where the job is launched,
    since machines differ. It is kept.
    """
    if runtime != "ray":
        _refuse_nodes(options, f"runtime={runtime!r} has one machine: leave it out")
        return options
    from overlord.cluster.worker_factory import layout_asked
    from overlord.ray.cluster import CLUSTER

    if not CLUSTER.far:
        _refuse_nodes(
            options, "this machine is the whole cluster: give its address, or leave it out"
        )
        return options
    layout = layout_asked(options)
    if found := problems(nodes := CLUSTER.nodes(), layout, job.place.world_size):
        raise JobError(found, "launch")
    layout = replace(layout, rank_nodes=by_one_name(nodes, layout.rank_nodes))
    cores, buckets = cores_for_loading(nodes, layout), len(list(job.place.buckets("DP")))
    beside = len(set(layout.rank_nodes)) or max(1, cores // CORES_PER_CONSTRUCTOR)
    constructors = options.constructor_hosts or min(buckets, beside)
    hosts = options.hosts or max(
        1, cores - constructors
    )  # constructor hosts come first, and have a core each
    return replace(
        options,
        hosts=hosts,
        constructor_hosts=constructors,
        workers=options.workers or hosts,
        rank_nodes=layout.rank_nodes or None,
    )


def _refuse_nodes(options: Options, why: str) -> None:
    """What would be passed over is told: whoever names nodes counts on them."""
    if named := [name for name in OF_NODES if getattr(options, name)]:
        raise JobError(
            [f"{name}: {getattr(options, name)!r:.80} was asked for, but {why}" for name in named],
            "launch",
        )


def budgeted(runtime: str, job: Job, options: Options) -> Options:
    """One budget for a machine, as bounds of what is held there. Of hosts as many are counted as
    there may be, on this one machine.
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


def keep(runtime: str, address: str | None) -> Callable[[], None]:
    """What all engines of a session need is there, until the function returned is called: a cluster
    takes seconds to start.
    """
    if runtime != "ray":
        return lambda: None
    from overlord.ray.cluster import CLUSTER

    CLUSTER.hold(address)

    steps: Steps = [CLUSTER.leave, CLUSTER.settle, lambda: atexit.unregister(let_go)]

    def let_go() -> None:
        in_turn(steps)

    atexit.register(let_go)  # Ray ends its processes at the program's end, and leaves its files
    return let_go


def dismiss(host: Runtime) -> None:
    """The parts of a host that is closed, if that was interrupted before they were asked to
    leave.
    """
    control = getattr(host, "_control", None) or getattr(
        getattr(host, "_parts", None), "control", None
    )
    if control is not None:
        control.shutdown(HURRY_S)


def counted(host: Runtime) -> Planner | Counted:
    """The planner's counts, of one moment."""
    return host.planner if isinstance(host.planner, Planner) else host.planner.counted()


def why_not(host: Runtime) -> str:
    """What keeps a host from answering, in words; empty for one that can be asked."""
    return str(getattr(host, "absent", ""))
