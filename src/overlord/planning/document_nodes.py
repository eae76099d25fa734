"""Costs and sizes of samples of several documents: those of their documents, summed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from overlord.documents import LENGTHS, SampleDocuments, documents_of, padded_sizes
from overlord.plan.tasks import PlanTasks
from overlord.sample import Buffer, Column, Ragged

Columns = Mapping[str, Column]


def documents_of_buffer(buffer: Buffer) -> SampleDocuments | None:
    """Return the documents of a buffer's samples; None if each sample of the job is one document.

    A buffer made by hand has them in the column ``document_lengths``.
    """
    if LENGTHS not in buffer.documents and LENGTHS not in buffer.meta:
        return None
    names = tuple(name for name in buffer.documents if name != LENGTHS)
    return documents_of(buffer.meta, names, len(buffer))


def lengths_of(buffer: Buffer, rows: np.ndarray | None = None) -> Ragged | None:
    """Return the lengths of the documents of samples; None if every sample is one document.

    ``rows``: of the buffer; None: all.
    """
    lengths = buffer.meta.get(LENGTHS)
    if not isinstance(lengths, Ragged) or not len(lengths.values):
        return None
    return lengths if rows is None or len(rows) == len(buffer) else lengths.take(rows)


def sample_sizes(
    buffer: Buffer, rows: np.ndarray, multiple: int, tasks: PlanTasks | None = None
) -> np.ndarray:
    """Return the tokens of samples with the padding of each of their documents: int64.

    ``tasks``: rings that share the samples, which then decide the padding.
    """
    tokens = buffer.column("tokens")
    assert isinstance(tokens, np.ndarray)
    tokens = tokens[rows] if len(rows) < len(tokens) else tokens
    if tasks is not None:
        return tasks.lengths(tokens.astype(np.int64))
    return padded_sizes(tokens, lengths_of(buffer, rows), multiple)


def summed(
    evaluate: Callable[[Columns, int], np.ndarray],
    columns: Columns,
    lengths: Ragged | None,
    rows: int,
) -> np.ndarray:
    """Return the cost of every sample: the sum of the costs of its documents.

    ``evaluate(columns, n)`` returns the costs of n nodes. ``lengths``: as from ``lengths_of``.
    """
    if lengths is None:
        return evaluate(columns, rows)
    documents = SampleDocuments(np.arange(rows), lengths, {})
    counts = documents.counts
    node = np.repeat(np.arange(rows), counts)
    costs = evaluate(_expanded(columns, documents, node), len(node))
    # bincount adds one document after another, in order: the same sum on every machine
    return np.bincount(node, weights=costs, minlength=rows)


def _expanded(columns: Columns, documents: SampleDocuments, node: np.ndarray) -> dict[str, Column]:
    """Return the metadata of documents.

    Tokens and bytes are their own, and so is a value of a list with one value for each of several
    documents. The first document has all other items, and every document the numbers, of its
    sample.
    """
    tokens = columns.get("tokens")
    held, several = documents.lengths.lengths, documents.counts > 1
    first = np.append(True, node[1:] != node[:-1])[: len(node)]
    found: dict[str, Column] = {}
    for name, column in columns.items():
        if name == LENGTHS:
            continue
        if name == "tokens":
            assert isinstance(column, np.ndarray)
            found[name] = documents.sizes(column)
        elif isinstance(column, Ragged):
            found[name] = _items(column, held, several, node, first)
        elif name == "bytes" and isinstance(tokens, np.ndarray):
            found[name] = column[node] // np.maximum(tokens[node], 1) * documents.sizes(tokens)
        else:
            found[name] = column[node]
    return found


def _items(
    column: Ragged, held: np.ndarray, several: np.ndarray, node: np.ndarray, first: np.ndarray
) -> Ragged:
    by_document = several & (column.lengths == held)
    counts = np.where(by_document[node], 1, np.where(first, column.lengths[node], 0))
    return Ragged(
        column.values[column.offsets[0] : column.offsets[-1]],
        np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
    )
