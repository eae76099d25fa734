"""Blocks of announced samples: sort, select, concatenate and split them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from overlord.messages.data import LongDocuments, SampleBlock
from overlord.sample import join_rows, take_rows

NO_ROWS = np.zeros(0, np.int64)


def sorted_found(found: SampleBlock) -> tuple[SampleBlock, np.ndarray]:
    """Return a block with samples and rows in the order of their window.

    Also return the permutation of its samples: the old row of each.
    """
    order = np.lexsort((found.part, found.row, found.file, found.key))
    bad = np.lexsort((found.bad_row, found.bad_file, found.bad_key))
    long = (
        None
        if found.long is None
        else found.long.take(np.lexsort((found.long.row, found.long.file, found.long.key)))
    )
    return replace(take(found, order, bad), long=long), order


def take(found: SampleBlock, rows: np.ndarray, bad: np.ndarray) -> SampleBlock:
    """Return a block with samples ``rows`` and quarantined rows ``bad`` of ``found``.

    Its dropped rows and long documents are all those of ``found``.
    """
    return SampleBlock(
        found.key[rows],
        found.file[rows],
        found.row[rows],
        found.part[rows],
        {n: take_rows(c, rows) for n, c in found.meta.items()},
        found.bad_key[bad],
        found.bad_file[bad],
        found.bad_row[bad],
        tuple(found.bad_reason[j] for j in bad.tolist()),
        found.dropped,
        found.long,
    )


def concat(parts: Sequence[SampleBlock]) -> SampleBlock:
    """Return the concatenation of blocks; at least one must be given."""

    def join(name: str) -> np.ndarray:
        return np.concatenate([getattr(p, name) for p in parts])

    full = [p for p in parts if len(p)] or parts[:1]
    meta = {n: join_rows([p.meta[n] for p in full]) for n in full[0].meta}
    reasons = tuple(r for p in parts for r in p.bad_reason)
    return SampleBlock(
        join("key"),
        join("file"),
        join("row"),
        join("part"),
        meta,
        join("bad_key"),
        join("bad_file"),
        join("bad_row"),
        reasons,
        sum(p.dropped for p in parts),
        _longs([p.long for p in parts]),
    )


def _longs(parts: Sequence[LongDocuments | None]) -> LongDocuments | None:
    some = [p for p in parts if p is not None]
    if len(some) < 2:
        return some[0] if some else None
    return LongDocuments(
        *(
            np.concatenate([getattr(p, name) for p in some])
            for name in ("key", "file", "row", "lost")
        )
    )


def last_key(parts: Sequence[SampleBlock]) -> int | None:
    """Return the highest key of samples, quarantined rows and long documents; None if none."""
    keys = [
        int(k[-1])
        for p in parts
        for k in (p.key, p.bad_key, *(() if p.long is None else (p.long.key,)))
        if len(k)
    ]
    return max(keys) if keys else None


def split(
    parts: list[SampleBlock], bound: int | None
) -> tuple[list[SampleBlock], list[SampleBlock]]:
    """Divide blocks at a key: return the rows with lower keys, and the rest. None: no rest.

    Rows of the key itself are in the rest: a row of equal key that precedes them may still be
    announced.
    """
    if bound is None:
        return parts, []
    final, rest = [], []
    for part in parts:
        keys = (part.key, part.bad_key, NO_ROWS if part.long is None else part.long.key)
        cuts = [int(np.searchsorted(k, np.uint64(bound), side="left")) for k in keys]
        if cuts == [len(k) for k in keys]:
            final.append(part)
        elif not any(cuts):
            rest.append(part)
        else:
            a, b, c = cuts
            before, after = (
                None if part.long is None else part.long.take(rows)
                for rows in (np.arange(c), np.arange(c, len(keys[2])))
            )
            final.append(replace(take(part, np.arange(a), np.arange(b)), long=before))
            rest.append(
                replace(
                    take(part, np.arange(a, len(part)), np.arange(b, len(part.bad_key))),
                    dropped=0,
                    long=after,
                )
            )
    return final, rest
