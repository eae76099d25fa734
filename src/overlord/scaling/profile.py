"""Costs of sources, measured (profiles) and expected (loads), and the memory budget of a job.

This module is pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from overlord.hashing import digest
from overlord.scaling.core_demand import locked_part

# ----------------------------------------------------------------------------
# Profiles of sources: the tuple (P, T, M) of the Overlord paper (arXiv 2504.09844), section 5.1,
# for each source of a job.
#
# P is the time to read and transform one sample, in seconds. T is the time to send it. M is memory:
# M_b of buffers, M_d of file access state. ``core_s`` is the CPU time of P. ``setup/measure.py``
# measures the values; this module stores, checks and averages them.

VERSION = 2
# weight of the last measurement in the moving average: an outlier fades after ten measurements, and
# a real change is half visible after two
NEW = 0.3
MOST = 2**62  # samples and bytes must fit 64-bit integers


class BadProfile(ValueError):
    """Raised for a stored value that is not a valid profile; the text names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProfile:
    """The measured cost of one source.

    Seconds are wall-clock time per sample, except ``core_s``, which is CPU time. 0 bytes means not
    measured.
    """

    name: str
    fingerprint: str  # of the files and transforms: a source with others has another cost
    samples: int  # number of measured samples
    read_s: float
    transform_s: float
    tokens: float  # mean tokens of a sample
    transfer_s: float = 0.0  # T: time to send a sample
    buffer_bytes: int = 0  # M_b: an open window, and the samples that are made of it
    # CPU time of read_s + transform_s; the rest is waiting for storage, a core or the interpreter
    # lock; 0: not measured separately
    core_s: float = 0.0
    file_bytes: int = 0  # M_d: memory while files are open: footers, handles, decompressors

    def __post_init__(self) -> None:
        found = [
            f"{n}: expected text, got {getattr(self, n)!r:.40}"
            for n in ("name", "fingerprint")
            if not isinstance(getattr(self, n), str)
        ]
        for n in ("samples", "buffer_bytes", "file_bytes"):
            if not _is_int(v := getattr(self, n)) or not 0 <= v <= MOST:
                found.append(f"{n}: expected a whole number from 0 to 2**62, got {v!r:.40}")
        for n in ("read_s", "transform_s", "tokens", "transfer_s", "core_s"):
            if not _is_number(v := getattr(self, n)) or not 0 <= v < math.inf:
                found.append(f"{n}: expected a finite number of at least 0, got {v!r:.40}")
        if found:
            raise BadProfile(f"profile of source {self.name!r:.80}: {'; '.join(found)}")

    @property
    def sample_s(self) -> float:
        """P: wall-clock seconds to read and transform a sample."""
        return self.read_s + self.transform_s

    @property
    def cost_s(self) -> float:
        """CPU seconds per sample; all of P if CPU time was not measured separately."""
        return self.core_s or self.sample_s

    @property
    def waited_s(self) -> float:
        """Seconds of ``sample_s`` spent waiting, without a busy core; 0 if not known."""
        return max(0.0, self.sample_s - self.core_s) if self.core_s else 0.0

    @property
    def token_s(self) -> float:
        """Seconds to read and transform one output token, for batches in tokens."""
        return self.sample_s / self.tokens if self.tokens else 0.0

    @property
    def memory(self) -> int:
        """M: bytes of buffers and of file access state."""
        return self.buffer_bytes + self.file_bytes

    def merged(self, new: SourceProfile, weight: float = NEW) -> SourceProfile:
        """Return the moving average of this profile and a newer one.

        A profile of other files or transforms replaces this one. Values that were not measured
        change nothing.
        """
        if new.fingerprint != self.fingerprint or not self.samples:
            return new
        if not new.samples:
            return self
        changed: dict[str, Any] = {
            n: _between(getattr(self, n), getattr(new, n), weight)
            for n in ("read_s", "transform_s", "tokens")
        }
        for n in ("transfer_s", "core_s", "buffer_bytes", "file_bytes"):
            a, b = getattr(self, n), getattr(new, n)
            mean = _between(a, b, weight) if a and b else a or b
            changed[n] = float(mean) if n.endswith("_s") else round(mean)
        return replace(self, samples=min(MOST, self.samples + new.samples), **changed)


_NAMES = tuple(f.name for f in fields(SourceProfile))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProfile:
    """The profiles of a job's sources by name, and the machine that measured them."""

    machine: str = ""
    sources: Mapping[str, SourceProfile] = field(default_factory=dict)

    @staticmethod
    def of(profiles: Iterable[SourceProfile], machine: str = "") -> JobProfile:
        return JobProfile(machine=machine, sources={p.name: p for p in profiles})

    def merge(self, new: JobProfile, weight: float = NEW) -> JobProfile:
        """Return this profile updated by a newer one, whose sources are averaged in.

        If ``new`` is from another machine, its sources replace those of the same names.
        """
        if new.machine != self.machine:
            return replace(new, sources={**self.sources, **new.sources})
        both = {
            name: self.sources[name].merged(p, weight) if name in self.sources else p
            for name, p in new.sources.items()
        }
        return replace(self, sources={**self.sources, **both})

    def known(self, fingerprints: Mapping[str, str]) -> JobProfile:
        """Return the profiles with measurements whose fingerprint is current.

        ``fingerprints``: the current fingerprint by source.
        """
        fits = {
            n: p
            for n, p in self.sources.items()
            if p.samples and p.fingerprint == fingerprints.get(n)
        }
        return replace(self, sources=fits)

    def file_share(self) -> float:
        """Return the share of file access state in all memory, as in Fig. 4 of the paper.

        It is 0 if nothing was measured.
        """
        file, both = (
            sum(getattr(p, n) for p in self.sources.values()) for n in ("file_bytes", "memory")
        )
        return file / both if both else 0.0

    # Plain JSON with a checksum: a truncated or edited file must not influence a decision.

    def to_plain(self) -> dict[str, Any]:
        body = {
            "version": VERSION,
            "machine": self.machine,
            "sources": [asdict(self.sources[n]) for n in sorted(self.sources)],
        }
        return {**body, "sum": _sum(body)}

    @staticmethod
    def from_plain(value: Any) -> JobProfile:
        """Return the profile in a value of plain JSON. Raises BadProfile if it is invalid."""
        if not isinstance(value, Mapping):
            raise BadProfile(f"profile: expected a JSON object, got {type(value).__name__}")
        if value.get("version") != VERSION:
            raise BadProfile(
                f"profile: expected version {VERSION}, got {value.get('version')!r:.40}"
            )
        body = {k: v for k, v in value.items() if k != "sum"}
        if not isinstance(body.get("machine"), str) or not isinstance(body.get("sources"), list):
            raise BadProfile(
                "profile: expected 'machine' as text and 'sources' as a list, got other values"
            )
        if value.get("sum") != _sum(body):
            raise BadProfile(
                "profile: expected the checksum of its values, got another one: the file was "
                "truncated or edited"
            )
        return JobProfile.of((_source_from_plain(v) for v in body["sources"]), body["machine"])


def cdf(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the cumulative distribution of values, as in Fig. 5 of the paper.

    The first array has the values in rising order, the second the share of values up to each.
    """
    x = np.sort(np.asarray(values, float))
    return x, np.arange(1, len(x) + 1) / max(1, len(x))


def _source_from_plain(value: Any) -> SourceProfile:
    if not isinstance(value, Mapping) or sorted(map(str, value)) != sorted(_NAMES):
        found = (
            ", ".join(sorted(map(str, value)))
            if isinstance(value, Mapping)
            else type(value).__name__
        )
        raise BadProfile(
            f"profile of a source: expected the keys {', '.join(_NAMES)}, got {found:.200}"
        )
    return SourceProfile(**{str(k): v for k, v in value.items()})


def _sum(body: Mapping[str, Any]) -> str:
    try:
        return digest(json.dumps(body, sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise BadProfile(f"profile: expected values of plain JSON, got: {error}") from None


def _between(a: float, b: float, weight: float) -> float:
    return a + weight * (b - a)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


PROFILE = "profile.json"  # name of the profile's file in a journal


# ----------------------------------------------------------------------------
# The expected load of a source, from its profile or from an estimate.


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLoad:
    """The expected work and memory of one source, before the job starts."""

    name: str
    share: float  # share of the mixture
    # work of reading and transforming, in any unit that is the same for all sources
    cost: float
    memory: int  # bytes of file state and buffers
    max_loaders: int = 1  # more loaders would have no work
    # bytes of file state, part of ``memory``; every worker with a loader of the source holds them
    state: int = 0
    # number of shards if the source may be scaled later
    shares: int = 1
    # CPU seconds per sample in code that is known to release the interpreter lock; the rest is
    # assumed to hold it
    free_s: float = math.inf

    def __post_init__(self) -> None:
        if not (
            0 <= self.cost < math.inf
            and 0 <= self.share < math.inf
            and self.memory >= 0
            and self.max_loaders >= 1
            and self.state >= 0
            and self.free_s >= 0
        ):
            raise ValueError(
                f"load of source {self.name!r}: expected finite share and cost, max_loaders of at "
                f"least 1, and no negative number, got {self}; "
                "profile the source again (overlord profile)"
            )

    @property
    def locked(self) -> float:
        """The locked part: the share of the cost that is assumed to hold the interpreter lock.

        The cost must be in CPU seconds per sample that the mixture draws.
        """
        return locked_part(self.cost / self.share, self.free_s) if self.share else 0.0


# ----------------------------------------------------------------------------
# The memory budget of a machine, divided among the buffers of loading.
#
# Processes and the open window of every loader need memory whatever the budget is. An estimate of
# this memory is subtracted first. The rest bounds samples, files and steps held ahead of the draw.
# The budget never limits the draw itself: a small budget makes a job slower and changes no step.

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

# a loader worker with its libraries and no open file: 86 to 130 MB as measured
WORKER_BYTES = 110 * 2**20
BUILDER_BYTES = 60 * 2**20  # a constructor worker
# open files and the open window of a loader: 3 to 5 MB for text, more for images
WINDOW_BYTES = 8 * 2**20
# shares of the rest after that: samples held ready, files being read, payload and built steps
READY, OPEN, BUILT = (0.4, 0.2, 0.4)
LEAST = 16 * 2**20  # least bytes of that rest: with less, every step would wait for loaders


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory budget of one machine and its parts, in bytes."""

    total: int
    processes: int  # subtracted first: workers without open files
    windows: int  # subtracted first: the open windows of all loaders
    buffer_bytes: int  # samples ready beyond the draw, over all sources
    open_bytes: int  # files being read
    shared_bytes: int  # payload in transit and built steps, over all workers
    hosts: int  # workers that share ``shared_bytes``; 0: everything is in one process

    @property
    def ring_bytes(self) -> int:
        """Bytes of shared memory of one worker."""
        return self.shared_bytes // max(1, self.hosts)

    def __str__(self) -> str:
        parts = {
            "processes": self.processes,
            "windows": self.windows,
            "samples ready": self.buffer_bytes,
            "open files": self.open_bytes,
            "steps": self.shared_bytes,
        }
        return f"{format_bytes(self.total)}: " + ", ".join(
            f"{name} {format_bytes(n)}" for name, n in parts.items() if n
        )


def parse_bytes(value: int | str) -> int:
    """Return the number of bytes of a size such as ``"64GB"``, ``"512 MiB"`` or ``2**30``.

    Units are powers of 1024, with or without an i. Raises ValueError.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        found = value
    else:
        number = (
            value.upper().strip().removesuffix("B").removesuffix("I")
            if isinstance(value, str)
            else ""
        )
        unit = UNITS.get(number[-1:], 1)
        number = (number[:-1] if unit > 1 else number).rstrip()
        found = int(float(number) * unit) if number.replace(".", "", 1).isdecimal() else 0
    if found < 1:
        raise ValueError(
            f"expected bytes, as in '64GB', '512MB' or a whole number above 0, got {value!r}"
        )
    return found


def split(total: int, *, loaders: int, loader_hosts: int = 0, constructor_hosts: int = 0) -> Budget:
    """Divide a memory budget of ``total`` bytes; raise ``ValueError`` if it is too small.

    The error names the smallest budget that suffices.
    """
    processes = loader_hosts * WORKER_BYTES + constructor_hosts * BUILDER_BYTES
    windows = loaders * WINDOW_BYTES
    rest = total - processes - windows
    if rest < LEAST:
        hosts = (
            f"{loader_hosts + constructor_hosts} processes take {format_bytes(processes)}, "
            if processes
            else ""
        )
        raise ValueError(
            f"expected at least {format_bytes(processes + windows + LEAST)}, got "
            f"{format_bytes(total)}: {hosts}the windows of {loaders} loaders take "
            f"{format_bytes(windows)}, and reading ahead takes at least {format_bytes(LEAST)}"
        )
    return Budget(
        total=total,
        processes=processes,
        windows=windows,
        buffer_bytes=int(READY * rest),
        open_bytes=int(OPEN * rest),
        shared_bytes=int(BUILT * rest),
        hosts=loader_hosts + constructor_hosts,
    )


def format_bytes(nbytes: float) -> str:
    """Return human-readable bytes; MB and GB are rounded up so that the amount is enough."""
    for unit, size in (("GB", 2**30), ("MB", 2**20)):
        if nbytes >= size:
            return f"{math.ceil(10 * nbytes / size) / 10:g} {unit}"
    return f"{nbytes:.0f} bytes"
