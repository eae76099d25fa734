"""Tables of the command line, plain text if there is no terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from overlord.job.several_documents import grouped
from overlord.observe.balancing_model import shown_model
from overlord.observe.explain import documents_of_plan
from overlord.observe.explain_text import of_documents, waits
from overlord.observe.one_cost import by_model
from overlord.observe.ring_text import host_memory, limit
from overlord.observe.stage_text import stage_lines, stage_of_step
from overlord.observe.terminal_text import one_line, printable
from overlord.planning.losses import share

if TYPE_CHECKING:
    from rich.console import RenderableType

    from overlord.job.job import Job
    from overlord.observe.progress import Meter
    from overlord.observe.source_report import SourceReport
    from overlord.plan.plan import LoadingPlan

EIGHTHS = " ▏▎▍▌▋▊▉█"
BUCKETS = 64  # buckets of a plan that are shown
SOURCES = 24  # sources of a plan's mix that are named
CELLS = 8  # microbatches of a bucket that are shown
DECISIONS = 12  # latest decisions of the autoscaler that are shown after a run
REASONS = 5  # latest quarantined rows that are shown after a run
# Display names of keys of ``metrics()["memory"]``; other keys are displayed unchanged.
MEMORY = {
    "ready": "buffered samples",
    "kept": "replay buffers",
    "held": "held-over samples",
    "shadows": "standbys",
    "staged": "payloads",
    "assembled": "batches",
    "slabs": "buffer pool",
}
LOST = {"truncate": "cut", "drop": "dropped"}  # on_long -> prefix of the metric of lost tokens


def bar(value: float, most: float, width: int) -> str:
    """Return a bar of block characters for a value; ``most`` fills ``width`` characters.

    The resolution is an eighth of a character.
    """
    eighths = round(8 * width * max(0.0, value) / most) if most > 0 else 0
    full, rest = divmod(min(eighths, 8 * width), 8)
    return "█" * full + (EIGHTHS[rest] if rest else "")


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> Table:
    """Return a table without borders: ``text_columns`` of text, then right-aligned numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for k, name in enumerate(head):
        table.add_column(name, justify="left" if k < text_columns else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    return table


def size(nbytes: float) -> str:
    """Return a number of bytes as text with a unit from B to GB; each is 1024 times the last."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1024 or unit == "GB":
            break
        nbytes /= 1024
    return f"{nbytes:,.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"


def run_view(
    job: Job, meter: Meter, metrics: Mapping[str, Any], quarantine: Sequence[Mapping[str, Any]]
) -> RenderableType:
    """Return tables of a run: mix, speed, memory, and quarantined rows with reasons."""
    # "split" cuts samples of several documents
    what = LOST.get(job.on_long, "cut" if grouped(job.sources) else "")
    limited = any(source.max_tokens is not None for source in job.sources)
    mixed = meter.source_tokens if job.batch.mixes_tokens else meter.samples
    head = (
        "source",
        "wanted",
        "realised",
        "samples",
        "tokens",
        "quarantined",
        "dropped",
        *([f"{what} tokens"] if what else []),
        *(["budget"] if limited else []),
    )
    rows = [
        (
            name,
            f"{w / meter.steps:.2%}",
            f"{m / mixed.sum():.2%}",
            f"{n:,}",
            f"{t:,}",
            f"{s['quarantined']:,}",
            f"{s['dropped']:,}",
            *([tokens_lost(s["tokens"], s[f"{what}_tokens"])] if what else []),
            *([budget_used(s)] if limited else []),
        )
        for (name, s), w, m, n, t in zip(
            metrics["sources"].items(),
            meter.wanted,
            mixed,
            meter.samples,
            meter.source_tokens,
            strict=False,
        )
    ]
    memory = {
        MEMORY.get(k, k): v
        for k, v in metrics["memory"].items()
        if v and k not in ("pss", "roles", "budget")
    }
    # The meter measures this process during the run, metrics all processes at its end.
    peak = max(meter.peak_pss, metrics["memory"]["pss"])
    facts = [
        ("steps", f"{meter.steps:,}, {meter.tokens:,} tokens, {meter.tokens_per_s:,.0f} tokens/s"),
        (
            "wait",
            f"{meter.wait_ms:.1f} ms per step, {meter.first_wait_s * 1e3:,.0f} ms for the first; "
            "no trainer computes between steps",
        ),
        (
            "memory",
            f"{size(peak)} (PSS of all processes); in use: "
            + ", ".join(f"{k} {size(v)}" for k, v in memory.items()),
        ),
    ]
    facts += [("stages", line.removeprefix("stage ")) for line in stage_lines(job)]
    facts += scaling_facts(metrics.get("scaling", {})) + placement_facts(
        metrics.get("placement", {})
    )
    views: list[RenderableType] = [grid(head, rows), Text(""), _facts(facts)]
    if quarantine:
        views += [
            Text(""),
            Text("last quarantined rows:"),
            *(Text(one_line(_quarantined(q))) for q in quarantine[-REASONS:]),
        ]
    return Group(*views)


def budget_used(source: Mapping[str, Any]) -> str:
    """Return, as text, the share of its token budget that a source has given; "" without one."""
    if source["max_tokens"] is None:
        return ""
    used = f"{source['tokens'] / source['max_tokens']:.1%}"
    return f"{used}, ended" if source["ended"] else used


def tokens_lost(tokens: int, lost: int) -> str:
    """Return, as text, the number of lost tokens and their share of ``tokens`` + ``lost``."""
    return f"{lost:,} ({share(tokens, lost):.1%})" if lost else "0"


def scaling_facts(scaling: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) rows of the autoscaler's last decisions and of sources too slow."""
    decisions = [
        ("scaling", f"after step {d['step']}: {d['words']}")
        for d in scaling.get("decisions", ())[-DECISIONS:]
    ]
    lacks = "{has} {unit}, needs {needs}: {reason}"
    for name, s in scaling.get("cannot_keep_up", {}).items():
        unit = s["what"].removesuffix("s") if s["has"] == 1 else s["what"]
        decisions.append(("cannot keep up", f"{name} has {lacks.format(**s, unit=unit)}"))
    return decisions


def placement_facts(placement: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a (name, text) row for each node with ranks and more workers than ``sidecar``."""
    text = (
        "node {node} has run {hosts} workers of this job for {for_s:.0f} s, {allowed} are "
        "allowed; they move when another node has room"
    )
    return [
        (f"sidecar={placement['sidecar']:g} exceeded", text.format_map(row))
        for row in placement.get("exceeded", ())
    ]


def _quarantined(row: Mapping[str, Any]) -> str:
    return f"  {row['source']}, {row['path']}, {_place(row)}: {row['reason']}"


def _place(row: Mapping[str, Any]) -> str:
    """Return the place of a quarantined row in its file as text, with its line number if known."""
    place = f"{row['row_unit']} {row['row']}"
    return place if row["line"] is None else f"line {row['line']} ({place})"


def _facts(facts: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(Text(one_line(name), "dim"), Text(printable(value)))
    return table


def inspect_view(job: Job, reports: Sequence[SourceReport]) -> RenderableType:
    """Return a table of the sources, then token lengths, columns and bad rows of each."""
    head = ("source", "format", "files", "chunks", "rows", "bytes", "bad rows")
    rows = [
        (
            r.name,
            r.format,
            f"{r.files:,}",
            f"{r.chunks:,}",
            "unknown until read" if r.rows is None else f"{r.rows:,}",
            size(r.nbytes),
            f"{r.bad_rows:,} of {r.sampled_rows:,}",
        )
        if r.format
        else (r.name, "failed", *("-",) * 5)
        for r in reports
    ]
    views: list[RenderableType] = [grid(head, rows, 2), Text("")]
    views += [Text(line) for line in stage_lines(job)]
    for r in reports:
        if r.format:
            columns = ", ".join(f"{name}: {kind}" for name, kind in r.schema.items()) or "none"
            sampled = f"sampled {r.sampled_rows:,} rows in {r.sampled_files:,} of {r.files:,} files"
            dropped = f", {r.dropped:,} dropped by a filter" if r.dropped else ""
            longer = (
                f", {r.longer:,} longer than max_document (on_long: {job.on_long})"
                if r.longer
                else ""
            )
            if r.lost:
                longer += (
                    f": {r.lost:,} of {r.all_tokens:,} tokens {LOST.get(job.on_long, 'cut')} "
                    f"({r.lost / r.all_tokens:.1%})"
                )
            views.append(
                Text.assemble(
                    (one_line(r.name), "bold"),
                    one_line(
                        f"  {_lengths(r.tokens)}{_documents(r)}{longer}; columns {columns}; "
                        f"{sampled}{dropped}"
                    ),
                )
            )
            views += [Text(one_line(f"  bad: {reason}")) for reason in r.reasons()]
    return Group(*views)


def _documents(report: SourceReport) -> str:
    """Return the documents of samples that have several, as text."""
    counts = report.documents.lengths
    if not len(counts):
        return ""
    several = f"{counts.min()} to {counts.max()}" if counts.min() < counts.max() else f"{counts[0]}"
    return f" by sample of {several} documents"


def _lengths(tokens: np.ndarray) -> str:
    if not len(tokens):
        return "no sample"
    return (
        f"tokens {int(tokens.min()):,} / {np.median(tokens):,.0f} / {int(tokens.max()):,} "
        "(min / median / max)"
    )


def plan_view(job: Job, plan: LoadingPlan, width: int) -> RenderableType:
    """Return a table of a plan by bucket: relative cost, tokens, samples and microbatches.

    Costs are those of the job's model, whatever the strategy used: see ``by_model``. At most
    BUCKETS buckets are shown, and as many microbatches as fit ``width`` characters.
    """
    measured = by_model(job, plan)
    a, i = plan.pieces(), measured.plan.imbalance()
    shape, flat = (a.n_buckets, a.n_microbatches), a.bins()
    tokens = (
        np.bincount(
            flat,
            weights=plan.tokens[a.sample] if plan.tasks is None else a.size,
            minlength=shape[0] * shape[1],
        )
        .reshape(shape)
        .astype(int)
    )
    samples = np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape)
    loads = measured.plan.loads().sum(axis=1)
    ratio = loads / (loads.mean() or 1.0)
    long = 16 if width >= 100 else 8
    cells = max(1, min(CELLS, a.n_microbatches, (width - 42 - long) // 14))
    head = (
        "bucket",
        "cost / mean",
        "",
        "tokens",
        plan.row_kind,
        *(f"microbatch {m}" for m in range(cells)),
    )
    rows = [
        (
            f"{b}",
            f"{ratio[b]:.3f}",
            bar(ratio[b], ratio.max(), long),
            f"{tokens[b].sum():,}",
            f"{samples[b].sum():,}",
            *(f"{tokens[b, m]:,} ({samples[b, m]})" for m in range(cells)),
        )
        for b in range(min(a.n_buckets, BUCKETS))
    ]
    strategy = (
        job.strategy
        if isinstance(job.strategy, str)
        else getattr(job.strategy, "__name__", "a function")
    )
    several = of_documents(len(plan), documents_of_plan(plan))
    facts = [
        (
            "step",
            f"{plan.step}: {len(plan):,} {plan.row_kind}{several}, "
            f"{int(plan.tokens.sum()):,} tokens, "
            f"placed by {strategy} on {job.place}",
        ),
        *([("stage", stage)] if (stage := stage_of_step(job, plan.step)) else []),
        (
            "imbalance",
            f"by bucket {i['bucket']:.3f}, by microbatch {i['microbatch']:.3f}; {limit(plan, i)}",
        ),
        ("by the cost", measured.cost),
        *([("by its own cost", measured.own)] if measured.own else []),
        ("waits", waits(job.sync, i)),
        *([("model", model)] if (model := shown_model(job)) else []),
        ("microbatches", f"{_microbatches(plan)}, {plan.fill():.0%} filled"),
        *((("host memory", host),) if (host := host_memory(plan)) else ()),
        ("mix", _mix(plan)),
        ("digest", plan.digest()),
    ]
    hidden = (("buckets", BUCKETS, a.n_buckets), ("microbatches", cells, a.n_microbatches))
    more = [f"{what} {shown} to {n - 1}" for what, shown, n in hidden if n > shown]
    table = grid(head, rows)
    table.columns[2].justify = "left"
    caption = [
        Text(
            f"tokens ({plan.row_kind}) by microbatch"
            + (f"; not shown: {', '.join(more)}" if more else ""),
            "dim",
        )
    ]
    return Group(_facts(facts), Text(""), table, *caption)


def _microbatches(plan: LoadingPlan) -> str:
    """Return the number and capacity of microbatches as text, with the rings of a hybrid plan."""
    a = plan.main
    if plan.tasks is None:
        return f"{a.n_microbatches} of {a.capacity:,} tokens on each bucket"
    counts, sizes = plan.tasks.table.counts(a.n_buckets), plan.tasks.table.sizes()
    least, most = int(counts.min()), int(counts.max())
    rings = f"{int((sizes > 1).sum())} rings of up to {int(sizes.max(initial=1))} buckets"
    if (waits := plan.imbalance().get("waits")) is not None:
        rings += f", with their waits {waits:.3f} of the mean"
    number = f"{most}" if least == most else f"{least} to {most}"
    return f"{number} of {a.capacity:,} tokens on each bucket, {rings}"


def _mix(plan: LoadingPlan) -> str:
    """Return the samples by source as text, in the job's order; at most SOURCES are named."""
    counts = np.bincount(plan.source, minlength=len(plan.names))
    shown = np.sort(np.argsort(-counts, kind="stable")[:SOURCES])
    named = ", ".join(f"{plan.names[i]} {counts[i]}" for i in shown.tolist())
    return named + (
        f", and {len(counts) - len(shown)} others {counts.sum() - counts[shown].sum()}"
        if len(counts) > len(shown)
        else ""
    )
