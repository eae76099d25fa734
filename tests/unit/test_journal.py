"""The journal in a directory: who may write, what is refused and in which words, and what is left after a disk failed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from overlord.cli import cli
from overlord.errors import JournalError, StateMismatch
from overlord.journal import directory
from overlord.journal.log import Log, read, read_all
from overlord.journal.place import place_of
from overlord.journal.record import Record
from overlord.journal.report import verify
from overlord.journal.segment import Header, name_of
from overlord.sample import SampleId
from tests.journals import JOB, Memory, plain, written


def plan(number: int, nbytes: int = 20) -> Record:
    return Record.of("plan", number, bytes([number % 251]) * nbytes)


def numbers(where: object) -> list[int]:
    return [record.number for record in read_all(where)]  # type: ignore[arg-type]


def test_a_record_holds_bytes_or_any_value_that_may_travel():
    values = [b"", b"\xa5" * 2000, {"a": [1, (2.5, None)]}, SampleId("web", 0, 1, 2, 3), 2**70, "text"]
    place = written([[Record.of("event", k, value)] for k, value in enumerate(values)])
    assert [record.body for record in read_all(place)] == values
    arrays = written([[Record.of("plan", 0, {"ids": np.arange(5), "none": np.zeros((0, 3), np.float32)})]])
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
    with pytest.raises(ValueError, match="wanted"):
        Log.create(Memory(), JOB).append([Record.of(kind, 0, b"")])


def test_a_new_journal_refuses_a_place_that_has_one_and_says_what_is_there(tmp_path):
    with Log.create(tmp_path / "a" / "j", JOB) as log:
        log.append([plan(0), plan(7)])
    with pytest.raises(JournalError, match=r"found 2 records, the last with number 7 of job 'demo'.*resume=\"auto\"") as caught:
        Log.create(tmp_path / "a" / "j", JOB)
    assert caught.value.path == str(tmp_path / "a" / "j")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert numbers(tmp_path / "a" / "j") == [0, 7]


def test_a_journal_is_opened_again_and_again_and_by_any_name_of_its_place(tmp_path):
    for k, name in enumerate([tmp_path / "j", str(tmp_path / "j"), f"file://{tmp_path}/j", f"file://localhost{tmp_path}/j"]):
        log, before = Log.open(name, JOB)
        assert ([record.number for record in before], log.generation) == (list(range(k)), k + 1)
        with log:
            log.append([plan(k)])


def test_a_journal_of_another_job_is_refused_part_by_part(tmp_path):
    Log.create(tmp_path, JOB).close()
    other = Header(job="demo", fingerprint={"draw": "random", "code": "x"})
    with pytest.raises(StateMismatch) as caught:
        Log.open(tmp_path, other)
    assert caught.value.differences == {"draw": ("exact-1", "random"), "web": ("abc", "nothing"), "code": ("nothing", "x")}
    log, _ = Log.open(tmp_path, other, allow=["draw", "web", "code"])
    log.close()
    with pytest.raises(StateMismatch, match="job: saved demo, found other"):
        Log.open(tmp_path, Header(job="other", fingerprint=other.fingerprint))
    Log.open(tmp_path, other)[0].close()  # refusing has left no lock


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("hdfs://host/x", "found hdfs://"), ("ftp://x/y", "wanted a directory, or"), ("s3://k:secretsecret@b/x", "from the environment"),
        ("s3://b/x?token=secretsecret", "from the environment"), ("file://otherhost/x", "a file of this machine"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_is_named_without_secrets(uri, says):
    with pytest.raises(JournalError, match=says) as caught:
        place_of(uri)
    assert "secretsecret" not in str(caught.value)


def test_a_second_writer_is_refused_with_who_holds_it_and_readers_are_not(tmp_path):
    with Log.create(tmp_path, JOB) as log:
        log.append([plan(0)])
        for attempt in (Log.open, Log.create):
            with pytest.raises(JournalError, match=rf"process {os.getpid()} on \S+ writes to it; stop that one first"):
                attempt(tmp_path, JOB)
        assert numbers(tmp_path) == [0]
        log.append([plan(1)])
    log, before = Log.open(tmp_path, JOB)
    assert len(before) == 2
    log.close()
    log.close()
    with pytest.raises(JournalError, match="it was closed"):
        log.append([plan(2)])


def test_segments_roll_at_their_size_and_are_pruned_whole_below_a_number(tmp_path):
    with Log.create(tmp_path, JOB, segment_bytes=2000) as log:
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
    log, before = Log.open(tmp_path, JOB)
    assert [record.number for record in before] == [40]
    log.close()


def test_numbers_that_go_back_keep_what_lies_before_them(tmp_path):
    with Log.create(tmp_path, JOB) as log:
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
        r"000000000003.ovj: byte 0: wanted 000000000002.ovj before it, found no such segment": {
            n: files[n] for n in names if n != names[2]
        },
        r"000000000001.ovj: byte 0: wanted 000000000000.ovj as the first segment": {n: files[n] for n in names[1:]},
        r"wanted segment 2, as its name says, found segment 1": {**files, names[2]: files[names[1]]},
        r"wanted a segment of journal \w+ \(job 'demo'\), found one of": {**files, names[2]: other[names[2]]},
        r"000000000001.ovj: byte \d+: wanted whole records up to byte \d+, as the next segment says": {
            **files,
            names[1]: files[names[1]][:-1],
        },
    }
    for says, held in cases.items():
        place = Memory()
        place.files = held
        with pytest.raises(JournalError, match=says):
            Log.open(place, JOB)
        with pytest.raises(JournalError, match=says):
            read_all(place)


def test_a_name_that_is_no_segments_is_told_and_other_files_do_not_matter(tmp_path):
    with Log.create(tmp_path, JOB) as log:
        (tmp_path / "notes.txt").write_text("mine")
        log.append([plan(0)])
    assert numbers(tmp_path) == [0]
    (tmp_path / "copy of 0.ovj").write_bytes(b"")
    with pytest.raises(JournalError, match=r"found 'copy of 0.ovj'; take it away"):
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
    with pytest.raises(JournalError, match=r"wanted version 1, found version 9; it was written by another version"):
        read_all(place)


def test_a_writer_learns_that_its_files_were_taken_away(tmp_path):
    with Log.create(tmp_path, JOB) as log:
        (tmp_path / name_of(0)).unlink()
        with pytest.raises(JournalError, match=r"found that it was removed; somebody else changes the journal"):
            log.append([plan(0)])


def test_a_writer_learns_that_somebody_else_wrote_to_its_file(tmp_path):
    with Log.create(tmp_path, JOB) as log:
        log.append([plan(0)])
        with (tmp_path / name_of(0)).open("ab") as file:
            file.write(b"x")
        with pytest.raises(JournalError, match=r"wanted a file of \d+ bytes, found one of \d+"):
            log.append([plan(1)])
        log.append([plan(1)])  # in a segment of its own, that leaves the other bytes out
    assert numbers(tmp_path) == [0, 1]


# disks that fail


@pytest.mark.parametrize("call", ["append", "create"])
def test_a_sync_that_fails_gives_the_segment_up_for_good(tmp_path, monkeypatch, call):
    """The kernel may have thrown the bytes away and say nothing the second time."""
    real = directory._sync_data
    with Log.create(tmp_path, JOB) as log:
        log.append([plan(0)])
        if call == "create":
            log.roll()
        size = (tmp_path / name_of(0)).stat().st_size
        monkeypatch.setattr(directory, "_sync_data", _failing(errno.EIO))
        with pytest.raises(JournalError, match=r"make them durable: Input/output error \(EIO\); the disk fails.*not written again"):
            log.append([plan(1)])
        monkeypatch.setattr(directory, "_sync_data", real)
        after = (tmp_path / name_of(0)).stat().st_size
        assert (after > size) == (call == "append")
        log.append([plan(2)])
        assert (tmp_path / name_of(0)).stat().st_size == after
        assert log.segments == 2
    assert numbers(tmp_path) == [0, 2]
    assert [cut.offset for cut in read(tmp_path).cuts] == ([size] if call == "append" else [])


def _failing(number: int):
    def fail(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@contextmanager
def tiny(path: Path, options: str = "size=64k") -> Iterator[Path]:
    """A file system of its own, where this process may mount one."""
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@contextmanager
def file_limit(path: Path, nbytes: int = 40_000) -> Iterator[Path]:
    """No file may grow beyond that; Python ignores the signal, so that the write says so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield path
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _fill(log: Log, done: list[int]) -> None:
    for k in range(100):
        log.append([plan(k, 3000)])
        done.append(k)


@pytest.mark.parametrize(("limit", "says"), [(tiny, r"No space left on device \(ENOSPC\); free some space"), (file_limit, r"\(EFBIG\)")])
def test_on_a_full_disk_all_that_was_acknowledged_is_kept_and_the_log_goes_on_when_there_is_room(tmp_path, limit, says):
    with limit(tmp_path / "disk") as disk:
        disk.mkdir(exist_ok=True)
        (disk / "ballast").write_bytes(bytes(12_000))
        done: list[int] = []
        with Log.create(disk / "j", JOB) as log:
            with pytest.raises(JournalError, match=rf"could not append 3\d\d\d bytes at byte \d+: .*{says}"):
                _fill(log, done)
            assert len(done) > 5
            assert (numbers(disk / "j"), read(disk / "j").faults) == (done, [])
            if limit is tiny:
                with pytest.raises(JournalError, match="ENOSPC"):
                    log.append([plan(100, 5000)])  # not even a new segment
                (disk / "ballast").unlink()
            log.append([plan(101, 3000)])
            assert numbers(disk / "j") == [*done, 101]
        log, before = Log.open(disk / "j", JOB)
        assert [record.number for record in before] == [*done, 101]
        log.close()


def test_a_directory_that_cannot_be_written_is_told_at_once(tmp_path):
    with tiny(tmp_path / "disk") as disk:
        with Log.create(disk / "j", JOB) as log:
            log.append([plan(0)])
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=False, capture_output=True)  # refused while a file is open
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for path in ("new", "j"):
            with pytest.raises(JournalError, match=r"Read-only file system \(EROFS\); let the job write there, or give it another"):
                Log.open(disk / path, JOB)
        assert numbers(disk / "j") == [0]
        assert verify(disk / "j").faults == ()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_told_at_once(tmp_path):
    (tmp_path / "j").mkdir(mode=0o555)
    with pytest.raises(JournalError, match=r"\(EACCES\); let the job write there"):
        Log.create(tmp_path / "j", JOB)


def test_a_file_where_the_directory_should_be_is_told(tmp_path):
    (tmp_path / "j").write_text("")
    with pytest.raises(JournalError, match=r"\(EEXIST\); name a directory"):
        Log.create(tmp_path / "j", JOB)


# the command line


def overlord(*args: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(cli, [str(a) for a in args])


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    with Log.create(tmp_path / "j", JOB, segment_bytes=1000) as log:
        for k in range(6):
            log.append([Record.of("plan", k, {"step": k, "ids": np.arange(40)}), Record.of("event", k, b"twelve bytes")])
    return tmp_path / "j"


def test_show_lists_records_with_what_is_in_them(journal):
    found = overlord("journal", "show", journal)
    assert found.exit_code == 0, found.output
    assert "job 'demo': 12 records in" in found.stdout
    lines = [line.split(maxsplit=6) for line in found.stdout.splitlines() if " plan " in line]
    assert [line[0] for line in lines] == list("012345")
    assert '{"step": 5, "ids": "int64[40]"}' in found.stdout
    assert len(overlord("journal", "show", journal, "--last", "3").stdout.splitlines()) == 6


def test_show_as_json_is_one_document(journal):
    found = json.loads(overlord("journal", "show", journal, "--json", "--last", "2").stdout)
    assert (found["job"], found["records"], found["faults"], found["torn"]) == ("demo", 12, [], 0)
    assert [(r["kind"], r["number"], r["body"]) for r in found["list"]] == [
        ("plan", 5, {"step": 5, "ids": "int64[40]"}), ("event", 5, "12 bytes"),
    ]  # fmt: skip


def test_verify_ends_with_one_and_a_sentence_for_every_fault(journal):
    whole = overlord("journal", "verify", journal)
    assert (whole.exit_code, whole.stdout.splitlines()[-1]) == (0, "every record is whole")
    for k in (0, 1):
        path = journal / name_of(k)
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    found = overlord("journal", "verify", journal)
    assert found.exit_code == 1
    assert "2 faults in the journal" in found.stderr
    said = [line for line in found.stderr.splitlines() if line.startswith("  - ")]
    assert [line.split(",")[0] for line in said] == [f"  - {name_of(0)}", f"  - {name_of(1)}"]
    assert all("wanted" in line and "found" in line and "restore the segment" in line for line in said)
    assert overlord("journal", "show", journal, "--last", "1").exit_code == 1


def test_verify_takes_a_write_that_was_cut_for_no_fault(journal):
    last = max(journal.glob("*.ovj"))
    last.write_bytes(last.read_bytes()[:-3])
    found = overlord("journal", "verify", journal)
    assert found.exit_code == 0, found.output
    assert f"no fault, a write that was cut: {last.name}, byte" in found.stdout
    assert verify(journal).torn > 0


def test_a_record_that_this_version_cannot_decode_is_a_fault_of_verify(tmp_path):
    with Log.create(tmp_path, JOB) as log:
        log.append([plan(0), Record("plan", 1, b"no frame", 1)])
    report = verify(tmp_path)
    assert report.first_fault.startswith("000000000000.ovj, byte")
    assert "is whole, but no value that this version knows" in report.first_fault
    assert plain(read_all(tmp_path)[:1]) == [("plan", 0, bytes(20))]


def test_where_there_is_no_journal_the_command_says_so(tmp_path):
    found = overlord("journal", "verify", tmp_path / "nowhere")
    assert (found.exit_code, "wanted a journal, found no segment" in found.stderr) == (2, True)


def test_what_decides_touches_no_file_and_no_clock():
    """Records, segments and their chain are bytes in and values out."""
    from tests.unit.test_purity import imports_of

    allowed = ("overlord.", "__future__", "collections", "dataclasses", "itertools", "json", "re", "struct", "typing", "zlib")
    for module in ("journal.record", "journal.segment", "journal.chain"):
        assert [name for name in imports_of(module) if not name.startswith(allowed)] == []
        assert "overlord.journal.place" not in " ".join(imports_of(module))
