"""Small jobs for the tests of overlord.torch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import overlord as ov
from tests.corpus import write_rows

VOCAB = 97


def text_job(folder: Path, *, dp: int = 1, until: Any = 8, seed: int = 5, **batch: Any) -> ov.Job:
    """Two sources of documents of 1 to 40 tokens."""
    sources = []
    for name, weight in (("web", 2.0), ("code", 1.0)):
        chance = random.Random(name)
        rows = [
            {"tokens": [chance.randrange(1, VOCAB) for _ in range(chance.randrange(1, 41))]}
            for _ in range(60)
        ]
        path = write_rows(folder / name, "jsonl", rows)
        sources.append(ov.Source(name, path, transforms=[ov.Tokens()], weight=weight))
    settings = {"samples": 12, "microbatches": 2, "context": 256} | batch
    return ov.Job(
        name="text",
        sources=sources,
        batch=ov.Batch(**settings),
        place=ov.ClientPlaceTree(dp=dp),
        until=until,
        seed=seed,
    )
