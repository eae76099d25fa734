"""What a fleet of trainers takes in memory and connections: Overlord beside a loader in every rank.
Pure, from measured constants.

Memory is that of data loading alone, over all nodes: what a trainer holds anyway (its interpreter,
torch, the model) counts for nobody.
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
    """What dummy loading jobs took on one machine (``dryrun/stand_ins.py``). Bytes, seconds, bytes
    per second.
    """

    worker_bytes: float  # a worker process of a colocated loader, nothing opened
    opened_bytes: float  # what it holds for every source it has open
    host_bytes: float  # a loader host, nothing opened
    source_bytes: float  # what it holds for every source: files, the open window
    constructor_bytes: float  # a constructor host, nothing built
    planner_bytes: float  # the planner's process
    client_bytes: float  # a client in its trainer, without steps
    link_bytes: float  # one end of a connection
    sample_bytes: float  # of a sample that is held ready: its token ids
    sample_tokens: float  # of a sample, on average
    built_bytes: float  # per token, as constructors build for other processes
    wide_bytes: float  # per token, as a colocated loader builds
    read_s: float  # to read and transform a row
    build_s: float  # to build a token
    call_s: float  # from a call to its answer
    link_s: float  # of one message on one link, whatever its size
    connect_s: float  # to open a connection, with its handshake
    bandwidth: float  # of a link

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
        """From plain values; ``ValueError`` where they are not all there."""
        names = [f.name for f in fields(Constants)]
        if missing := [name for name in names if name not in values]:
            raise ValueError(f"expected {', '.join(names)}, got no {', '.join(missing)}")
        return Constants(**{name: float(values[name]) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """Who trains, and how the data is loaded."""

    gpus: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    gpus_per_node: int = 8
    sources: int = 1
    batch: int = 512  # samples of a step, over all ranks
    workers: int = 4  # of a colocated loader, in each rank
    prefetch: int = 4
    read_ahead: int = 8
    build_ahead: int = 2
    constructors: bool = True
    broadcast: bool = True  # False: every rank is sent arrays
    sources_per_host: int = 25
    hosts: int = 1  # loader hosts at least: what reading takes at the trainers' pace
    # sets of loaders, each with all sources: 1 here; a set for every data-parallel group where
    # sources are not partitioned
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
        return self.gpus // (self.tp * self.cp * self.pp)

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def group(self) -> int:
        """Ranks of a data-parallel group."""
        return self.tp * self.cp * self.pp

    @property
    def fetching(self) -> int:
        """Ranks that are sent arrays: of a tensor-parallel group one, which broadcasts; of the
        stages the first and the last.
        """
        return self.dp * self.cp * min(2, self.pp) if self.broadcast else self.gpus

    @property
    def remote(self) -> int:
        """Of these, the ones on another node than the constructor of their group: they receive what
        others map.
        """
        near = max(1, self.gpus_per_node // (self.tp if self.broadcast else 1))
        return (
            0
            if self.group <= self.gpus_per_node
            else self.dp * max(0, self.fetching // self.dp - near)
        )

    @property
    def loader_hosts(self) -> int:
        return self.copies * max(self.hosts, -(-self.sources // self.sources_per_host))

    @property
    def constructor_hosts(self) -> int:
        """One on every node that a data-parallel group begins on."""
        return min(self.dp, self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes over all nodes."""

    by_role: Mapping[str, float]
    nodes: int

    @property
    def total(self) -> float:
        return math.fsum(self.by_role.values())

    @property
    def per_node(self) -> float:
        return self.total / self.nodes


def colocated(fleet: ClusterShape, c: Constants, *, first_of_tp: bool = False) -> MemoryEstimate:
    """A loader in every rank, each worker with every source open. ``first_of_tp``: one rank of a
    tensor-parallel group loads for all.
    """
    ranks = fleet.gpus // (fleet.tp if first_of_tp else 1)
    batch = fleet.batch / fleet.dp * c.sample_tokens * c.wide_bytes
    worker = c.worker_bytes + fleet.sources * c.opened_bytes
    n = ranks * fleet.workers
    return MemoryEstimate(
        by_role={"workers": n * worker, "batches": n * IN_FLIGHT * batch}, nodes=fleet.nodes
    )


def overlord(fleet: ClusterShape, c: Constants) -> MemoryEstimate:
    """The same job by role. Without constructors every rank that is sent arrays gathers payload and
    builds for itself.
    """
    links, payload = connections(fleet), fleet.batch * c.sample_bytes
    built = fleet.batch * c.sample_tokens * c.built_bytes  # of a step, for one set of ranks
    held = (
        fleet.read_ahead + fleet.prefetch
    ) * payload  # ready, and kept until all have taken the step
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
        every = fleet.fetching / fleet.dp  # each of a group's ranks gets all that the group has
        roles["clients"] += every * (fleet.prefetch * payload + fleet.build_ahead * built)
    return MemoryEstimate(by_role=roles, nodes=fleet.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Connections that payload, steps and plans go through: in all, and at one of each."""

    total: int
    loader_host: int
    constructor: int
    client: int
    planner: int

    @property
    def most(self) -> int:
        """At whoever has most of them."""
        return max(self.loader_host, self.constructor, self.planner)


def connections(fleet: ClusterShape) -> Links:
    hosts, builders = fleet.loader_hosts, fleet.constructor_hosts
    if (
        not fleet.constructors
    ):  # every rank that fetches has a link from every loader host, and hears plans itself
        return Links(
            total=hosts * fleet.fetching + fleet.gpus + hosts,
            loader_host=fleet.fetching + 1,
            constructor=0,
            client=hosts + 1,
            planner=hosts + fleet.gpus,
        )
    clients = -(-fleet.gpus // builders)
    return Links(
        total=hosts * builders + fleet.gpus + hosts + builders,
        loader_host=builders + 1,
        constructor=hosts + clients + 1,
        client=1,
        planner=hosts + builders,
    )


def connecting_s(fleet: ClusterShape, c: Constants) -> float:
    """Until the last connection is open: each part opens its own one after another, all parts at
    the same time.
    """
    return connections(fleet).most * c.connect_s
