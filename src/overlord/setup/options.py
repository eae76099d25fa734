"""Launch options: how a job is run, never what it gives."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from overlord.checks import did_you_mean
from overlord.errors import JobError
from overlord.job.job import Job
from overlord.planning.schedule.base import learns
from overlord.process import cgroup
from overlord.scaling.memory_budget import parse_bytes
from overlord.scaling.scaler import Limits

_PORTS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_HOST_PORT = re.compile(r".+:[0-9]{1,5}")
# one builds a hundred million tokens a second; with several, loaders must sort payload by host
CORES_PER_CONSTRUCTOR = 16
REMOVED = {  # options of earlier versions: the error says why they are unknown
    "constructors": "constructors: this option was removed, constructors always run; leave it out"
}
SHADOWS = ("none", "heavy", "all")
PARTITION = ("auto", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Launch options: none of them changes the stream."""

    prefetch: int = 4
    build_ahead: int | None = (
        # steps of the window that are built; None: all in one process, 2 in several, the others
        # wait as payload
        None
    )
    loaders: Mapping[str, int] | None = None  # loaders per source; 1 where not named
    workers: int | None = None  # threads that read, transform and build
    # Steps' worth of samples held ready beyond the draw; None: 2 where one process reads, 8 where
    # several do. All sources must have theirs
    # before a step can be drawn, so hosts that work side by side need room to differ: 16 of them
    # were 55 % busy with 2, 92 % with 16.
    read_ahead: int | None = None
    buffer_bytes: int = 2**30  # of samples held ready beyond the draw, over all sources
    open_bytes: int = 2**28  # of files held open in the middle of a chunk
    open_files: int = 512
    # Of this machine, "64GB": split over what loading holds there. What buffer_bytes, open_bytes
    # and ring_bytes say can only make it less.
    memory: int | str | None = None
    cache_dir: str | Path | None = None
    stall_warn_s: float = 30.0
    stall_limit_s: float = (
        540.0  # below the ten minutes after which NCCL ends a job without saying why
    )
    on_stall: Callable[[str, float], None] | None = (
        None  # told (what is waited for, seconds) in place of the warning
    )
    check: bool = False  # check every core's invariants after every command (slow; for tests)
    progress: Callable[[int, int], None] | None = None  # told (sources indexed, of how many)
    sources_per_host: int | None = (
        None  # sources that share a loader host; None: about 25, fewer hosts than cores
    )
    hosts: int | None = None  # cores that loader hosts may use; None: all of this machine
    constructor_hosts: int | None = (
        None  # processes that constructors share; None: one for sixteen cores
    )
    ring_bytes: int | None = (
        None  # of shared memory that one host may use; None: a quarter of the memory that there is
    )
    broadcast: bool = True  # False: every rank fetches its own, whatever the plan's broadcasts say
    failover: bool = True  # False: a part that is lost ends the job
    lost_after_s: float = (
        15.0  # a part that answers nothing for so long is taken for dead, killed and replaced
    )
    # of one part without a step taken by all in between: then the job ends with what it died of
    max_restarts: int = 3
    # loaders with a stand-by in another host: those of the sources that cost most ("heavy"), or
    # "all"
    shadows: str = "none"
    address: str | None = (
        # of a Ray cluster's head, host:port; None: one of this machine, that ends with the job
        None
    )
    rank_nodes: Sequence[str] | None = (
        # of the cluster, by rank: name, address or id; constructors and loaders go there first
        None
    )
    # of the idle cores of those nodes, for constructors and then loaders; beyond it these go to
    # nodes without ranks
    sidecar: float = 0.5
    node_labels: Mapping[str, str] | None = (
        # of nodes for hosts that need not be beside ranks, as Ray writes them: {"pool": "cpu"}
        None
    )
    node_resources: Mapping[str, float] | None = (
        None  # of the cluster's own kinds, that each of those hosts asks for: {"scratch": 1}
    )
    # True: hosts for which no node has room wait for Ray, and its autoscaler, to find one
    reserve: bool = False
    ports: str | None = (
        None  # "7000-7099": TCP ports at which hosts listen for others; None: any that is free
    )
    partition: str | None = (
        "auto"  # loaders by what sources cost, as measured; "off" or None: by what their index says
    )
    # between two looks at loaders and trainers: who is to be read further ahead, who cannot keep
    # up; 0: nobody looks
    watch_s: float = 2.0
    autoscale: bool | Mapping[str, Any] = (
        # hosts for a source as it needs them; a mapping: True, with other limits (scaling.Limits)
        False
    )

    @staticmethod
    def of(given: Mapping[str, Any]) -> Options:
        """Options by name; unknown ones are told with those there are."""
        known = [f.name for f in fields(Options)]
        if unknown := [name for name in given if name not in known]:
            raise JobError(
                [
                    REMOVED.get(name) or f"unknown option {name!r}{did_you_mean(name, known)}"
                    for name in unknown
                ],
                "launch",
            )
        return Options(**given)

    def problems(self, job: Job) -> list[str]:
        found: list[str] = []
        for name, least in (
            ("prefetch", 1),
            ("buffer_bytes", 1),
            ("open_bytes", 1),
            ("open_files", 1),
        ):
            if not _is_int(getattr(self, name)) or getattr(self, name) < least:
                found.append(
                    f"{name}: expected a whole number of at least {least}, got "
                    f"{getattr(self, name)!r}"
                )
        for name in ("stall_warn_s", "stall_limit_s", "watch_s"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 <= value < math.inf
            ):
                found.append(f"{name}: expected a number of seconds, got {value!r}")
        for name in (
            "build_ahead",
            "read_ahead",
            "workers",
            "hosts",
            "constructor_hosts",
            "sources_per_host",
            "ring_bytes",
        ):
            if (value := getattr(self, name)) is not None and (not _is_int(value) or value < 1):
                found.append(f"{name}: expected a whole number of at least 1, got {value!r}")
        if self.address is not None:
            found += address_problems(self.address)
        if (
            isinstance(self.sidecar, bool)
            or not isinstance(self.sidecar, (int, float))
            or not 0 <= self.sidecar <= 1
        ):
            found.append(f"sidecar: expected a share from 0 to 1, got {self.sidecar!r}")
        if (given := self.rank_nodes) is not None and not (
            _is_list(given) and all(isinstance(n, str) for n in given)
        ):
            found.append(
                "rank_nodes: expected names of nodes by rank, as in ['gpu-0', 'gpu-0', "
                f"'gpu-1'], got {given!r:.200}"
            )
        found += self._node_problems()
        if self.partition is not None and self.partition not in PARTITION:
            known = (
                did_you_mean(self.partition, PARTITION)
                if isinstance(self.partition, str)
                else f"; there are {', '.join(PARTITION)}"
            )
            found.append(
                "partition: expected how loaders are given to sources, got "
                f"{self.partition!r}{known}"
            )
        for name in ("reserve", "broadcast"):
            if not isinstance(getattr(self, name), bool):
                found.append(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if self.ports is not None and port_range(self.ports) is None:
            found.append(
                f"ports: expected the first and the last, as in '7000-7099', got {self.ports!r}"
            )
        found += self._failover_problems(job)
        if self.cache_dir is not None and not isinstance(self.cache_dir, (str, Path)):
            found.append(f"cache_dir: expected a directory, got {self.cache_dir!r}")
        if self.on_stall is not None and not callable(self.on_stall):
            found.append(
                "on_stall: expected a function of (what is waited for, seconds), got "
                f"{self.on_stall!r}"
            )
        if self.progress is not None and not callable(self.progress):
            found.append(
                "progress: expected a function of (sources indexed, of how many), got "
                f"{self.progress!r}"
            )
        found += self._loader_problems(job) + self._scaling_problems() + self._memory_problems()
        return found or self._lag_problems(job)

    def _memory_problems(self) -> list[str]:
        try:
            parse_bytes(1 if self.memory is None else self.memory)
        except ValueError as problem:
            return [f"memory: {problem}"]
        return []

    def _node_problems(self) -> list[str]:
        found, labels, resources = [], self.node_labels, self.node_resources
        if labels is not None and not (
            isinstance(labels, Mapping)
            and all(isinstance(x, str) and x for pair in labels.items() for x in pair)
        ):
            found.append(
                f"node_labels: expected labels with their values, as in {{'pool': 'cpu'}}, "
                f"got {labels!r:.200}"
            )
        if resources is not None and not (
            isinstance(resources, Mapping) and all(map(_is_amount, resources, resources.values()))
        ):
            found.append(
                "node_resources: expected amounts of the cluster's own kinds, as in "
                f"{{'scratch': 1}}, got {resources!r:.200}"
            )
        elif common := [
            name
            for name in resources or ()
            if name.lower() in ("cpu", "cpus", "gpu", "memory", "object_store_memory")
        ]:
            found.append(
                f"node_resources: {common[0]!r} is asked for by itself (hosts=, memory=) "
                "or not at all: leave it out"
            )
        return found

    def _loader_problems(self, job: Job) -> list[str]:
        if self.loaders is None:
            return []
        if not isinstance(self.loaders, Mapping):
            return [
                "loaders: expected a number for each source by name, as in "
                f"{{{job.names[0]!r}: 3}}, got {self.loaders!r}"
            ]
        found = [
            f"loaders: unknown source {name!r}{did_you_mean(name, job.names)}"
            for name in self.loaders
            if name not in job.names
        ]
        wrong = {
            name: n
            for name, n in self.loaders.items()
            if name in job.names and (not _is_int(n) or n < 1)
        }
        return found + [
            f"loaders: expected a whole number of at least 1 for {name!r}, got {n!r}"
            for name, n in wrong.items()
        ]

    def _scaling_problems(self) -> list[str]:
        if isinstance(self.autoscale, bool):
            return []
        known = [f.name for f in fields(Limits)]
        if not isinstance(self.autoscale, Mapping):
            return [f"autoscale: expected True, False, or limits by name, got {self.autoscale!r}"]
        if unknown := [name for name in self.autoscale if name not in known]:
            return [
                f"autoscale: unknown limit {name!r}{did_you_mean(str(name), known)}"
                for name in unknown
            ]
        try:
            Limits(**{"cores": 1, **self.autoscale})
        except (TypeError, ValueError) as problem:
            return [f"autoscale: {problem}"]
        return []

    def _failover_problems(self, job: Job) -> list[str]:
        found = (
            []
            if isinstance(self.failover, bool)
            else [f"failover: expected True or False, got {self.failover!r}"]
        )
        after = self.lost_after_s
        if (
            isinstance(after, bool)
            or not isinstance(after, (int, float))
            or not 0 < after < math.inf
        ):
            found.append(f"lost_after_s: expected a number of seconds above 0, got {after!r}")
        if not _is_int(self.max_restarts) or self.max_restarts < 0:
            found.append(
                f"max_restarts: expected a whole number of at least 0, got {self.max_restarts!r}"
            )
        if self.shadows not in SHADOWS:
            known = (
                did_you_mean(self.shadows, SHADOWS)
                if isinstance(self.shadows, str)
                else f"; there are {', '.join(SHADOWS)}"
            )
            found.append(
                f"shadows: expected whose loaders have a stand-by, got {self.shadows!r}{known}"
            )
        elif self.shadows != "none" and not self.failover:
            found.append(
                f"shadows: {self.shadows!r} takes the place of what is lost, and without "
                "failover nothing does: leave it out"
            )
        elif self.shadows != "none" and (job.look_ahead > 1 or job.overflow == "defer"):
            found.append(
                f"shadows: {self.shadows!r} is of no use with look_ahead or "
                "overflow='defer': there all loaders read again"
            )
        return found

    def _lag_problems(self, job: Job) -> list[str]:
        """A plan must not be made before the report it uses can have come; jobs without feedback
        have no such bound.
        """
        if not learns(job.mixture) or job.feedback_lag >= self.prefetch + 2:
            return []
        return [
            f"feedback_lag: expected at least prefetch + 2 = {self.prefetch + 2}, got "
            f"{job.feedback_lag}; plans are made {self.prefetch} "
            "steps ahead, and reports must have come before the plan that uses them: "
            "raise the job's feedback_lag, or lower prefetch"
        ]


def address_problems(said: object) -> list[str]:
    """Of a cluster's head. Ray itself takes other words too, and what it finds for them may be of a
    cluster that is dead.
    """
    if isinstance(said, str) and _HOST_PORT.fullmatch(said):
        return []
    return [
        f"address: expected host:port of a Ray cluster's head, as in '10.0.0.1:6379', got {said!r}"
    ]


def port_range(said: object) -> range | None:
    """Of ``"7000-7099"``; None: it is no such thing."""
    found = _PORTS.fullmatch(said) if isinstance(said, str) else None
    first, last = map(int, found.groups()) if found else (1, 0)
    return range(first, last + 1) if 1 <= first <= last <= 65535 else None


def n_cores() -> int:
    return cgroup.cores()


def ring_bytes(options: Options) -> int:
    """Slots are made as they are needed and used again, so this is a bound and no reservation."""
    return options.ring_bytes or cgroup.memory_bytes() // 4


def n_workers(options: Options) -> int:
    return options.workers or max(2, min(8, n_cores()))


def _is_amount(name: object, value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(name, str) and bool(name) and number and 0 < value < math.inf  # type: ignore[operator]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
