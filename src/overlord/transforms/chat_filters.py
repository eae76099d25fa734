"""Filters of chat templates whose results keep the origin of every character."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import Environment, Undefined, pass_environment
from jinja2.filters import make_attrgetter

from overlord.transforms.chat_text import (
    OPERATIONS,
    Mark,
    TemplateRefused,
    TracedText,
    Untraceable,
    as_text,
    is_plain,
    join,
    origins,
    plain,
    replace,
    splitlines,
    strip,
)

MAX_INDENT = 64
# Filters of jinja2 that return their arguments, or parts of them, unchanged.
UNCHANGED = frozenset(
    [
        "abs",
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "groupby",
        "items",
        "last",
        "length",
        "list",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "reverse",
        "round",
        "select",
        "selectattr",
        "slice",
        "sort",
        "sum",
        "unique",
    ]
)


def checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter of jinja2 that refuses contents of messages if it would lose their marks."""
    if name in UNCHANGED:
        return function

    own = 1 if hasattr(function, "jinja_pass_arg") else 0  # arguments that jinja2 adds

    def refusing(*args: Any, **kwargs: Any) -> Any:
        given = [v for v in (*args[own:], *kwargs.values()) if not isinstance(v, Undefined)]
        if origins(given) or not is_plain(given):
            raise Untraceable(f"the filter {name} on the content of a message")
        return function(*args, **kwargs)

    refusing.__dict__.update(getattr(function, "__dict__", {}))
    return refusing


def _trim(value: Any, chars: str | None = None) -> str:
    return strip(as_text(value), chars)


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    text, limit = as_text(value), -1 if count is None else count
    if not old and not origins(text):
        return plain(text).replace(old, new, limit)
    return replace(text, old, as_text(new), limit)


@pass_environment
def _join(
    environment: Environment, values: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return join(as_text(d), [as_text(v) for v in values])


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if not isinstance(width, str) and width > MAX_INDENT:
        raise TemplateRefused(f"expected an indent of at most {MAX_INDENT}, got {width}")
    space = width if isinstance(width, str) else " " * width
    lines = splitlines(as_text(value) + "\n")
    if blank:
        made = join("\n" + space, lines)
    else:
        rest = [space + line if line else line for line in lines[1:]]
        made = join("\n", [lines[0], *rest])
    return space + made if first else made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without escapes of HTML, as transformers does; all of it has one origin."""
    if indent is not None and indent > MAX_INDENT:
        raise TemplateRefused(f"expected an indent of at most {MAX_INDENT}, got {indent}")
    found = origins(value)
    if len(found) > 1:
        raise Untraceable("tojson of the contents of several messages")
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return TracedText.of(text, ((len(text), Mark(min(found))),)) if found else text


def _cased(name: str) -> Callable[[Any], str]:
    def cased(value: Any) -> str:
        text = as_text(value)
        return OPERATIONS[name](text) if origins(text) else getattr(plain(text), name)()

    return cased


FILTERS: dict[str, Callable[..., Any]] = {
    "trim": _trim,
    "replace": _replace,
    "join": _join,
    "indent": _indent,
    "tojson": _to_json,
    "string": as_text,
    "safe": as_text,
    "upper": _cased("upper"),
    "lower": _cased("lower"),
    "capitalize": _cased("capitalize"),
}
