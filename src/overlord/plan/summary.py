"""The summary of a plan in plain values, and the bytes that it delivers to each rank. Pure."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from overlord.mesh import BUCKET_AXES, Batch, Mesh
from overlord.plan.module_ranks import bucket_by_rank, view_by_rank
from overlord.plan.plan import ITEM_COLUMNS, Assignment, LoadingPlan
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
    a, loads = plan.modules[name], plan.loads(name)
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
    if plan.place is not None:
        found["broadcast"], found["fetchers"] = list(a.broadcast), plan.fetchers(name)
    if a.on is not None:
        found["on"] = f"{a.on}"
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


def to_json(plan: LoadingPlan, samples: bool = True) -> str:
    """Return the summary of a plan as JSON text; with ``samples``, also every item and its slot."""
    found = summary(plan)
    if samples:
        found["placed"] = {name: _placed(plan, a) for name, a in plan.modules.items()}
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
    by_client = {
        rank: _nbytes(
            view,
            int(tokens[bucket_of[rank]]),
            int(documents[bucket_of[rank]]),
            main.n_microbatches,
            batch,
        )
        for rank, view in enumerate(views)
        if not view.nothing
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
    if batch.layout == "padded":
        return documents * batch.context, documents
    tokens = np.bincount(main.bucket, weights=main.size, minlength=main.n_buckets).astype(np.int64)
    return tokens + (counts == 0).sum(axis=1) * batch.document_multiple(place), documents


def _nbytes(view: View, tokens: int, documents: int, microbatches: int, batch: Batch) -> int:
    # the padded layout adds attention_mask, one byte per token
    per_token = sum(n for key, n in TOKEN_BYTES.items() if view.has(key)) + (
        batch.layout == "padded"
    )
    per_document = sum(n for key, n in DOCUMENT_BYTES.items() if view.has(key))
    # per microbatch: one more entry of both cu_seqlens, and max_seqlen
    return tokens // view.cp * per_token + documents * per_document + microbatches * (2 * 4 + 4)
