"""The stand-in jobs of ``overlord simulate``, for real: processes, connections, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ov
from overlord.dryrun.constants import load_or_measure
from overlord.setup.options import Options
from overlord.setup.prepared_job import PreparedJob
from tests import pictures
from tests.corpus import write_rows

pytestmark = pytest.mark.timeout(200)
ROWS = [{"tokens": list(range(1 + i % 400))} for i in range(800)]


def test_constants_are_measured_once_and_kept(tmp_path: Path) -> None:
    names = [f"s{i}" for i in range(4)]
    for name in names:
        write_rows(tmp_path / name, "parquet", ROWS, row_group_size=200)
    sources = [
        ov.Source(name, str(tmp_path / name), transforms=[ov.Tokens("tokens")]) for name in names
    ]
    job = ov.Job(
        name="dummy",
        sources=sources,
        place=ov.ClientPlaceTree(dp=2),
        batch=ov.Batch(samples=16, context=512),
    )
    blueprint, told = PreparedJob(job, Options()), list[str]()
    kept = tmp_path / "kept" / "fleet.json"
    found = load_or_measure(
        blueprint, kept, again=False, progress=lambda what, done, of: told.append(what)
    )
    c = found.constants
    assert [
        name
        for name, value in asdict(c).items()
        if value <= 0 and name not in ("source_bytes", "link_bytes")
    ] == []
    assert c.host_bytes > 20 * 2**20  # an interpreter with pyarrow
    assert c.opened_bytes > 10_000
    assert 100 < c.sample_tokens < 300
    assert c.sample_bytes == pytest.approx(
        4 * c.sample_tokens, rel=0.6
    )  # ids, in two or four bytes
    assert {"rows of every source", "stand-in jobs"} == set(told)
    told.clear()
    assert (
        load_or_measure(
            blueprint, kept, again=False, progress=lambda what, done, of: told.append(what)
        )
        == found
    )
    assert told == []
    blueprint.close()


def test_a_job_with_photographs_is_simulated_from_any_working_directory(tmp_path: Path) -> None:
    photos = [pictures.jpeg(480, 640, seed=k) for k in range(4)]
    rows = {
        "tokens": [[5] * (1 + k % 9) for k in range(80)],
        "image": [photos[k % 4] for k in range(80)],
    }
    pq.write_table(pa.table(rows), tmp_path / "photos.parquet", row_group_size=20)
    write_rows(tmp_path / "web", "parquet", ROWS, row_group_size=200)
    images = ov.Images("image", placeholder=7)
    sources = [
        ov.Source("web", str(tmp_path / "web"), transforms=[ov.Tokens()]),
        ov.Source("photos", str(tmp_path / "photos.parquet"), transforms=[ov.Tokens(), images]),
    ]
    job = ov.Job(
        name="dummy",
        sources=sources,
        place=ov.ClientPlaceTree(dp=2),
        batch=ov.Batch(samples=8, context=2048),
        strategy="vlm_hybrid",
    )
    desk = tmp_path / "desk"
    desk.mkdir()
    (desk / "job.yaml").write_text(job.to_yaml())
    (desk / "json.py").write_text("raise ImportError('a file of the working directory')\n")
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(ov.__file__).parents[1]),
        "OVERLORD_CACHE": str(tmp_path / "cache"),
    }
    command = [
        sys.executable,
        "-m",
        "overlord",
        "simulate",
        "job.yaml",
        "--gpus",
        "64",
        "--tp",
        "2",
        "--save",
        "out.json",
    ]
    done = subprocess.run(
        command, cwd=desk, env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((desk / "out.json").read_text())
    assert (
        found["constants"]["built_bytes"] > 1000
    )  # pixels of a token: three colours of four patches
    assert found["constants"]["sample_tokens"] > 100
    assert all(
        cell["memory"]["overlord_per_node"] > 0
        and cell["payload_bytes"] > 0
        and cell["fetch_s"] > 0
        for cell in found["cells"]
    )
