"""Stories of loaders that go back in memory, and of standbys that follow others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.cluster import loader_worker
from overlord.cluster.loader_worker import LoaderWorker
from overlord.cluster.worker import WorkerConfig
from overlord.content import Content
from overlord.errors import StorageError
from overlord.loader import samples
from overlord.loader.loader import Loader
from overlord.loader.samples import ReplayBuffer, SampleBuffer, SourceOrder
from overlord.messages.batches import Announcements
from overlord.messages.control import (
    ConnectConstructor,
    ConnectionLost,
    Cursor,
    DropLoader,
    EndOfJob,
    FollowLoader,
    LoaderPlan,
    LoaderStart,
    Refill,
    Rollback,
)
from overlord.messages.data import (
    Announce,
    LongDocuments,
    Read,
    ReadFailed,
    SampleBlock,
    StepPayload,
    WindowReady,
)
from overlord.sample import Ragged
from overlord.setup.prepared_job import Options, PreparedJob, open_loader
from overlord.transport.server import Server
from tests.internals import kept_announcements, kept_blocks, loader_service_of, worker_loop_of
from tests.rollbacks import STRIDE, Drawing, payload_rows

NONE = np.zeros(0, np.int64)
PLAIN = SourceOrder(name="web", n_chunks=4, seed=0, shuffle=False, shuffle_chunks=1)


def job_of(rows: list[dict[str, Any]], **fields: Any) -> ov.Job:
    transforms = fields.pop("transforms", [ov.Tokens("tokens")])
    source = ov.Source.from_dataset(
        "a", rows, transforms=transforms, shuffle=False, epochs=fields.pop("epochs", 1)
    )
    return ov.Job(
        name="back",
        sources=[source],
        batch=ov.Batch(samples=4, context=8),
        place=ov.ClientPlaceTree(),
        slice_rows=10,
        **fields,
    )


def drawing(rows: int = 30, **how: Any) -> Drawing:
    """Samples 0, 1, 2 ... of one token each, ten in a window."""
    return Drawing(
        PreparedJob(job_of([{"tokens": [k]} for k in range(rows)]), Options()), 0, 1, **how
    )


def rows_of(run: Drawing) -> list[int]:
    return [i[2] for step in run.steps for i in step.ids]


# the shelf


def block(first: int, n: int) -> Content:
    return Content(Ragged.from_rows([[k, k] for k in range(first, first + n)], np.int32))


def numbers(pieces: list[Content]) -> list[int]:
    return [int(piece.tokens[i][0]) for piece in pieces for i in range(len(piece))]


def test_what_was_popped_stays_before_the_front_until_it_is_released() -> None:
    buffer = SampleBuffer(keeps=True)
    buffer.put(block(0, 5))
    buffer.put(block(5, 5))
    assert numbers(buffer.pop(7)) == list(range(7))
    buffer.release(2)
    assert (buffer.rows, buffer.kept_rows, buffer.kept_bytes) == (3, 5, 40)
    buffer.restore(4)
    assert (buffer.rows, buffer.kept_rows, buffer.kept_bytes, buffer.nbytes) == (7, 1, 8, 56)
    assert numbers(buffer.pop(7)) == list(range(3, 10))
    with pytest.raises(AssertionError):
        buffer.restore(9)


def test_a_sample_buffer_that_keeps_nothing_lets_popped_blocks_go() -> None:
    buffer = SampleBuffer()
    buffer.put(block(0, 5))
    buffer.pop(5)
    assert (buffer.kept_rows, buffer.kept_bytes, buffer.nbytes, kept_blocks(buffer)) == (
        0,
        0,
        0,
        [],
    )


# announcements


def found(
    rows: list[int], bad: Sequence[int] = (), dropped: int = 0, long: Sequence[int] = ()
) -> SampleBlock:
    ids, failed = np.array(rows, np.int64), np.array(bad, np.int64)
    meta = {"tokens": np.ones(len(rows), np.int64)}
    zeros, none = np.zeros(len(rows), np.int64), np.zeros(len(bad), np.int64)
    return SampleBlock(
        ids.astype(np.uint64),
        zeros,
        ids,
        zeros.astype(np.int32),
        meta,
        failed.astype(np.uint64),
        none,
        failed,
        tuple(f"bad {r}" for r in bad),
        dropped,
        lost_by(long) if long else None,
    )


def lost_by(rows: list[int]) -> LongDocuments:
    ids = np.array(rows, np.int64)
    return LongDocuments(ids.astype(np.uint64), ids * 0, ids, ids * 10)


def brief(news: list[Announce]) -> list[tuple[Any, ...]]:
    return [
        (
            n.group,
            n.window,
            n.found.row.tolist() if n.found is not None else [],
            n.found.bad_row.tolist() if n.found is not None else [],
            n.found.dropped if n.found is not None else 0,
            n.closes,
            n.last,
        )
        for n in news
    ]


def again(kept: ReplayBuffer, *cursor: int) -> Any:
    made = kept.replay_from(samples.ReplayCursor.of(Cursor(*cursor), PLAIN))
    return None if made is None else (made[0], brief(made[1]))


def test_rows_that_filters_dropped_are_announced_again_after_their_block_was_released() -> None:
    kept = ReplayBuffer(PLAIN, Cursor())
    kept.add(Announce(0, 0, 0, 0, found([0, 1], dropped=5)))
    kept.add(Announce(0, 0, 0, 0, found([2, 3], bad=[4])))
    kept.add(Announce(0, 0, 0, 0, found([5, 6]), True, False))
    kept.add(Announce(0, 0, 0, 1, found([9], dropped=2), True, True))
    kept.release(4)
    assert kept_announcements(kept) == 3, (
        "the block with the last sample released stays: failures may stand behind it"
    )
    assert again(kept, 0, 0, 0, 0, 3, 0) == (
        4,
        [
            (0, 0, [], [4], 5, False, False),
            (0, 0, [5, 6], [], 0, True, False),
            (0, 1, [9], [], 2, True, True),
        ],
    )
    assert again(kept, 0, 0, 1, 0, 9, 0) == (7, [(0, 1, [], [], 2, True, True)]), (
        "those of a window that is behind are counted"
    )


def test_failures_before_the_cursor_are_left_out_and_those_behind_it_stay() -> None:
    kept = ReplayBuffer(PLAIN, Cursor())
    kept.add(Announce(0, 0, 0, 0, found([0, 4], bad=[1, 2, 6])))
    assert again(kept, 0, 0, 0, 0, 0, 0) == (1, [(0, 0, [4], [1, 2, 6], 0, False, False)])
    assert again(kept, 0, 0, 0, 0, 4, 0) == (2, [(0, 0, [], [6], 0, False, False)])
    assert again(kept, 0, 0, 0, 0, 2, 0) == (1, [(0, 0, [4], [2, 6], 0, False, False)]), (
        "the cursor may be a row of another loader"
    )


@pytest.mark.parametrize(("row", "rest"), [(0, [1, 4, 6]), (2, [4, 6]), (4, [6]), (6, [])])
def test_documents_that_lost_tokens_are_told_again_from_behind_the_cursor_on(
    row: int, rest: list[int]
) -> None:
    """Row 4 is a sample that was cut: its loss was counted when it was drawn. Rows 1 and 6 were
    dropped.
    """
    kept = ReplayBuffer(PLAIN, Cursor())
    kept.add(Announce(0, 0, 0, 0, found([0, 4], long=[1, 4, 6])))
    made = kept.replay_from(samples.ReplayCursor.of(Cursor(0, 0, 0, 0, row, 0), PLAIN))
    assert made is not None
    (news,) = made[1]
    assert news.found is not None
    assert ([] if news.found.long is None else news.found.long.row.tolist()) == rest


def test_a_loader_that_was_done_with_a_group_before_the_cursor_says_so_at_the_cursor() -> None:
    kept = ReplayBuffer(PLAIN, Cursor())
    kept.add(Announce(0, 0, 0, 0, found([0]), True, True))
    kept.add(Announce(0, 0, 1, 0, None, True, False))
    assert again(kept, 0, 0, 3, 0, 77, 0) == (
        1,
        [(0, 3, [], [], 0, True, True), (1, 0, [], [], 0, True, False)],
    )


def test_memory_reaches_from_the_last_sample_released_on() -> None:
    kept = ReplayBuffer(PLAIN, Cursor(0, 1, 0, 0, 3, 0))
    kept.add(Announce(0, 0, 1, 0, found([4, 5, 6])))
    assert again(kept, 0, 1, 0, 0, 2, 0) is None, "before its opening"
    assert again(kept, 0, 0, 0, 0, 9, 0) is None
    kept.release(2)
    assert again(kept, 0, 1, 0, 0, 4, 0) is None, "released"
    assert again(kept, 0, 1, 0, 0, 5, 0) == (2, [(1, 0, [6], [], 0, False, False)])


def test_announcements_without_a_sample_are_not_kept_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(samples, "MAX_EMPTY", 4)
    kept = ReplayBuffer(PLAIN, Cursor())
    for window in range(50):
        kept.add(Announce(0, 0, 0, window, found([], dropped=1), True, window == 49))
    assert kept_announcements(kept) == 4
    assert again(kept, 0, 0, 45, 0, 1, 0) is None
    assert again(kept, 0, 0, 46, 0, 1, 0) == (
        0,
        [(0, w, [], [], 1, True, w == 49) for w in range(46, 50)],
    )
    for group in range(1, 6):
        kept.add(Announce(0, 0, group, 0, None, True, True))
    assert again(kept, 0, 1, 3, 0, 99, 0) == (
        0,
        [(1, 3, [], [], 0, True, True), *((g, 0, [], [], 0, True, True) for g in range(2, 6))],
    ), "others go on with a group that it was done with"


# going back


def test_a_loader_rolls_back_in_memory_and_no_file_is_read_again() -> None:
    run = drawing()
    for n in (4, 5, 6):
        run.go_on(n)
    run.ack(0)
    reader = run.hosts[0].loading.slots[0].reader
    windows = reader.stats.windows
    run.back(0)
    run.hear()
    assert (run.hosts[0].opened, reader.stats.windows) == ([], windows)
    assert run.stream.ready >= 11
    run.to_the_end()
    assert rows_of(run) == list(range(30))
    assert all(len(set(rows)) == 1 for rows in run.payload.values())


def test_the_same_word_twice_and_an_older_one_change_nothing() -> None:
    run = drawing()
    run.go_on(4)
    run.go_on(4)
    run.back(0)
    host = run.hosts[0]
    run.hear()
    run.say_again()
    host.back(Rollback(STRIDE - 1, -1, tuple(run.blueprint.loader_starts(0, Cursor()))))
    assert not host.said
    run.go_on(3)
    run.say_again()
    assert not host.said
    run.to_the_end()
    assert rows_of(run) == list(range(30))


def test_work_under_way_goes_on_and_is_heard_in_the_new_generation() -> None:
    run = drawing()
    run.refill(3, 3)
    run.back(-1)
    run.back(-1)
    run.refill(3, 3)
    assert len(run.hosts[0].executor.begun) == 1
    run.hosts[0].executor.end()  # read and evaluated
    assert [n.generation for n in run.hosts[0].said] == [2 * STRIDE]
    run.hear()
    assert run.stream.ready >= 3


def test_a_loader_plan_that_never_came_is_no_reason_to_read_again() -> None:
    run = drawing()
    run.go_on(4)
    run.hear()
    run.refill(12, 12)
    run.go_on(1)
    run.draw(3)  # its part is lost on the way
    run.back(run.last)
    assert not run.hosts[0].opened
    run.to_the_end()
    assert rows_of(run) == list(range(30))


def test_what_is_kept_is_told_apart_and_does_not_count_for_reading_ahead() -> None:
    run = drawing()
    run.go_on(6)
    hosted, said = run.hosts[0].loading.slots[0], run.hosts[0].loading.held_bytes()
    assert said["kept"] == hosted.buffer.kept_bytes == 6 * 4
    assert (said["ready"], said["shadows"]) == (hosted.buffer.nbytes, 0)
    assert hosted.loader.ready == hosted.buffer.rows
    run.ack(0)
    assert run.hosts[0].loading.held_bytes()["kept"] == 0


def test_a_worker_that_does_not_keep_has_nothing_to_pay_and_reads_again() -> None:
    run = drawing(keeps=False)
    run.go_on(6)
    hosted = run.hosts[0].loading.slots[0]
    assert (hosted.loader.replay_buffer, hosted.buffer.kept_bytes, list(hosted.popped)) == (
        None,
        0,
        [],
    )
    run.back(-1)
    assert [o.loader for o in run.hosts[0].opened] == [0]
    run.to_the_end()
    assert rows_of(run) == list(range(30))


def test_what_look_ahead_passed_over_is_not_kept_by_step_and_goes_with_a_back() -> None:
    run = drawing()
    loading = run.hosts[0].loading
    run.refill(8, 8)
    for _ in range(3):
        run.work(0, 0)
    loading.pop(0, {0: 6}, np.array([4, 5]))
    assert (len(loading.held), loading.held_bytes()["kept"]) == (2, 0)
    run.back(-1)
    assert (len(loading.held), len(run.hosts[0].opened)) == (0, 1)


def fails_at(n: int) -> Callable[[int], Iterator[dict[str, Any]]]:
    def shard(number: int) -> Iterator[dict[str, Any]]:
        yield from ({"tokens": [k]} for k in range(n))
        raise OSError("the disk is on fire")

    return shard


def test_a_loader_that_failed_says_it_again() -> None:
    source = ov.Source(
        "a",
        ov.Factory(fails_at(25), shards=1, fingerprint="x"),
        transforms=[ov.Tokens()],
        shuffle=False,
    )
    job = ov.Job(
        name="b",
        sources=[source],
        batch=ov.Batch(samples=4, context=8),
        place=ov.ClientPlaceTree(),
        slice_rows=10,
    )
    run = Drawing(PreparedJob(job, Options()), 0, 1)
    run.go_on(9)
    run.refill(0, 50)
    for _ in range(20):
        run.work(0, 0)
    run.hear()
    assert run.stream.error is not None or run.stream.ready
    run.back(-1)
    run.to_the_end()
    assert not run.hosts[0].opened
    assert "the disk is on fire" in str(run.stream.error)
    assert rows_of(run) == list(range(20)), "up to the window that cannot be read"


# standbys


def with_shadow() -> Drawing:
    run = drawing(hosts=2)
    [opening] = run.openings(Cursor())
    run.hosts[1].follow(opening)
    return run


def test_a_standby_reads_and_is_popped_as_the_other_is_and_says_nothing() -> None:
    run = with_shadow()
    run.go_on(4)
    run.go_on(5)
    one, two = (host.loading.slots[0] for host in run.hosts)
    assert (two.loader.ready, two.buffer.kept_rows) == (one.loader.ready, one.buffer.kept_rows)
    assert not run.hosts[1].said
    [row] = run.hosts[1].loading.figures()
    assert (row["shadow"], row["ready_bytes"], row["kept_bytes"]) == (
        True,
        two.buffer.nbytes,
        9 * 4,
    )
    assert run.hosts[1].loading.held_bytes() == {
        "ready": 0,
        "windows": 0,
        "held": 0,
        "kept": 0,
        "shadows": two.nbytes,
    }
    assert run.hosts[1].loading.busy() == []


def test_a_standby_that_is_behind_owes_what_is_popped_and_reads_it_at_once() -> None:
    run = with_shadow()
    run.refill(6, 6)
    for _ in range(3):
        run.work(0, 0)
    run.hear()
    run.draw(6)
    run.arrive()
    behind = run.hosts[1].loading.slots[0]
    assert behind.loader.ready == -6
    run.ack(0)
    while run.hosts[1].executor.begun:
        run.work(1, 0)
    assert behind.loader.ready >= 0
    assert behind.buffer.kept_rows == 0, "what is acknowledged is not kept, though it came later"


@pytest.mark.parametrize("behind", [True, False])
def test_a_promoted_standby_goes_on_from_memory(behind: bool) -> None:
    run = with_shadow()
    if behind:
        run.refill(9, 9)
        for _ in range(3):
            run.work(0, 0)
        run.hear()
        run.draw(4)
        run.draw(3)
        run.arrive(2)
    else:
        run.go_on(4)
        run.go_on(3)
    run.ack(0)
    run.home[0] = 1
    run.hosts[0].loading.close(0)
    run.hosts[0].executor.begun.clear()
    run.back(0)
    assert not run.hosts[1].opened[1:], "it was opened once, to follow"
    run.to_the_end()
    assert rows_of(run) == list(range(30))
    assert all(len(set(rows)) == 1 for rows in run.payload.values())


def test_what_a_standby_could_not_read_is_read_again_when_it_takes_over() -> None:
    run = with_shadow()
    run.go_on(4)
    follower = run.hosts[1].loading.slots[0]
    follower.loader.handle(ReadFailed(StorageError("a", "its mount was away")))
    assert run.hosts[1].loading.caught_up([0]) is False, (
        "one that can read nothing has not caught up"
    )
    run.home[0] = 1
    run.hosts[0].loading.close(0)
    run.hosts[0].executor.begun.clear()
    run.back(0)
    run.to_the_end()
    assert run.stream.error is None
    assert rows_of(run) == list(range(30))


def test_a_standby_is_not_popped_behind_a_rollback_before_it_is_told_where_it_stands() -> None:
    run = with_shadow()
    run.go_on(4)
    shadow = run.hosts[1].loading.slots[0]
    run.hosts[1].back(Rollback(STRIDE, -1))
    front = shadow.loader.front
    run.hosts[1].part(0, {0: 4})
    assert shadow.loader.front == front
    [opening] = run.blueprint.loader_starts(0, Cursor())
    run.hosts[1].follow(
        LoaderStart(
            **{**{f: getattr(opening, f) for f in LoaderStart.__slots__}, "generation": STRIDE}
        )
    )
    assert shadow.loader.front == 0
    run.hosts[1].part(0, {0: 4})
    run.hosts[1].part(0, {0: 4})  # twice
    assert shadow.loader.front == 4


def test_one_that_is_far_behind_the_place_it_goes_to_reads_up_to_it_without_being_told() -> None:
    loader = Loader(
        0, SourceOrder(name="web", n_chunks=40, seed=0, shuffle=False, shuffle_chunks=1), epochs=1
    )
    loader.enable_replay()
    assert loader.rollback(Cursor(0, 30, 0, 0, 5, 0), 1) == []
    commands: list[Any] = loader.handle(Refill(0, 1, 1))
    for group in range(30):
        assert [c.group for c in commands if isinstance(c, Read)] == [group]
        commands = loader.handle(WindowReady(rows=0, over=(group,)))
        assert not any(isinstance(c, Announce) for c in commands), (
            "what stands before is not expected"
        )
    commands = loader.handle(WindowReady(rows=0, over=(30,)))
    assert [(c.group, c.generation, c.last) for c in commands if isinstance(c, Announce)] == [
        (30, 1, True)
    ]


# the worker's process


class Constructor:
    """Where payload comes to."""

    def __init__(self) -> None:
        self.payload: list[StepPayload] = []
        self.came = threading.Condition()
        self.server = Server(
            token="t",
            on_open=lambda *_: {},
            on_message=self._message,
            on_close=lambda *_: None,
            tcp=False,
        )

    def _message(self, link: Any, value: StepPayload) -> None:
        with self.came:
            self.payload.append(value)
            self.came.notify_all()

    def wait(self, n: int, since: int = 0) -> list[tuple[int, int, list[bytes]]]:
        """Payload of a generation and those after it; a thread that was slow may still send what
        nobody hears.
        """
        with self.came:
            assert self.came.wait_for(
                lambda: sum(p.generation >= since for p in self.payload) >= n, 20.0
            ), self.payload
            heard = [p for p in self.payload if p.generation >= since]
            every = sorted(
                heard, key=lambda p: (p.generation, p.step)
            )  # threads send them, in any order
            return [(p.step, p.generation, payload_rows([Content(p.tokens)])) for p in every]


class Told:
    """A loader worker, told by a planner that is this test."""

    def __init__(self, **settings: Any) -> None:
        self.blueprint = PreparedJob(job_of([{"tokens": [k]} for k in range(30)]), Options())
        self.constructor = Constructor()
        self.host = LoaderWorker(
            3,
            WorkerConfig(name="back", token="t", check=True, **settings),
            {0: self.blueprint.reader_spec(0)},
            self.blueprint.loader_starts(0, Cursor()),
            {0: self.constructor.server.address},
            (),
            0,
        )

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *exc: object) -> None:
        self.host.close()
        self.constructor.server.close()

    def events(self, want: Callable[[list[Any]], bool]) -> list[Any]:
        got: list[Any] = []
        while not want(got):
            for event in self.host.events().result(20.0):
                got += event.split() if isinstance(event, Announcements) else [event]
        return got

    def announced(self, n: int, generation: int = 0) -> list[Any]:
        """What happens until so many samples are announced."""

        def enough(got: list[Any]) -> bool:
            return (
                sum(
                    len(e.found)
                    for e in got
                    if isinstance(e, Announce) and e.found and e.generation == generation
                )
                >= n
            )

        self.host.do([Refill(0, n, n)])
        return self.events(enough)

    def part(self, step: int, n: int, generation: int = 0, acked: int = -1) -> None:
        self.host.do(
            [
                LoaderPlan(
                    step, np.array([0]), np.array([n]), (0,), generation=generation, acked=acked
                )
            ]
        )

    def back(self, step: int, row: int, generation: int) -> Rollback:
        cursor = Cursor(0, 0, 0, 0, row, 0) if row >= 0 else Cursor()
        [o] = self.blueprint.loader_starts(0, cursor)
        return Rollback(
            generation, step, (LoaderStart(0, 0, 0, 1, cursor, o.budget_bytes, generation),)
        )


def tokens(*rows: int) -> list[bytes]:
    return payload_rows([Content(Ragged.from_rows([[k] for k in rows]))])


def test_a_loader_worker_rolls_back_and_parts_of_before_or_said_twice_lead_to_nothing() -> None:
    with Told(failover=True) as told:
        told.announced(6)
        told.part(0, 2)
        told.part(0, 2)
        told.part(1, 3)
        assert told.constructor.wait(2) == [(0, 0, tokens(0, 1)), (1, 0, tokens(2, 3, 4))]
        told.host.do([told.back(0, 1, STRIDE)])
        told.announced(4, STRIDE)
        told.part(1, 3)
        told.part(1, 3, STRIDE)
        told.part(2, 1, STRIDE, acked=1)
        assert told.constructor.wait(4)[2:] == [
            (1, STRIDE, tokens(2, 3, 4)),
            (2, STRIDE, tokens(5)),
        ]
        figures = told.host.metrics()
        assert (figures["memory"]["kept"], figures["loaders"][0]["kept_bytes"]) == (4, 4), (
            "step 1 is acknowledged, step 2 is not"
        )


def test_a_lost_constructor_worker_ends_nothing_and_its_successor_gets_replayed_steps() -> None:
    with Told(failover=True) as told:
        told.announced(6)
        told.constructor.server.close()
        [cut] = [
            e
            for e in told.events(lambda got: any(isinstance(e, ConnectionLost) for e in got))
            if isinstance(e, ConnectionLost)
        ]
        assert cut.worker == "constructor-worker/0"
        told.part(0, 2)
        told.constructor = Constructor()
        told.host.do(
            [ConnectConstructor(0, told.constructor.server.address, "t"), told.back(-1, -1, STRIDE)]
        )
        happened = told.announced(6, STRIDE)
        assert not any(isinstance(e, EndOfJob) for e in happened)
        told.part(0, 2, STRIDE)
        assert told.constructor.wait(1, STRIDE) == [(0, STRIDE, tokens(0, 1))]
        assert told.host.metrics()["links"] == 1


def test_without_failover_a_constructor_worker_that_is_lost_is_told_of_as_the_end() -> None:
    with Told() as told:
        told.announced(2)
        assert loader_service_of(told.host).slots[0].loader.replay_buffer is None
        told.constructor.server.close()
        told.part(0, 2)
        [finish] = [
            e
            for e in told.events(lambda got: any(isinstance(e, EndOfJob) for e in got))
            if isinstance(e, EndOfJob)
        ]
        assert (finish.step, type(finish.error).__name__) == (0, "ActorLost")


def test_a_loader_worker_follows_and_is_quiet_until_it_is_made_the_primary() -> None:
    with Told(failover=True) as told:
        told.announced(3)
        told.host.do(
            [DropLoader(0), FollowLoader(told.back(-1, -1, 1).openings[0]), Refill(0, 6, 6)]
        )
        told.part(0, 4, 1)
        told.host.do([told.back(-1, -1, STRIDE)])
        happened = told.announced(6, STRIDE)
        assert {e.generation for e in happened if isinstance(e, Announce)} == {STRIDE}
        told.part(0, 2, STRIDE)
        assert told.constructor.wait(1) == [(0, STRIDE, tokens(0, 1))]


def test_a_worker_whose_event_loop_opens_a_source_for_long_is_heard_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opens, may = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        opens.set()
        assert may.wait(20.0)
        return open_loader(*args)

    with Told(failover=True) as told:
        asked = threading.Event()
        worker_loop_of(told.host).post(lambda: asked.wait(20.0))
        before = told.host.beat()  # on its way when the opening begins
        monkeypatch.setattr(loader_worker, "open_loader", slow)
        told.host.do([replace(told.back(0, 1, STRIDE), afresh=True)])
        asked.set()
        assert opens.wait(20.0)
        assert before.result(20.0)
        assert told.host.beat().result(20.0)
        may.set()
        assert told.host.beat().result(20.0)
