"""From a Job to cores: indexes, pipelines, fingerprints, and one set of cores for a given state."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from overlord.batch import NOT_THE_STREAM
from overlord.constructor.images import PixelForm
from overlord.errors import MOST, JobError, StateMismatch
from overlord.hashing import digest
from overlord.job.hooks import Hook
from overlord.job.job import Job, Source
from overlord.loader.loader import Loader
from overlord.loader.order import SourceOrder
from overlord.loader.reader import SourceReader
from overlord.mesh import ClientPlaceTree
from overlord.messages.control import AddSource, Cursor, LoaderStart, StreamState
from overlord.planning.planner import Planner
from overlord.planning.raw_plan import RawPlan
from overlord.planning.schedule import bind
from overlord.planning.schedule.base import has_state, learns
from overlord.planning.spec import NewSource, PlannerSpec, SourceSpec, initial_state
from overlord.planning.state_json import (
    event_in,
    event_out,
    fingerprint_in,
    fingerprint_out,
    no_state,
    reports_in,
    reports_out,
)
from overlord.planning.strategies import resolve
from overlord.scaling.profile import JobProfile
from overlord.setup.options import Options, n_workers
from overlord.sources.base import ReadOptions
from overlord.sources.chunk_reader import ChunkReader, OpenChunkCache
from overlord.sources.index import (
    Index,
    RemovedSource,
    build_indexes,
    build_some,
    default_cache_dir,
)
from overlord.sources.index import IndexSpec as IndexSpec
from overlord.sources.retry import StorageStats
from overlord.transforms.pipeline import Pipeline
from overlord.transforms.transform_process import TransformWorker
from overlord.user_code import told

STATE_VERSION = 1
OTHER_STATE = "resume it with the version of Overlord that saved it"
SAVE_ONE = "give what state_dict() returned, or a file that `overlord run --save` wrote"
READ_AHEAD = 2  # steps, where everything is in one process


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReaderSpec:
    """What reads a source. Made once, where the job is launched; it goes to other processes when
    they are started.
    """

    order: SourceOrder
    index: Index
    read: ReadOptions
    pipeline: Pipeline
    epochs: int | None
    processes: bool  # its transforms hold the interpreter's lock, or are asked to run apart


def open_loader(
    kit: ReaderSpec,
    opening: LoaderStart,
    handles: OpenChunkCache,
    shared: TransformWorker | None = None,
) -> tuple[Loader, SourceReader, TransformWorker | None]:
    """One logical loader at a place of its source's stream. ``shared``: a worker process that
    others of the source have too.
    """
    o, worker = opening, shared or (TransformWorker(kit.pipeline) if kit.processes else None)
    loader = Loader(
        o.loader,
        kit.order,
        epochs=kit.epochs,
        loader=o.share,
        loaders=o.shares,
        cursor=o.cursor,
        budget_bytes=o.budget_bytes,
        generation=o.generation,
    )
    return (
        loader,
        SourceReader(
            kit.order,
            ChunkReader(kit.index, options=kit.read, cache=handles),
            worker or kit.pipeline,
        ),
        worker,
    )


class PreparedJob:
    """A job made ready: everything that is read once and shared by all cores made from it."""

    profile: JobProfile | None = None  # what its sources cost, as far as that is known

    def __init__(self, job: Job, options: Options, left: Mapping[str, RemovedSource] | None = None):
        """``left``: sources that the state to be resumed does not read any more."""
        if problems := options.problems(job):
            raise JobError(problems, "launch")
        self.job, self.options = job, options
        self.given: (
            Job  # as it was written; ``job`` has its schedule told what only the sources know
        )
        self.added: tuple[str, ...]  # sources that joined in mid-run, the last ones
        self.strategy = resolve(job.strategy)
        self.pipelines = [
            Pipeline(
                s.name, s.transforms, seed=job.seed, context=job.batch.context, on_long=job.on_long
            )
            for s in job.sources
        ]
        self.indexes = build_some(
            [
                IndexSpec(s.name, s.uri, s.format, self._read_options(s, p))
                for s, p in zip(job.sources, self.pipelines, strict=True)
            ],
            left or {},
            cache_dir=options.cache_dir or default_cache_dir(),
            workers=2 * n_workers(options),
            progress=options.progress,
        )
        self.given, self.added = job, ()
        self.job = job = _bound(job, self.indexes)
        self.handles = OpenChunkCache(max_open=options.open_files, max_bytes=options.open_bytes)
        self.orders = [_order(job, s, i) for s, i in zip(job.sources, self.indexes, strict=True)]
        self.fingerprint = fingerprint(job, self.indexes, self.pipelines)
        self.floor = (
            0  # the first step that was never planned, where steps of before are planned again
        )
        self._workers: list[TransformWorker] = []

    def _read_options(self, source: Any, pipeline: Pipeline) -> ReadOptions:
        return ReadOptions(
            self.job.slice_rows,
            self.job.chunk_bytes,
            source.max_sample_bytes,
            pipeline.columns,
            pipeline.refused,
        )

    @property
    def images(self) -> PixelForm | None:
        return PixelForm.of(self.job.sources)

    def loaders_of(self, i: int) -> int:
        return (self.options.loaders or {}).get(self.job.sources[i].name, 1)

    def _source_spec(self, i: int) -> SourceSpec:
        source = self.job.sources[i]
        return SourceSpec(
            name=source.name,
            n_groups=self.orders[i].n_groups,
            epochs=source.epochs,
            max_bad=source.max_bad,
            loaders=self.loaders_of(i),
            leaves=source.on_lost == "leave",
            files=tuple(f.path for f in self.indexes[i].files),
            meta=self.pipelines[i].meta_names,
            weight=float(source.weight),
        )

    def planner(self, state: StreamState | None = None) -> Planner:
        """The planner core at a state."""
        job, options, schedule = self.job, self.options, schedule_of(self.job, self.added)
        spec = PlannerSpec(
            sources=tuple(self._source_spec(i) for i in range(len(job.sources))),
            batch=job.batch,
            place=job.place,
            strategy=self.strategy,
            schedule=schedule,
            seed=job.seed,
            until=job.until,
            draw=job.draw,
            mix_every=job.mix_every,
            feedback_lag=job.feedback_lag,
            takes_feedback=learns(job.mixture),
            look_ahead=job.look_ahead,
            max_age=job.max_age,
            prefer=getattr(schedule, "prefer", None),
            overflow=job.overflow,
            prefetch=options.prefetch,
            read_ahead=options.read_ahead or READ_AHEAD,
            images=self.images is not None,
            sync=job.sync,
        )
        return Planner(spec, state or initial_state(spec), floor=self.floor)

    def floored(self, floor: int) -> PreparedJob:
        """This blueprint for a planner that plans steps below the floor again: nothing that is said
        now changes them.
        """
        other = copy.copy(self)
        other.floor = floor
        return other

    def with_loaders(self, loaders: Sequence[int], read_ahead: int) -> PreparedJob:
        """This blueprint with so many loaders for each source, that read so many steps ahead where
        nobody said how many.
        """
        other = copy.copy(self)
        by_name = dict(zip(self.job.names, loaders, strict=True))
        other.options = replace(
            self.options, loaders=by_name, read_ahead=self.options.read_ahead or read_ahead
        )
        return other

    def placed(self, place: ClientPlaceTree) -> PreparedJob:
        """This blueprint for another mesh; what is wrong with it is told as at launch."""
        other = copy.copy(self)
        other.given, other.job = replace(self.given, place=place), replace(self.job, place=place)
        if problems := other.options.problems(other.job):
            raise JobError(problems, "reshard")
        return other

    def loaders_for(self, i: int, cursor: Cursor) -> list[tuple[Loader, SourceReader]]:
        """The loaders of one source, and what reads for them."""
        kit, made = self.kit(i), []
        for opening in self.openings(i, cursor):
            loader, reader, worker = open_loader(kit, opening, self.handles)
            self._workers += [worker] if worker is not None else []
            made.append((loader, reader))
        return made

    def openings(self, i: int, cursor: Cursor) -> list[LoaderStart]:
        """The loaders of one source as they begin. Loaders are numbered source by source."""
        n, first = self.loaders_of(i), sum(map(self.loaders_of, range(i)))
        return [LoaderStart(first + k, i, k, n, cursor, self.budget_bytes) for k in range(n)]

    def kit(self, i: int) -> ReaderSpec:
        """All that it takes to read a source, here or in another process."""
        source = self.job.sources[i]
        return ReaderSpec(
            order=self.orders[i],
            index=self.indexes[i],
            read=self._read_options(source, self.pipelines[i]),
            pipeline=self.pipelines[i],
            epochs=source.epochs,
            processes=self.processes_of(i),
        )

    def processes_of(self, i: int) -> bool:
        """Return whether a source's transforms run in worker processes."""
        return self.pipelines[i].holds_lock or self.job.sources[i].workers != "threads"

    def at_nothing(self) -> dict[str, dict[str, Any]]:
        """What of storage and images readers of a source count, by its name, where none has counted
        anything yet.
        """
        found: dict[str, dict[str, Any]] = {}
        for name, index, pipeline in zip(self.job.names, self.indexes, self.pipelines, strict=True):
            mine, tally = found.setdefault(name, {}), StorageStats(name)
            if index.access.remote:
                mine["store"] = tally.metrics()
            if index.access.fs is not None:
                mine["storage"] = tally.trouble()
            if any(t.kind == "images" for t in pipeline.transforms):
                mine["images"] = {"bytes_in": 0, "bytes_out": 0}
        return found

    @property
    def budget_bytes(self) -> int:
        """What one loader may hold ready."""
        return max(
            1, self.options.buffer_bytes // sum(map(self.loaders_of, range(len(self.job.sources))))
        )

    # sources that join

    def with_source(self, source: Any, loaders: int = 1) -> PreparedJob:
        """This blueprint and one source more, indexed; what is wrong with it is raised as at
        launch, and nothing has changed.
        """
        if not isinstance(source, Source):
            raise JobError([f"expected a Source, got {source!r}"], "add_source")
        more = copy.copy(self)
        more.given = replace(self.given, sources=(*self.given.sources, source))
        more.job = job = replace(self.job, sources=more.given.sources)
        more.options = replace(
            self.options, loaders={**(self.options.loaders or {}), source.name: loaders}
        )
        if problems := more.options.problems(job):
            raise JobError(problems, "add_source")
        if self.images is None and more.images is not None:
            problem = (
                f"source {source.name!r} has images, and the job began without: list a source "
                "with images from the start, at weight 0"
            )
            raise JobError([problem], "add_source")
        pipeline = Pipeline(
            source.name,
            source.transforms,
            seed=job.seed,
            context=job.batch.context,
            on_long=job.on_long,
        )
        [index] = build_indexes(
            [
                IndexSpec(
                    source.name, source.uri, source.format, self._read_options(source, pipeline)
                )
            ],
            cache_dir=self.options.cache_dir or default_cache_dir(),
            workers=2 * n_workers(self.options),
            progress=self.options.progress,
        )
        more.pipelines, more.indexes = [*self.pipelines, pipeline], [*self.indexes, index]
        more.orders = [*self.orders, _order(job, source, index)]
        more.added = (*self.added, source.name)
        more.fingerprint = fingerprint(job, more.indexes, more.pipelines, more.added)
        return more

    def new_source(self, at: int) -> NewSource:
        """The last source as it joins."""
        name = self.job.names[-1]
        return NewSource(
            event=AddSource(at, name, source_mark(self.fingerprint, name)),
            source=self._source_spec(-1),
        )

    def fitting(self, saved: Any) -> PreparedJob:
        """This blueprint with a schedule that knows the sources it knew when the state was saved:
        not those that joined later.
        """
        try:
            joined_then = {str(e["name"]) for e in saved["events"] if e["event"] == "add_source"}
        except (KeyError, TypeError):  # no state at all: to be said by ``restore``
            return self
        added = tuple(name for name in self.job.names if name in joined_then)
        if added == self.added:
            return self
        other = copy.copy(self)
        other.added, other.job = added, _bound(self.given, self.indexes, added)
        other.fingerprint = fingerprint(other.job, self.indexes, self.pipelines, added)
        return other

    @property
    def workers(self) -> int:
        return len(self._workers)

    def close_workers(self, keep: int = 0) -> None:
        """End worker processes, but for the first ``keep``."""
        while len(self._workers) > keep:
            self._workers.pop().close()

    def close(self) -> None:
        self.close_workers()
        self.handles.close()

    # state as plain JSON

    def export(self, state: StreamState) -> dict[str, Any]:
        return exported(state, self.job.name, self.job.names, self.fingerprint)

    def restore(self, saved: Mapping[str, Any], allow: tuple[str, ...] = ()) -> StreamState:
        """A state from its JSON form, after checking that it belongs to this job."""
        if problem := no_state(saved):
            wrapped = isinstance(saved, Mapping) and "stream" in saved
            remedy = (
                "it is one of a Dataset or StatefulLoader: load it there, or json.loads "
                "its 'stream'"
                if wrapped
                else SAVE_ONE
            )
            raise StateMismatch({}, remedy, problem)
        if saved["version"] != STATE_VERSION:
            raise StateMismatch(
                {"version": (str(saved["version"]), str(STATE_VERSION))},
                OTHER_STATE,
                "the state has another form",
            )
        try:
            self._check_fingerprint(saved, allow)
            state = self._state_of(saved)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as e:
            damage = {"form": ("damaged", f"{type(e).__name__}: {e}")}
            raise StateMismatch(
                damage, "save and load what state_dict() gave, unchanged", "the state is damaged"
            ) from e
        if self.job.batch.tokens is not None and any(map(len, state.ahead)):
            remedy = (
                "go on with a batch in samples and look_ahead=1 until a state has no "
                "'ahead', and change the batch there"
            )
            raise StateMismatch(
                {
                    "ahead": (
                        "samples that were passed over",
                        "a batch in tokens, which takes none but the first",
                    )
                },
                remedy,
            )
        if state.schedule is not None:
            try:  # on a copy: nothing is to be changed by a state that does not fit
                copy.deepcopy(self.job.mixture).load_state_dict(copy.deepcopy(state.schedule))
            except Exception as e:
                if {"mixture", "schedule"} & set(
                    allow
                ):  # another mixture is meant, and begins to learn
                    return replace(state, schedule=None)
                raise StateMismatch(
                    {"schedule": ("what it had learned", told(e))},
                    "pass allow=('schedule',) to let it begin anew",
                ) from e
        return state

    def _state_of(self, saved: Mapping[str, Any]) -> StreamState:
        names = self.job.names
        cursors = [Cursor(*map(int, saved["cursors"].get(n, Cursor()))) for n in names]
        if any(len(c) != len(Cursor()) for c in saved["cursors"].values()):
            raise ValueError("a cursor is six numbers")
        # Where fewer files are left than the cursor has passed (``allow``), its epoch is over.
        cursors = [
            c if c.group < o.n_groups else Cursor(c.epoch + 1)
            for c, o in zip(cursors, self.orders, strict=True)
        ]
        return StreamState(
            step=int(saved["step"]),
            cursors=np.array(cursors, np.int64),
            owed=tuple(int(saved["owed"].get(n, 0)) for n in names),
            active=tuple(bool(saved["active"].get(n, True)) for n in names),
            events=tuple(
                e
                for e in map(event_in, saved["events"])
                if not isinstance(e, AddSource) or e.name in names
            ),
            mix_step=int(saved["mix"][0]),
            mix_epoch=int(saved["mix"][1]),
            ahead=tuple(np.array(saved["ahead"].get(n, ()), np.int32) for n in names)
            if saved.get("ahead")
            else (),
            counts={
                k: np.array([v.get(n, 0) for n in names], np.int64)
                for k, v in saved["counts"].items()
            },
            weights=tuple(float(saved["weights"].get(n, 0.0)) for n in names)
            if "weights" in saved
            else (),
            schedule=dict(saved["schedule"])
            if "schedule" in saved and has_state(self.job.mixture)
            else None,
            reports=reports_in(saved.get("reports", {})),
        )

    def _check_fingerprint(self, saved: Mapping[str, Any], allow: tuple[str, ...]) -> None:
        then, now = fingerprint_in(saved["fingerprint"], list(saved["cursors"])), self.fingerprint
        differ = {
            p: (then.get(p, "nothing"), now.get(p, "nothing"))
            for p in sorted({*then, *now})
            if then.get(p) != now.get(p)
        }
        absent = []
        for event in map(event_in, saved["events"]):
            if not isinstance(event, AddSource):
                continue
            if event.name not in self.job.names:
                absent.append(event.name)
                differ[f"source {event.name}: added"] = (
                    f"at step {event.at}",
                    "not among the job's sources",
                )
            elif not any(
                p.startswith(f"source {event.name}: ") for p in differ
            ) and event.fingerprint != source_mark(now, event.name):
                differ[f"source {event.name}: added"] = (
                    event.fingerprint,
                    source_mark(now, event.name),
                )
        differ = {p: v for p, v in differ.items() if p not in allow}
        if not differ:
            return
        if "batch" in differ:
            differ["batch"] = batch_in_words(*differ["batch"], self.job)
        parts = (
            f"({', '.join(repr(p) for p in sorted(differ))},)"
            if len(differ) <= MOST
            else "tuple(error.differences)"
        )
        remedy = f"pass allow={parts}; the stream then goes on, but is not the one that was saved"
        problem = "the state belongs to another job"
        if saved["job"] != self.job.name:
            problem += f", {saved['job']!r}; this is {self.job.name!r}"
        if absent:
            known = (
                f"a state holds no code: list what was added in mid-run ({', '.join(absent)}) "
                "last in Job.sources"
            )
            raise StateMismatch(differ, f"{known}; or, to go on without, {remedy}", problem)
        raise StateMismatch(differ, f"if this is meant, {remedy}", problem)


def batch_in_words(saved: str, found: str, job: Job) -> tuple[str, str]:
    """Of the batch that was saved a digest is all there is, which tells nobody what to mend: that
    of now is written out beside it.
    """
    fields = {k: v for k, v in asdict(job.batch).items() if k not in NOT_THE_STREAM}
    here = ", ".join(f"{k}={v!r}" for k, v in fields.items())
    return f"{saved}, a digest of {', '.join(fields)}", f"{found}, which is {here}"


def exported(
    state: StreamState, job: str, names: Sequence[str], fingerprint: Mapping[str, str]
) -> dict[str, Any]:
    """A state as plain JSON values, by the names of its sources."""
    return {
        "version": STATE_VERSION,
        "job": job,
        "fingerprint": fingerprint_out(fingerprint, names),
        "step": state.step,
        "cursors": dict(zip(names, state.cursors.tolist(), strict=True)),
        "owed": dict(zip(names, state.owed, strict=True)),
        "active": dict(zip(names, state.active, strict=True)),
        "events": [event_out(e) for e in state.events],
        "mix": [state.mix_step, state.mix_epoch],
        **(
            {"ahead": ahead}
            if (
                ahead := {n: a.tolist() for n, a in zip(names, state.ahead, strict=False) if len(a)}
            )
            else {}
        ),
        "counts": {
            k: {name: n for name, n in zip(names, v.tolist(), strict=True) if n}
            for k, v in state.counts.items()
        },
        **({"weights": dict(zip(names, state.weights, strict=True))} if state.weights else {}),
        **({"schedule": dict(state.schedule)} if state.schedule else {}),
        **({"reports": reports_out(state.reports)} if state.reports else {}),
    }


def fingerprint(
    job: Job, indexes: list[Index], pipelines: list[Pipeline], added: tuple[str, ...] = ()
) -> dict[str, str]:
    """What shapes the stream, part by part, so that a mismatch can be named. ``place`` and ``sync``
    are left out: a state fits any mesh and any trainer, which changes the slots of a step and not
    its samples.

    The weight of a source that was ``added`` counts beside any mixture, so it is a part of its own.
    """
    parts = {
        "sources": digest(*job.names),
        "seed": str(job.seed),
        "batch": digest(
            json.dumps(
                {k: v for k, v in asdict(job.batch).items() if k not in NOT_THE_STREAM},
                sort_keys=True,
            )
        ),
        "mixture": digest(_mixture_text(job)),
        "strategy": job.strategy
        if isinstance(job.strategy, str)
        else "function " + digest(_source_of(job.strategy)),
    }
    for name in (
        "until",
        "draw",
        "mix_every",
        "look_ahead",
        "max_age",
        "overflow",
        "shuffle_chunks",
        "slice_rows",
        "chunk_bytes",
        "feedback_lag",
        "on_long",
    ):
        parts[name] = str(getattr(job, name))
    if job.hooks:
        parts["hooks"] = digest(*(_source_of(hook) for hook in job.hooks))
    for source, index, pipeline in zip(job.sources, indexes, pipelines, strict=True):
        parts[f"source {source.name}: files"] = index.fingerprint
        parts[f"source {source.name}: transforms"] = pipeline.fingerprint
        parts[f"source {source.name}: reading"] = (
            f"epochs {source.epochs}, shuffle {source.shuffle}, max_sample_bytes "
            f"{source.max_sample_bytes}"
            + (f", on_lost {source.on_lost}" if source.on_lost != "fail" else "")
        )
        if source.name in added:
            parts[f"source {source.name}: weight"] = repr(float(source.weight))
    return parts


def source_mark(parts: Mapping[str, str], name: str) -> str:
    """One digest of a source's parts of a fingerprint."""
    return digest(
        *(f"{part}={parts[part]}" for part in sorted(parts) if part.startswith(f"source {name}: "))
    )


def _order(job: Job, source: Source, index: Index) -> SourceOrder:
    return SourceOrder(
        name=source.name,
        n_chunks=len(index.chunks),
        seed=job.seed,
        shuffle=source.shuffle,
        shuffle_chunks=job.shuffle_chunks,
    )


def _bound(job: Job, indexes: list[Index], added: tuple[str, ...] = ()) -> Job:
    """The job with its schedule told what only the job and its files know: weights and sizes of the
    sources it began with.
    """
    sources = [(s, i) for s, i in zip(job.sources, indexes, strict=True) if s.name not in added]
    mixture = bind(
        job.mixture,
        {s.name: float(s.weight) for s, _ in sources},
        {s.name: i.rows for s, i in sources},
    )
    return job if mixture is job.mixture else replace(job, mixture=mixture)


def schedule_of(job: Job, added: tuple[str, ...] = ()) -> Any:
    """The job's mixture for one planner: fixed weights by name, or a schedule that is its own,
    since schedules learn.
    """
    if job.mixture is None:
        return {s.name: float(s.weight) for s in job.sources if s.name not in added}
    if isinstance(job.mixture, Mapping):
        return {name: float(weight) for name, weight in job.mixture.items()}
    try:
        return copy.deepcopy(job.mixture)
    except Exception as e:
        raise JobError(
            [
                "mixture: a schedule is copied for every run of the job, and this one "
                f"cannot be: {e}"
            ],
            "launch",
        ) from e


def _mixture_text(job: Job) -> str:
    if job.mixture is None:
        return json.dumps([float(s.weight) for s in job.sources])
    if isinstance(job.mixture, Mapping):
        return json.dumps([float(job.mixture.get(n, 0.0)) for n in job.names])
    return _source_of(job.mixture)


def _source_of(function: Any) -> str:
    """What tells a user's function or object from another, the same in every process: no address
    may be in it.
    """
    if isinstance(said := getattr(function, "fingerprint", None), str):
        return said
    if isinstance(function, functools.partial):
        return (
            f"{_source_of(function.func)} of {function.args!r} "
            f"{sorted(function.keywords.items())!r}"
        )
    if isinstance(function, (Hook, RawPlan)):
        return (
            f"{[getattr(function, f.name) for f in fields(function) if f.name != 'fn']} "
            f"{_source_of(function.fn)}"
        )
    if not inspect.isroutine(function) and repr(function) != object.__repr__(function):
        return repr(function)
    what = function if inspect.isroutine(function) else type(function)
    try:
        return inspect.getsource(what)
    except (OSError, TypeError):
        return f"{getattr(what, '__module__', '')}.{getattr(what, '__qualname__', type(what).__qualname__)}"
