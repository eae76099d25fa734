"""Small jobs over the same files on a disk and in a store."""

from __future__ import annotations

from typing import Any

import overlord as ov
from tests.corpus import SUFFIX
from tests.stores import BUCKET
from tests.worlds import decode

S3 = f"s3://{BUCKET}/corpus"
FORMATS = ("parquet", "jsonl.zst", "tar", "arrow")
ROWS = [{"n": k, "tokens": [k % 997, k % 13, *range(k % 23)]} for k in range(120)]
# About 2 MB a file.
BIG = [{"n": k, "tokens": [(k * 7919 + j) % 50_000 for j in range(400)]} for k in range(1600)]


def source(name: str, where: str, format: str, **fields: Any) -> ov.Source:
    glob = f"{where}/*{SUFFIX[format]}"
    return ov.Source(
        name,
        glob,
        transforms=[ov.Map(decode, rows=True), ov.Tokens("tokens")],
        **{"epochs": 1, **fields},
    )


def job(where: str, formats: tuple[str, ...] = FORMATS, **changes: Any) -> ov.Job:
    """Return a job with a source for each format below ``where``: a directory, or a prefix in the
    bucket.
    """
    settings = {
        "name": "stores",
        "sources": [source(f.replace(".", "-"), f"{where}/{f}", f) for f in formats],
        "batch": ov.Batch(samples=16, context=64, microbatches=2),
        "seed": 5,
        "slice_rows": 8,
        "shuffle_chunks": 2,
    }
    return ov.Job(**{**settings, **changes})


def delivered(steps: Any) -> list[Any]:
    return [
        [
            (tuple(p.sample), mb["tokens"][p.offset : p.offset + p.length].tolist())
            for mb in step
            for p in mb.samples
        ]
        for step in steps
    ]


def stream(made: ov.Job, runtime: str = "local") -> list[Any]:
    if runtime == "simulated":
        done = ov.simulate(made, seed=1)
        assert done.error is None
        return delivered(done.steps[0])
    with ov.launch(made, runtime=runtime, stall_limit_s=60) as session:
        out = delivered(session.client(0))
        assert session.quarantine() == []
        return out


def in_order(where: str, format: str) -> ov.Job:
    return job(
        "",
        sources=[source("web", where, format, shuffle=False)],
        batch=ov.Batch(samples=50, context=512, microbatches=1),
    )
