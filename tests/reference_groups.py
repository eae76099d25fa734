"""Samples of several documents: docs/pairs.md as a plain, slow program on rows of token ids.

It shares no code with the package.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, NamedTuple

FAILED = "failed"
Row = dict[str, Any]


class Grouped(NamedTuple):
    """The documents of a row: ids with their prompt, tokens of the prompt, loss weights."""

    documents: list[list[int]]
    prompts: list[int]
    weights: list[list[float]]
    values: dict[str, list[float]]


def grouped(step: Any, fields: Row) -> Any:
    """Return the fields with the documents of a Pair or a Group of token ids, or FAILED."""
    if type(step).__name__ == "Pair":
        responses = [fields.get(step.chosen), fields.get(step.rejected)]
    else:
        responses = fields.get(step.column) or []
        if not responses or (step.size is not None and len(responses) != step.size):
            return FAILED
    prompt = [] if step.prompt is None else fields.get(step.prompt)
    if not are_ids(prompt) or not all(are_ids(r) and r for r in responses):
        return FAILED
    values = {}
    for name, given in (step.values or {}).items():
        columns = [given] if isinstance(given, str) else list(given)
        found = [fields.get(c) for c in columns]
        numbers = found if len(found) > 1 else found[0]
        if not isinstance(numbers, list):
            numbers = [numbers] * len(responses)
        if len(numbers) != len(responses) or not all(is_number(v) for v in numbers):
            return FAILED
        values[name] = [float(v) for v in numbers]
    first = 0.0 if step.prompt is not None else 1.0
    weights = [[first] * len(prompt) + [1.0] * len(r) for r in responses]
    documents = [[*prompt, *r] for r in responses]
    return {
        **fields,
        "documents": Grouped(documents, [len(prompt)] * len(documents), weights, values),
    }


def weighted(step: Any, fields: Row) -> Any:
    """Return the fields with the loss weights of Tokens(loss=) after a Pair or Group, or FAILED."""
    if step.loss is None:
        return fields
    made = fields["documents"]
    columns = [step.loss] if isinstance(step.loss, str) else list(step.loss)
    given = [fields.get(c) for c in columns] if len(columns) > 1 else fields.get(step.loss)
    if not isinstance(given, list) or len(given) != len(made.documents):
        return FAILED
    weights = []
    for document, prompt, own in zip(made.documents, made.prompts, given, strict=True):
        if not isinstance(own, list) or len(own) != len(document) - prompt:
            return FAILED
        if not all(is_number(w) and w >= 0 for w in own):
            return FAILED
        weights.append([0.0] * prompt + [float(w) for w in own])
    return {**fields, "documents": made._replace(weights=weights)}


def are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and 0 <= v < 2**31 for v in value)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and isfinite(value)


def most_tokens(lengths: list[int], limit: int, room: int) -> int:
    """Return the largest length to which documents are cut, so that all fit into a microbatch."""
    n = len(lengths)
    free = min(127, room // (32 * n)) if n > 1 else 0
    return next(
        most
        for most in range(limit, -1, -1)
        if sum(min(length, most) for length in lengths) + n * free <= room or most == 0
    )


def fitted(made: Grouped, limit: int, room: int, on_long: str) -> list[list[int]] | None:
    """Return the documents of a sample within the bounds; None: the row cannot be used."""
    most = most_tokens([len(d) for d in made.documents], limit, room)
    cut = [d[:most] for d in made.documents]
    if on_long == "quarantine" and cut != made.documents:
        return None
    short = any(len(d) <= p for d, p in zip(cut, made.prompts, strict=True))
    return None if short else cut


def lost_of_group(made: Grouped, limit: int, room: int, on_long: str) -> int:
    """Return the tokens that a sample loses to ``on_long``; 0 for a row that cannot be used."""
    whole = sum(map(len, made.documents))
    most = most_tokens([len(d) for d in made.documents], limit, room)
    lost = whole - sum(len(d[:most]) for d in made.documents)
    if on_long == "drop":
        return whole if lost else 0
    return 0 if fitted(made, limit, room, on_long) is None else lost


def documents_of(job: Any, sample: Any) -> Grouped | None:
    """Return the documents of a sample of a dataset as delivered; None for a plain sample."""
    (name, _, _, row, _), _ = sample
    source = next(s for s in job.sources if s.name == name)
    if not any(type(t).__name__ in ("Pair", "Group") for t in source.transforms):
        return None
    fields = source.uri[row]
    for step in source.transforms:
        kind = type(step).__name__
        fields = grouped(step, fields) if kind in ("Pair", "Group") else fields
        fields = weighted(step, fields) if kind == "Tokens" else fields
    made = fields["documents"]
    limit = job.max_document or job.batch.context
    cut = fitted(made, limit, job.batch.context, job.on_long)
    assert cut is not None, "a quarantined row has no sample"
    weights = [w[: len(d)] for w, d in zip(made.weights, cut, strict=True)]
    return made._replace(documents=cut, weights=weights)
