"""JSON documents of the command line: the same facts as its tables, with exact numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.checks import shown_name
from overlord.observe.explain_text import time_over_mean
from overlord.observe.one_cost import by_model

if TYPE_CHECKING:
    from overlord.job.job import Job
    from overlord.observe.progress import Meter, Taken
    from overlord.observe.source_report import SourceReport
    from overlord.plan.plan import LoadingPlan


def lengths_document(tokens: np.ndarray) -> dict[str, Any] | None:
    """Return the distribution of lengths; None without any."""
    if not len(tokens):
        return None
    low, median, high, most = np.percentile(tokens, (0, 50, 99, 100))
    return {
        "min": int(low),
        "median": float(median),
        "p99": float(high),
        "max": int(most),
        "mean": float(tokens.mean()),
    }


def source_document(report: SourceReport) -> dict[str, Any]:
    """Return the result of an inspection of one source."""
    return {
        "name": report.name,
        "format": report.format,
        "files": report.files,
        "chunks": report.chunks,
        "rows": report.rows,
        "bytes": report.nbytes,
        "columns": report.schema,
        "sampled_files": report.sampled_files,
        "sampled_rows": report.sampled_rows,
        "tokens": lengths_document(report.tokens),
        "longer": report.longer,
        "lost_tokens": report.lost,
        "dropped_rows": report.dropped,
        "bad_rows": report.bad_rows,
        "bad": report.bad,
        "bad_places": report.bad_places(),
        "warnings": report.warnings(),
        "failures": report.failures,
    }


def plan_document(job: Job, plan: LoadingPlan) -> dict[str, Any]:
    """Return one plan, with tokens and samples of each microbatch of each bucket.

    ``imbalance`` and costs are those of the job's model: see ``by_model``. ``own_imbalance`` is by
    the cost of the strategy.
    """
    measured = by_model(job, plan)
    pieces, bins = plan.pieces(), plan.pieces().bins()
    shape = (pieces.n_buckets, pieces.n_microbatches)
    weights = plan.tokens[pieces.sample] if plan.tasks is None else pieces.size
    tokens = np.bincount(bins, weights=weights, minlength=shape[0] * shape[1]).astype(np.int64)
    samples = np.bincount(bins, minlength=shape[0] * shape[1])
    loads = measured.plan.loads().sum(axis=1)
    counts = np.bincount(plan.source, minlength=len(plan.names))
    return {
        "step": plan.step,
        "digest": plan.digest(),
        "samples": len(plan),
        "tokens": int(plan.tokens.sum()),
        "strategy": shown_name(job.strategy),
        "place": f"{job.place}",
        "sync": job.sync,
        "imbalance": measured.plan.imbalance(),
        "cost": measured.cost,
        "own_imbalance": plan.imbalance(),
        "capacity": plan.main.capacity,
        "fill": plan.fill(),
        "mix": dict(zip(plan.names, counts, strict=True)),
        "buckets": [
            {"bucket": b, "cost": cost, "tokens": t, "samples": n}
            for b, (cost, t, n) in enumerate(
                zip(loads, tokens.reshape(shape), samples.reshape(shape), strict=True)
            )
        ],
    }


def step_document(taken: Taken, meter: Meter, sync: str, digest: str = "") -> dict[str, Any]:
    """Return one step of a run; ``digest``: that of its bytes, if it was computed."""
    return {
        "event": "step",
        "step": taken.plan.step,
        "samples": len(taken.plan),
        "tokens": taken.tokens,
        "imbalance": time_over_mean(sync, taken.plan.imbalance()),
        "wait_s": taken.wait_s,
        "tokens_per_s": meter.recent_tokens_per_s,
        **({"digest": digest} if digest else {}),
    }


def run_document(
    meter: Meter,
    metrics: Mapping[str, Any],
    quarantine: Sequence[Mapping[str, Any]],
    digest: str = "",
) -> dict[str, Any]:
    """Return the summary of a run; ``digest``: that of all steps, if it was computed."""
    total, steps = max(1, int(meter.samples.sum())), max(1, meter.steps)
    rows = zip(
        metrics["sources"].items(), meter.wanted, meter.samples, meter.source_tokens, strict=False
    )
    return {
        "event": "end",
        "steps": meter.steps,
        "tokens": meter.tokens,
        "tokens_per_s": meter.tokens_per_s,
        "wait_ms": meter.wait_ms,
        "first_wait_ms": meter.first_wait_s * 1e3,
        "peak_bytes": max(meter.peak_pss, metrics["memory"]["pss"]),
        "sources": [
            {
                "name": name,
                "wanted": wanted / steps,
                "realised": n / total,
                "samples": n,
                "tokens": tokens,
                "quarantined": s["quarantined"],
                "dropped": s["dropped"],
            }
            for (name, s), wanted, n, tokens in rows
        ],
        "quarantine": list(quarantine),
        **({"digest": digest} if digest else {}),
    }
