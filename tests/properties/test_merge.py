"""Laws of the merge: however many loaders announce, and in whatever order, the stream is one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SourceError
from overlord.messages.control import Cursor
from overlord.messages.data import Announce, LongDocuments, SampleBlock
from overlord.planning.stream import SourceStream

Row = tuple[
    int, int, bool, int
]  # (key, row, good, tokens lost); neither good nor without loss: dropped by on_long


def make_found(rows: list[Row]) -> SampleBlock:
    good, bad, long = (
        [r for r in rows if r[2]],
        [r for r in rows if not r[2] and not r[3]],
        [r for r in rows if r[3]],
    )
    n = len(good)
    key, row, lost = (np.array([r[k] for r in long], np.int64) for k in (0, 1, 3))
    return SampleBlock(
        np.array([r[0] for r in good], np.uint64),
        np.zeros(n, np.int64),
        np.array([r[1] for r in good], np.int64),
        np.zeros(n, np.int32),
        {"tokens": np.ones(n, np.int64)},
        np.array([r[0] for r in bad], np.uint64),
        np.zeros(len(bad), np.int64),
        np.array([r[1] for r in bad], np.int64),
        tuple(f"bad {r[1]}" for r in bad),
        0,
        LongDocuments(key.astype(np.uint64), np.zeros(len(long), np.int64), row, lost)
        if long
        else None,
    )


def announcements(
    windows: list[list[Row]], loader: int, loaders: int, last: int, rng: random.Random
) -> Iterator[Announce]:
    """One loader's words on one group: its share of each window, in pieces, up to its own last
    window.
    """
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
        lost = st.sampled_from((0, 0, 0, 1, 30))
        rows = [
            (key, row + i, draw(st.integers(0, 9)) > 1, draw(lost)) for i, key in enumerate(keys)
        ]
        row += len(keys)
        windows.append(sorted(rows))
    return windows, loaders, draw(st.integers(0, 2**32))


@given(groups())
def test_the_merged_stream_is_the_windows_in_order_whoever_announces_first(
    case: tuple[list[list[Row]], int, int],
) -> None:
    windows, loaders, seed = case
    rng = random.Random(seed)
    lasts = [
        max(
            [w for w in range(len(windows)) if any(r[1] % loaders == k for r in windows[w])],
            default=0,
        )
        for k in range(loaders)
    ]
    lasts[rng.randrange(loaders)] = len(windows) - 1
    stream = SourceStream(
        "s", loaders=loaders, n_groups=1, epochs=1, max_bad=10**6, cursor=Cursor()
    )
    talks = [list(announcements(windows, k, loaders, lasts[k], rng)) for k in range(loaders)]
    all_rows = [r for window in windows for r in window]
    got: list[int] = []
    bad: list[int] = []

    def take(n: int) -> None:
        pieces, passed = stream.take(n)
        got.extend(int(r) for piece in pieces for r in piece.found.row[piece.start : piece.stop])
        bad.extend(row for _, _, row, _ in passed)
        assert stream.passed == (0, *lost_up_to(got[-1] if got else -1))

    def lost_up_to(last: int) -> tuple[int, int]:
        """Documents that lost tokens, up to the last sample taken: one that was cut is a sample
        itself.
        """
        order = [r[1] for r in all_rows]
        passed = all_rows[: order.index(last) + 1] if last >= 0 else []
        return sum(r[3] > 0 for r in passed), sum(r[3] for r in passed)

    while any(talks):
        k = rng.choice([k for k in range(loaders) if talks[k]])
        stream.add(talks[k].pop(0), k)
        stream.check()
        take(rng.randint(0, stream.ready))
    wanted = all_rows
    if any(r[2] for r in wanted):
        assert stream.ended
        assert stream.error is None
    else:
        assert isinstance(stream.error, SourceError)
    take(stream.ready)
    bad += [row for _, _, row, _ in stream.last_failures()]
    assert got == [r[1] for r in wanted if r[2]]
    assert bad == [r[1] for r in wanted if not r[2] and not r[3]]
    assert stream.passed == (0, sum(r[3] > 0 for r in wanted), sum(r[3] for r in wanted)), (
        "to the end, those behind the last sample too"
    )


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_failures_in_a_row_are_counted_across_announcements(pieces: int) -> None:
    rows: list[Row] = [(0, 0, True, 0), *((k, k, False, 0) for k in range(1, 6)), (6, 6, True, 0)]
    stream = SourceStream("s", loaders=1, n_groups=1, epochs=1, max_bad=5, cursor=Cursor())
    for part in np.array_split(np.arange(len(rows)), pieces):
        stream.add(Announce(0, 0, 0, 0, make_found([rows[i] for i in part])), 0)
    assert stream.ready == 1  # the sample before them can still be drawn
    assert isinstance(stream.error, SourceError)
    assert "5 consecutive rows" in str(stream.error)


def test_a_good_row_between_failures_starts_the_count_again() -> None:
    rows = [(k, k, k % 3 == 2, 0) for k in range(30)]
    stream = SourceStream("s", loaders=1, n_groups=1, epochs=1, max_bad=3, cursor=Cursor())
    for row in rows:
        stream.add(Announce(0, 0, 0, 0, make_found([row])), 0)
    assert stream.error is None
    assert stream.ready == 10
