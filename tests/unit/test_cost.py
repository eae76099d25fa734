"""Costs: FLOPs of layer shapes, models of the paper, sums, names, and fits to measured times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.errors import PlanError
from overlord.planning import cost
from overlord.sample import Ragged

# Milliseconds of four Llama-12B layers, forward and backward, on one H200, by tokens of the
# microbatch and length of its documents.
MEASURED = {
    4096: {64: 42.8, 512: 44.9, 2048: 46.6, 4096: 50.0},
    8192: {64: 85.1, 512: 87.6, 2048: 90.9, 4096: 102.3, 8192: 112.2},
    16384: {64: 173.0, 512: 169.0, 2048: 183.0, 4096: 198.0, 8192: 225.0, 16384: 276.0},
}
BATCHES = [[length] * (tokens // length) for tokens, times in MEASURED.items() for length in times]
SECONDS = [ms / 1000 for times in MEASURED.values() for ms in times.values()]


def test_length_costs() -> None:
    assert cost.tokens({"tokens": [3, 4]}).tolist() == [3.0, 4.0]
    assert cost.quadratic({"tokens": [3, 4]}).tolist() == [9.0, 16.0]


def test_transformer_cost_counts_the_flops_of_its_layers() -> None:
    dense = cost.transformer(hidden=4608, layers=45, heads=36, vocab=128_000)
    assert dense.per_token == pytest.approx(2.41e10, rel=0.01)
    assert dense.per_pair == pytest.approx(4.15e5, rel=0.01)
    assert dense({"tokens": [0, 10]}).tolist() == [0.0, 10 * dense.per_token + 100 * dense.per_pair]
    assert cost.transformer(hidden=64, layers=1, heads=4, causal=False).per_pair == 4 * 64
    grouped = cost.transformer(hidden=64, layers=1, heads=4, kv_heads=1, ffn=0, gated=False)
    assert grouped.per_token == 2 * (2 * 64 * 64 + 2 * 64 * 16)
    wide = cost.transformer(hidden=64, layers=1, heads=4, head_dim=32, ffn=0)
    assert (wide.per_token, wide.per_pair) == (2 * 4 * 64 * 128, 2 * 128)
    assert dense.fingerprint != grouped.fingerprint


def test_a_token_passes_the_experts_it_is_routed_to_those_it_shares_and_the_router() -> None:
    shape = {"hidden": 64, "layers": 3, "heads": 4, "ffn": 100}
    none = cost.transformer(**shape | {"ffn": 0})
    one = cost.transformer(**shape)
    routed = cost.transformer(**shape, active_experts=2, shared_experts=1, experts=8)
    expert = one.per_token - none.per_token
    assert routed.per_token == none.per_token + 3 * expert + 2 * 3 * 64 * 8
    assert routed.per_pair == one.per_pair


@given(st.integers(0, 300), st.integers(1, 100))
def test_with_a_window_a_token_sees_no_further_back(length: int, window: int) -> None:
    full, near = (
        cost.transformer(hidden=8, layers=1, heads=1, ffn=0, window=w) for w in (0, window)
    )
    a, b = (float(c({"tokens": [length]})[0]) for c in (full, near))
    seen = sum(min(i, window) for i in range(length))  # tokens before each, half of itself below
    assert b - near.per_token * length == pytest.approx(
        near.per_pair * (2 * seen + min(length, window)), abs=1e-6
    )
    assert b <= a
    assert (a == b) == (length <= window)


def test_an_image_encoder_sees_all_patches_both_ways() -> None:
    encoder = cost.vit(hidden=64, layers=2, heads=4, patch=2, channels=3)
    assert encoder.per_token == 2 * (2 * (4 * 64 * 64 + 2 * 64 * 256) + 64 * 12)
    assert encoder.per_pair == 4 * 64 * 2
    assert encoder({"image_patches": [1]}).tolist() == [encoder.per_token + encoder.per_pair]


def test_models_of_the_paper_cost_what_their_shapes_say() -> None:
    wanted = {
        "llama_12b": (2.41e10, 4.15e5),
        "mixtral_8x7b": (2.55e10, 2.62e5),
        "tmoe_25b": (7.75e9, 1.72e5),
    }
    wanted |= {"vit_1b": (1.97e9, 2.20e5), "vit_2b": (3.68e9, 3.20e5)}
    for name, (per_token, per_pair) in wanted.items():
        model = getattr(ov.cost, name)
        assert (model.per_token, model.per_pair) == (
            pytest.approx(per_token, rel=0.01),
            pytest.approx(per_pair, rel=0.01),
        )
        assert cost.named(name) is model


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"heads": 0}, "heads=0"),
        ({"layers": 1.5}, "layers=1.5"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads that divide the 4 heads"),
        ({"heads": 3}, "give head_dim="),
        ({"window": 4, "causal": False}, "expected causal=True with a window"),
        ({"ffn": -1}, "ffn=-1"),
    ],
)
def test_shapes_that_are_none_are_refused(shape: dict, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        cost.transformer(**{"hidden": 64, "layers": 1, "heads": 4} | shape)


def test_a_ragged_column_is_summed_over_the_items_of_a_sample() -> None:
    images = Ragged.from_rows([[3], [9, 9], [1, 2], []]).slice(0, 4)
    assert cost.LengthCost(linear=1.0, square=1.0, column="image_patches")(
        {"image_patches": images}
    ).tolist() == [12, 180, 8, 0]
    assert cost.LengthCost(linear=1.0, column="p")({"p": images.slice(1, 3)}).tolist() == [18, 3]


def test_costs_are_added_and_scaled() -> None:
    both = 2 * cost.tokens + cost.quadratic * 0.5
    assert both({"tokens": [4, 6]}).tolist() == [16.0, 30.0]
    assert (cost.tokens + (lambda columns: [1, 1]))({"tokens": [4, 6]}).tolist() == [5.0, 7.0]
    assert both.fingerprint == f"2 * {cost.tokens!r} + 0.5 * {cost.quadratic!r}"
    assert (3 * both).fingerprint == f"3 * ({both.fingerprint})"
    assert (both + cost.tokens).parts == (*both.parts, cost.tokens)
    assert (1.0000001 * cost.tokens).fingerprint != (1 * cost.tokens).fingerprint
    assert (3 * cost.llama_12b + cost.vit_2b).unit == "FLOPs"
    with pytest.raises(PlanError, match="FLOPs and tokens cannot be added"):
        cost.llama_12b + cost.tokens
    with pytest.raises(PlanError, match="a finite factor of at least 0"):
        -1 * cost.tokens


def test_a_registered_cost_is_known_by_its_name() -> None:
    ov.register_cost("test_rows", lambda columns: np.ones(len(columns["tokens"])))
    assert cost.named("test_rows")({"tokens": [5, 6]}).tolist() == [1.0, 1.0]
    with pytest.raises(PlanError, match="'llama_12b' is built in"):
        ov.register_cost("llama_12b", cost.tokens)
    with pytest.raises(PlanError, match="expected a name and a function"):
        ov.register_cost("test_none", None)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="unknown cost 'tokenz'; did you mean 'tokens'"):
        cost.named("tokenz")


def test_a_fit_comes_within_a_few_percent_of_every_measured_microbatch() -> None:
    fitted = cost.fit(BATCHES, SECONDS)
    errors = [
        fitted.seconds(batch) / seconds - 1 for batch, seconds in zip(BATCHES, SECONDS, strict=True)
    ]
    assert max(map(abs, errors)) == pytest.approx(fitted.worst_error)
    assert fitted.worst_error < 0.035
    assert fitted.mean_error < 0.015
    assert [fitted.linear, fitted.square, fitted.constant] == pytest.approx(
        [1.03e-5, 4.06e-10, 1.2e-3], rel=0.02
    )
    assert fitted.unit == "s"
    assert fitted({"tokens": [4096]})[0] == pytest.approx(0.0489, rel=0.01)


def test_measured_times_weigh_attention_more_than_flops_do() -> None:
    fitted = cost.fit(BATCHES, SECONDS)
    assert fitted.square / fitted.linear > 2 * cost.llama_12b.per_pair / cost.llama_12b.per_token


def test_a_fit_is_the_least_square_of_the_relative_errors() -> None:
    rows = (
        np.array([[sum(b), sum(x * x for x in b), 1.0] for b in BATCHES])
        / np.array(SECONDS)[:, None]
    )
    wanted = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    fitted = cost.fit(BATCHES, SECONDS)
    assert [fitted.linear, fitted.square, fitted.constant] == pytest.approx(
        wanted.tolist(), rel=1e-6
    )


coefficients = st.tuples(st.floats(1e-6, 1e-4), st.floats(0, 1e-8), st.floats(0, 1e-2))


@given(coefficients, st.integers(0, 99))
def test_a_fit_finds_the_coefficients_that_made_the_times(
    wanted: tuple[float, float, float], seed: int
) -> None:
    chance = np.random.default_rng(seed)
    batches = [
        {
            "tokens": chance.integers(
                1, 2 ** int(chance.integers(5, 13)), int(chance.integers(1, 40))
            )
        }
        for _ in range(24)
    ]
    seconds = [
        wanted[0] * b["tokens"].sum() + wanted[1] * (b["tokens"] ** 2).sum() + wanted[2]
        for b in batches
    ]
    fitted = cost.fit(batches, seconds)
    assert fitted.worst_error < 1e-6
    assert min(fitted.linear, fitted.square, fitted.constant) >= 0


def test_a_fit_has_no_negative_coefficients() -> None:
    batches = [[n] * k for n in (10, 100, 1000) for k in (1, 3, 9)]
    seconds = [1e-3 * sum(b) - 1e-7 * sum(x * x for x in b) for b in batches]
    fitted = cost.fit(batches, seconds)
    assert fitted.square == 0.0
    rows = np.array([[sum(b), 1.0] for b in batches]) / np.array(seconds)[:, None]
    assert [fitted.linear, fitted.constant] == pytest.approx(
        np.linalg.lstsq(rows, np.ones(9), rcond=None)[0].tolist(), rel=1e-6
    )


@pytest.mark.parametrize(
    ("batches", "seconds", "said"),
    [
        ([[8], [9], [10]], [1.0, 1.1, 1.2], "at least 4 different microbatches, got 3"),
        ([[8]] * 9, [1.0] * 9, "at least 4 different microbatches, got 1"),
        (
            [[64] * k for k in range(1, 9)],
            [0.1 * k for k in range(1, 9)],
            "expected measurements that separate",
        ),
        (
            [[4096], [2048] * 2, [1024] * 4, [512] * 8],
            [1.0, 0.9, 0.8, 0.7],
            "expected measurements that separate.*different tokens",
        ),
        (BATCHES, SECONDS[:-1], "expected 15 times, one per microbatch, got 14"),
        (BATCHES, [0.0, *SECONDS[1:]], "expected seconds above 0"),
        ([[], *BATCHES[1:]], SECONDS, "expected documents with finite lengths"),
    ],
)
def test_measurements_that_say_too_little_are_refused(
    batches: list, seconds: list, said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        cost.fit(batches, seconds)


def test_a_fitted_cost_balances_and_predicts_the_time_of_a_step() -> None:
    fitted = cost.fit(BATCHES, SECONDS)
    buffer = ov.Buffer.from_columns(
        {"web": {"tokens": [8192, 4096, 4096, 512, 64]}}, batch=ov.Batch(samples=5, context=8192)
    )
    graph = (
        ov.DGraph.from_buffer(buffer, ov.ClientPlaceTree(dp=2))
        .mix([1])
        .distribute("DP")
        .cost(fitted)
    )
    assert graph.unit == "s"
    plan = graph.balance().plan()
    assert plan.loads().sum() == pytest.approx(
        sum(fitted.seconds([n]) - fitted.constant for n in (8192, 4096, 4096, 512, 64))
    )
