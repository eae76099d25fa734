"""TempBalance: maps against numpy, ratios under every scheduler, groups that keep all they had, and
resume at every step.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.optim import lr_scheduler as ls  # noqa: E402

import overlord as ov  # noqa: E402
import overlord.torch as ot  # noqa: E402
from overlord.errors import JobError, StateMismatch  # noqa: E402
from overlord.torch.rate_map import RateMap, renormalised  # noqa: E402
from overlord.torch.temp_balance import BalanceOptions, Settings  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Matrices of this size only wait for more threads, the longer the busier the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


ALPHAS = [2.1, 3.4, 2.9, 4.4, 2.1, 3.0]


# oracles: the published arithmetic, one unit at a time


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def linear_oracle(values: list[float], low: float, high: float) -> list[float]:
    return list(np.interp(values, [min(values), max(values)], [low, high]))


def share_oracle(values: list[float], f: Callable[[float], float]) -> list[float]:
    total = sum(f(v) for v in values)
    return [f(v) / total * len(values) for v in values]


def sigmoid_oracle(values: list[float], below: float, above: float, tau: float) -> list[float]:
    middle, out = mean(values), []
    for v in values:
        s = above if v >= middle else below
        out.append(10 ** (s * (1 / (1 + math.exp(-tau * (v - middle))) - 0.5)))
    return out


def step_oracle(values: list[float], low: float, high: float) -> list[float]:
    """Ranks over n - 1, so that the largest reaches the upper end; the published code has n."""
    order = sorted(values)
    ranks = [mean([i for i, v in enumerate(order) if v == value]) for value in values]
    return [low + (high - low) * r / (len(values) - 1) for r in ranks]


MAPPED = {
    ("linear", None): linear_oracle(ALPHAS, 0.5, 1.5),
    ("linear", (1.0, 5.0)): linear_oracle(ALPHAS, 1.0, 5.0),
    ("sqrt", None): share_oracle(ALPHAS, math.sqrt),
    ("log2", None): share_oracle(ALPHAS, math.log2),
    ("step", None): step_oracle(ALPHAS, 0.5, 1.5),
    ("sigmoid", None): sigmoid_oracle(ALPHAS, 2.0, 1.0, 10.0),
    ("sigmoid", (0.25, 1.25)): sigmoid_oracle(ALPHAS, 0.25, 1.25, 10.0),
}


@pytest.mark.parametrize(("name", "scale"), MAPPED)
def test_a_map_is_the_published_one(name: str, scale: tuple[float, float] | None):
    found = RateMap(name=name, scale=scale, limits=(1e-9, 1e9))(np.array(ALPHAS))
    assert found.tolist() == pytest.approx(MAPPED[name, scale], rel=1e-12)
    order = np.argsort(ALPHAS, kind="stable")
    assert (np.diff(found[order]) >= -1e-12).all(), "a larger exponent has no smaller rate"


@pytest.mark.parametrize("name", ["linear", "sqrt", "log2", "step", "sigmoid"])
def test_equal_exponents_give_one(name: str):
    for values in ([2.5] * 4, [2.5, 2.5 + 1e-9], [3.0], []):
        assert RateMap(name=name)(np.array(values)).tolist() == [1.0] * len(values)


def test_multipliers_stay_within_their_limits_for_extreme_exponents():
    found = RateMap(name="sigmoid", scale=(40.0, 40.0))(np.array([1.0, 1000.0]))
    assert found.tolist() == [0.1, 10.0]
    assert RateMap(name="log2")(np.array([0.2, 3.0])).tolist() == [0.1, 2.0]


def test_renormalised_rates_have_a_mean_of_one_by_parameters():
    found = renormalised(np.array([0.5, 1.5]), np.array([100.0, 300.0]))
    assert float((found * [100, 300]).sum() / 400) == pytest.approx(1.0)
    assert found[1] / found[0] == pytest.approx(3.0)


# models whose exponents differ

SIDE = 24


def stack(blocks: int = 3, side: int = SIDE) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Module()
    model.embed = nn.Embedding(11, side)
    model.layers = nn.ModuleList()
    for k in range(blocks):
        block = nn.ModuleDict({"fc": nn.Linear(side, side), "norm": nn.LayerNorm(side)})
        block["fc"].weight.data *= torch.linspace(1, 3 + 4 * k, side)[:, None]
        model.layers.append(block)
    model.lm_head = nn.Linear(side, 11)
    return model


def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model.embed(x)
    for block in model.layers:
        y = y + torch.tanh(block["norm"](block["fc"](y))) / 4
    return model.lm_head(y)


def train_step(model: nn.Module, optimizer: Any, k: int) -> None:
    x = torch.arange(8) * (k + 3) % 11
    optimizer.zero_grad()
    nn.functional.cross_entropy(forward(model, x), (x + 1) % 11).backward()
    optimizer.step()


def constant(optimizer: Any) -> Any:
    return ls.LambdaLR(optimizer, lambda _: 1.0)


def balanced(model: nn.Module, optimizer: Any, scheduler: Any = None, **changes: Any) -> Any:
    settings = {"every": 4, "smooth": 3, "min_eigs": 8, **changes}
    scheduler = constant(optimizer) if scheduler is None else scheduler
    return ot.TempBalance(optimizer, scheduler, model=model, **settings)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: ls.LambdaLR(o, lambda k: 1 / (1 + k)),
    "cosine": lambda o: ls.CosineAnnealingLR(o, 60),
    "step": lambda o: ls.StepLR(o, 7, 0.8),
    "exponential": lambda o: ls.ExponentialLR(o, 0.99),
    "one cycle": lambda o: ls.OneCycleLR(o, 0.2, total_steps=400),
    "sequential": lambda o: ls.SequentialLR(
        o, [ls.LinearLR(o, 0.1, total_iters=20), ls.CosineAnnealingLR(o, 150)], milestones=[20]
    ),
    "chained": lambda o: ls.ChainedScheduler(
        [ls.ConstantLR(o, 0.5, total_iters=30), ls.ExponentialLR(o, 0.98)]
    ),
    "multistep": lambda o: ls.MultiStepLR(o, [30, 90, 150], 0.3),
    "multiplicative": lambda o: ls.MultiplicativeLR(o, lambda _: 0.995),
    "restarts": lambda o: ls.CosineAnnealingWarmRestarts(o, 13, 2),
    "cyclic": lambda o: ls.CyclicLR(o, 0.01, 0.1, step_size_up=11, cycle_momentum=True),
    "polynomial": lambda o: ls.PolynomialLR(o, 150, 2.0),
}


RATES = [*((name, False) for name in SCHEDULERS), *((name, True) for name in list(SCHEDULERS)[:6])]


@pytest.mark.parametrize(("name", "tensor_rate"), RATES)
def test_ratios_to_the_plain_schedule_are_the_multipliers_at_each_of_200_steps(
    name: str, tensor_rate: bool
):
    def optimizer(model: nn.Module) -> Any:
        rate = torch.tensor(0.1, dtype=torch.float64) if tensor_rate else 0.1
        groups = [
            {"params": model.layers.parameters()},
            {"params": model.lm_head.parameters(), "lr": 0.03},
        ]
        return torch.optim.SGD(groups, lr=rate, momentum=0.9)

    model, plain_model = stack(), stack()
    ours, plain = optimizer(model), optimizer(plain_model)
    scheduler = SCHEDULERS[name](plain)
    balance = balanced(model, ours, SCHEDULERS[name](ours), every=25, smooth=10)
    seen: set[float] = set()
    for step in range(200):
        if step == 100:  # other multipliers from the next measurement on
            first, last = model.layers[0]["fc"].weight.data, model.layers[2]["fc"].weight.data
            first[:], last[:] = last.clone(), first.clone()
        ours.step()
        plain.step()
        balance.step()
        scheduler.step()
        found = balance.multipliers
        for k, block in enumerate(model.layers):
            rate = rate_of(ours, block["fc"].weight)
            base = rate_of(plain, plain_model.layers[k]["fc"].weight)
            assert rate == pytest.approx(base * found[f"layers.{k}"], rel=1e-12, abs=1e-300)
            seen.add(round(found[f"layers.{k}"], 6))
        assert rate_of(ours, model.lm_head.weight) == rate_of(plain, plain_model.lm_head.weight)
        assert ours.param_groups[1]["momentum"] == plain.param_groups[0]["momentum"]
    assert {0.5, 1.5} <= seen
    assert len(seen) > 20, "it moves step by step"
    kinds = {isinstance(g["lr"], torch.Tensor) for g in ours.param_groups[:3]}
    assert kinds == {tensor_rate}


def rate_of(optimizer: Any, parameter: torch.Tensor) -> float:
    (rate,) = (g["lr"] for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    return float(rate)


def test_multiplying_after_the_scheduler_would_compound():
    """Why the schedule runs on unscaled rates: this is what a naive wrapper does."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = ls.ExponentialLR(optimizer, 1.0)
    for _ in range(6):
        optimizer.step()
        scheduler.step()
        optimizer.param_groups[0]["lr"] *= 1.5
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.5**6)


def test_a_plateau_scheduler_gets_its_metric():
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balance = balanced(
        model, optimizer, ls.ReduceLROnPlateau(optimizer, factor=0.5, patience=0), smooth=0
    )
    for _ in range(4):
        optimizer.step()
        balance.step(1.0)
    # the first metric is the best one; each of the three others halves the rate
    assert rate_of(optimizer, model.lm_head.weight) == pytest.approx(0.1 / 8)
    assert rate_of(optimizer, model.layers[0]["fc"].weight) == pytest.approx(
        0.1 / 8 * balance.multipliers["layers.0"]
    )
    assert set(balance.multipliers.values()) != {1.0}


def test_multipliers_move_in_a_straight_line_and_return_after_the_end():
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balance = balanced(model, optimizer, every=10, smooth=4, until=18)
    seen = []
    for _ in range(25):
        optimizer.step()
        balance.step()
        seen.append(balance.multipliers["layers.2"])
    goal = seen[14]
    assert goal == 0.5
    assert seen[:10] == [1.0] * 10
    assert seen[10:14] == pytest.approx([1 - 0.5 * k / 4 for k in (1, 2, 3, 4)])
    assert seen[17] == goal
    assert seen[18:22] == pytest.approx([0.5 + 0.5 * k / 4 for k in (1, 2, 3, 4)])
    assert seen[22:] == [1.0] * 3


def test_the_first_measurement_is_after_every_steps_and_needs_no_transition():
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balance = balanced(model, optimizer, every=1, smooth=0)
    assert balance.alphas == {}
    optimizer.step()
    balance.step()
    expected = ot.spectra(model, min_eigs=8).blocks()
    assert balance.unit_alphas == pytest.approx(expected)
    low, high = min(expected.values()), max(expected.values())
    for block, alpha in expected.items():
        assert balance.multipliers[block] == pytest.approx(
            0.5 + (alpha - low) / (high - low), abs=5.1e-5
        )


# groups


def test_splitting_keeps_options_order_and_the_optimizers_state():
    def make() -> tuple[nn.Module, Any]:
        model = stack()
        decay = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        groups = [
            {"params": decay, "weight_decay": 0.1, "label": "decay"},
            {"params": rest, "weight_decay": 0.0, "lr": 0.02, "betas": (0.8, 0.9)},
        ]
        return model, torch.optim.AdamW(groups, lr=0.01)

    model, optimizer = make()
    train_step(model, optimizer, 0)
    before = {id(p): dict(s) for p, s in optimizer.state.items()}
    options = {
        id(p): {k: v for k, v in g.items() if k != "params"}
        for g in optimizer.param_groups
        for p in g["params"]
    }
    first = optimizer.param_groups[0]
    balance = balanced(model, optimizer, ls.LambdaLR(optimizer, lambda _: 1.0))
    assert optimizer.param_groups[0] is first
    # by group: outside of blocks and three blocks, then three blocks and outside
    assert len(optimizer.param_groups) == 8
    members = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert sorted(members) == sorted(id(p) for p in model.parameters())
    for group in optimizer.param_groups:
        for p in group["params"]:
            kept = {k: v for k, v in group.items() if k not in ("params", "initial_lr")}
            assert kept == options[id(p)]
    assert {id(p): dict(s) for p, s in optimizer.state.items()} == before
    # all multipliers are still 1: training is that of the plain optimizer, bit by bit
    plain_model, plain = make()
    train_step(plain_model, plain, 0)
    for k in range(1, 4):
        for m, o in ((model, optimizer), (plain_model, plain)):
            train_step(m, o, k)
        balance.step()
    for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_block_has_one_rate_and_a_matrix_its_own():
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balance = balanced(model, optimizer, every=1, smooth=0)
    optimizer.step()
    balance.step()
    for k, block in enumerate(model.layers):
        rates = {rate_of(optimizer, p) for p in block.parameters()}
        assert rates == {0.1 * balance.multipliers[f"layers.{k}"]}
    assert rate_of(optimizer, model.embed.weight) == 0.1
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balance = balanced(model, optimizer, unit="matrix", every=1, smooth=0)
    optimizer.step()
    balance.step()
    assert list(balance.multipliers) == [f"layers.{k}.fc.weight" for k in range(3)]
    assert rate_of(optimizer, model.layers[0]["fc"].weight) != 0.1
    for block in model.layers:
        assert rate_of(optimizer, block["fc"].bias) == rate_of(optimizer, block["fc"].weight)
        assert rate_of(optimizer, block["norm"].weight) == 0.1


def test_names_of_parameters_are_split_with_them():
    model = stack()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    balanced(model, optimizer)
    names = {id(p): n for n, p in model.named_parameters()}
    assert len(optimizer.param_groups) == 4
    for group in optimizer.param_groups:
        assert group["param_names"] == [names[id(p)] for p in group["params"]]


def test_frozen_blocks_neither_count_nor_change():
    model = stack()
    for p in model.layers[0].parameters():
        p.requires_grad = False
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    balance = balanced(model, optimizer, every=1, smooth=0)
    optimizer.step()
    balance.step()
    assert sorted(balance.multipliers.items()) == [("layers.1", 1.5), ("layers.2", 0.5)]


def test_tied_blocks_are_one_unit():
    model = stack()
    model.layers[2] = model.layers[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balance = balanced(model, optimizer, every=1, smooth=0)
    optimizer.step()
    balance.step()
    assert sorted(balance.multipliers) == ["layers.0", "layers.1"]
    assert len({id(p) for g in optimizer.param_groups for p in g["params"]}) == sum(
        len(g["params"]) for g in optimizer.param_groups
    )


def test_adapters_learn_at_the_rate_of_their_matrix():
    from tests.torch.test_spectra import Lora, weight

    model = nn.Module()
    model.layers = nn.ModuleList(
        [
            nn.ModuleDict({"q_proj": Lora(weight(32, 32, seed=k, tail=t), 2)})
            for k, t in enumerate((0.2, 0.9))
        ]
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 4
    optimizer = torch.optim.SGD(trained, lr=0.1)
    balance = balanced(model, optimizer, unit="matrix", every=1, smooth=0)
    optimizer.step()
    balance.step()
    assert list(balance.multipliers.values()) == [1.5, 0.5]
    for block, rate in zip(model.layers, (0.15, 0.05), strict=True):
        for name in ("lora_A", "lora_B"):
            adapter = getattr(block["q_proj"], name)["default"].weight
            assert rate_of(optimizer, adapter) == pytest.approx(rate)


@pytest.mark.parametrize("bad", ["small", "zero"])
def test_units_without_an_exponent_keep_one(bad: str):
    model = stack(4)
    if bad == "small":
        model.layers[3]["fc"] = nn.Linear(SIDE, 4)
    else:
        nn.init.zeros_(model.layers[3]["fc"].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balance = balanced(model, optimizer, every=1, smooth=0)
    optimizer.step()
    balance.step()
    assert balance.multipliers["layers.3"] == 1.0
    assert math.isnan(balance.unit_alphas["layers.3"])
    assert "alpha/layers.3" not in balance.metrics()
    assert sorted(balance.multipliers.values())[0] == 0.5
    assert sorted(balance.multipliers.values())[-1] == 1.5


def test_a_block_that_is_not_finite_keeps_its_multiplier():
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balance = balanced(model, optimizer, every=1, smooth=0)
    optimizer.step()
    balance.step()
    before = balance.multipliers
    assert before["layers.2"] == 0.5
    model.layers[2]["fc"].weight.data[0, 0] = math.inf
    balance.step()
    assert balance.multipliers["layers.2"] == 0.5
    assert sorted(balance.multipliers[f"layers.{k}"] for k in (0, 1)) == [0.5, 1.5]


def test_renormalise_changes_the_mean_and_not_the_order():
    multipliers = {}
    for renormalise in (False, True):
        model = stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        balance = balanced(
            model, optimizer, every=1, smooth=0, map="sigmoid", renormalise=renormalise
        )
        optimizer.step()
        balance.step()
        multipliers[renormalise] = balance.multipliers
    assert mean(list(multipliers[True].values())) == pytest.approx(1.0, abs=1e-4)
    assert mean(list(multipliers[False].values())) != pytest.approx(1.0, abs=1e-2)
    assert sorted(multipliers[True], key=multipliers[True].__getitem__) == sorted(
        multipliers[False], key=multipliers[False].__getitem__
    )


def test_weight_decay_is_scaled_instead_of_the_rate():
    model = stack()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.2},
        {"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = ls.ExponentialLR(optimizer, 0.9)
    settings = {"every": 1, "smooth": 0, "scales": "weight_decay", "scale": (2 / 3, 5.0)}
    balance = balanced(model, optimizer, scheduler, **settings)
    for _ in range(3):
        optimizer.step()
        balance.step()
    rates = [g["lr"] for g in optimizer.param_groups]
    assert rates == pytest.approx([0.1 * 0.9**3] * len(rates))
    for k, block in enumerate(model.layers):
        (group,) = (
            g for g in optimizer.param_groups if any(p is block["fc"].weight for p in g["params"])
        )
        assert group["weight_decay"] == pytest.approx(0.2 * balance.multipliers[f"layers.{k}"])
    assert sorted(balance.multipliers.values())[::2] == [0.6667, 5.0]
    state = balance.state_dict()
    again_model = stack()
    groups = [
        {"params": [p for p in again_model.parameters() if p.ndim == 2], "weight_decay": 0.2},
        {"params": [p for p in again_model.parameters() if p.ndim != 2], "weight_decay": 0.0},
    ]
    again = torch.optim.AdamW(groups, lr=0.1)
    balanced(again_model, again, ls.ExponentialLR(again, 0.9), **settings).load_state_dict(state)
    for key in ("lr", "weight_decay"):
        assert [g[key] for g in again.param_groups] == [g[key] for g in optimizer.param_groups]
    rprop = torch.optim.Rprop(model.parameters())
    with pytest.raises(
        JobError, match="expected the option weight_decay in every group, got Rprop"
    ):
        ot.TempBalance(rprop, constant(rprop), model=model, scales="weight_decay")


# resume

RESUMED = {k: SCHEDULERS[k] for k in ("cosine", "sequential", "one cycle", "multistep")}
STEPS = 14


def run_with(scheduler: Callable[[Any], Any], optimizer_type: Any = torch.optim.AdamW) -> Any:
    model = stack()
    optimizer = optimizer_type(model.parameters(), lr=0.01)
    return model, optimizer, balanced(model, optimizer, scheduler(optimizer), every=5, smooth=3)


def signature(model: nn.Module, optimizer: Any, balance: Any) -> list[Any]:
    weights = [p.detach().clone() for p in model.parameters()]
    rates = [float(g["lr"]) for g in optimizer.param_groups]
    return [weights, rates, balance.multipliers, balance.alphas]


@pytest.mark.parametrize("name", RESUMED)
def test_resume_at_every_step_is_equal_in_every_bit(name: str):
    model, optimizer, balance = run_with(RESUMED[name])
    saved, wanted = [], []
    for k in range(STEPS):
        saved.append(
            copy.deepcopy((model.state_dict(), optimizer.state_dict(), balance.state_dict()))
        )
        train_step(model, optimizer, k)
        balance.step()
        wanted.append(signature(model, optimizer, balance))
    assert len({m for w in wanted for m in w[2].values()}) > 5
    for at in range(STEPS):
        again, optimizer, balance = run_with(RESUMED[name])
        weights, moments, state = copy.deepcopy(saved[at])
        again.load_state_dict(weights)
        if at % 2:  # either order
            balance.load_state_dict(state)
            optimizer.load_state_dict(moments)
        else:
            optimizer.load_state_dict(moments)
            balance.load_state_dict(state)
        for k in range(at, STEPS):
            train_step(again, optimizer, k)
            balance.step()
            got, expected = signature(again, optimizer, balance), wanted[k]
            assert all(torch.equal(a, b) for a, b in zip(got[0], expected[0], strict=True))
            assert got[1:] == expected[1:]


def test_a_state_survives_a_file_of_torch(tmp_path: Path):
    model, optimizer, balance = run_with(RESUMED["multistep"])
    for k in range(7):
        train_step(model, optimizer, k)
        balance.step()
    torch.save(balance.state_dict(), tmp_path / "state.pt")
    _, _, again = run_with(RESUMED["multistep"])
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.state_dict() == balance.state_dict()
    assert again.get_last_lr() == balance.get_last_lr()


def test_a_state_of_other_settings_or_another_model_is_refused_unchanged():
    model, optimizer, balance = run_with(RESUMED["cosine"])
    state = balance.state_dict()
    model = stack()
    other = balanced(model, torch.optim.SGD(model.parameters(), lr=0.1), every=9)
    with pytest.raises(StateMismatch, match="every: saved 5, got 9"):
        other.load_state_dict(state)
    model = stack(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    larger = balanced(model, optimizer, every=5, smooth=3)
    before = larger.state_dict()
    with pytest.raises(StateMismatch, match=r"units: saved -, got layers\.3"):
        larger.load_state_dict(state)
    assert larger.state_dict() == before
    with pytest.raises(StateMismatch, match="not a state of TempBalance"):
        larger.load_state_dict({"last_epoch": 3})


def test_an_optimizer_state_from_before_the_split_is_loaded_before_it():
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_step(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    again = stack()
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.01)
    optimizer.load_state_dict(saved)
    balanced(again, optimizer)
    moments = [optimizer.state[p]["exp_avg"] for p in again.parameters()]
    assert all(
        torch.equal(m, s["exp_avg"]) for m, s in zip(moments, saved["state"].values(), strict=True)
    )


# refusals, metrics, and the page


def test_every_setting_is_a_keyword_and_in_the_page_with_its_default():
    from tests.unit.test_docs import ROOT, rows_under

    defaults = {f.name: f.default for f in fields(Settings)}
    assert set(BalanceOptions.__annotations__) == set(defaults)
    listed = rows_under(ROOT / "docs" / "tempbalance.md", "Settings")
    assert sorted(listed) == sorted(defaults)
    shown = {name: ast.literal_eval(text) for name, text in listed.items() if name != "fused"}
    assert shown == {name: value for name, value in defaults.items() if name != "fused"}


def test_settings_that_cannot_work_are_refused():
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = constant(optimizer)
    for settings, says in (
        ({"unit": "layer"}, "unit: expected one of block, matrix"),
        ({"every": 0}, "every: expected at least 1 step, got 0"),
        ({"smooth": -1}, "smooth: expected at least 0"),
        ({"map": "cubic"}, "map: expected one of linear"),
        ({"estimator": "median"}, "estimator: expected one of hill"),
        ({"map": "sqrt", "scale": (1, 2)}, "scale: expected None"),
        ({"evry": 5}, "got evry"),
    ):
        with pytest.raises(JobError, match=says):
            ot.TempBalance(optimizer, scheduler, model=model, **settings)
    assert len(optimizer.param_groups) == 1, "a refused call splits nothing"
    with pytest.raises(JobError, match="scheduler of this optimizer"):
        ot.TempBalance(torch.optim.SGD(stack().parameters(), lr=1.0), scheduler, model=model)
    with pytest.raises(JobError, match="for a constant rate use"):
        ot.TempBalance(optimizer, None, model=model)
    lbfgs = torch.optim.LBFGS(model.parameters())
    with pytest.raises(JobError, match="LBFGS"):
        ot.TempBalance(lbfgs, constant(lbfgs), model=model, min_eigs=8)


def test_a_model_in_which_nothing_can_be_balanced_is_refused(caplog):
    model = nn.Linear(64, 64)  # in no numbered block
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(JobError, match='got none; use unit="matrix"'):
        ot.TempBalance(optimizer, constant(optimizer), model=model)
    with pytest.raises(JobError, match="got none; check skip="):
        ot.TempBalance(optimizer, constant(optimizer), model=model, unit="matrix", skip=("weight",))
    ot.TempBalance(optimizer, constant(optimizer), model=model, unit="matrix")
    assert caplog.text == ""
    ot.TempBalance(optimizer, constant(optimizer), model=model, unit="matrix", min_eigs=65)
    assert "all multipliers stay 1" in caplog.text


def test_a_group_that_is_added_later_is_refused():
    model = stack()
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    balance = balanced(model, optimizer)
    optimizer.add_param_group({"params": model.lm_head.parameters()})
    with pytest.raises(JobError, match="expected the 3 groups of the split, got 4"):
        balance.step()


def test_a_session_takes_the_metrics_as_a_report(tmp_path: Path):
    rows = "\n".join('{"tokens": [1, 2, 3]}' for _ in range(20))
    (tmp_path / "a.jsonl").write_text(rows)
    source = ov.Source("a", str(tmp_path / "a.jsonl"), transforms=[ov.Tokens()])
    job = ov.Job(name="x", sources=[source], batch=ov.Batch(samples=2, context=16), until=3)
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balance = balanced(model, optimizer, every=1, smooth=0)
    with ov.launch(job, cache_dir=str(tmp_path / "cache")) as session:
        client = session.client(0)
        for step in client:
            optimizer.step()
            balance.step()
            client.report(step.step, balance.metrics())
        assert session.metrics()["feedback"]["invalid"] == 0
    assert balance.metrics().keys() == {
        f"{what}/layers.{k}" for what in ("alpha", "rate") for k in range(3)
    }
