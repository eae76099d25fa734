"""Terminal output of the demo: live progress, tables, and one step without and with planning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from overlord.demo.report import (
    BY_MICROBATCH,
    BY_RANK,
    MIX_HEAD,
    PLACING_HEAD,
    mix_rows,
    placing_rows,
    stand_in_note,
)
from overlord.demo.result import COMPARED, DemoResult
from overlord.observe.tables import bar, grid

if TYPE_CHECKING:
    from rich.console import RenderableType

    from overlord.observe.progress import Meter
    from overlord.plan.plan import LoadingPlan

SOURCE_COLORS = ("blue", "green", "yellow", "cyan", "magenta", "red")


def progress_line(meter: Meter, steps: int, imbalance: float) -> str:
    """Return a line with the progress, the mean speed, and imbalance and wait of the last step."""
    done = f"step {meter.steps}/{steps}"
    return (
        f"{done:<12} {meter.tokens_per_s / 1e3:6.0f}k tokens/s   imbalance {imbalance:.3f}   "
        f"wait {meter.last_wait_s * 1e3:5.1f} ms"
    )


def live_view(plan: LoadingPlan, meter: Meter, steps: int, width: int) -> RenderableType:
    """Return one frame of the live view: progress, mixture so far, and loads of up to 16 ranks."""
    loads = plan.loads().sum(axis=1)
    ratio = loads / (loads.mean() or 1.0)
    wanted, realised = meter.wanted / meter.steps, meter.samples / meter.samples.sum()
    long = max(8, min(40, width - 46))
    mix = Table.grid(padding=(0, 2))
    mix.add_row(
        Text("source", "dim"),
        Text("wanted", "dim"),
        Text("so far", "dim"),
        Text("mix of samples so far", "dim"),
    )
    for i, name in enumerate(plan.names):
        blocks = Text(bar(realised[i], realised.max(), long), SOURCE_COLORS[i % 6])
        mix.add_row(name, f"{wanted[i]:6.1%}", f"{realised[i]:6.1%}", blocks)
    ranks = Table.grid(padding=(0, 2))
    for r, load in list(enumerate(ratio.tolist()))[:16]:
        ranks.add_row(
            f"rank {r:<5}",
            f"{load:6.3f}",
            "      ",
            Text(bar(load, max(1.0, ratio.max()), long), "blue"),
        )
    room = max(4, min(28, width - 68))
    done = room * meter.steps // steps
    head = Text.assemble(
        ("━" * done, "green"),
        ("━" * (room - done), "dim"),
        "  ",
        progress_line(meter, steps, float(ratio.max())),
    )
    return Group(head, Text(""), mix, Text("load of every rank in this step, mean 1", "dim"), ranks)


def side_by_side(f: DemoResult, width: int) -> RenderableType:
    """Return bars of the cost per rank in one step, unplanned and planned, for up to 32 ranks."""
    k = f.example_step
    before, after = (f.compared[n].loads[k].sum(axis=1) for n in ("vanilla", "llm_balance"))
    mean, most = before.sum() / f.ranks, max(before.max(), after.max())
    long = max(8, (width - 32) // 2)
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "", Text("unplanned: vanilla", "bold"), "", Text("planned: llm_balance", "bold"), ""
    )
    for r in range(min(f.ranks, 32)):
        table.add_row(
            f"rank {r}",
            Text(bar(before[r], most, long).ljust(long), "red"),
            f"{before[r] / mean:.3f}",
            Text(bar(after[r], most, long).ljust(long), "blue"),
            f"{after[r] / mean:.3f}",
        )
    limit = bar(f.bound[k] * mean, most, long)
    table.add_row(
        *(
            Text(cell, "dim")
            for cell in ("bound", limit, f"{f.bound[k]:.3f}", limit, f"{f.bound[k]:.3f}")
        )
    )
    result = (
        f"slowest rank over the mean: {f.compared['vanilla'].bucket[k]:.3f} unplanned, "
        f"{f.compared['llm_balance'].bucket[k]:.3f} planned; "
        f"no placement can go below {f.bound[k]:.3f}"
    )
    title = Text(f"Step {k}, the same {f.samples} samples, cost of every rank (mean 1):", "bold")
    why = Text(f"Step {k} has the median imbalance without planning.", "dim")
    return Group(title, table, Text(result), why)


def summary(f: DemoResult, width: int) -> RenderableType:
    """Return tables of the mixture and the imbalance, and the measured speed and memory."""
    memory = (
        f"{f.peak_bytes / 2**20:,.0f} MB (PSS of the whole process; "
        f"{f.before_bytes / 2**20:,.0f} MB before the job was launched)"
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "tokens",
        f"{f.tokens:,} in {f.steps} steps, {f.tokens_per_s:,.0f} tokens/s including the time of "
        "the trainer",
    )
    facts.add_row(
        "wait of the trainer",
        f"{f.wait_ms:.1f} ms per step after the first; it computes {f.compute_ms:.0f} ms per step",
    )
    facts.add_row("memory", memory)
    head = (
        MIX_HEAD
        if width >= 98
        else [{"quarantined": "bad", "lost tokens": "lost"}.get(name, name) for name in MIX_HEAD]
    )
    changed = "" if f.changed_at is None else f" (it changed at step {f.changed_at})"
    return Group(
        Text(f"Mixture over all steps{changed}:", "bold"),
        grid(head, mix_rows(f)),
        Text(""),
        Text(f"Imbalance of {len(COMPARED)} strategies on the same {f.steps} steps:", "bold"),
        grid(PLACING_HEAD, placing_rows(f)),
        Text(f"{BY_RANK} {BY_MICROBATCH}", "dim"),
        Text(""),
        facts,
        Text(stand_in_note(f), "dim"),
    )
