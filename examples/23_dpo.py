"""Direct preference optimization (Rafailov et al., 2023): pairs of responses on two ranks.

Both responses of a pair are in one microbatch, so its loss needs no other rank. The losses of all
ranks sum to the mean over the pairs of the step, whatever the mesh and the microbatches.

Run it: python examples/23_dpo.py
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import overlord as ov
import overlord.torch as ot

STEPS, VOCABULARY, BETA = 20, 32, 0.5


def make_rows(count: int) -> list[dict[str, Any]]:
    """Return pairs of ids: the chosen response counts up from the prompt, the other one down."""
    chance = random.Random(0)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        first, n = chance.randrange(8, 24), chance.randint(2, 6)
        up = [(first + k) % VOCABULARY for k in range(1, n + 1)]
        down = [(first - k) % VOCABULARY for k in range(1, chance.randint(2, 6) + 1)]
        rows.append({"prompt": [1, first], "chosen": up, "rejected": down})
    return rows


class Model(torch.nn.Module):
    """One block of causal attention, which stays inside documents."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.positions = torch.nn.Embedding(64, width)
        self.mix = torch.nn.Linear(width, 3 * width)
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor
    ) -> torch.Tensor:
        """Return logits [tokens, vocabulary]; ``documents`` numbers the document of each token."""
        x = self.tokens(tokens) + self.positions(positions)
        q, k, v = self.mix(x).chunk(3, dim=-1)
        order = torch.arange(len(tokens))
        seen = (documents[:, None] == documents) & (order[:, None] >= order)
        scores = (q @ k.T / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
        return self.head(x + scores.softmax(-1) @ v)


def make_models() -> tuple[Model, Model]:
    """Return the model to train and the frozen reference, which are equal at the start."""
    torch.manual_seed(0)
    policy = Model().double()
    return policy, copy.deepcopy(policy).requires_grad_(False)


def log_probabilities(model: Model, mb: Mapping[str, Any]) -> torch.Tensor:
    """Return the log-probability of each document's response, [documents]."""
    tokens, positions, labels = (torch.tensor(mb[k]) for k in ("tokens", "position_ids", "labels"))
    documents = torch.cumsum(positions == 0, 0)
    return -ot.document_sums(ot.token_losses(model(tokens, positions, documents), labels), mb)


def pair_losses(policy: Model, reference: Model, mb: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss of each pair of a microbatch; an empty microbatch has none."""
    roles = torch.tensor(mb["roles"])
    gain = log_probabilities(policy, mb) - log_probabilities(reference, mb)
    return -F.logsigmoid(BETA * (gain[roles == 0] - gain[roles == 1]))


def make_job(path: Path, place: ov.Mesh) -> ov.Job:
    source = ov.Source("prefs", str(path), transforms=[ov.Pair(prompt="prompt")])
    return ov.Job(
        name="dpo",
        sources=[source],
        place=place,
        batch=ov.Batch(samples=16, microbatches=2, context=256),
        strategy="even",
        until=STEPS,
    )


def train_step(policy: Model, reference: Model, ranks: Sequence[ov.Step]) -> float:
    """Add the gradients of a step, rank by rank, and return its loss."""
    total = 0.0
    for step in ranks:
        for mb in step:
            loss = pair_losses(policy, reference, mb).sum() / step.global_samples
            loss.backward()
            total += loss.item()
    return total


def main() -> None:
    with tempfile.TemporaryDirectory() as tmp:
        path = Path(tmp) / "prefs.jsonl"
        rows = [*make_rows(300), {"prompt": [1, 9], "chosen": [10], "rejected": None}]
        path.write_text("\n".join(map(json.dumps, rows)))
        policy, reference = make_models()
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
        losses = []
        with ov.launch(make_job(path, ov.Mesh(dp=2)), cache_dir=f"{tmp}/cache") as session:
            # One process plays both ranks; in a trainer each has its own client.
            for ranks in zip(*(session.client(rank) for rank in range(2)), strict=True):
                optimizer.zero_grad()
                losses.append(train_step(policy, reference, ranks))
                optimizer.step()
            bad = session.quarantine()
        print(f"{len(losses)} steps: loss {losses[0]:.3f} to {losses[-1]:.3f}")
        print(f"quarantined: {bad[0]['reason'].partition('): ')[2]}")


if __name__ == "__main__":
    main()
