"""Specification of conversations: messages to token ids, with loss on the assistant's tokens."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar

from overlord.checks import names_arguments
from overlord.errors import TransformError
from overlord.hashing import digest
from overlord.transforms.base import column_problems, refuse
from overlord.transforms.chat_content import (
    DEFAULT,
    WITH_TOOLS,
    ChatTokenizer,
    chat_tokenizer_of_object,
    read_chat_tokenizer,
    read_text,
)
from overlord.transforms.chat_messages import BadConversation, tools_of
from overlord.transforms.tokenizer_content import EXPECTED

TRAIN_ON = ("assistant", "last", "all")
TEMPLATE_SUFFIX = ".jinja"  # of files


@names_arguments
@dataclass(frozen=True, slots=True, repr=False)
class Chat:
    """Convert conversations to token ids by the chat template of a tokenizer.

    ``messages`` is a column of messages in the form of OpenAI or ShareGPT. ``tools`` is a column of
    tool definitions, or a list of them for all rows. ``train_on`` selects the tokens with a loss:
    those of all turns of the assistant, of its last turn, or all tokens. ``template`` replaces the
    tokenizer's template by a text, a file (``*.jinja``), or another of its named templates.
    ``variables`` are passed to the template; ``date`` is the day that it sees as today.
    """

    # A tokenizer object becomes its content.
    tokenizer: Any
    messages: str = "messages"
    tools: str | Sequence[Mapping[str, Any]] | None = None
    train_on: str = "assistant"
    template: str | None = field(default=None, kw_only=True)
    variables: Mapping[str, Any] | None = field(default=None, kw_only=True)
    date: str | None = field(default=None, kw_only=True)
    kind: ClassVar[str] = "chat"
    user_code: ClassVar[bool] = False
    holds_lock: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("date", "template"):
            if isinstance(given := getattr(self, name), (datetime.date, os.PathLike)):
                object.__setattr__(self, name, str(given))
        problems = self._set_tokenizer() + column_problems("messages", self.messages)
        problems += self._tools_problems() + self._template_problems()
        if self.train_on not in TRAIN_ON:
            known = ", ".join(TRAIN_ON)
            problems.append(f"train_on: expected one of {known}, got {self.train_on!r}")
        refuse("Chat", problems)

    def _set_tokenizer(self) -> list[str]:
        """Replace a path by its text and an object by its content, and return the problems."""
        given: Any = self.tokenizer
        if isinstance(given, ChatTokenizer):
            return []
        if isinstance(given, (str, os.PathLike)) and os.fspath(given):
            object.__setattr__(self, "tokenizer", os.path.expanduser(str(given)))
            return []
        try:
            content = None if isinstance(given, (str, bytes)) else chat_tokenizer_of_object(given)
        except ValueError as fault:
            return [f"tokenizer: {fault}"]
        if content is None:
            return [f"tokenizer: expected {EXPECTED}, got {type(given).__name__} {given!r:.60}"]
        object.__setattr__(self, "tokenizer", content)
        return []

    def _tools_problems(self) -> list[str]:
        if self.tools is None or isinstance(self.tools, str):
            return [] if self.tools is None else column_problems("tools", self.tools)
        try:
            tools_of(list(self.tools))
            json.dumps(self.tools)
        except (BadConversation, TypeError, ValueError) as fault:
            return [f"tools: expected a column or a list of tool definitions, got: {fault}"]
        return []

    def _template_problems(self) -> list[str]:
        problems = []
        if self.template is not None and not (isinstance(self.template, str) and self.template):
            problems.append(f"template: expected a text, a file or a name, got {self.template!r}")
        try:
            if not isinstance(self.variables, (Mapping, NoneType)):
                raise TypeError(f"got {type(self.variables).__name__}")
            json.dumps(dict(self.variables or {}), allow_nan=False)
        except (TypeError, ValueError) as fault:
            problems.append(f"variables: expected a mapping of plain values, {fault}")
        else:
            fixed = sorted(
                {"messages", "tools", "add_generation_prompt"} & set(self.variables or {})
            )
            if fixed:
                problems.append(f"variables: expected other names, got {fixed[0]!r}")
        try:
            if self.date is not None:
                datetime.date.fromisoformat(self.date)
        except (TypeError, ValueError):
            problems.append(f"date: expected a day such as '2026-01-31', got {self.date!r}")
        return problems

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the rows that are read."""
        return (self.messages, self.tools) if isinstance(self.tools, str) else (self.messages,)

    @property
    def has_weights(self) -> bool:
        return self.train_on != "all"

    def __repr__(self) -> str:
        shown = repr(self.tokenizer) if isinstance(self.tokenizer, str) else str(self.tokenizer)
        tools, template = self.tools, self.template
        # Long values are shown by their digest, which tells specifications apart.
        if tools is not None and not isinstance(tools, str):
            tools = f"<{len(tools)} tools {digest(_plain(list(tools)))[:12]}>"
        if template is not None and "{" in template:
            template = f"<template {digest(template)[:12]}>"
        options = {"tools": tools, "train_on": self.train_on, "template": template} | {
            "variables": self.variables,
            "date": self.date,
        }
        extra = "".join(f", {n}={v!r}" for n, v in options.items() if v is not None)
        return f"Chat({shown}, messages={self.messages!r}{extra})"

    def fingerprint(self) -> str:
        tools = self.tools if isinstance(self.tools, str) else _plain(self.tools)
        options = (
            self.messages,
            tools,
            self.train_on,
            _plain(dict(self.variables or {})),
            self.date,
        )
        return digest("chat", chat_digest(self), *(repr(option) for option in options))


def chat_digest(spec: Chat, source: str = "") -> str:
    """Return a digest of the tokenizer and of the templates that a specification uses.

    Raises TransformError if a file cannot be read.
    """
    content = read_chat_tokenizer(spec.tokenizer, source)
    templates = templates_of(spec, content, source)
    return digest(content.tokenizer.digest, repr(content.templates.tokens), _plain(templates))


def templates_of(spec: Chat, content: ChatTokenizer, source: str) -> dict[str, str]:
    """Return the templates for rows without and with tools. Raises TransformError if none fits."""
    stored = content.templates
    if (given := spec.template) is None:
        default = stored.text(DEFAULT)
        if default is None:
            names = ", ".join(name for name, _ in stored.templates) or "none"
            raise TransformError(
                source,
                "Chat",
                f"expected a tokenizer with a chat template, got {spec.tokenizer} with {names}",
                "set template=, or put tokenizer_config.json or chat_template.jinja next to it",
            )
        return {DEFAULT: default, WITH_TOOLS: stored.text(WITH_TOOLS) or default}
    if "{" in given:
        text = given
    elif given.endswith(TEMPLATE_SUFFIX):
        text = read_text(Path(os.path.expanduser(given)), source)
    elif (named := stored.text(given)) is not None:
        text = named
    else:
        names = ", ".join(name for name, _ in stored.templates) or "none"
        raise TransformError(
            source,
            "Chat",
            f"expected the name of a template of the tokenizer ({names}), got {given!r}",
            "use one of these names, the path of a .jinja file, or the text of a template",
        )
    return {DEFAULT: text, WITH_TOOLS: text}


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
