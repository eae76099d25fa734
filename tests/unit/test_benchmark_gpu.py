"""The programs for a GPU cannot rot: their tiny runs pass on a CPU, every sample is run once, and
their tables agree with hand work.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

pytest.importorskip("torch")

import torch

import overlord as ov
from gpu import plans, train, vlm
from gpu.bench import by_microbatch, in_turn
from gpu.model import TINY, TINY_VIT, Packed, Shape, Stack, made
from gpu.timing import median_seconds

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [TINY, TINY_VIT], ids=["causal", "bidirectional"])
def test_documents_of_a_microbatch_do_not_see_each_other(shape: Shape) -> None:
    stack = made(Stack(shape, 16 if shape.causal else 0), CPU, torch.float32)
    x = torch.randn(12, shape.hidden, generator=torch.Generator().manual_seed(0))
    together = stack(x, Packed.of([5, 7], CPU))
    apart = [stack(part, Packed.of([len(part)], CPU)) for part in x.split([5, 7])]
    torch.testing.assert_close(together, torch.cat(apart))
    assert not torch.allclose(together, stack(x, Packed.of([12], CPU)))


@pytest.mark.parametrize("name", ["vanilla", "packed", "balanced, FLOPs", "balanced, fitted"])
def test_every_sample_of_a_step_is_run_once_and_no_microbatch_is_too_long(name: str) -> None:
    case = plans.Case(context=512, per_rank=3, ranks=4)
    buffer = case.buffer(0)
    ranks = by_microbatch(plans.strategies(ov.cost.tokens)[name](buffer, ov.ClientPlaceTree(dp=4)))
    run = np.sort(np.concatenate([m for rank in ranks for m in rank if not np.array_equal(m, [1])]))
    assert np.array_equal(run, np.sort(buffer.column("tokens")))
    assert len({len(rank) for rank in ranks}) == 1
    assert all(0 < m.sum() <= 512 for rank in ranks for m in rank)


def test_pieces_of_the_encoder_hold_every_image_and_no_more_than_fits() -> None:
    case = vlm.Case(profile="navit", context=4096, per_rank=4, ranks=4)
    costs = vlm.Costs(fitted(column="image_patches"), fitted())
    wanted = np.sort(case.samples(0).images.values)
    for way in vlm.ways(costs).values():
        pieces = vlm.encoder_pieces(way.plan(case.buffer(0), ov.ClientPlaceTree(dp=4)), 4096)
        parts = [part for rank in pieces for goes in rank for part in goes]
        assert all(part.sum() <= 4096 for part in parts)
        assert np.array_equal(np.sort(np.concatenate(parts)), wanted)


def fitted(**more: Any) -> ov.cost.Fitted:
    return ov.cost.Fitted(
        linear=1e-6,
        square=1e-10,
        constant=0.0,
        worst_error=0.0,
        mean_error=0.0,
        measurements=4,
        **more,
    )


def test_lengths_are_packed_as_they_come() -> None:
    assert [m.tolist() for m in in_turn(np.array([3, 4, 5, 1, 8]), 8, 0)] == [[3, 4], [5, 1], [8]]
    assert len(in_turn(np.array([3, 4, 5, 1, 8]), 8, 2)) == 2


def test_times_belong_to_their_pieces_in_whatever_order_they_ran() -> None:
    ran: list[int] = []
    found = median_seconds([lambda i=i: ran.append(i) for i in range(5)], CPU, passes=3)
    assert sorted(ran) == sorted([0, 1, 2, 3, 4] * 3)
    assert ran[:5] != ran[5:10] or ran[5:10] != ran[10:]
    assert len(found) == 5


def test_gains_are_over_the_slowest_rank_of_the_others() -> None:
    case = plans.Case(context=8192, per_rank=16, ranks=2)

    def step(strategy: str, *measured: float) -> plans.Outcome:
        return plans.Outcome(
            case=case,
            seed=0,
            strategy=strategy,
            microbatches=3,
            measured=list(measured),
            told=list(measured),
        )

    found = [
        step("vanilla", 1.0, 3.0),
        step("packed", 1.5, 2.5),
        step("balanced, fitted", 1.99, 2.01),
    ]
    rows = {row[2]: dict(zip(plans.HEAD, row, strict=True)) for row in plans.rows_of(found)}
    assert rows["vanilla"]["slowest over mean"] == "1.5000"
    assert rows["balanced, fitted"]["x vanilla"] == "1.49"
    assert rows["balanced, fitted"]["x packed"] == "1.24"
    assert rows["balanced, fitted"][f"under {plans.TARGET}"] == "met"


def test_where_outputs_are_exchanged_ranks_wait_for_each_other_twice() -> None:
    parts: dict[str, Any] = {
        "case": vlm.CASES[0],
        "seed": 0,
        "strategy": "vanilla",
        "microbatches": 2,
    }
    times = {"encoder_by": [[0.5, 0.5], [1.0, 2.0]], "backbone_by": [[3.0, 1.0], [0.5, 0.5]]}
    apart, together = (
        vlm.Outcome(**parts, **times, exchanged=False),
        vlm.Outcome(**parts, **times, exchanged=True),
    )
    assert (apart.iteration, together.iteration) == (5.0, 3.0 + 4.0)
    assert (apart.met, together.met) == (3.5 + 2.5, 1.0 + 2.0 + 3.0 + 1.0)


def test_an_encoder_that_runs_once_a_step_runs_before_the_first_microbatch() -> None:
    parts: dict[str, Any] = {
        "case": vlm.CASES[0],
        "seed": 0,
        "strategy": "joint",
        "microbatches": 2,
        "exchanged": False,
    }
    assert (
        vlm.Outcome(**parts, encoder_by=[[1.0], [3.0]], backbone_by=[[4.0, 1.0], [1.0, 2.0]]).met
        == 5.0 + 2.0
    )


def test_tiny_plans_run_on_a_cpu(tmp_path: Path) -> None:
    found = plans.main(["--device", "cpu", "--tiny", "--out", str(tmp_path)])
    assert {o.strategy for o in found} == set(plans.strategies(ov.cost.tokens))
    assert all(len(o.measured) == 4 and min(o.measured) > 0 for o in found)
    assert len(list(tmp_path.glob("*-gpu-plans-*.md"))) == 1


def test_a_tiny_encoder_and_backbone_run_on_a_cpu(tmp_path: Path) -> None:
    found = vlm.main(["--device", "cpu", "--tiny", "--out", str(tmp_path)])
    assert [o.strategy for o in found] == [
        "vanilla",
        "backbone",
        "hybrid",
        "joint",
        "hybrid, by microbatch",
    ]
    assert len(list(tmp_path.glob("*-gpu-vlm-*.md"))) == 1


def test_a_tiny_training_is_fed_the_same_steps_with_and_without_a_loader(tmp_path: Path) -> None:
    feeds = "resident,overlord-local,torch-no-worker"
    found = train.main(
        [
            "--device",
            "cpu",
            "--tiny",
            "--feeds",
            feeds,
            "--data",
            str(tmp_path / "data"),
            "--out",
            str(tmp_path),
        ]
    )
    resident, ours, theirs = found
    assert ours.tokens == resident.tokens
    assert all(
        0 <= wait < step for f in found for wait, step in zip(f.wait_s, f.step_s, strict=True)
    )
    assert "*" not in train.rows_of(found)[1][train.HEAD.index("x resident")]
    assert len(ours.idle_s) == len(ours.step_s) - 1
    assert theirs.tokens != resident.tokens
    assert len(list(tmp_path.glob("*-gpu-train-*.md"))) == 1
