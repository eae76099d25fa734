"""The script of the page on Ray Train: one stream, one loss, and a group of workers that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import rays
from tests.trainers.script_checks import LIMIT_S, PAGES, SAVED, environment, losses_in
from tests.trainers.script_world import write_data

pytestmark = [
    pytest.mark.timeout(3 * LIMIT_S),
    pytest.mark.skipif(bool(rays.train_missing()), reason=rays.train_missing() or "it is there"),
]


def run(out: Path, workers: int, strategy: str, *, kill: bool = False) -> dict[str, float]:
    """Run the script in a folder; return the losses that it printed."""
    write_data(out)
    (out / "out").mkdir()
    env = environment(out) | {
        "TRAINERS_STRATEGY": strategy,
        "TRAINERS_KILL": str(int(kill)),
        "TRAINERS_OUT": str(out / "out"),
        "RAY_DEDUP_LOGS": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    }
    program = [sys.executable, "-m", "tests.trainers.ray_script", str(PAGES / "ray-train.md")]
    done = subprocess.run(
        [*program, str(workers)], cwd=out, env=env, timeout=LIMIT_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return losses_in(done.stdout + done.stderr)


def items(out: Path, rank: int) -> list[Any]:
    return [json.loads(line) for line in (out / "out" / f"train-{rank}").read_text().splitlines()]


def test_ray_train(tmp_path: Path) -> None:
    wanted = run(tmp_path / "alone", 1, "vanilla")
    assert len(wanted) == 10
    assert run(tmp_path / "whole", 2, "llm_balance") == pytest.approx(wanted, rel=1e-6)
    # a step that is trained on again has the same loss
    assert run(tmp_path / "killed", 2, "llm_balance", kill=True) == pytest.approx(wanted, rel=1e-6)
    ranks = []
    for rank in range(2):
        whole, killed = items(tmp_path / "whole", rank), items(tmp_path / "killed", rank)
        ranks.append(whole)
        per_step = len(whole) // 8
        second = len(killed) - len(whole) + SAVED * per_step
        assert second > SAVED * per_step, "the first group was killed after its checkpoint"
        assert killed[:second] == whole[:second]
        assert killed[second:] == whole[SAVED * per_step :], "after the last checkpoint"
    assert ranks[0] != ranks[1]
