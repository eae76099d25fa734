"""Where profiles are kept, and how they come: from a file, from a quick probe at launch, from what
loaders measure while a job runs.

A profile that cannot be read or written costs a probe, never a job.
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
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from overlord.errors import WouldBlock
from overlord.hashing import digest
from overlord.job.job import Job
from overlord.scaling.profile import PROFILE, BadProfile, JobProfile, SourceProfile
from overlord.setup.measure import Bounds, fingerprint_of, machine, measure
from overlord.setup.options import n_cores
from overlord.setup.prepared_job import PreparedJob
from overlord.sources.file_errors import is_disk
from overlord.sources.index import default_cache_dir
from overlord.uris import OBJECT_STORES, SCHEME, scrub

if TYPE_CHECKING:
    from overlord.scaling.loader_placement import SourceLoad

log = logging.getLogger("overlord")

LARGEST = 2**26  # bytes of a file that may be a profile: a hundred thousand sources have less
QUICK = Bounds(rows=64, seconds=0.1, memory=False)  # of one source, at launch
ALL_S = 0.4  # of all of them together: a start is not to be felt
FEWEST = (
    64  # samples of a source between two refreshes: fewer tell more of chance than of the source
)
LEAVE_S = 0.2  # for a refresh that is under way when the job ends; it is left behind then
EVERY_S = (15.0, 600.0)  # between two refreshes: the first, and as it doubles the last


# files


def path_of(job: Job, cache_dir: str | Path | None) -> Path | str:
    """In the job's journal, a directory or a store (then as a URI); without one in the cache, by
    the names of job and sources.
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
    """What is there; nothing, and a warning, where that is broken."""
    try:
        text = _fetched(path) if isinstance(path, str) else _read(path)
        if len(text) > LARGEST:
            raise BadProfile(f"expected at most {LARGEST} bytes")
        return JobProfile.from_plain(json.loads(text))
    except FileNotFoundError:
        pass  # nothing was kept yet
    except (OSError, ValueError, RecursionError) as error:
        log.warning(
            "profile %s is not used, and sources are measured again: %s",
            shown(path),
            f"{error}"[:300],
        )
    return JobProfile()


def shown(path: Path | str) -> str:
    """For people: no secrets."""
    return scrub(os.fspath(path))


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(LARGEST + 1)


def _fetched(uri: str) -> bytes:
    """As patiently as the journal is read, without which the job does not begin anyway."""
    from overlord.sources.object_store import RemoteStore

    remote, path = RemoteStore.of(uri)
    entry = remote.look(path)
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
        remote.tally.hasty = True  # it is asked once: the next refresh comes anyway
        remote.replace(path, json.dumps(profile.to_plain()).encode())
    except (OSError, ValueError, WouldBlock) as error:
        log.warning(
            "profile %s is not kept: %s",
            shown(uri),
            str(error) or "the store did not answer as it should",
        )
        return False
    return True


def save(path: Path | str, profile: JobProfile) -> bool:
    """Into a file of its own first: a reader never sees half a profile. Whether it could be
    written.
    """
    if isinstance(path, str):
        return _put(path, profile)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-profile-")
    except OSError as error:
        log.warning("profile %s is not kept: %s", path, error)
        return False
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(profile.to_plain(), out, indent=1)
        os.replace(name, path)
    except OSError as error:
        log.warning("profile %s is not kept: %s", path, error)
        with suppress(OSError):
            os.unlink(name)
        return False
    return True


def fingerprints(blueprint: PreparedJob) -> dict[str, str]:
    return {name: fingerprint_of(blueprint.kit(i)) for i, name in enumerate(blueprint.job.names)}


# at launch


def known(blueprint: PreparedJob) -> JobProfile:
    """What is kept of the job's sources as they are now."""
    return load(path_of(blueprint.given, blueprint.options.cache_dir)).known(
        fingerprints(blueprint)
    )


def quick(
    blueprint: PreparedJob,
    loads: Sequence[SourceLoad],
    have: JobProfile,
    only: Container[str] | None = None,
) -> JobProfile:
    """What is known, and a quick look at the others that may be heavy, the heaviest first, side by
    side, within ``ALL_S`` for all. ``only``: at none but these.

    Only what is safe and cheap is run: transforms of this package over files on a disk of this
    machine. Code of yours, stores, mounts and datasets are measured by ``overlord profile``, or
    while the job runs.
    """
    news = [
        i
        for i, load in enumerate(loads)
        if load.cost > 0 and load.name not in have.sources and (only is None or load.name in only)
    ]
    wanted = [i for i in news if _probed(blueprint, i)]
    if not wanted:
        return have
    todo = sorted(wanted, key=lambda i: -loads[i].cost)[::-1]  # taken from the end
    deadline, found = time.monotonic() + ALL_S, list[SourceProfile]()

    def work() -> None:
        while time.monotonic() < deadline:
            try:
                i = todo.pop()
            except IndexError:
                return
            try:
                made = measure(blueprint.kit(i), QUICK, lambda: time.monotonic() >= deadline)
            except Exception as error:  # whoever reads it next says so, by name
                log.debug("source %r cannot be probed: %s", loads[i].name, error)
                continue
            found.append(made)

    threads = [
        threading.Thread(target=work, name="overlord-probe", daemon=True)
        for _ in range(min(len(wanted), n_cores()))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(
            max(0.0, deadline - time.monotonic()) + 0.1
        )  # one that hangs in a read is left behind
    return have.merge(JobProfile.of([p for p in list(found) if p.samples], machine()))


def _probed(blueprint: PreparedJob, i: int) -> bool:
    pipeline, index = blueprint.pipelines[i], blueprint.indexes[i]
    kinds = {t.kind for t in pipeline.transforms}
    if (
        not kinds & {"tokenize", "images"}
        or any(t.user_code for t in pipeline.transforms)
        or blueprint.kit(i).processes
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
    """Merges what loaders measured since the last time into the job's profile, every now and then,
    and keeps it.
    """

    def __init__(self, blueprint: PreparedJob, figures: Callable[[], Mapping[str, Any]]):
        self._path, self._figures = path_of(blueprint.given, blueprint.options.cache_dir), figures
        self._fingerprints, self._machine = fingerprints(blueprint), machine()
        self.profile: JobProfile = blueprint.profile or JobProfile()
        self._before: dict[
            tuple[str, int], dict[str, float]
        ] = {}  # what each loader had counted when it was asked last
        self._sums: dict[str, dict[str, float]] = {}  # of sources, since they were last merged
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="overlord-profile", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def joined(self, blueprint: PreparedJob) -> None:
        """A source takes part that was not there: what it was seen to cost counts, and it is
        measured as the others are. From here on all is kept where the job that lists it finds it.
        """
        marks, name = fingerprints(blueprint), blueprint.job.names[-1]
        with self._lock:
            self._path, self._fingerprints = (
                path_of(blueprint.given, blueprint.options.cache_dir),
                marks,
            )
            seen = None if blueprint.profile is None else blueprint.profile.sources.get(name)
            if seen is not None and name not in self.profile.sources:
                self.profile = self.profile.merge(
                    JobProfile.of([seen], self.profile.machine or self._machine)
                )

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(LEAVE_S)

    def _loop(self) -> None:
        wait = EVERY_S[0]
        while not self._over.wait(wait):
            try:
                self.refresh()
            except Exception as error:  # a part that is away; it is asked again
                log.debug("profiles are not refreshed: %s", error)
            wait = min(2 * wait, EVERY_S[1])

    def refresh(self) -> JobProfile:
        """The profile with what was measured since the last time."""
        rows = self._figures()["loaders"]
        with self._lock:
            new = self._since(rows)
            if new:
                self.profile = self.profile.merge(JobProfile.of(new, self._machine))
                save(self._path, self.profile)
            return self.profile

    def _since(self, rows: Sequence[Mapping[str, Any]]) -> list[SourceProfile]:
        """Of sources of which enough has come together; what there is of the others is kept until
        then.
        """
        buffers: dict[str, int] = {}
        for row in rows:
            now = {n: float(row.get(n, 0)) for n in ("samples", "tokens", "core_s")}
            now["read_s"], now["transform_s"] = row.get("of_samples_s", (0.0, 0.0))
            if not now["samples"]:  # nothing yet, or its host does not answer
                continue
            before = self._before.get((row["source"], row["loader"]), {})
            if now["samples"] < before.get(
                "samples", 0.0
            ):  # it was started again, and counts from nothing
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
