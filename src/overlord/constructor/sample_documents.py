"""Microbatches with samples of several documents: their documents, and the keys that group them.

Besides the keys of ``pack.py``, a microbatch with n documents has, in every stage and unsliced,

    group_ids       int32 [n]    number of the document's sample in the step, in draw order
    roles           int32 [n]    position of the document in its sample; of a pair 0 is the chosen
                                 and 1 the rejected response; -1 for a plain sample
    prompt_lengths  int32 [n]    tokens of the prompt that begins the document
    values          float32 [n]  by name, such as rewards; NaN for a document without

A document of padding, in a microbatch without samples, has -1 in the first two keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from overlord.constructor.pack import BatchArrays
from overlord.documents import SampleDocuments

GROUP_IDS, ROLES = "group_ids", "roles"
NO_GROUP = NO_ROLE = -1


class DocumentRuns(NamedTuple):
    """Documents of samples in the payload, sample after sample."""

    sample: np.ndarray  # int64: position of the document's sample
    start: np.ndarray  # int64: first token in the payload
    length: np.ndarray  # int64


def document_runs(
    documents: SampleDocuments, start: np.ndarray, length: np.ndarray
) -> DocumentRuns:
    """Return the documents of samples that are ``length`` tokens from ``start`` on."""
    counts, size = documents.counts, documents.sizes(length)
    before = np.cumsum(size) - size
    first = before[np.cumsum(counts) - counts]
    sample = np.repeat(np.arange(len(counts)), counts)
    return DocumentRuns(sample, start[sample] + before - first[sample], size)


def with_document_keys(arrays: BatchArrays, documents: SampleDocuments) -> BatchArrays:
    """Return microbatches with the keys of their documents.

    ``documents``: of all samples of these microbatches, in order. A document of padding has the
    source -1.
    """
    counts, source = documents.counts, arrays.arrays["source_ids"]
    starts = dict(zip(arrays.arrays, arrays.starts, strict=True))["source_ids"]
    real = np.flatnonzero(source != -1)
    assert int(counts.sum()) == len(real), "expected the documents of all samples"
    role = np.arange(len(real)) - np.repeat(np.cumsum(counts) - counts, counts)
    role[np.repeat(documents.lengths.lengths == 0, counts)] = NO_ROLE
    keys = {
        GROUP_IDS: _column(np.repeat(documents.number, counts), real, len(source), NO_GROUP, "i4")
    }
    keys[ROLES] = _column(role, real, len(source), NO_ROLE, "i4")
    for name in documents.columns:
        values = documents.values(name)
        floats = values.dtype.kind == "f"
        nothing, dtype = (np.nan, "f4") if floats else (0, "i4")
        keys[name] = _column(values, real, len(source), nothing, dtype)
    return BatchArrays(
        {**arrays.arrays, **keys}, [*arrays.starts, *([starts] * len(keys))], arrays.single
    )


def rows_of_documents(rows: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the row of the sample of each document of a microbatch; ``rows``: of its samples."""
    if GROUP_IDS not in arrays or not len(rows):
        return rows
    groups = arrays[GROUP_IDS]
    number = np.cumsum(np.append(0, groups[1:] != groups[:-1]))
    found: np.ndarray = rows[np.minimum(number, len(rows) - 1)]
    return found


def _column(values: np.ndarray, at: np.ndarray, n: int, nothing: float, dtype: str) -> np.ndarray:
    found = np.full(n, nothing, dtype)
    found[at] = values
    found.flags.writeable = False
    return found
