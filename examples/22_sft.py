"""Fine-tune a small model on conversations: the loss is that of the assistant's tokens alone.

The chat template has no generation tags. The tokens with a loss follow from tracing it: the
answers and their end-of-turn tokens. A row that is not a conversation is quarantined.

Run it: python examples/22_sft.py
"""

from __future__ import annotations

import json
import random
import string
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import overlord as ov
import overlord.torch as ot

STEPS = 200
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, and the marks of turns."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return made


def make_rows(count: int) -> list[dict[str, object]]:
    """Return conversations of one or two questions; every answer is the next letter."""
    chance = random.Random(0)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        messages = []
        for _ in range(chance.randint(1, 2)):
            k = chance.randrange(25)
            messages.append({"role": "user", "content": string.ascii_lowercase[k]})
            messages.append({"role": "assistant", "content": string.ascii_lowercase[k + 1]})
        rows.append({"messages": messages})
    return rows


class Model(torch.nn.Module):
    """One block of causal attention, which stays inside documents."""

    def __init__(self, vocabulary: int, width: int = 32) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, width)
        self.positions = torch.nn.Embedding(128, width)
        self.mix = torch.nn.Linear(width, 3 * width)
        self.inner = torch.nn.Linear(width, 2 * width)
        self.outer = torch.nn.Linear(2 * width, width)
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor
    ) -> torch.Tensor:
        """Return logits [tokens, vocabulary]; ``documents`` numbers the document of each token."""
        x = self.tokens(tokens) + self.positions(positions)
        q, k, v = self.mix(x).chunk(3, dim=-1)
        order = torch.arange(len(tokens))
        seen = (documents[:, None] == documents) & (order[:, None] >= order)
        scores = (q @ k.T / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
        x = x + scores.softmax(-1) @ v
        return self.head(x + self.outer(torch.relu(self.inner(x))))


def make_model(vocabulary: int) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(vocabulary).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def make_job(path: Path) -> ov.Job:
    source = ov.Source(
        "letters",
        str(path),
        transforms=[ov.Chat(make_tokenizer(), template=TEMPLATE, train_on="assistant")],
    )
    return ov.Job(name="sft", sources=[source], batch=ov.Batch(samples=8, context=256), until=STEPS)


def train(session: ov.Session) -> list[float]:
    """Train on all steps, and return the loss of each."""
    model, optimizer = make_model(make_tokenizer().get_vocab_size())
    losses = []
    for step in session.client(rank=0):
        optimizer.zero_grad()
        total = 0.0
        for mb in step:
            tokens, positions, labels, mask = (
                torch.tensor(mb[key]) for key in ("tokens", "position_ids", "labels", "loss_mask")
            )
            documents = torch.cumsum(positions == 0, 0)
            logits = model(tokens, positions, documents)
            loss = ot.token_loss(logits, labels, step.global_valid_tokens, loss_mask=mask)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory() as tmp:
        path = Path(tmp) / "letters.jsonl"
        rows = [*make_rows(400), {"messages": [{"role": "narrator", "content": "Once"}]}]
        path.write_text("\n".join(map(json.dumps, rows)))
        with ov.launch(make_job(path), cache_dir=f"{tmp}/cache") as session:
            losses = train(session)
            bad = session.quarantine()
        print(f"{len(losses)} steps: loss {losses[0]:.2f} to {losses[-1]:.2f}")
        print(f"quarantined: {bad[0]['reason'].partition('messages: ')[2]}")


if __name__ == "__main__":
    main()
