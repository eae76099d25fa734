"""The benchmarks cannot rot: their samplers keep what is pinned, their bounds and simulator agree
with hand work, tiny runs pass.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from overlord.mesh import Batch, ClientPlaceTree
from overlord.planning.graph.dgraph import DGraph
from overlord.planning.strategies import packed
from overlord.sample import Ragged

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import autoscale  # noqa: E402
import balance  # noqa: E402
import constructors  # noqa: E402
import endtoend_model  # noqa: E402
import faults  # noqa: E402
import journal  # noqa: E402
from balancing.ahead import Stream, run_ahead  # noqa: E402
from balancing.bounds import iteration_bound, microbatch_bound  # noqa: E402
from balancing.grid import Case, Outcome, measure  # noqa: E402
from balancing.tables import Grid  # noqa: E402
from balancing.targets import TARGETS, judge, summary  # noqa: E402
from endtoend.pipeline import one_f_one_b, stage_list  # noqa: E402
from endtoend.plans import STRATEGIES, predict, step_of  # noqa: E402
from endtoend.setups import CARD_FLOPS, ENCODERS_UNPLANNED, SYNCS, Setup, pairs  # noqa: E402
from endtoend.times import Loads, seconds  # noqa: E402
from profiles import LONGEST_IMAGE, PROFILES, Samples, coyo, draw, navit  # noqa: E402

MANY = 100_000


@pytest.mark.parametrize("seed", [1, 2])
def test_coyo_keeps_the_shares_that_the_paper_prints(seed: int) -> None:
    samples = coyo(MANY, seed)
    long = samples.text > 64
    assert len(samples.names) == 5
    assert (~long).mean() == pytest.approx(0.9823, abs=0.002)
    assert samples.text[long].sum() / samples.text.sum() == pytest.approx(0.093, abs=0.006)


def test_coyo_has_an_image_a_sample_skewed_up_to_4096_patches() -> None:
    patches = coyo(MANY, 1).images
    assert set(patches.lengths.tolist()) == {1}
    assert patches.values.max() == LONGEST_IMAGE
    assert np.mean(patches.values) > 1.4 * np.median(patches.values)


def test_navit_has_306_sources_two_images_a_sample_and_a_tail_to_32k_tokens() -> None:
    samples = navit(MANY, 1)
    tokens = samples.tokens()
    assert len(samples.names) == len(np.unique(samples.source)) == 306
    assert samples.images.lengths.mean() == pytest.approx(2.1, abs=0.15)
    assert tokens.max() == 32_768
    assert 10_000 < np.percentile(tokens, 99) < 14_000


@pytest.mark.parametrize("name", PROFILES)
def test_equal_seeds_give_equal_samples_and_other_seeds_others(name: str) -> None:
    first, again, other = (PROFILES[name](500, seed) for seed in (3, 3, 4))
    assert np.array_equal(first.images.values, again.images.values)
    assert not np.array_equal(first.text, other.text)


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.lists(st.integers(1, 40), max_size=5)),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 60),
    st.integers(1, 4),
)
def test_a_cut_sample_fits_and_one_that_fitted_stays_as_it_was(
    rows: list[tuple[int, list[int]]], context: int, merge: int
) -> None:
    samples = Samples(
        names=("one",),
        source=np.zeros(len(rows), np.int32),
        text=np.array([text for text, _ in rows]),
        images=Ragged.from_rows([images for _, images in rows], np.int64),
        merge=merge,
    )
    cut, before = samples.cut(context), samples.tokens()
    assert np.array_equal(cut.tokens(), np.minimum(before, context))
    assert (cut.text >= 0).all()
    for i in np.flatnonzero(before <= context):
        assert cut.images[i].tolist() == samples.images[i].tolist()


def test_a_buffer_holds_the_samples_in_the_order_of_the_stream() -> None:
    samples = draw("navit", 300, seed=1, context=4096)
    buffer = samples.buffer(Batch(samples=300, context=4096))
    patches = buffer.meta["image_patches"]
    assert buffer.drawn
    assert isinstance(patches, Ragged)
    assert np.array_equal(buffer.source, samples.source)
    assert np.array_equal(buffer.meta["tokens"], samples.tokens())
    assert [patches[i].tolist() for i in range(300)] == [
        samples.images[i].tolist() for i in range(300)
    ]


def test_readers_that_take_turns_keep_to_their_source() -> None:
    source = draw("navit", 60, seed=1, context=4096, runs=6).source.reshape(10, 6)
    assert (source == source[0]).all()


def test_one_stage_does_everything_in_turn() -> None:
    forward = np.array([[[1.0, 2.0, 3.0]]])
    assert one_f_one_b(forward, 2 * forward).tolist() == [18.0]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 8), (4, 2), (3, 1)])
def test_equal_microbatches_leave_the_known_bubble(stages: int, microbatches: int) -> None:
    forward = np.ones((1, stages, microbatches))
    assert one_f_one_b(forward, 2 * forward).tolist() == [3.0 * (microbatches + stages - 1)]


def test_two_stages_with_a_long_second_microbatch_end_as_worked_out_by_hand() -> None:
    # stage 0: F0 0-1, F1 1-4, B0 4-6, B1 13-19; stage 1: F0 1-2, B0 2-4, F1 4-7, B1 7-13
    forward = np.array([[[1.0, 3.0], [1.0, 3.0]]])
    assert one_f_one_b(forward, 2 * forward).tolist() == [19.0]


def test_a_first_stage_that_also_encodes_holds_up_the_others_as_worked_out_by_hand() -> None:
    # stage 0: F0 0-3, F1 3-4, B0 6-12, B1 12-14; stage 1: F0 3-4, B0 4-6, F1 6-7, B1 7-9
    forward = np.array([[[3.0, 1.0], [1.0, 1.0]]])
    assert one_f_one_b(forward, 2 * forward).tolist() == [14.0]


def test_pipelines_side_by_side_do_not_touch_each_other() -> None:
    rng = np.random.default_rng(1)
    forward = rng.random((5, 4, 7))
    together = one_f_one_b(forward, 2 * forward)
    alone = [one_f_one_b(forward[i : i + 1], 2 * forward[i : i + 1])[0] for i in range(5)]
    assert together.tolist() == alone
    assert (together >= 3 * forward.sum(axis=2).max(axis=1)).all()


def test_a_stage_never_holds_more_forwards_than_stages_behind_it() -> None:
    for stage in range(4):
        held = np.cumsum([-1 if back else 1 for _, _, back in stage_list(stage, 4, 9)])
        assert held.max() == 4 - stage


def test_the_bound_of_a_step_is_its_dearest_sample_or_the_mean() -> None:
    assert iteration_bound(np.array([6.0, 1.0, 1.0]), 2) == 1.5
    assert iteration_bound(np.array([1.0, 1.0, 1.0]), 2) == 1.0


def test_a_long_sample_that_leaves_no_room_for_others_bounds_the_microbatches() -> None:
    # Two ranks, 10 tokens a microbatch. The long one costs 20 by itself; 10 tokens beside it hold
    # at most 10 of the others' 20.
    costs, sizes = np.array([20.0, *[1.0] * 20]), np.array([10, *[1] * 20])
    assert microbatch_bound(costs, sizes, 2, 10) == pytest.approx((20 + (40 - 30) / 2) / 20)


@given(st.integers(2, 4), st.integers(1, 12), st.integers(0, 2**32))
def test_no_placement_passes_the_microbatch_bound(ranks: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 11, n)
    costs = sizes + 0.1 * sizes**2
    bound = microbatch_bound(costs, sizes, ranks, 10) * costs.sum() / ranks
    for _ in range(20):  # first fit in a random order, bins dealt out at random
        held, load = [], []
        for i in rng.permutation(n):
            k = next((k for k, tokens in enumerate(held) if tokens + sizes[i] <= 10), len(held))
            held[k:], load[k:] = (
                [*(held[k : k + 1] or [0]), *held[k + 1 :]],
                [*(load[k : k + 1] or [0.0]), *load[k + 1 :]],
            )
            held[k], load[k] = held[k] + sizes[i], load[k] + costs[i]
        cells = np.zeros(-(-len(load) // ranks) * ranks)
        cells[: len(load)] = sorted(load, reverse=True)
        assert cells.reshape(-1, ranks).max(axis=1).sum() >= bound - 1e-9


def flops(loads: Loads, encoder: str = "own group", **setup: Any) -> float:
    """A step's time in forward FLOPs of one card."""
    return seconds(loads, Setup(ranks=2, **setup), encoder) * CARD_FLOPS / 3


def test_ranks_that_meet_wait_for_the_slowest_as_worked_out_by_hand() -> None:
    backbone, encoder = np.array([[4.0, 1.0], [1.0, 3.0]]), np.array([[[1.0, 0.0]], [[0.0, 2.0]]])
    stays, moved = (
        Loads(backbone=backbone, encoder=encoder, exchanged=exchanged)
        for exchanged in (False, True)
    )
    assert flops(stays, sync="microbatch") == pytest.approx(5 + 5)
    assert flops(stays, sync="iteration") == pytest.approx(max(5 + 1, 1 + 5))
    assert flops(moved, sync="microbatch") == pytest.approx((1 + 2) + (4 + 3))
    assert flops(moved, sync="iteration") == pytest.approx(2 + 5)


def test_where_images_are_encoded_counts_as_worked_out_by_hand() -> None:
    # One microbatch, two ranks of 2 x 2 cards, numbered stage by stage. The backbone's 8 are 2 a
    # card.
    encoder = np.array([[[1.0], [2.0], [3.0], [4.0]], [[0.0], [0.0], [0.0], [0.0]]])
    loads = Loads(backbone=np.array([[8.0], [8.0]]), encoder=encoder, exchanged=False)
    assert flops(loads, sync="1F1B", tp=2, pp=2) == pytest.approx(4 + (2 + 2))
    assert flops(loads, "stage 0", sync="1F1B", tp=2, pp=2) == pytest.approx((2 + 6) + 2)
    assert flops(loads, "replicated", sync="1F1B", tp=2, pp=2) == pytest.approx((2 + 10) + 2)


@pytest.mark.parametrize(
    ("sync", "encoder"),
    [
        (s, e)
        for s in SYNCS
        for e in ENCODERS_UNPLANNED
        if s == "1F1B" or e in ("own group", "replicated")
    ],
)
def test_no_strategy_is_faster_than_a_step_without_waiting(sync: str, encoder: str) -> None:
    cards = {"tp": 2, "pp": 2} if sync == "1F1B" else {"tp": 2}
    for found in predict(
        Setup(sync=sync, ranks=4, per_rank=6, encoder=encoder, **cards),
        "navit",
        4096,
        pairs()[:2],
        [1],
    ):
        assert set(found.speed) == set(STRATEGIES)
        assert all(0 < speed <= found.ideal * (1 + 1e-9) for speed in found.speed.values())


def test_a_filled_step_is_what_packing_fills() -> None:
    setup = Setup(sync="microbatch", ranks=4, per_rank=0, filled=3)
    samples = step_of(setup, "coyo", 4096, 1)
    plan = packed(samples.buffer(Batch(samples=len(samples), context=4096)), setup.place)
    assert plan.n_microbatches == 3
    assert plan.fill() > 0.8


def test_look_ahead_takes_every_sample_once_and_a_width_of_one_takes_the_stream() -> None:
    case = Case(profile="navit", context=32768, ranks=4, per_rank=4)
    stream = Stream(case, 3, 2, seed=1)
    for step in range(3):
        candidates = stream.candidates(step)
        plan = (
            DGraph.from_buffer(candidates, ClientPlaceTree(dp=4), meta="tokens")
            .mix()
            .distribute("DP")
            .balance("greedy")
            .plan()
        )
        assert not stream.taken[stream.first[plan.source] + plan.row].any()
        stream.settle(plan)
    assert stream.taken.sum() == 3 * case.samples
    alone, wide = (run_ahead(case, width, steps=6) for width in (1, 4))
    assert alone.oldest == 0
    assert wide.bucket <= alone.bucket


def outcome(case: Case, method: str, *, sync: float, bound: float) -> Outcome:
    return Outcome(
        case=case,
        seed=0,
        method=method,
        bucket=1.1,
        sync=sync,
        bucket_bound=1.0,
        sync_bound=bound,
        microbatches=1,
        fill=1.0,
        cpu_ms=1.0,
        overfull=0,
        way="",
    )


def test_a_missed_target_is_told_and_an_impossible_one_is_marked() -> None:
    case = Case(profile="coyo", context=4096, ranks=8, per_rank=16)
    missed, impossible = (
        Grid([outcome(case, "microbatch", sync=1.1, bound=bound)]) for bound in (1.0, 1.06)
    )
    assert "over by 0.060)" in str(judge(missed, TARGETS[1])[0])
    assert "impossible" in str(judge(impossible, TARGETS[1])[0])
    assert any("met in 0 of 1 cells" in line for line in summary(missed))


def test_every_method_keeps_the_context_on_a_small_step() -> None:
    for found in measure(
        Case(profile="navit", context=4096, ranks=16, per_rank=8), 1, balance.METHODS
    ):
        assert found.overfull == 0
        assert found.bucket >= found.bucket_bound - 1e-9
        assert found.sync >= found.sync_bound - 1e-9


def test_the_balance_page_holds_every_section() -> None:
    tiny = balance.Extent(
        ranks=(4, 8),
        per_rank=(8,),
        contexts=(4096,),
        seeds=1,
        steps_ahead=2,
        look_aheads=(1, 2),
        vlm_samples=4096,
        repeat=1,
    )
    found = balance.run(tiny, Console(quiet=True))
    text = balance.page(found, "2026-01-01", "python benchmarks/balance.py", [])
    for title in (
        "Against the targets",
        "Ranks meet once a step",
        "Planning time",
        "The paper's Figure 3",
        "Models with an encoder",
    ):
        assert f"## {title}" in text
    assert "0 in " in next(
        line for line in text.splitlines() if line.startswith("- microbatches above the context")
    )


def test_the_model_page_names_its_assumptions_in_every_row() -> None:
    setups = (
        Setup(sync="microbatch", ranks=4, per_rank=0, filled=2),
        Setup(sync="iteration", ranks=4, per_rank=6),
    )
    models = [pair for kappa in (1.0, 0.0) for pair in pairs(kappa)]
    found = [
        p
        for setup in setups
        for profile in PROFILES
        for p in predict(setup, profile, 4096, models, [1])
    ]
    text = endtoend_model.page(found, "2026-01-01", "python benchmarks/endtoend_model.py", 1, [])
    assert "Against a good baseline" in text
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| set")
    ]
    assert len(rows) == 4
    assert all("D=4" in row and "encoder own group" in row for row in rows)
    assert endtoend_model.plot(found, "coyo").startswith("<svg")


def test_the_comparison_without_constructors_names_the_commit_that_runs_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    constructors.main()
    said = capsys.readouterr().out
    assert f"git worktree add ../overlord-constructors {constructors.COMMIT}\n" in said
    assert constructors.COMMIT[:7] in (BENCHMARKS / "README.md").read_text(encoding="utf-8")


def test_appends_are_measured_beside_a_bare_write_and_sync(tmp_path: Path) -> None:
    found = journal.measure(tmp_path, 1000, 3)
    assert list(found) == ["write + fdatasync", "journal, bytes", "journal, values with arrays"]
    assert found["write + fdatasync"][-1] == "1,000"


@pytest.mark.timeout(280)
def test_faults_are_felt_in_no_byte_and_the_page_has_every_run_its_targets_and_four_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: dict[str, Any] = {}
    monkeypatch.setattr(
        "overlord.drill.run.LOST_AFTER_S", 30.0
    )  # a worker that stands still for seconds is not to be killed, too
    monkeypatch.setattr(
        faults, "save", lambda name, text, plots: saved.update(text=text, plots=plots) or "a page"
    )
    small = [
        "--loaders",
        "3",
        "--killed",
        "2",
        "--steps",
        "20",
        "--step-s",
        "0.01",
        "--samples",
        "12",
    ]
    done = CliRunner().invoke(
        faults.main, [*small, "--save", "--corpus", str(tmp_path)], catch_exceptions=False
    )
    assert done.exit_code == 0
    rows = [
        line.strip("| ").split(" | ") for line in saved["text"].splitlines() if line.endswith(" |")
    ][1:]
    assert [row[2] for row in rows] == ["0", "2", "0", "0", "2", "2", "0", "2"], (
        "kills of every run"
    )
    assert {row[-1] for row in rows} == {"equal"}
    assert saved["text"].count("no step waits longer than the undisturbed run's p99") == 4
    assert sorted(name.partition("-faults-")[2] for name in saved["plots"]) == sorted(faults.PLOTS)
    assert all(text.startswith("<svg") for text in saved["plots"].values())


def test_a_run_of_faults_that_would_end_before_they_are_over_is_refused() -> None:
    refused = CliRunner().invoke(faults.main, ["--steps", "18", "--loaders", "2"])
    assert refused.exit_code == 2
    assert "--steps" in refused.output


def test_the_autoscale_benchmark_launches_with_defaults_and_counts_the_start_as_waiting() -> None:
    """Threads are left to the package: set to one, they would hide that code which holds the
    interpreter lock needs processes.
    """
    setting = autoscale.Setting(
        folder=Path(),
        hosts=3,
        steps=4,
        step_s=0.1,
        costs=dict.fromkeys(autoscale.LIGHT, 1e-3),
        samples=8,
    )
    assert autoscale.options_of("autoscale", setting) == {"hosts": 3, "autoscale": True}
    assert autoscale.options_of("off", setting) == {"hosts": 3, "autoscale": False}
    assert list(autoscale.provisions(setting)) == ["worst case", "average", "off", "autoscale"]
    assert autoscale.hashed in autoscale.CODE.values()
    done = autoscale.Outcome(
        "autoscale", waits=[2.0, 0.5, 0.0], at=[2.0, 2.6, 2.7], seen=[(1.0, 1), (2.0, 3), (3.0, 3)]
    )
    assert (done.start_s, done.waited(), done.loader_seconds) == (2.0, 2.5, 4.0)
    found = dict(zip(autoscale.HEAD, autoscale.row(done, done, setting), strict=True))
    assert (found["start s"], found["trainer waited s"], found["longest wait after start s"]) == (
        "2.00",
        "2.50",
        "0.50",
    )
