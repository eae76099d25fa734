"""A drill's outcome for people at a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.text import Text

from overlord.observe.tables import grid

if TYPE_CHECKING:
    from rich.console import RenderableType

    from overlord.drill.run import Outcome, Report

STRIKE_HEAD = ("fault", "part", "process", "steps taken", "longest wait of the next 4")
ROWS = 24  # strikes and recoveries that are listed


def drill_view(report: Report) -> RenderableType:
    hit, d = report.hit, report.difference
    parts: list[RenderableType] = [grid(STRIKE_HEAD, strike_rows(hit), 2)]
    if hit.recoveries:
        rows = [
            [str(r["part"]), _back_after(r), str(r.get("step", "-")), str(r["reason"])]
            for r in hit.recoveries[:ROWS]
        ]
        parts += [Text(""), grid(["part", "back after", "from step", "it was lost"], rows, 1)]
    for fault, why in hit.missed:
        parts.append(Text(f"{fault} {why}", style="bold red"))
    parts += [Text(words, style="bold red") for words in hit.unmended]
    parts += [Text(""), Text(waits_line(report))]
    for rank, step in d.changed[:5]:
        parts.append(Text(f"rank {rank}, step {step}: not what the undisturbed run gave"))
    for rank in d.disordered[:5]:
        parts.append(Text(f"rank {rank}: its steps came in another order"))
    return Group(
        *parts, Text(""), Text(report.sentence(), style="bold green" if not d else "bold red")
    )


def _back_after(row: Mapping[str, Any]) -> str:
    return f"{row['seconds']:.2f} s" + (", by stand-bys" if row.get("stand_bys") else "")


def strike_rows(hit: Outcome) -> list[list[str]]:
    return [
        [s.fault.how, s.name, str(s.pid), str(s.taken), wait_at(hit, s.taken)]
        for s in hit.strikes[:ROWS]
    ]


def wait_at(outcome: Outcome, taken: int) -> str:
    waits = outcome.waits_s[taken : taken + 4]
    return f"{1e3 * max(waits):.0f} ms" if waits else "-"


def waits_line(report: Report) -> str:
    """Step 0 waits for all to begin, whatever happens: it counts only if a fault struck before
    it.
    """
    first = 0 if any(s.taken == 0 for s in report.hit.strikes) or len(report.hit.waits_s) < 2 else 1
    waits = np.array(report.hit.waits_s[first:] or [0.0])
    worst = int(np.argmax(waits)) + first
    return (
        f"wait of a step: median {1e3 * float(np.median(waits)):.1f} ms, longest "
        f"{1e3 * float(waits.max()):.0f} ms (step {worst}); "
        f"{len(report.hit.waits_s)} steps{', without step 0' if first else ''}"
    )
