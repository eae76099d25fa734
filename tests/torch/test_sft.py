"""Fine-tuning on conversations equals a plain loop without the package, on the same order."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import overlord as ov  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "22_sft.py"
# The template of the example with generation tags, for transformers alone.
TAGGED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


def example() -> Any:
    spec = importlib.util.spec_from_file_location("sft", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def reference_losses(sft: Any, rows: list[dict[str, Any]], order: list[list[int]]) -> list[float]:
    """Return the losses of a plain loop: padded batches, masks of transformers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=sft.make_tokenizer(), chat_template=TAGGED)
    model, optimizer = sft.make_model(len(tokenizer))
    losses = []
    for step in order:
        optimizer.zero_grad()
        total, valid = torch.zeros((), dtype=torch.float64), 0
        for row in step:
            made = tokenizer.apply_chat_template(
                rows[row]["messages"], return_dict=True, return_assistant_tokens_mask=True
            )
            ids, mask = (torch.tensor(made[k]) for k in ("input_ids", "assistant_masks"))
            logits = model(ids, torch.arange(len(ids)), torch.zeros_like(ids))
            one = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
            total = total + (one * mask[1:]).sum()
            valid += int(mask[1:].sum())
        (total / valid).backward()
        optimizer.step()
        losses.append(total.item() / valid)
    return losses


def test_200_steps_have_the_losses_of_a_plain_loop_on_the_same_order(tmp_path: Path):
    sft = example()
    rows = sft.make_rows(60)
    path = tmp_path / "letters.jsonl"
    lines = list(map(json.dumps, rows))
    path.write_text("\n".join(lines))
    # The row of a line is its byte offset.
    starts = {sum(len(line) + 1 for line in lines[:i]): i for i in range(len(lines))}
    job = sft.make_job(path)
    with ov.launch(job, cache_dir=str(tmp_path / "cache")) as session:
        losses = sft.train(session)
    with ov.launch(job, cache_dir=str(tmp_path / "cache")) as session:
        order = [
            [starts[sample.row] for mb in step for sample, _, _ in mb.samples]
            for step in session.client(0)
        ]
    wanted = reference_losses(sft, rows, order)
    assert len(losses) == 200
    assert losses == pytest.approx(wanted, abs=1e-6, rel=0)
    assert losses[0] > 4
    assert losses[-1] < 0.4
