"""Tokenization of text columns, in batches that release the interpreter lock."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, ClassVar

import numpy as np

from overlord.checks import names_arguments
from overlord.errors import TransformError
from overlord.hashing import digest
from overlord.sample import Ragged
from overlord.transforms.base import column_problems, flag_problems, refuse
from overlord.transforms.tokenizer_content import (
    EXPECTED,
    TokenizerContent,
    content_digest,
    content_of_object,
    read_content,
)
from overlord.transforms.tokenizer_engines import Engine, load_engine

# Texts per batch: the tokenizer's result takes 100 to 200 bytes per token until its ids are copied;
# larger batches are not faster.
TEXTS_PER_BATCH = 32


@names_arguments
@dataclass(frozen=True, slots=True, repr=False)
class Tokenize:
    """Convert the text of a column to token ids in the smallest type that holds the vocabulary.

    ``tokenizer`` is the path of a ``tokenizer.json``, of a sentencepiece model or of a folder with
    one of them. It may also be a name (``gpt2``, ``owner/model@revision``,
    ``tiktoken:cl100k_base``), or an object of tokenizers, transformers, tiktoken or sentencepiece.
    ``bos`` and ``eos``, tokens or ids, are added before and after every text. No other special
    token is added unless ``add_special_tokens`` is set. Padding and truncation of the tokenizer are
    ignored: the ids of a row must not depend on its neighbours.
    """

    # A tokenizer object becomes its content.
    tokenizer: Any
    text: str = "text"
    add_special_tokens: bool = field(default=False, kw_only=True)
    bos: str | int | None = field(default=None, kw_only=True)
    eos: str | int | None = field(default=None, kw_only=True)
    kind: ClassVar[str] = "tokenize"
    user_code: ClassVar[bool] = False
    holds_lock: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = column_problems("text", self.text) + flag_problems(self, "add_special_tokens")
        problems += self._set_tokenizer()
        for name in ("bos", "eos"):
            token = getattr(self, name)
            plain = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31
            if not (token is None or plain or (isinstance(token, str) and token)):
                problems.append(
                    f"{name}: expected a token or an id from 0 to 2**31 - 1, got {token!r}"
                )
        refuse("Tokenize", problems)

    def _set_tokenizer(self) -> list[str]:
        """Replace a path by its text and an object by its content, and return the problems."""
        given: Any = self.tokenizer
        if isinstance(given, TokenizerContent):
            return []
        if isinstance(given, (str, os.PathLike)) and os.fspath(given):
            # A path gives equal specifications as text and as Path.
            object.__setattr__(self, "tokenizer", os.path.expanduser(str(given)))
            return []
        try:
            content = None if isinstance(given, (str, bytes)) else content_of_object(given)
        except ValueError as fault:
            return [f"tokenizer: {fault}"]
        if content is None:
            return [f"tokenizer: expected {EXPECTED}, got {type(given).__name__} {given!r:.60}"]
        object.__setattr__(self, "tokenizer", content)
        return []

    def __repr__(self) -> str:
        extra = ", add_special_tokens=True" if self.add_special_tokens else ""
        extra += "".join(
            f", {n}={getattr(self, n)!r}" for n in ("bos", "eos") if getattr(self, n) is not None
        )
        shown = repr(self.tokenizer) if isinstance(self.tokenizer, str) else str(self.tokenizer)
        return f"Tokenize({shown}, text={self.text!r}{extra})"

    def fingerprint(self) -> str:
        options = (self.text, self.add_special_tokens, self.bos, self.eos)
        return digest("tokenize", content_digest(self.tokenizer), *(repr(o) for o in options))


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """A loaded tokenizer with the options of one specification."""

    tokenizer: Engine
    add_special_tokens: bool
    bos: int | None
    eos: int | None
    dtype: np.dtype[Any]
    content: str  # digest of the tokenizer

    def without_ends(self) -> Encoder:
        """Return this encoder without ``bos`` and ``eos``."""
        return replace(self, bos=None, eos=None)

    def begin_only(self) -> Encoder:
        """Return this encoder without ``eos``, for the beginnings of documents."""
        return replace(self, eos=None)

    def end_only(self) -> Encoder:
        """Return this encoder without ``bos``, for the ends of documents."""
        return replace(self, bos=None)

    def encode(self, texts: list[str]) -> Ragged:
        """Return the ids of every text, with ``bos`` and ``eos``.

        One C call per text copies the ids; ``array.fromlist`` costs half of ``np.array(ids)``.
        """
        ids, lengths = array("I"), array("q")
        before, after = ([] if token is None else [token] for token in (self.bos, self.eos))
        for k in range(0, len(texts), TEXTS_PER_BATCH):
            batch = texts[k : k + TEXTS_PER_BATCH]
            for encoded in self.tokenizer.encode(batch, self.add_special_tokens):
                start = len(ids)
                ids.fromlist(before)
                ids.fromlist(encoded)
                ids.fromlist(after)
                lengths.append(len(ids) - start)
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(
            np.frombuffer(lengths, np.int64) if lengths else np.zeros(0, np.int64), out=offsets[1:]
        )
        values = np.frombuffer(ids, np.uintc) if ids else np.zeros(0, np.uintc)
        return Ragged(values.astype(self.dtype, copy=False), offsets)


_lock = Lock()
_loaded: dict[str, Engine] = {}  # digest of the content -> engine


def build_encoder(spec: Tokenize, source: str = "") -> Encoder:
    """Return an encoder; a tokenizer is loaded once per process, and all threads share it."""
    with _lock:
        key = content_digest(spec.tokenizer, source)
        if key not in _loaded:
            content = read_content(spec.tokenizer, source)
            key = content.digest  # the file may have changed since its digest was taken
            _loaded[key] = load_engine(content, str(spec.tokenizer), source)
        engine = _loaded[key]
    bos, eos = (_token_id(engine, spec, name, source) for name in ("bos", "eos"))
    if spec.add_special_tokens:
        _check_template(engine, spec, {"bos": bos, "eos": eos}, source)
    highest = max([engine.top, *(token for token in (bos, eos) if token is not None)])
    return Encoder(engine, spec.add_special_tokens, bos, eos, np.min_scalar_type(highest), key)


def check_content(encoder: Encoder, spec: Tokenize, wanted: str, source: str) -> None:
    """Raise TransformError if the tokenizer file differs from that of the launch.

    All processes of a job use one vocabulary. ``wanted`` is the digest at launch.
    """
    if encoder.content != wanted:
        problem = (
            f"expected the tokenizer file {spec.tokenizer} as at launch, got one with other content"
        )
        raise TransformError(
            source, "Tokenize", problem, "restore the file of the launch, or launch the job again"
        )


def _check_template(
    engine: Engine, spec: Tokenize, tokens: dict[str, int | None], source: str
) -> None:
    """Raise TransformError if the template of the tokenizer already adds ``bos`` or ``eos``."""
    [added] = engine.encode([""], True)
    for name, token in tokens.items():
        if token is not None and token in added:
            raise TransformError(
                source,
                repr(spec),
                f"{name}: expected a token that add_special_tokens does not add, got "
                f"{getattr(spec, name)!r}, which would be added twice",
                f"remove {name}, or set add_special_tokens=False",
            )


def _token_id(engine: Engine, spec: Tokenize, name: str, source: str) -> int | None:
    token = getattr(spec, name)
    return None if token is None else token_of(engine, token, "Tokenize", name, spec, source)


def token_of(
    engine: Engine, token: str | int, where: str, name: str, spec: Tokenize, source: str
) -> int:
    """Return the id of a token or id. Raises TransformError if the vocabulary lacks the token."""
    if isinstance(token, int):
        return token
    token_id = engine.token_id(token)
    if token_id is None:
        raise TransformError(
            source,
            where,
            f"{name}: expected a token of {spec.tokenizer}, got {token!r}",
            "use a token of the vocabulary, or an id",
        )
    return token_id
