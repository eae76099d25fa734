"""Launch options: they decide how a job runs, never which samples it gives."""

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
# One constructor builds a hundred million tokens a second. With several, loaders must sort payload
# by worker.
CORES_PER_CONSTRUCTOR = 16
REMOVED = {  # options of earlier versions: the error says why they are unknown
    "constructors": "constructors: this option was removed, constructors always run; leave it out"
}
SHADOWS = ("none", "heavy", "all")
PARTITION = ("auto", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Launch options. None of them changes the stream."""

    prefetch: int = 4
    # Steps of the window that are built ahead; the others wait as payload. None: all of them in one
    # process, 2 in several.
    build_ahead: int | None = None
    loaders: Mapping[str, int] | None = None  # loaders by source; 1 where not named
    workers: int | None = None  # threads that read, transform and build
    # Steps' worth of samples held ready beyond the draw. None: 2 where one process reads, 8 where
    # several do. All sources must have theirs before a step can be drawn, so workers that run
    # concurrently need room to differ: 16 of them were 55 % busy with 2, 92 % with 16.
    read_ahead: int | None = None
    buffer_bytes: int = 2**30  # of samples held ready beyond the draw, over all sources
    open_bytes: int = 2**28  # of files held open in the middle of a chunk
    open_files: int = 512
    # Memory of this machine for loading, as "64GB", split over all that loading holds there.
    # buffer_bytes, open_bytes and ring_bytes can only lower it.
    memory: int | str | None = None
    cache_dir: str | Path | None = None
    stall_warn_s: float = 30.0
    # Below the ten minutes after which NCCL ends a job without a reason.
    stall_limit_s: float = 540.0
    # Called with (what is waited for, seconds) instead of the warning.
    on_stall: Callable[[str, float], None] | None = None
    check: bool = False  # check every core's invariants after every command (slow; for tests)
    # Called with (indexed sources, all sources).
    progress: Callable[[int, int], None] | None = None
    # Sources that share a loader worker. None: about 25, and fewer workers than cores.
    sources_per_host: int | None = None
    hosts: int | None = None  # cores that loader workers may use; None: all of this machine
    # Processes that constructors share. None: one for sixteen cores.
    constructor_hosts: int | None = None
    # Bytes of shared memory that one worker may use. None: a quarter of all memory.
    ring_bytes: int | None = None
    broadcast: bool = True  # False: every rank fetches its own, whatever the plan's broadcasts
    failover: bool = True  # False: a lost worker ends the job
    # A worker that does not answer for this long is considered dead, killed and replaced.
    lost_after_s: float = 15.0
    # Restarts of one worker without a step acknowledged by all ranks in between. After them the job
    # ends with the worker's last error.
    max_restarts: int = 3
    # Loaders with a standby in another worker: those of the sources that cost most ("heavy"), or
    # "all".
    shadows: str = "none"
    # Address of a Ray cluster's head, as host:port. None: a cluster on this machine, which ends
    # with the job.
    address: str | None = None
    # Nodes of the cluster by rank: name, address or id. Constructors and loaders are placed there
    # first.
    rank_nodes: Sequence[str] | None = None
    # Share of the idle cores of those nodes, for constructors and then loaders. Others are placed
    # on nodes without ranks.
    sidecar: float = 0.5
    # Labels of nodes for workers that need not be near ranks, in Ray's form: {"pool": "cpu"}.
    node_labels: Mapping[str, str] | None = None
    # Custom resources of the cluster that each of those workers requests: {"scratch": 1}.
    node_resources: Mapping[str, float] | None = None
    # True: workers for which no node has room wait until Ray, or its autoscaler, finds one.
    reserve: bool = False
    # TCP ports on which workers listen, as "7000-7099". None: any free port.
    ports: str | None = None
    # "auto": loaders by the measured costs of sources. "off" or None: by estimates from their
    # index.
    partition: str | None = "auto"
    # Seconds between two polls of loaders and trainers, which detect sources that must be read
    # further ahead or cannot keep up. 0: no polls.
    watch_s: float = 2.0
    # Start and stop workers of a source as needed. A mapping: True, with other limits
    # (scaling.Limits).
    autoscale: bool | Mapping[str, Any] = False

    @staticmethod
    def of(given: Mapping[str, Any]) -> Options:
        """Return options by name; an unknown name is a ``JobError`` with similar names."""
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
        """Return the problems of these options for a job, one sentence each."""
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
                "partition: expected a rule for the number of loaders, got "
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
                "on_stall: expected a function of (what the job waits for, seconds), got "
                f"{self.on_stall!r}"
            )
        if self.progress is not None and not callable(self.progress):
            found.append(
                "progress: expected a function of (indexed sources, all sources), got "
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
                "node_resources: expected amounts of the cluster's custom resources, as in "
                f"{{'scratch': 1}}, got {resources!r:.200}"
            )
        elif common := [
            name
            for name in resources or ()
            if name.lower() in ("cpu", "cpus", "gpu", "memory", "object_store_memory")
        ]:
            found.append(
                f"node_resources: expected custom resources, got {common[0]!r}; leave it out: CPUs "
                "and memory follow from hosts= and memory="
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
                f"shadows: expected which loaders have a standby, got {self.shadows!r}{known}"
            )
        elif self.shadows != "none" and not self.failover:
            found.append(
                f"shadows: expected 'none' without failover, got {self.shadows!r}; leave it out: a "
                "standby replaces a lost loader, and without failover nothing is replaced"
            )
        elif self.shadows != "none" and (job.look_ahead > 1 or job.overflow == "defer"):
            found.append(
                f"shadows: expected 'none' with look_ahead or overflow='defer', got "
                f"{self.shadows!r}; leave it out: there all loaders reread after a loss"
            )
        return found

    def _lag_problems(self, job: Job) -> list[str]:
        """Check that a plan is not made before the report it uses can have arrived.

        Jobs without feedback have no such bound.
        """
        if not learns(job.mixture) or job.feedback_lag >= self.prefetch + 2:
            return []
        return [
            f"feedback_lag: expected at least prefetch + 2 = {self.prefetch + 2}, got "
            f"{job.feedback_lag}; plans are made {self.prefetch} "
            "steps ahead, and reports must arrive before the plan that uses them: "
            "raise the job's feedback_lag, or lower prefetch"
        ]


def address_problems(address: object) -> list[str]:
    """Return the problems of the address of a cluster's head.

    Ray itself accepts other values too, and may resolve them to a cluster that is dead.
    """
    if isinstance(address, str) and _HOST_PORT.fullmatch(address):
        return []
    return [
        "address: expected host:port of a Ray cluster's head, as in '10.0.0.1:6379', got "
        f"{address!r}"
    ]


def port_range(text: object) -> range | None:
    """Return the ports of ``"7000-7099"``; None for anything else."""
    found = _PORTS.fullmatch(text) if isinstance(text, str) else None
    first, last = map(int, found.groups()) if found else (1, 0)
    return range(first, last + 1) if 1 <= first <= last <= 65535 else None


def n_cores() -> int:
    """Return the number of cores of this machine, or of the cgroup that the job runs in."""
    return cgroup.cores()


def ring_bytes(options: Options) -> int:
    """Return the bound on shared memory of one worker.

    Segments are created as needed and reused, so it is not a reservation.
    """
    return options.ring_bytes or cgroup.memory_bytes() // 4


def n_workers(options: Options) -> int:
    """Return the number of threads that read, transform and build."""
    return options.workers or max(2, min(8, n_cores()))


def _is_amount(name: object, value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(name, str) and bool(name) and number and 0 < value < math.inf  # type: ignore[operator]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
