"""An encoder on its own mesh: apart from the backbone, inside it, or over a part of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.errors import PlanError
from tests.images import PLACEHOLDER, job
from tests.processes import WORKER_RUNTIME, launch, run, written
from tests.scenarios.test_images import APART, exchanged, in_simulation

pytestmark = pytest.mark.timeout(200)

MESHES: dict[str, tuple[ov.Mesh, ov.Mesh | None]] = {  # of the encoder, of the backbone
    "apart": (ov.Mesh(dp=2), ov.Mesh(dp=2, first_rank=2)),
    "inside": (ov.Mesh(dp=3), None),
    "over a part": (ov.Mesh(dp=3), ov.Mesh(dp=2, tp=1, first_rank=2)),
    "backbone with tp": (ov.Mesh(dp=2, first_rank=2), ov.Mesh(tp=2)),
    "encoder with tp": (ov.Mesh(tp=2), ov.Mesh(dp=2, first_rank=2)),
}


def on_meshes(encoder: ov.Mesh, backbone: ov.Mesh | None, per: str = "iteration") -> Any:
    def strategy(buffer: ov.Buffer, place: ov.Mesh) -> ov.LoadingPlan:
        drawn = ov.DGraph.from_buffer(buffer, place).mix()
        samples = drawn.select("tokens").distribute("DP", on=backbone).cost("llama_12b")
        samples = samples.balance("greedy").broadcast_at("TP")
        images = drawn.select("image_patches", merge=2).distribute("DP", on=encoder)
        images = images.balance("greedy") if per == "iteration" else images.follow(samples, per=per)
        return samples.plan(encoder=images)

    return strategy


def job_of(folder: Path, name: str, per: str = "iteration", **fields: Any) -> ov.Job:
    encoder, backbone = MESHES[name]
    usual: dict[str, Any] = {"place": ov.Mesh(dp=4), "strategy": on_meshes(encoder, backbone, per)}
    return job(folder, **(usual | fields))


def ranks_of(mesh: ov.Mesh | None) -> set[int]:
    return set(range(4)) if mesh is None else {r for ranks in mesh.buckets("DP") for r in ranks}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("per", ["iteration", "microbatch"])
def test_images_go_to_the_encoders_mesh_and_tokens_to_the_backbones(
    name: str, per: str, tmp_path: Path
) -> None:
    made, (encoder, backbone) = job_of(tmp_path, name, per), MESHES[name]
    with launch(made, "local") as session:
        clients = [session.client(rank) for rank in range(4)]
        for steps in zip(*clients, strict=True):
            plan, encoded, trained = session.plan(steps[0].step), Counter[int](), Counter[str]()
            for rank, step in enumerate(steps):
                items = [i for e in step.encoder for i in e["item_ids"].tolist()]
                encoded.update(items)
                assert not items or rank in ranks_of(encoder)
                holds = ["tokens" in mb for mb in step]
                assert all(holds) == any(holds) == (rank in plan.fetchers())
                assert rank in ranks_of(backbone) or step.served_by == -1
                for mb in step:
                    trained.update(str(p.sample) for p in mb.samples if "tokens" in mb)
                    assert len(mb.samples) == 0 or rank in ranks_of(backbone)
            assert encoded == Counter(range(len(plan.module("encoder").sample)))
            assert trained == Counter(str(plan.sample_id(i)) for i in range(len(plan)))


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("per", ["iteration", "microbatch"])
def test_rows_of_an_encoders_mesh_come_to_their_placeholders(
    name: str, per: str, tmp_path: Path
) -> None:
    made, placed, wanted = job_of(tmp_path, name, per), 0, 0
    with launch(made, "local") as session:
        clients = [session.client(rank) for rank in range(4)]
        for steps in zip(*clients, strict=True):
            session.plan(steps[0].step).routes().validate()
            for slot in range(len(steps[0].encoder)):
                for step, got in zip(steps, exchanged(steps, slot), strict=True):
                    e = step.encoder[slot]
                    rows = got[e["recv_rows"]]
                    assert rows[:, 1].tolist() == [k for n in e["out_lens"] for k in range(n)]
                    of = np.repeat(e["image_microbatch"], e["out_lens"])
                    for m in np.unique(of).tolist():
                        tokens = step[m]["tokens"][e["image_token_index"][of == m]]
                        assert (tokens == PLACEHOLDER).all()
                    placed += len(rows)
            held = (mb["tokens"] for step in steps for mb in step if "tokens" in mb)
            wanted += sum(int((tokens == PLACEHOLDER).sum()) for tokens in held)
    assert placed == wanted > 50


@pytest.mark.parametrize("name", ["apart", "over a part"])
def test_jobs_with_an_encoder_mesh_are_the_same_on_every_runtime(name: str, tmp_path: Path) -> None:
    made = job_of(tmp_path, name, broken=(1, 5))
    alone = run(made, "local")
    assert alone.error == ""
    assert in_simulation(made, 3) == alone.steps
    apart = run(made, WORKER_RUNTIME, **APART)
    assert apart.steps == alone.steps
    assert apart.states == alone.states


def test_the_samples_of_a_step_do_not_depend_on_the_meshes_of_modules(tmp_path: Path) -> None:
    def samples(made: ov.Job) -> list[list[str]]:
        found = []
        with launch(made, "local") as session:
            for step in session.client(3):
                plan = session.plan(step.step)
                found.append(sorted(str(plan.sample_id(i)) for i in range(len(plan))))
        return found

    whole = samples(job(tmp_path / "a", place=ov.Mesh(dp=4)))
    assert whole == samples(job_of(tmp_path / "a", "apart"))


def test_a_key_of_the_backbone_on_another_rank_is_refused_by_the_reason(tmp_path: Path) -> None:
    with launch(job_of(tmp_path, "apart"), "local") as session:
        [mb, *_] = next(session.client(0))
        with pytest.raises(KeyError, match="the backbone is on pp1xdp2xcp1xtp1 from rank 2"):
            mb["tokens"]
        assert "no backbone" in repr(mb)


def test_explain_names_the_ranks_and_the_mesh_of_a_module(tmp_path: Path) -> None:
    with launch(job_of(tmp_path, "apart"), "local") as session:
        next(session.client(2))
        text = str(session.explain(0))
        assert "2 buckets (DP on pp1xdp2xcp1xtp1 from rank 2)" in text
        plan = session.plan(0)
        modules = plan.summary()["modules"]
        assert modules["encoder"]["fetchers"] == [0, 1]
        assert modules["backbone"]["fetchers"] == [2, 3]
        assert plan.imbalance("encoder")["bucket"] >= 1.0
        assert sorted(plan.delivery(session.job.batch)["bytes_by_client"]) == [2, 3]
        sample = session.explain(plan.sample_id(0))
        assert set(sample.placed[0].ranks) <= {2, 3}


def test_an_encoder_mesh_beyond_a_smaller_job_ends_a_reshard(tmp_path: Path) -> None:
    with launch(job_of(tmp_path, "apart"), "local") as session:
        clients = [session.client(rank) for rank in range(4)]
        for client in clients:
            next(client)
        session.reshard(ov.Mesh(dp=3))
        with pytest.raises(PlanError, match=r"expected ranks 0 to 2 of the job's mesh"):
            next(session.client(0))


def test_without_broadcasts_every_rank_of_the_backbone_has_its_own_arrays(tmp_path: Path) -> None:
    made = job_of(tmp_path, "backbone with tp")
    with launch(made, "local", broadcast=False) as session:
        for steps in zip(*[session.client(rank) for rank in range(4)], strict=True):
            assert [["tokens" in mb for mb in step] for step in steps] == [
                [rank < 2] * len(steps[0]) for rank in range(4)
            ]
            for first, second in zip(*steps[:2], strict=True):
                assert (first["tokens"] == second["tokens"]).all()
            assert not any(len(step.encoder[0]["item_ids"]) for step in steps[:2])


@pytest.mark.parametrize("victim", ["loader-worker/0", "constructor-worker/0"])
def test_a_killed_worker_does_not_change_what_the_meshes_get(victim: str, tmp_path: Path) -> None:
    made = job_of(tmp_path, "over a part", until=8)
    wanted = run(made, "local").steps
    found: dict[int, list[Any]] = {rank: [] for rank in range(4)}
    with launch(made, WORKER_RUNTIME, **APART) as session:
        clients = [session.client(rank) for rank in range(4)]
        for steps in zip(*clients, strict=True):
            for rank, step in enumerate(steps):
                found[rank].append(written(step))
            if steps[0].step == 2:
                session.kill(victim)
    assert found == wanted
