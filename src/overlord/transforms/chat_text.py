"""Text with the origin of every character, which string operations of a chat template preserve.

A template trims, splits, replaces and joins the contents of messages. The origin of a character is
the number of the message that it was copied from. No text is searched for, so a message that
quotes another message, or a mark of the template, changes no origin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, SupportsIndex


class Mark(NamedTuple):
    """The origin of characters."""

    origin: int = -1  # message whose content they were copied from; -1: text of the template
    turn: int = -1  # message whose pass through the template's loop wrote them; -1: none
    generated: bool = False  # written inside {% generation %}


PLAIN = Mark()
Runs = tuple[tuple[int, Mark], ...]  # (number of characters, mark), all numbers positive


class Untraceable(Exception):
    """Raised for an operation whose result has characters of unknown origin."""


class TemplateRefused(Exception):
    """Raised for a rendering that exceeds a bound, or writes a value that is not text."""


class TracedText(str):
    """A string with one mark for every character.

    An operation that is not in ``OPERATIONS`` is refused for it, so no origin is ever lost.
    """

    __slots__ = ("runs",)
    runs: Runs

    @staticmethod
    def of(text: str, runs: Runs) -> TracedText:
        made = TracedText(text)
        made.runs = runs
        return made

    def __str__(self) -> TracedText:
        return self

    def __add__(self, other: str) -> TracedText:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> TracedText:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> TracedText:
        return concat([self] * count.__index__())

    __rmul__ = __mul__

    def __mod__(self, other: Any) -> str:
        raise Untraceable("the operator % on the content of a message")

    __rmod__ = __mod__

    def __format__(self, spec: str) -> str:
        raise Untraceable("a format of the content of a message")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> TracedText:
        text = str.__getitem__(self, key)
        if not isinstance(key, slice):
            at = key.__index__()
            at += len(self) if at < 0 else 0
            return TracedText.of(text, _cut(self.runs, at, at + 1))
        start, stop, step = key.indices(len(self))
        if step == 1:
            return TracedText.of(text, _cut(self.runs, start, stop))
        marks = [mark for count, mark in self.runs for _ in range(count)][key]
        return TracedText.of(text, tuple((len(list(g)), m) for m, g in groupby(marks)))


def runs_of(text: str) -> Runs:
    if isinstance(text, TracedText):
        return text.runs
    return ((len(text), PLAIN),) if text else ()


def plain(text: str) -> str:
    """Return the characters alone, as a string of the built-in type."""
    return str.__str__(text)


def copied(text: str, origin: int) -> TracedText:
    """Return a text as the content of message ``origin``."""
    return TracedText.of(text, ((len(text), Mark(origin)),) if text else ())


def written(text: str, turn: int) -> TracedText:
    """Return a text as written in the pass of message ``turn``; -1 keeps earlier turns."""
    if turn < 0:
        return text if isinstance(text, TracedText) else TracedText.of(text, runs_of(text))
    runs = runs_of(text)
    return TracedText.of(
        plain(text), _merged((n, Mark(m.origin, turn, m.generated)) for n, m in runs)
    )


def generated(text: str) -> TracedText:
    runs = runs_of(text)
    return TracedText.of(plain(text), _merged((n, Mark(m.origin, m.turn, True)) for n, m in runs))


def concat(parts: Iterable[str]) -> TracedText:
    parts = list(parts)
    runs = _merged(run for part in parts for run in runs_of(part))
    return TracedText.of("".join(map(plain, parts)), runs)


def origins(value: Any) -> set[int]:
    """Return the messages whose contents are in a value: text, or containers of text."""
    if isinstance(value, TracedText):
        return {mark.origin for _, mark in value.runs if mark.origin >= 0}
    if isinstance(value, dict):
        return set().union(*map(origins, value), *map(origins, value.values()))
    if isinstance(value, (list, tuple)):
        return set().union(*map(origins, value))
    return set()


def as_text(value: Any) -> str:
    """Return a value as the template writes it; raise for null and for parts of messages.

    Null would be written as None, and a list as Python code.
    """
    if isinstance(value, str):
        return value
    if value is None:
        raise TemplateRefused("expected text, got none")
    if not is_plain(value):
        if text := str(value):  # "": an undefined value
            raise Untraceable(f"a {type(value).__name__}, written as text")
        return text
    if origins(value):
        raise Untraceable(f"a {type(value).__name__} of a message, written as text")
    return str(value)


def is_plain(value: Any) -> bool:
    """Return whether ``origins`` knows all texts in a value."""
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (str, int, float))


def _merged(runs: Iterable[tuple[int, Mark]]) -> Runs:
    out: list[tuple[int, Mark]] = []
    for count, mark in runs:
        if out and out[-1][1] == mark:
            out[-1] = out[-1][0] + count, mark
        else:
            out.append((count, mark))
    return tuple(out)


def _cut(runs: Runs, start: int, stop: int) -> Runs:
    """Return the runs of characters ``start`` to ``stop - 1``."""
    out, at = [], 0
    for count, mark in runs:
        low, high = max(at, start), min(at + count, stop)
        if low < high:
            out.append((high - low, mark))
        at += count
    return tuple(out)


# ----------------------------------------------------------------------------
# Methods of strings. Each takes the text as its first argument, and is equal to the method of the
# built-in type but for the marks.


def _traced(text: str) -> TracedText:
    return text if isinstance(text, TracedText) else TracedText.of(text, runs_of(text))


def lstrip(text: str, chars: str | None = None) -> str:
    return _traced(text)[len(text) - len(plain(text).lstrip(chars)) :]


def rstrip(text: str, chars: str | None = None) -> str:
    return _traced(text)[: len(plain(text).rstrip(chars))]


def strip(text: str, chars: str | None = None) -> str:
    return rstrip(lstrip(text, chars), chars)


def _pieces(text: str, pieces: Sequence[str]) -> list[str]:
    """Return consecutive pieces of a text with their marks."""
    whole, at = _traced(text), 0
    out: list[str] = []
    for piece in pieces:
        # Between two pieces there are only separators: none of them can contain a piece.
        at = plain(text).index(piece, at)
        out.append(whole[at : at + len(piece)])
        at += len(piece)
    return out


def _separated(text: str, pieces: Sequence[str], separator: str) -> list[str]:
    whole, at = _traced(text), 0
    out: list[str] = []
    for piece in pieces:
        out.append(whole[at : at + len(piece)])
        at += len(piece) + len(separator)
    return out


def split(text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    pieces = plain(text).split(sep, maxsplit)
    return _pieces(text, pieces) if sep is None else _separated(text, pieces, sep)


def rsplit(text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    pieces = plain(text).rsplit(sep, maxsplit)
    return _pieces(text, pieces) if sep is None else _separated(text, pieces, sep)


def splitlines(text: str, keepends: bool = False) -> list[str]:
    with_ends = _separated(text, plain(text).splitlines(True), "")
    if keepends:
        return with_ends
    lengths = [len(line) for line in plain(text).splitlines()]
    return [line[:n] for line, n in zip(with_ends, lengths, strict=True)]


def partition(text: str, sep: str) -> tuple[str, ...]:
    return tuple(_separated(text, plain(text).partition(sep), ""))


def rpartition(text: str, sep: str) -> tuple[str, ...]:
    return tuple(_separated(text, plain(text).rpartition(sep), ""))


def removeprefix(text: str, prefix: str) -> str:
    return _traced(text)[len(text) - len(plain(text).removeprefix(prefix)) :]


def removesuffix(text: str, suffix: str) -> str:
    return _traced(text)[: len(plain(text).removesuffix(suffix))]


def replace(text: str, old: str, new: str, count: int = -1) -> str:
    if not old:
        raise Untraceable("replace('', ...) on the content of a message")
    return join(new, split(text, old, count))


def join(text: str, parts: Iterable[str]) -> str:
    out: list[str] = []
    for part in parts:
        if not isinstance(part, str):
            raise TypeError(f"expected text to join, got {type(part).__name__}")
        out += [text, part] if out else [part]
    return concat(out)


def _same_length(method: Callable[[str], str]) -> Callable[[str], str]:
    def cased(text: str) -> str:
        made = method(plain(text))
        if len(made) != len(text):  # "ß" becomes "SS": characters never merge, so some was divided
            raise Untraceable(f"{method.__name__}() on a character that becomes two")
        return TracedText.of(made, runs_of(text))

    return cased


# Operations whose results keep the marks.
OPERATIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        lstrip,
        rstrip,
        strip,
        split,
        rsplit,
        splitlines,
        partition,
        rpartition,
        removeprefix,
        removesuffix,
        replace,
        join,
    )
} | {
    m.__name__: _same_length(m)
    for m in (str.upper, str.lower, str.title, str.capitalize, str.swapcase, str.casefold)
}
# Operations whose results are numbers or booleans.
QUESTIONS = frozenset(
    ["startswith", "endswith", "find", "rfind", "index", "rindex", "count"]
    + [name for name in dir(str) if name.startswith("is")]
)
