"""Small tokenizers of every library, made in memory, for tests."""

from __future__ import annotations

import io
from typing import Any


def bpe(bos_template: bool = False) -> Any:
    """Return a small tokenizer of bytes; with ``bos_template`` it adds <s> by itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    made.train_from_iterator(["hello world lower worlds"] * 4, trainer)
    if bos_template:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return made


def encoding() -> Any:
    import tiktoken

    ranks = {bytes([i]): i for i in range(256)} | {b"he": 256, b"ll": 257, b"hell": 258}
    return tiktoken.Encoding(
        "own", pat_str=r"\s?\w+|\s+|.", mergeable_ranks=ranks, special_tokens={"<|end|>": 300}
    )


def pieces() -> bytes:
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world", "lower worlds", "hello lower"] * 10),
        model_writer=out,
        vocab_size=30,
        hard_vocab_limit=False,
        byte_fallback=False,
        minloglevel=2,
    )
    return out.getvalue()


def processor() -> Any:
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_proto=pieces(), add_bos=True)


def fast() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=bpe(True), bos_token="<s>", eos_token="</s>")


OBJECTS = {
    "tokenizers": bpe,
    "transformers": fast,
    "tiktoken": encoding,
    "sentencepiece": processor,
}
