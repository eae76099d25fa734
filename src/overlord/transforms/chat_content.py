"""Content of chat tokenizers: the tokenizer, its templates and its named special tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlord.errors import TransformError
from overlord.hashing import digest
from overlord.transforms.tokenizer_content import (
    TokenizerContent,
    content_of_object,
    file_of,
    is_name,
    read_content,
)

# Names of special tokens that templates receive as variables.
TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
DEFAULT, WITH_TOOLS = "default", "tool_use"


@dataclass(frozen=True, slots=True)
class Templates:
    """Named templates and special tokens; ``tokens`` is None if no file names the tokens."""

    templates: tuple[tuple[str, str], ...] = ()
    tokens: tuple[tuple[str, str], ...] | None = None

    @property
    def digest(self) -> str:
        return digest("templates", repr(self.templates), repr(self.tokens))

    def text(self, name: str) -> str | None:
        return dict(self.templates).get(name)


@dataclass(frozen=True, slots=True, repr=False)
class ChatTokenizer:
    """A tokenizer with its templates, as bytes and text."""

    tokenizer: TokenizerContent
    templates: Templates

    @property
    def digest(self) -> str:
        return digest("chat", self.tokenizer.digest, self.templates.digest)

    def __repr__(self) -> str:
        return repr(self.tokenizer)


def chat_tokenizer_of_object(thing: Any) -> ChatTokenizer | None:
    """Return the content of a tokenizer object; None if its kind is unknown.

    Raises ValueError, with a remedy, for a tokenizer whose content cannot be taken.
    """
    content = content_of_object(thing)
    if content is None:
        return None
    if not hasattr(thing, "apply_chat_template"):
        return ChatTokenizer(content, Templates())
    tokens = {f"{name}_token": getattr(thing, f"{name}_token", None) for name in TOKENS}
    return ChatTokenizer(content, _templates(thing.chat_template, tokens))


def read_chat_tokenizer(tokenizer: str | ChatTokenizer, source: str = "") -> ChatTokenizer:
    """Return the content of a chat tokenizer. Raises TransformError if it cannot be read."""
    if isinstance(tokenizer, ChatTokenizer):
        return tokenizer
    content = read_content(tokenizer, source)
    if tokenizer.startswith("tiktoken:"):
        return ChatTokenizer(content, Templates())
    folder = Path(file_of(tokenizer, source)).parent
    if not is_name(tokenizer) and os.path.isdir(tokenizer):
        folder = Path(tokenizer)
    return ChatTokenizer(content, _read_templates(folder, source))


def _read_templates(folder: Path, source: str) -> Templates:
    """Return the templates of a folder in the places where transformers stores them."""
    config = _read_json(folder / "tokenizer_config.json", source)
    templates = _by_name(config.get("chat_template") if config else None)
    if not templates:
        processor = _read_json(folder / "chat_template.json", source) or {}
        templates = _by_name(processor.get("chat_template"))
    files = {DEFAULT: folder / "chat_template.jinja"} | {
        path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    for name, path in files.items():
        if path.is_file():
            templates[name] = read_text(path, source)
    return Templates(
        tuple(sorted(templates.items())), None if config is None else _named_tokens(config)
    )


def _templates(templates: Any, tokens: Mapping[str, Any]) -> Templates:
    return Templates(tuple(sorted(_by_name(templates).items())), _named_tokens(tokens))


def _by_name(templates: Any) -> dict[str, str]:
    """Return templates by name, from a text, a mapping, or a list of mappings."""
    if isinstance(templates, str):
        return {DEFAULT: templates}
    if isinstance(templates, list):
        return {t["name"]: t["template"] for t in templates if isinstance(t, dict)}
    return dict(templates or {})


def _named_tokens(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    found = {}
    for name in (f"{name}_token" for name in TOKENS):
        token = config.get(name)
        if isinstance(token, dict):  # an AddedToken
            token = token.get("content")
        if token is not None:
            found[name] = str(token)
    return tuple(sorted(found.items()))


def _read_json(path: Path, source: str) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        read = json.loads(read_text(path, source))
    except ValueError as fault:
        raise TransformError(
            source, "Chat", f"expected JSON in {path}, got: {fault}", "save the tokenizer again"
        ) from fault
    return read if isinstance(read, dict) else {}


def read_text(path: Path, source: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        problem = f"could not read the template file {path}: {fault}"
        raise TransformError(source, "Chat", problem, "set the path of a Jinja template") from fault
