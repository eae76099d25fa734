"""Delivery of a plan: fetching ranks, ranks served by a broadcast, and bytes for each. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from overlord.batch import Batch
from overlord.mesh import Mesh
from overlord.plan.plan import Assignment, LoadingPlan
from overlord.plan.rank_view import View, views_of

TOKEN_BYTES = {"tokens": 8, "position_ids": 8, "labels": 8, "loss_mask": 4}
DOCUMENT_BYTES = {"cu_seqlens": 4, "cu_seqlens_padded": 4, "source_ids": 4}


def delivery(plan: LoadingPlan, batch: Batch, broadcast: bool = True) -> dict[str, Any]:
    """Return the clients, ranks and bytes of a step's delivery.

    ``clients``: number of clients that fetch, one for each bucket and fetcher. ``fetchers``: the
    ranks whose processes fetch. ``served``: number of ranks that the trainer broadcasts to.
    ``bytes_by_client``: bytes of arrays in this step, by the rank that gets the microbatches,
    without pixels. ``bytes``: their sum.
    """
    place, main = plan.tree, plan.main
    dims = main.broadcast if broadcast else ()
    views, bucket_of = (
        views_of(place, main.axis, dims, batch.cp_split),
        place.bucket_of(main.axis).tolist(),
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
        "fetchers": place.fetchers(dims),
        "served": place.world_size - len(by_client),
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
    # attention_mask: one byte
    per_token = sum(n for key, n in TOKEN_BYTES.items() if view.has(key)) + (
        batch.layout == "padded"
    )
    per_document = sum(n for key, n in DOCUMENT_BYTES.items() if view.has(key))
    # per microbatch: one more entry of both cu_seqlens, and max_seqlen
    return tokens // view.cp * per_token + documents * per_document + microbatches * (2 * 4 + 4)
