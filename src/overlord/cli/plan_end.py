"""Predict when each source of a job ends, for ``overlord plan --until-end``.

Where the index has the length of every document, or with ``exact``, the job is planned to its end.
Else the draw is repeated with estimated sizes of the sources: their rows by the index, and the mean
lengths of a sample of documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.text import Text

from overlord.cli.job_position import JobPosition, RecordedSteps
from overlord.cli.plan_step import Note, no_note, planning_session
from overlord.cli.run_job import never_ends
from overlord.errors import JobError
from overlord.messages.control import StreamState
from overlord.observe.source_inspection import inspect_job
from overlord.observe.source_report import SourceReport
from overlord.observe.tables import grid
from overlord.planning.forecast import Forecast, SourceEnd, SourceSize, forecast
from overlord.session.pass_length import lengths_indexed, plan_all
from overlord.setup.options import Options
from overlord.setup.prepared_job import PreparedJob
from overlord.sources.base import ReadOptions
from overlord.sources.chunk_reader import ChunkReader, OpenChunkCache

if TYPE_CHECKING:
    from rich.console import RenderableType

    from overlord.job.job import Job, Source
    from overlord.messages.control import PlannedStep
    from overlord.sources.index import Index

ROWS = 20_000  # rows of a source that are counted, if the index does not have their number
FAR = 2**62  # a step after every step of a journal

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """When each source of a job ends, and when the job does.

    ``exact``: from the length of every document; else an estimate. ``basis``: what the samples and
    tokens of each source follow from, by name.
    """

    job: str
    exact: bool
    first: int  # the step at which the prediction begins
    forecast: Forecast
    basis: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        found = asdict(self.forecast)
        sources = [{**source, "basis": self.basis[source["name"]]} for source in found["sources"]]
        return {
            "job": self.job,
            "exact": self.exact,
            "first": self.first,
            **found,
            "sources": sources,
        }


def predict_end(
    job: Job, *, exact: bool = False, progress: Progress = lambda step: None, note: Note = no_note
) -> Prediction:
    """Return when each source of a job ends, and when the job does.

    With a journal the prediction begins at its last state. ``exact``: read every document whose
    length the index does not have. ``progress`` receives the number of predicted steps. Raise
    ``JobError`` for a job that never ends.
    """
    if never_ends(job):
        raise JobError(
            ["the job never ends; set epochs or max_tokens of its sources, or until"],
            "plan --until-end",
        )
    # the newest state: every step of a journal is before this one
    begin = replace(RecordedSteps.of(job).position_before(FAR), note="")
    prepared = PreparedJob(replace(job, journal=None), Options())
    try:
        sources = zip(job.sources, prepared.indexes, strict=True)
        if exact or all(lengths_indexed(source, index) for source, index in sources):
            return _planned(job, begin, progress, note)
        return _estimated(prepared, begin, progress)
    finally:
        prepared.close()


# ----------------------------------------------------------------------------
# Exact: plan every step.


def _planned(job: Job, begin: JobPosition, progress: Progress, note: Note) -> Prediction:
    last: dict[int, int] = {}
    latest: list[StreamState] = []

    def count(stage: PlannedStep) -> None:
        assert isinstance(stage.after, StreamState)
        last.update(dict.fromkeys(np.unique(stage.plan.source).tolist(), stage.plan.step))
        latest[:] = [stage.after]
        progress(stage.plan.step + 1)

    with planning_session(job, begin, note) as (session, first):
        session.internals.runtime.on_stage.append(count)
        plan_all(session, first)
        after = latest[0] if latest else session.internals.runtime.planner.state()
    samples, tokens = (after.counts[name].tolist() for name in ("samples", "tokens"))
    total = sum(tokens)
    sources = tuple(
        SourceEnd(
            name=name,
            last_step=last.get(i, first - 1 if samples[i] else None),
            ends=not after.active[i],
            samples=samples[i],
            tokens=tokens[i],
            share=tokens[i] / max(1, total),
        )
        for i, name in enumerate(job.names)
    )
    found = Forecast(steps=after.step, tokens=total, sources=sources)
    basis = dict.fromkeys(job.names, "every document")
    return Prediction(job=job.name, exact=True, first=first, forecast=found, basis=basis)


# ----------------------------------------------------------------------------
# Estimated: the sizes of the sources, and the rules of the draw.


def _estimated(prepared: PreparedJob, begin: JobPosition, progress: Progress) -> Prediction:
    job = prepared.job
    state = prepared.restore(begin.state) if begin.state is not None else None
    planner = prepared.planner(state)
    reports, sizes, basis = inspect_job(job), list[SourceSize](), dict[str, str]()
    for source, index, report in zip(job.sources, prepared.indexes, reports, strict=True):
        if report.failures:
            raise JobError(report.failures, "plan --until-end")
        rows, how = _rows(job, source, index)
        sizes.append(_size(job, report, rows))
        basis[source.name] = (
            f"{how}; the mean of {len(report.tokens):,} documents in {report.sampled_files:,} of "
            f"{report.files:,} files"
        )
    epochs = [source.epochs for source in job.sources]
    found = forecast(planner.spec, planner.state(), sizes, epochs, progress)
    return Prediction(job=job.name, exact=False, first=begin.first, forecast=found, basis=basis)


def _size(job: Job, report: SourceReport, rows: float) -> SourceSize:
    """Return the size of a source with ``rows`` raw rows, of which a report sampled some."""
    limit, lengths = job.document_limit, report.tokens
    pieces = len(lengths)
    if job.on_long == "split":
        pieces = int((-(-lengths // limit)).sum())
    elif job.on_long == "truncate":
        lengths = np.minimum(lengths, limit)
    return SourceSize(
        samples=rows * pieces / max(1, report.sampled_rows),
        tokens=float(lengths.sum()) / max(1, pieces),
    )


def _rows(job: Job, source: Source, index: Index) -> tuple[float, str]:
    """Return the raw rows of a source and what they follow from: its index, or a count.

    Chunks are counted whole, since the bytes of a part of a compressed file are unknown.
    """
    if index.rows is not None:
        return index.rows, f"{index.rows:,} rows in the index"
    options = ReadOptions(job.slice_rows, job.chunk_bytes, source.max_sample_bytes)
    cache = OpenChunkCache(max_open=1)
    reader, counted, nbytes, chunks = ChunkReader(index, options, cache), 0, 0, 0
    try:
        while chunks < len(index.chunks) and counted < ROWS:
            t, last = 0, False
            while not last:
                raw = reader.slice(chunks, t)
                counted, t, last = counted + len(raw.row), t + 1, raw.last
            nbytes += int(index.chunks.nbytes[chunks])
            chunks += 1
    finally:
        cache.close()
    share = (
        int(index.chunks.nbytes.sum()) / nbytes if nbytes else len(index.chunks) / max(1, chunks)
    )
    what = f"{counted:,} rows counted in {chunks:,} of {len(index.chunks):,} chunks"
    return counted * share, what


def prediction_view(found: Prediction) -> RenderableType:
    """Return a table of the sources' ends, headed by whether it is an estimate."""
    of, about = found.forecast, "" if found.exact else "about "
    head = (
        f"{found.job}: planned to the end, from every document"
        if found.exact
        else f"{found.job}: an estimate from sampled documents; --exact reads every document"
    )
    rows = [
        (
            source.name,
            "never drawn"
            if source.last_step is None
            else f"after step {source.last_step:,}"
            if source.ends
            else "with the job",
            found.basis[source.name],
            f"{source.samples:,}",
            f"{source.tokens:,}",
            f"{source.share:.1%}",
        )
        for source in of.sources
    ]
    columns = ("source", "ends", "from", "samples", "tokens", "share")
    end = f"the job ends after {about}{of.steps:,} steps and {about}{of.tokens:,} tokens"
    since = f"; predicted from step {found.first:,} on" if found.first else ""
    return Group(Text(head), Text(""), grid(columns, rows, 3), Text(""), Text(end + since))
