"""Fixed shapes under torch.compile: one compilation for all steps. Pieces keep their labels."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import overlord as ov
import overlord.torch as ot
from overlord.errors import JobError
from overlord.torch.adapters import huggingface, megatron, torchtitan

torch = pytest.importorskip("torch")
VOCAB, CONTEXT, STEPS = 64, 96, 50


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    lengths = random.choice((3, 9, 20, 70, 150), n)
    return [{"tokens": random.integers(0, VOCAB, length).tolist()} for length in lengths]


def job(**changes: Any) -> ov.Job:
    batch = {"samples": 6, "microbatches": 2, "context": CONTEXT, "max_documents": 24}
    batch |= {"shape": "fixed", "packing": "concat"} | changes
    sources = [ov.Source.from_dataset(name, rows(400, i)) for i, name in enumerate("ab")]
    return ov.Job(
        name="shapes",
        sources=sources,
        batch=ov.Batch(**{k: v for k, v in batch.items() if v is not None}),
        look_ahead=2 if batch["packing"] == "documents" and batch["shape"] == "fixed" else 1,
        until=STEPS,
    )


class Tiny(torch.nn.Module):
    """One layer of attention inside documents: positions, bounds and lengths reach the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(VOCAB, 8)
        self.out = torch.nn.Linear(8, VOCAB)

    def forward(self, tokens: Any, positions: Any, bounds: Any, longest: int) -> Any:
        document = torch.searchsorted(bounds[1:], torch.arange(len(tokens)), right=True)
        sees = (document[:, None] == document[None]) & torch.ones(
            len(tokens), len(tokens), dtype=torch.bool
        ).tril()
        x = self.words(tokens) + positions[:, None] / longest
        return self.out(torch.nn.functional.scaled_dot_product_attention(x, x, x, sees))


def compilations(made: ov.Job) -> tuple[int, int]:
    """How often a model is compiled over all microbatches of a job, and their number."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter, n = CompileCounter(), 0
    model: Callable[..., Any] = torch.compile(Tiny(), backend=counter, fullgraph=True)
    with ov.launch(made) as session, torch.no_grad():
        for step in session.client(0):
            for mb in step:
                tokens, positions, bounds = (
                    torch.from_numpy(np.array(mb[key]))
                    for key in ("tokens", "position_ids", "cu_seqlens_padded")
                )
                model(tokens, positions, bounds.long(), int(mb["max_seqlen"]))
                n += 1
    return counter.frame_count, n


@pytest.mark.parametrize(("packing", "microbatches"), [("concat", 6), ("documents", 2)])
def test_a_compiled_model_is_compiled_once_for_all_steps(packing: str, microbatches: int) -> None:
    assert compilations(job(packing=packing)) == (1, STEPS * microbatches)


def test_free_shapes_compile_more_than_once() -> None:
    assert compilations(job(packing="documents", shape="free", max_documents=None))[0] > 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_training_of_compiled_code_generates_it_once_and_has_the_losses_of_plain_code() -> None:
    from torch._dynamo.utils import counters

    losses: list[list[float]] = []
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Tiny()
        call: Callable[..., Any] = torch.compile(model, fullgraph=True) if compiled else model
        optimizer, own = torch.optim.SGD(model.parameters(), lr=0.5), []
        with ov.launch(job(samples=2)) as session:
            for step in session.client(0):
                total = 0.0
                for mb in step:
                    tokens, positions, bounds, labels = (
                        torch.from_numpy(np.array(mb[key]))
                        for key in ("tokens", "position_ids", "cu_seqlens_padded", "labels")
                    )
                    logits = call(tokens, positions, bounds.long(), int(mb["max_seqlen"]))
                    loss = ot.token_loss(logits, labels, step.global_valid_tokens)
                    loss.backward()
                    total += loss.item()
                optimizer.step()
                optimizer.zero_grad()
                own.append(total)
        losses.append(own)
        assert counters["stats"]["unique_graphs"] == int(compiled)
    assert len(losses[1]) == STEPS
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


def first_steps(made: ov.Job, n: int = 4) -> list[ov.Microbatch]:
    with ov.launch(made) as session:
        client = session.client(0)
        return [mb for _ in range(n) for mb in next(client)]


def test_megatron_and_torchtitan_get_tensors_of_equal_shapes() -> None:
    shapes = set()
    for mb in first_steps(job()):
        params = megatron.packed_seq_params(mb)
        inputs, labels = torchtitan.flat(mb)
        assert int(params.max_seqlen_q) == CONTEXT
        assert not megatron.padding_mask(mb).any(), "a chunk has no padding"
        shapes.add(
            (
                *((key, tuple(t.shape)) for key, t in megatron.packed(mb).items()),
                *(tuple(t.shape) for t in (*inputs.values(), labels, params.cu_seqlens_q)),
            )
        )
        assert (labels == torch.from_numpy(np.array(mb["labels"]))[None]).all()
    assert len(shapes) == 1


def test_labels_behind_a_piece_are_never_dropped_by_a_conversion() -> None:
    cut = [mb for mb in first_steps(job()) if mb["labels"][-1] != -100]
    assert cut, "some chunk ends inside a sample"
    with pytest.raises(JobError, match="expected whole samples, got pieces"):
        huggingface.flattened(cut[0])
    for mb in first_steps(job(labels="unshifted")):
        made = huggingface.flattened(mb)
        starts = mb["cu_seqlens_padded"][:-1]
        assert (made["labels"][0, starts[starts < CONTEXT]] == -100).all()
        assert int((made["labels"] != -100).sum()) == int(mb["loss_mask"].sum())


def test_conversions_keep_every_label_of_whole_documents_of_fixed_shape() -> None:
    for mb in first_steps(job(packing="documents")):
        made = huggingface.flattened(mb)
        assert int((made["labels"] != -100).sum()) == int((mb["labels"] != -100).sum())
        back = megatron.packed({**mb, "labels": made["labels"][0]}, given="unshifted")
        assert back["labels"].tolist() == mb["labels"].tolist()
