"""Measurements, tables and plot of ``overlord profile``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group
from rich.text import Text

from overlord.checks import describe_error
from overlord.errors import OverlordError
from overlord.observe.svg import Axes, PlotLine, lines, series_color
from overlord.observe.tables import bar, grid, size
from overlord.scaling.profile import JobProfile, SourceProfile, cdf

if TYPE_CHECKING:
    from rich.console import RenderableType

    from overlord.setup.measure import Bounds
    from overlord.setup.prepared_job import PreparedJob

SHOWN = 40  # most sources in a table, the most expensive first
WIDE = 40  # most characters of a bar
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)  # quantiles over the sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The measured profile, and a text for each source that could not be measured."""

    profile: JobProfile
    failures: tuple[str, ...]


def profile_job(
    prepared: PreparedJob, bounds: Bounds, progress: Callable[[str], None] = lambda name: None
) -> Profiled:
    """Measure all sources; a failure of one does not hide the others.

    Sources are measured one at a time, since otherwise memory could not be attributed to a source.
    ``progress``: called with the name of each finished source.
    """
    from overlord.setup.measure import machine, measure

    found, failures = list[SourceProfile](), list[str]()
    for i, name in enumerate(prepared.job.names):
        try:
            made = measure(prepared.reader_spec(i), bounds)
            if made.samples:
                found.append(made)
            else:
                failures.append(
                    f"source {name!r}: expected a sample, got none within {bounds.rows} rows and "
                    f"{bounds.seconds:g} s"
                )
        except OverlordError as fault:
            failures.append(str(fault))
        except Exception as fault:  # an unexpected error of one source must not hide the others
            failures.append(f"source {name!r}: {describe_error(fault)}")
        progress(name)
    return Profiled(profile=JobProfile.of(found, machine()), failures=tuple(failures))


def micro(seconds: float) -> str:
    """Return seconds as text with three digits and a unit from s to ns."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


QUANTITIES: tuple[tuple[str, Callable[[SourceProfile], float], Callable[[float], str]], ...] = (
    ("P, by sample", lambda p: p.sample_s, micro),
    ("P, by token", lambda p: p.token_s, micro),
    ("T, by sample", lambda p: p.transfer_s, micro),
    ("M_b, buffers", lambda p: p.buffer_bytes, size),
    ("M_d, file state", lambda p: p.file_bytes, size),
)


def profile_view(profile: JobProfile) -> RenderableType:
    """Return tables of the most expensive sources and of quantiles, and the share of file state."""
    every = sorted(profile.sources.values(), key=lambda p: (-p.sample_s, p.name))
    head = (
        "source",
        "samples",
        "read",
        "transform",
        "waited",
        "P by token",
        "T",
        "tokens",
        "buffers M_b",
        "file state M_d",
    )
    rows = [
        (
            p.name,
            f"{p.samples:,}",
            micro(p.read_s),
            micro(p.transform_s),
            micro(p.waited_s),
            micro(p.token_s),
            micro(p.transfer_s),
            f"{p.tokens:,.0f}",
            size(p.buffer_bytes),
            size(p.file_bytes),
        )
        for p in every[:SHOWN]
    ]
    shown: list[RenderableType] = [grid(head, rows)]
    if len(every) > SHOWN:
        shown.append(Text(f"and {len(every) - SHOWN} that cost less", "dim"))
    if every:
        shown += [Text(""), _quantile_table(every), Text(""), Text(file_state(profile))]
        shown.append(
            Text(
                "P: to read and transform a sample; T: to hand it to a constructor; M_b: an open "
                "window of rows and their samples; M_d: what open files keep between two slices",
                "dim",
            )
        )
        shown.append(
            Text(
                f"measured on {profile.machine}; waited: the time of read and transform in "
                "which no CPU core was busy",
                "dim",
            )
        )
    return Group(*shown)


def file_state(profile: JobProfile) -> str:
    """Return a line with a bar: the share of file state in the sources' memory (paper, Fig. 4)."""
    share, n = profile.file_share(), len(profile.sources)
    held = sum(p.file_bytes for p in profile.sources.values())
    return (
        f"file state is {share:.1%} of the memory of {n} sources, {size(held)} in all: "
        f"{bar(share, 1.0, WIDE)}"
    )


def _quantile_table(every: Sequence[SourceProfile]) -> RenderableType:
    """Return a table of quantiles of each quantity over the sources (Fig. 5 of the paper)."""
    rows = []
    for name, of, show in QUANTITIES:
        x, _ = cdf([of(p) for p in every])
        rows.append((name, *(show(float(x[max(0, int(np.ceil(q * len(x))) - 1)])) for q in SHARES)))
    return grid(("quantile over sources", *(f"{q:.0%}" for q in SHARES)), rows)


def cdf_svg(profile: JobProfile) -> str:
    """Return an SVG plot of the distribution of P, T and M over sources, relative to the median."""
    every = list(profile.sources.values())
    drawn = []
    for k, (name, of, _) in enumerate(QUANTITIES):
        x, _share = cdf([of(p) for p in every])
        if len(x) and (middle := float(np.median(x))) > 0:
            drawn.append((name, series_color(k), np.log10(np.maximum(x / middle, 1e-6))))
    low = float(np.floor(min((float(x.min()) for *_, x in drawn), default=-1.0)))
    high = float(np.ceil(max((float(x.max()) for *_, x in drawn), default=1.0)))
    axis = np.linspace(low, max(high, low + 1), 200)
    series = [
        PlotLine(label=n, color=c, y=np.searchsorted(x, axis, side="right") / len(x))
        for n, c, x in drawn
    ]
    ticks = [(float(t), f"{10.0**t:g}x") for t in range(int(low), int(max(high, low + 1)) + 1)]
    return lines(
        axis,
        series,
        Axes(
            x_label="cost of a source relative to the median source",
            y_label="share of sources",
            y_from=0.0,
            y_to=1.0,
            show=lambda v: f"{v:.0%}",
            x_ticks=ticks,
        ),
        about=f"Distribution over {len(every)} sources",
    )


STYLE = """
:root{color-scheme:light dark;--s0:#2f6fb4;--s1:#c2602b;--s2:#3a8f5c;--s3:#8a5bb5;--s4:#b08a1e;
--s5:#5a6b7a;--ink:#1b1f24;--soft:#8a929b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ea;--soft:#7d858e}}
svg{font:12px system-ui,sans-serif;max-width:60rem}text{fill:var(--ink)}
.tick,.label{fill:var(--soft)}
.line,.leader{fill:none;stroke-width:2}.grid,.axis,.mark{stroke:var(--soft);stroke-opacity:.3}
body{font:15px system-ui,sans-serif;margin:2rem}
"""


def profile_svg(profile: JobProfile) -> str:
    """Return the plot as a standalone SVG file, including its colours."""
    return (
        cdf_svg(profile)
        .replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        .replace("\n", f"\n<style>{STYLE}</style>\n", 1)
    )


def profile_page(profile: JobProfile, job: str) -> str:
    """Return an HTML page with the plot and the share of file state."""
    return (
        f"<!doctype html><meta charset=utf-8><title>{escape(job)}: cost of its sources"
        f"</title><style>{STYLE}</style>"
        f"<h1>{escape(job)}: cost of its sources"
        f"</h1><p>{escape(file_state(profile).partition(':')[0])}. "
        f"Measured on {escape(profile.machine)}.</p>{cdf_svg(profile)}\n"
    )
