"""The dummy loading jobs behind ``overlord simulate``, for real: processes, links, memory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

import overlord as ov
from overlord.runtime.bootstrap import Blueprint
from overlord.runtime.options import Options
from overlord.simulation.measuring import measured
from tests.corpus import write_rows

pytestmark = pytest.mark.timeout(200)
ROWS = [{"tokens": list(range(1 + i % 400))} for i in range(800)]


def test_constants_are_measured_once_and_kept(tmp_path: Path) -> None:
    names = [f"s{i}" for i in range(4)]
    for name in names:
        write_rows(tmp_path / name, "parquet", ROWS, row_group_size=200)
    sources = [ov.Source(name, str(tmp_path / name), transforms=[ov.Tokens("tokens")]) for name in names]
    job = ov.Job(name="dummy", sources=sources, place=ov.ClientPlaceTree(dp=2), batch=ov.Batch(samples=16, context=512))
    blueprint, told = Blueprint(job, Options()), list[str]()
    kept = tmp_path / "kept" / "fleet.json"
    found = measured(blueprint, kept, again=False, progress=lambda what, done, of: told.append(what))
    c = found.constants
    assert [name for name, value in asdict(c).items() if value <= 0 and name not in ("source_bytes", "link_bytes")] == []
    assert c.host_bytes > 20 * 2**20  # an interpreter with pyarrow
    assert c.opened_bytes > 10_000
    assert 100 < c.sample_tokens < 300
    assert c.sample_bytes == pytest.approx(4 * c.sample_tokens, rel=0.6)  # ids, in two or four bytes
    assert {"rows of every source", "dummy jobs"} == set(told)
    told.clear()
    assert measured(blueprint, kept, again=False, progress=lambda what, done, of: told.append(what)) == found
    assert told == []
    blueprint.close()
