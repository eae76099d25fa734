"""The result of a drill as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.text import Text

from overlord.observe.tables import grid

if TYPE_CHECKING:
    from rich.console import RenderableType

    from overlord.drill.run import DrillReport, Outcome

STRIKE_HEAD = ("fault", "worker", "pid", "steps taken", "longest wait of the next 4")
ROWS = 24  # most rows of the tables of strikes and of recoveries


def drill_view(report: DrillReport) -> RenderableType:
    """Return tables of strikes and recoveries, and lines about waits, differences and result."""
    hit, d = report.disturbed, report.difference
    views: list[RenderableType] = [grid(STRIKE_HEAD, strike_rows(hit), 2)]
    if hit.recoveries:
        rows = [
            [str(r["part"]), _recovery_time(r), str(r.get("step", "-")), str(r["reason"])]
            for r in hit.recoveries[:ROWS]
        ]
        head = ["worker", "recovered after", "from step", "reason of the loss"]
        views += [Text(""), grid(head, rows, 1)]
    for fault, why in hit.missed:
        views.append(Text(f"{fault} {why}", style="bold red"))
    views += [Text(sentence, style="bold red") for sentence in hit.unrecovered]
    views += [Text(""), Text(waits_line(report))]
    for rank, step in d.changed[:5]:
        views.append(Text(f"rank {rank}, step {step}: differs from the undisturbed run"))
    for rank in d.disordered[:5]:
        views.append(Text(f"rank {rank}: its steps arrived in another order"))
    return Group(
        *views, Text(""), Text(report.sentence(), style="bold green" if not d else "bold red")
    )


def drill_document(report: DrillReport) -> dict[str, Any]:
    """Return the result of a drill as a JSON document."""
    hit, d = report.disturbed, report.difference
    return {
        "passed": not (d or hit.missed or hit.unrecovered),
        "sentence": report.sentence(),
        "steps": len(hit.waits_s),
        "strikes": [
            {"fault": s.fault.action, "worker": s.name, "pid": s.pid, "taken": s.taken}
            for s in hit.strikes
        ],
        "missed": [{"fault": str(fault), "reason": why} for fault, why in hit.missed],
        "unrecovered": hit.unrecovered,
        "recoveries": hit.recoveries,
        "waits_s": hit.waits_s,
        "samples_lost": d.lost,
        "samples_repeated": d.repeated,
        "changed": [{"rank": rank, "step": step} for rank, step in d.changed],
        "disordered_ranks": d.disordered,
        "digest": hit.delivered.chain,
    }


def _recovery_time(row: Mapping[str, Any]) -> str:
    return f"{row['seconds']:.2f} s" + (", by standbys" if row.get("stand_bys") else "")


def strike_rows(hit: Outcome) -> list[list[str]]:
    """Return the first ``ROWS`` strikes as rows with the columns of ``STRIKE_HEAD``."""
    return [
        [s.fault.action, s.name, str(s.pid), str(s.taken), wait_at(hit, s.taken)]
        for s in hit.strikes[:ROWS]
    ]


def wait_at(outcome: Outcome, taken: int) -> str:
    """Return the longest wait of the four steps from number ``taken`` on; ``-`` without a step."""
    waits = outcome.waits_s[taken : taken + 4]
    return f"{1e3 * max(waits):.0f} ms" if waits else "-"


def waits_line(report: DrillReport) -> str:
    """Return the median and the longest wait for a step in the disturbed run, as text.

    Step 0 waits for the start of all workers. It counts only if a fault struck before it, or if
    there is no other step.
    """
    hit = report.disturbed
    first = 0 if any(s.taken == 0 for s in hit.strikes) or len(hit.waits_s) < 2 else 1
    waits = np.array(hit.waits_s[first:] or [0.0])
    worst = int(np.argmax(waits)) + first
    return (
        f"wait per step: median {1e3 * float(np.median(waits)):.1f} ms, longest "
        f"{1e3 * float(waits.max()):.0f} ms (step {worst}); "
        f"{len(hit.waits_s)} steps{', without step 0' if first else ''}"
    )
