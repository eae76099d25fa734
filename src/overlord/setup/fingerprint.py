"""The fingerprint of a job: one text per entry that shapes the stream.

So an error can name each entry that differs. A saved state holds the fingerprint of its job.
``setup/job_agreement.py`` compares some of the same texts between ranks.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from overlord.batch import NOT_THE_STREAM
from overlord.hashing import digest
from overlord.job.hooks import Hook
from overlord.job.job import Job, Source
from overlord.planning.raw_plan import RawPlan
from overlord.sources.index import Index
from overlord.transforms.pipeline import Pipeline

# Fields of a Job that shape the stream and are compared by their text.
STREAM_FIELDS = (
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
)


def job_fingerprint(
    job: Job, indexes: Sequence[Index], pipelines: Sequence[Pipeline], added: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the fingerprint of a job by entry.

    ``place`` and ``sync`` are left out. A state fits any mesh and any trainer: these change the
    slots of a step and not its samples. The weight of a source in ``added`` counts next to any
    mixture, so it has an entry of its own.
    """
    entries = {
        "sources": digest(*job.names),
        "seed": str(job.seed),
        "batch": digest(json.dumps(batch_fields(job), sort_keys=True)),
        "mixture": digest(mixture_text(job)),
        "strategy": job.strategy
        if isinstance(job.strategy, str)
        else "function " + digest(code_text(job.strategy)),
    }
    entries |= {name: str(getattr(job, name)) for name in STREAM_FIELDS}
    if job.hooks:
        entries["hooks"] = digest(*(code_text(hook) for hook in job.hooks))
    for source, index, pipeline in zip(job.sources, indexes, pipelines, strict=True):
        entries[f"source {source.name}: files"] = index.fingerprint
        entries[f"source {source.name}: transforms"] = pipeline.fingerprint
        entries[f"source {source.name}: reading"] = reading_text(source)
        if source.name in added:
            entries[f"source {source.name}: weight"] = repr(float(source.weight))
    return entries


def source_mark(entries: Mapping[str, str], name: str) -> str:
    """Return one digest of the entries of a source."""
    return digest(
        *(
            f"{entry}={entries[entry]}"
            for entry in sorted(entries)
            if entry.startswith(f"source {name}: ")
        )
    )


def batch_fields(job: Job) -> dict[str, Any]:
    """Return the fields of the job's batch that shape the stream."""
    return {k: v for k, v in asdict(job.batch).items() if k not in NOT_THE_STREAM}


def reading_text(source: Source) -> str:
    """Return the options of a source that decide which of its rows are read."""
    return (
        f"epochs {source.epochs}, shuffle {source.shuffle}, max_sample_bytes "
        f"{source.max_sample_bytes}"
        + (f", on_lost {source.on_lost}" if source.on_lost != "fail" else "")
    )


def mixture_text(job: Job) -> str:
    """Return the text of the job's mixture: weights as JSON, or the text of its schedule."""
    if job.mixture is None:
        return json.dumps([float(s.weight) for s in job.sources])
    if isinstance(job.mixture, Mapping):
        return json.dumps([float(job.mixture.get(n, 0.0)) for n in job.names])
    return code_text(job.mixture)


def code_text(function: Any) -> str:
    """Return a text that identifies a user's function or object, the same in every process.

    The text must not contain a memory address.
    """
    if isinstance(own := getattr(function, "fingerprint", None), str):
        return own
    if isinstance(function, functools.partial):
        return (
            f"{code_text(function.func)} of {function.args!r} {sorted(function.keywords.items())!r}"
        )
    if isinstance(function, (Hook, RawPlan)):
        return (
            f"{[getattr(function, f.name) for f in fields(function) if f.name != 'fn']} "
            f"{code_text(function.fn)}"
        )
    if not inspect.isroutine(function) and repr(function) != object.__repr__(function):
        return repr(function)
    code = function if inspect.isroutine(function) else type(function)
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        module = getattr(code, "__module__", "")
        return f"{module}.{getattr(code, '__qualname__', type(code).__qualname__)}"
