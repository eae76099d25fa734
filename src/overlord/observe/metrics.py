"""The metrics of a running job, as plain numbers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.planning.spec import Mixed
from overlord.process.resources import pss_bytes

if TYPE_CHECKING:
    from overlord.cluster.coordinator_actor import Counted
    from overlord.planning.planner import Planner
    from overlord.planning.spec import Ledger


def job_metrics(
    planner: Planner | Counted,
    figures: Mapping[str, Any],
    sources: Mapping[str, Mapping[str, Any]],
    on_long: str,
    by_tokens: bool = False,
) -> dict[str, Any]:
    """Return steps, samples, tokens, sources, the mix of the last steps, reports and memory.

    ``figures``: rows of measurements of loaders, constructors and workers. ``sources``: by name,
    counters of storage and images with value 0, for a source whose readers do not answer.
    ``on_long``: that of the job. ``by_tokens``: its weights are shares of tokens.
    """
    totals, names, roles = planner.totals, list(sources), pss_by_role(figures)
    return {
        "planned_steps": planner.next_step,
        "samples": int(totals.samples.sum()),
        "tokens": int(totals.tokens.sum()),
        "sources": _by_source(planner, totals, figures, sources, on_long, by_tokens),
        "mix": mix_by_step(totals.mixed, names),
        "feedback": planner.feedback,
        "memory": {**figures["memory"], "pss": sum(roles.values()), "roles": roles},
    }


ROLES = {"loader-worker": "loaders", "constructor-worker": "constructors"}  # by worker name
LOADER_BYTES = ("ready_bytes", "kept_bytes", "window_bytes", "open_bytes")  # columns of a loader


def pss_by_role(figures: Mapping[str, Any]) -> dict[str, int]:
    """Return the PSS in bytes of the job's processes by role; PSS splits shared pages evenly.

    ``session`` is the launching process, in the local runtime everything. Trainers in other
    processes do not count. Roles with 0 bytes are left out.
    """
    roles = {
        "session": pss_bytes(),
        "planner": sum(row["pss"] for row in _planner_process(figures)),
        "loaders": 0,
        "constructors": 0,
    }
    for worker in figures["hosts"]:
        role = worker["name"].partition("/")[0]
        roles[ROLES.get(role, role)] = roles.get(ROLES.get(role, role), 0) + worker["pss"]
    rows = [*figures["loaders"], *figures.get("shadows", ())]
    # By pid, because several loaders may share a transform process.
    roles["workers"] = sum(
        {(row["pid"], row["worker_pid"]): row["worker_pss"] for row in rows}.values()
    )
    return {role: n for role, n in roles.items() if n}


def _planner_process(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the row of the coordinator process in a list; empty in the local runtime."""
    return [figures["planner"]] if "planner" in figures else []


def _by_source(
    planner: Planner | Counted,
    totals: Ledger | Counted,
    figures: Mapping[str, Any],
    sources: Mapping[str, Mapping[str, Any]],
    on_long: str,
    by_tokens: bool,
) -> dict[str, dict[str, Any]]:
    mixed = totals.tokens if by_tokens else totals.samples
    drawn = max(1, int(mixed.sum()))
    weights = list(planner.weights) or [0.0] * len(sources)
    stats: dict[str, dict[str, Any]] = {
        name: {
            "wanted": w / (sum(weights) or 1.0),
            "realised": int(mixed[i]) / drawn,
            "samples": int(totals.samples[i]),
            "tokens": int(totals.tokens[i]),
            "ended": not planner.active[i],
            "quarantined": int(totals.quarantined[i]),
            **losses(
                int(totals.dropped[i]), int(totals.long[i]), int(totals.lost_tokens[i]), on_long
            ),
            "read_s": 0.0,
            "transform_s": 0.0,
            "ready": 0,
            **dict.fromkeys(LOADER_BYTES, 0),
            "shadow_bytes": 0,
            "bytes": 0,
            **zeros,
        }
        for i, ((name, zeros), w) in enumerate(zip(sources.items(), weights, strict=True))
    }
    for row in figures["loaders"]:
        s = stats[row["source"]]
        for what in ("read_s", "transform_s", "ready", *LOADER_BYTES):
            s[what] += row[what]
        s["bytes"] += sum(row[what] for what in LOADER_BYTES)
        for what in ("store", "storage", "images"):
            if row.get(what) is not None:
                s[what] = sum_counters([s.get(what, {}), row[what]])
    # Standbys count separately, since their memory is the price of a recovery without a pause.
    for row in figures.get("shadows", ()):
        stats[row["source"]]["shadow_bytes"] += sum(row[what] for what in LOADER_BYTES)
    return stats


def losses(filtered: int, long: int, lost: int, on_long: str) -> dict[str, int]:
    """Return the losses of a source so far: numbers of documents, and of their tokens.

    ``filtered``: rows that filters dropped. ``long`` and ``lost``: documents that lost tokens to
    ``on_long``, and these tokens. In the result, ``dropped`` are rows without a sample, by a filter
    or ``on_long="drop"``. ``cut`` are documents that other values shortened: "split" does so for
    samples of several documents.
    """
    cut = on_long != "drop"
    return {
        "dropped": filtered + (0 if cut else long),
        "cut": long if cut else 0,
        "cut_tokens": lost if cut else 0,
        "dropped_tokens": 0 if cut else lost,
    }


def sum_counters(counts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of counters by name; nested mappings of counters are summed, too."""
    out: dict[str, Any] = {}
    for some in counts:
        for name, n in some.items():
            out[name] = (
                sum_counters([out.get(name, {}), n])
                if isinstance(n, Mapping)
                else out.get(name, 0) + n
            )
    return out


def mix_by_step(mixed: Iterable[Mixed], names: Sequence[str]) -> dict[str, Any]:
    """Return the mix of the last steps as columns: ``step``, and lists of shares by source.

    ``wanted`` are target shares; ``samples`` and ``tokens`` are shares of the drawn ones.
    """
    steps = list(mixed)
    shares = np.zeros((3, len(steps), len(names)))
    for k, m in enumerate(steps):  # steps before an added source have fewer columns
        shares[:, k, : len(m.wanted)] = (
            m.wanted,
            m.samples / max(1, m.samples.sum()),
            m.tokens / max(1, m.tokens.sum()),
        )
    columns = {
        what: dict(zip(names, shares[j].T.tolist(), strict=True))
        for j, what in enumerate(("wanted", "samples", "tokens"))
    }
    return {"step": [m.step for m in steps], **columns}


def actors(figures: Mapping[str, Any], clients: Mapping[int, Any]) -> list[dict[str, Any]]:
    """Return a row for each planner, worker, loader, constructor and client: name, pid, state.

    ``clients``: by rank. A pid is None if the process is on another machine or unknown.
    """
    here = os.getpid()
    planners = _planner_process(figures) or [{"pid": here, "state": "planning"}]
    found = [
        _actor("planner", "planner", p["pid"], p["state"], p.get("node", "")) for p in planners
    ]
    found += [
        _actor(worker["name"], "host", worker["pid"], worker["state"], worker.get("node", ""))
        for worker in figures["hosts"]
    ]
    found += [
        _actor(loader_name(row), "loader", row["pid"], row["doing"]) for row in figures["loaders"]
    ]
    found += [
        _actor(_constructor_name(row), "constructor", row["pid"], row["doing"])
        for row in figures["constructors"]
    ]
    found += [
        _actor(f"client/{rank}", "client", *getattr(c, "whereabouts", (here, "attached")))
        for rank, c in clients.items()
    ]
    workers = [row for row in figures["loaders"] if row["worker"]]
    return found + [
        _actor(
            f"worker/{r['source']}/{r['loader']}",
            "worker",
            r["worker_pid"],
            "running" if r["worker_pid"] else "lost",
        )
        for r in workers
    ]


def _actor(name: str, role: str, pid: int | None, state: str, node: str = "") -> dict[str, Any]:
    """Return a row of ``actors``; ``node`` is empty without a cluster."""
    return {
        "name": name,
        "role": role,
        "pid": pid,
        "state": state,
        **({"node": node} if node else {}),
    }


def _constructor_name(row: Mapping[str, Any]) -> str:
    return f"constructor/{row['bucket']}"


def loader_name(row: Mapping[str, Any]) -> str:
    """Return the name of a loader by its row of measurements: ``loader/<source>/<number>``."""
    return f"loader/{row['source']}/{row['loader']}"
