"""What is going on in a running job, as plain numbers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from overlord.loader.loader import Loader
from overlord.loader.reader import SourceReader
from overlord.observe.memory import pss_bytes
from overlord.planner.spec import Mixed
from overlord.runtime.host import Host
from overlord.transforms.worker import TransformWorker


def job_metrics(host: Host, names: Sequence[str]) -> dict[str, Any]:
    """Steps, samples and tokens, what each source gave, the mix of the last steps, reports, memory."""
    totals = host.planner.ledger
    return {
        "planned_steps": host.planner.next_step,
        "samples": int(totals.samples.sum()),
        "tokens": int(totals.tokens.sum()),
        "sources": _by_source(host, names),
        "mix": mix_by_step(host.planner.ledger.mixed, names),
        "feedback": host.planner.feedback,
        "memory": {**host.held_bytes(), "pss": pss_bytes()},
    }


def _by_source(host: Host, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    totals, dropped = host.planner.ledger, host.planner.dropped
    drawn = max(1, int(totals.samples.sum()))
    weights = host.planner.weights or [0.0] * len(names)
    stats: dict[str, dict[str, Any]] = {
        name: {
            "wanted": w / (sum(weights) or 1.0), "realised": int(totals.samples[i]) / drawn, "samples": int(totals.samples[i]),
            "tokens": int(totals.tokens[i]), "quarantined": int(totals.quarantined[i]), "dropped": dropped[i],
            "read_s": 0.0, "transform_s": 0.0, "ready": 0, "ready_bytes": 0,
        }
        for i, (name, w) in enumerate(zip(names, weights, strict=True))
    }  # fmt: skip
    for loader, reader, shelf in zip(host.loaders, host.readers, host.shelves, strict=True):
        s = stats[reader.order.name]
        s["read_s"] += reader.stats.read_s
        s["transform_s"] += reader.stats.transform_s
        s["ready"] += loader.ready
        s["ready_bytes"] += shelf.nbytes
    return stats


def mix_by_step(mixed: Iterable[Mixed], names: Sequence[str]) -> dict[str, Any]:
    """Columns over the last steps: ``step``, and by source the shares ``wanted``, and realised in ``samples`` and in ``tokens``."""
    steps = list(mixed)
    wide = np.zeros((3, len(steps), len(names)))
    for k, m in enumerate(steps):  # a source that joined later is not in the steps before
        wide[:, k, : len(m.wanted)] = m.wanted, m.samples / max(1, m.samples.sum()), m.tokens / max(1, m.tokens.sum())
    columns = {what: dict(zip(names, wide[j].T.tolist(), strict=True)) for j, what in enumerate(("wanted", "samples", "tokens"))}
    return {"step": [m.step for m in steps], **columns}


def actors(host: Host, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Every part of the job, where it lives and what it does."""
    roles = [("planner", "planner", "planning")]
    roles += [(loader_name(c, r), "loader", c.doing) for c, r in zip(host.loaders, host.readers, strict=True)]
    roles += [(f"constructor/{a.bucket}", "constructor", a.waiting() or "idle") for a in host.assemblers]
    roles += [(f"client/{rank}", "client", "attached") for rank in ranks]
    here = [{"name": n, "role": role, "pid": os.getpid(), "state": state} for n, role, state in roles]
    return here + [
        _worker(c, r, r.stages) for c, r in zip(host.loaders, host.readers, strict=True) if isinstance(r.stages, TransformWorker)
    ]


def _worker(loader: Loader, reader: SourceReader, worker: TransformWorker) -> dict[str, Any]:
    """The process that runs a loader's transforms."""
    pid = worker.pid
    return {"name": f"worker/{reader.order.name}/{loader.number}", "role": "worker", "pid": pid, "state": "running" if pid else "lost"}


def loader_name(loader: Loader, reader: SourceReader) -> str:
    return f"loader/{reader.order.name}/{loader.number}"
