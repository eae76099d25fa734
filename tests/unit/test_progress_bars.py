"""Progress bars: on terminals only, for long work only, with the time left; and windowed rates."""

from __future__ import annotations

import io
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from overlord.observe import progress_bars
from overlord.observe.progress_bars import ProgressBars, progress_bar
from overlord.observe.rates import RateWindow


def terminal(is_one: bool = True) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=is_one, width=100, color_system=None), out


def until(condition: object) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.02)


def test_long_work_shows_a_bar_with_counts_and_the_time_left() -> None:
    console, out = terminal()
    bars = ProgressBars(console, delay_s=0.0)
    for k in range(1, 9):
        bars.advance("indexed files", k, 16)
        time.sleep(0.05)
    until(lambda: "8/16" in out.getvalue())
    bars.close()
    shown = out.getvalue()
    assert "indexed files" in shown
    assert "50%" in shown
    assert re.search(r"0:00:0\d left", shown)


def test_short_work_shows_nothing() -> None:
    console, out = terminal()
    assert progress_bars.DELAY_S == 1.0
    with progress_bar(console, "planned steps", 3) as advance:
        for k in range(3):
            advance(k + 1)
    assert out.getvalue() == ""


def test_without_a_terminal_there_is_no_bar() -> None:
    console, out = terminal(False)
    bars = ProgressBars(console, delay_s=0.0)
    bars.advance("x", 1, 2)
    time.sleep(0.1)
    bars.close()
    assert out.getvalue() == ""


def test_several_tasks_have_a_bar_each_and_names_are_no_markup() -> None:
    console, out = terminal()
    bars = ProgressBars(console, delay_s=0.0)
    bars.advance("one [bold]", 1, 2)
    bars.advance("two", 0.5, 4)
    until(lambda: "two" in out.getvalue() and "one" in out.getvalue())
    bars.close()
    bars.close()
    bars.advance("one [bold]", 2, 2)  # after the end: no effect
    assert "one [bold]" in out.getvalue()


@given(
    st.lists(st.tuples(st.floats(0.01, 5), st.integers(0, 50)), min_size=2, max_size=40),
    st.floats(1, 20),
)
def test_a_windowed_rate_is_that_of_the_counts_since_the_window_began(
    steps: list[tuple[float, int]], seconds: float
) -> None:
    window, now, count = RateWindow(seconds), 0.0, 0
    log = []
    for wait, more in steps:
        now, count = now + wait, count + more
        window.add(now, count)
        log.append((now, count))
    before = [entry for entry in log if entry[0] <= now - seconds]
    start, first = before[-1] if before else log[0]
    if start == now:
        start, first = log[-2]
    assert window.rate(now) == pytest.approx((count - first) / (now - start))


def test_a_stalled_count_has_a_falling_rate_and_a_new_one_none() -> None:
    window = RateWindow(10.0)
    assert window.rate(0.0) == 0.0
    window.add(0.0, 0)
    assert window.rate(5.0) == 0.0
    window.add(1.0, 100)
    assert window.rate(1.0) == 100.0
    assert window.rate(100.0) == 1.0
