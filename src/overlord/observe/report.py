"""Reports as self-contained HTML pages, without scripts, fonts or links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

_STYLE = """
:root { color-scheme: light dark; --page:#f9f9f7; --surface:#fcfcfb; --ink:#0b0b0b;
  --muted:#52514e; --faint:#898781; --grid:#e4e3df;
  --axis:#c3c2b7;  --s0:#2a78d6; --s1:#1baf7a; --s2:#eda100; --s3:#008300; --s4:#4a3aa7;
  --s5:#e34948; }
@media (prefers-color-scheme: dark) { :root { --page:#0d0d0d; --surface:#1a1a19; --ink:#fff;
  --muted:#c3c2b7; --faint:#898781;
  --grid:#2c2c2a; --axis:#45443f; --s0:#3987e5; --s1:#199e70; --s2:#c98500; --s3:#2f9e2f;
  --s4:#9085e9; --s5:#e66767; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 32px 24px 64px; max-width: 960px; background: var(--page);
  color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 8px; } h2 { font-size: 18px;
  margin: 0 0 2px; }
p { margin: 0 0 12px; color: var(--muted); }
  code { font: 13px/1.4 ui-monospace, Menlo, Consolas, monospace; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0 28px; }
.tile { flex: 1 1 150px; background: var(--surface); border: 1px solid var(--grid);
  border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 24px; line-height: 1.25; font-weight: 600; }
  .tile span { color: var(--muted); font-size: 13px; }
figure, section { background: var(--surface); border: 1px solid var(--grid); border-radius: 8px;
  margin: 0 0 20px;
  padding: 18px 20px 14px; }
figcaption { color: var(--faint); font-size: 13px; margin-top: 8px; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--muted); font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; }
svg text.name, svg text.value { fill: var(--ink); } svg text.value { paint-order: stroke;
  stroke: var(--surface); stroke-width: 4px; }
svg text.tick { fill: var(--faint); font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--axis); }
  svg .mark { stroke: var(--faint); stroke-dasharray: 2 3; }
svg .bound { fill: none; stroke: var(--ink); stroke-dasharray: 6 4; } svg .line { fill: none;
  stroke-width: 2; stroke-linejoin: round; }
svg .wanted { fill: none; stroke-width: 1.5; stroke-dasharray: 5 4; opacity: .75; }
  svg .leader { fill: none; stroke-width: 2; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%;
  font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--grid);
  white-space: nowrap; }
th { color: var(--muted); font-weight: 500; } th:first-child, td:first-child { text-align: left;
  padding-left: 0; }
pre { overflow-x: auto; font: 12px/1.45 ui-monospace, Menlo, Consolas, monospace; }
  summary { cursor: pointer; color: var(--muted); }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A plot with a title and a description.

    ``svg`` is inserted without escaping; the other fields are plain text.
    """

    title: str
    shows: str
    svg: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A table with a title and a description; its first column is text, the others are numbers."""

    title: str
    shows: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HtmlReport:
    """The content of a report; the page shows ``command`` under each plot and table."""

    title: str
    lead: str
    command: str
    tiles: Sequence[tuple[str, str]]  # (number, label)
    sections: Sequence[Picture | Sheet]
    attached: Sequence[tuple[str, str]] = field(default=())  # (name, text), collapsed at first

    def to_html(self) -> str:
        """Return the report as one HTML page."""
        tiles = "".join(
            f'<div class="tile"><b>{escape(number)}</b><span>{escape(label)}</span></div>'
            for number, label in self.tiles
        )
        sections = "\n".join(
            _picture(s, self.command) if isinstance(s, Picture) else _sheet(s, self.command)
            for s in self.sections
        )
        folded = "<section><details><summary>{}</summary><pre>{}</pre></details></section>"
        attached = "".join(
            folded.format(escape(name), escape(text)) for name, text in self.attached
        )
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, '
            f'initial-scale=1">\n<title>{escape(self.title)}</title>\n'
            f"<style>{_STYLE}</style>\n</head>\n<body>\n"
            f"<h1>{escape(self.title)}</h1>\n<p>{escape(self.lead)}</p>\n"
            f'<div class="tiles">{tiles}</div>\n{sections}\n{attached}\n</body>\n</html>\n'
        )


def _picture(p: Picture, command: str) -> str:
    return _figure(p.title, p.shows, p.svg, command)


def _sheet(s: Sheet, command: str) -> str:
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in s.head)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in s.rows
    )
    table = (
        "<div "
        f'class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'
    )
    return _figure(s.title, s.shows, table, command)


def _figure(title: str, shows: str, markup: str, command: str) -> str:
    return (
        f"<figure>\n<h2>{escape(title)}</h2>\n<p>{escape(shows)}</p>\n{markup}\n"
        f"<figcaption>Made by <code>{escape(command)}</code></figcaption>\n</figure>"
    )
