"""Spans of a rendered conversation that the model generates: what the loss is computed on.

A turn of the assistant begins at the end of its prompt, and ends after its end-of-turn token. Both
follow from marks (``chat_text.py``), and no content is searched for. A conversation in which a span
does not follow with certainty is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from overlord.transforms.chat_text import Mark, TracedText, plain


class NoSpan(Exception):
    """Raised if the span of a message does not follow from the template with certainty."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of a vocabulary."""

    # (text, start, stop) -> (start, stop) of each special token in that part of the text
    find: Callable[[str, int, int], list[tuple[int, int]]]
    bos: str = ""  # the token that begins a text


class Span(NamedTuple):
    """Characters ``start`` to ``stop - 1`` of a rendered conversation, and their loss weight."""

    start: int
    stop: int
    weight: float


class _Run(NamedTuple):
    start: int
    stop: int
    mark: Mark


@dataclass(frozen=True, slots=True)
class Turns:
    """The messages of the assistant in a conversation, and the rendering of its prompts.

    ``prompt(i)`` renders the messages before number i, followed by the prompt of the assistant.
    """

    weights: dict[int, float]  # of every message of the assistant, by its number; 0: no loss
    prompt: Callable[[int], TracedText]
    has_generation: bool  # whether the template has {% generation %}


def spans_of(text: TracedText, turns: Turns, special: SpecialTokens) -> list[Span]:
    """Return the spans of the messages to train on, in the order of the text.

    ``special``: those of the vocabulary.
    """
    runs = _runs(text)
    if turns.has_generation:
        return _marked_spans(runs, turns)
    return [
        Span(*_derived_span(text, runs, number, turns.prompt, special), weight)
        for number, weight in sorted(turns.weights.items())
        if weight
    ]


def _runs(text: TracedText) -> list[_Run]:
    out, at = [], 0
    for count, mark in text.runs:
        out.append(_Run(at, at + count, mark))
        at += count
    return out


def _marked_spans(runs: Sequence[_Run], turns: Turns) -> list[Span]:
    """Return the characters inside {% generation %}.

    Each belongs to the last message of the assistant that the loop of the template has reached.
    """
    out: list[Span] = []
    reached = -1
    untold = all(run.mark.turn < 0 for run in runs) and len(set(turns.weights.values())) == 1
    for run in runs:
        if run.mark.turn >= 0:
            reached = run.mark.turn
        if not run.mark.generated:
            continue
        # Without a loop over messages, all turns must have the same weight.
        owner = max((n for n in turns.weights if n <= reached or untold), default=-1)
        if owner < 0:
            raise NoSpan("expected {% generation %} after a message of the assistant, got none")
        if not (weight := turns.weights[owner]):
            continue
        if out and out[-1].stop == run.start and out[-1].weight == weight:
            out[-1] = Span(out[-1].start, run.stop, weight)
        else:
            out.append(Span(run.start, run.stop, weight))
    return out


def _derived_span(
    text: TracedText,
    runs: Sequence[_Run],
    number: int,
    prompt: Callable[[int], TracedText],
    special: SpecialTokens,
) -> tuple[int, int]:
    """Return where the text that the model generates for a message begins and ends."""
    where = f"message {number}"
    own = [run for run in runs if run.mark.turn == number]
    if not own:
        raise NoSpan(f"{where}: expected the template to write it in its loop, got no text")
    first, last = own[0].start, own[-1].stop
    if sum(run.stop - run.start for run in own) != last - first:
        raise NoSpan(f"{where}: expected one run of text, got text of other messages inside")
    content = [run for run in runs if run.mark.origin == number]
    if any(run.mark.turn != number for run in content):
        raise NoSpan(f"{where}: expected its content inside its turn, got some outside")
    if any(run.mark.origin not in (-1, number) for run in own):
        raise NoSpan(f"{where}: expected its own content, got that of another message")
    lead, tail = (content[0].start, content[-1].stop) if content else (last, first)
    start, header = _after_prompt(text, runs, prompt(number), (first, lead, last), where)
    written = plain(text)[first:lead] if content else ""
    opening = _texts(special, written) | _texts(special, header) | {special.bos}
    stop = _end(text, (max(start, tail), last), special, opening)
    if tail == last:
        raise NoSpan(f"{where}: expected the template to end the turn, got no text after it")
    return start, stop


def _after_prompt(
    text: TracedText,
    runs: Sequence[_Run],
    prompt: TracedText,
    turn: tuple[int, int, int],
    where: str,
) -> tuple[int, str]:
    """Return where a turn continues its prompt, and the text that the prompt has for it.

    The texts after the last content before the turn are compared, with and without the prompt.
    ``turn``: its start, first content and end.
    """
    first, lead, last = turn
    before = [run for run in runs if run.mark.origin >= 0 and run.stop <= first]
    asked = [run for run in _runs(prompt) if run.mark.origin >= 0]
    if (before[-1].mark.origin if before else -1) != (asked[-1].mark.origin if asked else -1):
        raise NoSpan(f"{where}: expected its prompt to end like the messages before it")
    whole = plain(text)
    tail = whole[before[-1].stop if before else 0 : first]
    added = plain(prompt)[asked[-1].stop if asked else 0 :]
    if not added.startswith(tail):
        raise NoSpan(f"{where}: expected a prompt that begins with {tail!r}, got {added!r}")
    header = added[len(tail) :]
    if whole[first:last].startswith(header):
        return first + len(header), header
    # The prompt has more text, such as "<think>", than this turn has before its content.
    if header.startswith(whole[first:lead]):
        return lead, header
    raise NoSpan(
        f"{where}: expected it to begin with its prompt {header!r}, got {whole[first:lead]!r}"
    )


def _texts(special: SpecialTokens, text: str) -> set[str]:
    return {text[start:stop] for start, stop in special.find(text, 0, len(text))}


def _end(text: TracedText, rest: tuple[int, int], special: SpecialTokens, opening: set[str]) -> int:
    """Return the end of a turn: after its last special token, or all of it if it has none.

    ``rest``: the text of the template after the content. A token that opens turns begins the next.
    """
    start, last = rest
    found = special.find(plain(text), start, last)
    for k, (begin, stop) in enumerate(found):
        if plain(text)[begin:stop] in opening:
            last, found = begin, found[:k]
            break
    return found[-1][1] if found else last
