"""Boxes, lines and words for the pictures of docs/primitives, in the colours of the package's own
plots.
"""

from __future__ import annotations

from html import escape

import numpy as np

from overlord.observe import svg


class Drawing:
    """Boxes, lines and words; colours as in the plots, from variables that know light and dark."""

    def __init__(self, height: int, about: str):
        self.height, self.about = height, about
        self.parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, kind: str = "tick", anchor: str = "start"
    ) -> None:
        self.parts.append(
            f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" '
            f'text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, x0: float, y0: float, x1: float, y1: float, kind: str = "axis") -> None:
        self.parts.append(
            f'<line class="{kind}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>'
        )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        color: str = "var(--muted)",
        fill: float = 0.0,
        says: str = "",
    ) -> None:
        style = f"fill:{color};fill-opacity:{fill:.2f};stroke:{color}"
        told = f"<title>{escape(says)}</title>" if says else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="2" '
            f'style="{style}">{told}</rect>'
        )

    def cell(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        words: str,
        color: str = "var(--muted)",
        fill: float = 0.0,
    ) -> None:
        self.box(x, y, w, h, color, fill)
        self.text(x + w / 2, y + h / 2 + 4, words, "name", "middle")

    def path(self, d: str, color: str = "var(--faint)") -> None:
        self.parts.append(f'<path style="fill:none;stroke:{color};stroke-width:1.5" d="{d}"/>')

    def arrow(self, x0: float, y0: float, x1: float, y1: float) -> None:
        long = float(np.hypot(x1 - x0, y1 - y0))
        ux, uy = (x1 - x0) / long, (y1 - y0) / long
        left, right = (
            (x1 - 7 * ux + 4 * uy, y1 - 7 * uy - 4 * ux),
            (x1 - 7 * ux - 4 * uy, y1 - 7 * uy + 4 * ux),
        )
        self.path(
            f"M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}M{left[0]:.1f} {left[1]:.1f}L{x1:.1f} "
            f"{y1:.1f}L{right[0]:.1f} {right[1]:.1f}"
        )

    def done(self) -> str:
        return svg.document(self.height, self.about, self.parts)
