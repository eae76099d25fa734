"""Feed a torch loop with steps.

The loss is summed over tokens and divided by the tokens of the whole step. So the placement of
samples on ranks and microbatches does not change the gradient.

Run it: python examples/02_torch_loop.py
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

import overlord as ov

VOCAB = 64


def make_rows(path: Path, rows: int) -> None:
    """Write documents that count upwards: a model that sees one token can learn them."""
    chance = random.Random(0)
    starts = [(chance.randrange(VOCAB), chance.randrange(2, 40)) for _ in range(rows)]
    path.write_text(
        "\n".join(json.dumps({"tokens": [(a + i) % VOCAB for i in range(n)]}) for a, n in starts)
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as tmp:
        make_rows(Path(tmp) / "count.jsonl", 500)
        source = ov.Source("count", f"{tmp}/count.jsonl", transforms=[ov.Tokens()])
        batch = ov.Batch(samples=32, microbatches=2, context=512)
        job = ov.Job(name="loop", sources=[source], batch=batch, place=ov.Mesh(dp=1), until=40)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 32), torch.nn.Linear(32, VOCAB))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

        with ov.launch(job, cache_dir=f"{tmp}/cache") as session:
            for step in session.client(rank=0):
                optimizer.zero_grad()
                total = 0.0
                for microbatch in step:
                    tokens, labels = (torch.tensor(microbatch[key]) for key in ("tokens", "labels"))
                    loss = (
                        F.cross_entropy(model(tokens), labels, ignore_index=-100, reduction="sum")
                        / step.global_valid_tokens
                    )
                    loss.backward()
                    total += loss.item()
                optimizer.step()
                if step.step % 13 == 0:
                    print(
                        f"step {step.step:>2}: {len(step)} microbatches, "
                        f"{step.global_valid_tokens} tokens with a loss, loss {total:.3f}"
                    )


if __name__ == "__main__":
    main()
