"""What sources cost: the tuple (P, T, M) of the Overlord paper (arXiv 2504.09844), section 5.1, for
each of them, and for all of a job.

P is what one sample takes to be read and transformed, in seconds, and what cores were busy with of
them; T what it takes to be handed over; M is memory: M_b of buffers, M_d of file access state. All
of it was measured by somebody; here it is kept, checked, averaged and looked at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from overlord.hashing import digest

VERSION = 2
# weight of what was measured last: an outlier fades in ten refreshes, a real change is half seen in
# two
NEW = 0.3
MOST = 2**62  # samples and bytes are whole numbers of 64 bits wherever they go


class BadProfile(ValueError):
    """What was to be a profile is none: where, what was wanted, what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProfile:
    """What one source costs. Seconds are per sample and by the clock; ``core_s`` says how much of
    that cores were busy. 0 bytes: nobody has measured them.
    """

    name: str
    fingerprint: str  # of its files and transforms: other ones cost something else
    samples: int  # measured
    read_s: float
    transform_s: float
    tokens: float  # of a sample, on average
    transfer_s: float = 0.0  # T
    buffer_bytes: int = 0  # M_b: an open window, and the samples made of it
    # of read_s + transform_s: the rest was waited, for storage, a core, or the interpreter's lock;
    # 0: not told apart
    core_s: float = 0.0
    file_bytes: int = 0  # M_d: what stays while files are open: footers, handles, decompressors

    def __post_init__(self) -> None:
        found = [
            f"{n}: expected text, got {getattr(self, n)!r:.40}"
            for n in ("name", "fingerprint")
            if not isinstance(getattr(self, n), str)
        ]
        for n in ("samples", "buffer_bytes", "file_bytes"):
            if not _is_int(v := getattr(self, n)) or not 0 <= v <= MOST:
                found.append(f"{n}: expected a whole number of at least 0, got {v!r:.40}")
        for n in ("read_s", "transform_s", "tokens", "transfer_s", "core_s"):
            if not _is_number(v := getattr(self, n)) or not 0 <= v < math.inf:
                found.append(f"{n}: expected a number of at least 0, got {v!r:.40}")
        if found:
            raise BadProfile(f"profile of source {self.name!r:.80}: {'; '.join(found)}")

    @property
    def sample_s(self) -> float:
        """P, by sample."""
        return self.read_s + self.transform_s

    @property
    def cost_s(self) -> float:
        """Of a core, which is what is divided among sources; all of it where that is not told
        apart.
        """
        return self.core_s or self.sample_s

    @property
    def waited_s(self) -> float:
        """Of ``sample_s``, what no core was busy with; 0 where that is not known."""
        return max(0.0, self.sample_s - self.core_s) if self.core_s else 0.0

    @property
    def token_s(self) -> float:
        """P, by output token: what decides how much work a step in tokens is."""
        return self.sample_s / self.tokens if self.tokens else 0.0

    @property
    def memory(self) -> int:
        """M."""
        return self.buffer_bytes + self.file_bytes

    def merged(self, new: SourceProfile, weight: float = NEW) -> SourceProfile:
        """A moving average. Of other files or transforms nothing is carried over, and what nobody
        measured changes nothing.
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
    """Profiles by source. ``machine``: where they were measured, since cores differ."""

    machine: str = ""
    sources: Mapping[str, SourceProfile] = field(default_factory=dict)

    @staticmethod
    def of(profiles: Iterable[SourceProfile], machine: str = "") -> JobProfile:
        return JobProfile(machine=machine, sources={p.name: p for p in profiles})

    def merge(self, new: JobProfile, weight: float = NEW) -> JobProfile:
        """This profile refreshed by a newer one; what another machine measured is replaced, not
        averaged.
        """
        if new.machine != self.machine:
            return replace(new, sources={**self.sources, **new.sources})
        both = {
            name: self.sources[name].merged(p, weight) if name in self.sources else p
            for name, p in new.sources.items()
        }
        return replace(self, sources={**self.sources, **both})

    def known(self, fingerprints: Mapping[str, str]) -> JobProfile:
        """Those profiles alone that are of these sources as they are now."""
        fits = {
            n: p
            for n, p in self.sources.items()
            if p.samples and p.fingerprint == fingerprints.get(n)
        }
        return replace(self, sources=fits)

    def file_share(self) -> float:
        """The part of all memory that is file access state (Fig. 4 of the paper); 0 where nothing
        was measured.
        """
        file, both = (
            sum(getattr(p, n) for p in self.sources.values()) for n in ("file_bytes", "memory")
        )
        return file / both if both else 0.0

    # plain JSON, with a sum over it: a file that was cut short or edited is not to decide anything

    def to_plain(self) -> dict[str, Any]:
        body = {
            "version": VERSION,
            "machine": self.machine,
            "sources": [asdict(self.sources[n]) for n in sorted(self.sources)],
        }
        return {**body, "sum": _sum(body)}

    @staticmethod
    def from_plain(value: Any) -> JobProfile:
        """Raises ``BadProfile`` with what is wrong, whatever it is given."""
        if not isinstance(value, Mapping):
            raise BadProfile(f"expected an object, got {type(value).__name__}")
        if value.get("version") != VERSION:
            raise BadProfile(f"version: expected {VERSION}, got {value.get('version')!r:.40}")
        body = {k: v for k, v in value.items() if k != "sum"}
        if not isinstance(body.get("machine"), str) or not isinstance(body.get("sources"), list):
            raise BadProfile("expected 'machine', a text, and 'sources', a list")
        if value.get("sum") != _sum(body):
            raise BadProfile(
                "its sum is not that of what it holds: it was cut short, or written by hand"
            )
        return JobProfile.of((_source_in(v) for v in body["sources"]), body["machine"])


def cdf(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """The values in rising order, and the share of all that are at most each (Fig. 5 of the
    paper).
    """
    x = np.sort(np.asarray(values, float))
    return x, np.arange(1, len(x) + 1) / max(1, len(x))


def _source_in(value: Any) -> SourceProfile:
    if not isinstance(value, Mapping) or sorted(map(str, value)) != sorted(_NAMES):
        found = (
            ", ".join(sorted(map(str, value)))
            if isinstance(value, Mapping)
            else type(value).__name__
        )
        raise BadProfile(f"a source: expected {', '.join(_NAMES)}, got {found:.200}")
    return SourceProfile(**{str(k): v for k, v in value.items()})


def _sum(body: Mapping[str, Any]) -> str:
    try:
        return digest(json.dumps(body, sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise BadProfile(f"it holds what JSON does not: {error}") from None


def _between(a: float, b: float, weight: float) -> float:
    return a + weight * (b - a)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


PROFILE = "profile.json"  # kept beside it: what the job's sources cost
