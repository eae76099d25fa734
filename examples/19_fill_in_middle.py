"""Train on code to fill gaps: rows of a CSV file, half of them rearranged around two cuts.

The tokenizer is an object; a path, a folder or a name such as "gpt2" works as well. The cuts follow
from the identity of a row, so they are the same on every runtime and after a resume.

Run it: python examples/19_fill_in_middle.py
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import overlord as ov

MARKS = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<eos>"]


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, and the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(MARKS)
    return made


def main() -> None:
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory() as tmp:
        with open(Path(tmp) / "code.csv", "w", newline="") as file:
            rows = [(k, f"def add_{k}(x):\n    return x + {k}\n") for k in range(12)]
            csv.writer(file).writerows([("id", "text"), *rows])
        source = ov.Source(
            "code",
            f"{tmp}/code.csv",
            transforms=[ov.FillInMiddle(0.5, 0.5), ov.Tokenize(tokenizer, eos="<eos>")],
            epochs=1,
        )
        job = ov.Job(name="fim", sources=[source], batch=ov.Batch(samples=4, context=128))
        with ov.launch(job, cache_dir=f"{tmp}/cache") as session:
            rearranged = 0
            for step in session.client(0):
                for microbatch in step:
                    for sample, offset, length in microbatch.samples:
                        ids = microbatch["tokens"][offset : offset + length].tolist()
                        text = tokenizer.decode(ids, skip_special_tokens=False)
                        rearranged += text.startswith(MARKS[0])
                        print(sample, repr(text))
            print(f"{rearranged} of {len(rows)} documents are rearranged")


if __name__ == "__main__":
    main()
