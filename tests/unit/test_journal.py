"""The journal in a directory: who may write, what is refused and in which words, and what is left
after a disk failed.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest

from overlord.errors import JournalError, JournalTaken, StateMismatch
from overlord.journal.log import JournalLog, read, read_all
from overlord.journal.record import Record
from overlord.journal.segments import Header, name_of
from overlord.journal.storage import storage_of
from overlord.sample import SampleId
from tests.journals import JOB, Memory, numbers, plan, written


def test_a_record_holds_bytes_or_any_value_that_may_travel():
    values = [
        b"",
        b"\xa5" * 2000,
        {"a": [1, (2.5, None)]},
        SampleId("web", 0, 1, 2, 3),
        2**70,
        "text",
    ]
    place = written([[Record.of("event", k, value)] for k, value in enumerate(values)])
    assert [record.body for record in read_all(place)] == values
    arrays = written(
        [[Record.of("plan", 0, {"ids": np.arange(5), "none": np.zeros((0, 3), np.float32)})]]
    )
    (record,) = read_all(arrays)
    assert record.body["ids"].tolist() == [0, 1, 2, 3, 4]
    assert record.body["none"].shape == (0, 3)


def test_what_is_changed_after_a_record_was_made_is_not_what_is_written():
    body = {"ids": np.arange(3)}
    record = Record.of("plan", 0, body)
    body["ids"][0] = 99
    assert read_all(written([[record]]))[0].body["ids"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["", "Plan", "a b", ".own", "a" * 40, "é"])
def test_a_kind_is_a_short_plain_word_and_notes_are_the_logs_own(kind):
    with pytest.raises(ValueError, match="expected"):
        JournalLog.create(Memory(), JOB).append([Record.of(kind, 0, b"")])


def test_a_new_journal_refuses_a_place_that_has_one_and_says_what_is_there(tmp_path):
    with JournalLog.create(tmp_path / "a" / "j", JOB) as log:
        log.append([plan(0), plan(7)])
    with pytest.raises(
        JournalError, match=r"got 2 records, the last with number 7 of job 'demo'.*resume=\"auto\""
    ) as caught:
        JournalLog.create(tmp_path / "a" / "j", JOB)
    assert caught.value.path == str(tmp_path / "a" / "j")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert numbers(tmp_path / "a" / "j") == [0, 7]


def test_a_journal_is_opened_again_and_again_and_by_any_name_of_its_place(tmp_path):
    for k, name in enumerate(
        [
            tmp_path / "j",
            str(tmp_path / "j"),
            f"file://{tmp_path}/j",
            f"file://localhost{tmp_path}/j",
        ]
    ):
        log, before = JournalLog.open(name, JOB)
        assert ([record.number for record in before], log.generation) == (list(range(k)), k + 1)
        with log:
            log.append([plan(k)])


def test_a_directory_with_other_things_in_it_is_reported_once(tmp_path, caplog):
    (tmp_path / "web").mkdir()
    (tmp_path / "a.parquet").write_bytes(b"")
    JournalLog.create(tmp_path, JOB).close()
    assert [r.message for r in caplog.records] == [
        f"journal {tmp_path}: the directory also holds other files (a.parquet, web); give the "
        "journal a directory of its own"
    ]
    JournalLog.open(tmp_path, JOB)[0].close()
    JournalLog.create(tmp_path / "new", JOB).close()
    assert len(caplog.records) == 1


def test_a_journal_of_another_job_is_refused_part_by_part(tmp_path):
    JournalLog.create(tmp_path, JOB).close()
    other = Header(job="demo", fingerprint={"draw": "random", "code": "x"})
    with pytest.raises(StateMismatch) as caught:
        JournalLog.open(tmp_path, other)
    assert caught.value.differences == {
        "draw": ("exact-1", "random"),
        "web": ("abc", "nothing"),
        "code": ("nothing", "x"),
    }
    log, _ = JournalLog.open(tmp_path, other, allow=["draw", "web", "code"])
    log.close()
    with pytest.raises(StateMismatch, match="job: saved demo, got other"):
        JournalLog.open(tmp_path, Header(job="other", fingerprint=other.fingerprint))
    JournalLog.open(tmp_path, other)[0].close()  # refusing has left no lock


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("hdfs://host/x", "got hdfs://"),
        ("ftp://x/y", "expected a directory, or"),
        ("s3://k:secretsecret@b/x", "from the environment"),
        ("s3://b/x?token=secretsecret", "from the environment"),
        ("file://otherhost/x", "a file of this machine"),
    ],
)
def test_a_place_that_cannot_be_is_named_without_secrets(uri, says):
    with pytest.raises(JournalError, match=says) as caught:
        storage_of(uri)
    assert "secretsecret" not in str(caught.value)


def test_a_second_writer_is_refused_with_who_holds_it_and_readers_are_not(tmp_path):
    with JournalLog.create(tmp_path, JOB) as log:
        log.append([plan(0)])
        for attempt in (JournalLog.open, JournalLog.create):
            with pytest.raises(
                JournalError,
                match=rf"process {os.getpid()} on \S+ writes to it; stop that process first",
            ):
                attempt(tmp_path, JOB)
        assert numbers(tmp_path) == [0]
        log.append([plan(1)])
    log, before = JournalLog.open(tmp_path, JOB)
    assert len(before) == 2
    log.close()
    log.close()
    with pytest.raises(JournalError, match="expected an open journal, got a closed one"):
        log.append([plan(2)])


def test_segments_roll_at_their_size_and_are_pruned_whole_below_a_number(tmp_path):
    with JournalLog.create(tmp_path, JOB, segment_bytes=2000) as log:
        for k in range(40):
            log.append([plan(k, 200)])
        made = log.segments
        assert made == len(list(tmp_path.glob("*.ovj"))) > 3
        assert log.prune(0) == 0
        assert log.prune(25) > 1
        assert log.segments == len(list(tmp_path.glob("*.ovj"))) < made
        assert log.prune(25) == 0
        assert numbers(tmp_path) == list(range(numbers(tmp_path)[0], 40))
        assert 15 < numbers(tmp_path)[0] <= 25
        log.roll()
        assert log.prune(10**9) > 0
        assert numbers(tmp_path) == []
        log.append([plan(40)])
    log, before = JournalLog.open(tmp_path, JOB)
    assert [record.number for record in before] == [40]
    log.close()


def test_numbers_that_go_back_keep_what_lies_before_them(tmp_path):
    with JournalLog.create(tmp_path, JOB) as log:
        for run in ([5, 6, 7], [2, 3], [4]):
            log.append([plan(k) for k in run])
            log.roll()
        assert log.prune(5) == 0  # the first segment reaches up to 7
        assert log.prune(8) == 3


def test_a_segment_that_is_missing_renamed_or_of_another_journal_is_named(tmp_path):
    files = written([[plan(k, 300)] for k in range(4)], segment_bytes=300).files
    names = sorted(files)
    other = written([[plan(9, 300)] for k in range(4)], segment_bytes=300).files
    cases = {
        r"000000000003.ovj: byte 0: expected 000000000002.ovj before it, got no such segment": {
            n: files[n] for n in names if n != names[2]
        },
        r"000000000001.ovj: byte 0: expected 000000000000.ovj as the first segment": {
            n: files[n] for n in names[1:]
        },
        r"expected segment 2, as it is named, got segment 1": {**files, names[2]: files[names[1]]},
        r"expected a segment of journal \w+ \(job 'demo'\), got one of": {
            **files,
            names[2]: other[names[2]],
        },
        r"000000000001.ovj: byte \d+: expected whole records up to byte \d+, as the next": {
            **files,
            names[1]: files[names[1]][:-1],
        },
    }
    for says, held in cases.items():
        place = Memory()
        place.files = held
        with pytest.raises(JournalError, match=says):
            JournalLog.open(place, JOB)
        with pytest.raises(JournalError, match=says):
            read_all(place)


def test_a_name_that_is_no_segments_is_told_and_other_files_do_not_matter(tmp_path):
    with JournalLog.create(tmp_path, JOB) as log:
        (tmp_path / "notes.txt").write_text("mine")
        log.append([plan(0)])
    assert numbers(tmp_path) == [0]
    (tmp_path / "copy of 0.ovj").write_bytes(b"")
    with pytest.raises(JournalError, match=r"got 'copy of 0.ovj'; remove it from the journal"):
        read_all(tmp_path)


def test_a_newer_format_is_told_from_damage():
    place = written([[plan(0)]])
    (name,) = place.names()
    data = bytearray(place.files[name])
    data[4] = 9
    import struct
    import zlib

    data[12:16] = struct.pack("<I", zlib.crc32(bytes(data[:12])))
    place.files[name] = bytes(data)
    with pytest.raises(
        JournalError, match=r"expected version 2, got version 9; it was written by another version"
    ):
        read_all(place)


def test_a_writer_learns_that_its_files_were_taken_away(tmp_path):
    with JournalLog.create(tmp_path, JOB) as log:
        (tmp_path / name_of(0)).unlink()
        with pytest.raises(
            JournalError, match=r"got a file that was removed; another process changes the journal"
        ):
            log.append([plan(0)])


def test_a_writer_learns_that_somebody_else_wrote_to_its_file(tmp_path):
    with JournalLog.create(tmp_path, JOB) as log:
        log.append([plan(0)])
        with (tmp_path / name_of(0)).open("ab") as file:
            file.write(b"x")
        with pytest.raises(JournalError, match=r"expected a file of \d+ bytes, got one of \d+"):
            log.append([plan(1)])
        log.append([plan(1)])  # in a segment of its own, that leaves the other bytes out
    assert numbers(tmp_path) == [0, 1]


def test_what_decides_touches_no_file_and_no_clock():
    """Records, segments and their chain are bytes in and values out."""
    from tests.unit.test_purity import imports_of

    allowed = (
        "overlord.",
        "__future__",
        "collections",
        "dataclasses",
        "itertools",
        "json",
        "re",
        "struct",
        "typing",
        "zlib",
    )
    for module in ("journal.record", "journal.segments"):
        assert [name for name in imports_of(module) if not name.startswith(allowed)] == []
        assert "overlord.journal.storage" not in " ".join(imports_of(module))


def test_what_a_header_says_is_fit_for_a_terminal():
    with pytest.raises(ValueError, match="expected printable texts"):
        Header(job="\x1b[31mred")


def test_a_record_from_the_same_place_of_another_journal_is_none():
    one, two = (written([[plan(0)], [plan(k)]]) for k in (1, 2))
    ((name, data),) = one.files.items()
    first, last = read(one).parts[0].records
    other = two.files[name]
    assert len(other) == len(data)
    for start, end in ((first.start, first.end), (last.start, last.end), (first.start, last.end)):
        place = Memory()
        place.files = {name: data[:start] + other[start:end] + data[end:]}
        with pytest.raises(
            JournalError, match=rf"byte {start}: expected a record's head with checksum"
        ):
            read_all(place)


def of(launch: str) -> Header:
    return Header(job=JOB.job, fingerprint=JOB.fingerprint, launch=launch)


@pytest.mark.parametrize("whole", [True, False], ids=["store", "directory"])
def test_a_launch_goes_on_only_where_the_last_writer_was_its_own_and_else_shuts_out_nobody(whole):
    place = Memory(whole)
    JournalLog.create(place, of("a")).append([plan(0)])
    mine, before = JournalLog.open(place, of("a"), goes_on=True)
    assert len(before) == 1
    mine.append([plan(1)])
    other, _ = JournalLog.open(place, of("b"))
    files = dict(place.files)
    with pytest.raises(
        JournalTaken,
        match=r'process \d+ on \S+ with generation 3 has taken over: .*stop this .*resume="auto"',
    ):
        JournalLog.open(place, of("a"), goes_on=True)
    assert place.files == files, "it has looked, and written nothing"
    other.append([plan(2)])
    assert numbers(place) == [0, 1, 2]
    JournalLog.open(place, of("a"))[0].append([plan(3)])  # who is launched anew may go on from any
    assert numbers(place) == [0, 1, 2, 3]


def test_one_who_takes_over_between_the_look_and_the_claim_is_found_by_the_next_look():
    class Slow(Memory):
        def create(self, name: str, data: bytes) -> None:
            while meanwhile:
                meanwhile.pop()()
            super().create(name, data)

    place, others, meanwhile = Slow(whole=True), list[JournalLog](), list[Callable[[], None]]()
    JournalLog.create(place, of("a")).append([plan(0)])
    meanwhile.append(lambda: others.append(JournalLog.open(place, of("b"))[0]))
    with pytest.raises(JournalTaken, match="with generation 2 has taken over"):
        JournalLog.open(place, of("a"), goes_on=True)
    others[0].append([plan(1)])
    assert numbers(place) == [0, 1]


def test_a_launch_continues_an_empty_journal_and_not_one_that_names_no_launch(monkeypatch):
    place = Memory()
    JournalLog.open(place, of("a"), goes_on=True)[0].append([plan(0)])
    JournalLog.open(place, of("a"), goes_on=True)[0].close()
    with monkeypatch.context() as patch:  # as it was written before headers had it
        patch.setattr(
            "overlord.journal.segments.asdict",
            lambda header: {k: v for k, v in asdict(header).items() if k != "launch"},
        )
        JournalLog.open(place, JOB)[0].append([plan(1)])
    assert numbers(place) == [0, 1]
    with pytest.raises(JournalTaken, match="has taken over"):
        JournalLog.open(place, of("a"), goes_on=True)
