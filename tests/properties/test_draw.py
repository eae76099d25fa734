"""Laws of the draw: exact mixing, whatever the weights."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlord.job.job import UNIT
from overlord.planning.draw import (
    Drawer,
    Drawn,
    draw_counts,
    random_counts,
    step_order,
    whole_weights,
)

weights = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=40).filter(
    lambda w: sum(w) > 0
)


class Endless:
    """A front that never runs out, of samples of one token each."""

    ready, ended = 10**9, False

    def samples_for(self, start: int, tokens: int) -> tuple[int, int]:
        return tokens, tokens


@given(weights)
def test_whole_weights_sum_to_the_unit_and_stay_within_one_of_the_exact_share(
    w: list[float],
) -> None:
    whole = whole_weights(w)
    assert sum(whole) == UNIT
    assert all(abs(a - b / sum(w) * UNIT) < 1 + 1e-6 * UNIT for a, b in zip(whole, w, strict=True))
    assert all(a == 0 for a, b in zip(whole, w, strict=True) if b == 0)


@given(weights, st.lists(st.integers(1, 500), min_size=1, max_size=30))
def test_the_realised_mix_stays_within_one_sample_of_every_source_at_every_step(
    w: list[float], sizes: list[int]
) -> None:
    whole, owed, total = whole_weights(w), [0] * len(w), 0
    given_so_far = np.zeros(len(w), object)
    for n in sizes:
        counts = draw_counts(n, whole, owed)
        total += n
        given_so_far += np.array(counts, object)
        assert sum(counts) == n
        assert min(counts) >= 0
        assert all(
            abs(total * a - c * UNIT) < UNIT for a, c in zip(whole, given_so_far, strict=True)
        )


@given(weights, weights, st.integers(1, 200), st.integers(1, 12))
def test_every_step_is_full_after_weights_change(
    before: list[float], after: list[float], n: int, at: int
) -> None:
    size = min(len(before), len(after))
    if not sum(before[:size]) or not sum(after[:size]):
        return
    owed = [0] * size
    for step in range(2 * at):
        whole = whole_weights((before if step < at else after)[:size])
        counts = draw_counts(n, whole, owed)
        assert sum(counts) == n
        assert all(c == 0 for c, w in zip(counts, whole, strict=True) if w == 0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_the_order_of_a_step_spreads_every_source_evenly(counts: list[int]) -> None:
    source, k = step_order(counts)
    assert np.bincount(source, minlength=len(counts)).tolist() == counts
    keys = [
        ((2 * b + 1) * 10**12 // (2 * counts[a]), a)
        for a, b in zip(source.tolist(), k.tolist(), strict=True)
    ]
    assert all(x[0] <= y[0] for x, y in pairwise(keys))
    for i in range(len(counts)):
        assert k[source == i].tolist() == list(range(counts[i]))


@given(weights, st.integers(0, 2**40), st.integers(0, 100), st.integers(1, 300))
def test_random_draws_are_a_function_of_seed_step_and_pick(
    w: list[float], seed: int, step: int, n: int
) -> None:
    whole = whole_weights(w)
    together = np.array(random_counts(n, whole, seed, step, 0))
    apart = np.array(random_counts(n // 2, whole, seed, step, 0)) + np.array(
        random_counts(n - n // 2, whole, seed, step, n // 2)
    )
    assert together.tolist() == apart.tolist()
    assert all(c == 0 for c, w in zip(together, whole, strict=True) if w == 0)


@given(weights, st.integers(1, 5000), st.integers(1, 8))
def test_a_batch_in_tokens_mixes_tokens_within_the_longest_sample(
    w: list[float], tokens: int, steps: int
) -> None:
    drawer = Drawer(samples=None, tokens=tokens, draws=1, random=False, seed=0, fill=True)
    owed: tuple[int, ...] = (0,) * len(w)
    taken = np.zeros(len(w), object)
    for step in range(steps):
        drawn = drawer.draw(step, w, owed, [True] * len(w), [Endless()] * len(w))
        assert isinstance(drawn, Drawn)
        owed = drawn.owed
        taken += np.array(drawn.counts[0], object)
        wanted = [(step + 1) * tokens * x for x in whole_weights(w)]
        assert all(0 <= c * UNIT - x < UNIT for c, x in zip(taken, wanted, strict=True))
