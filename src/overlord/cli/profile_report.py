"""What ``overlord profile`` and ``overlord partition`` do, and how people are shown it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group
from rich.text import Text

from overlord.errors import OverlordError
from overlord.observe.svg import Line, lines, series_color
from overlord.observe.tables import bar, grid, size
from overlord.scaling.profile import JobProfile, SourceProfile, cdf
from overlord.user_code import told

if TYPE_CHECKING:
    from rich.console import RenderableType

    from overlord.scaling.partition import Partition
    from overlord.setup.measure import Bounds
    from overlord.setup.prepared_job import PreparedJob

SHOWN = 40  # sources of a table, the dearest first
WIDE = 40  # characters of a plot
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)  # of the sources, for which a distribution is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What was measured, and what could not be."""

    profile: JobProfile
    failures: tuple[str, ...]


def profile_job(
    blueprint: PreparedJob, bounds: Bounds, progress: Callable[[str], None] = lambda name: None
) -> Profiled:
    """All sources, one after the other: memory can only be told apart while nothing else happens.
    One that fails hides no other.
    """
    from overlord.setup.measure import machine, measure

    found, failures = list[SourceProfile](), list[str]()
    for i, name in enumerate(blueprint.job.names):
        try:
            made = measure(blueprint.kit(i), bounds)
            if made.samples:
                found.append(made)
            else:
                failures.append(
                    f"source {name!r}: no sample came within {bounds.rows} rows and "
                    f"{bounds.seconds:g} s"
                )
        except OverlordError as fault:
            failures.append(str(fault))
        except (
            Exception
        ) as fault:  # a surprise of one source must not hide the others; it is told by name
            failures.append(f"source {name!r}: {told(fault)}")
        progress(name)
    return Profiled(profile=JobProfile.of(found, machine()), failures=tuple(failures))


# what is shown


def micro(seconds: float) -> str:
    """Seconds of a sample or a token as people write them."""
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
    """A table of the dearest sources, the distributions over all, and what file state is of
    memory.
    """
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
    parts: list[RenderableType] = [grid(head, rows)]
    if len(every) > SHOWN:
        parts.append(Text(f"and {len(every) - SHOWN} that cost less", "dim"))
    if every:
        parts += [Text(""), _cdf_table(every), Text(""), Text(file_state(profile))]
        parts.append(
            Text(
                f"measured on {profile.machine}; waited: what no core was busy with of "
                "read and transform",
                "dim",
            )
        )
    return Group(*parts)


def file_state(profile: JobProfile) -> str:
    """The paper's Fig. 4 in a line, with a bar."""
    share, n = profile.file_share(), len(profile.sources)
    held = sum(p.file_bytes for p in profile.sources.values())
    return (
        f"file state is {share:.1%} of the memory of {n} sources, {size(held)} in all: "
        f"{bar(share, 1.0, WIDE)}"
    )


def _cdf_table(every: Sequence[SourceProfile]) -> RenderableType:
    """Of each quantity what a share of the sources stays below: the paper's Fig. 5 in figures."""
    rows = []
    for name, of, show in QUANTITIES:
        x, _ = cdf([of(p) for p in every])
        rows.append((name, *(show(float(x[max(0, int(np.ceil(q * len(x))) - 1)])) for q in SHARES)))
    return grid(("of the sources, at most", *(f"{q:.0%}" for q in SHARES)), rows)


def cdf_svg(profile: JobProfile) -> str:
    """P and M over sources, each in units of its median, on a logarithmic axis: how far sources are
    apart.
    """
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
        Line(label=n, color=c, y=np.searchsorted(x, axis, side="right") / len(x))
        for n, c, x in drawn
    ]
    ticks = [(float(t), f"{10.0**t:g}x") for t in range(int(low), int(max(high, low + 1)) + 1)]
    return lines(
        axis,
        series,
        about=f"Distribution over {len(every)} sources",
        x_label="cost of a source over the median source's",
        y_label="share of sources",
        y_from=0.0,
        y_to=1.0,
        show=lambda v: f"{v:.0%}",
        x_ticks=ticks,
    )


STYLE = """
:root{color-scheme:light dark;--s0:#2f6fb4;--s1:#c2602b;--s2:#3a8f5c;--s3:#8a5bb5;--s4:#b08a1e;--s5:#5a6b7a;--ink:#1b1f24;--soft:#8a929b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ea;--soft:#7d858e}}
svg{font:12px system-ui,sans-serif;max-width:60rem}text{fill:var(--ink)}.tick,.label{fill:var(--soft)}
.line,.leader{fill:none;stroke-width:2}.grid,.axis,.mark{stroke:var(--soft);stroke-opacity:.3}
body{font:15px system-ui,sans-serif;margin:2rem}
"""


def profile_svg(profile: JobProfile) -> str:
    """The plot alone, as a file of its own: it brings its colours along."""
    return (
        cdf_svg(profile)
        .replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        .replace("\n", f"\n<style>{STYLE}</style>\n", 1)
    )


def profile_page(profile: JobProfile, job: str) -> str:
    """The plot on a page."""
    return (
        f"<!doctype html><meta charset=utf-8><title>{escape(job)}: what its sources "
        f"cost</title><style>{STYLE}</style>"
        f"<h1>{escape(job)}: what its sources "
        f"cost</h1><p>{escape(file_state(profile).partition(':')[0])}. "
        f"Measured on {escape(profile.machine)}.</p>{cdf_svg(profile)}\n"
    )


def partition_view(made: Partition, tokens: float, measured: int) -> RenderableType:
    """The configuration with its reasons. ``measured``: sources whose cost is no guess."""
    r, h, n = made.resources, made.hosting, len(made.shares)
    memory = "" if r.memory_bytes is None else f" of {size(r.memory_bytes)}"
    beside = r.beside_s / made.sample_s if made.sample_s else 0.0
    facts = [
        f"{n} sources on {r.cores} cores: {made.loading_cores} for loading, the rest for "
        "constructors and planner "
        f"({beside:.0%} of the work)",
        f"{sum(h.loaders)} loaders in {h.n_hosts} hosts of {h.threads} threads; a worker "
        f"of level 1 is worth {made.block:.3g} cores",
        f"memory of loader hosts: {size(made.memory)}{memory}",
        f"predicted: {made.rate:,.0f} samples/s, {made.tokens_per_s(tokens):,.0f} "
        f"tokens/s; what bounds it is {made.bound}",
        f"costs: {measured} of {n} sources measured, {n - measured} guessed from their index",
    ]
    order = sorted(made.shares, key=lambda s: (-s.work, s.source))
    head = ("source", "why", "cluster", "level", "work", "loaders", "hosts")
    rows = [
        (
            s.source,
            s.reason,
            f"{s.cluster}",
            f"{s.level:,.1f}",
            f"{s.work:.1%}",
            f"{s.loaders}",
            f"{s.actors}",
        )
        for s in order[:SHOWN]
    ]
    parts: list[RenderableType] = [*(Text(f) for f in facts), Text(""), grid(head, rows, 2)]
    if len(order) > SHOWN:
        parts.append(
            Text(
                f"and {len(order) - SHOWN} with less work, "
                f"{sum(s.loaders for s in order[SHOWN:])} loaders in all",
                "dim",
            )
        )
    return Group(
        *parts, Text(""), *(Text(f"host {k:<3} {why}") for k, why in enumerate(h.reasons[:SHOWN]))
    )
