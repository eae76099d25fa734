"""Compile a model once: chunks of one stream of tokens, in shapes that never change.

Documents are cut at the end of a chunk and continue in the next one. No chunk has padding, and
the last token of a piece still has its label. Needs torch.

Run it: python examples/20_packing.py
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

import overlord as ov
import overlord.torch as ot

VOCAB, CONTEXT, STEPS = 64, 128, 20


def documents(n: int, seed: int) -> list[dict[str, list[int]]]:
    """Return documents that count upwards; some are longer than a chunk."""
    chance = np.random.default_rng(seed)
    starts, lengths = chance.integers(0, VOCAB, n), chance.choice((5, 20, 60, 300), n)
    return [
        {"tokens": ((start + np.arange(length)) % VOCAB).tolist()}
        for start, length in zip(starts, lengths, strict=True)
    ]


class Model(torch.nn.Module):
    """One layer of attention inside documents."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(VOCAB, 32)
        self.out = torch.nn.Linear(32, VOCAB)

    def forward(self, tokens: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        at = torch.arange(len(tokens))
        document = torch.searchsorted(bounds[1:], at, right=True)
        sees = (document[:, None] == document[None]) & (at[:, None] >= at[None])
        x = self.words(tokens)
        return self.out(x + F.scaled_dot_product_attention(x, x, x, attn_mask=sees))


def main() -> None:
    job = ov.Job(
        name="packing",
        sources=[
            ov.Source.from_dataset("web", documents(200, 0), weight=0.7),
            ov.Source.from_dataset("code", documents(200, 1), weight=0.3),
        ],
        batch=ov.Batch(
            samples=8,  # chunks
            context=CONTEXT,
            packing="concat",
            shape="fixed",
            max_documents=32,
        ),
        max_document=4096,
        until=STEPS,
    )
    torch.manual_seed(0)
    model, compilations = Model(), 0

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        nonlocal compilations
        compilations += 1
        return graph

    compiled = torch.compile(model, backend=counting)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    continued = 0
    with ov.launch(job) as session:
        for step in session.client(0):
            total = 0.0
            for mb in step:
                tokens, labels, bounds = (
                    torch.tensor(mb[key], dtype=torch.int64)
                    for key in ("tokens", "labels", "cu_seqlens_padded")
                )
                logits = compiled(tokens, bounds)
                loss = ot.token_loss(logits, labels, step.global_valid_tokens)
                loss.backward()
                total += loss.item()
                continued += int((mb.begins > 0).sum())
            optimizer.step()
            optimizer.zero_grad()
            if step.step in (0, STEPS - 1):
                print(f"step {step.step}: loss {total:.2f}")
    print(f"{continued} pieces continue a document of an earlier chunk")
    print(f"compiled {compilations} time(s) for {STEPS * 8} microbatches")


if __name__ == "__main__":
    main()
