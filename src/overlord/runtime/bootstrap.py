"""From a Job to cores: indexes, pipelines, fingerprints, and one set of cores for a given state."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from overlord.constructor.assembler import Assembler
from overlord.errors import JobError, PlanError, StateMismatch
from overlord.hashing import digest
from overlord.job import Job, did_you_mean
from overlord.loader.loader import Loader
from overlord.loader.order import SourceOrder
from overlord.loader.reader import SourceReader
from overlord.messages import Cursor, SetMixture, Skip, StreamState
from overlord.planner.planner import Planner, PlannerSpec, SourceSpec, initial_state
from overlord.planner.schedule import by_source
from overlord.planner.strategy import resolve
from overlord.runtime.host import Executor, Host
from overlord.sources.base import ReadOptions
from overlord.sources.handles import ChunkReader, HandleCache
from overlord.sources.index import Index, build_indexes, default_cache_dir
from overlord.sources.index import SourceSpec as IndexSpec
from overlord.transforms.pipeline import Pipeline
from overlord.transforms.worker import TransformWorker

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Launch options: none of them changes the stream."""

    prefetch: int = 4
    loaders: Mapping[str, int] | None = None  # loaders per source; 1 where not named
    workers: int | None = None  # threads that read, transform and build
    read_ahead: int = 2  # steps' worth of samples held ready beyond the draw
    buffer_bytes: int = 2**30  # of samples held ready beyond the draw, over all sources
    open_bytes: int = 2**28  # of files held open in the middle of a chunk
    open_files: int = 512
    cache_dir: str | None = None
    stall_warn_s: float = 30.0
    stall_limit_s: float = 600.0
    check: bool = False  # check every core's invariants after every command (slow; for tests)
    progress: Callable[[int, int], None] | None = None  # told (sources indexed, of how many)

    def problems(self, job: Job) -> list[str]:
        found = []
        for name, least in (("prefetch", 1), ("read_ahead", 1), ("buffer_bytes", 1), ("open_bytes", 1), ("open_files", 1)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                found.append(f"{name}: wanted a whole number of at least {least}, found {getattr(self, name)!r}")
        for name in ("stall_warn_s", "stall_limit_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                found.append(f"{name}: wanted a number of seconds, found {value!r}")
        if self.workers is not None and (not isinstance(self.workers, int) or self.workers < 1):
            found.append(f"workers: wanted a whole number of at least 1, found {self.workers!r}")
        for name, n in (self.loaders or {}).items():
            if name not in job.names:
                found.append(f"loaders: unknown source {name!r}{did_you_mean(name, job.names)}")
            elif not isinstance(n, int) or n < 1:
                found.append(f"loaders: wanted a whole number of at least 1 for {name!r}, found {n!r}")
        return found


class Blueprint:
    """A job made ready: everything that is read once and shared by all cores made from it."""

    def __init__(self, job: Job, options: Options):
        if problems := options.problems(job):
            raise JobError(problems, "launch")
        self.job, self.options = job, options
        self.strategy = resolve(job.strategy)
        self.pipelines = [
            Pipeline(s.name, s.transforms, seed=job.seed, context=job.batch.context, on_long=job.on_long) for s in job.sources
        ]  # fmt: skip
        self.indexes = build_indexes(
            [IndexSpec(s.name, s.path, s.format, self._read_options(s, p)) for s, p in zip(job.sources, self.pipelines, strict=True)],
            cache_dir=options.cache_dir or default_cache_dir(), workers=2 * n_workers(options), progress=options.progress,
        )  # fmt: skip
        self.handles = HandleCache(max_open=options.open_files, max_bytes=options.open_bytes)
        self.orders = [
            SourceOrder(name=s.name, n_chunks=len(i.chunks), seed=job.seed, shuffle=s.shuffle, shuffle_chunks=job.shuffle_chunks)
            for s, i in zip(job.sources, self.indexes, strict=True)
        ]  # fmt: skip
        self.fingerprint = fingerprint(job, self.indexes, self.pipelines)
        self._workers: list[TransformWorker] = []

    def _read_options(self, source: Any, pipeline: Pipeline) -> ReadOptions:
        return ReadOptions(self.job.slice_rows, self.job.chunk_bytes, source.max_sample_bytes, pipeline.columns)

    def loaders_of(self, i: int) -> int:
        return (self.options.loaders or {}).get(self.job.sources[i].name, 1)

    def host(self, executor: Executor, state: StreamState | None = None) -> Host:
        """One set of cores that starts at a state."""
        job, options = self.job, self.options
        spec = PlannerSpec(
            sources=tuple(
                SourceSpec(
                    name=s.name, n_groups=o.n_groups, epochs=s.epochs, max_bad=s.max_bad, loaders=self.loaders_of(i),
                    files=tuple(f.path for f in index.files),
                )
                for i, (s, o, index) in enumerate(zip(job.sources, self.orders, self.indexes, strict=True))
            ),
            batch=job.batch, place=job.place, strategy=self.strategy, schedule=schedule_of(job), seed=job.seed, until=job.until,
            draw=job.draw, mix_every=job.mix_every, prefetch=options.prefetch, read_ahead=options.read_ahead,
        )  # fmt: skip
        state = state or initial_state(spec)
        loaders: list[Loader] = []
        readers: list[SourceReader] = []
        total = sum(s.loaders for s in spec.sources)
        for i, source in enumerate(job.sources):
            for k in range(self.loaders_of(i)):
                loaders.append(Loader(
                    len(loaders), self.orders[i], epochs=source.epochs, loader=k, loaders=self.loaders_of(i),
                    cursor=Cursor(*state.cursors[i].tolist()), budget_bytes=max(1, options.buffer_bytes // total),
                ))  # fmt: skip
                readers.append(SourceReader(self.orders[i], self._chunk_reader(i), self._stages(i)))
        buckets = job.place.buckets("DP")
        return Host(
            planner=Planner(spec, state), loaders=loaders, readers=readers,
            assemblers=[Assembler(b, ranks) for b, ranks in enumerate(buckets)],
            batch=job.batch, multiple=job.document_multiple, executor=executor, check=options.check,
        )  # fmt: skip

    def _chunk_reader(self, i: int) -> ChunkReader:
        return ChunkReader(self.indexes[i], options=self._read_options(self.job.sources[i], self.pipelines[i]), cache=self.handles)

    def _stages(self, i: int) -> Any:
        if not self.pipelines[i].holds_lock:
            return self.pipelines[i]
        worker = TransformWorker(self.pipelines[i])
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self.handles.close()

    # state as plain JSON

    def export(self, state: StreamState) -> dict[str, Any]:
        names = self.job.names
        return {
            "version": STATE_VERSION,
            "job": self.job.name,
            "fingerprint": self.fingerprint,
            "step": state.step,
            "cursors": dict(zip(names, state.cursors.tolist(), strict=True)),
            "owed": dict(zip(names, state.owed, strict=True)),
            "active": dict(zip(names, state.active, strict=True)),
            "events": [_event_out(e) for e in state.events],
            "mix": [state.mix_step, state.mix_epoch],
            "counts": {k: dict(zip(names, v.tolist(), strict=True)) for k, v in state.counts.items()},
        }

    def restore(self, saved: Mapping[str, Any], allow: tuple[str, ...] = ()) -> StreamState:
        """A state from its JSON form, after checking that it belongs to this job."""
        if not isinstance(saved, Mapping) or saved.get("version") != STATE_VERSION or "cursors" not in saved:
            found = saved.get("version") if isinstance(saved, Mapping) else type(saved).__name__
            raise StateMismatch({"version": (str(found), str(STATE_VERSION))}, "this is no state of this version of Overlord")
        try:
            self._check_fingerprint(saved["fingerprint"], allow)
            return self._state_of(saved)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as e:
            raise StateMismatch({"form": ("damaged", f"{type(e).__name__}: {e}")}, "save and load what state_dict() gave, unchanged") from e

    def _state_of(self, saved: Mapping[str, Any]) -> StreamState:
        names = self.job.names
        cursors = [Cursor(*map(int, saved["cursors"].get(n, Cursor()))) for n in names]
        if any(len(c) != len(Cursor()) for c in saved["cursors"].values()):
            raise ValueError("a cursor is six numbers")
        # Where fewer files are left than the cursor has passed (``allow``), its epoch is over.
        cursors = [c if c.group < o.n_groups else Cursor(c.epoch + 1) for c, o in zip(cursors, self.orders, strict=True)]
        return StreamState(
            step=int(saved["step"]),
            cursors=np.array(cursors, np.int64),
            owed=tuple(int(saved["owed"].get(n, 0)) for n in names),
            active=tuple(bool(saved["active"].get(n, True)) for n in names),
            events=tuple(_event_in(e) for e in saved["events"]),
            mix_step=int(saved["mix"][0]), mix_epoch=int(saved["mix"][1]),
            counts={k: np.array([v.get(n, 0) for n in names], np.int64) for k, v in saved["counts"].items()},
        )  # fmt: skip

    def _check_fingerprint(self, saved: Mapping[str, str], allow: tuple[str, ...]) -> None:
        parts = sorted({*saved, *self.fingerprint})
        differ = {
            p: (saved.get(p, "nothing"), self.fingerprint.get(p, "nothing")) for p in parts if saved.get(p) != self.fingerprint.get(p)
        }
        differ = {p: v for p, v in differ.items() if p not in allow}
        if differ:
            some = ", ".join(repr(p) for p in sorted(differ))
            raise StateMismatch(
                differ, f"if this is meant, pass allow=({some},); the stream then goes on, but is not the one that was saved"
            )


def fingerprint(job: Job, indexes: list[Index], pipelines: list[Pipeline]) -> dict[str, str]:
    """What shapes the stream, part by part, so that a mismatch can be named. ``place`` is left out: state fits any mesh."""
    parts = {
        "sources": digest(*job.names),
        "seed": str(job.seed),
        "batch": digest(json.dumps(asdict(job.batch), sort_keys=True)),
        "mixture": digest(_mixture_text(job)),
        "strategy": job.strategy if isinstance(job.strategy, str) else "function " + digest(_source_of(job.strategy)),
    }
    for name in (
        "until",
        "draw",
        "mix_every",
        "look_ahead",
        "overflow",
        "shuffle_chunks",
        "slice_rows",
        "chunk_bytes",
        "feedback_lag",
        "on_long",
    ):
        parts[name] = str(getattr(job, name))
    for source, index, pipeline in zip(job.sources, indexes, pipelines, strict=True):
        parts[f"source {source.name}: files"] = index.fingerprint
        parts[f"source {source.name}: transforms"] = pipeline.fingerprint
        parts[f"source {source.name}: reading"] = (
            f"epochs {source.epochs}, shuffle {source.shuffle}, max_sample_bytes {source.max_sample_bytes}"
        )
    return parts


def schedule_of(job: Job) -> Callable[[int, Mapping[str, float]], list[float]]:
    """The job's mixture as a function of the step: a list of weights in source order."""
    mixture, names = job.mixture, job.names
    if mixture is None:
        fixed = [float(s.weight) for s in job.sources]
        return lambda step, feedback: fixed
    if isinstance(mixture, Mapping):
        given = [float(mixture.get(n, 0.0)) for n in names]
        return lambda step, feedback: given

    def scheduled(step: int, feedback: Mapping[str, float]) -> list[float]:
        said = mixture(step, feedback)
        try:
            return by_source(said, names)
        except JobError as e:
            raise PlanError("; ".join(e.problems), step, "mend the schedule") from None

    return scheduled


def _mixture_text(job: Job) -> str:
    if job.mixture is None:
        return json.dumps([float(s.weight) for s in job.sources])
    if isinstance(job.mixture, Mapping):
        return json.dumps([float(job.mixture.get(n, 0.0)) for n in job.names])
    return _source_of(job.mixture)


def _source_of(function: Any) -> str:
    """What tells a user's function or object from another, the same in every process: no address may be in it."""
    if isinstance(said := getattr(function, "fingerprint", None), str):
        return said
    if isinstance(function, functools.partial):
        return f"{_source_of(function.func)} of {function.args!r} {sorted(function.keywords.items())!r}"
    if not inspect.isroutine(function) and repr(function) != object.__repr__(function):
        return repr(function)
    what = function if inspect.isroutine(function) else type(function)
    try:
        return inspect.getsource(what)
    except (OSError, TypeError):
        return f"{getattr(what, '__module__', '')}.{getattr(what, '__qualname__', type(what).__qualname__)}"


def _event_out(event: SetMixture | Skip) -> dict[str, Any]:
    if isinstance(event, SetMixture):
        return {"event": "set_mixture", "at": event.at, "weights": dict(event.weights)}
    return {"event": "skip", "steps": list(event.steps)}


def _event_in(saved: Mapping[str, Any]) -> SetMixture | Skip:
    if saved["event"] == "set_mixture":
        return SetMixture(int(saved["at"]), {str(k): float(v) for k, v in saved["weights"].items()})
    return Skip(tuple(int(s) for s in saved["steps"]))


def n_workers(options: Options) -> int:
    return options.workers or max(2, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2))
