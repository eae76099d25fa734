"""Measurement of the constants of the dry run on this machine.

A few rows of every source are read, and a small version of the job runs in processes. Another
process opens sources like a worker of a colocated loader. Connections are opened and used. Times
are CPU seconds where both ends are in this process, or other work shares its CPU cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from overlord.constructor.images import PixelForm
from overlord.dryrun.machines import Constants
from overlord.dryrun.stand_ins import Probe
from overlord.errors import OverlordError
from overlord.import_path import as_setting
from overlord.job.job import Job, Source
from overlord.mesh import Batch, ClientPlaceTree
from overlord.messages.control import Cursor, LoaderStart, Refill
from overlord.messages.data import BlockReady, Evaluate, Read
from overlord.sample import Ragged
from overlord.setup.prepared_job import PreparedJob, open_loader
from overlord.sources.files import Files
from overlord.transport.connection import open_connection
from overlord.transport.server import Server

VERSION = 3  # version of the stored file; raise it when a measurement changes
PROBE_ROWS = 16  # rows of every source that become samples
PROBE_TRIES = 64  # reads and evaluations per source, at most: filters may drop most rows
SOURCES = 24  # sources that the stand-in jobs open, at most
STEPS, SAMPLES = 12, 64  # steps and samples per step of the small job
# Tokens of a step with images, and its fewest samples: 64 large images take minutes to decode.
IMAGE_TOKENS, FEWEST = 4096, 4
LINKS = 48
PINGS, MESSAGES, CHUNK, CHUNKS = 200, 1000, 2**22, 24
ID_BYTES = 4  # bytes of a token as it is built for other processes, at most
WIDE_BYTES = 8 + 8 + 8 + 4  # tokens, labels, position_ids, loss_mask of the batch contract
CHILD_S = 120.0  # seconds for one stand-in job
TOKEN = "of a measurement of this machine"  # of the server of the measured connections

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measured constants of this machine, and the probe of every source."""

    constants: Constants
    probes: tuple[Probe, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the constants and probes as plain values, for JSON."""
        return {
            "version": VERSION,
            "constants": asdict(self.constants),
            "probes": [probe.to_dict() for probe in self.probes],
        }

    @staticmethod
    def of(values: Any, sources: int) -> Measured | None:
        """Return the object of stored values for ``sources`` sources; None if they do not fit.

        They do not fit if version or number of sources differ, or if they are damaged.
        """
        try:
            if values["version"] != VERSION or len(values["probes"]) != sources:
                return None
            probes = tuple(
                Probe(row_s=p["row_s"], sample_bytes=p["sample_bytes"], meta=p["meta"])
                for p in values["probes"]
            )
            return Measured(constants=Constants.of(values["constants"]), probes=probes)
        except (KeyError, TypeError, ValueError):
            return None


def load_or_measure(
    prepared: PreparedJob, stored: Path, *, again: bool, progress: Progress
) -> Measured:
    """Return the constants in file ``stored``; measure and store them if it has none.

    ``again``: measure even if constants are stored. ``progress``: called with (task, done, total).
    """
    n = len(prepared.job.sources)
    if not again and stored.exists():
        try:
            found = Measured.of(json.loads(stored.read_text()), n)
        except (OSError, ValueError):
            found = None
        if found is not None:
            return found
    probes = probe_sources(prepared, progress)
    progress("stand-in jobs", 0, 4)
    made = _colocated(prepared)
    progress("stand-in jobs", 1, 4)
    few, many, samples = min(2, n), min(SOURCES, n), samples_per_step(prepared.job, probes)
    small = _small_job(prepared.job, few, samples)
    progress("stand-in jobs", 2, 4)
    large = _small_job(prepared.job, many, samples) if many > few else small
    made |= _per_source(small, large, few, many)
    progress("stand-in jobs", 3, 4)
    made |= _connections()
    progress("stand-in jobs", 4, 4)
    weights = np.array([float(s.weight) for s in prepared.job.sources])
    share = weights / (weights.sum() or 1.0)
    names = {"read_s": "row_s", "sample_bytes": "sample_bytes", "sample_tokens": "tokens"}
    mean = {
        name: float(share @ np.array([getattr(p, of) for p in probes]))
        for name, of in names.items()
    }
    # Bytes of pixels per token, if there are images: a colocated loader also holds them.
    pixels = max(0.0, made["built_bytes"] - ID_BYTES)
    constants = Constants.of(made | mean | {"wide_bytes": WIDE_BYTES + pixels})
    found = Measured(constants=constants, probes=probes)
    stored.parent.mkdir(parents=True, exist_ok=True)
    new = stored.with_suffix(f".{os.getpid()}.part")
    new.write_text(json.dumps(found.to_dict()))
    os.replace(new, stored)
    return found


# ----------------------------------------------------------------------------
# Probes: the cost of the rows of every source.


def probe_sources(prepared: PreparedJob, progress: Progress) -> tuple[Probe, ...]:
    """Return the probe of every source, each made by a loader and reader of the source."""
    found, n = [], len(prepared.job.sources)
    for i in range(n):
        progress("rows of every source", i, n)
        found.append(_probe(prepared, i))
    progress("rows of every source", n, n)
    prepared.handles.close()
    return tuple(found)


def _probe(prepared: PreparedJob, i: int) -> Probe:
    """Return the probe of source ``i``: read slices, and evaluate rows until there are samples."""
    spec = prepared.reader_spec(i)
    spec = replace(spec, order=replace(spec.order, shuffle_chunks=1))
    loader, reader, worker = open_loader(
        spec, LoaderStart(0, i, 0, 1, Cursor(), 2**26), prepared.handles
    )
    commands, read, read_s = loader.handle(Refill(0, must=PROBE_ROWS, level=0)), 0, 0.0
    try:
        for _ in range(PROBE_TRIES):
            command, start = commands.pop(0), time.process_time()
            if isinstance(command, Read):
                window = reader.read(command)
                read, read_s = read + window.rows, read_s + time.process_time() - start
                commands += loader.handle(window)
            elif isinstance(command, Evaluate):
                evaluated, content = reader.evaluate(command)
                if len(evaluated.found):
                    return _probe_of(
                        evaluated,
                        content.nbytes,
                        read_s / max(1, read) + (time.process_time() - start) / evaluated.rows,
                    )
                commands += loader.handle(evaluated)
    except IndexError:  # the source has no more rows
        pass
    finally:
        if worker is not None:
            worker.close()
    name = prepared.job.sources[i].name
    raise OverlordError(
        f"source {name!r}: expected a sample among its first rows, got none; remove the source, or "
        "loosen its filters, to simulate the job"
    )


def _probe_of(evaluated: BlockReady, nbytes: int, row_s: float) -> Probe:
    meta: dict[str, Any] = {}
    for name, column in evaluated.found.meta.items():
        if isinstance(column, Ragged):
            meta[name] = [
                column.values[a:b].tolist()
                for a, b in zip(column.offsets[:-1], column.offsets[1:], strict=True)
            ]
        else:
            meta[name] = np.asarray(column).tolist()
    return Probe(row_s=row_s, sample_bytes=nbytes / len(evaluated.found), meta=meta)


# ----------------------------------------------------------------------------
# Stand-in jobs: memory and CPU of workers, each measured in a separate process.


class _StandInProcess:
    """A stand-in job in its own process, which exchanges lines of JSON with this process."""

    def __init__(self, **request: Any):
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "overlord.dryrun.stand_in_job"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": as_setting()},
        )
        self._limit = threading.Timer(CHILD_S, self._process.kill)
        self._limit.start()
        self.send(request)

    def send(self, value: Any) -> None:
        """Send a value as one line of JSON."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for a line of JSON and return its value; raise ``OverlordError`` if there is none.

        The process is killed ``CHILD_S`` after its start.
        """
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if not (line := self._process.stdout.readline()):
            raise OverlordError(
                f"stand-in job: expected a result within {CHILD_S:.0f} s, got none; correct the "
                f"error at the end of its stderr: {self._process.stderr.read()[-2000:]}"
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> _StandInProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        self._process.kill()
        self._process.communicate()


def _colocated(prepared: PreparedJob) -> dict[str, float]:
    """Return the memory of a worker of a colocated loader: without sources, and per opened source.

    Only sources on local disks are measured; the others are assumed to be similar.
    """
    files, columns = [], []
    for index, pipeline in zip(prepared.indexes, prepared.pipelines, strict=True):
        if index.files and isinstance(index.access, Files) and index.access.local:
            files.append([f.path for f in index.files])
            columns.append(None if pipeline.columns is None else list(pipeline.columns))
    files, columns = files[:SOURCES], columns[:SOURCES]
    if not files:
        raise OverlordError(
            "simulate: expected a source on a local disk, got none; simulate with one source on a "
            "local disk, by which the memory of a colocated loader is measured"
        )
    half = len(files) // 2
    with _StandInProcess(
        job="open_sources",
        files=files,
        columns=columns,
        counts=[half, len(files)] if half else [len(files)],
    ) as child:
        found = child.receive()["bytes"]
    first = found[0]
    slope = (found[-1] - found[1]) / (len(files) - half) if half else found[-1] - found[0]
    return {"worker_bytes": max(0, first), "opened_bytes": max(0.0, slope)}


def samples_per_step(job: Job, probes: Sequence[Probe]) -> int:
    """Return the samples per step of a small job; with images, about IMAGE_TOKENS tokens."""
    if PixelForm.of(job.sources) is None:
        return SAMPLES
    return max(FEWEST, min(SAMPLES, int(IMAGE_TOKENS / max(probe.tokens for probe in probes))))


def choose_sources(job: Job, n: int) -> tuple[Source, ...]:
    """Return ``n`` sources of a job in its order, those with a weight first.

    The share of sources with images is kept; if the job has any, at least one is chosen.
    """
    ranked = sorted(job.sources, key=lambda source: not _weight(job, source))
    pictures = [s.name for s in ranked if PixelForm.of([s]) is not None]
    others = [s.name for s in ranked if s.name not in pictures]
    k = min(len(pictures), max(n - len(others), round(n * len(pictures) / len(ranked)), 1))
    names = {*pictures[:k], *others[: n - k]}
    return tuple(s for s in job.sources if s.name in names)


def _weight(job: Job, source: Source) -> float:
    return float(
        job.mixture.get(source.name, 0.0) if isinstance(job.mixture, dict) else source.weight
    )


def _small_job(job: Job, n: int, samples: int) -> dict[str, float]:
    """Return memory and CPU constants of workers, measured in a small version of the job.

    It has ``n`` sources in one loader worker, one constructor worker and one rank, each in a
    process.
    """
    from overlord.session.launch import launch

    sources = choose_sources(job, n)
    names = {s.name for s in sources}
    mixture = (
        {k: v for k, v in job.mixture.items() if k in names}
        if isinstance(job.mixture, dict)
        else None
    )
    # "packed" places no images.
    strategy = job.strategy if PixelForm.of(job.sources) is not None else "packed"
    small = replace(
        job,
        sources=sources,
        stages=(),
        place=ClientPlaceTree(),
        mixture=mixture,
        journal=None,
        until="all",
        look_ahead=1,
        overflow="grow",
        batch=Batch(samples=samples, context=job.document_limit),
        max_document=None,
        hooks=(),
        strategy=strategy,
    )
    with launch(
        small,
        runtime="process",
        hosts=1,
        sources_per_host=n,
        constructor_hosts=1,
        prefetch=2,
        read_ahead=2,
    ) as session:
        served = session.serve(ranks=[0])
        pids = {a["name"]: a["pid"] for a in session.metrics()["actors"] if a["role"] == "host"}
        with _StandInProcess(
            job="connect_client", address=str(served.address), token=str(served.token), steps=STEPS
        ) as child:
            client = child.receive()
            began = _cpu_s(pids["constructor-worker/0"])
            child.send("go on")
            took = child.receive()
            spent = _cpu_s(pids["constructor-worker/0"]) - began
            memory = _complete_metrics(session)["memory"]
            held = memory["ready"] + memory["kept"] + memory.get("sending", 0)
            return {
                "client_bytes": max(0, client["bytes"]),
                "planner_bytes": memory["roles"]["session"],
                "host_bytes": max(0, _resident(pids["loader-worker/0"]) - held),
                "constructor_bytes": max(
                    0,
                    _resident(pids["constructor-worker/0"])
                    - max(memory["slabs"], memory["assembled"]),
                ),
                "built_bytes": took["bytes"] / max(1, took["tokens"]),
                "build_s": spent / max(1, took["tokens"]),
            }


def _complete_metrics(session: Any) -> dict[str, Any]:
    """Poll the metrics of a session until all workers have answered, and return them.

    Raise ``OverlordError`` after CHILD_S.
    """
    deadline = time.monotonic() + CHILD_S
    while True:
        found: dict[str, Any] = session.metrics()
        silent = [
            f"{a['name']} ({a['state']})"
            for a in found["actors"]
            if a["role"] == "host" and a["state"] != "running"
        ]
        if not silent:
            return found
        if time.monotonic() > deadline:
            raise OverlordError(
                "stand-in job: expected metrics of all workers, got none within "
                f"{CHILD_S:.0f} s from {', '.join(silent)}"
            )
        time.sleep(0.1)


def _per_source(few: dict[str, float], many: dict[str, float], n: int, m: int) -> dict[str, float]:
    """Return the constants of two runs, with a loader worker's memory as a base and per source.

    The runs ``few`` and ``many`` have ``n`` and ``m`` sources.
    """
    source = max(0.0, (many["host_bytes"] - few["host_bytes"]) / max(1, m - n))
    return {
        **few,
        **many,
        "source_bytes": source,
        "host_bytes": max(0.0, few["host_bytes"] - n * source),
    }


def _resident(pid: int) -> int:
    """Return the RSS of a process in bytes; 0 if unknown.

    It is not the PSS, since a worker alone on its node shares no pages.
    """
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, including threads that have ended.

    It reads Linux's clock of another process (clock_getcpuclockid(3)), which is finer than ticks.
    """
    return time.clock_gettime(~pid << 3 | 2)


# ----------------------------------------------------------------------------
# Cost of connections, messages and bytes.


def _connections() -> dict[str, float]:
    """Return the measured costs of connections, calls, messages and bytes.

    Both ends are in this process, so half of the CPU time and memory is that of one end.
    """
    from overlord.process.resources import own_bytes

    server = Server(
        token=TOKEN,
        on_message=lambda link, value: link.send(value) if isinstance(value, int) else None,
    )
    links = []
    try:
        first, _ = open_connection(server.address, TOKEN, {}, timeout_s=30.0, transport="tcp")
        links.append(first)
        before, start = own_bytes(), time.process_time()
        for _ in range(LINKS):
            links.append(
                open_connection(server.address, TOKEN, {}, timeout_s=30.0, transport="tcp")[0]
            )
        connect_s, link_bytes = (
            (time.process_time() - start) / LINKS / 2,
            max(0, own_bytes() - before) / LINKS / 2,
        )
        rounds = sorted(_ping(first, k) for k in range(PINGS))
        start = time.process_time()
        for k in range(MESSAGES):
            first.send({"k": k})
        first.send(-1)
        first.recv(30.0)
        link_s = (time.process_time() - start) / MESSAGES / 2
        some = np.zeros(CHUNK, np.uint8)
        start = time.process_time()
        for _ in range(CHUNKS):
            first.send({"some": some})
        first.send(-1)
        first.recv(30.0)
        bandwidth = CHUNK * CHUNKS / ((time.process_time() - start) / 2)
        return {
            "connect_s": connect_s,
            "link_bytes": link_bytes,
            "call_s": rounds[PINGS // 4],
            "link_s": link_s,
            "bandwidth": bandwidth,
        }
    finally:
        for link in links:
            link.close()
        server.close()


def _ping(link: Any, k: int) -> float:
    start = time.perf_counter()
    link.send(k)
    link.recv(30.0)
    return time.perf_counter() - start
