"""The programs on TempBalance cannot rot: tiny runs pass on a CPU, the solver agrees with finer ones,
and the table agrees with hand work.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

pytest.importorskip("torch")

import torch
from torch import nn

import tempbalance_cost
import tempbalance_evidence
from overlord.torch.tail_exponent import Estimator
from temperature import burgers, llama
from temperature.arms import Rates
from temperature.names import ARMS, BALANCED, EMBED, MEAN, PERMUTED, REVERSED, UNIFORM
from temperature.pool import Pool
from temperature.records import (
    TASKS,
    Records,
    beyond_chance,
    cells,
    described,
    first_seed,
    key,
    left,
    mean_multiplier,
    missing,
    other_choices,
    plot,
    rows,
    table,
    trend,
)
from temperature.training import Place, trained

CPU = torch.device("cpu")
COST = tempbalance_cost.Cost(
    model="8B",
    estimator="farms",
    alone_s=8.0,
    slowest_s=1.0,
    timed=8,
    training_s=6000.0,
    reduced_bytes=0,
    gathered_bytes=0,
)
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
    assert "All 8 shares were timed" in tempbalance_cost.page([cost], "here")
    some = tempbalance_cost.measure(tempbalance_cost.TINY, "farms", CPU, 1, 2)
    assert "2 of 8 shares were timed" in tempbalance_cost.page([some], "here")


def test_pages_are_saved_with_their_program(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(tempbalance_cost, "measure", lambda shape, name, *_: COST)
    run = ["tempbalance_cost.py", "--device", "cpu", "--save"]
    monkeypatch.setattr(sys, "argv", run)
    tempbalance_cost.main()
    records = Records(tmp_path / "r.jsonl")
    for lr in TASKS["burgers"].rates:
        records.append(record(UNIFORM, lr, 0, validation=lr, test=1.0, steps=1500, graph=True))
        records.append(record(BALANCED, lr, 0, validation=lr, test=0.9, steps=1500, graph=True))
    run = ["tempbalance_evidence.py", "table", "--save", "--results", str(tmp_path / "r.jsonl")]
    monkeypatch.setattr(sys, "argv", run)
    tempbalance_evidence.main()
    found = {
        p.read_text().partition("made by: ")[2].partition(";")[0] for p in tmp_path.glob("*.md")
    }
    assert found == {"tempbalance_cost.py", "tempbalance_evidence.py"}


def test_the_most_expensive_shares_are_those_of_the_model():
    matrices = tempbalance_cost.matrices_of(tempbalance_cost.MODELS["1B"])
    fit = Estimator(name="farms")
    parts = tempbalance_cost.most_expensive(matrices, fit, 8)
    loads = [sum(m.cost(True) for m in part) for _, part in parts]
    assert loads == sorted(loads, reverse=True)
    assert sum(len(part) for _, part in parts) == len(matrices)
    assert tempbalance_cost.most_expensive(matrices, fit, 2) == parts[:2]


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


@pytest.mark.parametrize("spectra", ["device", "cpu"])
def test_a_run_is_the_plain_loop(spectra: str, tmp_path: Path):
    """Rates that are made in advance for the steps of a graph are those of a step at a time."""
    mine = cell("llama", BALANCED, steps=7, every=3)
    training, rates, _ = llama.prepared(mine, replace(place(tmp_path), spectra=spectra))
    training.run()

    at = place(tmp_path)
    other, plain, _ = llama.prepared(mine, at)
    model, batches = plain.model, other.batches
    optimizer = torch.optim.AdamW(
        [{"params": p, "lr": 0.0} for p in plain.groups], weight_decay=0.1, betas=(0.9, 0.95)
    )
    losses = []
    for i in range(7):
        for group, lr in zip(optimizer.param_groups, plain.now(), strict=True):
            group["lr"] = lr
        loss = other.loss_of(batches[i])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if i < 6:
            plain.step()
    assert training.losses.tolist() == pytest.approx(losses, rel=1e-5)
    assert rates.mean == pytest.approx(plain.mean)
    assert len(set(rates.multipliers().values())) > 1


def test_a_warm_up_leaves_no_trace(tmp_path: Path):
    mine = cell("burgers", UNIFORM, steps=3)
    losses = []
    for steps in (0, 2):
        training, _, _ = burgers.prepared(mine, place(tmp_path))
        before = [p.detach().clone() for p in training.model.parameters()]
        for _ in range(steps):
            training.row.zero_()
            training.table.fill_(0.01)
            training.step()
        training.reset(before)
        training.run()
        losses.append(training.losses.tolist())
    assert losses[0] == losses[1]


def test_a_capture_that_fails_leaves_an_eager_run(tmp_path: Path, monkeypatch):
    mine = cell("burgers", UNIFORM, steps=3)
    plain, _, _ = burgers.prepared(mine, place(tmp_path))
    plain.run()
    training, _, _ = burgers.prepared(mine, place(tmp_path))

    def broken() -> None:
        training.step()
        raise RuntimeError("no capture")

    monkeypatch.setattr(training, "warm_up", broken)
    monkeypatch.setattr(training, "on_cuda", True)
    found = trained(training, place(tmp_path))
    assert found == {"graph": False, "eager": "RuntimeError: no capture"}
    assert training.losses.tolist() == plain.losses.tolist()


def answers(pool: Pool, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of runs that a pool of one worker executes in this order."""
    found: list[dict[str, Any]] = []
    end = time.monotonic() + 120
    while len(found) < len(cells) and time.monotonic() < end:
        if pool.idle:
            pool.idle[0].give(cells[len(found)])
        got = pool.answer(0.1)
        found += [] if got is None else [got]
    return [{k: v for k, v in r.items() if k != "seconds"} for r in found]


def test_a_run_does_not_depend_on_what_its_worker_ran_before(tmp_path: Path):
    given = argparse.Namespace(
        device="cpu", data=tmp_path, text=SOURCES, spectra="cpu", eager=False
    )
    command = tempbalance_evidence.worker_command(given)
    llama_cell, fno = cell("llama", PERMUTED), cell("burgers", BALANCED)
    pool = Pool(command, tmp_path / "logs", 1, 60)
    try:
        used = answers(pool, [llama_cell, fno, llama_cell | {"seed": 1}, fno, llama_cell])
        lost = answers(pool, [fno | {"fraction": "x"}])
        fresh = answers(pool, [llama_cell])  # the worker of the failed run was replaced
    finally:
        pool.close()
    assert used[4] == used[0] == fresh[0]
    assert used[3] == used[1]
    assert used[2]["test"] != used[0]["test"]
    assert "TypeError" in lost[0]["failed"]


def test_a_run_that_takes_too_long_is_killed(tmp_path: Path):
    script = "import sys, time; print('{\"ready\": true}', flush=True); time.sleep(60)"
    pool = Pool([sys.executable, "-c", script], tmp_path, 1, 0.3)
    try:
        first = pool.workers[0]
        found = answers(pool, [{"task": "x"}])
        assert found == [{"task": "x", "failed": "longer than 0.3 s"}]
        assert first.process.poll() is not None
        assert pool.workers[0] is not first
    finally:
        pool.close()


class FakePool:
    """Executes runs at once; those of one arm fail."""

    def __init__(self, fails: str = "", value: Callable[[dict[str, Any]], float] = lambda _: 1.0):
        self.worker = SimpleNamespace(cell=None, give=self.give)
        self.given: list[dict[str, Any]] = []
        self.fails, self.value = fails, value

    def give(self, cell: dict[str, Any]) -> None:
        self.worker.cell = cell
        self.given.append(cell)

    @property
    def busy(self) -> list[Any]:
        return [self.worker] if self.worker.cell else []

    @property
    def idle(self) -> list[Any]:
        return [] if self.worker.cell else [self.worker]

    def answer(self, wait_s: float) -> dict[str, Any]:
        done, self.worker.cell = self.worker.cell, None
        if done["arm"] == self.fails:
            return done | {"failed": "x"}
        value = {"validation": self.value(done), "test": 1.0, "mean_multiplier": 1.0, "graph": True}
        return done | value | {"seconds": 20.0}


def round_of(folder: Path, **changes: Any) -> tempbalance_evidence.Round:
    given = {"results": folder / "r.jsonl", "tasks": "burgers,llama", "steps": "", "seeds": 3}
    end = time.monotonic() + changes.pop("budget", 1000)
    given |= {"tiny": False, "at_once": 4, **changes}
    return tempbalance_evidence.Round(argparse.Namespace(**given), end)


def test_a_round_executes_every_run_once_and_the_next_one_nothing(tmp_path: Path):
    first, pool = round_of(tmp_path), FakePool()
    first.execute(pool)
    assert len({key(c) for c in pool.given}) == len(pool.given) == 168 + 108
    assert first.summary() == "276 runs finished, 0 failed, 0 are left"
    seeds = [c["seed"] for c in pool.given]
    assert seeds == sorted(seeds), "a seed of all tasks before the next"
    again = FakePool()
    round_of(tmp_path).execute(again)
    assert again.given == []


def test_a_wider_grid_runs_only_what_is_missing(tmp_path: Path, capsys):
    """New rates run on seed 0; further seeds run again only where the chosen rate is a new one."""
    narrow = replace(TASKS["burgers"], rates=TASKS["burgers"].rates[:3])
    first, pool = round_of(tmp_path, tasks="burgers"), FakePool()
    first.tasks = [narrow]
    first.execute(pool)
    assert len(pool.given) == 4 * len(ARMS) * (3 + 2)

    def value(cell: dict[str, Any]) -> float:
        return 1.0 if cell["arm"] != BALANCED or cell["lr"] < 8e-3 else 0.5

    wider, more = round_of(tmp_path, tasks="burgers"), FakePool(value=value)
    tempbalance_evidence.plan(wider.given)
    assert "48 to 136 runs of 20.0 s are left" in capsys.readouterr().out
    wider.execute(more)
    again = [c for c in more.given if c["seed"]]
    assert {(c["arm"], c["lr"]) for c in again} == {(BALANCED, 8e-3)}, "0.0005 has run"
    assert len(again) == 4 * 2
    assert {c["lr"] for c in more.given if c["seed"] == 0} == {4e-3, 8e-3}
    assert wider.summary() == f"{48 + 8} runs finished, 0 failed, 0 are left"
    made = rows(Records(tmp_path / "r.jsonl").read(), "burgers")
    assert {(r.arm, r.lr, r.seeds) for r in made if r.arm == BALANCED} == {
        (BALANCED, 8e-3, (0, 1, 2))
    }


def test_a_round_refuses_another_text(tmp_path: Path):
    given = argparse.Namespace(results=tmp_path / "r.jsonl", tiny=False)
    tempbalance_evidence.refuse_another_text("a", given)
    Records(given.results).append({"task": "llama", "data": "a", "tiny": False})
    tempbalance_evidence.refuse_another_text("a", given)
    with pytest.raises(SystemExit, match="expected runs on the text b, got a; give the same"):
        tempbalance_evidence.refuse_another_text("b", given)


def test_a_round_starts_nothing_that_does_not_fit_and_no_run_twice(tmp_path: Path):
    pool = FakePool()
    short = round_of(tmp_path, budget=23)  # runs take 20 s, with a margin 24 s
    short.execute(pool)
    # without a known time the first run of each task starts
    assert [c["task"] for c in pool.given] == ["burgers", "llama"]
    pool = FakePool(fails=UNIFORM)
    failing = round_of(tmp_path)
    failing.execute(pool)
    uniform = [c for c in pool.given if c["arm"] == UNIFORM]
    assert len(uniform) == 5 * 4 + 4 * 3, "seed 0 once; its rate is never known"
    assert "32 failed, 32 to 186 are left" in failing.summary()


def test_later_seeds_wait_for_the_rate_of_seed_0():
    task = TASKS["burgers"]
    done: dict[Any, dict[str, Any]] = {}
    order: list[dict[str, Any]] = []
    assert left(task, False, done) == (120, 120 + 2 * 4 * (1 + 5 * 2))
    while found := next((c for c in cells(task, False, done) if key(c) not in done), None):
        order.append(found)
        value = abs(found["lr"] - 1e-3) + found["seed"]  # 1e-3 is the best rate
        if found["arm"] in (BALANCED, MEAN):
            value = -found["lr"]  # for these arms 8e-3
        if found["arm"] == PERMUTED:
            value = abs(found["lr"] - 2e-3)
        done[key(found)] = found | {"validation": value, "mean_multiplier": found["lr"]}
    assert left(task, False, done) == (0, 0)
    assert all(key(c) in done for c in cells(task, False, done))
    later = [c for c in order if c["seed"]]
    ran = {arm: {c["lr"] for c in later if c["arm"] == arm} for arm in ARMS}
    # at their own rate and at that of the uniform arm
    assert ran[UNIFORM] == ran[EMBED] == ran[REVERSED] == {1e-3}
    assert ran[BALANCED] == ran[MEAN] == {1e-3, 8e-3}
    assert ran[PERMUTED] == {1e-3, 2e-3}
    assert all(c["mean"] == c["lr"] for c in order if c["arm"] == MEAN)
    assert [c["seed"] for c in order] == sorted(c["seed"] for c in order)
    assert left(task, False, done, 5) == (2 * 4 * 9, 2 * 4 * 9)
    # a mean at a rate of neither the balanced nor the uniform arm has the twin at its own rate
    other = next(c for c in later if c["arm"] == MEAN) | {"lr": 2e-3}
    assert mean_multiplier(other, task.rates, done) == 8e-3


def test_a_page_says_what_is_missing():
    runs = [
        record(arm, lr, seed, validation=lr, test=1.0 + seed, fraction=fraction)
        for fraction in (0.025, 0.25)
        for arm in (BALANCED, UNIFORM)
        for lr in TASKS["burgers"].rates
        for seed in (0, 1)
        if not (arm == BALANCED and fraction == 0.25 and lr == 2e-3)
    ]
    lines = missing(runs, TASKS["burgers"], False, 3)
    assert lines[0].startswith("2.5%: balanced (seed 2); uniform (seed 2); ")
    assert "25.0%: balanced (1 of 5 rates, seed 2)" in lines[-1]
    made = rows(runs, "burgers")
    assert "| 0.0005 (of 4), lower edge | 2 |" in table(made, TASKS["burgers"])
    assert "balanced +0.00 ± 0.00 (2 seeds)" in trend(made)
    # seed 2 ran for nothing else: no gain, and no error of one value
    alone = rows([record(UNIFORM, 1e-3, 0, 1.0, 2.0)], "burgers")
    assert "| 1 | 2.0000 |" in table(alone)
    assert trend(alone) == ""
    assert missing([], TASKS["burgers"], False, 3)


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


def test_a_page_marks_what_weakens_a_gain():
    """Rates at an edge, gains that are gains of rates, and gains that chance would give."""
    rates = TASKS["burgers"].rates
    runs = [record(UNIFORM, lr, 0, validation=abs(lr - 1e-3), test=2.0) for lr in rates]
    runs += [record(BALANCED, lr, 0, validation=1.0 - lr, test=1.0) for lr in rates]
    runs += [record(UNIFORM, 1e-3, s, validation=9.0, test=2.0) for s in (1, 2)]
    runs += [record(BALANCED, 8e-3, s, validation=9.0, test=1.0 + s / 100) for s in (1, 2)]
    runs += [record(BALANCED, 1e-3, s, validation=9.0, test=2.5 - s) for s in (1, 2)]
    made = rows(runs, "burgers")
    shown = table(made, TASKS["burgers"])
    assert "| 0.008, upper edge | 3 | 1.0100 ± 0.0058 | +49.50 ± 0.29 | +50.00 ± 14.43 |" in shown
    assert "| uniform | 0.001 | 3 |" in shown
    words = beyond_chance(made)
    assert "at their own rate, of 1 gains 1 are above zero and 0 below" in words
    assert "at the uniform arm's rate, of 1 gains 0 are above zero and 0 below" in words
    assert beyond_chance(made[:0]) == ""
    assert "balanced at 10.0%: 0.9920 at 0.008, 0.9990 at 0.001, 0.7 % apart" in other_choices(made)
    assert other_choices([r for r in made if r.arm == UNIFORM]) == ""
    assert "| 10.0% | balanced | 1.0000 | 1.0000 |" in first_seed(made)
    more = rows([*runs, *({**r, "fraction": 1.0} for r in runs)], "burgers")
    assert "all at the uniform arm&#x27;s rate" in plot(more, "x", same=True)
    alike = [r for r in more if r.arm == UNIFORM]
    assert plot(alike, "x", same=True) == ""
    without = [r for r in runs if r["arm"] == UNIFORM or r["lr"] == 8e-3]
    assert "| - (0 of 3 seeds) |" in table(rows(without, "burgers"))


def test_what_a_page_says_of_a_task_is_what_runs():
    assert TASKS["llama"].whole == llama.TEXT
    assert TASKS["llama"].batch == llama.SIZES["batch"] * llama.SIZES["context"]
    assert TASKS["burgers"].whole == burgers.TRAIN
    assert TASKS["burgers"].batch == burgers.SIZES["batch"]
    words = described(TASKS["burgers"])
    assert "1,500 steps of 20 samples, of 1,000 in all" in words
    assert "1,200 (2.5%), 600 (5.0%)" in words
    assert "9.8 (1.0%), 0.98 (10.0%), 0.098 (100.0%)" in described(TASKS["llama"])


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
