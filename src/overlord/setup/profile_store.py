"""Profiles of a job's sources: stored in a file, measured at launch, and updated while it runs.

Sources without a readable profile are measured again. A profile that cannot be written is logged,
and never fails a job.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from overlord.errors import WouldBlock
from overlord.hashing import digest
from overlord.job.job import Job
from overlord.scaling.profile import PROFILE, BadProfile, JobProfile, SourceLoad, SourceProfile
from overlord.setup.measure import Bounds, machine, measure
from overlord.setup.options import n_cores
from overlord.setup.prepared_job import PreparedJob
from overlord.setup.timeouts import TIMEOUTS
from overlord.sources.index import default_cache_dir
from overlord.sources.retry import is_disk
from overlord.uris import OBJECT_STORES, SCHEME, scrub

log = logging.getLogger("overlord")

LARGEST = 2**26  # bytes of a profile's file: those of a hundred thousand sources are smaller
QUICK = Bounds(rows=64, seconds=0.1, memory=False)  # bounds of one source at launch
# Samples of a source for one update: the mean cost of fewer is mostly noise.
FEWEST = 64


# files


def path_of(job: Job, cache_dir: str | Path | None) -> Path | str:
    """Return the location of a job's profile.

    It is in the job's journal: a path in a directory, or a URI in a store. Without a journal it is
    in the cache, by the names of job and sources.
    """
    journal = None if job.journal is None else os.fspath(job.journal)
    if journal is not None and not SCHEME.match(journal):
        return Path(journal) / PROFILE
    scheme = "" if journal is None else journal.partition("://")[0].lower()
    if journal is not None and scheme == "file":
        return Path(unquote(urlsplit(journal).path)) / PROFILE
    if journal is not None and scheme in OBJECT_STORES:
        body, mark, options = journal.partition("?")
        return f"{body.rstrip('/')}/{PROFILE}{mark}{options}"
    base = default_cache_dir().parent if cache_dir is None else Path(cache_dir)
    return base / "profiles" / f"{digest(job.name, *job.names)}.json"


def load(path: Path | str) -> JobProfile:
    """Return the profile at a location; an empty one if it is missing or cannot be read.

    A profile that exists and cannot be read is logged.
    """
    try:
        text = _fetched(path) if isinstance(path, str) else _read(path)
        if len(text) > LARGEST:
            raise BadProfile(f"expected at most {LARGEST} bytes, got more; delete the file")
        return JobProfile.from_plain(json.loads(text))
    except FileNotFoundError:
        pass  # no profile was saved yet
    except (OSError, ValueError, RecursionError) as error:
        log.warning(
            "profile %s ignored, sources are measured again: %s", shown(path), f"{error}"[:300]
        )
    return JobProfile()


def shown(path: Path | str) -> str:
    """Return a location as text without secrets."""
    return scrub(os.fspath(path))


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(LARGEST + 1)


def _fetched(uri: str) -> bytes:
    """Read a profile from a store.

    Requests are retried as those of the journal are.
    """
    from overlord.sources.object_store import RemoteStore

    remote, path = RemoteStore.of(uri)
    entry = remote.find(path)
    if entry is None or entry.file is None:
        raise FileNotFoundError(path)
    return (
        bytes(remote.read(entry.file, 0, min(entry.file.size, LARGEST + 1)))
        if entry.file.size
        else b""
    )


def _put(uri: str, profile: JobProfile) -> bool:
    from overlord.sources.object_store import RemoteStore

    try:
        remote, path = RemoteStore.of(uri)
        remote.stats.no_wait = True  # one attempt: the next refresh writes the profile again
        remote.replace(path, json.dumps(profile.to_plain()).encode())
    except (OSError, ValueError, WouldBlock) as error:
        log.warning(
            "profile %s not saved: %s", shown(uri), str(error) or "the store did not accept it"
        )
        return False
    return True


def save(path: Path | str, profile: JobProfile) -> bool:
    """Write a profile and return whether it was written; log a failure.

    A file is written under a temporary name first, so that a reader never gets half of it.
    """
    if isinstance(path, str):
        return _put(path, profile)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-profile-")
    except OSError as error:
        log.warning("profile %s not saved: %s", path, error)
        return False
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(profile.to_plain(), out, indent=1)
        os.replace(name, path)
    except OSError as error:
        log.warning("profile %s not saved: %s", path, error)
        with suppress(OSError):
            os.unlink(name)
        return False
    return True


def fingerprints(prepared: PreparedJob) -> dict[str, str]:
    """Return the cost fingerprints of all sources by name."""
    return {
        name: prepared.reader_spec(i).cost_fingerprint for i, name in enumerate(prepared.job.names)
    }


# at launch


def known(prepared: PreparedJob) -> JobProfile:
    """Return the saved profiles of the job's sources whose files and transforms are unchanged."""
    return load(path_of(prepared.given, prepared.options.cache_dir)).known(fingerprints(prepared))


def quick(
    prepared: PreparedJob,
    loads: Sequence[SourceLoad],
    have: JobProfile,
    only: Container[str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> JobProfile:
    """Return the known profiles, with quick measurements of other sources that may be heavy.

    The heaviest sources are measured first, concurrently, within ``TIMEOUTS.probe_s`` for all.
    ``only`` restricts the measurement to some sources. ``progress`` is called with (finished
    sources, total), in any thread. Only safe and cheap code is run: transforms
    of this package over files on a local disk. User code, stores, mounts and datasets are measured
    by ``overlord profile``, or while the job runs.
    """
    unknown = [
        i
        for i, load in enumerate(loads)
        if load.cost > 0 and load.name not in have.sources and (only is None or load.name in only)
    ]
    wanted = [i for i in unknown if _is_measurable(prepared, i)]
    if not wanted:
        return have
    todo = sorted(wanted, key=lambda i: -loads[i].cost)[::-1]  # popped from the end
    deadline, found = time.monotonic() + TIMEOUTS.probe_s, list[SourceProfile]()
    progress(0, len(wanted))

    def work() -> None:
        while time.monotonic() < deadline:
            try:
                i = todo.pop()
            except IndexError:
                return
            progress(len(wanted) - len(todo) - 1, len(wanted))
            try:
                made = measure(prepared.reader_spec(i), QUICK, lambda: time.monotonic() >= deadline)
            except Exception as error:  # its loader raises the same error later
                log.debug("source %r not measured: %s", loads[i].name, error)
                continue
            found.append(made)

    threads = [
        threading.Thread(target=work, name="overlord-probe", daemon=True)
        for _ in range(min(len(wanted), n_cores()))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:  # a thread that hangs in a read is abandoned
        thread.join(max(0.0, deadline - time.monotonic()) + 0.1)
    return have.merge(JobProfile.of([p for p in list(found) if p.samples], machine()))


def _is_measurable(prepared: PreparedJob, i: int) -> bool:
    """Return whether a source is worth a quick measurement, and safe to measure at launch."""
    pipeline, index = prepared.pipelines[i], prepared.indexes[i]
    kinds = {t.kind for t in pipeline.transforms}
    if (
        not kinds & {"tokenize", "images"}
        or any(t.user_code for t in pipeline.transforms)
        or prepared.reader_spec(i).processes
    ):
        return False
    if index.access.fs is None or not index.access.local or not index.files:
        return False
    try:
        return is_disk(os.stat(index.files[0].path).st_dev)
    except OSError:
        return False


# while a job runs


class Refresher:
    """The thread that periodically merges measurements of loaders into the job's profile.

    ``prepared`` returns the current job, ``metrics`` the metrics of the runtime.
    """

    def __init__(
        self, prepared: Callable[[], PreparedJob], metrics: Callable[[], Mapping[str, Any]]
    ):
        self._prepared, self._metrics, self._machine = prepared, metrics, machine()
        self._known: PreparedJob | None = None  # the job at the last refresh
        self._path: Path | str = ""
        self._fingerprints: dict[str, str] = {}
        self.profile = JobProfile()
        # totals of each loader at the last refresh, by source and loader
        self._before: dict[tuple[str, int], dict[str, float]] = {}
        self._sums: dict[str, dict[str, float]] = {}  # by source, since it was last merged
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="overlord-profile", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(TIMEOUTS.close_s)

    def _loop(self) -> None:
        wait = TIMEOUTS.refresh_first_s
        while not self._over.wait(wait):
            try:
                self.refresh()
            except Exception as error:  # a worker that does not answer; it is polled again
                log.debug("profiles not refreshed, retrying later: %s", error)
            wait = min(2 * wait, TIMEOUTS.refresh_most_s)

    def refresh(self) -> JobProfile:
        """Merge the measurements since the last refresh, and return the profile."""
        rows = self._metrics()["loaders"]
        with self._lock:
            self._follow(self._prepared())
            new = self._since(rows)
            if new:
                self.profile = self.profile.merge(JobProfile.of(new, self._machine))
                save(self._path, self.profile)
            return self.profile

    def _follow(self, prepared: PreparedJob) -> None:
        """Adopt the current job, and the profiles of sources that were added to it.

        The profile of a job with added sources has a location of its own.
        """
        if prepared is self._known:
            return
        self._known = prepared
        self._path = path_of(prepared.given, prepared.options.cache_dir)
        self._fingerprints = fingerprints(prepared)
        given = prepared.profile or JobProfile()
        if not self.profile.sources:
            self.profile = given
        elif added := [p for name, p in given.sources.items() if name not in self.profile.sources]:
            self.profile = self.profile.merge(
                JobProfile.of(added, self.profile.machine or self._machine)
            )

    def _since(self, rows: Sequence[Mapping[str, Any]]) -> list[SourceProfile]:
        """Return profiles of the sources with enough new samples; the others accumulate more."""
        buffers: dict[str, int] = {}
        for row in rows:
            now = {n: float(row.get(n, 0)) for n in ("samples", "tokens", "core_s")}
            now["read_s"], now["transform_s"] = row.get("of_samples_s", (0.0, 0.0))
            if not now["samples"]:  # nothing yet, or its worker does not answer
                continue
            before = self._before.get((row["source"], row["loader"]), {})
            if now["samples"] < before.get("samples", 0.0):  # it was restarted, and counts from 0
                before = {}
            self._before[row["source"], row["loader"]] = now
            mine = self._sums.setdefault(row["source"], dict.fromkeys(now, 0.0))
            for n, value in now.items():
                mine[n] += value - before.get(n, 0.0)
            buffers[row["source"]] = (
                buffers.get(row["source"], 0) + row.get("ready_bytes", 0) + row.get("kept_bytes", 0)
            )
        enough = [
            name
            for name, s in self._sums.items()
            if name in self._fingerprints and s["samples"] >= FEWEST
        ]
        return [self._of(name, self._sums.pop(name), buffers.get(name, 0)) for name in enough]

    def _of(self, name: str, sums: Mapping[str, float], buffer_bytes: int) -> SourceProfile:
        n = sums["samples"]
        return SourceProfile(
            name=name,
            fingerprint=self._fingerprints[name],
            samples=int(n),
            read_s=max(0.0, sums["read_s"]) / n,
            transform_s=max(0.0, sums["transform_s"]) / n,
            core_s=max(0.0, sums["core_s"]) / n,
            tokens=max(0.0, sums["tokens"]) / n,
            buffer_bytes=buffer_bytes,
        )
