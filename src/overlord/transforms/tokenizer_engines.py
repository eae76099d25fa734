"""Engines that turn texts into token ids, one for each library of tokenizers.

An engine is built from the content of a tokenizer. Its ids of a text depend on that text alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from overlord.errors import TransformError
from overlord.process.resources import trim_heap
from overlord.transforms.tokenizer_content import Ranks, TokenizerContent, missing_package


class Engine(Protocol):
    """A loaded tokenizer. Runs on: any thread."""

    top: int  # highest id

    def encode(self, texts: list[str], add_special_tokens: bool) -> Iterator[list[int]]:
        """Yield the ids of each text."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary lacks it."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids of the vocabulary; invalid bytes become replacement marks."""
        ...

    def special_token(self, token_id: int) -> str | None:
        """Return the text of a special token; None for any other id."""
        ...

    def has_id(self, token_id: int) -> bool:
        """Return whether an id belongs to the vocabulary."""
        ...


class SpanEngine(Protocol):
    """A loaded tokenizer that reports the characters of each token. Runs on: any thread."""

    top: int  # highest id
    special: frozenset[str]  # special tokens, which a text may contain

    def encode_with_offsets(
        self, texts: list[str]
    ) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """Yield the ids of each text, and the first and last + 1 character of each token."""
        ...


def load_span_engine(content: TokenizerContent, name: str, source: str) -> SpanEngine:
    """Return an engine with offsets. Raises TransformError for a tokenizer that has none."""
    if content.kind != "tokenizers":
        raise TransformError(
            source,
            "Chat",
            f"expected a tokenizer.json, which reports the characters of tokens, got {name}",
            "save the tokenizer with transformers as a fast tokenizer, and pass its folder",
        )
    engine = _HuggingFace(content.data, name, source, exact_offsets=True)
    trim_heap()
    return engine


def load_engine(content: TokenizerContent, name: str, source: str) -> Engine:
    """Return the engine of a content; ``name`` is its path or name in errors."""
    engine: Engine
    if content.kind == "tokenizers":
        engine = _HuggingFace(content.data, name, source)
    elif content.kind == "sentencepiece":
        engine = _SentencePiece(content.data, name, source)
    else:
        engine = _Tiktoken(content.data, name, source)
    trim_heap()  # parsing a file of 1.7 MB leaves 7 MB of freed memory
    return engine


class _Model(msgspec.Struct):
    dropout: float | None = None


class _File(msgspec.Struct):
    """The field ``model`` of a tokenizer.json, the only field that this module reads.

    Parsing the whole file would take ten times its size in memory.
    """

    model: _Model | None = None


class _HuggingFace:
    """Engine of the package tokenizers.

    With ``exact_offsets`` the post-processor is removed: it trims spaces from the characters of
    tokens. Without it ``add_special_tokens`` has no effect.
    """

    def __init__(self, data: bytes, name: str, source: str, exact_offsets: bool = False) -> None:
        # Worker threads already run in parallel. Additional threads of tokenizers cost 25 % more
        # CPU per byte. The package reads the variable at every call, so the setting takes effect
        # at once. A value set by the user is kept.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            from tokenizers import Tokenizer
        except ImportError as fault:
            raise missing_package("tokenizers", source) from fault
        try:
            dropout = getattr(msgspec.json.decode(data, type=_File).model, "dropout", None)
            self._tokenizer: Any = Tokenizer.from_buffer(data)
        except Exception as fault:  # tokenizers raises plain Exception
            raise TransformError(
                source,
                "Tokenize",
                f"expected a tokenizer.json, got {name}: {fault}",
                "set the path of a file that the package tokenizers can load",
            ) from fault
        if dropout:
            problem = f"expected no dropout in {name}, got {dropout}: ids would differ in every run"
            raise TransformError(
                source, "Tokenize", problem, "set model.dropout to null in the file"
            )
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if exact_offsets:
            self._tokenizer.post_processor = None
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {i: t.content for i, t in added.items() if t.special}
        self.special: frozenset[str] = frozenset(self._special.values())
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.top: int = max(vocabulary.values(), default=0)

    def encode(self, texts: list[str], add_special_tokens: bool) -> Iterator[list[int]]:
        for encoding in self._tokenizer.encode_batch_fast(
            texts, add_special_tokens=add_special_tokens
        ):
            yield encoding.ids

    def encode_with_offsets(
        self, texts: list[str]
    ) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False):
            yield encoding.ids, encoding.offsets

    def token_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def special_token(self, token_id: int) -> str | None:
        return self._special.get(token_id)

    def has_id(self, token_id: int) -> bool:
        return self._tokenizer.id_to_token(token_id) is not None


class _SentencePiece:
    """Engine of the package sentencepiece; sampling of segmentations is off."""

    def __init__(self, data: bytes, name: str, source: str) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as fault:
            raise missing_package("sentencepiece", source) from fault
        self._name, self._source = name, source
        try:
            self._model: Any = SentencePieceProcessor()
            self._model.LoadFromSerializedProto(data)
            self.top = int(self._model.GetPieceSize()) - 1
        except Exception as fault:
            raise TransformError(
                source,
                "Tokenize",
                f"expected a sentencepiece model, got {name}: {fault}",
                "set the path of a file that sentencepiece wrote; pass ranks of tiktoken as a "
                "tiktoken.Encoding",
            ) from fault

    def encode(self, texts: list[str], add_special_tokens: bool) -> Iterator[list[int]]:
        _refuse_template(add_special_tokens, self._name, self._source)
        for text in texts:
            yield self._model.encode(
                text, out_type=int, add_bos=False, add_eos=False, enable_sampling=False
            )

    def token_id(self, token: str) -> int | None:
        found = int(self._model.PieceToId(token))
        return found if self._model.IdToPiece(found) == token else None

    def decode(self, ids: list[int]) -> str:
        text: str = self._model.DecodeIds(ids)
        return text

    def special_token(self, token_id: int) -> str | None:
        if not self.has_id(token_id):
            return None
        special = self._model.IsControl(token_id) or self._model.IsUnknown(token_id)
        return str(self._model.IdToPiece(token_id)) if special else None

    def has_id(self, token_id: int) -> bool:
        return 0 <= token_id <= self.top


class _Tiktoken:
    """Engine of the package tiktoken; text that looks like a special token is plain text."""

    def __init__(self, data: bytes, name: str, source: str) -> None:
        try:
            import tiktoken
        except ImportError as fault:
            raise missing_package("tiktoken", source) from fault
        self._name, self._source = name, source
        parts = msgspec.msgpack.decode(data, type=Ranks)
        self._special = dict(parts.special)
        self._encoding: Any = tiktoken.Encoding(
            "overlord",
            pat_str=parts.pattern,
            mergeable_ranks=dict(parts.ranks),
            special_tokens=self._special,
        )
        self.top: int = self._encoding.max_token_value

    def encode(self, texts: list[str], add_special_tokens: bool) -> Iterator[list[int]]:
        _refuse_template(add_special_tokens, self._name, self._source)
        for text in texts:
            yield self._encoding.encode_ordinary(text)

    def token_id(self, token: str) -> int | None:
        if token in self._special:
            return self._special[token]
        try:
            found: int = self._encoding.encode_single_token(token)
        except KeyError:
            return None
        return found

    def decode(self, ids: list[int]) -> str:
        text: str = self._encoding.decode(ids, errors="replace")
        return text

    def special_token(self, token_id: int) -> str | None:
        return next((text for text, i in self._special.items() if i == token_id), None)

    def has_id(self, token_id: int) -> bool:
        try:
            self._encoding.decode_single_token_bytes(token_id)
        except KeyError:
            return False
        return True


def _refuse_template(add_special_tokens: bool, name: str, source: str) -> None:
    if add_special_tokens:
        raise TransformError(
            source,
            "Tokenize",
            f"expected a tokenizer with a template of special tokens, got {name}, which has none",
            "set bos and eos, and add_special_tokens=False",
        )
