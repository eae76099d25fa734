"""Warnings of data that a job leaves out: rows that are quarantined."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

import overlord as ov
from overlord.planning.losses import DataLosses

ROWS = 40


def made(folder: Path, broken: dict[str, set[int]]) -> ov.Job:
    """Return a job whose sources have broken lines."""
    sources = []
    for name, bad in broken.items():
        lines = [
            '{"tokens": [1, 2' if row in bad else json.dumps({"tokens": [row + 1] * 4})
            for row in range(ROWS)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        sources.append(ov.Source(name, str(folder / f"{name}.jsonl"), epochs=1, weight=1.0))
    batch = ov.Batch(samples=8, microbatches=1, context=64)
    return ov.Job(name="bad rows", sources=sources, place=ov.Mesh(dp=1), batch=batch)


@pytest.mark.parametrize("runtime", ["local", "process"])
def test_a_job_warns_once_of_each_source_with_quarantined_rows(
    runtime: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = made(tmp_path, {"web": {3, 17, 30}, "code": set(), "math": {20}})
    with caplog.at_level(logging.WARNING, "overlord"), ov.launch(job, runtime=runtime) as session:
        steps = sum(1 for _ in session.client(rank=0))
        bad = session.quarantine()
    assert (steps, len(bad)) == (15, 4)
    said = [r.getMessage() for r in caplog.records if "quarantined" in r.getMessage()]
    assert len(said) in {1, 2}, "the steps with the first bad rows may be one"
    assert all("session.quarantine() lists them with their reasons" in text for text in said)
    named = [name for text in said for name in ("web", "code", "math") if f"'{name}'" in text]
    assert sorted(named) == ["math", "web"]


def test_many_sources_with_quarantined_rows_make_a_few_warnings(tmp_path: Path) -> None:
    sources = 200
    job = made(tmp_path, {f"s{i:03}": set() for i in range(sources)})
    losses, said = DataLosses(), list[str]()
    for over in range(1, sources + 1):  # one source more after each step
        bad = np.where(np.arange(sources) < over, 2, 0)
        said += losses.warnings({"quarantined": bad, "tokens": bad}, job)
    assert said[0].startswith("rows are quarantined and skipped: 's000' 2, so far")
    assert 4 < len(said) < 30
    bad = np.full(sources, 2)
    bad[[7, 70]] = 1_500, 30
    (text,) = DataLosses().warnings({"quarantined": bad, "tokens": bad}, job)
    assert "skipped: 's007' 1,500, 's070' 30, 's000' 2 and 197 more sources, so far" in text
