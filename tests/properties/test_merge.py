"""Laws of the merge: however many loaders announce, and in whatever order, the stream is one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SourceError
from overlord.messages import Announce, Cursor, Found
from overlord.planner.stream import SourceStream

Row = tuple[int, int, bool]  # (key, row, good)


def make_found(rows: list[Row]) -> Found:
    good, bad = [r for r in rows if r[2]], [r for r in rows if not r[2]]
    n = len(good)
    return Found(
        np.array([r[0] for r in good], np.uint64), np.zeros(n, np.int64), np.array([r[1] for r in good], np.int64), np.zeros(n, np.int32),
        {"tokens": np.ones(n, np.int64)}, np.array([r[0] for r in bad], np.uint64), np.zeros(len(bad), np.int64),
        np.array([r[1] for r in bad], np.int64), tuple(f"bad {r[1]}" for r in bad),
    )  # fmt: skip


def announcements(windows: list[list[Row]], loader: int, loaders: int, last: int, rng: random.Random) -> Iterator[Announce]:
    """One loader's words on one group: its share of each window, in pieces, up to its own last window."""
    for w in range(last + 1):
        mine = [r for r in windows[w] if r[1] % loaders == loader]
        cuts = sorted(rng.randint(0, len(mine)) for _ in range(rng.randint(0, 3)))
        pieces = [mine[a:b] for a, b in zip([0, *cuts], [*cuts, len(mine)], strict=True)]
        for i, piece in enumerate(pieces):
            closes = i == len(pieces) - 1
            yield Announce(loader, 0, 0, w, make_found(piece), closes, closes and w == last)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[list[Row]], int, int]:
    loaders = draw(st.integers(1, 4))
    n_windows = draw(st.integers(1, 4))
    windows, row = [], 0
    for _ in range(n_windows):
        keys = draw(st.lists(st.integers(0, 50), max_size=12))
        rows = [(key, row + i, draw(st.integers(0, 9)) > 0) for i, key in enumerate(keys)]
        row += len(keys)
        windows.append(sorted(rows))
    return windows, loaders, draw(st.integers(0, 2**32))


@given(groups())
def test_the_merged_stream_is_the_windows_in_order_whoever_announces_first(case: tuple[list[list[Row]], int, int]) -> None:
    windows, loaders, seed = case
    rng = random.Random(seed)
    lasts = [max([w for w in range(len(windows)) if any(r[1] % loaders == k for r in windows[w])], default=0) for k in range(loaders)]
    lasts[rng.randrange(loaders)] = len(windows) - 1
    stream = SourceStream("s", loaders=loaders, n_groups=1, epochs=1, max_bad=10**6, cursor=Cursor())
    talks = [list(announcements(windows, k, loaders, lasts[k], rng)) for k in range(loaders)]
    got: list[int] = []
    bad: list[int] = []

    def take(n: int) -> None:
        pieces, passed = stream.take(n)
        got.extend(int(r) for piece in pieces for r in piece.found.row[piece.start : piece.stop])
        bad.extend(row for _, _, row, _ in passed)

    while any(talks):
        k = rng.choice([k for k in range(loaders) if talks[k]])
        stream.add(talks[k].pop(0), k)
        stream.check()
        take(rng.randint(0, stream.ready))
    wanted = [r for window in windows for r in window]
    if any(r[2] for r in wanted):
        assert stream.ended
        assert stream.error is None
    else:
        assert isinstance(stream.error, SourceError)
    take(stream.ready)
    bad += [row for _, _, row, _ in stream.rest()]
    assert got == [r[1] for r in wanted if r[2]]
    assert bad == [r[1] for r in wanted if not r[2]]


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_failures_in_a_row_are_counted_across_announcements(pieces: int) -> None:
    rows = [(0, 0, True)] + [(k, k, False) for k in range(1, 6)] + [(6, 6, True)]
    stream = SourceStream("s", loaders=1, n_groups=1, epochs=1, max_bad=5, cursor=Cursor())
    for part in np.array_split(np.arange(len(rows)), pieces):
        stream.add(Announce(0, 0, 0, 0, make_found([rows[i] for i in part])), 0)
    assert stream.ready == 1  # the sample before them can still be drawn
    assert isinstance(stream.error, SourceError)
    assert "5 rows in a row" in str(stream.error)


def test_a_good_row_between_failures_starts_the_count_again() -> None:
    rows = [(k, k, k % 3 == 2) for k in range(30)]
    stream = SourceStream("s", loaders=1, n_groups=1, epochs=1, max_bad=3, cursor=Cursor())
    for row in rows:
        stream.add(Announce(0, 0, 0, 0, make_found([row])), 0)
    assert stream.error is None
    assert stream.ready == 10
