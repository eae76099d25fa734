"""Stories of the loader core: one list of events, one list of commands."""

from __future__ import annotations

import numpy as np

from overlord.errors import SourceError
from overlord.loader.loader import Loader
from overlord.loader.samples import SourceOrder
from overlord.messages.control import Cursor, Refill
from overlord.messages.data import (
    Announce,
    BlockReady,
    Evaluate,
    Pop,
    Read,
    ReadFailed,
    SampleBlock,
    WindowReady,
    WindowsReady,
)

PLAIN = SourceOrder(name="web", n_chunks=4, seed=0, shuffle=False, shuffle_chunks=1)


def found(n: int) -> SampleBlock:
    ids = np.arange(n)
    none = np.zeros(0, np.int64)
    return SampleBlock(
        ids.astype(np.uint64),
        ids,
        ids,
        ids,
        {"tokens": np.ones(n, np.int64)},
        none.astype(np.uint64),
        none,
        none,
        (),
    )


def evaluated(n: int, rows: int | None = None) -> BlockReady:
    return BlockReady(found(n), n if rows is None else rows, 10 * n)


def brief(commands: list) -> list:
    """Announcements without their arrays: what matters is what they say."""
    return [
        c
        if not isinstance(c, Announce)
        else (c.epoch, c.group, c.window, len(c.found) if c.found else 0, c.closes, c.last)
        for c in commands
    ]


def test_start_up_reads_what_the_first_draw_needs_and_no_more() -> None:
    loader = Loader(0, PLAIN, epochs=1)
    assert loader.handle(Refill(0, must=3, level=0)) == [Read(0, 0, 0, 0, (0,), urgent=True)]
    assert loader.handle(WindowReady(rows=100, over=())) == [Evaluate(0, 3, urgent=True)]
    assert brief(loader.handle(evaluated(3))) == [(0, 0, 0, 3, False, False)]


def test_of_documents_that_are_split_only_as_many_are_evaluated_as_give_the_samples_wanted() -> (
    None
):
    loader = Loader(0, PLAIN, epochs=1, budget_bytes=2_500)
    loader.handle(Refill(0, must=4, level=0))
    assert loader.handle(WindowReady(rows=100, over=())) == [Evaluate(0, 4, urgent=True)]
    loader.handle(evaluated(200, rows=4))  # 50 pieces each
    assert loader.handle(Pop(0, 200)) == []
    assert loader.handle(Refill(0, must=120, level=0)) == [Evaluate(0, 3, urgent=True)]
    loader.handle(evaluated(150, rows=3))
    loader.handle(Pop(0, 150))
    assert loader.handle(Refill(0, must=0, level=999)) == [Evaluate(0, 5)], (
        "the budget of 250 samples"
    )


def test_a_level_is_held_by_whole_blocks_and_refilled_after_a_pop() -> None:
    loader = Loader(0, PLAIN, epochs=1, block_rows=16)
    loader.handle(Refill(0, must=0, level=4))
    assert loader.handle(WindowReady(rows=100, over=())) == [
        Evaluate(0, 8)
    ]  # the first one is small: others wait for their first
    assert brief(loader.handle(evaluated(8))) == [(0, 0, 0, 8, False, False)]
    assert loader.handle(Pop(0, 2)) == []
    assert loader.handle(Pop(1, 4)) == [Evaluate(0, 16)]
    assert brief(loader.handle(evaluated(16))) == [(0, 0, 0, 16, False, False)]
    assert loader.handle(Pop(2, 15)) == [Evaluate(0, 16)]


def test_a_window_ends_a_group_ends_and_the_next_is_read() -> None:
    loader = Loader(0, PLAIN, epochs=1)
    loader.handle(Refill(0, must=3, level=0))
    loader.handle(WindowReady(rows=2, over=(0,)))
    assert brief(loader.handle(evaluated(2))) == [
        (0, 0, 0, 2, True, True),
        Read(0, 0, 1, 0, (1,), urgent=True),
    ]


def test_an_unfinished_chunk_goes_on_in_the_next_window() -> None:
    loader = Loader(0, PLAIN, epochs=1)
    loader.handle(Refill(0, must=3, level=0))
    loader.handle(WindowReady(rows=2, over=()))
    assert brief(loader.handle(evaluated(2))) == [
        (0, 0, 0, 2, True, False),
        Read(0, 0, 0, 1, (0,), urgent=True),
    ]


def test_rows_that_give_no_sample_do_not_stop_the_reading() -> None:
    loader = Loader(0, PLAIN, epochs=1)
    loader.handle(Refill(0, must=1, level=0))
    loader.handle(WindowReady(rows=2, over=(0,)))
    assert brief(loader.handle(evaluated(0, rows=1))) == [
        (0, 0, 0, 0, False, False),
        Evaluate(0, 1, urgent=True),
    ]
    assert brief(loader.handle(evaluated(0, rows=1))) == [
        (0, 0, 0, 0, True, True),
        Read(0, 0, 1, 0, (1,), urgent=True),
    ]


def test_a_loader_without_chunks_of_a_group_says_so_at_once() -> None:
    order = SourceOrder(name="web", n_chunks=2, seed=0, shuffle=False, shuffle_chunks=1)
    loader = Loader(0, order, epochs=1, loader=1, loaders=2)
    assert brief(loader.handle(Refill(0, must=1, level=0))) == [
        (0, 0, 0, 0, True, True),
        Read(0, 0, 1, 0, (1,), urgent=True),
    ]


def test_the_last_epoch_is_the_end() -> None:
    order = SourceOrder(name="web", n_chunks=1, seed=0, shuffle=False, shuffle_chunks=1)
    loader = Loader(0, order, epochs=2)
    loader.handle(Refill(0, must=9, level=0))
    loader.handle(WindowReady(rows=1, over=(0,)))
    assert brief(loader.handle(evaluated(1))) == [
        (0, 0, 0, 1, True, True),
        Read(0, 1, 0, 0, (0,), urgent=True),
    ]
    loader.handle(WindowReady(rows=1, over=(0,)))
    assert brief(loader.handle(evaluated(1))) == [(1, 0, 0, 1, True, True)]
    assert loader.activity == "done"


def test_a_restored_loader_starts_in_the_middle_of_a_window() -> None:
    cursor = Cursor(epoch=1, group=2, window=5, file=0, row=7, part=0)
    loader = Loader(0, PLAIN, epochs=None, cursor=cursor)
    assert loader.handle(Refill(0, must=1, level=0)) == [
        Read(0, 1, 2, 5, (2,), cursor, urgent=True)
    ]


def test_the_budget_bounds_what_is_read_ahead_but_never_the_draw() -> None:
    loader = Loader(0, PLAIN, epochs=1, budget_bytes=50, block_rows=8)
    loader.handle(Refill(0, must=0, level=100))
    loader.handle(WindowReady(rows=100, over=()))
    assert brief(loader.handle(evaluated(8))) == [
        (0, 0, 0, 8, False, False)
    ]  # 80 bytes held: no more by itself
    assert loader.handle(Refill(0, must=20, level=100)) == [Evaluate(0, 12, urgent=True)]


def test_a_block_read_ahead_is_no_larger_than_what_the_budget_has_left() -> None:
    loader = Loader(0, PLAIN, epochs=1, budget_bytes=200, block_rows=8)
    loader.handle(Refill(0, must=0, level=100))
    loader.handle(WindowReady(rows=100, over=()))
    _, more = loader.handle(evaluated(8))
    assert more == Evaluate(0, 12)  # of ten bytes each
    loader.handle(evaluated(12))
    assert loader.handle(Pop(0, 3)) == [Evaluate(0, 3)]


def test_a_failure_is_announced_where_it_stands_in_the_stream() -> None:
    loader = Loader(0, PLAIN, epochs=1)
    loader.handle(Refill(0, must=1, level=0))
    error = SourceError("web", "gone")
    [news] = loader.handle(ReadFailed(error))
    assert isinstance(news, Announce)
    assert news.error is error
    assert loader.handle(Refill(0, must=5, level=5)) == []


def test_a_cursor_is_forgotten_by_a_loader_that_owns_nothing_of_its_group() -> None:
    order = SourceOrder(name="web", n_chunks=2, seed=0, shuffle=False, shuffle_chunks=1)
    loader = Loader(
        0, order, epochs=1, loader=1, loaders=2, cursor=Cursor(window=3, file=0, row=7, part=0)
    )
    assert brief(loader.handle(Refill(0, must=1, level=0))) == [
        (0, 0, 3, 0, True, True),
        Read(0, 0, 1, 0, (1,), urgent=True),
    ]


def test_a_loader_does_not_run_past_the_horizon() -> None:
    order = SourceOrder(name="web", n_chunks=1, seed=0, shuffle=False, shuffle_chunks=1)
    loader = Loader(0, order, epochs=None, loader=1, loaders=2)
    announced = loader.handle(Refill(0, must=1, level=0))
    assert len(announced) == 9  # its own group and eight ahead, all without chunks of its own
    assert len(loader.handle(Refill(0, must=1, level=0, horizon=10))) == 2


def test_windows_that_were_read_at_once_are_announced_one_by_one() -> None:
    loader = Loader(0, PLAIN, epochs=1)
    [read] = loader.handle(Refill(0, must=0, level=9))
    assert isinstance(read, Read)
    assert (read.ahead.samples, [g.group for g in read.ahead.groups]) == (9, [1, 2, 3])
    windows = (
        (WindowReady(rows=4, over=()), evaluated(4)),
        (WindowReady(rows=3, over=(0,)), evaluated(3)),
        (WindowReady(rows=5, over=()), evaluated(5)),
    )
    assert brief(loader.handle(WindowsReady(windows))) == [
        (0, 0, 0, 4, True, False),
        (0, 0, 1, 3, True, True),
        (0, 1, 0, 5, True, False),
    ]
    assert (loader.ready, loader.activity) == (12, "idle")


def test_a_read_for_a_draw_goes_on_no_further_than_the_draw_needs() -> None:
    loader = Loader(0, PLAIN, epochs=1, budget_bytes=100)
    [read] = loader.handle(Refill(0, must=3, level=9))
    assert isinstance(read, Read)
    assert (read.ahead.samples, read.ahead.nbytes) == (3, 100)


def test_a_read_continues_with_no_group_beyond_the_horizon() -> None:
    loader = Loader(0, PLAIN, epochs=None, cursor=Cursor(epoch=0, group=3))
    [read] = loader.handle(Refill(0, must=3, level=9, horizon=0))
    assert isinstance(read, Read)
    assert [(g.epoch, g.group) for g in read.ahead.groups] == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert [g.chunks for g in read.ahead.groups] == [(0,), (1,), (2,), (3,)]
