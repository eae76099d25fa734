"""Encoding of conversations: rendering, spans of the assistant, token ids and loss weights."""

from __future__ import annotations

import datetime
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.checks import pip_install
from overlord.errors import TransformError
from overlord.hashing import digest
from overlord.sample import Ragged
from overlord.transforms.chat import Chat, chat_digest, templates_of
from overlord.transforms.chat_content import DEFAULT, TOKENS, WITH_TOOLS, read_chat_tokenizer
from overlord.transforms.chat_messages import BadConversation, Conversation, conversation
from overlord.transforms.chat_spans import NoSpan, Span, SpecialTokens, Turns, spans_of
from overlord.transforms.chat_text import TracedText, Untraceable, plain
from overlord.transforms.tokenize import TEXTS_PER_BATCH
from overlord.transforms.tokenizer_engines import SpanEngine, load_span_engine

if TYPE_CHECKING:
    from overlord.transforms.chat_sandbox import Template

Bad = dict[int, str]  # row -> reason
REMEDY = "mark what to train on with {% generation %} in the template"


class BadRendering(Exception):
    """Raised for a conversation that the template cannot render, with the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class ChatEncoder:
    """A loaded tokenizer and its compiled templates, with the options of one specification."""

    spec: Chat
    engine: SpanEngine
    templates: Mapping[str, Template]  # by name: for rows without and with tools
    variables: Mapping[str, Any]  # of every rendering
    special: SpecialTokens
    dtype: np.dtype[Any]
    content: str  # digest of the tokenizer and the templates

    def encode(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        first: Sequence[int] | None = None,
    ) -> tuple[Ragged, Ragged | None, Bad]:
        """Return the ids and loss weights of the good rows, and the reasons of the others.

        The weights are None if all tokens have a loss. ``first``: the number of messages that begin
        each row without a loss.
        """
        texts, spans, bad = [], [], Bad()
        for row, given in enumerate(messages):
            try:
                text, found = self.render(
                    given, None if tools is None else tools[row], 0 if first is None else first[row]
                )
            except (BadConversation, BadRendering, NoSpan) as fault:
                bad[row] = f"{self.spec.messages}: {fault}"
            else:
                texts.append((row, text))
                spans.append(found)
        ids, weights, late = self._tokenized([text for _, text in texts], spans)
        bad |= {texts[i][0]: f"{self.spec.messages}: {reason}" for i, reason in late.items()}
        return ids, weights, bad

    def render(self, messages: Any, tools: Any = None, first: int = 0) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the spans with a loss from message ``first`` on.

        Raises BadConversation, BadRendering or NoSpan.
        """
        spec = self.spec
        given = tools if spec.tools is None or isinstance(spec.tools, str) else list(spec.tools)
        made = conversation(messages, given)
        made, text = self._rendered_form(made)
        if not spec.has_weights:
            return plain(text), []
        weights = {n: w if n >= first else 0.0 for n, w in self._weights(made).items()}
        if not any(weights.values()):
            raise BadConversation("expected a message of the assistant with a loss, got none")
        return plain(text), self._spans(made, text, weights)

    def _rendered_form(self, given: Conversation) -> tuple[Conversation, TracedText]:
        """Return the first form of a conversation that the template writes with all its messages.

        Raises BadRendering with the fault of the given form.
        """
        first: BadRendering | None = None
        for made in given.forms():
            try:
                text = self._rendered(made)
            except BadRendering as fault:
                first = first or fault
                continue
            if (lost := made.lost({mark.origin for _, mark in text.runs})) is None:
                return made, text
            problem = f"message {lost}: expected the template to write its content, got none of it"
            first = first or BadRendering(problem)
        assert first is not None, "there is at least one form"
        raise first

    def _weights(self, made: Conversation) -> dict[int, float]:
        """Return the weights of the assistant's messages, as ``train_on`` selects them."""
        if self.spec.train_on == "last" and made.weights:
            last = max(made.weights)
            return {n: w if n == last else 0.0 for n, w in made.weights.items()}
        return made.weights

    def _spans(self, made: Conversation, text: TracedText, weights: dict[int, float]) -> list[Span]:
        template = self._template(made)

        def prompt(number: int) -> TracedText:
            part = Conversation(made.messages[:number], made.tools, {})
            try:
                return self._rendered(part, add_generation_prompt=True)
            except BadRendering as fault:
                where = f"message {number}: expected the template to render its prompt"
                raise NoSpan(f"{where}, got: {fault}; {REMEDY}") from None

        try:
            turns = Turns(weights, prompt, template.has_generation)
            spans = spans_of(text, turns, self.special)
        except NoSpan as fault:
            reason = str(fault)
            raise NoSpan(reason if REMEDY in reason else f"{reason}; {REMEDY}") from None
        if not spans:
            raise NoSpan("expected {% generation %} around the messages to train on, got none")
        return spans

    def _template(self, made: Conversation) -> Template:
        return self.templates[WITH_TOOLS if made.tools else DEFAULT]

    def _rendered(self, made: Conversation, add_generation_prompt: bool = False) -> TracedText:
        from overlord.transforms.chat_sandbox import messages_of

        try:
            return self._template(made).render(
                messages=messages_of(made.messages),
                tools=made.tools,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except MemoryError:
            raise
        except Untraceable as fault:
            raise BadRendering(f"expected a template that can be traced, got {fault}") from None
        except Exception as fault:  # a template may raise anything
            raise BadRendering(
                f"expected the template to render the conversation, got {_shown(fault)}"
            ) from None

    def _tokenized(
        self, texts: list[str], spans: list[list[Span]]
    ) -> tuple[Ragged, Ragged | None, Bad]:
        rows: list[np.ndarray] = []
        losses: list[np.ndarray] = []
        bad: Bad = {}
        for k in range(0, len(texts), TEXTS_PER_BATCH):
            batch = texts[k : k + TEXTS_PER_BATCH]
            for i, (ids, offsets) in enumerate(self.engine.encode_with_offsets(batch), k):
                weights = None
                if self.spec.has_weights:
                    weights = token_weights(np.array(offsets, np.int64).reshape(-1, 2), spans[i])
                    if not weights[1:].any():  # the first token is not predicted
                        bad[i] = "expected a token with a loss, got none"
                        continue
                    losses.append(weights)
                rows.append(np.array(ids, self.dtype))
        made = Ragged.from_rows(rows, self.dtype)
        return made, Ragged.from_rows(losses, np.float32) if self.spec.has_weights else None, bad


def token_weights(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Return the weight of every token, given its characters: int64 ``[tokens, 2]``.

    A token has the weight of a span if it has a character of it, or lies between two that have.
    """
    weights = np.zeros(len(offsets), np.float32)
    for span in spans:
        inside = np.flatnonzero((offsets[:, 1] > span.start) & (offsets[:, 0] < span.stop))
        if len(inside):
            weights[inside[0] : inside[-1] + 1] = span.weight
    return weights


def _shown(fault: BaseException) -> str:
    text = f"{type(fault).__name__}: {fault}".strip()[:300]
    if "strftime_now" in text:
        text += "; set date= to the day that the template shows"
    return text


_lock = threading.Lock()
_engines: dict[str, SpanEngine] = {}  # digest of a tokenizer -> engine
_compiled: dict[str, Template] = {}  # digest of a template and a date -> compiled template


def build_chat_encoder(spec: Chat, source: str = "") -> ChatEncoder:
    """Return an encoder; a tokenizer is loaded once per process, and all threads share it."""
    content = read_chat_tokenizer(spec.tokenizer, source)
    named = templates_of(spec, content, source)
    key = content.tokenizer.digest
    with _lock:
        if key not in _engines:
            _engines[key] = load_span_engine(content.tokenizer, str(spec.tokenizer), source)
        engine = _engines[key]
        templates = {name: _compile(text, spec.date, source) for name, text in named.items()}
    tokens = dict(content.templates.tokens or ())
    if content.templates.tokens is None:
        _check_tokens(spec, templates, source)
    special = sorted({*engine.special, *filter(None, tokens.values())}, key=len, reverse=True)
    variables = {"documents": None} | tokens | dict(spec.variables or {})
    return ChatEncoder(
        spec,
        engine,
        templates,
        variables,
        _special_tokens(special, tokens.get("bos_token", "")),
        np.min_scalar_type(engine.top),
        chat_digest(spec, source),
    )


def _special_tokens(longest_first: Sequence[str], bos: str) -> SpecialTokens:
    pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def find(text: str, start: int, stop: int) -> list[tuple[int, int]]:
        return [found.span() for found in pattern.finditer(text, start, stop)]

    return SpecialTokens(find, bos)


def check_chat_content(encoder: ChatEncoder, wanted: str, source: str) -> None:
    """Raise TransformError if the tokenizer or its template differs from that of the launch."""
    if encoder.content != wanted:
        problem = f"expected the tokenizer and template of {encoder.spec.tokenizer} as at launch"
        raise TransformError(
            source,
            "Chat",
            f"{problem}, got other content",
            "restore the files of the launch, or launch the job again",
        )


def _compile(text: str, date: str | None, source: str) -> Template:
    try:
        from overlord.transforms.chat_sandbox import Template
    except ImportError as fault:
        raise TransformError(
            source, "Chat", "expected the package jinja2, got none", pip_install("chat")
        ) from fault
    key = digest(text, repr(date))
    if key not in _compiled:
        try:
            today = None if date is None else datetime.date.fromisoformat(date)
            _compiled[key] = Template(text, today)
        except MemoryError:
            raise
        except Exception as fault:
            raise TransformError(
                source, "Chat", f"expected a Jinja template, got: {_shown(fault)}", "correct it"
            ) from fault
    return _compiled[key]


def _check_tokens(spec: Chat, templates: Mapping[str, Template], source: str) -> None:
    """Raise TransformError if a template writes special tokens that no file names."""
    used = {name for t in templates.values() for name in t.names}
    unknown = sorted({f"{name}_token" for name in TOKENS} & used - set(spec.variables or {}))
    if unknown:
        raise TransformError(
            source,
            "Chat",
            f"expected the value of {unknown[0]}, which the template uses, got none",
            "put tokenizer_config.json next to the tokenizer, or give the value in variables=",
        )
