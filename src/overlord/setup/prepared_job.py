"""A prepared job: its indexes, pipelines and fingerprint, which are read once.

It creates the planner, and loaders with their readers, at a given state of the stream.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from overlord.checks import is_int
from overlord.constructor.images import PixelForm
from overlord.errors import JobError
from overlord.hashing import digest
from overlord.job.consumption import consumed_by
from overlord.job.hooks import CONSUME
from overlord.job.job import Job, Source
from overlord.job.stages import cut_samples, smallest_context
from overlord.loader.loader import Loader
from overlord.loader.partial_epoch import partial_epoch
from overlord.loader.reader import SourceReader, Stages
from overlord.loader.samples import SourceOrder
from overlord.mesh import ClientPlaceTree
from overlord.messages.control import AddSource, Cursor, LoaderStart, StreamState
from overlord.planning.planner import Planner
from overlord.planning.schedule.base import learns
from overlord.planning.schedule.by_stage import bound_mixtures, job_schedule, mixture_starts
from overlord.planning.spec import NewSource, PlannerSpec, SourceSpec, initial_state
from overlord.planning.strategies import Strategy, resolve
from overlord.sample import Buffer
from overlord.scaling.profile import JobProfile
from overlord.setup.options import Options, n_workers
from overlord.setup.state_json import (
    job_fingerprint,
    saved_limit,
    source_mark,
    state_from_json,
    state_to_json,
)
from overlord.sources.base import ReadOptions
from overlord.sources.chunk_reader import ChunkReader, OpenChunkCache
from overlord.sources.index import (
    Index,
    IndexSpec,
    RemovedSource,
    build_indexes,
    build_resumed_indexes,
    default_cache_dir,
)
from overlord.sources.retry import StorageStats
from overlord.transforms.pipeline import Pipeline
from overlord.transforms.transform_process import TransformWorker

READ_AHEAD = 2  # steps that one process reads ahead
OpenReader = Callable[[SourceOrder, ChunkReader, Stages], SourceReader]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReaderSpec:
    """Everything that is needed to read one source, in this process or in another.

    It is created once, where the job is launched, and sent to workers when they start.
    """

    order: SourceOrder
    index: Index
    read: ReadOptions
    pipeline: Pipeline
    epochs: int | None
    # transforms run in a worker process: they hold the interpreter lock, or the job requests it
    processes: bool
    open_reader: OpenReader = SourceReader

    @property
    def cost_fingerprint(self) -> str:
        """Digest of everything that the costs of the source depend on.

        These are its files and transforms, slice size, context and ``on_long``.
        """
        return digest(
            self.index.fingerprint,
            self.pipeline.fingerprint,
            str(self.read.slice_rows),
            str(self.pipeline.context),
            self.pipeline.on_long,
        )


def open_loader(
    spec: ReaderSpec,
    start: LoaderStart,
    open_chunks: OpenChunkCache,
    shared: TransformWorker | None = None,
) -> tuple[Loader, SourceReader, TransformWorker | None]:
    """Open one loader at a position of its source's stream.

    ``shared`` is a transform process that other loaders of the source use too. Return the loader,
    its reader, and the transform process it uses, if any.
    """
    worker = shared or (TransformWorker(spec.pipeline) if spec.processes else None)
    loader = Loader(
        start.loader,
        spec.order,
        epochs=spec.epochs,
        loader=start.share,
        loaders=start.shares,
        cursor=start.cursor,
        budget_bytes=start.budget_bytes,
        generation=start.generation,
    )
    chunks = ChunkReader(spec.index, options=spec.read, cache=open_chunks)
    return loader, spec.open_reader(spec.order, chunks, worker or spec.pipeline), worker


class PreparedJob:
    """A job with everything that is read once and shared by its planner and loaders."""

    profile: JobProfile | None = None  # measured costs of its sources, if any

    def __init__(
        self,
        job: Job,
        options: Options,
        removed: Mapping[str, RemovedSource] | None = None,
        *,
        reads_datasets: bool = False,
        open_reader: OpenReader = SourceReader,
        strategy_named: Callable[[Any], Strategy] = resolve,
    ):
        """Build or load the index of every source.

        ``removed`` are sources that the state to be resumed no longer reads. ``reads_datasets``:
        the first rows of datasets are checked. A dataset that is sent to another process is not
        read here, since it may open files at its first read. Simulations replace ``open_reader``
        and ``strategy_named`` by functions that remember what was read and placed.
        """
        if problems := options.problems(job):
            raise JobError(problems, "launch")
        self.job, self.options = job, options
        # The job as the user wrote it. In ``job`` the schedule is bound to the sizes of sources.
        self.given: Job
        self.added: tuple[str, ...]  # sources added in mid-run; they are last in the job
        self.strategy, self._open_reader = strategy_named(job.strategy), open_reader
        self.pipelines = [_pipeline(job, source) for source in job.sources]
        self._index_threads = 2 * n_workers(options)
        self.indexes = build_resumed_indexes(
            [
                IndexSpec(s.name, s.uri, s.format, self._read_options(s, p), reads_datasets)
                for s, p in zip(job.sources, self.pipelines, strict=True)
            ],
            removed or {},
            cache_dir=options.cache_dir or default_cache_dir(),
            workers=self._index_threads,
            progress=options.progress,
        )
        self.given, self.added = job, ()
        self.job = job = _bound(job, self.indexes)
        self.images = PixelForm.of(job.sources)
        self.handles = OpenChunkCache(max_open=options.open_files, max_bytes=options.open_bytes)
        self.orders = [_order(job, s, i) for s, i in zip(job.sources, self.indexes, strict=True)]
        self.fingerprint = job_fingerprint(job, self.indexes, self.pipelines)
        self.floor = 0  # the first step that was never planned, if earlier steps are replanned
        self._workers: list[TransformWorker] = []

    def _read_options(self, source: Any, pipeline: Pipeline) -> ReadOptions:
        return ReadOptions(
            self.job.slice_rows,
            self.job.chunk_bytes,
            source.max_sample_bytes,
            pipeline.columns,
            pipeline.refused,
            self.options.lengths_only and pipeline.lengths_suffice,
            pipeline.required,
        )

    def loaders_of(self, i: int) -> int:
        return (self.options.loaders or {}).get(self.job.sources[i].name, 1)

    def _loaders_before(self, i: int) -> int:
        """Return the number of loaders of the first ``i`` sources."""
        if not (given := self.options.loaders):  # one loader each: hundreds of sources ask
            return i
        return sum(given.get(source.name, 1) for source in self.job.sources[:i])

    def source_spec(self, i: int) -> SourceSpec:
        source = self.job.sources[i]
        return SourceSpec(
            name=source.name,
            n_groups=self.orders[i].n_groups,
            epochs=self.orders[i].begun(source.epochs),
            max_bad=source.max_bad,
            loaders=self.loaders_of(i),
            leaves=source.on_lost == "leave",
            files=tuple(f.path for f in self.indexes[i].files),
            row_unit=self.indexes[i].row_unit,
            meta=self.pipelines[i].meta_names,
            documents=self.pipelines[i].document_meta,
            weight=float(source.weight),
            max_tokens=source.max_tokens,
            last_groups=None if (partial := self.orders[i].partial) is None else partial.groups,
        )

    def planner(self, state: StreamState | None = None) -> Planner:
        """Return a planner at a state, or at the start of the stream."""
        job, options, schedule = self.job, self.options, schedule_of(self.job, self.added)
        spec = PlannerSpec(
            sources=tuple(self.source_spec(i) for i in range(len(job.sources))),
            batch=job.batch,
            place=job.place,
            strategy=self.strategy,
            schedule=schedule,
            seed=job.seed,
            until=job.until,
            draw=job.draw,
            mix_every=job.mix_every,
            feedback_lag=job.feedback_lag,
            takes_feedback=learns(schedule),
            look_ahead=job.look_ahead,
            max_age=job.max_age,
            prefer=getattr(schedule, "prefer", None),
            consume=self._consume(),
            overflow="defer" if job.batch.defers else job.overflow,
            prefetch=options.prefetch,
            read_ahead=options.read_ahead or READ_AHEAD,
            images=self.images is not None,
            sync=job.sync,
            model=job.model,
            batches=job.batches if job.stages else None,
            end=job.end_step,
            mixture_starts=mixture_starts(job),
            cut_samples=cut_samples(job),
        )
        return Planner(spec, state or initial_state(spec), floor=self.floor)

    def _consume(self) -> Callable[[Buffer], np.ndarray] | None:
        """Return the choice of the hook ``loader_do_plan(consume=)``; None without one."""
        hooks, seed = self.job.hooks_of(CONSUME), self.job.seed
        return (lambda candidates: consumed_by(hooks[0], candidates, seed)) if hooks else None

    def with_floor(self, floor: int) -> PreparedJob:
        """Return a copy of this job for a planner that replans the steps below ``floor``.

        New events do not change those steps.
        """
        other = copy.copy(self)
        other.floor = floor
        return other

    def with_loaders(self, loaders: Sequence[int], read_ahead: int) -> PreparedJob:
        """Return a copy of this job with these numbers of loaders, in the order of its sources.

        ``read_ahead`` applies where the launch options do not set it.
        """
        other = copy.copy(self)
        by_name = dict(zip(self.job.names, loaders, strict=True))
        other.options = replace(
            self.options, loaders=by_name, read_ahead=self.options.read_ahead or read_ahead
        )
        return other

    def placed(self, place: ClientPlaceTree) -> PreparedJob:
        """Return a copy of this job for another mesh; raise ``JobError`` for an unfit mesh.

        The longest sample stays the same, although its default may depend on the mesh.
        """
        other = copy.copy(self)
        limit = self.job.document_limit if self.job.hybrid else self.job.max_document
        other.given = replace(self.given, place=place, max_document=limit)
        other.job = replace(self.job, place=place, max_document=limit)
        if problems := other.options.problems(other.job):
            raise JobError(problems, "reshard")
        return other

    def loaders_for(self, i: int, cursor: Cursor) -> list[tuple[Loader, SourceReader]]:
        """Open the loaders of one source, each with its reader."""
        spec, made = self.reader_spec(i), []
        for start in self.loader_starts(i, cursor):
            loader, reader, worker = open_loader(spec, start, self.handles)
            self._workers += [worker] if worker is not None else []
            made.append((loader, reader))
        return made

    def loader_starts(self, i: int, cursor: Cursor) -> list[LoaderStart]:
        """Return the start messages of one source's loaders.

        Loaders are numbered source by source.
        """
        n, first = self.loaders_of(i), self._loaders_before(i)
        return [LoaderStart(first + k, i, k, n, cursor, self.budget_bytes) for k in range(n)]

    def reader_spec(self, i: int) -> ReaderSpec:
        """Return the reader spec of a source."""
        source = self.job.sources[i]
        return ReaderSpec(
            order=self.orders[i],
            index=self.indexes[i],
            read=self._read_options(source, self.pipelines[i]),
            pipeline=self.pipelines[i],
            epochs=self.orders[i].begun(source.epochs),
            processes=self.processes_of(i),
            open_reader=self._open_reader,
        )

    def processes_of(self, i: int) -> bool:
        """Return whether a source's transforms run in a transform process."""
        return self.pipelines[i].holds_lock or self.job.sources[i].workers != "threads"

    def zero_metrics(self) -> dict[str, dict[str, Any]]:
        """Return the storage and image metrics of every source by name, all at zero."""
        found: dict[str, dict[str, Any]] = {}
        for name, index, pipeline in zip(self.job.names, self.indexes, self.pipelines, strict=True):
            mine, stats = found.setdefault(name, {}), StorageStats(name)
            if index.access.remote:
                mine["store"] = stats.metrics()
            if index.access.fs is not None:
                mine["storage"] = stats.problem_metrics()
            if any(t.kind == "images" for t in pipeline.transforms):
                mine["images"] = {"bytes_in": 0, "bytes_out": 0}
        return found

    @property
    def budget_bytes(self) -> int:
        """The number of bytes of ready samples that one loader may hold."""
        return max(1, self.options.buffer_bytes // self._loaders_before(len(self.job.sources)))

    # added sources

    def with_source(self, source: Any, loaders: int = 1) -> PreparedJob:
        """Return a copy of this job with one more source, which is indexed here.

        An invalid source raises ``JobError``, as at launch, and changes nothing.
        """
        if not isinstance(source, Source):
            raise JobError([f"expected a Source, got {source!r:.80}"], "add_source")
        more = copy.copy(self)
        more.given = replace(self.given, sources=(*self.given.sources, source))
        more.job = job = replace(self.job, sources=more.given.sources)
        more.options = replace(
            self.options, loaders={**(self.options.loaders or {}), source.name: loaders}
        )
        if not is_int(loaders) or loaders < 1:
            problem = (
                f"loaders: expected a whole number of at least 1 for {source.name!r}, got "
                f"{loaders!r}"
            )
            raise JobError([problem], "add_source")
        if self.images is None and any(t.kind == "images" for t in source.transforms):
            problem = (
                f"source {source.name!r}: expected a source without images, since the job started "
                "without, got one with images; list one from the start, at weight 0"
            )
            raise JobError([problem], "add_source")
        pipeline = _pipeline(job, source)
        [index] = build_indexes(
            [
                IndexSpec(
                    source.name, source.uri, source.format, self._read_options(source, pipeline)
                )
            ],
            cache_dir=self.options.cache_dir or default_cache_dir(),
            workers=self._index_threads,
            progress=self.options.progress,
        )
        more.pipelines, more.indexes = [*self.pipelines, pipeline], [*self.indexes, index]
        more.orders = [*self.orders, _order(job, source, index)]
        more.added = (*self.added, source.name)
        more.fingerprint = job_fingerprint(job, more.indexes, more.pipelines, more.added)
        return more

    def new_source(self, at: int) -> NewSource:
        """Return the event and spec that add the last source at step ``at``."""
        name = self.job.names[-1]
        return NewSource(
            event=AddSource(at, name, source_mark(self.fingerprint, name)),
            source=self.source_spec(-1),
        )

    def for_saved_state(self, saved: Any) -> PreparedJob:
        """Return this job with the schedule and the longest sample of the time of a saved state.

        That schedule does not include sources added later.
        """
        if (limit := saved_limit(saved, self.job)) != self.job.document_limit:
            return self._with_limit(limit).for_saved_state(saved)
        try:
            added_then = {str(e["name"]) for e in saved["events"] if e["event"] == "add_source"}
        except (KeyError, TypeError):  # not a state: ``restore`` raises the error
            return self
        added = tuple(name for name in self.job.names if name in added_then)
        if added == self.added:
            return self
        other = copy.copy(self)
        other.added, other.job = added, _bound(self.given, self.indexes, added)
        other.fingerprint = job_fingerprint(other.job, self.indexes, self.pipelines, added)
        return other

    def _with_limit(self, limit: int) -> PreparedJob:
        """Return this job with another longest sample; raise ``JobError`` if it does not fit."""
        other = copy.copy(self)
        other.given = replace(self.given, max_document=limit)
        other.job = replace(self.job, max_document=limit)
        other.pipelines = [_pipeline(other.job, source) for source in other.job.sources]
        other.fingerprint = job_fingerprint(other.job, other.indexes, other.pipelines, other.added)
        return other

    @property
    def workers(self) -> int:
        """The number of transform processes that were started for this job."""
        return len(self._workers)

    def close_workers(self, keep: int = 0) -> None:
        """Stop all transform processes except the first ``keep``."""
        while len(self._workers) > keep:
            self._workers.pop().close()

    def close(self) -> None:
        self.close_workers()
        self.handles.close()

    # state as plain JSON

    def export(self, state: StreamState) -> dict[str, Any]:
        """Return a state of this job as plain JSON values."""
        stage = self.job.batches.stage(state.step)
        return state_to_json(state, self.job.name, self.job.names, self.fingerprint, stage)

    def restore(self, saved: Mapping[str, Any], allow: tuple[str, ...] = ()) -> StreamState:
        """Return the state of a JSON form; raise ``StateMismatch`` if it is not of this job."""
        return state_from_json(saved, self.job, self.orders, self.fingerprint, allow)


def _pipeline(job: Job, source: Source) -> Pipeline:
    return Pipeline(
        source.name,
        source.transforms,
        seed=job.seed,
        context=job.document_limit,
        on_long=job.on_long,
        room=smallest_context(job) if job.stages else job.batch.context,
        cuts=job.batch.in_chunks or (bool(job.stages) and cut_samples(job) is not None),
    )


def _order(job: Job, source: Source, index: Index) -> SourceOrder:
    order = SourceOrder(
        name=source.name,
        n_chunks=len(index.chunks),
        seed=job.seed,
        shuffle=source.shuffle,
        shuffle_chunks=job.shuffle_chunks,
        rows_known=index.rows is not None,
    )
    if source.epochs is None:
        return order
    partial = partial_epoch(order, index.chunks, source.epochs, job.slice_rows)
    if partial is None and source.epochs < 1:
        problem = (
            f"source {source.name!r}.epochs: expected a part with at least one row, got "
            f"{source.epochs}; raise it"
        )
        raise JobError([problem], "launch")
    return replace(order, partial=partial)


def _bound(job: Job, indexes: list[Index], added: tuple[str, ...] = ()) -> Job:
    """Return the job with its schedule bound to the weights and sizes of the initial sources."""
    sources = [(s, i) for s, i in zip(job.sources, indexes, strict=True) if s.name not in added]
    changes = bound_mixtures(
        job, {s.name: float(s.weight) for s, _ in sources}, {s.name: i.rows for s, i in sources}
    )
    return replace(job, **changes) if changes else job


def schedule_of(job: Job, added: tuple[str, ...] = ()) -> Any:
    """Return the job's mixture for one planner: fixed weights by name, or a schedule."""
    return copied_schedule(job_schedule(job, added))


def copied_schedule(schedule: Any) -> Any:
    """Return a copy of a mixture for one planner: a schedule has a state, which it changes.

    Raise ``JobError`` if it cannot be copied.
    """
    try:
        return copy.deepcopy(schedule)
    except Exception as e:
        problem = (
            f"mixture: expected a schedule that copy.deepcopy can copy, got {type(e).__name__}: {e}"
            "; define __deepcopy__"
        )
        raise JobError([problem], "launch") from e
