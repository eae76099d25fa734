"""TempBalance inside the Trainer of transformers and Lightning, as released: each run that is
continued from a checkpoint has the rates and weights of an uninterrupted one.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import overlord.torch as ot

STEPS, STOP = 8, 5
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        for k, layer in enumerate(self.layers):
            layer.weight.data *= torch.linspace(1, 2 + 4 * k, 16)[:, None]

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return {"loss": (y - x).pow(2).mean(), "logits": y}


def rows() -> list[dict[str, torch.Tensor]]:
    made = torch.randn(4 * STEPS, 16, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row} for row in made]


def optimized(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = CosineAnnealingLR(optimizer, 2 * STEPS)
    return optimizer, ot.TempBalance(
        optimizer, scheduler, model=model, every=2, smooth=2, min_eigs=8
    )


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_trainer_of_transformers_steps_saves_and_resumes_it(tmp_path: Path):
    def train(folder: Path, resume: str | None = None, **settings: Any) -> tuple[Any, Net]:
        model = Net()
        optimizer, balance = optimized(model)
        args = TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="steps",
            save_steps=STOP,
            logging_strategy="no",
            **settings,
        )
        trainer = Trainer(model, args, train_dataset=rows(), optimizers=(optimizer, balance))
        trainer.train(resume_from_checkpoint=resume)
        return balance, model

    whole, model = train(tmp_path / "a")
    assert set(whole.multipliers.values()) >= {0.5, 1.5}
    assert whole.state_dict()["step"] == STEPS
    again, resumed = train(tmp_path / "b", resume=str(tmp_path / "a" / f"checkpoint-{STOP}"))
    assert again.state_dict() == whole.state_dict()
    assert equal(weights(resumed), weights(model))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, i: int) -> torch.Tensor:
        return self.net(batch["x"])["loss"]

    def configure_optimizers(self) -> Any:
        optimizer, self.balance = optimized(self.net)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.balance, "interval": "step"},
        }

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


def test_lightning_steps_saves_and_resumes_it(tmp_path: Path):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def train(steps: int, resume: Path | None = None) -> tuple[Module, lightning.Trainer]:
        module = Module()
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        # equal batches: a DataLoader starts from its beginning after a resume
        trainer.fit(module, DataLoader(rows()[:4] * STEPS, batch_size=4), ckpt_path=resume)
        return module, trainer

    whole, _ = train(STEPS)
    assert set(whole.balance.multipliers.values()) >= {0.5, 1.5}
    _, trainer = train(STOP)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    again, _ = train(STEPS, tmp_path / "middle.ckpt")
    state = again.balance.state_dict()
    assert state["step"] == STEPS
    assert state == whole.balance.state_dict()
    assert equal(weights(again), weights(whole))
