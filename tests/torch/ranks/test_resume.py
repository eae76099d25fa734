"""Saved by four ranks, resumed by eight on other meshes (checks_resume.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch.ranks.rank_launcher import start

pytestmark = pytest.mark.timeout(200)


def test_a_run_goes_on_under_another_mesh_with_the_same_samples_in_each_step(
    tmp_path: Path,
) -> None:
    before = start(4, "tests.torch.ranks.checks_resume", tmp_path, seconds=80)
    assert before["resume"] == "ok", before["resume"]
    after = start(8, "tests.torch.ranks.checks_resume", tmp_path, seconds=80)
    assert after["resume"] == "ok", after["resume"]
