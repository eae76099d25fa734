"""Items of samples (images): the rank that encodes each, and the tokens that its output replaces.

An item's output is ``out`` rows of the encoder. They replace tokens ``offset`` to ``offset + out``
of its sample, where the document has placeholders. For items selected by ``image_patches``, ``out``
is the metadata ``image_tokens`` and ``offset`` the metadata ``image_offset`` if they are given.
Without them an item has a row for every ``merge`` x ``merge`` patches. The items are then at the
start of their document one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overlord.array_order import in_documents
from overlord.errors import PlanError
from overlord.mesh import Mesh
from overlord.planning.balance.placement import ItemPlacement, PackingProblem, nested
from overlord.sample import Buffer, Ragged

PER = ("iteration", "microbatch")


def nodes(
    buffer: Buffer, names: Sequence[str], sources: Sequence[str] | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray], bool]:
    """Return the nodes of these sources: buffer row, columns, and whether they are items."""
    sample, columns, items = _all_nodes(buffer, names)
    if sources is None:
        return sample, columns, items
    kept = np.isin(sample, of_sources(buffer, sources))
    return sample[kept], {n: c[kept] for n, c in columns.items()}, items


def _all_nodes(
    buffer: Buffer, names: Sequence[str]
) -> tuple[np.ndarray, dict[str, np.ndarray], bool]:
    if not names:
        return (
            np.arange(len(buffer)),
            {n: c for n, c in buffer.meta.items() if isinstance(c, np.ndarray)},
            False,
        )
    found = {name: buffer.column(name) for name in names}
    ragged = {n: c for n, c in found.items() if isinstance(c, Ragged)}
    if not ragged:
        return (
            np.arange(len(buffer)),
            {n: c for n, c in found.items() if isinstance(c, np.ndarray)},
            False,
        )
    lengths = next(iter(ragged.values())).lengths
    sample = np.repeat(np.arange(len(buffer)), lengths)
    columns: dict[str, np.ndarray] = {}
    for name, column in found.items():
        if isinstance(column, Ragged) and not np.array_equal(column.lengths, lengths):
            other = next(iter(ragged))
            raise PlanError(
                f"metadata {name!r} has other item counts than {other!r}",
                buffer.step,
                "select them in two graphs",
            )
        columns[name] = (
            column.values[column.offsets[0] : column.offsets[-1]]
            if isinstance(column, Ragged)
            else column[sample]
        )
    return sample, dict(sorted(columns.items(), key=lambda c: c[0] not in ragged)), True


def of_sources(buffer: Buffer, sources: Sequence[str]) -> np.ndarray:
    """Return the rows of the buffer that come from these sources."""
    unknown = [s for s in sources if s not in buffer.names]
    if unknown:
        raise PlanError(
            f"unknown source {unknown[0]!r}; known: {', '.join(buffer.names)}", buffer.step
        )
    return np.flatnonzero(np.isin(buffer.source, [buffer.names.index(s) for s in sources]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placeholders:
    """For every item, the number of rows that are sent and their first token in its sample."""

    out: np.ndarray  # int64
    offset: np.ndarray  # int64
    # number of items that are not sent whole: their document was truncated, or the next item begins
    cut: int


def placeholders(
    buffer: Buffer, sample: np.ndarray, patches: np.ndarray, column: str, merge: int
) -> Placeholders:
    """Return the placeholders of all items.

    Sent rows never leave their document nor overlap the next item. A truncated document takes only
    the first rows of an item, as far as it has room.
    """
    stem = column.rpartition("_")[0] or column
    out = _item_column(
        buffer, sample, f"{stem}_tokens", patches.astype(np.int64) // (merge * merge)
    )
    offset = _item_column(buffer, sample, f"{stem}_offset", _one_after_another(sample, out))
    tokens = buffer.column("tokens")
    assert isinstance(tokens, np.ndarray)
    offset = np.minimum(offset, tokens[sample])
    sent = np.minimum(out, tokens[sample] - offset)
    order = in_documents(sample, offset)
    order = order[sent[order] > 0]  # items without rows limit no other
    here, at = sample[order], offset[order]
    same = here[1:] == here[:-1]
    sent[order[:-1][same]] = np.minimum(sent[order[:-1][same]], (at[1:] - at[:-1])[same])
    return Placeholders(out=sent, offset=offset, cut=int((sent < out).sum()))


def _item_column(
    buffer: Buffer, sample: np.ndarray, name: str, otherwise: np.ndarray
) -> np.ndarray:
    """Return a metadata column of the items; samples without it have ``otherwise``."""
    if name not in buffer.meta:
        return otherwise
    found, counts = buffer.meta[name], np.bincount(sample, minlength=len(buffer))
    lengths = found.lengths if isinstance(found, Ragged) else np.full(len(buffer), -1)
    has_column = (counts > 0) & (lengths != 0)  # a source without this metadata has empty lists
    if (lengths[has_column] != counts[has_column]).any():
        i = int(np.flatnonzero(has_column & (lengths != counts))[0])
        problem = (
            f"sample {buffer[i]} has {counts[i]} items and {max(1, int(lengths[i]))} of "
            f"metadata {name!r}"
        )
        raise PlanError(problem, buffer.step, "a list with one number for each item is expected")
    assert isinstance(found, Ragged) or not has_column.any()
    if not isinstance(found, Ragged) or not has_column.any():
        return otherwise
    held = found.take(np.flatnonzero(has_column)).values.astype(np.int64)
    if len(held) == len(otherwise):
        return held
    otherwise = otherwise.copy()
    otherwise[has_column[sample]] = held
    return otherwise


def _one_after_another(sample: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Return the first token of each item if the items of a sample are adjacent."""
    before, number = np.cumsum(out) - out, np.arange(len(sample))
    first = (
        np.maximum.accumulate(np.where(np.append(True, sample[1:] > sample[:-1]), number, 0))
        if len(sample)
        else number
    )
    return before - before[first]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """The placement of the sample of each item."""

    bucket: np.ndarray
    microbatch: np.ndarray
    n_microbatches: int
    axis: str  # axis of the buckets


def follow(
    costs: np.ndarray,
    sizes: np.ndarray,
    samples: Samples,
    tree: Mesh,
    *,
    axis: str,
    method: str,
    per: str,
    stay: bool,
) -> ItemPlacement:
    """Balance items by the placement of their samples.

    ``per="microbatch"``: items of a slot are balanced together and keep the slot. ``stay``: a rank
    of the sample's group encodes the item.
    """
    if per not in PER:
        raise PlanError(f"unknown per={per!r}; known: {', '.join(PER)}")
    if stay and axis != "WORLD":
        raise PlanError(
            f'follow(stay=True): expected items distributed over "WORLD", got {axis!r}; '
            'call .distribute("WORLD")'
        )
    nowhere = np.zeros(len(costs), np.int32)
    slot, m = (samples.microbatch, samples.n_microbatches) if per == "microbatch" else (nowhere, 1)
    group, ranks = (
        (samples.bucket, np.array(tree.buckets(samples.axis)))
        if stay
        else (nowhere, np.arange(tree.n_buckets(axis))[None])
    )
    parent, n_parents, n_bins = group.astype(np.int64) * m + slot, len(ranks) * m, ranks.shape[1]
    bins = nested(
        PackingProblem(costs=costs, sizes=sizes, n_buckets=n_bins, method=method),
        parent,
        n_parents,
        n_bins,
    )
    if m > 1 and n_bins > 1 and method != "none":
        bins = _renumber_bins(costs, parent, bins, len(ranks), m, n_bins)
    way = ("inside the groups" if stay else "over all ranks") + (
        ", slot by slot" if per == "microbatch" else ""
    )
    return ItemPlacement(
        bucket=ranks[group, bins].astype(np.int32),
        microbatch=slot.astype(np.int32, copy=False),
        n_microbatches=m,
        way=way,
    )


def _renumber_bins(
    costs: np.ndarray, parent: np.ndarray, bins: np.ndarray, n_groups: int, m: int, n_bins: int
) -> np.ndarray:
    """Renumber bins slot by slot, the heaviest to the rank with the least work so far.

    LPT gives bin 0 the most expensive item of every slot.
    """
    flat = parent * n_bins + bins
    loads = np.bincount(flat, weights=costs, minlength=n_groups * m * n_bins).reshape(
        n_groups, m, n_bins
    )
    names, done, rows = (
        np.empty(loads.shape, np.int32),
        np.zeros((n_groups, n_bins)),
        np.arange(n_groups)[:, None],
    )
    for k in range(m):
        heavy, idle = (
            np.argsort(-loads[:, k], axis=1, kind="stable"),
            np.argsort(done, axis=1, kind="stable"),
        )
        names[rows, k, heavy] = idle
        done[rows, idle] += loads[rows, k, heavy]
    renamed: np.ndarray = names.reshape(-1)[flat]
    return renamed
