"""Inspection of the sources of a job: files, sampled rows and failures of every source.

Every source is checked separately, so that a failure of one does not hide the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.checks import describe_error
from overlord.documents import LENGTHS, sums
from overlord.errors import OverlordError
from overlord.job.stages import smallest_context
from overlord.line_numbers import line_numbers
from overlord.observe.source_report import SourceReport
from overlord.sample import Ragged
from overlord.sources.base import RawSlice, ReadOptions, tokenize_hint
from overlord.sources.chunk_reader import ChunkReader, OpenChunkCache
from overlord.sources.index import Index, build_index, default_cache_dir
from overlord.sources.tables import type_name
from overlord.transforms.base import RowIds
from overlord.transforms.grouped_samples import fitted_lengths
from overlord.transforms.long_documents import lost_tokens
from overlord.transforms.pipeline import Pipeline

if TYPE_CHECKING:
    from overlord.job.job import Job, Source

FILES = 16  # files of a source that are sampled, spread evenly over its listing
UNCUT = 2**31 - 1  # a context that no sample exceeds


def inspect_job(
    job: Job,
    *,
    full: bool = False,
    workers: int = 4,
    progress: Callable[[float], None] = lambda done: None,
) -> list[SourceReport]:
    """Inspect all sources, ``workers`` at a time; return their reports in the job's order.

    ``full``: read every row instead of a sample. ``progress``: called with the number of finished
    sources, with fractions of those in progress. Runs on: any thread.
    """
    pool = ThreadPoolExecutor(workers, "overlord-inspect")
    finished = [0.0] * len(job.sources)

    def inspected(i: int, fraction: float) -> None:
        finished[i] = fraction
        progress(sum(finished))

    try:
        started = [
            pool.submit(inspect_source, source, job, full, partial(inspected, i))
            for i, source in enumerate(job.sources)
        ]
        return [future.result() for future in started]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C must not wait for a slow store


def inspect_source(
    source: Source,
    job: Job,
    full: bool = False,
    progress: Callable[[float], None] = lambda done: None,
) -> SourceReport:
    """Inspect one source; an exception becomes a failure in its report.

    ``progress``: called with the finished fraction, at last with 1.
    """
    out = SourceReport(name=source.name)
    cache = OpenChunkCache(max_open=1)
    try:
        pipeline = Pipeline(
            source.name, source.transforms, seed=job.seed, context=UNCUT, on_long="truncate"
        )
        options = ReadOptions(
            job.slice_rows,
            job.chunk_bytes,
            source.max_sample_bytes,
            pipeline.columns,
            pipeline.refused,
            lengths_only=pipeline.lengths_suffice and not full,
            required=pipeline.required,
        )
        index = build_index(
            source.name, source.uri, source.format, options, cache_dir=default_cache_dir()
        )
        _describe(out, index)
        reader = ChunkReader(index, options, cache)
        files = _sampled_files(index, full)
        for i, file in enumerate(files):
            read = _sample_file(out, reader, pipeline, file, full)
            for fraction in read:
                progress((i + fraction) / len(files))
        if index.row_unit == "byte":
            out.lines = line_numbers(out.first_bad.values())
        _apply_on_long(out, job)
        if index.schema is None and options.columns is not None:
            out.schema = _all_columns(index, options, cache) or out.schema
        if not len(out.tokens) and not out.failures:
            out.failures.append(
                f"source {source.name!r}: no sampled row became a "
                f"sample{_lacking(pipeline, out) or _all_long(out, job) or _all_bad(out)}"
            )
    except OverlordError as fault:
        out.failures.append(str(fault))
    except Exception as fault:  # an unexpected error of one source must not hide the others
        out.failures.append(f"source {source.name!r}: {describe_error(fault)}")
    finally:
        cache.close()
        progress(1.0)
    return out


def _describe(out: SourceReport, index: Index) -> None:
    out.format, out.files, out.chunks = index.format, len(index.files), len(index.chunks)
    out.row_unit = index.row_unit
    out.rows, out.nbytes, out.schema = index.rows, index.nbytes, dict(index.schema or {})


def _apply_on_long(out: SourceReport, job: Job) -> None:
    """Apply ``on_long`` to the sampled lengths.

    Lengths are measured before truncation, so that the report can show the lost tokens.
    """
    context = job.document_limit
    if len(out.documents):
        _apply_to_groups(out, job)
        return
    out.longer = int((out.tokens > context).sum())
    out.all_tokens, out.lost = (
        int(out.tokens.sum()),
        int(lost_tokens(out.tokens, context, job.on_long).sum()),
    )
    if out.longer and job.on_long == "quarantine":
        out.bad[f"more tokens than the context of {context}"] = out.longer
    if job.on_long in ("quarantine", "drop"):
        out.tokens = out.tokens[out.tokens <= context]
    elif job.on_long == "split" and (late := out.image_ends > context).any():
        out.bad[f"an image ends after the first piece of {context}"] = int(late.sum())
        out.tokens = out.tokens[~late]


def _apply_to_groups(out: SourceReport, job: Job) -> None:
    """Apply ``on_long`` to sampled samples of several documents."""
    cut = fitted_lengths(out.documents, job.document_limit, smallest_context(job))
    lost = out.tokens - sums(Ragged(cut, out.documents.offsets - out.documents.offsets[0]))
    out.longer, out.all_tokens = int((lost > 0).sum()), int(out.tokens.sum())
    if job.on_long in ("quarantine", "drop"):
        out.lost = int(out.tokens[lost > 0].sum()) if job.on_long == "drop" else 0
        out.tokens = out.tokens[lost == 0]
    else:
        out.lost = int(lost.sum())
    if out.longer and job.on_long == "quarantine":
        out.bad[f"documents that do not fit into the context of {smallest_context(job)}"] = (
            out.longer
        )


def _all_columns(index: Index, options: ReadOptions, cache: OpenChunkCache) -> dict[str, str]:
    """Return the columns of the first rows, for formats whose files have no schema.

    Inspection reads only the columns that the job names. With a misspelled name the report would
    lack the existing columns. An unreadable file gives no columns.
    """
    try:
        raw = ChunkReader(index, replace(options, columns=None), cache).slice(0, 0)
    except OverlordError:  # reported already, as a failure of its file
        return {}
    return {f.name: type_name(f.type) for f in raw.table.schema}


def _lacking(pipeline: Pipeline, out: SourceReport) -> str:
    missing = [name for name in pipeline.columns or () if name not in out.schema]
    if not missing or not out.schema:
        return ""
    remedy = tokenize_hint(missing, out.schema)
    return f"; expected the column {', '.join(map(repr, missing))}, got {', '.join(out.schema)}" + (
        f"; {remedy}" if remedy else ""
    )


def _all_long(out: SourceReport, job: Job) -> str:
    return (
        f"; all {out.longer:,} documents are longer than max_document, "
        f"{job.document_limit:,} (on_long: {job.on_long})"
        if out.longer
        else ""
    )


def _all_bad(out: SourceReport) -> str:
    return f"; {reasons[0]}" if (reasons := out.reasons()) else ""


def _sampled_files(index: Index, full: bool) -> list[int]:
    n = len(index.files)
    if full or n <= FILES:
        return list(range(n))
    return np.unique(np.linspace(0, n - 1, FILES).astype(int)).tolist()


def _sample_file(
    out: SourceReport, reader: ChunkReader, pipeline: Pipeline, file: int, full: bool
) -> Iterator[float]:
    """Add the first slice of a file's first chunk to the report; ``full``: all slices.

    Yield the finished fraction after each slice.
    """
    index, path = reader.index, reader.index.files[file].path
    chunks = np.flatnonzero(index.chunks.file == file).tolist()
    readable, reasons = 0, dict[str, int]()
    try:
        wanted = chunks if full else chunks[:1]
        for k, chunk in enumerate(wanted):
            t, last = 0, False
            while not last:
                raw = reader.slice(chunk, t)
                readable += raw.table.num_rows
                _sample_slice(out, raw, pipeline, file, path, reasons)
                t, last = t + 1, raw.last or not full
                yield (k + last) / len(wanted)
    except OverlordError as fault:
        out.failures.append(str(fault))
    out.sampled_files += 1
    for reason, n in reasons.items():
        out.bad[reason] = out.bad.get(reason, 0) + n
    if reasons and not readable:
        out.failures.append(
            f"source {out.name!r}, {path}: no row can be read: {next(iter(reasons))}"
        )


def _sample_slice(
    out: SourceReport,
    raw: RawSlice,
    pipeline: Pipeline,
    file: int,
    path: str,
    reasons: dict[str, int],
) -> None:
    out.sampled_rows += len(raw.row)
    if not out.schema:
        out.schema = {f.name: type_name(f.type) for f in raw.table.schema}
    bad = {i for i, _ in raw.bad}
    good = np.array([i for i in range(len(raw.row)) if i not in bad], np.int64)
    staged = pipeline.slice_stage(raw.table, RowIds(0, file, raw.row[good]))
    block: Any = pipeline.row_stage(staged.table)
    out.dropped += staged.dropped
    out.tokens = np.concatenate([out.tokens, block.meta["tokens"]])
    if pipeline.document_meta and len(block):
        documents = [d for d in (out.documents, block.meta[LENGTHS]) if len(d)]
        out.documents = Ragged.concat(documents)
    out.image_ends = np.concatenate([out.image_ends, _image_ends(block, pipeline)])
    rows = raw.row[good]
    found = [
        *((raw.row[i], reason) for i, reason in raw.bad),
        *((rows[i], reason) for i, reason in staged.bad),
        *((rows[staged.index[i]], reason) for i, reason in block.bad),
    ]
    for row, reason in found:
        reasons[reason] = reasons.get(reason, 0) + 1
        out.first_bad.setdefault(reason, (path, int(row)))


def _image_ends(block: Any, pipeline: Pipeline) -> np.ndarray:
    """Return the number of tokens up to the end of each sample's last image; 0 without images."""
    ends = np.zeros(len(block), np.int64)
    if any(t.kind == "images" for t in pipeline.transforms):
        offset, out = block.meta["image_offset"], block.meta["image_tokens"]
        np.maximum.at(
            ends, np.repeat(np.arange(len(block)), offset.lengths), offset.values + out.values
        )
    return ends
