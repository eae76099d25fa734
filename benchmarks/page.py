"""Shared code of the benchmarks' result pages: tables, plots, the machine, a progress bar."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from measured.pages import RESULTS, tagged, this_machine

_STYLE = """<style>
svg { --page:#fcfcfb; --ink:#0b0b0b; --muted:#52514e; --faint:#898781; --grid:#e4e3df;
  --axis:#c3c2b7;
  --s0:#2a78d6; --s1:#1baf7a; --s2:#eda100; --s3:#008300; --s4:#4a3aa7; --s5:#e34948;
  background: var(--page); }
@media (prefers-color-scheme: dark) { svg { --page:#1a1a19; --ink:#fff; --muted:#c3c2b7;
  --grid:#2c2c2a; --axis:#45443f;
  --s0:#3987e5; --s1:#199e70; --s2:#c98500; --s3:#2f9e2f; --s4:#9085e9; --s5:#e66767; } }
text { fill: var(--muted); font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; }
text.name, text.value { fill: var(--ink); } text.value { paint-order: stroke;
  stroke: var(--page); stroke-width: 4px; }
text.tick { fill: var(--faint); } .grid { stroke: var(--grid); } .axis { stroke: var(--axis); }
.mark { stroke: var(--faint); stroke-dasharray: 2 3; } .bound { fill: none; stroke: var(--ink);
  stroke-dasharray: 6 4; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .leader { fill: none;
  stroke-width: 2; }
</style>"""


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def shown_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return the table for the terminal."""
    table = Table(*head, title=title, title_justify="left", header_style="bold")
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*(cell.replace("**", "") for cell in row))
    return table


def plot_file(svg: str) -> str:
    """Return a plot of overlord.observe.svg as a standalone file, light and dark."""
    head, rest = svg.split("\n", 1)
    named = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return f"{named}\n{_STYLE}\n{rest}\n"


def save(name: str, text: str, plots: dict[str, str]) -> Path:
    """Write the dated page and its plots under benchmarks/results, without overwriting a page."""
    images = RESULTS / "img"
    images.mkdir(parents=True, exist_ok=True)
    for plot, svg in plots.items():
        (images / f"{plot}.svg").write_text(plot_file(svg), encoding="utf-8")
    name, text = tagged(name, text, this_machine())
    path = RESULTS / f"{name}.md"
    path.write_text(text, encoding="utf-8")
    return path


def command_line(program: str) -> str:
    """Return the command line of this page, without options for other output files."""
    words = sys.argv[1:]
    for where in ("--json", "--out"):
        if where in words:
            at = words.index(where)
            del words[at : at + 2]
    return " ".join(["python", program, *words])


def machine() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return (
        f"{os.cpu_count()} CPUs ({model}), Python {platform.python_version()}, numpy "
        f"{metadata.version('numpy')}; "
        f"load average at the end {load}."
    )


def wide_console() -> Console:
    """Return the width of the terminal, or of the widest table without one."""
    return Console(width=None if sys.stdout.isatty() else 230)


def progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


class Numbers(click.ParamType):
    name = "N,N,..."

    def convert(
        self, value: str | list[int], param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        try:
            return [int(part) for part in value.split(",")] if isinstance(value, str) else value
        except ValueError:
            self.fail(f"expected whole numbers with commas between them, got {value!r}", param, ctx)


def context_name(context: int) -> str:
    return f"{context // 1024}k"
