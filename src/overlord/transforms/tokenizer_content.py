"""Content of tokenizers: files, folders, names and objects, all as bytes.

A tokenizer travels to other processes and into fingerprints as its content, never as an object of
a library. ``tokenizer_engines.py`` makes an engine of the content.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from overlord.checks import pip_install
from overlord.errors import TransformError
from overlord.hashing import digest
from overlord.transforms.timeouts import TIMEOUTS

T = TypeVar("T")

TIKTOKEN = "tiktoken:"  # prefix of the names of encodings of the package tiktoken
EXPECTED = (
    "a path, a name (gpt2, owner/model, tiktoken:cl100k_base), or an object of tokenizers, "
    "transformers, tiktoken or sentencepiece"
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(@[\w./-]+)?")
_PIECES = (".model", ".spm")  # suffixes of sentencepiece models
_IN_FOLDER = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


@dataclass(frozen=True, slots=True, repr=False)
class TokenizerContent:
    """A tokenizer as bytes: a tokenizer.json, a sentencepiece model, or packed tiktoken ranks."""

    kind: str  # "tokenizers", "sentencepiece" or "tiktoken"
    data: bytes
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        # A tokenizer.json has the digest of its bytes alone, as in states of earlier versions.
        parts = (self.data,) if self.kind == "tokenizers" else (self.kind, self.data)
        object.__setattr__(self, "digest", digest(*parts))

    def __repr__(self) -> str:
        return f"<{self.kind} {self.digest[:12]}>"


class Ranks(msgspec.Struct, array_like=True):
    """The parts of a tiktoken encoding that determine its ids."""

    pattern: str
    ranks: list[tuple[bytes, int]]  # by rank
    special: list[tuple[str, int]]  # by id


def content_of_object(thing: Any) -> TokenizerContent | None:
    """Return the content of a tokenizer object; None if its kind is unknown.

    Padding and truncation of the object are left out. Raises ValueError, with a remedy, for a
    tokenizer whose content cannot be taken.
    """
    if hasattr(thing, "encode_ordinary"):
        # tiktoken's README names these three attributes for extending an encoding.
        parts = Ranks(
            thing._pat_str,
            sorted(thing._mergeable_ranks.items(), key=lambda item: item[1]),
            sorted(thing._special_tokens.items(), key=lambda item: item[1]),
        )
        return TokenizerContent("tiktoken", msgspec.msgpack.encode(parts))
    if hasattr(thing, "serialized_model_proto"):
        return TokenizerContent("sentencepiece", thing.serialized_model_proto())
    if hasattr(thing, "apply_chat_template"):
        backend = getattr(thing, "backend_tokenizer", None)
        if not hasattr(backend, "to_str"):
            raise ValueError(
                f"expected a fast tokenizer of transformers, got {type(thing).__name__}; load it "
                "with use_fast=True, or pass its tokenizer.json or sentencepiece model"
            )
        thing = backend
    if hasattr(thing, "to_str") and hasattr(thing, "encode_batch"):
        # A copy: the settings of the user's object stay as they are.
        copy = type(thing).from_str(thing.to_str())
        copy.no_padding()
        copy.no_truncation()
        return TokenizerContent("tokenizers", copy.to_str().encode())
    return None


def is_name(text: str) -> bool:
    """Return whether a text is a name, not a path: no file has it, and it has the form of one."""
    if text.startswith(TIKTOKEN):
        return True
    if text.lower().endswith((".json", *_PIECES)) or not _HUB_NAME.fullmatch(text):
        return False
    return not os.path.exists(text)


_lock = threading.Lock()  # guards the three tables
# path -> ((size, mtime), digest), since hundreds of sources may share one file.
_files: dict[str, tuple[tuple[int, int], str]] = {}
_hub_files: dict[str, str] = {}  # name -> path in the local cache
_encodings: dict[str, TokenizerContent] = {}  # name of a tiktoken encoding -> content


def content_digest(tokenizer: str | TokenizerContent, source: str = "") -> str:
    """Return a digest of the content of a tokenizer, wherever it is.

    Raises TransformError if the tokenizer cannot be read.
    """
    if isinstance(tokenizer, TokenizerContent):
        return tokenizer.digest
    if tokenizer.startswith(TIKTOKEN):
        return read_content(tokenizer, source).digest
    path = file_of(tokenizer, source)
    stamp = _stamp(path, source)
    known = _files.get(path)
    return known[1] if known and known[0] == stamp else _read_file(path, source).digest


def read_content(tokenizer: str | TokenizerContent, source: str = "") -> TokenizerContent:
    """Return the content of a tokenizer. Raises TransformError if it cannot be read."""
    if isinstance(tokenizer, TokenizerContent):
        return tokenizer
    if tokenizer.startswith(TIKTOKEN):
        return _encoding(tokenizer, source)
    return _read_file(file_of(tokenizer, source), source)


def _read_file(path: str, source: str) -> TokenizerContent:
    stamp = _stamp(path, source)
    try:
        data = Path(path).read_bytes()
    except OSError as fault:
        raise _unreadable(path, fault, source) from fault
    kind = "sentencepiece" if path.lower().endswith(_PIECES) else "tokenizers"
    content = TokenizerContent(kind, data)
    with _lock:
        _files[path] = (stamp, content.digest)
    return content


def _stamp(path: str, source: str) -> tuple[int, int]:
    try:
        stat = os.stat(path)
    except OSError as fault:
        raise _unreadable(path, fault, source) from fault
    return stat.st_size, stat.st_mtime_ns


def _unreadable(path: str, fault: OSError, source: str) -> TransformError:
    problem = f"could not read the tokenizer file {path}: {fault.strerror or fault}"
    return TransformError(source, "Tokenize", problem, "set the path of a tokenizer.json")


def file_of(tokenizer: str, source: str) -> str:
    """Return the file of a path, a folder or a name on the Hugging Face Hub."""
    if is_name(tokenizer):
        with _lock:
            known = _hub_files.get(tokenizer)
        if known is None or not os.path.exists(known):
            known = _hub_file(tokenizer, source)
            with _lock:
                _hub_files[tokenizer] = known
        return known
    if not os.path.isdir(tokenizer):
        return tokenizer
    for name in _IN_FOLDER:
        if os.path.isfile(path := os.path.join(tokenizer, name)):
            return path
    raise TransformError(
        source,
        "Tokenize",
        f"expected one of {', '.join(_IN_FOLDER)} in the folder {tokenizer}, got none",
        "save the tokenizer there: tokenizer.save_pretrained(folder)",
    )


def _hub_file(name: str, source: str) -> str:
    """Return the tokenizer.json of a model: from the local cache, else by one download."""
    problem = f"expected a file, a folder or a model with a tokenizer.json, got {name!r}"
    remedy = (
        f"fetch it where there is a network (hf download {name.partition('@')[0]} tokenizer.json), "
        "or set the path of a tokenizer.json"
    )
    try:
        import huggingface_hub
    except ImportError as fault:
        raise TransformError(
            source,
            "Tokenize",
            f"{problem}, which needs the package huggingface_hub",
            f"{pip_install('text')}, or set the path of a tokenizer.json",
        ) from fault
    repo, _, revision = name.partition("@")
    try:
        found = huggingface_hub.try_to_load_from_cache(
            repo, "tokenizer.json", revision=revision or None
        )
        if isinstance(found, str):
            return found
        return _within_deadline(
            lambda: str(
                huggingface_hub.hf_hub_download(repo, "tokenizer.json", revision=revision or None)
            )
        )
    except Exception as fault:  # huggingface_hub has dozens of errors, of several packages
        reason = str(fault).strip().split("\n")[0]
        raise TransformError(
            source,
            "Tokenize",
            f"{problem}; it is not in the local cache, and the download failed: {reason}",
            remedy,
        ) from fault


def _encoding(name: str, source: str) -> TokenizerContent:
    with _lock:
        known = _encodings.get(name)
    if known is not None:
        return known
    short = name.removeprefix(TIKTOKEN)
    try:
        import tiktoken
    except ImportError as fault:
        raise missing_package("tiktoken", source) from fault
    try:
        if short not in tiktoken.list_encoding_names():
            names = ", ".join(sorted(tiktoken.list_encoding_names()))
            raise ValueError(f"unknown encoding; known: {names}")
        content = content_of_object(_within_deadline(lambda: tiktoken.get_encoding(short)))
    except Exception as fault:  # the download raises errors of several packages
        raise TransformError(
            source,
            "Tokenize",
            f"expected an encoding of tiktoken, got {name!r}: {str(fault).strip()}",
            "fetch it where there is a network and set TIKTOKEN_CACHE_DIR to its folder, or pass "
            "a tiktoken.Encoding",
        ) from fault
    assert content is not None
    with _lock:
        _encodings[name] = content
    return content


def _within_deadline(work: Callable[[], T]) -> T:
    """Return the result of ``work``. Raises TimeoutError if it takes longer than a download may.

    The thread is a daemon: a hanging download does not hold up the end of the process.
    """
    answers: list[T] = []
    faults: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=run, name="overlord-tokenizer-download", daemon=True)
    thread.start()
    thread.join(TIMEOUTS.download_s)
    if faults:
        raise faults[0]
    if not answers:
        raise TimeoutError(
            f"expected the download to end within {TIMEOUTS.download_s:.0f} s, got no end"
        )
    return answers[0]


def missing_package(package: str, source: str) -> TransformError:
    """Return the error for a tokenizer whose package is not installed."""
    command = {
        "tokenizers": pip_install("text"),
        "tiktoken": pip_install("tiktoken"),
        "sentencepiece": pip_install("sentencepiece"),
    }[package]
    return TransformError(source, "Tokenize", f"expected the package {package}, got none", command)
