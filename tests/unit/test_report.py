"""The report: it stands alone, it parses, it draws what it was given, and it trusts no text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.observe import svg
from overlord.observe.report import HtmlReport, Picture, Sheet
from overlord.observe.svg import _ticks
from overlord.observe.tables import bar, size

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Balanced(HTMLParser):
    """Fails where a tag is not closed or closed in the wrong order; keeps text and tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(page: str) -> Balanced:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def a_report(word: str = "web") -> HtmlReport:
    drawn = svg.bars(
        [
            svg.Panel(
                label=word,
                note=word,
                color=svg.series_color(0),
                stacks=np.array([[1.0, 2.0], [3.0, 0.0]]),
            )
        ],
        about=word,
        bar_name="rank",
        y_label="cost",
        mean=3.0,
        bound=1.0,
        bound_label=word,
    )
    return HtmlReport(
        title=word,
        lead=word,
        command=f"overlord demo --out {word}",
        tiles=[(word, word)],
        attached=[(word, word)],
        sections=[
            Picture(title=word, shows=word, svg=drawn),
            Sheet(title=word, shows=word, head=(word, "n"), rows=[(word, "7")]),
        ],
    )


def test_a_report_parses_and_refers_to_nothing_outside() -> None:
    page = a_report().to_html()
    assert {"svg", "table", "figcaption"} <= set(parse(page).tags)
    assert not re.search(r"https?:|src=|@import|url\(|<script|<link", page)


def test_every_picture_and_table_says_what_it_shows_and_what_made_it() -> None:
    page = a_report("some words").to_html()
    assert page.count("<figure>") == 2
    assert page.count("Made by <code>overlord demo --out some words</code>") == 2
    assert page.count("<p>some words</p>") == 3  # the lead, the picture, the table


def test_hostile_names_stay_text() -> None:
    word = '<script>alert("1")</script>&"\''
    page = a_report(word)
    found = parse(page.to_html())
    assert "script" not in found.tags
    assert word in "".join(found.text)


def test_bars_are_as_high_as_the_loads_they_show() -> None:
    stacks = np.array([[1.0, 3.0], [2.0, 0.0], [0.5, 0.25]])
    drawn = ET.fromstring(
        svg.bars(
            [svg.Panel(label="p", note="", color="red", stacks=stacks)],
            about="",
            bar_name="rank",
            y_label="",
            mean=2.0,
            bound=1.0,
            bound_label="bound",
        )
    )
    heights = [
        float(r.attrib["height"]) + 2 for r in drawn.iter("rect")
    ]  # a gap of two pixels is left between pieces
    loads = stacks[stacks > 0]
    assert heights == pytest.approx((loads / loads[0] * heights[0]).tolist(), abs=0.2)
    assert [t.text for t in drawn.iter("text") if t.get("class") == "value"] == [
        "2.00",
        "1.00",
        "0.38",
    ]


@given(st.lists(st.integers(1, 8192), min_size=1, max_size=200))
def test_a_histogram_shows_every_sample_once_and_none_behind_the_limit(lengths: list[int]) -> None:
    row = svg.Ridge(label="web", note="", color="red", values=np.array(lengths))
    drawn = ET.fromstring(
        svg.ridges([row], about="", x_label="", limit=8192, limit_label="context")
    )
    shown = [int(re.search(r"(\d+) of", title.text or "")[1]) for title in drawn.iter("title")]  # type: ignore[index]
    assert sum(shown) == len(lengths)
    limit = next(
        float(line.attrib["x1"]) for line in drawn.iter("line") if line.get("class") == "bound"
    )
    assert all(float(r.attrib["x"]) + float(r.attrib["width"]) <= limit for r in drawn.iter("rect"))


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_names_at_the_ends_of_lines_never_lie_over_each_other(ends: list[float]) -> None:
    x = np.arange(3)
    series = [
        svg.PlotLine(label=f"s{i}", color=svg.series_color(i), y=np.array([0.0, 1.0, end]))
        for i, end in enumerate(ends)
    ]
    drawn = ET.fromstring(
        svg.lines(
            x, series, svg.Axes(x_label="", y_label="", y_from=0, y_to=100, show=str), about=""
        )
    )
    at = sorted(float(t.attrib["y"]) for t in drawn.iter("text") if t.get("class") == "name")
    assert len(at) == len(ends)
    assert all(b - a >= svg.LABEL_GAP - 0.2 for a, b in pairwise(at))


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_and_inside(low: float, span: float) -> None:
    high = low + span
    ticks = _ticks(low, high, 5)
    slack = 1e-6 * max(1.0, abs(low), span)
    assert all(low - slack <= t <= high + slack for t in ticks)
    assert len(ticks) <= 8


@given(st.floats(0, 10), st.integers(1, 60))
def test_a_bar_in_the_terminal_keeps_its_width_and_its_share(value: float, width: int) -> None:
    drawn = bar(value, 10.0, width)
    assert len(drawn) <= width
    assert abs(len(drawn) - width * value / 10.0) <= 1


def test_sizes_read_as_people_write_them() -> None:
    assert [size(n) for n in (0, 1023, 1536, 300 * 2**20, 5 * 2**30)] == [
        "0 B",
        "1,023 B",
        "1.5 kB",
        "300 MB",
        "5.0 GB",
    ]
