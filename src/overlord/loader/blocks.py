"""Blocks of evaluated rows: selection from a window, merging of several tables, and lost tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from overlord.messages.control import Cursor
from overlord.messages.loader import LongDocuments
from overlord.sample import Content, Ragged, join_rows, take_rows
from overlord.sources.arrow_numpy import arrow_of
from overlord.transforms.base import Block


def long_of(
    key: np.ndarray,
    file: np.ndarray,
    row: np.ndarray,
    at: np.ndarray,
    lost: np.ndarray,
    after: Cursor | None,
) -> LongDocuments | None:
    """Return the documents ``at``, which lost tokens, without the cursor's document.

    The loss of that document was counted with its sample.
    """
    documents = LongDocuments(key[at], file[at], row[at], lost)
    if after is None:
        return documents
    return documents.take(
        np.flatnonzero((documents.file != after.file) | (documents.row != after.row))
    )


def all_bad(n: int, reason: str) -> Block:
    none = np.zeros(0, np.int64)
    empty = Ragged(np.zeros(0, np.uint8), np.zeros(1, np.int64))
    return Block(
        index=none,
        part=none.astype(np.int32),
        tokens=empty,
        meta={"tokens": none, "bytes": none},
        bad=[(i, reason) for i in range(n)],
    )


def merged(blocks: list[tuple[np.ndarray, Block]]) -> Block:
    """Merge blocks of separate tables, in the order of their rows."""
    full = [(rows, b) for rows, b in blocks if len(b.index)]
    bad = sorted((int(rows[i]), why) for rows, b in blocks for i, why in b.bad)
    at = np.concatenate([rows[b.long] for rows, b in blocks])
    long = {
        "long": np.sort(at),
        "lost": np.concatenate([b.lost for _, b in blocks])[np.argsort(at)],
    }
    if not full:
        return Block(**{**_fields(blocks[0][1]), "bad": bad, **long})
    index = np.concatenate([rows[b.index] for rows, b in full])
    order = np.argsort(index, kind="stable")
    content = Content.concat([Content(b.tokens, b.items) for _, b in full]).take(order)
    return Block(
        index=index[order],
        part=np.concatenate([b.part for _, b in full])[order],
        tokens=content.tokens,
        items=content.items,
        meta={
            n: take_rows(join_rows([b.meta[n] for _, b in full]), order) for n in full[0][1].meta
        },
        bad=bad,
        image_bytes_in=sum(b.image_bytes_in for _, b in full),
        image_bytes_out=sum(b.image_bytes_out for _, b in full),
        **long,
    )


def _fields(block: Block) -> dict[str, Any]:
    return {
        "index": block.index,
        "part": block.part,
        "tokens": block.tokens,
        "meta": block.meta,
        "bad": block.bad,
        "items": block.items,
    }


def rows_of(table: pa.Table, at: np.ndarray) -> pa.Table:
    """Return selected rows of a table; a run of consecutive ones (unshuffled sources) is a view."""
    if len(at) and int(at[-1]) - int(at[0]) == len(at) - 1 and bool((at[1:] > at[:-1]).all()):
        return table.slice(int(at[0]), len(at))
    return table.take(arrow_of(at))
