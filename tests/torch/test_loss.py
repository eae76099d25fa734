"""The loss is summed over tokens and divided by those of the whole step, so no placement of samples
changes the gradient.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
import overlord.torch as ot
from tests.torch.jobs import VOCAB, text_job

torch = pytest.importorskip("torch")
F = torch.nn.functional


def tiny() -> Any:
    """A word, and a running mean of the words before it in its document: enough for documents to
    matter.
    """
    torch.manual_seed(1)
    return torch.nn.ModuleDict(
        {"words": torch.nn.Embedding(VOCAB, 8), "out": torch.nn.Linear(8, VOCAB)}
    ).double()


def logits_of(model: Any, mb: Any) -> Any:
    parts = [
        model["words"](tokens)
        for tokens in mb["tokens"].tensor_split(mb["cu_seqlens_padded"][1:-1].long())
    ]
    means = [part.cumsum(0) / torch.arange(1, len(part) + 1).double()[:, None] for part in parts]
    return model["out"](torch.cat(means))


def gradients(job: ov.Job, **how: Any) -> list[tuple[dict[str, Any], float]]:
    """Gradient and loss of every step with the same weights, added up over ranks as a trainer
    would.
    """
    model, world = tiny(), job.place.world_size
    found = []
    with ov.launch(job) as session:
        for steps in zip(*[session.client(rank) for rank in range(world)], strict=True):
            model.zero_grad()
            total = 0.0
            for step in steps:
                for mb in ot.TensorStep.of(step):
                    loss = ot.token_loss(
                        logits_of(model, mb), mb["labels"], step.global_valid_tokens, **how
                    )
                    loss.backward()
                    total += loss.item()
            averaged = world if how.get("gradients") == "mean" else 1
            found.append(
                (
                    {name: p.grad / averaged for name, p in model.named_parameters()},
                    total / averaged,
                )
            )
    return found


PLACEMENTS = {
    "one rank": (1, "vanilla", {}, {}),
    "two ranks, as they come": (2, "vanilla", {}, {}),
    "three ranks, balanced": (3, "llm_balance", {"microbatches": 1}, {}),
    "four ranks, packed, five microbatches, averaged": (
        4,
        "packed",
        {"microbatches": 5},
        {"gradients": "mean", "dp_size": 4},
    ),
    "two ranks, balanced, documents padded, in chunks": (
        2,
        "llm_balance",
        {"pad_multiple": 8},
        {"chunk": 60},
    ),
}


def test_gradients_are_equal_with_any_placement(tmp_path: Path):
    """To 1e-13, in float64."""
    every = {}
    for name, (dp, strategy, batch, how) in PLACEMENTS.items():
        job = text_job(tmp_path, dp=dp, until=3, **batch)
        every[name] = gradients(
            ov.Job(
                **{f: getattr(job, f) for f in job.__dataclass_fields__} | {"strategy": strategy}
            ),
            **how,
        )
    wanted = every.pop("one rank")
    for name, found in every.items():
        for (grads, loss), (want, total) in zip(found, wanted, strict=True):
            assert loss == pytest.approx(total, abs=1e-13), name
            for key in want:
                assert torch.allclose(grads[key], want[key], atol=1e-13, rtol=0), name


def test_a_mean_over_each_microbatch_would_not_be(tmp_path: Path):
    """What the test above must notice."""
    model, found = tiny(), []
    for dp in (1, 2):
        with ov.launch(text_job(tmp_path, dp=dp, until=1)) as session:
            model.zero_grad()
            for client in [session.client(rank) for rank in range(dp)]:
                for mb in ot.TensorStep.of(next(client)):
                    (F.cross_entropy(logits_of(model, mb), mb["labels"]) / (2 * dp)).backward()
        found.append(model["out"].weight.grad.clone())
    assert not torch.allclose(*found, atol=1e-6)


@given(st.integers(1, 40), st.integers(1, 50), st.booleans(), st.integers(0, 5))
def test_chunks_change_neither_losses_nor_gradients(
    tokens: int, chunk: int, by_head: bool, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.randint(0, 11, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = -100
    whole = F.cross_entropy(hidden @ weight.T, labels, ignore_index=-100, reduction="none")
    if by_head:
        found = ot.token_losses(hidden, labels, head=lambda rows: rows @ weight.T, chunk=chunk)
    else:
        found = ot.token_losses(hidden @ weight.T, labels, chunk=chunk)
    assert torch.allclose(found, whole, atol=1e-12)
    weights = torch.arange(1.0, tokens + 1).double()
    wanted = torch.autograd.grad((whole * weights).sum(), (hidden, weight))
    for a, b in zip(
        torch.autograd.grad((found * weights).sum(), (hidden, weight)), wanted, strict=True
    ):
        assert torch.allclose(a, b, atol=1e-12)


def test_half_precision_is_summed_in_single():
    logits = torch.randn(6, 9, dtype=torch.bfloat16)
    labels = torch.tensor([0, 1, -100, 3, 4, 5])
    found = ot.token_losses(logits, labels, chunk=4)
    assert found.dtype == torch.float32
    assert torch.allclose(found, F.cross_entropy(logits.float(), labels, reduction="none"))


def test_logits_and_losses_of_tokens_give_the_same_loss_in_any_shape():
    logits, labels = torch.randn(1, 5, 7), torch.tensor([[1, -100, 3, 0, 2]])
    losses = F.cross_entropy(logits[0], labels[0], reduction="none", ignore_index=-100)
    wanted = float(losses.sum() / 9)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    dirty = losses + (1 - mask) * 5  # a model's own losses need not know of labels
    for found in (
        ot.token_loss(logits, labels, 9),
        ot.token_loss(logits[0], labels[0], 9),
        ot.token_loss(dirty, labels, 9),
        ot.token_loss(dirty, None, 9, loss_mask=mask),
        ot.token_loss(logits, labels, 9, gradients="mean", dp_size=4) / 4,
    ):
        assert float(found) == pytest.approx(wanted, rel=1e-6)


def test_a_step_without_labels_has_no_loss_and_no_division_by_nothing():
    assert float(ot.token_loss(torch.randn(3, 4), torch.full((3,), -100), 0)) == 0.0


def test_what_cannot_be_meant_is_refused():
    logits, labels = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    for words, call in {
        "gradients: expected one of sum, mean, got 'total'": lambda: ot.token_loss(
            logits, labels, 1, gradients="total"
        ),
        "dp_size: expected the number of ranks": lambda: ot.token_loss(
            logits, labels, 1, gradients="mean"
        ),
        "expected labels, or loss_mask with losses of tokens, got neither": lambda: ot.token_loss(
            torch.zeros(3), None, 1
        ),
        "labels: expected as many as rows of logits, 3, got 2": lambda: ot.token_losses(
            logits, labels[:2]
        ),
        "chunk: expected at least 1": lambda: ot.token_losses(logits, labels, chunk=0),
    }.items():
        with pytest.raises(ov.JobError, match=words):
            call()


# by source


def by_hand(losses: list[np.ndarray], step: ov.Step) -> dict[str, float]:
    """Sample by sample."""
    sums: dict[str, list[float]] = {}
    for values, mb in zip(losses, step, strict=True):
        labels, flat = mb["labels"].reshape(-1), values.reshape(-1)
        width = mb["tokens"].shape[-1] if mb["tokens"].ndim == 2 else 1
        for piece in mb.samples:
            at = slice(piece.offset * width, piece.offset * width + piece.length)
            has = labels[at] != -100
            sums.setdefault(piece.sample.source, []).extend(flat[at][has].tolist())
    return {
        k: v
        for name, all_ in sums.items()
        if all_
        for k, v in ((f"loss/{name}", np.mean(all_)), (f"tokens/{name}", len(all_)))
    }


@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"pad_multiple": 4},
        {"layout": "padded", "context": 48},
        {"samples": 1, "microbatches": 3},
    ],
)
def test_losses_of_sources_are_those_of_their_samples(tmp_path: Path, batch: dict[str, Any]):
    job = text_job(tmp_path, until=3, **batch)
    with ov.launch(job) as session:
        client = session.client(0)
        for step in client:
            losses = [torch.rand(mb["labels"].shape, dtype=torch.float64) for mb in step]
            found = ot.source_losses(losses, list(ot.TensorStep.of(step)), job.names)
            assert found == pytest.approx(by_hand([x.numpy() for x in losses], step), abs=1e-12)
            client.report(step.step, found)
            one = ot.source_losses(losses[0], step[0], job.names)
            assert sum(one.get(f"tokens/{name}", 0) for name in job.names) == int(
                (step[0]["labels"] != -100).sum()
            )


def test_losses_of_slices_add_up_to_those_of_the_whole(tmp_path: Path):
    """Context parallelism: every rank has some of the tokens, and says which."""
    job = text_job(tmp_path, until=1)
    with ov.launch(job) as session:
        mb = dict(next(session.client(0))[0])
    losses = torch.rand(len(mb["tokens"]), dtype=torch.float64)
    whole = ot.source_losses(losses, mb, job.names)
    order = np.random.default_rng(0).permutation(len(losses))
    parts = []
    for places in np.array_split(order, 3):
        part = mb | {
            key: mb[key][places] for key in ("tokens", "labels", "loss_mask", "position_ids")
        }
        parts.append((losses[torch.tensor(places)], part, places))
    slices = ot.source_losses(
        *([p[i] for p in parts] for i in (0, 1)), job.names, positions=[p[2] for p in parts]
    )
    assert slices == pytest.approx(whole, abs=1e-12)


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ov.JobError, match="got 1 losses, 0 microbatches, 0 positions"):
        ot.source_losses([torch.zeros(1)], [], ["web"])
    assert ot.source_losses([], [], ["web"]) == {}


def test_losses_of_a_slice_need_the_places_of_its_tokens():
    """Its tokens would be counted for the sources of others."""
    mb = {
        "labels": torch.tensor([1, 2, 3, 4]),
        "source_ids": torch.tensor([0, 1]),
        "cu_seqlens": torch.tensor([0, 4, 8]),
        "cu_seqlens_padded": torch.tensor([0, 4, 8]),
    }
    with pytest.raises(ov.JobError, match="positions: expected those of a slice of 4 of 8 tokens"):
        ot.source_losses(torch.ones(4), mb, ["web", "code"])
    found = ot.source_losses(torch.ones(4), mb, ["web", "code"], positions=[0, 3, 4, 7])
    assert found == {"loss/web": 1.0, "tokens/web": 2.0, "loss/code": 1.0, "tokens/code": 2.0}


def test_a_loss_that_is_masked_may_be_infinite():
    losses = torch.tensor([1.0, torch.inf, torch.nan, 3.0], requires_grad=True)
    loss = ot.token_loss(losses, None, 4, loss_mask=torch.tensor([1.0, 0.0, 0.0, 0.5]))
    loss.backward()
    assert loss.item() == 2.5 / 4
    assert losses.grad.tolist() == [0.25, 0.0, 0.0, 0.125]


def test_the_loss_mask_weighs_the_losses_of_a_job(tmp_path: Path) -> None:
    """Gradients equal those of a plain program that goes sample by sample, on any placement."""
    rng = np.random.default_rng(3)
    rows = [
        {"ids": rng.integers(1, VOCAB, n).tolist(), "w": (rng.integers(0, 4, n) * 0.3).tolist()}
        for n in rng.integers(2, 20, 24).tolist()
    ]
    source = ov.Source.from_dataset("web", rows, transforms=[ov.Tokens("ids", loss="w")], epochs=1)
    model = tiny()
    for dp, strategy in ((1, "packed"), (2, "llm_balance")):
        job = ov.Job(
            name="weights",
            sources=[source],
            batch=ov.Batch(samples=12, context=32),
            place=ov.Mesh(dp=dp),
            strategy=strategy,
        )
        with ov.launch(job) as session:
            clients = [session.client(rank) for rank in range(dp)]
            for steps in zip(*clients, strict=True):
                model.zero_grad()
                for step in steps:
                    for mb in ot.TensorStep.of(step):
                        valid = step.global_valid_tokens
                        logits, mask = logits_of(model, mb), mb["loss_mask"]
                        ot.token_loss(logits, mb["labels"], valid, loss_mask=mask).backward()
                found = [p.grad.clone() for p in model.parameters()]
                chosen = [rows[p.sample.row] for step in steps for mb in step for p in mb.samples]
                expected = weighted_gradients(model, chosen)
                for a, b in zip(found, expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def weighted_gradients(model: Any, rows: list[dict[str, Any]]) -> list[Any]:
    """Return the gradients of the weighted mean loss, row by row in plain torch."""
    model.zero_grad()
    losses, total = [], 0.0
    for row in rows:
        ids, weights = torch.tensor(row["ids"]), torch.tensor(row["w"]).float().double()
        one = {"tokens": ids, "cu_seqlens_padded": torch.tensor([0, len(ids)])}
        losses.append(
            F.cross_entropy(logits_of(model, one)[:-1], ids[1:], reduction="none") * weights[1:]
        )
        total += float(weights[1:].sum())
    (torch.cat(losses).sum() / total).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_a_loss_that_would_ignore_weights_is_refused() -> None:
    logits, labels = torch.zeros(3, 5), torch.tensor([1, 2, -100])
    with pytest.raises(ov.JobError, match=r"pass loss_mask=mb\['loss_mask'\]"):
        ot.token_loss(logits, labels, 1.5)
    half = ot.token_loss(logits, labels, 0.5, loss_mask=torch.tensor([0.5, 0.0, 0.0]))
    torch.testing.assert_close(half, torch.log(torch.tensor(5.0)))  # the sum may be below 1
    assert ot.token_loss(logits, labels, 0, loss_mask=torch.zeros(3)) == 0
