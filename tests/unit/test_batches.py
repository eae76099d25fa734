"""Many small messages that travel as one arrive as they were sent, in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from overlord.errors import FrameError
from overlord.messages.batches import Announcements, Refills, join_announcements, join_refills
from overlord.messages.control import EndOfJob, Refill
from overlord.messages.data import Announce, LongDocuments, SampleBlock
from overlord.sample import Ragged
from overlord.transport.codec import decode, encode


def block(first: int, n: int, **fields: Any) -> SampleBlock:
    numbers = np.arange(first, first + n)
    found = SampleBlock(
        numbers.astype(np.uint64),
        numbers,
        numbers + 1,
        np.zeros(n, np.int32),
        {"tokens": numbers * 2, "bytes": numbers * 3},
        np.zeros(0, np.uint64),
        np.zeros(0, np.int64),
        np.zeros(0, np.int64),
        (),
        first,
    )
    return replace(found, **fields)


def columns(found: SampleBlock | None) -> Any:
    if found is None:
        return None
    arrays = [found.key, found.file, found.row, found.part, *found.meta.values()]
    bad = [found.bad_key, found.bad_file, found.bad_row]
    named = [(a.dtype, a.tolist()) for a in [*arrays, *bad] if isinstance(a, np.ndarray)]
    return named, [*found.meta], found.bad_reason, found.dropped, found.long is None


def plain(message: Any) -> Any:
    if not isinstance(message, Announce):
        return message
    m = message
    of_window = (m.loader, m.epoch, m.group, m.window, m.closes, m.last, m.generation)
    return *of_window, columns(m.found), repr(m.error)


def sent(events: list[Any]) -> list[Any]:
    return [decode(*encode(message)) for message in join_announcements(events)]


def received(messages: list[Any]) -> list[Any]:
    split = [m.split() if isinstance(m, Announcements) else [m] for m in messages]
    return [message for one in split for message in one]


def test_announcements_that_follow_each_other_are_one_message() -> None:
    events = [Announce(k, 1, 2, 3 + k, block(10 * k, k), k == 2, k == 3, None, 7) for k in range(5)]
    messages = sent(events)
    assert len(messages) == 1
    assert [plain(a) for a in received(messages)] == [plain(a) for a in events]


def test_what_has_more_than_columns_is_sent_alone_and_in_its_place() -> None:
    bad = {"bad_key": np.array([4], np.uint64), "bad_file": np.array([0])}
    bad |= {"bad_row": np.array([9]), "bad_reason": ("not an id",)}
    one = np.array([1])
    long = LongDocuments(one.astype(np.uint64), one, one, one)
    ragged = {"tokens": np.array([1]), "images": Ragged(np.array([5, 6]), np.array([0, 2]))}
    narrow = {"tokens": np.array([1], np.int32), "bytes": np.array([1])}
    alone = [
        Announce(1, 0, 0, 0, None, error=ValueError("no such file")),
        Announce(1, 0, 0, 0, None, closes=True),
        Announce(1, 0, 0, 0, block(0, 1, **bad)),
        Announce(1, 0, 0, 0, block(0, 1, long=long)),
        Announce(1, 0, 0, 0, block(0, 1, meta=ragged)),
        Announce(1, 0, 0, 0, block(0, 1, meta=narrow)),
        EndOfJob(4),
    ]
    pair = [Announce(2, 0, 0, 0, block(0, 2)), Announce(3, 0, 0, 0, block(0, 3))]
    events = [event for one in alone for event in (*pair, one)]
    messages = sent(events)
    assert [isinstance(m, Announcements) for m in messages] == [True, False] * len(alone)
    assert [plain(a) for a in received(messages)] == [plain(a) for a in events]


def test_requests_that_follow_each_other_are_one_message() -> None:
    refills = [Refill(k, 2 * k, 3 * k, k - 1) for k in range(4)]
    messages = [decode(*encode(m)) for m in join_refills([*refills, EndOfJob(1), refills[0]])]
    assert [type(m) for m in messages] == [Refills, EndOfJob, Refill]
    assert messages[0].split() == refills


@pytest.mark.parametrize("samples", [-1, 3])
def test_a_batch_whose_columns_have_another_length_is_refused(samples: int) -> None:
    whole = Announcements.of([Announce(1, 0, 0, 0, block(0, 2)) for _ in range(2)])
    table = whole.table.copy()
    table[0, 4] = samples
    with pytest.raises(ValueError, match="expected columns of"):
        replace(whole, table=table)
    header, arrays = encode(whole)
    wrong = [table if np.array_equal(array, whole.table) else array for array in arrays]
    with pytest.raises(FrameError, match="expected a valid Announcements"):
        decode(header, wrong)
