"""Small plots as inline SVG text, without a library or scripts.

Colours are CSS variables of the page, so that dark mode works. Series colours are ``var(--s0)`` to
``var(--s5)``; text never has the colour of a series. Every line and bar has a ``<title>``, which
browsers show on hover and read aloud.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

Scale = Callable[[float], float]
WIDTH = 860
SHOWN = 16  # most bars of a panel for which each bar has a number
DIGIT = 7.5  # width of a character in pixels
LABEL_GAP = 15  # pixels between two labels at the end of lines


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlotLine:
    """One series of a line plot.

    ``wanted``: the target values, drawn as a dashed line in the same colour, below the series.
    ``error``: the length of the bars above and below each point.
    ``shift``: pixels to the right, so that bars of several series stand side by side.
    """

    label: str
    color: str
    y: np.ndarray
    wanted: np.ndarray | None = None
    kind: str = "line"  # or "bound": a limit, drawn dashed
    error: np.ndarray | None = None
    shift: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ridge:
    """One row of a histogram plot: the values, with a label on the left and a note on the right."""

    label: str
    note: str
    color: str
    values: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Panel:
    """One group of stacked bars, with a label and a note below it."""

    label: str
    note: str
    color: str
    stacks: np.ndarray  # [bar, segment]


def series_color(i: int) -> str:
    """Return the CSS colour of series ``i``; colours repeat after six series."""
    return f"var(--s{i % 6})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The axes of a line plot; ``show`` formats a number of the y axis."""

    x_label: str
    y_label: str
    y_from: float
    y_to: float
    show: Callable[[float], str]
    x_ticks: Sequence[tuple[float, str]] = ()  # (place, label); without them whole numbers


def lines(
    x: np.ndarray,
    series: Sequence[PlotLine],
    axes: Axes,
    *,
    about: str,
    marks: Sequence[tuple[float, str]] = (),
    height: int = 300,
) -> str:
    """Return a line plot with the names of lines at their ends, as SVG text.

    ``about`` describes it for screen readers. ``marks``: (x, label) of vertical lines.
    """
    left, right, top, bottom = 56, 130, 26, 40
    sx = _scale(float(x[0]), float(x[-1]), left, WIDTH - right)
    sy = _scale(axes.y_from, axes.y_to, height - bottom, top)
    out = [_text(left - 48, top - 12, axes.y_label, "label")]
    for tick in _ticks(axes.y_from, axes.y_to, 5):
        out.append(_rule(left, sy(tick), WIDTH - right, sy(tick), "grid"))
        out.append(_text(left - 8, sy(tick) + 4, axes.show(tick), "tick", "end"))
    whole = [
        (tick, f"{int(tick)}") for tick in _ticks(float(x[0]), float(x[-1]), 8) if tick == int(tick)
    ]
    for tick, word in axes.x_ticks or whole:
        out.append(_text(sx(tick), height - bottom + 18, word, "tick", "middle"))
    out.append(_text((left + WIDTH - right) / 2, height - 4, axes.x_label, "label", "middle"))
    for at, word in marks:
        out.append(_rule(sx(at), top, sx(at), height - bottom, "mark"))
        out.append(_text(sx(at) + 5, top + 4, word, "tick"))
    for s in series:
        if s.wanted is not None:
            out.append(_path(sx, sy, x, s.wanted, s.color, f"{s.label}, wanted", "wanted"))
    for s in series:
        moved = _scale(float(x[0]), float(x[-1]), left + s.shift, WIDTH - right + s.shift)
        out.append(_path(moved, sy, x, s.y, s.color, s.label, s.kind))
        for at, y, error in zip(x, s.y, s.error if s.error is not None else (), strict=False):
            ends = np.array([y - error, y + error])
            out.append(_path(moved, sy, np.array([at, at]), ends, s.color, s.label, "leader"))
    out += _end_labels(series, sy, WIDTH - right, top, height - bottom)
    return document(height, about, out)


def ridges(
    rows: Sequence[Ridge], *, about: str, x_label: str, limit: float, limit_label: str
) -> str:
    """Return histograms of positive values over a log axis, as SVG text.

    Each row has its own vertical scale. ``limit``: x of a labelled vertical line.
    """
    left, right, top, each, bottom = 110, 166, 24, 58, 44
    height = top + each * len(rows) + bottom
    highest = max(limit, *(float(r.values.max(initial=1)) for r in rows))
    edges = np.arange(0.0, math.ceil(2 * math.log2(max(2.0, highest))) + 1) / 2
    sx = _scale(0.0, float(edges[-1]), left, WIDTH - right)
    out: list[str] = []
    for power in range(0, int(edges[-1]) + 1, 2):
        out.append(_rule(sx(power), top, sx(power), height - bottom, "grid"))
        out.append(_text(sx(power), height - bottom + 18, f"{2**power:,}", "tick", "middle"))
    for k, row in enumerate(rows):
        base = top + each * (k + 1)
        out += _ridge(row, edges, sx, base, each - 12)
        out.append(_text(left - 12, base - 12, row.label, "name", "end"))
        out.append(_text(WIDTH - right + 12, base - 12, row.note, "tick"))
        out.append(_rule(left, base, WIDTH - right, base, "axis"))
    out.append(_rule(sx(math.log2(limit)), top - 6, sx(math.log2(limit)), height - bottom, "bound"))
    out.append(_text(sx(math.log2(limit)) - 5, top - 10, limit_label, "tick", "end"))
    out.append(_text((left + WIDTH - right) / 2, height - 6, x_label, "label", "middle"))
    return document(height, about, out)


def _ridge(row: Ridge, edges: np.ndarray, sx: Scale, base: float, tall: float) -> list[str]:
    counts, _ = np.histogram(np.log2(np.maximum(row.values, 1)), edges)
    most = max(1, int(counts.max(initial=1)))
    out = []
    for k in np.flatnonzero(counts).tolist():
        x0, x1 = sx(float(edges[k])), sx(float(edges[k + 1]))
        h = max(1.5, tall * int(counts[k]) / most)
        title = (
            f"{row.label}: {int(counts[k])} of {len(row.values)} samples of "
            f"{2 ** edges[k]:.0f} to {2 ** edges[k + 1]:.0f} tokens"
        )
        out.append(_rect(x0 + 1, base - h, x1 - x0 - 2, h, row.color, title))
    return out


def bars(
    panels: Sequence[Panel],
    *,
    about: str,
    bar_name: str,
    y_label: str,
    mean: float,
    bound: float,
    bound_label: str,
    height: int = 320,
) -> str:
    """Return groups of stacked bars as SVG text, with a horizontal line at ``bound``.

    Bars are divided by ``mean``; ``bound`` is in units of ``mean``.
    """
    left, right, top, bottom = 56, 150, 34, 62
    most = max(float(p.stacks.sum(axis=1).max(initial=0.0)) for p in panels) / (mean or 1.0)
    sy = _scale(0.0, max(most, bound) * 1.08, height - bottom, top)
    wide = (WIDTH - left - right) / len(panels)
    out = [_text(left - 48, top - 18, y_label, "label")]
    for tick in _ticks(0.0, max(most, bound) * 1.08, 5):
        out.append(_rule(left, sy(tick), WIDTH - right, sy(tick), "grid"))
        out.append(_text(left - 8, sy(tick) + 4, f"{tick:.2g}", "tick", "end"))
    words: list[str] = []
    for k, panel in enumerate(panels):
        out += _panel(panel, left + k * wide, wide, sy, mean or 1.0, bar_name)
        words += _panel_values(panel, left + k * wide, wide, sy, mean or 1.0)
        out.append(_text(left + (k + 0.5) * wide, height - 24, panel.label, "name", "middle"))
        out.append(_text(left + (k + 0.5) * wide, height - 7, panel.note, "tick", "middle"))
    out.append(_rule(left, sy(bound), WIDTH - right, sy(bound), "bound"))
    out.append(_text(WIDTH - right + 8, sy(bound) + 4, bound_label, "tick"))
    out.append(_rule(left, sy(0), WIDTH - right, sy(0), "axis"))
    # Numbers come last, so that no line is drawn over them.
    return document(height, about, out + words)


def _panel(panel: Panel, x: float, wide: float, sy: Scale, mean: float, bar_name: str) -> list[str]:
    n = len(panel.stacks)
    pitch = wide * 0.86 / n
    thick = min(54.0, pitch * 0.72)
    out = []
    for b, stack in enumerate(panel.stacks):
        centre, low = x + wide * 0.07 + (b + 0.5) * pitch, 0.0
        for m, load in enumerate((stack / mean).tolist()):
            y0, y1 = sy(low), sy(low + load)
            if load > 0:
                title = (
                    f"{panel.label}, {bar_name} {b}, microbatch {m}: {load:.3f} of the mean "
                    f"{bar_name}"
                )
                out.append(
                    _rect(
                        centre - thick / 2, y1 + 1, thick, max(0.8, y0 - y1 - 2), panel.color, title
                    )
                )
            low += load
        if n <= SHOWN:
            out.append(
                _text(
                    centre,
                    sy(0) + 16,
                    f"{bar_name} {b}" if pitch > DIGIT * (len(bar_name) + 2) else f"{b}",
                    "tick",
                    "middle",
                )
            )
    return out


def _panel_values(panel: Panel, x: float, wide: float, sy: Scale, mean: float) -> list[str]:
    """Return the numbers above the bars of a panel as SVG elements.

    If numbers would overlap, only the highest bar has one. More than SHOWN bars have none.
    """
    n = len(panel.stacks)
    totals = (panel.stacks.sum(axis=1) / mean).tolist() if n <= SHOWN else []
    shown = (
        range(len(totals))
        if wide * 0.86 / n > 4 * DIGIT
        else [int(np.argmax(totals))]
        if totals
        else []
    )
    return [
        _text(
            x + wide * (0.07 + 0.86 * (b + 0.5) / n),
            sy(totals[b]) - 5,
            f"{totals[b]:.2f}",
            "value",
            "middle",
        )
        for b in shown
    ]


def _end_labels(
    series: Sequence[PlotLine], sy: Scale, x: float, top: float, bottom: float
) -> list[str]:
    """Return the SVG elements of the names at the ends of lines, moved apart if they overlap.

    A short stroke in the colour of the series connects each line to its name.
    """
    order = sorted(range(len(series)), key=lambda i: sy(float(series[i].y[-1])))
    places: list[float] = []
    for i in order:
        at = sy(float(series[i].y[-1]))
        places.append(max(at, places[-1] + LABEL_GAP) if places else max(at, top))
    over = places[-1] - bottom if places else 0.0
    if over > 0:
        places = [p - over for p in places]
    out = []
    for i, at in zip(order, places, strict=True):
        end = sy(float(series[i].y[-1]))
        out.append(
            f'<path class="leader" style="stroke:{series[i].color}" d="M{x + 3:.1f} '
            f'{end:.1f}L{x + 16:.1f} {at:.1f}H{x + 24:.1f}"/>'
        )
        out.append(_text(x + 28, at + 4, series[i].label, "name"))
    return out


def _path(
    sx: Scale, sy: Scale, x: np.ndarray, y: np.ndarray, color: str, label: str, kind: str
) -> str:
    points = "L".join(f"{sx(float(a)):.1f} {sy(float(b)):.1f}" for a, b in zip(x, y, strict=True))
    return (
        f'<path class="{kind}" style="stroke:{color}" '
        f'd="M{points}"><title>{escape(label)}</title></path>'
    )


def _rect(x: float, y: float, w: float, h: float, color: str, title: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
    return f'<rect {place} rx="2" style="fill:{color}"><title>{escape(title)}</title></rect>'


def _rule(x0: float, y0: float, x1: float, y1: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>'


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def document(height: float, about: str, elements: Sequence[str]) -> str:
    """Return the SVG text of elements; ``about`` is its description for screen readers."""
    body = "\n".join(elements)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(about, quote=True)}">\n{body}\n</svg>'
    )


def _scale(a: float, b: float, to_a: float, to_b: float) -> Scale:
    span = (b - a) or 1.0
    return lambda v: to_a + (v - a) / span * (to_b - to_a)


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Return round values inside [low, high], evenly spaced; about ``about`` of them."""
    raw = (high - low) / max(1, about) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 10) for k in range(first, math.floor(high / step + 1e-9) + 1)]
