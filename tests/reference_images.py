"""What a rank holds of a step with images, from whole documents alone: a plain, slow program.

It shares no code with the package. A *place* is (sample, token of the sample), None for padding.
Ranks of rings are in ``reference_pieces.py``; slices of context parallelism are here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.reference_pieces import reference_microbatches

IGNORE, CODE = -100, 100_000
Place = tuple[int, int] | None


def places_on_ring(plan: Any, lengths: list[int], bucket: int) -> list[list[Place]]:
    """Return the places of each microbatch of a rank of the dp x cp axis, in order."""
    coded = [[i * CODE + k for k in range(n)] for i, n in enumerate(lengths)]
    found = reference_microbatches(plan, coded, bucket, pad_id=-1)
    return [[divmod(t, CODE) if t >= 0 else None for t in mb["tokens"]] for mb in found]


def places_on_slice(
    plan: Any, lengths: list[int], bucket: int, batch: Any, cp: int, cp_rank: int, multiple: int
) -> list[list[Place]]:
    """Return the places of each microbatch of a bucket, or of one of its ``cp`` slices."""
    made = []
    for m in range(plan.main.n_microbatches):
        columns = (plan.main.bucket, plan.main.microbatch, plan.main.slot, plan.main.sample)
        rows = zip(*columns, strict=True)
        held = sorted((int(slot), int(s)) for b, k, slot, s in rows if (b, k) == (bucket, m))
        documents: list[list[Place]] = [
            padded([(s, k) for k in range(lengths[s])], batch, multiple) for _, s in held
        ] or [padded([], batch, multiple)]
        whole = batch.layout == "packed" and batch.cp_split in ("zigzag_whole", "contiguous")
        units = [[place for unit in documents for place in unit]] if whole else documents
        made.append([place for unit in units for place in sliced(unit, batch, cp, cp_rank)])
    return made


def padded(places: list[Place], batch: Any, multiple: int) -> list[Place]:
    size = batch.context if batch.layout == "padded" else max(multiple, len(places))
    while size % multiple:
        size += 1
    return [*places, *[None] * (size - len(places))]


def sliced(unit: list[Place], batch: Any, cp: int, cp_rank: int) -> list[Place]:
    if cp == 1 or batch.cp_split == "none":
        return unit
    n = cp if batch.cp_split == "contiguous" else 2 * cp
    size = len(unit) // n
    assert size * n == len(unit)
    chunks = [unit[c * size : (c + 1) * size] for c in range(n)]
    return chunks[cp_rank] if n == cp else chunks[cp_rank] + chunks[2 * cp - 1 - cp_rank]


def tokens_of(places: list[Place], documents: list[list[int]], pad_id: int) -> list[int]:
    return [pad_id if p is None else documents[p[0]][p[1]] for p in places]


def labels_of(
    places: list[Place],
    documents: list[list[int]],
    convention: str,
    is_placeholder: Callable[[int], bool],
    excluded: set[int],
) -> list[int]:
    """Return the label of every place: no placeholder is predicted, and no excluded sample."""
    found = []
    for p in places:
        target = None if p is None else p[1] + (1 if convention == "shifted" else 0)
        token = IGNORE
        if p is not None and target is not None and 0 < target < len(documents[p[0]]):
            token = documents[p[0]][target]
            if is_placeholder(token) or p[0] in excluded:
                token = IGNORE
        found.append(token)
    return found
