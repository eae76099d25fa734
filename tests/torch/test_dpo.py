"""Preference training equals a plain loop without the package, and adapters keep its pairs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import overlord as ov  # noqa: E402
import overlord.torch as ot  # noqa: E402
from overlord.constructor.rank_views import slice_index  # noqa: E402
from overlord.torch.adapters import huggingface, megatron  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "23_dpo.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("dpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def plain_loss(dpo: Any, policy: Any, reference: Any, row: dict[str, Any]) -> Any:
    """Return the loss of one pair by a plain loop: one response after the other."""
    gains = []
    for name in ("chosen", "rejected"):
        ids = torch.tensor(row["prompt"] + row[name])
        found = []
        for model in (policy, reference):
            logits = model(ids, torch.arange(len(ids)), torch.zeros_like(ids))
            chances = torch.log_softmax(logits, -1)
            first = len(row["prompt"])
            found.append(sum(chances[t - 1, ids[t]] for t in range(first, len(ids))))
        gains.append(found[0] - found[1])
    return -torch.nn.functional.logsigmoid(dpo.BETA * (gains[0] - gains[1]))


def write(path: Path, rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Write rows as lines, and return them by their byte offset."""
    lines = list(map(json.dumps, rows))
    path.write_text("\n".join(lines))
    return {sum(len(line) + 1 for line in lines[:i]): rows[i] for i in range(len(rows))}


@pytest.mark.parametrize(
    "place", [ov.Mesh(), ov.Mesh(dp=2), ov.Mesh(dp=2, cp=2), ov.Mesh(cp=2)], ids=format
)
def test_gradients_of_every_mesh_equal_those_of_a_plain_loop(place: ov.Mesh, tmp_path: Path):
    dpo = example()
    rows = write(tmp_path / "prefs.jsonl", dpo.make_rows(40))
    job = dpo.make_job(tmp_path / "prefs.jsonl", place)
    policy, reference = dpo.make_models()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    with ov.launch(job, cache_dir=str(tmp_path / "cache")) as session:
        clients = [session.client(rank) for rank in range(place.world_size)]
        for _ in range(6):
            ranks = [next(client) for client in clients]
            optimizer.zero_grad()
            losses = [plain_loss(dpo, policy, reference, rows[s.row]) for s in drawn(ranks)]
            (sum(losses) / len(losses)).backward()
            wanted = [p.grad.clone() for p in policy.parameters()]
            optimizer.zero_grad()
            loss = (
                dpo.train_step(policy, reference, ranks)
                if place.cp == 1
                else sliced_step(dpo, policy, reference, ranks, place)
            )
            assert ranks[0].global_samples == len(losses) == job.batch.samples
            assert loss == pytest.approx(float(sum(losses)) / len(losses), abs=1e-12)
            for found, expected in zip(policy.parameters(), wanted, strict=True):
                assert torch.allclose(found.grad, expected, atol=1e-12, rtol=0)
            optimizer.step()


def drawn(ranks: list[ov.Step]) -> list[ov.SampleId]:
    """Return the samples of a step, each once."""
    return sorted({piece.sample for step in ranks for mb in step for piece in mb.samples})


def sliced_step(
    dpo: Any, policy: Any, reference: Any, ranks: list[ov.Step], place: ov.Mesh
) -> float:
    """Add the gradients of a step of slices: sums of documents are added over the cp ranks.

    Attention sees the whole microbatch, as it would through a ring.
    """
    total = 0.0
    for dp in range(place.dp):
        slices = [ranks[place.rank(dp=dp, cp=cp)] for cp in range(place.cp)]
        for parts in zip(*slices, strict=True):
            bounds = np.asarray(parts[0]["cu_seqlens_padded"])
            index = [slice_index(bounds, place.cp, r, "zigzag") for r in range(place.cp)]
            tokens, positions = (torch.empty(int(bounds[-1]), dtype=torch.int64) for _ in range(2))
            for at, part in zip(index, parts, strict=True):
                tokens[at] = torch.tensor(part["tokens"])
                positions[at] = torch.tensor(part["position_ids"])
            documents = torch.cumsum(positions == 0, 0)
            gain = torch.zeros(len(bounds) - 1, dtype=torch.float64)
            for sign, model in ((1, policy), (-1, reference)):
                logits = model(tokens, positions, documents)
                for at, part in zip(index, parts, strict=True):
                    losses = ot.token_losses(logits[at], torch.tensor(part["labels"]))
                    gain = gain - sign * ot.document_sums(losses, part, positions=at)
            roles = torch.tensor(parts[0]["roles"])
            margin = dpo.BETA * (gain[roles == 0] - gain[roles == 1])
            loss = -torch.nn.functional.logsigmoid(margin).sum() / slices[0].global_samples
            loss.backward()
            total += loss.item()
    return total


def test_the_example_prefers_the_chosen_responses(tmp_path: Path):
    dpo = example()
    write(tmp_path / "prefs.jsonl", dpo.make_rows(100))
    policy, reference = dpo.make_models()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    losses = []
    with ov.launch(dpo.make_job(tmp_path / "prefs.jsonl", ov.Mesh())) as session:
        for step in session.client(0):
            optimizer.zero_grad()
            losses.append(dpo.train_step(policy, reference, [step]))
            optimizer.step()
            counts = {len({*mb["group_ids"].tolist()}) for mb in step}
            assert counts == {8}
    assert losses[0] == pytest.approx(np.log(2), abs=1e-9)
    assert losses[-1] < 0.05


def steps_of(tmp_path: Path, **batch: Any) -> tuple[list[ov.Step], dict[int, dict[str, Any]]]:
    dpo = example()
    given = [row | {"margin": k / 4, "ref": [k, -k]} for k, row in enumerate(dpo.make_rows(5))]
    rows = write(tmp_path / "prefs.jsonl", given)
    pair = ov.Pair(prompt="prompt", values=["margin", "ref"])
    source = ov.Source("prefs", str(tmp_path / "prefs.jsonl"), transforms=[pair], epochs=1)
    size = ov.Batch(**{"samples": 3, "microbatches": 2, "context": 128} | batch)
    job = ov.Job(name="dpo", sources=[source], batch=size)
    with ov.launch(job, cache_dir=str(tmp_path / "cache")) as session:
        return list(session.client(0)), rows


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("labels", ["shifted", "unshifted"])
def test_pairs_become_rows_in_the_order_of_preference_collators(
    tmp_path: Path, layout: str, labels: str
):
    steps, rows = steps_of(tmp_path, layout=layout, labels=labels)
    seen = 0
    for mb in (mb for step in steps for mb in step):
        made = huggingface.preference(mb)
        pairs = [piece.sample.row for piece in mb.samples[::2]]
        assert len(made["input_ids"]) == 2 * len(pairs)
        seen += len(pairs)
        wanted = [
            rows[r]["prompt"] + rows[r][name] for name in ("chosen", "rejected") for r in pairs
        ]
        for i, ids in enumerate(wanted):
            n, p = len(ids), len(rows[pairs[i % len(pairs)]]["prompt"])
            assert made["input_ids"][i, :n].tolist() == ids
            assert made["attention_mask"][i].sum() == n
            expected = [0] * p + [1] * (n - p)
            assert made["completion_mask"][i].tolist()[:n] == expected
            assert not made["completion_mask"][i, n:].any()
        assert made["margin"].tolist() == 2 * [rows[r]["margin"] for r in pairs]
        assert made["ref"].tolist() == [rows[r]["ref"][k] for k in (0, 1) for r in pairs]
    assert seen == 5


def test_rows_of_preferences_need_pairs(tmp_path: Path):
    source = ov.Source.from_dataset(
        "s", [{"a": [[1, 2], [3], [4]]}], transforms=[ov.Group("a")], epochs=1
    )
    job = ov.Job(name="s", sources=[source], batch=ov.Batch(samples=1, context=64))
    with ov.launch(job) as session:
        [step] = session.client(0)
    with pytest.raises(ov.JobError, match="expected pairs, got samples with other documents"):
        huggingface.preference(step[0])


def test_megatron_gets_the_groups_of_documents_and_tensors_keep_the_samples(tmp_path: Path):
    steps, _ = steps_of(tmp_path)
    for step in steps:
        tensor_step = ot.TensorStep.of(step)
        assert tensor_step.global_samples == step.global_samples
        for mb, own in zip(tensor_step, step, strict=True):
            made = megatron.packed(mb)
            for key in ("group_ids", "roles", "prompt_lengths"):
                assert made[key].tolist() == own[key].tolist()
            assert mb.samples == own.samples
    assert [step.global_samples for step in steps] == [3, 2]


def test_sums_of_a_slice_need_positions():
    mb = {"cu_seqlens_padded": np.array([0, 4, 8], np.int32)}
    assert ot.document_sums(torch.arange(8.0), mb).tolist() == [6.0, 22.0]
    with pytest.raises(ov.JobError, match="positions: expected those of a slice of 4 of 8 tokens"):
        ot.document_sums(torch.arange(4.0), mb)
