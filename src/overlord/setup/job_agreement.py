"""Check that all ranks joined with the same job.

Only the job of rank 0 runs, and the other ranks receive its steps. Without the check a different
job on another rank would go unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from overlord.errors import JobError
from overlord.hashing import digest
from overlord.job.job import Job
from overlord.mesh import AXES, Batch
from overlord.setup.state_json import (
    STREAM_FIELDS,
    code_text,
    mixture_text,
    reading_text,
    stage_text,
)
from overlord.transforms.chat import Chat
from overlord.transforms.tokenize import Tokenize

COMPARED = ("seed", *STREAM_FIELDS, "max_document", "sync", "model", "evaluation")
MAX_TEXT = 120  # characters; longer texts are replaced by digests
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # the memory address in the repr of an object


def parts_of(job: Job) -> dict[str, str]:
    """Return a text for each property of a job that decides the stream or its distribution.

    No file is read: only rank 0 opens files and tokenizers.
    """
    texts = {name: repr(getattr(job, name)) for name in COMPARED}
    texts |= {f"batch.{f.name}": repr(getattr(job.batch, f.name)) for f in fields(Batch)}
    texts |= {f"place.{axis}": repr(getattr(job.place, axis)) for axis in (*AXES, "vpp")}
    texts["strategy"] = (
        repr(job.strategy) if isinstance(job.strategy, str) else _function(job.strategy)
    )
    texts["mixture"] = _short(mixture_text(job))
    texts |= {f"stages[{k}]": _short(stage_text(job, s)) for k, s in enumerate(job.stages)}
    texts["hooks"] = ", ".join(map(_function, job.hooks)) or "none"
    texts["sources"] = _short(", ".join(job.names))
    for source in job.sources:
        texts[f"source {source.name}: transforms"] = digest(*map(_transform, source.transforms))
        texts[f"source {source.name}: reading"] = reading_text(source)
    return texts


def difference(job: Job, rank: int, expected: Mapping[str, str]) -> JobError | None:
    """Return the error of a rank whose job differs from that of rank 0, or None.

    ``expected`` holds the texts of rank 0.
    """
    mine = parts_of(job)
    problems = [
        f"{name}: expected {expected.get(name, 'nothing')}, as on rank 0, got "
        f"{mine.get(name, 'nothing')} on rank {rank}"
        for name in sorted({*expected, *mine})
        if expected.get(name) != mine.get(name)
    ]
    if not problems:
        return None
    return JobError(
        [
            *problems[:-1],
            f"{problems[-1]}; create the same Job on every rank: only that of rank 0 is launched",
        ],
        "join",
    )


def _function(function: Any) -> str:
    return f"function {digest(ADDRESS.sub('', code_text(function)))}"


def _transform(transform: Any) -> str:
    """Return a text that identifies a transform.

    A tokenizer is identified by its ``repr``: its fingerprint reads a file that may not exist on
    this node.
    """
    return (
        repr(transform) if isinstance(transform, (Chat, Tokenize)) else str(transform.fingerprint())
    )


def _short(text: str) -> str:
    text = ADDRESS.sub("", text)
    return text if len(text) <= MAX_TEXT else f"digest {digest(text)}"
