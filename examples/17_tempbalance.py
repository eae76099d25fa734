"""Give every block its own learning rate by the spectrum of its weights, and resume.

TempBalance wraps the scheduler of the loop. The example prints the spectra of the trained model
and the multipliers in force. A second run resumes half way, with the rates and losses of the first.

Run it: python examples/17_tempbalance.py
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import overlord as ov
import overlord.torch as ot

VOCAB, SIDE, STEPS, SAVE_AT = 64, 64, 60, 30


class Counting:
    """Documents that count upwards, which a model can learn."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return {"tokens": [(7 * i + k) % VOCAB for k in range(2 + i % 40)]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, SIDE)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(SIDE), nn.Linear(SIDE, SIDE), nn.GELU()) for _ in range(4)
        )
        self.head = nn.Linear(SIDE, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def train(job: ov.Job, resume: dict[str, Any] | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    balance = ot.TempBalance(
        optimizer, scheduler, model=model, estimator="farms", every=10, smooth=5
    )
    saved: dict[str, Any] = {}
    losses, rates = [], []
    with ov.launch(job) as session:
        client = session.client(rank=0)
        if resume is not None:
            model.load_state_dict(resume["model"])
            optimizer.load_state_dict(resume["optimizer"])
            balance.load_state_dict(resume["balance"])
            client.load_state_dict(resume["data"])
        for step in client:
            optimizer.zero_grad()
            for mb in step:
                data = ot.tensors(mb)
                loss = F.cross_entropy(
                    model(data["tokens"]), data["labels"], ignore_index=-100, reduction="sum"
                )
                (loss / step.global_valid_tokens).backward()
                losses.append(loss.item() / step.global_valid_tokens)
            optimizer.step()
            balance.step()
            rates.append(tuple(balance.get_last_lr()))
            if step.step == SAVE_AT - 1:
                saved = {
                    "model": copy.deepcopy(model.state_dict()),
                    "optimizer": copy.deepcopy(optimizer.state_dict()),
                    "balance": balance.state_dict(),
                    "data": client.state_dict(),
                }
    return {"model": model, "balance": balance, "losses": losses, "rates": rates, "saved": saved}


def main() -> None:
    source = ov.Source("counting", Counting(), transforms=[ov.Tokens()])
    job = ov.Job(
        name="tempbalance",
        sources=[source],
        batch=ov.Batch(samples=16, microbatches=1, context=1024),
        until=STEPS,
    )
    first = train(job)
    print(f"{STEPS} steps: loss {first['losses'][0]:.1f} to {first['losses'][-1]:.1f}\n")
    print(ot.spectra(first["model"], estimator="farms"), "\n")
    for block, multiplier in first["balance"].multipliers.items():
        print(f"{block}: learning rate times {multiplier:.2f}")
    second = train(job, resume=first["saved"])
    same = second["rates"] == first["rates"][SAVE_AT:]
    print(f"steps {SAVE_AT} to {STEPS - 1} again, from the checkpoint: same rates: {same}")
    print(f"same losses: {second['losses'] == first['losses'][SAVE_AT:]}")


if __name__ == "__main__":
    main()
