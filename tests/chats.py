"""Chat templates in the published formats of several models, small tokenizers, conversations.

``NAME.jinja`` has no generation tags; ``NAME.marked.jinja`` renders the same text with them.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

FOLDER = Path(__file__).parent / "data" / "chat"
DAY, SHOWN = "2026-01-31", "31 Jan 2026"
# Model -> (bos, eos, further special tokens).
MODELS: dict[str, tuple[str | None, str, list[str]]] = {
    "chatml": (None, "<|im_end|>", ["<|im_start|>"]),
    "llama3": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    ),
    "mistral": ("<s>", "</s>", ["[INST]", "[/INST]"]),
    "qwen": (None, "<|im_end|>", ["<|im_start|>", "<|endoftext|>"]),
    "gemma": ("<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>", "<start_of_image>"]),
    "vision": (
        None,
        "<|im_end|>",
        ["<|im_start|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"],
    ),
}


def template(model: str, marked: bool = False) -> str:
    return (FOLDER / f"{model}{'.marked' if marked else ''}.jinja").read_text(encoding="utf-8")


@functools.cache
def tokenizer_json(model: str) -> str:
    """Return a small tokenizer of the model's kind, with its special tokens.

    Mistral's replaces spaces as sentencepiece does; the others work on bytes.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    bos, eos, more = MODELS[model]
    special = [token for token in (bos, eos, *more) if token]
    if model == "mistral":
        made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        alphabet = list("▁abcdefghijklmnopqrstuvwxyz<>/|!.,\n")
        special = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *special]
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(
        ["hello there my friend, how are you today? <think> the answer is fine. </think>\n" * 9],
        trainer,
    )
    return made.to_str()


def write_folder(folder: Path, model: str, marked: bool = False) -> str:
    """Write a tokenizer as transformers saves one, and return its folder."""
    bos, eos, _ = MODELS[model]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(model), encoding="utf-8")
    config = {"bos_token": bos, "eos_token": eos, "chat_template": template(model, marked)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


@functools.cache
def of_transformers(model: str) -> Any:
    """Return the same tokenizer as an object of transformers, with the marked template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    bos, eos, _ = MODELS[model]
    text = template(model, marked=True).replace("strftime_now('%d %b %Y')", f"'{SHOWN}'")
    made = Tokenizer.from_str(tokenizer_json(model))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=bos, eos_token=eos, chat_template=text
    )


def reference(model: str, messages: Any, tools: Any = None) -> tuple[list[int], list[int]]:
    """Return ids and the assistant's mask by transformers, with the marked template."""
    made = of_transformers(model).apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    return made["input_ids"], made["assistant_masks"]


# Words that a template or a tokenizer may confuse with its own text.
WORDS = st.sampled_from(
    [
        "hello",
        " there",
        "\n",
        "  ",
        "é",
        "日本",
        "😀",
        "<think>",
        "</think>",
        "assistant",
        "user",
        "<|im_end|>",
        "<|eot_id|>",
        "[/INST]",
        "</s>",
        "<end_of_turn>",
        "{{ x }}",
        "a",
        "ﬁ",
    ]
)


@st.composite
def conversations(draw: st.DrawFn, system: bool = True) -> list[dict[str, str]]:
    """Draw a conversation of turns of user and assistant, whose contents often repeat."""
    # Text remains after trimming, and where a template drops reasoning.
    content = st.builds(lambda words: f"w{''.join(words)}w", st.lists(WORDS, max_size=6))
    pool = draw(st.lists(content, min_size=1, max_size=3))
    messages = []
    if system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(st.sampled_from(pool))})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(st.sampled_from(pool))})
        messages.append({"role": "assistant", "content": draw(st.sampled_from(pool))})
    if draw(st.booleans()):
        messages.append({"role": "user", "content": draw(st.sampled_from(pool))})
    return messages
