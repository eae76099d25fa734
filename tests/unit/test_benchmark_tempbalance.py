"""The programs on TempBalance cannot rot: tiny runs pass on a CPU, the solver agrees with finer ones,
and the table agrees with hand work.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

pytest.importorskip("torch")

import torch
from torch import nn

import tempbalance_cost
import tempbalance_evidence
from temperature import burgers
from temperature.arms import Rates
from temperature.names import ARMS, BALANCED, EMBED, MEAN, PERMUTED, REVERSED, UNIFORM
from temperature.records import TASKS, Records, cells, key, mean_multiplier, plot, rows, table
from temperature.training import Place

CPU = torch.device("cpu")
SOURCES = Path(__file__).resolve().parents[2] / "src" / "overlord"


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Matrices of this size only wait for more threads, the longer the busier the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_cost_counts_every_matrix_of_the_model_once():
    big = tempbalance_cost.MODELS["8B"]
    assert big.parameters == pytest.approx(8.03e9, rel=0.01)
    assert tempbalance_cost.MODELS["1B"].parameters == pytest.approx(1.24e9, rel=0.01)
    # 100 steps of 4M tokens at 6 FLOPs a parameter on 8 GPUs of 400 TFLOP/s
    assert big.training_s == pytest.approx(6024, rel=0.01)
    matrices = tempbalance_cost.matrices_of(big)
    assert len(matrices) == 7 * 32
    assert sum(m.rows * m.cols for m in matrices) == big.parameters - 2 * 128_256 * 4096
    cost = tempbalance_cost.measure(tempbalance_cost.TINY, "farms", CPU, 1)
    assert 0 < cost.slowest_s <= cost.alone_s
    assert "| tiny | farms |" in tempbalance_cost.page([cost], "here")


def test_the_solver_converges_and_keeps_the_mean():
    start = burgers.initial(3, 64, 1)
    coarse, fine = burgers.solved(start, steps=200), burgers.solved(start, steps=800)
    assert np.abs(coarse - fine).max() < 1e-7
    assert np.abs(fine.mean(axis=1) - start.mean(axis=1)).max() < 1e-12
    assert (fine.std(axis=1) < start.std(axis=1)).all()
    # a small wave only diffuses: its decay is known
    x = np.arange(64) / 64
    wave = 1e-6 * np.sin(2 * np.pi * x)[None]
    decay = np.exp(-burgers.VISCOSITY * 4 * np.pi**2)
    assert burgers.solved(wave, steps=200) == pytest.approx(wave * decay, abs=1e-11)


def cell(task: str, arm: str, **changes: Any) -> dict[str, Any]:
    return next(iter(cells(TASKS[task], True, {}))) | {"arm": arm} | changes


def place(folder: Path) -> Place:
    return Place(device=CPU, data=folder, text=SOURCES)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_trains_on_both_tasks(arm: str, tmp_path: Path):
    for task in TASKS:
        found = tempbalance_evidence.run_cell(cell(task, arm, steps=4), place(tmp_path))
        assert np.isfinite([found["validation"], found["test"], found["mean_multiplier"]]).all()
        assert bool(found["alphas"]) == (arm in (BALANCED, PERMUTED, REVERSED))


def test_arms_scale_what_they_say():
    def rates(arm: str, mean: float = 1.0) -> dict[str, float]:
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {
                "embed": nn.Embedding(5, 16),
                "layers": nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(6)]),
                "head": nn.Linear(16, 5, bias=False),
            }
        )
        for k, layer in enumerate(model["layers"]):
            layer.weight.data *= torch.linspace(1, 2 + 2 * k, 16)[:, None]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        found = Rates(
            arm,
            model,
            optimizer,
            scheduler,
            every=1,
            seed=0,
            mean=mean,
            outer=("embed", "head"),
            min_eigs=8,
        )
        optimizer.step()
        found.step()
        names = {id(p): name for name, p in model.named_parameters()}
        return {names[id(p)]: g["lr"] for g in optimizer.param_groups for p in g["params"]}

    uniform, balanced = rates(UNIFORM), rates(BALANCED)
    blocks = [name for name in uniform if name.startswith("layers")]
    assert set(uniform.values()) == {1.0}
    assert [balanced[n] for n in ("embed.weight", "head.weight")] == [1.0, 1.0]
    assert min(balanced.values()) == 0.5
    assert max(balanced.values()) == 1.5
    reversed_ = rates(REVERSED)
    for name in blocks:
        assert balanced[name] + reversed_[name] == pytest.approx(2.0, abs=1e-3)
    permuted = rates(PERMUTED)
    assert permuted != balanced
    assert sorted(permuted.values()) == sorted(balanced.values())
    assert set(rates(MEAN, 0.9).values()) == {0.9}
    outer = rates(EMBED)
    assert {n: r for n, r in outer.items() if r != 1.0} == {"embed.weight": 1.5, "head.weight": 1.5}


def record(arm: str, lr: float, seed: int, validation: float, test: float, **more: Any) -> dict:
    given = {"fraction": 0.1, "steps": 1, "every": 1, "tiny": False, "mean_multiplier": 0.8}
    return {
        "task": "burgers",
        "arm": arm,
        "lr": lr,
        "seed": seed,
        "validation": validation,
        "test": test,
        **given,
        **more,
    }


def test_the_rate_is_chosen_on_validation_and_gains_are_by_seed():
    runs = [
        record(UNIFORM, 1e-3, 0, validation=1.0, test=2.0),
        record(UNIFORM, 1e-3, 1, validation=1.0, test=4.0),
        record(UNIFORM, 2e-3, 0, validation=1.5, test=0.1),  # a better test is not looked at
        record(UNIFORM, 2e-3, 1, validation=1.5, test=0.1),
        record(BALANCED, 1e-3, 0, validation=1.0, test=1.0),
        record(BALANCED, 1e-3, 1, validation=1.0, test=3.0),
    ]
    base, ours = sorted(rows(runs, "burgers"), key=lambda r: r.arm == BALANCED)
    assert (base.lr, base.test.tolist()) == (1e-3, [2.0, 4.0])
    assert ours.gain.tolist() == pytest.approx([50.0, 25.0])
    shown = table([base, ours])
    assert "| 10.0% | balanced | 0.001 | 2 | 2.0000 ± 1.0000 | +37.50 ± 12.50 |" in shown
    assert plot([base, ours], "x") == ""  # one amount of data is no line
    more = [r | {"fraction": 1.0} for r in runs]
    assert plot(rows(runs + more, "burgers"), "x").count('class="line"') == 1


def test_runs_in_the_file_are_not_repeated_and_a_cut_line_is_ignored(tmp_path: Path):
    records, first = Records(tmp_path / "r.jsonl"), next(iter(cells(TASKS["burgers"], True, {})))
    mean = first | {"arm": MEAN}
    assert mean_multiplier(mean, [1e-3], records.done()) is None
    records.append(first | {"failed": "x"})
    assert records.done() == {}, "a failed run is repeated"
    records.append(first | {"test": 1.0, "mean_multiplier": 0.75})
    with open(tmp_path / "r.jsonl", "a") as out:
        out.write('{"task": "bur')
    assert list(records.done()) == [key(first)]
    assert mean_multiplier(mean, [1e-3], records.done()) == 0.75
    records.append(first | {"seed": 5, "test": 1.0})
    assert len(records.done()) == 2
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["seed"] == 5
