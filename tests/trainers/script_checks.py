"""What must hold of the runs of a script: one stream, one loss, and a resume after a kill."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.script_world import Run, ended_as_expected, runs, write_data

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "trainers"
STEPS, SAVED = 8, 3  # steps of a script, and those in the checkpoint from which it resumes
LIMIT_S = 1800.0
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
LOADED = ("overlord.session.runtime", "overlord.session.rendezvous", "overlord.session.session")


def environment(out: Path) -> dict[str, str]:
    """Return the environment of scripts, without the rank of this process."""
    return {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        **ONE_THREAD,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OVERLORD_CACHE": str(out / "cache"),
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "DS_ACCELERATOR": "cpu",
    }


def run_page(
    page: str,
    out: Path,
    *,
    worlds: Sequence[int] = (1, 2),
    loaded: Sequence[str] = (),
    one_start: bool = True,
    dtype: str = "float64",
) -> None:
    """Run the script of a page in its worlds, and check everything that must hold of the runs.

    ``one_start``: whether the trainer draws the same first weights on every number of ranks. Only
    then are losses compared between worlds. ``dtype``: of weights and losses.
    """
    env = {**environment(out), "TRAINERS_DTYPE": dtype}
    program = [sys.executable, "-m", "tests.trainers.script_world", str(PAGES / page), str(out)]
    command = [*program, ",".join(map(str, worlds)), *LOADED, *loaded]
    done = subprocess.run(command, env=env, timeout=LIMIT_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    codes = json.loads((out / "codes.json").read_text())
    for run in runs(worlds):
        ended = codes.get(run.name, [])
        assert ended_as_expected(run, ended), f"{run.name}: {ended}\n{logs(out, run)}"
    check_streams(out, worlds)
    for compared in [worlds] if one_start else [[n] for n in worlds]:
        check_losses(out, compared)


def run_alone(page: str, out: Path, *, ranks: int) -> None:
    """Run the script of a page, which launches its ranks itself, after ``run_page``."""
    folder = out / "alone"
    write_data(folder)
    (folder / "out").mkdir()
    env = {**environment(out), "TRAINERS_STRATEGY": "llm_balance", "TRAINERS_OUT": f"{folder}/out"}
    program = [sys.executable, "-m", "tests.trainers.script_alone", str(PAGES / page), str(ranks)]
    done = subprocess.run(
        program, env=env, cwd=folder, timeout=LIMIT_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        assert items(out, "alone", rank) == items(out, f"{ranks}-balanced", rank)
    printed = losses_in(done.stdout)
    assert printed == pytest.approx(losses(out, Run("1-vanilla", 1, "vanilla")), rel=1e-6)


def logs(out: Path, run: Run) -> str:
    """Return the ends of the logs of a run."""
    folder = out / (run.folder or run.name)
    return "\n".join(path.read_text()[-4000:] for path in sorted(folder.glob(f"{run.name}-*.log")))


def items(out: Path, run: str, rank: int, *, kind: str = "train", of: str = "out") -> list[Any]:
    """Return the recorded items of a rank."""
    text = (out / run / of / f"{kind}-{rank}").read_text()
    return [json.loads(line) for line in text.splitlines()]


def check_streams(out: Path, worlds: Sequence[int]) -> None:
    """Streams of equal runs are equal, also across a kill, and passes of an evaluation are too."""
    for n in worlds:
        for rank in range(n):
            whole = items(out, f"{n}-balanced", rank)
            per_step = len(whole) // STEPS
            assert len(whole) == per_step * STEPS
            killed = items(out, f"{n}-resumed", rank, of="killed")
            assert killed == whole[: len(killed)]
            assert len(killed) > SAVED * per_step
            resumed = items(out, f"{n}-resumed", rank)
            assert resumed == whole[SAVED * per_step :], "it continues after the last saved step"
            valid = items(out, f"{n}-balanced", rank, kind="valid")
            assert len(valid) > 0
            assert valid == items(out, f"{n}-vanilla", rank, kind="valid")
    if (most := max(worlds)) > 1:
        ranks = [items(out, f"{most}-balanced", rank) for rank in range(most)]
        assert any(rank != ranks[0] for rank in ranks), "ranks have data of their own"
        other = [items(out, f"{most}-vanilla", rank) for rank in range(most)]
        assert ranks != other, "the strategies place samples differently"


def losses(out: Path, run: Run) -> dict[str, float]:
    """Return the losses that rank 0 printed, by ``step 3`` or ``evaluation 5``."""
    folder = out / (run.folder or run.name)
    return losses_in((folder / f"{run.name}-0.log").read_text())


def losses_in(text: str) -> dict[str, float]:
    """Return the losses of an output by ``step 3`` or ``evaluation 5``."""
    return {
        name: float(value)
        for name, value in re.findall(r"(step \d+|evaluation \d+): loss ([\d.e+-]+)", text)
    }


def check_losses(out: Path, worlds: Sequence[int]) -> None:
    """Losses of all runs are those of the smallest world without balancing, to 1e-6."""
    found = {run.name: losses(out, run) for run in runs(worlds)}
    wanted = found[f"{worlds[0]}-vanilla"]
    assert [name for name in wanted if name.startswith("step")] == [
        f"step {step}" for step in range(STEPS)
    ]
    assert any(name.startswith("evaluation") for name in wanted)
    assert wanted[f"step {STEPS - 1}"] < wanted["step 0"], "the model learns"
    for name, of_run in found.items():
        if name.endswith("killed"):
            continue
        first = SAVED if name.endswith("resumed") else 0
        expected = {
            key: value for key, value in wanted.items() if int(key.rsplit(" ", 1)[1]) >= first
        }
        assert of_run == pytest.approx(expected, rel=1e-6), name
