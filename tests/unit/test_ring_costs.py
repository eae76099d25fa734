"""Costs of documents on rings: transfers hide behind attention, and fits carry the ring size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import overlord as ov
from overlord.errors import PlanError
from overlord.planning import cost
from overlord.planning.cost import RingCosts

COSTS = RingCosts(
    linear=1.0, square=0.5, constant=3.0, token_bytes=8.0, inside=4.0, across=1.0, latency=0.25
)


def seconds(costs: RingCosts, length: int, d: int, crosses: bool = False) -> float:
    exact = np.array([float(length)])
    return float(costs.seconds(exact, exact**2, np.array([d]), np.array([crosses]))[0])


def test_one_rank_computes_and_transfers_nothing() -> None:
    assert seconds(COSTS, 10, 1) == 10 + 50 + 3
    assert COSTS({"tokens": [10]}).tolist() == [60.0]


def test_the_longer_of_attention_and_transfers_counts() -> None:
    # attention 0.5 x 100 / 2 = 25; transfers 10 x 1/2 x 8/4 + 0.25 = 10.25, or 40.25 across nodes
    assert seconds(COSTS, 10, 2) == 5 + 25 + 3
    assert seconds(COSTS, 10, 2, crosses=True) == 5 + 40.25 + 3


@pytest.mark.parametrize("wrong", [{"linear": -1.0}, {"inside": 0.0}, {"latency": float("nan")}])
def test_numbers_without_meaning_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=rf"cost.ring: expected .* got {next(iter(wrong))}="):
        replace(COSTS, **wrong)


def test_a_cost_on_one_rank_becomes_one_on_rings() -> None:
    made = cost.ring(3 * cost.llama_12b, per_second=5e14, token_bytes=16_384, across=50e9)
    assert made.linear == pytest.approx(3 * cost.llama_12b.per_token / 5e14)
    assert made.square == pytest.approx(3 * cost.llama_12b.per_pair / 5e14)
    assert (made.token_bytes, made.inside, made.unit) == (16_384, float("inf"), "s")
    both = cost.ring(cost.LengthCost(linear=2.0) + cost.LengthCost(square=1.0), constant=0.5)
    assert (both.linear, both.square, both.constant) == (2.0, 1.0, 0.5)
    assert cost.ring(COSTS, token_bytes=1.0).square == COSTS.square


@pytest.mark.parametrize(
    "given",
    [lambda columns: columns["tokens"], cost.llama_12b + cost.vit_1b],
    ids=["a function", "two columns"],
)
def test_a_cost_that_is_not_in_lengths_and_squares_is_refused(given: cost.CostFn) -> None:
    with pytest.raises(PlanError, match=r"cost.ring: expected a cost of one column"):
        cost.ring(given)
    with pytest.raises(PlanError, match="per_second above 0"):
        cost.ring(cost.tokens, per_second=0.0)


BATCHES = [[64] * 64, [4096], [512] * 16, [8192], [2048] * 8, [16384]]


def measured(d: int, linear: float, square: float, constant: float) -> list[float]:
    return [linear * sum(b) / d + square * sum(n * n for n in b) / d + constant for b in BATCHES]


def test_a_fit_by_ring_size_finds_the_coefficients_of_each() -> None:
    wanted = {1: (1e-5, 4e-10, 1e-3), 2: (1.1e-5, 4.4e-10, 2e-3), 8: (1.2e-5, 5e-10, 3e-3)}
    fitted = ov.cost.fit(
        BATCHES * 3,
        [t for d, terms in wanted.items() for t in measured(d, *terms)],
        ranks=[d for d in wanted for _ in BATCHES],
    )
    assert [one.ranks for one in fitted.fitted] == [1, 2, 8]
    for one in fitted.fitted:
        found = [one.linear, one.square, one.constant]
        assert found == pytest.approx(wanted[one.ranks], rel=1e-6)
        assert (one.worst_error < 1e-6, one.measurements) == (True, 6)
    sizes = np.array([1, 2, 4, 7, 8, 100])
    between = [1.1e-5 + 1e-6 * share for share in (2 / 6, 5 / 6)]  # sizes 4 and 7, of 2 to 8
    assert fitted.coefficients(sizes)[0] == pytest.approx(
        [1e-5, 1.1e-5, *between, 1.2e-5, 1.2e-5], rel=1e-6
    )
    assert fitted({"tokens": [100]})[0] == pytest.approx(1e-5 * 100 + 4e-10 * 1e4)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([1] * 5, r"expected ranks as 6 whole numbers of at least 1"),
        ([0] * 6, r"expected ranks as 6 whole numbers of at least 1"),
        (["a"] * 6, r"expected ranks as 6 whole numbers of at least 1"),
        ([2] * 6, r"expected measurements on one rank too, got rings of \[2\]"),
        ([1, 1, 1, 1, 2, 2], r"rings of 2: cost.fit: expected at least 4 different"),
    ],
)
def test_measurements_by_ring_size_that_say_too_little_are_refused(ranks: list, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        ov.cost.fit(BATCHES, measured(1, 1e-5, 4e-10, 1e-3), ranks=ranks)
