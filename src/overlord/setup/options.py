"""Launch options: they decide how a job runs, never which samples it delivers."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from overlord.checks import did_you_mean
from overlord.errors import JobError
from overlord.job.job import Job
from overlord.planning.schedule.base import learns
from overlord.planning.schedule.by_stage import job_schedule
from overlord.process import resources
from overlord.scaling.profile import parse_bytes
from overlord.scaling.scaler import ScalingLimits

_PORTS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_HOST_PORT = re.compile(r".+:[0-9]{1,5}")
# One constructor worker builds a hundred million tokens a second. With several workers, loaders
# must split payloads by worker.
CORES_PER_CONSTRUCTOR = 16
REMOVED = {  # options of earlier versions, with the error that explains their removal
    "constructors": "constructors: this option was removed, constructors always run; leave it out"
}
SHADOWS = ("none", "heavy", "all")
PARTITION = ("auto", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPlacement:
    """The placement of a job on a Ray cluster; none of these fields changes the stream."""

    address: str | None = None
    """``host:port`` of the head of a cluster. None: a cluster of this machine, for this job."""
    rank_nodes: Sequence[str] | None = None
    """Node of each rank: name, address or id. Constructors and loaders are placed there first."""
    sidecar: float = 0.5
    """Share of the idle cores and memory of the ranks' nodes that loading may use, from 0 to 1."""
    node_labels: Mapping[str, str] | None = None
    """Labels of nodes for workers that need not be next to ranks: ``{"pool": "cpu"}``."""
    node_resources: Mapping[str, float] | None = None
    """Custom resources of each worker that need not be next to ranks: ``{"scratch": 1}``."""
    reserve: bool = False
    """True: workers without room wait for Ray, or its autoscaler, to find a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Bounds of the memory that loading holds; none of these fields changes the stream."""

    total: int | str | None = None
    """Memory for loading on this machine, ``"64GB"`` or bytes: a bound on the sum of the others."""
    buffer_bytes: int = 2**30
    """Bytes of samples that are ready and not drawn, over all sources."""
    open_bytes: int = 2**28
    """Bytes of files that are open in the middle of a chunk."""
    open_files: int = 512
    """Number of files that are open in the middle of a chunk."""
    ring_bytes: int | None = None
    """Bytes of shared memory of one worker. None: a quarter of that of machine or container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Launch options, with the fields of all groups; none of them changes the stream."""

    prefetch: int = 4
    # Prefetched steps that are built. None: all in one process, 2 in several processes, where the
    # payloads of the others wait.
    build_ahead: int | None = None
    loaders: Mapping[str, int] | None = None  # loaders per source; 1 if not named
    workers: int | None = None  # threads that read, transform and build
    # Steps of samples buffered beyond the draw. None: 2 if one process reads, 8 if several do. A
    # draw needs samples of all sources, so concurrent workers need buffers: 16 workers were 55 %
    # busy with 2 steps, 92 % with 16.
    read_ahead: int | None = None
    buffer_bytes: int = 2**30  # bytes of buffered samples beyond the draw, over all sources
    open_bytes: int = 2**28  # bytes of files that are open in the middle of a chunk
    open_files: int = 512  # number of files that are open in the middle of a chunk
    # Memory of this machine for loading, "64GB" or bytes; buffer_bytes, open_bytes and ring_bytes
    # can only reduce their shares.
    memory: int | str | None = None
    cache_dir: str | Path | None = None
    stall_warn_s: float = 30.0
    # below the ten minutes after which NCCL ends a job without a reason
    stall_limit_s: float = 540.0
    # called with (reason, seconds) instead of a logged warning
    on_stall: Callable[[str, float], None] | None = None
    check: bool = False  # check the invariants of all components after every command; for tests
    progress: Callable[[int, int], None] | None = None  # called with (files indexed, total)
    # sources that share a loader worker; None: about 25, fewer workers than cores
    sources_per_host: int | None = None
    hosts: int | None = None  # cores that loader workers may use; None: all of this machine
    # processes that constructors share; None: one for sixteen cores
    constructor_hosts: int | None = None
    # shared memory of one worker; None: a quarter of the memory of the machine or container
    ring_bytes: int | None = None
    broadcast: bool = True  # False: every rank fetches its own steps, also if the plan broadcasts
    failover: bool = True  # False: a lost worker ends the job
    # a worker that does not answer for this time is killed and replaced
    lost_after_s: float = 15.0
    # restarts of one worker without a step acknowledged by all ranks in between; then the job fails
    max_restarts: int = 3
    # loaders with a standby in another worker: those of the most costly sources ("heavy"), or "all"
    shadows: str = "none"
    # host:port of the head of a Ray cluster; None: a cluster of this machine, for this job
    address: str | None = None
    # node of each rank: name, address or id; constructors and loaders are placed there first
    rank_nodes: Sequence[str] | None = None
    # Share of the idle cores and memory of the ranks' nodes for constructors, then loaders; other
    # workers are placed on nodes without ranks.
    sidecar: float = 0.5
    # labels of nodes for workers that need not be next to ranks, as in Ray: {"pool": "cpu"}
    node_labels: Mapping[str, str] | None = None
    # custom resources of each worker that need not be next to ranks: {"scratch": 1}
    node_resources: Mapping[str, float] | None = None
    # True: workers without room on any node wait for Ray, or its autoscaler, to find one
    reserve: bool = False
    # "7000-7099": TCP ports at which workers listen; None: any that is free
    ports: str | None = None
    # loaders by measured cost of sources; "off" or None: by their index
    partition: str | None = "auto"
    # seconds between polls of loaders and trainers, which detect slow sources; 0: never
    watch_s: float = 2.0
    # True: sources whose lengths are known without the token ids deliver zeros for ids
    lengths_only: ClassVar[bool] = False
    # scale the loader workers of each source; a mapping enables it with other limits of the scaler
    autoscale: bool | Mapping[str, Any] = False

    @staticmethod
    def of(given: Mapping[str, Any]) -> Options:
        """Return options by name; raise ``JobError`` for an unknown name."""
        refuse_unknown(given)
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
                found.append(f"{name}: expected a number of seconds, 0 or more, got {value!r}")
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
            found.append(f"partition: expected 'auto' or 'off', got {self.partition!r}{known}")
        for name in ("reserve", "broadcast"):
            if not isinstance(getattr(self, name), bool):
                found.append(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if self.ports is not None and port_range(self.ports) is None:
            found.append(
                f"ports: expected a first and a last port, as in '7000-7099', got {self.ports!r}"
            )
        found += self._failover_problems(job)
        if self.cache_dir is not None and not isinstance(self.cache_dir, (str, Path)):
            found.append(f"cache_dir: expected a directory, got {self.cache_dir!r}")
        if self.on_stall is not None and not callable(self.on_stall):
            found.append(
                f"on_stall: expected a function of (reason, seconds), got {self.on_stall!r}"
            )
        if self.progress is not None and not callable(self.progress):
            found.append(
                "progress: expected a function of (indexed files, all files), got "
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
        known = [f.name for f in fields(ScalingLimits)]
        if not isinstance(self.autoscale, Mapping):
            return [f"autoscale: expected True, False, or limits by name, got {self.autoscale!r}"]
        if unknown := [name for name in self.autoscale if name not in known]:
            return [
                f"autoscale: unknown limit {name!r}{did_you_mean(str(name), known)}"
                for name in unknown
            ]
        try:
            ScalingLimits(**{"cores": 1, **self.autoscale})
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
            found.append(f"shadows: expected 'none', 'heavy' or 'all', got {self.shadows!r}{known}")
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
        """Return the problem of a ``feedback_lag`` below prefetch + 2, if the job uses reports.

        With such a lag, a report could not arrive before the plan that uses it.
        """
        if not learns(job_schedule(job)) or job.feedback_lag >= self.prefetch + 2:
            return []
        return [
            f"feedback_lag: expected at least prefetch + 2 = {self.prefetch + 2}, got "
            f"{job.feedback_lag}; plans are made {self.prefetch} "
            "steps ahead, and reports must arrive before the plan that uses them: "
            "raise the job's feedback_lag, or lower prefetch"
        ]


# Keywords that ``launch`` still accepts: fields of ``ray=`` and ``memory=``. Its other options are
# in its signature.
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions(Options):
    """Options of a session for its plans alone: nothing is measured, and ids may be zeros."""

    prefetch: int = 1
    partition: str | None = "off"
    watch_s: float = 0.0
    lengths_only: ClassVar[bool] = True


GROUPED = tuple(
    f.name for group in (RayPlacement, MemoryLimits) for f in fields(group) if f.name != "total"
)


def refuse_unknown(given: Iterable[str], accepted: Collection[str] | None = None) -> None:
    """Raise ``JobError`` if a name is not in ``accepted``, by default the fields of ``Options``.

    The error has the nearest known name.
    """
    known = [f.name for f in fields(Options)]
    accepted = known if accepted is None else accepted
    if unknown := [name for name in given if name not in accepted]:
        others = [name for name in known if name not in unknown]
        raise JobError(
            [
                REMOVED.get(name) or f"unknown option {name!r}{did_you_mean(name, others)}"
                for name in unknown
            ],
            "launch",
        )


def ray_fields(
    given: RayPlacement | Mapping[str, Any] | None, old: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all fields of ``ray=``, a placement or a mapping, updated by deprecated keywords.

    Raise ``JobError`` for an unknown field, or one that is given twice with different values.
    """
    return _group_fields("ray", RayPlacement, given, old)


def memory_fields(
    given: MemoryLimits | Mapping[str, Any] | int | str | None, old: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all fields of ``memory=``, updated by deprecated keywords; see ``ray_fields``.

    ``memory=`` may also be the total alone. The field ``total`` is named ``memory`` in the result.
    """
    if not isinstance(given, (MemoryLimits, Mapping)):
        given = None if given is None else {"total": given}
    found = _group_fields("memory", MemoryLimits, given, old)
    return {"memory" if name == "total" else name: value for name, value in found.items()}


def _group_fields(
    name: str, group: type[Any], given: Any, old: Mapping[str, Any]
) -> dict[str, Any]:
    defaults = {f.name: f.default for f in fields(group)}
    if isinstance(given, group):
        found = {field: getattr(given, field) for field in defaults}
    elif given is None or isinstance(given, Mapping):
        found = dict(given or {})
    else:
        raise JobError([f"{name}: expected {group.__name__}(...), got {given!r:.80}"], "launch")
    if unknown := [field for field in found if field not in defaults]:
        problems = [
            f"{name}: unknown field {field!r}{did_you_mean(str(field), list(defaults))}"
            for field in unknown
        ]
        raise JobError(problems, "launch")
    old = {field: value for field, value in old.items() if field in defaults}
    changed = {field: value for field, value in old.items() if value != defaults[field]}
    if twice := [
        field for field in changed if found.get(field, defaults[field]) != defaults[field]
    ]:
        problems = [
            f"{field}: expected one value, got two; remove the keyword, keep {name}="
            for field in twice
        ]
        raise JobError(problems, "launch")
    for field in changed:
        warnings.warn(
            f"launch({field}=...) is deprecated; use {name}={group.__name__}({field}=...)",
            DeprecationWarning,
            stacklevel=4,
        )
    return {**defaults, **found, **changed}


def address_problems(address: object) -> list[str]:
    """Return the problems of the address of a cluster's head.

    Ray itself accepts other values too, and may resolve them to a cluster that no longer runs.
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
    """Return the number of CPU cores of this machine, or of the cgroup of this process."""
    return resources.cores()


def ring_bytes(options: Options) -> int:
    """Return the bound on shared memory of one worker.

    Segments are created as needed and reused, so it is not a reservation.
    """
    return options.ring_bytes or resources.memory_bytes() // 4


def n_workers(options: Options) -> int:
    """Return the number of threads that read, transform and build in one process."""
    return options.workers or max(2, min(8, n_cores()))


def _is_amount(name: object, value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(name, str) and bool(name) and number and 0 < value < math.inf  # type: ignore[operator]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
