"""The summary of a plan in plain values, and the bytes that it delivers to each rank. Pure."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from overlord.mesh import BUCKET_AXES, Batch, Mesh
from overlord.plan.host_pools import host_pools
from overlord.plan.module_ranks import bucket_by_rank, view_by_rank
from overlord.plan.plan import ITEM_COLUMNS, Assignment, LoadingPlan
from overlord.plan.tasks import PlanTasks
from overlord.plan.view import View

# ----------------------------------------------------------------------------
# The summary: balance and its lower bound, predicted time, peak memory, mixture.


def bounds(a: Assignment) -> tuple[float, float]:
    """Return two lower bounds for every placement of the items, relative to the mean bucket.

    The first is for the most expensive bucket. The second is for the sum, over microbatch indices
    (slots), of the most expensive microbatch.

    Some bucket of D holds k + 1 of the k*D + 1 most expensive items, at least the cheapest of them.
    For k = 0 that is the most expensive item alone. Items larger than half a microbatch are alone
    in theirs, D to a slot. So the j-th slot cannot be cheaper than item j*D.
    """
    total, d = float(a.cost.sum()), a.n_buckets
    if total <= 0:
        return 1.0, 1.0
    costs = np.sort(a.cost)[::-1]
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    k = np.arange((len(costs) - 1) // d + 1)
    bucket = max(total / d, float((sums[k * d + 1] - sums[k * d - k]).max()), float(costs[0]))
    slots = bucket
    for load, capacity in ((a.size, a.capacity), (a.memory, a.memory_capacity)):
        if load is not None and capacity:
            alone = np.sort(a.cost[2 * load > capacity])[::-1]
            slots = max(slots, float(alone[::d].sum()))
    return bucket * d / total, slots * d / total


def imbalance(plan: LoadingPlan, module: str) -> dict[str, float]:
    """Return costs relative to the mean bucket: see ``LoadingPlan.imbalance``."""
    loads, tasks = plan.loads(module), plan.tasks if module == "backbone" else None
    total = float(loads.sum())
    if total <= 0:
        return {"bucket": 1.0, "microbatch": 1.0, "bound": 1.0, "slot_bound": 1.0}
    mean = total / len(loads)
    found = {
        "bucket": float(loads.sum(axis=1).max()) / mean,
        "microbatch": float(loads.max(axis=0).sum()) / mean,
    }
    if tasks is not None and tasks.end is not None:
        found["waits"] = max(found["bucket"], float(tasks.end.max()) / mean)
    if tasks is None:
        limits = bounds(plan.module(module))
    else:  # ranks wait for each other at least as long after every microbatch as once a step
        limits = ((tasks.bound or 0.0) / mean,) * 2
    return found | dict(zip(("bound", "slot_bound"), limits, strict=True))


def summary(plan: LoadingPlan) -> dict[str, Any]:
    """Return the summary of a plan as plain values that JSON can encode."""
    return {
        "step": plan.step,
        "digest": plan.digest(),
        "place": None if plan.place is None else f"{plan.place}",
        "samples": len(plan),
        "tokens": int(plan.tokens.sum()),
        "fill": plan.fill(),
        "modules": {name: _module(plan, name) for name in plan.modules},
        "sources": _sources(plan),
    }


def _module(plan: LoadingPlan, name: str) -> dict[str, Any]:
    a, loads = plan.pieces(name), plan.loads(name)
    mean = float(loads.sum()) / a.n_buckets or 1.0
    slot_mean = np.maximum(loads.mean(axis=0), np.finfo(np.float64).tiny)
    unit = plan.extra.get("unit")
    found: dict[str, Any] = {
        "axis": a.axis,
        "buckets": a.n_buckets,
        "microbatches": a.n_microbatches,
        "items": len(a.sample),
        "imbalance": plan.imbalance(name),
        "by_bucket": (loads.sum(axis=1) / mean).tolist(),  # cost of each bucket over the mean
        "by_slot": np.where(
            loads.max(axis=0) > 0, loads.max(axis=0) / slot_mean, 1.0
        ).tolist(),  # most expensive bucket of a slot over the slot's mean
        "predicted": {
            "unit": str(unit[name]) if isinstance(unit, dict) and name in unit else "cost",
            "iteration": float(loads.sum(axis=1).max()),  # ranks wait for each other once per step
            # ranks wait for each other after every microbatch
            "microbatch": float(loads.max(axis=0).sum()),
        },
        "peak": _peak(plan, a),
    }
    if plan.tasks is not None and name == "backbone":
        found["items"], found["tasks"] = len(plan), _tasks(plan, plan.tasks)
    if plan.place is not None:
        found["broadcast"], found["fetchers"] = list(a.broadcast), plan.fetchers(name)
    if a.on is not None:
        found["on"] = f"{a.on}"
    return found


def _tasks(plan: LoadingPlan, tasks: PlanTasks) -> dict[str, Any]:
    """Return the rings of a hybrid plan: their sizes, and the number of tasks of each rank."""
    sizes, counts = np.unique(tasks.table.sizes(), return_counts=True)
    return {
        "tasks": len(tasks.table),
        "rings": {str(d): n for d, n in zip(sizes.tolist(), counts.tolist(), strict=True)},
        "by_rank": tasks.table.counts(plan.main.n_buckets).tolist(),
        "padded_to": 2 * tasks.rules.multiple,  # times the ranks of a ring; 0: cut unevenly
        **({"host_memory": host} if (host := host_memory(plan)) else {}),
    }


def host_memory(plan: LoadingPlan) -> dict[str, Any]:
    """Return the pinned memory that offload needs; empty for a plan without offload.

    Bytes are None if the bytes of a token are unknown, and the limit if there is none.
    """
    tasks = plan.tasks
    if tasks is None or not (tasks.offload_share or tasks.table.offload.any()):
        return {}
    rules = tasks.rules
    found: dict[str, Any] = {
        "largest_ratio": float(tasks.table.offload.max(initial=0)),
        "by_rank": None,
        "largest_node": None,
        "limit": rules.host_memory or None,
    }
    if rules.host_bytes:
        held = tasks.table.held(tasks.task, tasks.lengths(plan.tokens))
        pools = host_pools(tasks.table, rules, held)
        found["by_rank"] = pools.bytes.tolist()
        found["largest_node"] = float(pools.nodes(rules.node).max())
    return found


def _peak(plan: LoadingPlan, a: Assignment) -> dict[str, Any]:
    """Return the tokens of each bucket's fullest microbatch, and the microbatch with most memory.

    Without memory costs, the microbatch with the most tokens counts as that of most memory.
    """
    shape, bins = (a.n_buckets, a.n_microbatches), a.bins()
    tokens = (
        np.bincount(bins, weights=a.size, minlength=a.n_buckets * a.n_microbatches)
        .astype(np.int64)
        .reshape(shape)
    )
    # Buckets of an axis that includes cp get their microbatches unsliced.
    mesh = a.on or plan.place
    cut = mesh.cp if mesh is not None and "cp" not in BUCKET_AXES[a.axis] else 1
    found: dict[str, Any] = {
        "tokens_by_bucket": tokens.max(axis=1).tolist(),
        "tokens_per_rank": int(-(-tokens.max() // cut)),
    }
    by, load, capacity = (
        ("tokens", a.size, float(a.capacity))
        if a.memory is None
        else ("memory", a.memory, a.memory_capacity)
    )
    if len(bins):
        held = np.bincount(bins, weights=load, minlength=tokens.size)
        worst = int(held.argmax())
        inside = np.flatnonzero(bins == worst)
        item = int(inside[load[inside].argmax()])
        found["first_out_of_memory"] = {
            "by": by,
            "bucket": worst // a.n_microbatches,
            "microbatch": worst % a.n_microbatches,
            "holds": float(held[worst]),
            "capacity": capacity or None,
            "largest_sample": str(plan.sample_id(int(a.sample[item]))),
            "of_it": float(load[item]),
        }
    return found


def _sources(plan: LoadingPlan) -> dict[str, dict[str, Any]]:
    """Return the target share of every source, and its actual shares of samples and tokens."""
    n = len(plan.names)
    samples = np.bincount(plan.source, minlength=n)
    tokens = np.bincount(plan.source, weights=plan.tokens, minlength=n).astype(np.int64)
    weights = dict(plan.extra.get("weights") or {})
    total = sum(weights.values())
    return {
        name: {
            "wanted": weights.get(name, 0.0) / total if total else None,
            "samples": int(samples[i]),
            "samples_share": int(samples[i]) / max(1, len(plan)),
            "tokens": int(tokens[i]),
            "tokens_share": int(tokens[i]) / max(1, int(tokens.sum())),
        }
        for i, name in enumerate(plan.names)
    }


def table(plan: LoadingPlan) -> str:
    """Return a plan as a table for people: see ``LoadingPlan.to_table``."""
    a = plan.pieces()
    flat = a.bins()
    shape, n = (a.n_buckets, a.n_microbatches), a.n_buckets * a.n_microbatches
    held = plan.tokens[a.sample] if plan.tasks is None else a.size
    tokens = np.bincount(flat, weights=held, minlength=n).reshape(shape).astype(int)
    samples = np.bincount(flat, minlength=n).reshape(shape)
    loads = plan.loads()
    mean = loads.sum() / a.n_buckets or 1.0
    lines = [
        repr(plan),
        f"{'bucket':>6}  {'cost/mean':>9}  {'tokens':>9}  {plan.row_kind:>7}  tokens "
        f"({plan.row_kind}) by microbatch",
    ]
    for b in range(min(a.n_buckets, 64)):
        cells = "  ".join(
            f"{tokens[b, m]} ({samples[b, m]})" for m in range(min(a.n_microbatches, 16))
        )
        lines.append(
            f"{b:>6}  {loads[b].sum() / mean:>9.3f}  {tokens[b].sum():>9}  "
            f"{samples[b].sum():>7}  {cells}"
        )
    if a.n_buckets > 64:
        lines.append(f"... {a.n_buckets - 64} more buckets")
    return "\n".join(lines)


def to_json(plan: LoadingPlan, samples: bool = True) -> str:
    """Return the summary of a plan as JSON text; with ``samples``, also every item and its slot."""
    found = summary(plan)
    if samples:
        found["placed"] = {name: _placed(plan, plan.pieces(name)) for name in plan.modules}
    return json.dumps(found, indent=2)


def _placed(plan: LoadingPlan, a: Assignment) -> list[dict[str, Any]]:
    """Return the sample, columns and slot of every item, by bucket, microbatch and slot."""
    order = a.order()
    columns = {name: getattr(a, name)[order].tolist() for name in ITEM_COLUMNS}
    ids = [str(plan.sample_id(i)) for i in columns.pop("sample")]
    return [
        {"sample": ids[k]} | {name: column[k] for name, column in columns.items()}
        for k in range(len(ids))
    ]


# ----------------------------------------------------------------------------
# The delivery: fetching ranks, ranks served by a broadcast, and bytes for each.

TOKEN_BYTES = {"tokens": 8, "position_ids": 8, "labels": 8, "loss_mask": 4}
# of hybrid plans: cu_seqlens_local and document_lengths; cp_ranks; one more entry of
# cu_seqlens_local, and the scalars of a task
TASK_BYTES = {"document": 4 + 8, "member": 4, "task": 4 + 4 + 4 + 4 + 4 + 8}
DOCUMENT_BYTES = {"cu_seqlens": 4, "cu_seqlens_padded": 4, "source_ids": 4}


def delivery(plan: LoadingPlan, batch: Batch, broadcast: bool = True) -> dict[str, Any]:
    """Return the clients, ranks and bytes of a step's delivery.

    ``clients``: number of clients that fetch, one for each bucket and fetching rank. ``fetchers``:
    the ranks whose processes fetch. ``served``: number of ranks that receive by a broadcast of the
    trainer. ``bytes_by_client``: bytes of arrays in this step, without pixels, by the rank of the
    client. ``bytes``: their sum.
    """
    place, main = plan.tree, plan.main
    dims = main.broadcast if broadcast else ()
    views, bucket_of = (
        view_by_rank(place, main.on, main.axis, dims, batch.cp_split),
        bucket_by_rank(place, main.on, main.axis).tolist(),
    )
    tokens, documents = _loads(main, batch, place)
    counts, more = np.full(main.n_buckets, main.n_microbatches), np.zeros(main.n_buckets, np.int64)
    if plan.tasks is not None:
        tokens, documents, counts, more = _task_loads(plan, plan.tasks)
    by_client = {
        rank: _nbytes(view, int(tokens[b]), int(documents[b]), int(counts[b]), batch) + int(more[b])
        for rank, view in enumerate(views)
        if not view.nothing and counts[(b := bucket_of[rank])]
    }
    return {
        "clients": len(by_client),
        "fetchers": plan.mesh_of().fetchers(dims),
        "served": plan.mesh_of().world_size - len(by_client),
        "bytes_by_client": by_client,
        "bytes": sum(by_client.values()),
    }


def _loads(main: Assignment, batch: Batch, place: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens (with padding) and documents of every bucket, over all its microbatches.

    An empty microbatch is one document of padding.
    """
    shape = (main.n_buckets, main.n_microbatches)
    counts = np.bincount(main.bins(), minlength=main.n_buckets * main.n_microbatches).reshape(shape)
    documents = np.maximum(counts, 1).sum(axis=1)
    if batch.fixed:
        documents = np.full(main.n_buckets, main.n_microbatches * batch.documents)
    if batch.layout == "padded":
        return documents * batch.context, documents
    if batch.pads:
        return np.full(main.n_buckets, main.n_microbatches * batch.context), documents
    tokens = np.bincount(main.bucket, weights=main.size, minlength=main.n_buckets).astype(np.int64)
    return tokens + (counts == 0).sum(axis=1) * batch.document_multiple(place), documents


def _task_loads(
    plan: LoadingPlan, tasks: PlanTasks
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, documents and microbatches of every bucket, and the bytes of its rings."""
    pieces, table, n = plan.pieces(), tasks.table, plan.main.n_buckets
    counts = table.counts(n)
    d = table.sizes()
    empty = np.flatnonzero(np.bincount(tasks.task, minlength=len(table)) == 0)
    padding = np.bincount(table.task_rank[table.task_ptr[empty]], minlength=n)
    documents = np.bincount(pieces.bucket, minlength=n) + padding
    tokens = np.bincount(pieces.bucket, weights=pieces.size, minlength=n).astype(np.int64)
    members = np.bincount(table.task_rank, weights=np.repeat(d, d), minlength=n).astype(np.int64)
    more = TASK_BYTES["document"] * documents + TASK_BYTES["task"] * counts
    return (
        tokens + padding * (2 * tasks.rules.multiple or 1),
        documents,
        counts,
        more + TASK_BYTES["member"] * members,
    )


def _nbytes(view: View, tokens: int, documents: int, microbatches: int, batch: Batch) -> int:
    # the padded layout adds attention_mask, one byte per token
    per_token = sum(n for key, n in TOKEN_BYTES.items() if view.has(key)) + (
        batch.layout == "padded"
    )
    per_document = sum(n for key, n in DOCUMENT_BYTES.items() if view.has(key))
    # per microbatch: one more entry of both cu_seqlens, and max_seqlen
    return tokens // view.cp * per_token + documents * per_document + microbatches * (2 * 4 + 4)
