"""The microbatches of a hybrid plan: docs/hdp.md, "Pieces", as a plain, slow program.

It shares no code with the package and reads only the table of tasks. Everything is lists.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

IGNORE = -100


def reference_microbatches(
    plan: Any, documents: list[list[int]], rank: int, *, pad_id: int = 0, labels: str = "shifted"
) -> list[dict[str, list[Any]]]:
    """Return what a rank of the dp x cp axis gets, in order; document i is sample i of the plan."""
    table, multiple = plan.tasks.table, plan.tasks.rules.multiple
    rings = [
        table.task_rank[a:b].tolist()
        for a, b in zip(table.task_ptr[:-1].tolist(), table.task_ptr[1:].tolist(), strict=True)
    ]
    mine = [t for t, ring in enumerate(rings) if rank in ring]
    mine.sort(key=lambda t: (int(table.index[t]), int(table.order[t])))
    slot = {int(s): int(k) for s, k in zip(plan.main.sample, plan.main.slot, strict=True)}
    made = []
    for t in mine:
        samples = [i for i in range(len(documents)) if int(plan.tasks.task[i]) == t]
        samples.sort(key=lambda i: slot[i])
        held = [documents[i] for i in samples] or [[]]
        made.append(microbatch(held, rings[t], rank, multiple, pad_id, labels))
        made[-1]["source_ids"] = [int(plan.source[i]) for i in samples] or [-1]
        made[-1]["offload"] = [float(table.offload[t])]
        made[-1]["task_index"] = [int(table.index[t])]
        made[-1]["task_order"] = [int(table.order[t])]
    return made


def microbatch(
    held: list[list[int]], ring: list[int], rank: int, multiple: int, pad_id: int, labels: str
) -> dict[str, list[Any]]:
    d, position = len(ring), ring.index(rank)
    found: dict[str, list[Any]] = {
        name: [] for name in ("tokens", "position_ids", "labels", "loss_mask")
    }
    true, whole, local = [0], [0], [0]
    for tokens in held:
        size = max(1, len(tokens))
        if multiple:
            size = -(-size // (2 * d * multiple)) * (2 * d * multiple)
        targets = targets_of(tokens, size, labels)
        chunks = [range(c * size // (2 * d), (c + 1) * size // (2 * d)) for c in range(2 * d)]
        places = [*chunks[position], *chunks[2 * d - 1 - position]]
        for place in places:
            found["tokens"].append(tokens[place] if place < len(tokens) else pad_id)
            found["position_ids"].append(place)
            found["labels"].append(targets[place])
            found["loss_mask"].append(0.0 if targets[place] == IGNORE else 1.0)
        true.append(true[-1] + (len(tokens) or size))
        whole.append(whole[-1] + size)
        local.append(local[-1] + len(places))
    lengths = [b - a for a, b in pairwise(whole)]
    return found | {
        "cu_seqlens": true,
        "cu_seqlens_padded": whole,
        "cu_seqlens_local": local,
        "document_lengths": lengths,
        "max_seqlen": [max(lengths)],
        "cp_ranks": ring,
        "cp_rank": [position],
        "local_cp_size": [d],
    }


def targets_of(tokens: list[int], size: int, labels: str) -> list[int]:
    """Return the label of every place of a document with its padding."""
    if labels == "shifted":
        return [*tokens[1:], *[IGNORE] * (size - len(tokens[1:]))]
    return [*[IGNORE] * min(1, len(tokens)), *tokens[1:], *[IGNORE] * (size - len(tokens))]
