"""The journal in a real S3 server on loopback: durable, fenced, and unmoved by requests that fail
or whose answers are lost.
"""

from __future__ import annotations

import pickle

import pytest

import overlord as ov
from overlord.errors import JournalError
from overlord.journal.log import JournalLog, read, read_all
from overlord.journal.record import Record
from overlord.journal.verify import verify
from overlord.journal.write_ahead import AppendThread
from overlord.setup import profile_store
from tests.journals import JOB
from tests.stores import BUCKET, Fault, Proxy
from tests.worlds import Rows

pytest.importorskip("obstore")
pytestmark = pytest.mark.timeout(200)
_count = iter(range(1000))


@pytest.fixture
def uri(proxy: Proxy) -> str:
    return f"s3://{BUCKET}/journals/{next(_count)}"


def plan(number: int) -> Record:
    return Record.of("plan", number, {"step": number})


def numbers(uri: str) -> list[int]:
    return [record.number for record in read_all(uri)]


def puts(proxy: Proxy) -> list[str]:
    return [seen.status for seen in proxy.seen if seen.method == "PUT"]


def test_it_is_written_read_refused_and_opened_like_one_in_a_directory(uri):
    with JournalLog.create(uri, JOB) as log:
        log.append([plan(0), plan(1)])
        log.append([plan(2)])
    with pytest.raises(
        JournalError, match=r'got 3 records, the last with number 2 of job .demo.*resume="auto"'
    ):
        JournalLog.create(uri, JOB)
    log, before = JournalLog.open(uri, JOB)
    assert ([record.body["step"] for record in before], log.generation) == ([0, 1, 2], 2)
    log.append([plan(3)])
    assert numbers(uri) == [0, 1, 2, 3]
    assert verify(uri).segments == 5  # each opening, and each append


def test_pruning_removes_objects_and_reading_goes_on(uri, server):
    log = JournalLog.create(uri, JOB)
    for k in range(10):
        log.append([plan(k)])
    assert log.prune(6) == 7
    log.append([plan(10)])
    assert numbers(uri) == [6, 7, 8, 9, 10]
    objects = [m["path"] for page in server.bucket().list(uri.split(f"{BUCKET}/")[1]) for m in page]
    assert len(objects) == 7  # with the first: it says who opened the journal
    with pytest.raises(JournalError, match="expected an empty journal"):
        JournalLog.create(uri, JOB)


def test_a_writer_that_wakes_after_its_successor_has_pruned_everything_is_shut_out_all_the_same(
    uri,
):
    """Its next number must still be taken, or it would go on beside the other."""
    old = JournalLog.create(uri, JOB)
    old.append([plan(0)])
    new, _ = JournalLog.open(uri, JOB)
    for k in range(1, 5):
        new.append([plan(k)])
    newest, _ = JournalLog.open(uri, JOB)
    assert newest.prune(100) > 0
    newest.append([plan(5)])
    again, before = JournalLog.open(uri, JOB)
    assert ([record.number for record in before], again.generation) == ([5], 4)
    assert again.prune(100) > 0
    for late in (old, new, newest):
        with pytest.raises(JournalError, match="has taken over"):
            late.append([plan(9)])
    assert (numbers(uri), verify(uri).faults) == ([], ())


def test_a_second_writer_takes_over_and_the_first_is_shut_out_for_good(uri):
    old = JournalLog.create(uri, JOB)
    old.append([plan(0)])
    new, before = JournalLog.open(uri, JOB)
    assert len(before) == 1
    with pytest.raises(
        JournalError,
        match=r"process \d+ on \S+ with generation 2 has taken over; .* generation 1; stop this",
    ):
        old.append([plan(1)])
    new.append([plan(1)])
    for attempt in (lambda: old.append([plan(2)]), lambda: old.prune(10**6)):
        with pytest.raises(JournalError, match="has taken over"):
            attempt()
    assert numbers(uri) == [0, 1]
    newest, before = JournalLog.open(uri, JOB)
    assert (len(before), newest.generation) == (2, 3)


def test_of_two_that_take_over_at_once_both_have_all_that_was_acknowledged_and_one_goes_on(uri):
    old = JournalLog.create(uri, JOB)
    logs = [old]
    for k in range(5):
        logs[-1].append([plan(k)])
        one, before = JournalLog.open(uri, JOB)
        two, again = JournalLog.open(uri, JOB)
        assert len(before) == len(again) == k + 1
        with pytest.raises(JournalError, match="has taken over"):
            one.append([plan(99)])
        logs.append(two)
    assert numbers(uri) == list(range(5))


def test_failures_that_pass_are_tried_again(uri, proxy):
    log = JournalLog.create(uri, JOB)
    proxy.reset()
    proxy.faults = [
        Fault(503, times=2, method="PUT"),
        Fault(500, method="PUT", code="InternalError"),
        Fault("reset", method="PUT"),
    ]
    log.append([plan(0)])
    assert puts(proxy) == ["503", "503", "500", "reset", "200"]
    proxy.faults = [Fault(503, times=2), Fault("reset")]
    assert numbers(uri) == [0]


def test_a_put_whose_answer_was_lost_counts_once(uri, proxy):
    log = JournalLog.create(uri, JOB)
    proxy.reset()
    proxy.faults = [Fault("unanswered", method="PUT"), Fault(503, method="PUT")]
    log.append([plan(0)])
    assert puts(proxy) == ["unanswered", "503", "412"]
    log.append([plan(1)])
    assert numbers(uri) == [0, 1]
    assert read(uri).cuts == []


def test_an_append_that_was_given_up_and_yet_arrived_is_left_out_when_others_follow(uri, proxy):
    log = JournalLog.create(uri, JOB)
    proxy.faults = [
        Fault("unanswered", method="PUT"),
        Fault(403, method="PUT", code="AccessDenied"),
    ]
    with pytest.raises(JournalError, match=r"could not be written after 2 attempts .*403"):
        log.append([plan(7)])
    proxy.faults = []
    log.append([plan(0)])
    log.append([plan(1)])
    assert numbers(uri) == [0, 1]
    assert [cut.segment for cut in read(uri).cuts] == ["000000000001.ovj"]
    assert verify(uri).faults == ()


def test_the_same_append_tried_again_by_the_caller_counts_once(uri, proxy):
    log = JournalLog.create(uri, JOB)
    proxy.faults = [
        Fault("unanswered", method="PUT"),
        Fault(403, method="PUT", code="AccessDenied"),
    ]
    with pytest.raises(JournalError, match=r"could not be written after 2 attempts .*403"):
        log.append([plan(0)])
    proxy.faults = []
    log.append([plan(0)])
    assert numbers(uri) == [0]
    assert read(uri).cuts == []


def test_a_store_that_writes_over_objects_is_refused_when_the_journal_is_opened(uri, proxy):
    proxy.faults = [Fault("overwrites", times=99, method="PUT")]
    with pytest.raises(
        JournalError,
        match=r"expected the store to refuse a second object.*If-None-Match.*use another store",
    ):
        JournalLog.create(uri, JOB)


def test_damage_in_an_object_is_named(uri, server):
    log = JournalLog.create(uri, JOB)
    log.append([plan(0)])
    log.append([plan(1)])
    key = uri.split(f"{BUCKET}/")[1] + "/000000000001.ovj"
    data = bytearray(server.bucket().get(key).bytes())
    data[-1] ^= 4
    server.bucket().put(key, bytes(data))
    with pytest.raises(
        JournalError,
        match=r"journals/\d+/000000000001.ovj: byte \d+: expected .* checksum \w+ .*got",
    ):
        JournalLog.open(uri, JOB)


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [(403, "AccessDenied", "check the keys"), (501, "NotImplemented", "refuses the request")],
)
def test_what_does_not_pass_is_told_at_once_and_no_key_with_it(uri, proxy, status, code, says):
    log = JournalLog.create(uri, JOB)
    proxy.reset()
    proxy.faults = [Fault(status, times=99, method="PUT", code=code, tells=True)]
    with pytest.raises(JournalError, match=says) as caught:
        log.append([plan(0)])
    assert len(proxy.seen) == 1
    keys = proxy.server.keys
    said = (
        str(caught.value)
        + repr(caught.value)
        + repr(caught.value.__context__)
        + str(pickle.dumps(caught.value))
    )
    assert keys.secret not in said
    assert keys.access not in said


@pytest.mark.parametrize("kind", [403, "kept"])
def test_a_bucket_that_lets_nothing_be_removed_is_reported_and_written_to_all_the_same(
    uri, proxy, caplog, kind
):
    """Keys without DeleteObject: the journal grows, and what was pruned is not read."""
    log = JournalLog.create(uri, JOB)
    writer = AppendThread(log)
    for k in range(4):
        writer.put([plan(k)])
    proxy.faults = [Fault(kind, times=99, method="POST", code="AccessDenied")]
    writer.wait(writer.put([plan(4)], before=2))
    writer.wait(writer.put([plan(5)], before=3))
    assert "3 pruned segments stay: could not be removed" in writer.unpruned
    assert "AccessDenied" in writer.unpruned
    assert len([r for r in caplog.records if "could not be removed" in r.getMessage()]) == 1
    assert numbers(uri) == [3, 4, 5]
    proxy.faults = []
    again, _ = JournalLog.open(uri, JOB)
    assert again.doomed == 3  # the first object stays in any case: it says who opened the journal
    again.prune(3)
    assert (again.doomed, numbers(uri), verify(uri).faults) == (0, [3, 4, 5], ())


def test_a_bucket_that_is_not_there_is_named(proxy):
    with pytest.raises(JournalError, match=r"NoSuchBucket.*check the name of the bucket"):
        JournalLog.create("s3://no-such-bucket/j", JOB)


def test_what_sources_cost_is_kept_beside_it_for_whoever_starts_the_job_next(
    uri, proxy, tmp_path, caplog
):
    rows = Rows([{"tokens": [k] * 3} for k in range(200)])
    source = ov.Source("web", rows, transforms=[ov.Tokens("tokens")], epochs=None)
    job = ov.Job(
        name="kept", sources=[source], batch=ov.Batch(samples=40, context=64), until=4, journal=uri
    )
    with ov.launch(job, cache_dir=tmp_path / "here") as session:
        assert len(list(session.client(0))) == 4
        found = session.profile()
    assert found.sources["web"].samples >= 64
    assert profile_store.load(f"{uri}/profile.json") == found
    assert verify(uri).segments > 0, "it is no segment of it"
    with ov.launch(job, cache_dir=tmp_path / "elsewhere", resume="auto") as session:
        assert session.profile() == found
    proxy.faults[:] = [Fault("reset", method="PUT", times=5)]
    assert not profile_store.save(f"{uri}/profile.json", found)
    assert "profile.json not saved: " in caplog.text
