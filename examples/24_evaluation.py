"""Evaluate while training: both jobs in one process, and the same loss on every mesh.

The evaluation is one pass in file order. Its loss is the sum over documents, in float64 and rounded
once, divided by the number of predicted tokens. So neither ranks nor microbatches change it.

Run it: python examples/24_evaluation.py
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import overlord as ov
import overlord.torch as ot

VOCABULARY, EVERY = 64, 20


def write_documents(path: Path, documents: int, seed: int) -> str:
    """Write documents that count upwards: a model that sees one token can learn them."""
    chance = random.Random(seed)
    starts = [(chance.randrange(VOCABULARY), chance.randrange(2, 60)) for _ in range(documents)]
    rows = ({"tokens": [(a + i) % VOCABULARY for i in range(n)]} for a, n in starts)
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


class Metric:
    """Token-weighted loss: sums of documents, which are added exactly at the end."""

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.tokens = 0

    def add(self, model: torch.nn.Module, steps: Iterable[Any]) -> None:
        """Add the documents of these steps. Empty microbatches add nothing."""
        with torch.no_grad():
            for step in steps:
                for mb in step:
                    losses = ot.token_losses(model(mb["tokens"]), mb["labels"])
                    self.sums += [
                        losses[p.offset : p.offset + p.length].sum().item() for p in mb.samples
                    ]
                    self.tokens += int((mb["labels"] != -100).sum())

    @property
    def loss(self) -> float:
        return math.fsum(self.sums) / self.tokens


def on_mesh(job: ov.Job, model: torch.nn.Module) -> Metric:
    """Evaluate on all ranks of the job's mesh, which are in this process here.

    With a process per rank each has its own sums: torch.distributed.all_gather_object(sums, ...).
    """
    metric = Metric()
    with ov.launch(job) as session:
        clients = [session.client(rank) for rank in range(job.place.world_size)]
        while steps := [step for client in clients if (step := next(client, None)) is not None]:
            assert len(steps) == len(clients), "every rank ends at the same step"
            metric.add(model, map(ot.TensorStep.of, steps))
    return metric


def main() -> None:
    with tempfile.TemporaryDirectory() as tmp:
        train = ov.Source("count", write_documents(Path(tmp) / "train.jsonl", 400, 1))
        valid = ov.Source("count", write_documents(Path(tmp) / "valid.jsonl", 50, 2))
        batch = ov.Batch(samples=16, microbatches=2, context=512)
        job = ov.Job(name="train", sources=[train], batch=batch, until=3 * EVERY)
        evaluation = ov.evaluation(valid, batch)

        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, 32), torch.nn.Linear(32, VOCABULARY)
        ).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        options = {"cache_dir": f"{tmp}/cache", "workers": 2}
        with ot.Loader(job, **options) as training, ot.Loader(evaluation, **options) as evaluating:
            for step in training:
                optimizer.zero_grad()
                for mb in step:
                    logits = model(mb["tokens"])
                    ot.token_loss(logits, mb["labels"], step.global_valid_tokens).backward()
                optimizer.step()
                if (step.step + 1) % EVERY == 0:
                    metric = Metric()
                    metric.add(model, evaluating)  # a whole pass, from the first step on
                    print(f"step {step.step}: {metric.tokens} tokens, loss {metric.loss:.3f}")

        losses = {}
        for dp in (1, 2, 4, 16):
            found = on_mesh(ov.evaluation(valid, batch, ov.Mesh(dp=dp)), model)
            losses[dp] = found.loss
            print(f"dp={dp}: {found.tokens} tokens, loss {found.loss:.15f}")
        equal = all(abs(loss - losses[1]) <= 1e-12 * losses[1] for loss in losses.values())
        print(f"equal on every mesh: {equal}")


if __name__ == "__main__":
    main()
