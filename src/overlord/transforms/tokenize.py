"""Tokenization by Hugging Face tokenizers, in batches that release the interpreter lock."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import msgspec
import numpy as np

from overlord.checks import pip_install
from overlord.errors import TransformError
from overlord.hashing import digest
from overlord.process.resources import trim_heap
from overlord.sample import Ragged
from overlord.transforms.base import column_problems, flag_problems, refuse

# Texts per batch: the tokenizer's result takes 100 to 200 bytes per token until its ids are copied;
# larger batches are not faster.
TEXTS_PER_BATCH = 32


@dataclass(frozen=True, slots=True, repr=False)
class Tokenize:
    """Convert the text of a column to token ids in the smallest type that holds the vocabulary.

    ``tokenizer`` is the path of a ``tokenizer.json``. ``bos`` and ``eos``, tokens or ids, are added
    before and after every text. Padding and truncation in the file are ignored: the ids of a row
    must not depend on its neighbours.
    """

    tokenizer: str | Path
    text: str = "text"
    add_special_tokens: bool = field(default=False, kw_only=True)
    bos: str | int | None = field(default=None, kw_only=True)
    eos: str | int | None = field(default=None, kw_only=True)
    kind: ClassVar[str] = "tokenize"
    user_code: ClassVar[bool] = False
    holds_lock: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = column_problems("text", self.text) + flag_problems(self, "add_special_tokens")
        if not isinstance(self.tokenizer, (str, os.PathLike)) or not os.fspath(self.tokenizer):
            problems.append(
                "tokenizer: expected the path of a tokenizer.json, got "
                f"{type(self.tokenizer).__name__} {self.tokenizer!r:.60}"
            )
        else:
            # A path gives equal specifications as text and as Path.
            object.__setattr__(self, "tokenizer", os.path.expanduser(str(self.tokenizer)))
        for name in ("bos", "eos"):
            token = getattr(self, name)
            plain = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31
            if not (token is None or plain or (isinstance(token, str) and token)):
                problems.append(
                    f"{name}: expected a token or an id from 0 to 2**31 - 1, got {token!r}"
                )
        refuse("Tokenize", problems)

    def __repr__(self) -> str:
        extra = ", add_special_tokens=True" if self.add_special_tokens else ""
        extra += "".join(
            f", {n}={getattr(self, n)!r}" for n in ("bos", "eos") if getattr(self, n) is not None
        )
        return f"Tokenize({str(self.tokenizer)!r}, text={self.text!r}{extra})"

    def fingerprint(self) -> str:
        options = (self.text, self.add_special_tokens, self.bos, self.eos)
        return digest("tokenize", content_digest(str(self.tokenizer)), *(repr(o) for o in options))


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """A loaded tokenizer with the options of one specification."""

    tokenizer: Any
    add_special_tokens: bool
    bos: int | None
    eos: int | None
    dtype: np.dtype[Any]
    content: str  # digest of the tokenizer file

    def encode(self, texts: list[str]) -> Ragged:
        """Return the ids of every text, with ``bos`` and ``eos``.

        One C call per text copies the ids; ``array.fromlist`` costs half of ``np.array(ids)``.
        """
        ids, lengths = array("I"), array("q")
        before, after = ([] if token is None else [token] for token in (self.bos, self.eos))
        for k in range(0, len(texts), TEXTS_PER_BATCH):
            for encoding in self.tokenizer.encode_batch_fast(
                texts[k : k + TEXTS_PER_BATCH], add_special_tokens=self.add_special_tokens
            ):
                start = len(ids)
                ids.fromlist(before)
                ids.fromlist(encoding.ids)
                ids.fromlist(after)
                lengths.append(len(ids) - start)
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(
            np.frombuffer(lengths, np.int64) if lengths else np.zeros(0, np.int64), out=offsets[1:]
        )
        values = np.frombuffer(ids, np.uintc) if ids else np.zeros(0, np.uintc)
        return Ragged(values.astype(self.dtype, copy=False), offsets)


_lock = Lock()
# path -> ((size, mtime), digest), since hundreds of sources may share one file.
_digests: dict[str, tuple[tuple[int, int], str]] = {}
_loaded: dict[str, tuple[Any, int]] = {}  # digest of the file -> (tokenizer, highest id)


def content_digest(path: str, source: str = "") -> str:
    """Return a digest of the content of a file, whatever its path.

    Raises TransformError if the file cannot be read.
    """
    return _content(path, source)[0]


def build_encoder(spec: Tokenize, source: str = "") -> Encoder:
    """Return an encoder; a tokenizer is loaded once per process, and all threads share it."""
    path = str(spec.tokenizer)
    with _lock:
        key, content = _content(path, source)
        if key not in _loaded:
            _loaded[key] = _load(
                path, content if content is not None else Path(path).read_bytes(), source
            )
        tokenizer, top = _loaded[key]
    bos, eos = (_token_id(tokenizer, spec, name, source) for name in ("bos", "eos"))
    highest = max([top, *(token for token in (bos, eos) if token is not None)])
    return Encoder(tokenizer, spec.add_special_tokens, bos, eos, np.min_scalar_type(highest), key)


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


def _content(path: str, source: str) -> tuple[str, bytes | None]:
    try:
        stat = os.stat(path)
        stamp = (stat.st_size, stat.st_mtime_ns)
        if (known := _digests.get(path)) and known[0] == stamp:
            return known[1], None
        content = Path(path).read_bytes()
    except OSError as fault:
        problem = f"could not read the tokenizer file {path}: {fault.strerror or fault}"
        raise TransformError(
            source, "Tokenize", problem, "set the path of a tokenizer.json"
        ) from fault
    _digests[path] = (stamp, digest(content))
    return _digests[path][1], content


class _Model(msgspec.Struct):
    dropout: float | None = None


class _File(msgspec.Struct):
    """The field ``model`` of a tokenizer.json, the only field that this module reads.

    Parsing the whole file would take ten times its size in memory.
    """

    model: _Model | None = None


def _load(path: str, content: bytes, source: str) -> tuple[Any, int]:
    # Worker threads already run in parallel. Additional threads of tokenizers cost 25 % more CPU
    # per byte. The package reads the variable at every call, so the setting takes effect at once. A
    # value set by the user is kept.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from tokenizers import Tokenizer
    except ImportError as fault:
        raise TransformError(
            source, "Tokenize", "expected the package tokenizers, got none", pip_install("text")
        ) from fault
    try:
        dropout = getattr(msgspec.json.decode(content, type=_File).model, "dropout", None)
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as fault:  # tokenizers raises plain Exception
        raise TransformError(
            source,
            "Tokenize",
            f"expected a tokenizer.json, got {path}: {fault}",
            "set the path of a file that the package tokenizers can load",
        ) from fault
    if dropout:
        problem = f"expected no dropout in {path}, got {dropout}: ids would differ in every run"
        raise TransformError(source, "Tokenize", problem, "set model.dropout to null in the file")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    top = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    trim_heap()  # parsing a file of 1.7 MB leaves 7 MB of freed memory
    return tokenizer, top


def _token_id(tokenizer: Any, spec: Tokenize, name: str, source: str) -> int | None:
    token = getattr(spec, name)
    if token is None or isinstance(token, int):
        return token
    token_id: int | None = tokenizer.token_to_id(token)
    if token_id is None:
        raise TransformError(
            source,
            "Tokenize",
            f"{name}: expected a token of {spec.tokenizer}, got {token!r}",
            "use a token of the vocabulary, or an id",
        )
    return token_id
