"""The roles of columns: token ids, messages, text, images, judged by names and by values.

A role that does not follow from the data is a problem with a remedy, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from overlord.sources.base import TEXTS

IDS = ("tokens", "input_ids", "token_ids", "ids")  # usual names of columns with token ids
MESSAGES = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue")
LOSS = "loss_mask"  # a column of weights next to ids, as transforms know it
_PROMPTS = ("prompt", "instruction", "question", "input", "query", "source")
_RESPONSES = ("completion", "response", "output", "answer", "target")
_PAIR = ("chosen", "rejected")
_IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"RIFF")
_TEXT_SIZE = 16  # mean characters below which a column of another name is not text to train on


@dataclass(slots=True, kw_only=True)
class ColumnRoles:
    """The columns of a source by role; ``problem``: the reason why no job can use them."""

    tokens: str | None = None
    loss: str | None = None
    messages: str | None = None
    tools: str | None = None
    text: str | None = None
    images: str | None = None
    # Of a chosen and a rejected response: "tokens", "messages" or "text"; None: no such columns.
    pair: str | None = None
    prompt: str | None = None  # the column before both responses of a pair
    problem: str = ""
    notes: list[str] = field(default_factory=list)  # decisions that the user should check

    @property
    def needs_tokenizer(self) -> bool:
        texts = self.text is not None or self.messages is not None
        return texts or self.pair in ("text", "messages")


def roles_of(rows: Sequence[Mapping[str, Any]], tar: bool = False) -> ColumnRoles:
    """Return the roles of the columns of sampled rows; ``tar``: columns are parts of a shard."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    values = {name: found for name, found in values.items() if found}
    out = ColumnRoles(images=_image_column(values, tar))
    if set(_PAIR) <= set(values):
        _set_pair(values, out)
        return out
    out.tokens = _first(values, _is_ids, IDS)
    if out.tokens is not None:
        out.loss = _loss_of(values, out)
        return out
    # A row may have an empty list of messages, which is quarantined when it is read.
    said = {name: [v for v in found if v != []] for name, found in values.items()}
    said = {name: found for name, found in said.items() if found}
    out.messages = _first(said, _is_messages, (*MESSAGES, *said))
    if out.messages is not None:
        out.tools = "tools" if "tools" in values else None
        return out
    _choose_text(values, out)
    return out


def _set_pair(values: Mapping[str, list[Any]], out: ColumnRoles) -> None:
    """Set the kind of the columns of a chosen and a rejected response, and of their prompt."""
    kinds = {"tokens": _is_ids, "messages": _is_messages, "text": lambda v: isinstance(v, str)}
    responses = [value for name in _PAIR for value in values[name]]
    out.pair = next((kind for kind, fits in kinds.items() if all(map(fits, responses))), None)
    if out.pair is None:
        out.problem = "expected texts, messages or token ids in 'chosen' and 'rejected', got others"
    elif out.images is not None:
        out.problem = "expected pairs of responses without images; images of pairs are not read"
    elif "prompt" in values:
        prompts = (*kinds.values(),) if out.pair == "messages" else (kinds[out.pair],)
        if any(all(map(fits, values["prompt"])) for fits in prompts):
            out.prompt = "prompt"


def _first(
    values: Mapping[str, list[Any]], fits: Callable[[Any], bool], names: Sequence[str]
) -> str | None:
    return next((n for n in names if n in values and all(map(fits, values[n]))), None)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in value
    )


def _is_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(item, Mapping) and ("role" in item or {"from", "value"} <= set(item))
            for item in value
        )
    )


def _is_weights(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, (int, float)) and x >= 0 for x in value)


def _loss_of(values: Mapping[str, list[Any]], out: ColumnRoles) -> str | None:
    """Return the column of loss weights next to token ids; a column of labels is a problem."""
    if LOSS in values and all(map(_is_weights, values[LOSS])):
        return LOSS
    if "labels" in values:
        out.problem = (
            "expected token ids alone, got 'labels' next to them; make a column of weights from it "
            "(1 where there is a label, else 0) and name it in Tokens(loss=...)"
        )
    return None


def _choose_text(values: Mapping[str, list[Any]], out: ColumnRoles) -> None:
    """Set the column of text to train on, or the problem that there is none."""
    named = [n for n in TEXTS if all(isinstance(v, (str, bytes)) for v in values.get(n, [None]))]
    if named:
        out.text = named[0]
        if len(named) > 1:
            out.notes.append(f"column {named[0]!r} is used, {', '.join(map(repr, named[1:]))} not")
        return
    sizes = {
        name: sum(map(len, found)) / len(found)
        for name, found in values.items()
        if not name.startswith("__") and all(isinstance(v, str) for v in found)
    }
    prompt = next((n for n in _PROMPTS if n in sizes), None)
    response = next((n for n in _RESPONSES if n in sizes), None)
    if prompt and response:
        out.problem = (
            f"expected messages, got the columns {prompt!r} and {response!r}; a Map must return "
            "'messages' for Chat, since training on one of them alone would be wrong"
        )
        return
    texts = sorted((n for n in sizes if sizes[n] >= _TEXT_SIZE), key=lambda n: -sizes[n])
    if not texts:
        ids = _first(values, _is_ids, list(values))
        remedy = (
            "a Map must return 'tokens' (documentation: 'Sources')"
            if ids is None
            else f"if {ids!r} holds token ids, add the source with {{tokens: {{column: {ids}}}}}"
        )
        out.problem = (
            f"expected a column of text, messages or token ids, got {_shown(values)}; {remedy}"
        )
        return
    out.text = texts[0]
    if len(texts) > 1:
        others = ", ".join(map(repr, texts[1:]))
        out.notes.append(
            f"column {texts[0]!r} is used since its texts are the longest; {others} not"
        )


def _shown(values: Mapping[str, list[Any]]) -> str:
    return ", ".join(values) or "none with a value"


def _is_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.get("bytes")
    if isinstance(value, list):
        return bool(value) and all(map(_is_image, value))
    return isinstance(value, bytes) and value.startswith(_IMAGE_STARTS)


def _image_column(values: Mapping[str, list[Any]], tar: bool) -> str | None:
    """Return the column of images. A row may have an empty list, but some row has an image."""
    found = [
        name
        for name, column in values.items()
        if any(map(_is_image, column)) and all(_is_image(v) or v in ([], {}) for v in column)
    ]
    # In a tar shard "images" has all members that are images.
    return "images" if tar and len(found) > 1 else (found[0] if found else None)
