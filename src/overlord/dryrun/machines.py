"""Memory and connections of a cluster, with Overlord and with a colocated loader in every rank.

The functions are pure and use measured constants. Memory is that of data loading alone, over all
nodes: the interpreter, torch and the model of a trainer do not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

ROLES = ("planner", "loaders", "constructors", "clients")
IN_FLIGHT = 2  # batches that a worker of a colocated loader has ready: torch's prefetch_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Costs measured on one machine, in bytes, seconds, and bytes per second."""

    worker_bytes: float  # a worker process of a colocated loader without open sources
    opened_bytes: float  # each source that such a worker opens
    host_bytes: float  # a loader worker without sources
    source_bytes: float  # each source that a loader worker reads: files, the open window
    constructor_bytes: float  # a constructor worker without batches
    planner_bytes: float  # the planner process
    client_bytes: float  # a client in its trainer, without steps
    link_bytes: float  # one end of a connection
    sample_bytes: float  # bytes of a buffered sample: its token ids
    sample_tokens: float  # mean tokens of a sample
    built_bytes: float  # bytes per token, as constructors build for other processes
    wide_bytes: float  # bytes per token, as a colocated loader builds
    read_s: float  # seconds to read and transform a row
    build_s: float  # seconds to build a token
    call_s: float  # seconds of a round trip of a call
    link_s: float  # seconds of one message on one connection, apart from its bytes
    connect_s: float  # seconds to open a connection, with its handshake
    bandwidth: float  # bytes per second of a connection

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not 0 <= value < math.inf or (
                f.name in ("bandwidth", "sample_tokens") and not value
            ):
                raise ValueError(
                    f"{f.name}: expected a number of at least 0 (bandwidth and "
                    f"sample_tokens: above 0), got {value!r}"
                )

    @staticmethod
    def of(values: Mapping[str, Any]) -> Constants:
        """Return constants from plain values; raise ``ValueError`` for missing or invalid ones."""
        names = [f.name for f in fields(Constants)]
        if missing := [name for name in names if name not in values]:
            raise ValueError(f"constants: expected {', '.join(names)}, got no {', '.join(missing)}")
        return Constants(**{name: float(values[name]) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """The shape of a cluster: its size, its mesh, and the settings of data loading."""

    gpus: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    gpus_per_node: int = 8
    sources: int = 1
    batch: int = 512  # samples per step, over all ranks
    workers: int = 4  # worker processes of a colocated loader, per rank
    prefetch: int = 4
    read_ahead: int = 8
    build_ahead: int = 2
    constructors: bool = True
    broadcast: bool = True  # False: every rank receives arrays
    sources_per_host: int = 25
    hosts: int = 1  # least number of loader workers, such as reading needs at the trainers' speed
    # Sets of loaders, each with all sources. Overlord has one; without partitioned sources there
    # is one per data-parallel group.
    copies: int = 1

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.type in ("int", int) and getattr(self, f.name) < 1:
                raise ValueError(f"{f.name}: expected at least 1, got {getattr(self, f.name)}")
        if self.gpus % (self.tp * self.cp * self.pp):
            raise ValueError(
                "gpus: expected a multiple of tp x cp x pp = "
                f"{self.tp * self.cp * self.pp}, got {self.gpus}"
            )

    @property
    def dp(self) -> int:
        """The data-parallel degree."""
        return self.gpus // (self.tp * self.cp * self.pp)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def group(self) -> int:
        """The number of ranks of one model replica: tp x cp x pp."""
        return self.tp * self.cp * self.pp

    @property
    def fetching(self) -> int:
        """The number of ranks that receive arrays.

        With a broadcast, it is one rank of each tensor-parallel group of the first and the last
        pipeline stage.
        """
        return self.dp * self.cp * min(2, self.pp) if self.broadcast else self.gpus

    @property
    def remote(self) -> int:
        """The number of fetching ranks on another node than the constructor of their group.

        These ranks receive a copy, while ranks on the same node map shared memory.
        """
        near = max(1, self.gpus_per_node // (self.tp if self.broadcast else 1))
        return (
            0
            if self.group <= self.gpus_per_node
            else self.dp * max(0, self.fetching // self.dp - near)
        )

    @property
    def loader_hosts(self) -> int:
        """The number of loader workers."""
        return self.copies * max(self.hosts, -(-self.sources // self.sources_per_host))

    @property
    def constructor_hosts(self) -> int:
        """The number of constructor workers: one on every node where a group starts."""
        return min(self.dp, self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """An estimate of memory: bytes over all nodes, by role."""

    by_role: Mapping[str, float]
    nodes: int

    @property
    def total(self) -> float:
        """Bytes over all roles and nodes."""
        return math.fsum(self.by_role.values())

    @property
    def per_node(self) -> float:
        """Mean bytes per node."""
        return self.total / self.nodes


def colocated_memory(
    fleet: ClusterShape, c: Constants, *, first_of_tp: bool = False
) -> MemoryEstimate:
    """Return the memory of colocated loaders: one in every rank, whose workers open every source.

    ``first_of_tp``: only one rank of a tensor-parallel group has a loader.
    """
    ranks = fleet.gpus // (fleet.tp if first_of_tp else 1)
    batch = fleet.batch / fleet.dp * c.sample_tokens * c.wide_bytes
    worker = c.worker_bytes + fleet.sources * c.opened_bytes
    n = ranks * fleet.workers
    return MemoryEstimate(
        by_role={"workers": n * worker, "batches": n * IN_FLIGHT * batch}, nodes=fleet.nodes
    )


def overlord_memory(fleet: ClusterShape, c: Constants) -> MemoryEstimate:
    """Return the memory of Overlord by role.

    Without constructors, every rank that receives arrays gathers payload and builds its own
    batches.
    """
    links, payload = connections(fleet), fleet.batch * c.sample_bytes
    built = fleet.batch * c.sample_tokens * c.built_bytes  # of a step, for one set of ranks
    # Buffered samples, and samples retained until all ranks have taken the step.
    held = (fleet.read_ahead + fleet.prefetch) * payload
    loaders = (
        fleet.loader_hosts * c.host_bytes + fleet.copies * fleet.sources * c.source_bytes + held
    )
    roles = {
        "planner": c.planner_bytes + links.planner * c.link_bytes,
        "loaders": loaders + fleet.loader_hosts * links.loader_host * c.link_bytes,
        "constructors": 0.0,
        "clients": fleet.gpus * (c.client_bytes + links.client * c.link_bytes),
    }
    if fleet.constructors:
        staged = fleet.prefetch * payload
        hosts = fleet.constructor_hosts
        roles["constructors"] = (
            hosts * (c.constructor_bytes + links.constructor * c.link_bytes)
            + staged
            + fleet.build_ahead * built
        )
        roles["clients"] += fleet.build_ahead * built * fleet.remote / fleet.dp / fleet.cp
    else:
        # Each fetching rank of a group receives the payload of the whole group.
        fetchers = fleet.fetching / fleet.dp
        roles["clients"] += fetchers * (fleet.prefetch * payload + fleet.build_ahead * built)
    return MemoryEstimate(by_role=roles, nodes=fleet.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Numbers of connections for payload, steps and plans: in all, and of one process by role."""

    total: int
    loader_host: int
    constructor: int
    client: int
    planner: int

    @property
    def most(self) -> int:
        """The largest number of connections of one loader worker, constructor worker or planner."""
        return max(self.loader_host, self.constructor, self.planner)


def connections(fleet: ClusterShape) -> Links:
    """Return the numbers of connections of a cluster."""
    loaders, builders = fleet.loader_hosts, fleet.constructor_hosts
    if not fleet.constructors:
        # Every fetching rank is connected to every loader worker, and every rank to the planner.
        return Links(
            total=loaders * fleet.fetching + fleet.gpus + loaders,
            loader_host=fleet.fetching + 1,
            constructor=0,
            client=loaders + 1,
            planner=loaders + fleet.gpus,
        )
    clients = -(-fleet.gpus // builders)
    return Links(
        total=loaders * builders + fleet.gpus + loaders + builders,
        loader_host=builders + 1,
        constructor=loaders + clients + 1,
        client=1,
        planner=loaders + builders,
    )


def connecting_s(fleet: ClusterShape, c: Constants) -> float:
    """Return the seconds until all connections are open.

    Each process opens its connections one after another, and all processes do so concurrently.
    """
    return connections(fleet).most * c.connect_s
