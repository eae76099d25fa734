"""``DPOTrainer`` of TRL: the script of its page, and losses compared with those of TRL alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.trainer_utils import set_seed
from trl import DPOConfig, DPOTrainer

import overlord as ov
import overlord.torch as ot
from overlord.torch import recipes
from tests.trainers.script_checks import LIMIT_S, run_page
from tests.trainers.script_world import VOCABULARY, write_data

pytestmark = pytest.mark.timeout(LIMIT_S + 20)
STEPS = 3


def test_page(tmp_path: Path) -> None:
    loaded = ("transformers.models.llama", "trl.trainer.dpo_trainer")
    run_page("trl-dpo.md", tmp_path, loaded=loaded)


def test_ranks_of_the_page_have_different_numbers_of_pairs(tmp_path: Path) -> None:
    """Otherwise the runs of the page would not show that losses are weighted by pairs."""
    job = pair_job(tmp_path, samples=16, microbatches=2, dp=2, strategy="llm_balance", until=8)
    with ov.launch(job) as session:
        steps = zip(session.client(0), session.client(1), strict=True)
        counts = [[len(mb.samples) // 2 for mb in (*a, *b)] for a, b in steps]
    assert any(len(set(of_step)) > 1 for of_step in counts)
    assert all(sum(of_step) == 16 for of_step in counts)


def pair_job(folder: Path, *, samples: int, microbatches: int, **settings: Any) -> ov.Job:
    """Return a job of pairs of token ids."""
    write_data(folder)
    pairs = ov.Source(
        "prefs", str(folder / "data" / "train-pairs.jsonl"), transforms=[ov.Pair(prompt="prompt")]
    )
    batch = ov.Batch(samples=samples, microbatches=microbatches, context=4096)
    place = ov.Mesh(dp=settings.pop("dp", 1))
    given = {"until": STEPS, **settings}
    return ov.Job(name="dpo", sources=[pairs], batch=batch, place=place, **given)


def dpo_trainer(folder: Path, microbatches: int = 1, **settings: Any) -> DPOTrainer:
    """Return a trainer of a small model, with the same first weights in every call."""
    write_data(folder)
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=2, **sizes)
    model = LlamaForCausalLM(config).double()
    args = DPOConfig(
        output_dir=str(folder / "out"),
        gradient_accumulation_steps=microbatches,
        gradient_checkpointing=False,
        learning_rate=0.01,
        logging_steps=1,
        max_steps=STEPS,
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        **settings,
    )
    return DPOTrainer(
        model,
        copy.deepcopy(model),
        args,
        train_dataset=recipes.huggingface.placeholder(),
        processing_class=AutoTokenizer.from_pretrained(folder / "assets"),
    )


def losses(trainer: DPOTrainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trl_rows(mb: Any) -> list[dict[str, list[int]]]:
    """Return the pairs of a microbatch as TRL's collator takes them."""
    bounds, lengths = mb["cu_seqlens_padded"].tolist(), mb["cu_seqlens"].diff().tolist()
    prompts = mb["prompt_lengths"].tolist()
    ids = [
        mb["tokens"][start : start + n].tolist()
        for start, n in zip(bounds[:-1], lengths, strict=True)
    ]
    return [
        {
            "prompt_ids": ids[i][: prompts[i]],
            "chosen_ids": ids[i][prompts[i] :],
            "rejected_ids": ids[i + 1][prompts[i] :],
        }
        for i in range(0, len(ids), 2)
    ]


@pytest.mark.parametrize("loss_type", [["sigmoid"], ["ipo", "hinge"]])
def test_losses_are_those_of_trl_on_the_same_pairs(tmp_path: Path, loss_type: list[str]) -> None:
    """TRL has its own collator and DataLoader, and all pairs of a step in one microbatch."""
    with ot.Loader(pair_job(tmp_path, samples=8, microbatches=1)) as loader:
        rows = [row for step in loader for mb in step for row in trl_rows(mb)]
    alone = dpo_trainer(tmp_path, loss_type=loss_type)
    batches = DataLoader(rows, batch_size=8, collate_fn=alone.data_collator)
    alone.get_train_dataloader = lambda: batches
    expected = losses(alone)
    assert len(set(expected)) == STEPS
    trainer = dpo_trainer(tmp_path, microbatches=3, loss_type=loss_type)
    job = pair_job(tmp_path, samples=8, microbatches=3, strategy="llm_balance")
    with recipes.huggingface.use(trainer, job):
        assert losses(trainer) == pytest.approx(expected, rel=1e-6)


def test_an_empty_microbatch_adds_nothing(tmp_path: Path) -> None:
    expected = None
    for microbatches in (1, 3):  # a step has two pairs
        trainer = dpo_trainer(tmp_path, microbatches)
        with recipes.huggingface.use(
            trainer, pair_job(tmp_path, samples=2, microbatches=microbatches)
        ):
            found = losses(trainer)
        expected = expected or found
        assert found == pytest.approx(expected, rel=1e-6)
        assert all(torch.isfinite(weights).all() for weights in trainer.model.parameters())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_type": ["sigmoid", "sft"]}, "a mean over pairs .*, got sft, which depends"),
        ({"precompute_ref_log_probs": True}, "precompute_ref_log_probs: expected False, got True"),
        ({"microbatches": 2}, "expected 1, the Batch.microbatches of the job, got 2"),
    ],
)
def test_settings_that_would_be_wrong_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    trainer = dpo_trainer(tmp_path, **changes)
    with (
        pytest.raises(ov.JobError, match=words),
        recipes.huggingface.use(trainer, pair_job(tmp_path, samples=2, microbatches=1)),
    ):
        pass


def test_data_without_pairs_is_refused(tmp_path: Path) -> None:
    job = pair_job(tmp_path, samples=2, microbatches=1)
    texts = ov.Source("text", str(tmp_path / "data" / "train.jsonl"))
    plain = ov.Job(name="sft", sources=[texts], batch=job.batch, until=2)
    trainer = dpo_trainer(tmp_path)
    with (
        recipes.huggingface.use(trainer, plain),
        pytest.raises(ov.JobError, match=r"huggingface\.preference"),
    ):
        trainer.train()
