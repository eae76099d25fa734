"""Laws of the journal: what is whole is read, what is cut is left out, what was changed is told,
whatever happens in between.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overlord.errors import JournalError
from overlord.journal.log import JournalLog, read_all
from overlord.journal.record import FEWEST_ZEROS, SECTOR, Record
from tests.journals import JOB, Memory, plain, reading, written

UNWRITTEN = bytes(
    [0xA5] * FEWEST_ZEROS
)  # as a body it is stored as zeros: the one thing that cannot be told from what was never written

bodies = st.one_of(
    st.binary(max_size=80),
    st.dictionaries(
        st.text(max_size=5), st.integers() | st.floats(allow_nan=False) | st.text(), max_size=3
    ),
)
records = st.builds(
    Record.of,
    st.sampled_from(["plan", "event", "a-b_c9"]),
    st.integers(-(2**63), 2**63 - 1),
    bodies,
).filter(lambda record: UNWRITTEN not in record.data)
appends = st.lists(st.lists(records, min_size=1, max_size=3), max_size=4)
small = settings(max_examples=25)


@given(appends, st.sampled_from([300, 2**24]))
def test_what_is_appended_is_read_back_in_order(given_, segment_bytes):
    place = written(given_, segment_bytes)
    assert plain(read_all(place)) == plain([record for batch in given_ for record in batch])


@small
@given(appends.filter(bool))
def test_cut_at_every_byte_it_holds_exactly_the_records_whose_bytes_are_complete(given_):
    place = written(given_)
    (name,), all_records = place.names(), [record for batch in given_ for record in batch]
    ends = [placed.end for placed in reading(place.files).parts[0].records]
    for cut in range(len(place.files[name])):
        found = reading({name: place.files[name][:cut]})
        whole = sum(end <= cut for end in ends)
        assert found.faults == []
        assert found.records == all_records[:whole]
        clean = cut == 0 or cut in ends or cut == found.parts[0].begin
        assert [(c.segment, c.offset + c.nbytes) for c in found.cuts] == (
            [] if clean else [(name, cut)]
        )


@small
@given(appends.filter(bool), st.lists(records, min_size=1, max_size=2), st.data())
def test_after_a_cut_the_log_goes_on_behind_the_last_whole_record_and_keeps_where_that_was(
    given_, more, data
):
    place = written(given_)
    (name,) = place.names()
    cut = data.draw(st.integers(0, len(place.files[name])))
    place.files[name] = place.files[name][:cut]
    left = reading(place.files)
    log, before = JournalLog.open(place, JOB)
    assert before == left.records
    log.append(more)
    after = reading(place.files)
    assert (after.faults, after.records) == ([], [*left.records, *more])
    assert [c for c in after.cuts if c.nbytes] == left.cuts
    assert len(place.files[name]) == cut  # not touched


@small
@given(appends.filter(bool), st.sampled_from([200, 2**24]), st.integers(0, 7))
@example(
    [[Record.of("plan", 0, bytes(600))], [Record.of("plan", 1, np.zeros(80, np.int64))]], 2**24, 3
)
def test_a_flipped_bit_anywhere_is_told_with_its_place_and_gives_no_wrong_record(
    given_, segment_bytes, bit
):
    place = written(given_, segment_bytes)
    true = [record for batch in given_ for record in batch]
    for name, data in place.files.items():
        for at in range(len(data)):
            flipped = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            found = reading({**place.files, name: flipped})
            assert found.faults, (name, at)
            assert any(fault.segment == name and fault.offset <= at for fault in found.faults)
            assert [record for record in found.records if record not in true] == []
            with pytest.raises(JournalError, match=r"byte \d+: expected .*got .*; .*verify"):
                read_all(_with(place, name, flipped))


def _with(place: Memory, name: str, data: bytes) -> Memory:
    made = place.copy()
    made.files[name] = data
    return made


@small
@given(st.lists(st.binary(min_size=8, max_size=8), min_size=2, max_size=6, unique=True), st.data())
def test_records_cannot_change_places(texts, data):
    place = written([[Record.of("plan", k, text)] for k, text in enumerate(texts)])
    (name,) = place.names()
    found = reading(place.files).parts[0].records
    a, b = sorted(data.draw(st.lists(st.sampled_from(found), min_size=2, max_size=2, unique=True)))
    old = place.files[name]
    new = (
        old[: a.start]
        + old[b.start : b.end]
        + old[a.end : b.start]
        + old[a.start : a.end]
        + old[b.end :]
    )
    assert reading({name: new}).faults[0].offset == a.start


@given(st.lists(st.integers(0, 1500), min_size=1, max_size=3), st.integers(0, 900), st.data())
def test_sectors_of_the_last_append_that_were_never_written_cut_it_and_nothing_before(
    sizes, before, data
):
    """Power is lost during a sync: some of its sectors are on the disk, others are zeros."""
    kept = [Record.of("plan", 0, bytes(before))]
    last = [Record.of("plan", k, np.zeros(size, np.uint8)) for k, size in enumerate(sizes, 1)]
    place = written([kept])
    (name,) = place.names()
    old = len(place.files[name])
    place = written([kept, last])
    (name,) = place.names()
    whole = place.files[name]
    pieces = [
        (max(old, a), min(a + SECTOR, len(whole)))
        for a in range(old // SECTOR * SECTOR, len(whole), SECTOR)
    ]
    lost = data.draw(st.lists(st.sampled_from(pieces), min_size=1, unique=True))
    torn = bytearray(whole)
    for a, b in lost:
        torn[a:b] = bytes(b - a)
    found = reading({name: bytes(torn)})
    if all(b - a < FEWEST_ZEROS for a, b in lost):
        return  # told as damage: so few zeros may be data
    assert found.faults == []
    assert found.records == [*kept, *last][: len(found.records)]
    assert len(found.records) >= 1


@given(st.integers(0, 2**32))
def test_through_any_run_of_crashes_and_failures_all_that_was_acknowledged_is_kept(seed: int):
    """Appends fail after any number of bytes, processes die in mid-append, the next one opens; some
    go on after a failure.
    """
    rng = random.Random(seed)
    place, acknowledged, doubtful, number = Memory(), list[Record](), set[int](), 0
    log, found = JournalLog.open(place, JOB, segment_bytes=rng.choice([400, 2**24]))
    for _ in range(25):
        batch = [
            Record.of("plan", number + k, rng.randbytes(rng.randrange(60)))
            for k in range(rng.randrange(1, 4))
        ]
        number += len(batch)
        action = rng.choice(["append", "append", "fail", "die", "roll", "close"])
        place.stays = rng.random() < 0.5
        place.fault = (
            (lambda data: rng.randrange(len(data) + 1))
            if action in ("fail", "die")
            else (lambda data: None)
        )
        try:
            log.append(batch)
            acknowledged += batch
        except JournalError:
            doubtful |= {record.number for record in batch}
        place.fault = lambda data: None
        if action == "roll":
            log.roll()
        if action in ("die", "close"):
            log, found = JournalLog.open(place, JOB, segment_bytes=log.segment_bytes)
            assert [r for r in found if r.number not in doubtful] == [
                r for r in acknowledged if r.number not in doubtful
            ]
            acknowledged, doubtful = found, set()  # what was read once is acknowledged
    assert [r for r in read_all(place) if r.number not in doubtful] == [
        r for r in acknowledged if r.number not in doubtful
    ]
    numbers = [record.number for record in read_all(place)]
    assert numbers == sorted(set(numbers))


@given(st.integers(0, 2**32), st.booleans())
def test_pruning_keeps_every_record_from_its_number_on_and_survives_its_own_crashes(
    seed: int, whole: bool
):
    rng, place, number, highest = random.Random(seed), Memory(whole), 0, 0
    log = JournalLog.create(place, JOB, segment_bytes=500)
    for _ in range(12):
        for _ in range(rng.randrange(1, 6)):
            log.append([Record.of("plan", number, rng.randbytes(40))])
            number += 1
        before = rng.randrange(number + 1)
        highest = max(highest, before)
        gone: list[str] = []
        place.remove = lambda names, gone=gone: gone.extend(names)  # type: ignore[method-assign]
        log.prune(before)
        for name in gone[: rng.randrange(len(gone) + 1)]:  # the others stay behind, as after a kill
            del place.files[name]
        kept = [record.number for record in read_all(place)]
        assert kept == list(range(kept[0] if kept else highest, number))
        assert not kept or kept[0] <= highest
        if rng.random() < 0.3:
            log, found = JournalLog.open(place, JOB, segment_bytes=500)
            assert [record.number for record in found] == kept
