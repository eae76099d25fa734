"""Whether all ranks joined with the same job. Rank 0's is the one that runs, and the others would
take parts of it for their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from overlord.batch import Batch
from overlord.errors import JobError
from overlord.hashing import digest
from overlord.job.job import Job
from overlord.mesh import AXES
from overlord.setup.prepared_job import _mixture_text, _source_of
from overlord.transforms.tokenize import Tokenize

PLAIN = (
    "seed",
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
    "sync",
)
SHOWN = 120  # longer texts are compared, and shown, as digests
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object in some process


def parts_of(job: Job) -> dict[str, str]:
    """What shapes the stream and who gets what of it, part by part. Nothing is read: files and
    tokenizers are looked at by rank 0 alone.
    """
    parts = {name: repr(getattr(job, name)) for name in PLAIN}
    parts |= {f"batch.{f.name}": repr(getattr(job.batch, f.name)) for f in fields(Batch)}
    parts |= {f"place.{axis}": repr(getattr(job.place, axis)) for axis in AXES}
    parts["strategy"] = (
        repr(job.strategy) if isinstance(job.strategy, str) else _function(job.strategy)
    )
    parts["mixture"] = _short(_mixture_text(job))
    parts["hooks"] = ", ".join(map(_function, job.hooks)) or "none"
    parts["sources"] = _short(", ".join(job.names))
    for source in job.sources:
        parts[f"source {source.name}: transforms"] = digest(*map(_transform, source.transforms))
        parts[f"source {source.name}: reading"] = (
            f"epochs {source.epochs}, shuffle {source.shuffle}, max_sample_bytes "
            f"{source.max_sample_bytes}"
        )
    return parts


def difference(job: Job, rank: int, said: Mapping[str, str]) -> JobError | None:
    """What is to be said on a rank whose job is not the one of rank 0, whose parts these are."""
    mine = parts_of(job)
    problems = [
        f"{part}: expected {said.get(part, 'nothing')}, as on rank 0, got "
        f"{mine.get(part, 'nothing')} on rank {rank}"
        for part in sorted({*said, *mine})
        if said.get(part) != mine.get(part)
    ]
    if not problems:
        return None
    return JobError(
        [
            *problems[:-1],
            f"{problems[-1]}; make the same Job on every rank: only that of rank 0 is launched",
        ],
        "join",
    )


def _function(given: Any) -> str:
    return f"function {digest(ADDRESS.sub('', _source_of(given)))}"


def _transform(transform: Any) -> str:
    """A tokenizer's own fingerprint reads its file, which need not be on this node."""
    return repr(transform) if isinstance(transform, Tokenize) else str(transform.fingerprint())


def _short(text: str) -> str:
    text = ADDRESS.sub("", text)
    return text if len(text) <= SHOWN else f"digest {digest(text)}"
