"""The result of the demo as rows of text, for terminal and report, and the HTML report."""

from __future__ import annotations

import numpy as np

from overlord.demo.result import COMPARED, DemoResult
from overlord.drill.tables import STRIKE_HEAD, strike_rows
from overlord.observe.report import HtmlReport, Picture, Sheet
from overlord.observe.svg import Axes, Panel, PlotLine, Ridge, bars, lines, ridges, series_color
from overlord.observe.tables import tokens_lost

COLORS = {"vanilla": series_color(5), "packed": series_color(2), "llm_balance": series_color(0)}
STRATEGIES = {
    "vanilla": "sample i goes to rank i mod ranks",
    "packed": "the stream is split into microbatches of equal tokens, assigned in turn",
    "llm_balance": "samples are placed by cost over ranks and microbatches",
}
MIX_HEAD = (
    "source",
    "wanted",
    "realised",
    "samples",
    "tokens",
    "lost tokens",
    "median",
    "longest",
    "quarantined",
)
LONG = {
    "split": "were split into pieces of that length",
    "truncate": "were truncated to it",
    "drop": "were dropped",
    "quarantine": "went to quarantine",
}
PLACING_HEAD = ("strategy", "by rank", "worst step", "by microbatch", "worst step", "filled")
BY_RANK = (
    "Imbalance by rank: cost of the slowest rank divided by the mean. 1 is perfect; a step "
    "takes as long as its slowest rank."
)
BY_MICROBATCH = "By microbatch: the same if ranks wait for each other after every microbatch."


def mix_rows(f: DemoResult) -> list[tuple[str, ...]]:
    """Return the rows of the mixture table: shares as means over all steps, and lengths.

    The draw is exact, so wanted and realised shares differ by less than one sample.
    """
    return [
        (
            name,
            f"{f.wanted[:, i].mean():.2%}",
            f"{f.realised[:, i].mean():.2%}",
            f"{len(n):,}",
            f"{int(n.sum()):,}",
            tokens_lost(int(n.sum()), f.lost[name]),
            f"{np.median(n):,.0f}" if len(n) else "-",
            f"{int(n.max(initial=0)):,}",
            f"{f.quarantined[name]}",
        )
        for i, (name, n) in enumerate(f.lengths.items())
    ]


def placing_rows(f: DemoResult) -> list[tuple[str, ...]]:
    """Return the rows of the imbalance table: one per strategy, and last the lower bound."""
    rows = [
        (
            name,
            f"{c.bucket.mean():.3f}",
            f"{c.bucket.max():.3f}",
            f"{c.microbatch.mean():.3f}",
            f"{c.microbatch.max():.3f}",
            f"{c.fill.mean():.0%}",
        )
        for name, c in f.compared.items()
    ]
    return [*rows, ("bound", f"{f.bound.mean():.3f}", f"{f.bound.max():.3f}", "", "", "")]


def tiles(f: DemoResult) -> list[tuple[str, str]]:
    """Return the main numbers of the report as texts, each with its label."""
    before, after = f.compared["vanilla"].bucket.mean(), f.compared["llm_balance"].bucket.mean()
    return [
        (f"{before:.2f} → {after:.3f}", "imbalance by rank, vanilla → llm_balance"),
        (f"{f.tokens_per_s:,.0f}", "tokens/s, including the time of the stand-in trainer"),
        (
            f"{f.wait_ms:.1f} ms",
            f"wait of the trainer per step; it computes {f.compute_ms:.0f} ms per step",
        ),
        (
            f"{f.peak_bytes / 2**20:,.0f} MB",
            f"memory (PSS) of the process; {f.before_bytes / 2**20:,.0f} MB before launch",
        ),
    ]


def stand_in_note(f: DemoResult) -> str:
    """Return a text about the stand-in trainer and the meaning of its wait."""
    return (
        "The trainer is a stand-in: in every step it sleeps in proportion to the cost of "
        f"its slowest rank, {f.compute_ms:.0f} ms on average. "
        f"Its wait is the time from the request of a step until the last of {f.ranks} ranks "
        f"has received it; the first step took {f.first_wait_ms:,.0f} ms."
    )


def report(f: DemoResult, job_yaml: str) -> HtmlReport:
    """Return the HTML report of a demo run; ``job_yaml``: the job file to attach."""
    lead = (
        f"{f.steps} steps of {f.samples} samples from {len(f.names)} sources to {f.ranks} "
        f"ranks, {f.tokens:,} tokens in all, loaded, "
        f"planned and packed in one process. {stand_in_note(f)} Every number comes from this run."
    )
    sections: list[Picture | Sheet] = [
        _load_picture(f),
        _imbalance_picture(f),
        _placing_sheet(f),
        _mix_picture(f),
        _mix_sheet(f),
        _length_picture(f),
        *_fault_sheet(f),
    ]
    return HtmlReport(
        title="Overlord: one job, planned",
        lead=lead,
        command=f.command,
        tiles=tiles(f),
        sections=sections,
        attached=[("job.yaml", job_yaml)],
    )


def _load_picture(f: DemoResult) -> Picture:
    k = f.example_step
    mean = float(f.compared["vanilla"].loads[k].sum()) / f.ranks
    bound = float(f.bound[k])
    panels = [
        Panel(
            label=name,
            note=f"slowest over mean {c.bucket[k]:.3f}",
            color=COLORS[name],
            stacks=c.loads[k],
        )
        for name, c in f.compared.items()
    ]
    return Picture(
        title="The same batch, unplanned and planned",
        shows=f"Cost of every rank in step {k}, in units of the mean rank; the segments of a bar "
        f"are its microbatches. Step {k} has the median imbalance without planning. "
        "No placement can bring the slowest rank below the dashed line: the mean, the most "
        "expensive single sample, or the most expensive few that must share a rank.",
        svg=bars(
            panels,
            about="cost per rank without and with planning",
            bar_name="rank",
            y_label="cost / mean",
            mean=mean,
            bound=bound,
            bound_label=f"bound {bound:.3f}",
        ),
    )


def _imbalance_picture(f: DemoResult) -> Picture:
    # The bound comes first, so that a series that equals it is drawn over it.
    series = [PlotLine(label="bound", color="var(--faint)", y=f.bound, kind="bound")]
    series += [
        PlotLine(label=name, color=COLORS[name], y=f.compared[name].bucket) for name in COMPARED
    ]
    top = max(float(s.y.max()) for s in series)
    return Picture(
        title="Imbalance over the run",
        shows=f"{BY_RANK} The same samples of every step, placed by three strategies; no "
        "placement can go below the bound.",
        svg=lines(
            np.arange(f.steps),
            series,
            Axes(
                x_label="step",
                y_label="slowest rank / mean rank",
                y_from=1.0,
                y_to=1.0 + max(0.05, (top - 1.0) * 1.12),
                show=lambda v: f"{v:.2f}",
            ),
            about="imbalance by rank over steps for three strategies and the bound",
        ),
    )


def _mix_picture(f: DemoResult) -> Picture:
    series = [
        PlotLine(
            label=name, color=series_color(i), y=100 * f.realised[:, i], wanted=100 * f.wanted[:, i]
        )
        for i, name in enumerate(f.names)
    ]
    marks = [] if f.changed_at is None else [(float(f.changed_at), "set_mixture()")]
    change = (
        ""
        if f.changed_at is None
        else f" At step {f.changed_at} set_mixture() changed the mixture of the running job."
    )
    return Picture(
        title="Mixture over steps, wanted and realised",
        shows="Share of each source in the samples of a step: wanted dashed, realised "
        f"solid.{change} A step of {f.samples} samples "
        "cannot hold a fraction of a sample, so a step may be one sample off; later steps "
        "compensate for that.",
        svg=lines(
            np.arange(f.steps),
            series,
            Axes(
                x_label="step",
                y_label="share of samples",
                y_from=0.0,
                y_to=100 * float(max(f.realised.max(), f.wanted.max())) * 1.08,
                show=lambda v: f"{v:.0f}%",
            ),
            about="share of samples by source over steps",
            marks=marks,
            height=340,
        ),
    )


def _length_picture(f: DemoResult) -> Picture:
    rows = [
        Ridge(
            label=name,
            note=f"median {np.median(n):,.0f}, max {int(n.max()):,}",
            color=series_color(i),
            values=n,
        )
        for i, (name, n) in enumerate(f.lengths.items())
        if len(n)
    ]
    return Picture(
        title="Sample lengths: why placement matters",
        shows="Tokens of the samples drawn in this run, by source, on a logarithmic axis; each "
        "row is scaled to its own highest bar. "
        f"Documents longer than the context of {f.context:,} tokens {LONG[f.on_long]}.",
        svg=ridges(
            rows,
            about="distribution of sample lengths by source",
            x_label="tokens of a sample",
            limit=f.context,
            limit_label="context",
        ),
    )


def _placing_sheet(f: DemoResult) -> Sheet:
    return Sheet(
        title="Imbalance of three strategies over the same steps",
        shows=f"{BY_RANK} {BY_MICROBATCH} Means over {f.steps} steps, and the worst step; "
        "filled: share of the microbatches' capacity that holds tokens. "
        + "; ".join(f"{name}: {text}" for name, text in STRATEGIES.items())
        + ".",
        head=PLACING_HEAD,
        rows=placing_rows(f),
    )


def _mix_sheet(f: DemoResult) -> Sheet:
    return Sheet(
        title="Delivered samples by source",
        shows="Shares of samples over the whole run, and their lengths. Quarantined: "
        "rows that could not be read or tokenized. "
        f"Lost tokens: tokens of documents longer than the context that on_long={f.on_long!r} "
        "truncated or dropped.",
        head=MIX_HEAD,
        rows=mix_rows(f),
    )


def _fault_sheet(f: DemoResult) -> list[Sheet]:
    if f.drill is None:
        return []
    shows = (
        "The same job with planner, loaders and constructors in processes of their own, "
        f"for {f.drill.drill.steps} steps; some processes were killed. "
        "Every byte that every rank received is compared with an undisturbed run "
        f"in one process. {f.drill.sentence()}."
    )
    return [
        Sheet(
            title="Workers killed during the run",
            shows=shows,
            head=STRIKE_HEAD,
            rows=[tuple(r) for r in strike_rows(f.drill.disturbed)],
        )
    ]
