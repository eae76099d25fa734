"""Laws of each core on its own: what it was told decides what it says, wherever it was started and
whoever spoke first.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.constructor.assembler import Assembler
from overlord.job.job import UNIT
from overlord.loader.loader import Loader
from overlord.loader.reader import SourceReader
from overlord.loader.samples import SourceOrder
from overlord.messages.control import (
    Attach,
    Consumed,
    Cursor,
    Detach,
    EndOfJob,
    PlannedStep,
    Refill,
    SetMixture,
    Skip,
    StreamState,
)
from overlord.messages.data import (
    Announce,
    Build,
    Built,
    Deliver,
    EndRank,
    Evaluate,
    PayloadReady,
    Pop,
    Read,
    ReadFailed,
    Release,
)
from overlord.planning.draw import Drawer, Drawn, MissingSamples, draw_counts, whole_weights
from overlord.planning.stream import SourceStream
from overlord.session.local_runtime import LocalRuntime
from overlord.setup.prepared_job import Options, PreparedJob
from overlord.sources.chunk_reader import ChunkReader
from tests.internals import acked_steps
from tests.laws import examples
from tests.properties.test_merge import make_found
from tests.properties.test_stream import delivered, fingerprint, in_order, run, wanted
from tests.reference import Mixer
from tests.worlds import Rows, World, folder, picky, some_steps, worlds


class Nowhere:
    """No executor: these tests carry out the work of loaders themselves."""

    def submit(
        self,
        name: str,
        work: Any,
        done: Any,
        *,
        size: int = 1,
        urgent: bool = False,
        waits: bool = False,
    ) -> None:
        raise AssertionError("nothing is submitted here")


def outcome_of(reader: SourceReader, command: Read | Evaluate) -> Any:
    try:
        if isinstance(command, Evaluate):
            return reader.evaluate(command)[0]
        outcome = reader.read_on(command)
        return outcome[0] if isinstance(outcome, tuple) else outcome
    except Exception as error:
        return ReadFailed(error)


# The planner


class Channels:
    """Planner and loaders with a queue each way between any two: messages keep their order on one
    queue and on no other.
    """

    def __init__(self, blueprint: PreparedJob, state: StreamState | None, seed: int):
        host = LocalRuntime(blueprint, Nowhere(), state)
        self.planner, self.loaders = host.planner, host.loaders
        self.readers = [hosted.reader for hosted in host.loading.slots.values()]
        self.to_planner: list[deque[Any]] = [deque() for _ in self.loaders]
        self.to_loader: list[deque[Any]] = [deque() for _ in self.loaders]
        self.stages: list[PlannedStep] = []
        self.finish: EndOfJob | None = None
        self._random = random.Random(seed)

    def run(self, events: Sequence[Any] = ()) -> Channels:
        for event in (*events, Attach(0)):
            self._planned(self.planner.handle(event))
        while self.finish is None:
            full = [q for q in (*self.to_planner, *self.to_loader) if q]
            assert full, f"nothing moves any more: {self.planner.waiting_for()}"
            self._move(self._random.choice(full))
            self.planner.check()
        return self

    def _move(self, queue: deque[Any]) -> None:
        message = queue.popleft()
        if isinstance(message, Announce):
            self._planned(self.planner.handle(message))
        else:
            number, event = message
            self._said(number, self.loaders[number].handle(event))

    def _said(self, number: int, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, Announce):
                self.to_planner[number].append(command)
            else:
                self.to_loader[number].append((number, outcome_of(self.readers[number], command)))

    def _planned(self, commands: list[Any]) -> None:
        for command in commands:
            match command:
                case Refill(loader=number):
                    self.to_loader[number].append((number, command))
                case PlannedStep(plan=plan, pops=pops):
                    self.stages.append(command)
                    for number in np.flatnonzero(pops).tolist():
                        self.to_loader[number].append((number, Pop(plan.step, int(pops[number]))))
                case EndOfJob():
                    self.finish = command
        if self.stages and not self.finish:
            taken = self.stages[-1].plan.step
            if acked_steps(self.planner).get(0, -1) < taken:
                self._planned(self.planner.handle(Consumed(0, taken)))

    @property
    def said(self) -> list[tuple[str, bool]]:
        return [(s.digest, s.skipped) for s in self.stages]

    @property
    def end(self) -> tuple[int, type, str]:
        assert self.finish is not None
        return self.finish.step, type(self.finish.error), str(self.finish.error)


def turning(step: int, feedback: Any) -> dict[str, float]:
    """A schedule that changes all the time."""
    return {"s0": 1.0 + step % 3, "s1": float(step % 2), "s2": 0.5, "s3": step / 4}


@st.composite
def event_logs(draw: st.DrawFn) -> list[SetMixture | Skip]:
    weights = st.sampled_from((0.0, 0.5, 1.0, 4.0))
    at = draw(st.lists(st.integers(0, 9), max_size=3))
    changes = [
        SetMixture(k, {"s0": draw(st.sampled_from((0.1, 1.0, 4.0))), "s1": draw(weights)})
        for k in at
    ]
    skips = [
        Skip(tuple(steps))
        for steps in draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=2))
    ]
    return draw(st.permutations([*changes, *skips]))


def states_of(blueprint: PreparedJob, stages: list[PlannedStep]) -> list[StreamState]:
    """Through JSON, as a checkpoint goes."""
    return [blueprint.restore(json.loads(json.dumps(blueprint.export(s.after)))) for s in stages]


@given(
    worlds(),
    event_logs(),
    st.sampled_from(("step", "microbatch", "epoch")),
    st.booleans(),
    st.integers(0, 2**20),
    st.integers(1, 3),
    st.integers(1, 3),
)
@examples(45)
def test_a_planner_restored_after_any_step_plans_the_identical_rest(
    world: World,
    log: list[SetMixture | Skip],
    mix_every: str,
    scheduled: bool,
    seed: int,
    loaders: int,
    others: int,
) -> None:
    log = [
        e
        if isinstance(e, Skip) or len(world.sources) > 1
        else SetMixture(e.at, {"s0": e.weights["s0"]})
        for e in log
    ]
    with folder() as directory:
        job = world.job(directory, mix_every=mix_every)
        if scheduled:
            names = job.names
            job = world.job(
                directory,
                mix_every=mix_every,
                mixture=lambda step, feedback: {n: turning(step, feedback)[n] for n in names},
            )
        blueprint = PreparedJob(job, Options(loaders=dict.fromkeys(job.names, loaders)))
        other = PreparedJob(
            job, Options(loaders=dict.fromkeys(job.names, others), prefetch=1, read_ahead=1)
        )
        whole = Channels(blueprint, None, seed).run(log)
        assert [s.plan.step for s in whole.stages] == list(range(len(whole.stages)))
        states = states_of(blueprint, whole.stages)
        for k in some_steps(len(states), seed):
            state = states[k]
            assert state.step == k + 1
            rest = Channels(other, state, seed + k).run()
            assert (rest.said, rest.end) == (whole.said[k + 1 :], whole.end), (
                f"restored after step {k}"
            )


def eight_rows(mixture: Any, mix_every: str, until: int) -> PreparedJob:
    """Two endless sources of eight rows, two samples a step."""
    rows = Rows([{"tokens": [k + 1]} for k in range(8)])
    sources = [
        ov.Source(name, rows, transforms=[ov.Tokens("tokens")], epochs=None)
        for name in ("s0", "s1")
    ]
    batch = ov.Batch(samples=2, context=8)
    return PreparedJob(
        ov.Job(
            name="t",
            sources=sources,
            batch=batch,
            mixture=mixture,
            mix_every=mix_every,
            until=until,
        ),
        Options(),
    )


def counts(stages: list[PlannedStep]) -> list[list[int]]:
    return [np.bincount(s.plan.source, minlength=2).tolist() for s in stages]


@given(event_logs(), st.sampled_from(("step", "microbatch", "epoch")), st.integers(0, 2**20))
def test_a_log_of_mixtures_is_a_schedule_and_exactly_the_named_steps_are_skipped(
    log: list[SetMixture | Skip], mix_every: str, seed: int
) -> None:
    def schedule(step: int, feedback: Any) -> dict[str, float]:
        said = [e for e in log if isinstance(e, SetMixture) and e.at <= step]
        return (
            dict(max(enumerate(said), key=lambda e: (e[1].at, e[0]))[1].weights)
            if said
            else {"s0": 1.0, "s1": 1.0}
        )

    by_events = Channels(eight_rows(None, mix_every, 14), None, seed).run(log)
    by_schedule = Channels(eight_rows(schedule, mix_every, 14), None, seed + 1).run()
    assert [d for d, _ in by_events.said] == [d for d, _ in by_schedule.said]
    assert [k for k, (_, skipped) in enumerate(by_events.said) if skipped] == sorted(
        {k for e in log if isinstance(e, Skip) for k in e.steps}
    )


def test_mixed_by_the_epoch_weights_stay_until_the_lowest_epoch_rises() -> None:
    """At step 8 each source has given its eight rows; step 8 draws the first of epoch 1, so step 9
    sees the epoch risen.
    """
    blueprint = eight_rows(
        lambda step, feedback: [1.0, 1.0] if step < 5 else [3.0, 1.0], "epoch", 13
    )
    assert counts(Channels(blueprint, None, 0).run().stages) == [[1, 1]] * 9 + [
        [2, 0],
        [1, 1],
        [2, 0],
        [1, 1],
    ]


def test_a_mixture_that_waits_for_the_next_epoch_leaves_the_one_in_force_in_the_state() -> None:
    blueprint = eight_rows(None, "epoch", 30)
    whole = Channels(blueprint, None, 0).run(
        [SetMixture(3, {"s0": 1.0, "s1": 3.0}), SetMixture(12, {"s0": 3.0, "s1": 1.0})]
    )
    for k, state in enumerate(states_of(blueprint, whole.stages)):
        assert Channels(blueprint, state, k).run().said == whole.said[k + 1 :], (
            f"restored after step {k}"
        )


# The loader

Where = tuple[int, ...]  # epoch, group, window, key, file, row, part (-1: quarantined)


def heard(news: Announce) -> tuple[list[Where], list[Where]]:
    """Samples and quarantined rows of an announcement."""
    at, f = (news.epoch, news.group, news.window), news.found
    if f is None:
        return [], []
    good = zip(f.key.tolist(), f.file.tolist(), f.row.tolist(), f.part.tolist(), strict=True)
    bad = zip(f.bad_key.tolist(), f.bad_file.tolist(), f.bad_row.tolist(), strict=True)
    return [(*at, *g) for g in good], [(*at, *b, -1) for b in bad]


def lost(news: Announce) -> list[tuple[int, ...]]:
    """Documents of an announcement that lost tokens, and how many."""
    at, long = (
        (news.epoch, news.group, news.window),
        None if news.found is None else news.found.long,
    )
    columns = () if long is None else (long.key, long.file, long.row, long.lost)
    return [(*at, *row) for row in zip(*(c.tolist() for c in columns), strict=True)]


def walk(loader: Loader, reader: SourceReader, rng: random.Random) -> list[Announce]:
    """All a loader announces, asked for in random amounts and popped in random amounts."""
    news: list[Announce] = []
    queue: deque[Any] = deque()
    while loader.activity != "done" or queue:
        if not queue:
            if loader.ready and rng.random() < 0.7:
                queue += loader.handle(Pop(0, rng.randint(1, loader.ready)))
            else:
                must = rng.choice((0, loader.ready + rng.randint(1, 5)))
                queue += loader.handle(Refill(loader.number, must, rng.randint(0, 30), 10**9))
        while queue:
            command = queue.popleft()
            if isinstance(command, Announce):
                news.append(command)
            else:
                queue += loader.handle(outcome_of(reader, command))
            loader.check()
    return news


def loaders_at(
    blueprint: PreparedJob, cursor: Cursor, n: int, rng: random.Random
) -> list[list[Announce]]:
    job, order, kit = blueprint.job, blueprint.orders[0], blueprint.reader_spec(0)
    found = []
    for k in range(n):
        loader = Loader(
            k,
            order,
            epochs=job.sources[0].epochs,
            loader=k,
            loaders=n,
            cursor=cursor,
            block_rows=rng.choice((1, 2, 7, 64)),
            budget_bytes=rng.choice((1, 50, 10**6)),
        )
        chunks = ChunkReader(kit.index, options=kit.read, cache=blueprint.handles)
        found.append(walk(loader, SourceReader(order, chunks, kit.pipeline), rng))
    return found


@given(worlds(endless=False), st.integers(1, 4), st.integers(0, 2**20))
@examples(60)
def test_loaders_restored_at_any_cursor_announce_what_stands_behind_it(
    world: World, loaders: int, seed: int
) -> None:
    world = World(world.seed, world.sources[:1], world.fields, world.batch, world.dp)
    rng = random.Random(seed)
    with folder() as directory:
        blueprint = PreparedJob(world.job(directory), Options())
        told = loaders_at(blueprint, Cursor(), 1, rng)[0]
        alone, long = [heard(n) for n in told], [row for n in told for row in lost(n)]
        samples, bad = [s for a, _ in alone for s in a], [b for _, a in alone for b in a]
        assert samples == sorted(set(samples)), "in the order of the stream, each once"
        for last in [None, *(samples if len(samples) < 10 else rng.sample(samples, 10))]:
            cursor = Cursor() if last is None else Cursor(*last[:3], *last[4:])
            words = loaders_at(blueprint, cursor, loaders, rng)
            parts = [[s for n in news for s in heard(n)[0]] for news in words]
            assert all(p == sorted(p) for p in parts), "each loader in the order of the stream"
            assert sorted(s for p in parts for s in p) == [
                s for s in samples if last is None or s > last
            ]
            behind = sorted(b for news in words for n in news for b in heard(n)[1])
            assert behind == sorted(b for b in bad if last is None or b[:6] > last[:6])
            assert sorted(row for news in words for n in news for row in lost(n)) == sorted(
                row for row in long if last is None or row[:6] > last[:6]
            ), "a document counts as lost once, that of the cursor before it"
            for news in words:
                closed = [(n.epoch, n.group, n.window) for n in news if n.closes]
                assert closed == sorted(set(closed)), "a window is closed once"
                groups = [(n.epoch, n.group) for n in news if n.last]
                first, n_groups = (cursor.epoch, cursor.group), blueprint.orders[0].n_groups
                wanted = [
                    (e, g)
                    for e in range(blueprint.job.sources[0].epochs or 0)
                    for g in range(n_groups)
                    if (e, g) >= first
                ]
                assert groups == wanted, (
                    "every group ends once, also one without chunks of this loader"
                )


def test_rows_of_equal_keys_are_told_apart_by_file_and_row() -> None:
    """Keys are hashes: two rows of one window may share one, if once in a lifetime."""

    class EqualKeys(SourceOrder):
        def row_keys(self, epoch: int, file: np.ndarray, row: np.ndarray) -> np.ndarray:
            return np.zeros(len(file), np.uint64)

    order = EqualKeys(name="web", n_chunks=1, seed=0, shuffle=True, shuffle_chunks=1)
    file, row = np.array([0, 1, 1, 1, 2]), np.array([9, 3, 4, 5, 0])
    behind = order.at_or_after(np.zeros(5, np.uint64), file, row, Cursor(file=1, row=4, part=0), 0)
    assert behind.tolist() == [False, False, True, True, True]


def same(row: dict[str, Any]) -> dict[str, Any]:
    return row


def write_lines(directory: str, files: list[list[Any]]) -> str:
    """JSONL, a line each: text as it stands, anything else as JSON."""
    for k, lines in enumerate(files):
        text = "".join(
            (line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines
        )
        (Path(directory) / f"{k}.jsonl").write_text(text)
    return f"{directory}/*.jsonl"


@given(
    st.lists(
        st.lists(st.sampled_from(("good", "picky", "no JSON", "empty")), min_size=1, max_size=9),
        min_size=1,
        max_size=3,
    )
)
@examples(40)
def test_every_failure_is_listed_under_its_own_row_with_its_own_reason(
    files: list[list[str]],
) -> None:
    """Rows that cannot be read, rows a transform fails on, rows without tokens, side by side in a
    slice.
    """
    row = {
        "good": {"n": 1, "tokens": [1, 2]},
        "picky": {"n": 3, "tokens": [1]},
        "empty": {"n": 2, "tokens": []},
    }
    reasons = {"picky": "not to my liking", "no JSON": "JSON", "empty": "at least one token"}
    lines = [[row.get(kind, "{no JSON") for kind in kinds] + [row["good"]] for kinds in files]
    with folder() as directory:
        path = write_lines(directory, lines)
        source = ov.Source(
            "s", path, transforms=[ov.Map(picky, rows=True), ov.Tokens("tokens")], epochs=1
        )
        job = ov.Job(name="t", sources=[source], batch=ov.Batch(samples=3, context=8), slice_rows=5)
        done = ov.simulate(job)
        found = {(q.file, q.row): q.reason for q in done.quarantine}
        expected = {}
        for k, kinds in enumerate(files):
            texts = (Path(directory) / f"{k}.jsonl").read_text().splitlines(keepends=True)
            starts = np.cumsum([0, *map(len, texts)]).tolist()
            expected |= {
                (k, starts[i]): reasons[kind] for i, kind in enumerate(kinds) if kind in reasons
            }
        assert found.keys() == expected.keys()
        assert all(expected[where].lower() in reason.lower() for where, reason in found.items()), (
            found
        )


@given(
    st.lists(
        st.tuples(st.sampled_from((1, "one", 1.5, [2])), st.integers(1, 6)), min_size=2, max_size=5
    ),
    st.integers(1, 3),
)
@examples(40)
def test_slices_that_disagree_on_a_type_keep_the_order_of_their_rows(
    files: list[tuple[Any, int]], loaders: int
) -> None:
    """A column of one type in each file, and of another in the next."""
    lines = [[{"n": n, "tokens": [k, i]} for i in range(rows)] for k, (n, rows) in enumerate(files)]
    with folder() as directory:
        path = write_lines(directory, lines)
        source = ov.Source(
            "s", path, transforms=[ov.Map(same, rows=True), ov.Tokens("tokens")], epochs=1
        )
        job = ov.Job(
            name="t",
            sources=[source],
            batch=ov.Batch(samples=4, context=8),
            slice_rows=3,
            shuffle_chunks=4,
        )
        steps, _, _ = wanted(job)
        got, error, _, _ = run(job, 0, loaders={"s": loaders})
        assert error is None
        assert delivered(got, len(got[0])) == steps


# The constructor


def bare_stage(step: int, skipped: bool = False) -> PlannedStep:
    return PlannedStep(
        plan=SimpleNamespace(step=step), pops=None, doc=None, digest="", after=None, skipped=skipped
    )  # type: ignore[arg-type]


class Bench:
    """An assembler, its clients, and a book of who must get what."""

    def __init__(self, ranks: int):
        self.assembler, self.ranks = Assembler(4, range(ranks)), range(ranks)
        self.step, self.finished = 0, False
        self.building: list[int] = []
        self.held: list[int] = []  # staged and not released
        self.inbox: dict[int, list[int]] = {}  # attached rank -> delivered and not taken
        self.due: dict[
            int, list[int]
        ] = {}  # attached rank -> steps it must still be delivered, in order
        self.taken: dict[int, int] = {}
        self.ended: set[int] = set()

    def tell(self, event: Any) -> None:
        for command in self.assembler.handle(event):
            match command:
                case Build(step=step, bucket=4):
                    assert step in self.held
                    assert step not in self.building, "built twice"
                    self.building.append(step)
                case Deliver(step=step, rank=rank):
                    assert step in self.held, "delivered after it was released"
                    assert step not in self.building, "delivered before it was built"
                    assert self.due[rank][0] == step, "out of order, or twice"
                    self.inbox[rank].append(self.due[rank].pop(0))
                case Release(step=step, bucket=4):
                    assert all(t >= step for t in self.taken.values()), (
                        "released before all took it"
                    )
                    self.held.remove(step)  # once
                case EndRank(rank=rank):
                    assert self.finished
                    assert not self.due[rank], "ended before its last step"
                    assert rank not in self.ended, "ended twice"
                    self.ended.add(rank)
                case _:
                    raise AssertionError(command)
        self.assembler.check()

    def plan(self, skipped: bool) -> None:
        if self.finished:
            return
        self.tell(bare_stage(self.step, skipped))
        if not skipped:
            self.held.append(self.step)
            for due in self.due.values():
                due.append(self.step)
            self.tell(PayloadReady(self.step))
        self.step += 1

    def build(self, pick: int) -> None:
        if self.building:
            self.tell(Built(self.building.pop(pick % len(self.building))))

    def take(self, pick: int) -> None:
        ready = [r for r in self.inbox if self.inbox[r]]
        if ready:
            rank = ready[pick % len(ready)]
            self.taken[rank] = self.inbox[rank].pop(0)
            self.tell(Consumed(rank, self.taken[rank]))

    def attach(self, pick: int) -> None:
        rank = pick % len(self.ranks)
        if rank not in self.due:
            self.inbox[rank], self.due[rank], self.taken[rank] = [], sorted(self.held), -1
            self.tell(Attach(rank))

    def detach(self, pick: int) -> None:
        if self.due:
            rank = sorted(self.due)[pick % len(self.due)]
            for book in (self.inbox, self.due, self.taken):
                del book[rank]
            self.ended.discard(rank)
            self.tell(Detach(rank))

    def finish(self) -> None:
        if not self.finished:
            self.finished = True
            self.tell(EndOfJob(self.step))


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 11)), max_size=80),
    st.booleans(),
)
@examples(400)
def test_every_attached_rank_gets_every_step_once_and_in_the_end_nothing_is_held(
    ranks: int, acts: list[tuple[int, int]], stay: bool
) -> None:
    bench = Bench(ranks)
    moves: list[Callable[[int], None]] = (
        [lambda n: bench.plan(skipped=n == 0)] * 3 + [bench.build] * 3 + [bench.take] * 4
    )
    moves += [bench.attach, bench.detach, lambda n: bench.finish() if n == 0 else bench.attach(n)]
    bench.attach(0)
    for act, pick in acts:
        moves[act](pick)
    bench.finish()
    while bench.building or (stay and any(bench.inbox.values())):
        bench.build(0)
        if stay:
            bench.take(0)
    while not stay and bench.due:
        bench.detach(0)
    assert all(not due for due in bench.due.values())
    assert bench.ended == set(bench.due)
    assert bench.held == []


# The draw


class Finite:
    """A front whose samples are known one by one, as announcements come."""

    def __init__(self, tokens: list[int], known: int):
        self.tokens, self.ready, self.taken = tokens, min(known, len(tokens)), 0

    @property
    def ended(self) -> bool:
        return self.ready == len(self.tokens)

    def samples_for(self, start: int, tokens: int) -> tuple[int, int]:
        held = 0
        for count, n in enumerate(self.tokens[start : self.ready]):
            if held >= tokens:
                return count, held
            held += n
        return max(0, self.ready - start), held


@given(
    st.lists(
        st.tuples(st.sampled_from((0.0, 0.1, 1.0, 3.0)), st.lists(st.integers(1, 9), max_size=30)),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 25),
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_new_drawer_goes_on_from_the_accounts_and_waits_only_for_what_it_lacks(
    sources: list[tuple[float, list[int]]],
    amount: int,
    in_tokens: bool,
    draws: int,
    chance: bool,
    seed: int,
) -> None:
    """One drawer that knows everything and lives on, against a fresh one for each step that learns
    sample by sample.
    """

    def drawer() -> Drawer:
        return Drawer(
            samples=None if in_tokens else amount,
            tokens=amount if in_tokens else None,
            draws=draws,
            random=chance and not in_tokens,
            seed=seed,
            fill=True,
        )

    weights, lasting = [w for w, _ in sources], drawer()
    left = [list(tokens) for _, tokens in sources]
    owed: tuple[int, ...] = (0,) * len(left)
    active: tuple[bool, ...] = (True,) * len(left)
    for step in range(12):
        known = lasting.draw(step, weights, owed, active, [Finite(t, len(t)) for t in left])
        assert isinstance(known, Drawn)
        fronts = [Finite(t, 0) for t in left]
        while isinstance(
            found := drawer().draw(step, weights, owed, active, fronts), MissingSamples
        ):
            assert found.need
            for i, n in found.need.items():
                assert fronts[i].ready < n, "it waits for what it has"
                fronts[i].ready = min(len(left[i]), fronts[i].ready + 1)
        assert found == known
        assert all(o == 0 for o, on in zip(found.owed, found.active, strict=True) if not on), (
            "who left is owed nothing"
        )
        owed, active = found.owed, found.active
        left = [t[n:] for t, n in zip(left, np.sum(found.counts, axis=0).tolist(), strict=True)]


def test_a_source_with_exactly_its_share_may_not_have_one_more() -> None:
    """Weights of a half and two quarters: with two samples a step, the half has its share and only
    the quarters may go ahead.
    """
    owed = [0, 0, 0]
    assert [draw_counts(2, whole_weights([2.0, 1.0, 1.0]), owed) for _ in range(2)] == [
        [1, 1, 0],
        [1, 0, 1],
    ]
    assert owed == [0, 0, 0]


def test_what_is_owed_to_a_source_is_forgotten_when_its_weight_is_nothing() -> None:
    owed = [UNIT // 2, -UNIT // 2]
    assert draw_counts(3, [0, UNIT], owed) == [0, 3]
    assert owed[0] == 0


@given(
    st.lists(
        st.tuples(st.sampled_from((0.0, 1.0, 2.0, 5.0, 0.3)), st.integers(-4 * UNIT, 4 * UNIT)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 12),
    st.booleans(),
)
def test_whatever_is_owed_the_counts_are_those_of_the_reference(
    sources: list[tuple[float, int]], n: int, even: bool
) -> None:
    """Accounts far off zero come with weights that change; then the musts may be more than the step
    holds.
    """
    weights = whole_weights([w for w, _ in sources])
    if not any(weights):
        return
    owed = [o // UNIT * UNIT if even else o for _, o in sources]
    reference = SimpleNamespace(owed=list(owed))
    assert draw_counts(n, weights, owed) == Mixer.exact_counts(reference, weights, n)  # type: ignore[arg-type]
    assert owed == reference.owed


def test_a_row_waits_for_rows_of_the_same_key_that_may_stand_before_it() -> None:
    stream = SourceStream("s", loaders=2, n_groups=1, epochs=1, max_bad=9, cursor=Cursor())
    stream.add(Announce(1, 0, 0, 0, make_found([(5, 1, True, 0)])), 1)  # and says there is more
    stream.add(Announce(0, 0, 0, 0, make_found([(5, 4, True, 0), (5, 6, False, 0)]), True, True), 0)
    stream.add(Announce(1, 0, 0, 0, make_found([(5, 3, True, 0), (5, 5, False, 0)]), True, True), 1)
    pieces, bad = stream.take(3)
    assert [int(r) for p in pieces for r in p.found.row[p.start : p.stop]] == [1, 3, 4]
    assert [row for _, _, row, _ in bad + stream.last_failures()] == [5, 6]


@given(worlds(), st.integers(0, 2**20), st.integers(1, 3))
@examples(40)
def test_a_schedule_that_turns_weights_on_and_off_gives_the_stream_of_the_reference(
    world: World, seed: int, loaders: int
) -> None:
    with folder() as directory:
        names = world.job(directory).names
        job = world.job(
            directory, mixture=lambda step, feedback: {n: turning(step, feedback)[n] for n in names}
        )
        steps, broken, _ = wanted(job)
        got, error, _, _ = run(job, seed, loaders=dict.fromkeys(names, loaders))
        assert (error is not None) == broken, error
        assert delivered(got, len(got[0])) == steps


@given(
    worlds(batches="samples"),
    st.integers(0, 2**20),
    st.sampled_from(("step", "microbatch")),
    st.integers(1, 3),
)
@examples(60)
def test_the_mix_of_a_session_is_within_one_sample_of_every_source_at_every_step(
    world: World, seed: int, mix_every: str, m: int
) -> None:
    sources = tuple((*s[:4], None, *s[5:]) for s in world.sources)
    fields = tuple((k, v) for k, v in world.fields if k not in ("draw", "until", "mix_every"))
    world = World(world.seed, sources, fields, world.batch, world.dp)
    with folder() as directory:
        job = world.job(directory, until=12, mix_every=mix_every)
        job = world.job(
            directory,
            until=12,
            mix_every=mix_every,
            batch=ov.Batch(samples=job.batch.samples, microbatches=m, context=64),
        )
        done = ov.simulate(job, seed=seed, check=True)
        if done.error is not None:  # a source none of whose rows passes
            return
        share = whole_weights([s.weight for s in job.sources])
        taken, drawn = np.zeros(len(share), object), 0
        assert len(done.steps[0]) == 12
        for step in done.steps[0]:
            plan = step.info
            taken, drawn = (
                taken + np.bincount(plan.source, minlength=len(share)).astype(object),
                drawn + len(plan),
            )
            assert len(plan) == job.batch.samples
            assert all(
                abs(Fraction(drawn * w, UNIT) - int(n)) < 1
                for w, n in zip(share, taken, strict=True)
            )


@given(
    worlds(),
    st.integers(0, 2**20),
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.integers(1, 3),
)
@examples(40)
def test_skipped_steps_are_left_out_and_the_others_are_as_they_were(
    world: World, seed: int, skipped: list[int], loaders: int
) -> None:
    with folder() as directory:
        job = world.job(directory)
        whole, _, _, _ = run(job, seed)
        rest, _, _, _ = run(
            job, seed + 1, events=[Skip(tuple(skipped))], loaders=dict.fromkeys(job.names, loaders)
        )
        assert fingerprint(rest) == fingerprint(
            {r: [s for s in steps if s.step not in skipped] for r, steps in whole.items()}
        )


# Place


@given(
    worlds(),
    st.sampled_from(("vanilla", "packed", "llm_balance", "backbone_balance")),
    st.integers(0, 2**20),
    st.sampled_from((1, 4, 16)),
    st.sampled_from(("packed", "padded")),
    st.sampled_from(("shifted", "unshifted")),
)
@examples(70)
def test_every_strategy_keeps_the_capacity_and_gives_every_drawn_sample_one_slot(
    world: World, strategy: str, seed: int, multiple: int, layout: str, labels: str
) -> None:
    with folder() as directory:
        batch = ov.Batch(**dict(world.batch), pad_multiple=multiple, layout=layout, labels=labels)
        job = world.job(directory, strategy=strategy, batch=batch)
        done = ov.simulate(job, seed=seed, check=True)
        n = len(done.steps[0])
        assert all(len(s) == n for s in done.steps.values())
        for k in range(n):
            places = [(s[k].rank, m, mb) for s in done.steps.values() for m, mb in enumerate(s[k])]
            plan = done.steps[0][k].info
            assert len(places) == job.place.dp * max(batch.microbatches, len(done.steps[0][k]))
            ids = [tuple(p.sample) for _, _, mb in places for p in mb.samples]
            assert sorted(ids) == sorted(in_order(plan))
            assert len(set(ids)) == len(ids)
            for _, _, mb in places:
                padded = [-(-p.length // multiple) * multiple for p in mb.samples]
                assert sum(padded) <= batch.context
                if layout == "packed":
                    assert len(mb["tokens"]) == (sum(padded) or multiple)
                else:
                    assert mb["tokens"].shape == (max(1, len(padded)), batch.context)


# Real time


class Tardy(Rows):
    """Rows that take their time: a seeded number of turns, other ones at every call."""

    def __init__(self, rows: list[dict[str, Any]], seed: int):
        super().__init__(rows)
        self.random = random.Random(seed)

    def __getitem__(self, i: int) -> dict[str, Any]:
        spin(self.random)
        return self.rows[i]


def spin(rng: random.Random) -> None:
    for _ in range(rng.choice((0, 0, 10, 100, 1000, 30_000))):
        pass


@given(
    worlds(formats=("dataset",), endless=False),
    st.integers(0, 2**20),
    st.integers(1, 3),
    st.integers(1, 4),
)
@examples(15)
def test_no_delay_of_a_dataset_or_a_transform_changes_a_byte(
    world: World, seed: int, loaders: int, workers: int
) -> None:
    rng = random.Random(seed)

    def tardy(row: dict[str, Any]) -> dict[str, Any]:
        spin(rng)
        return row

    with folder() as directory:
        quick = world.job(directory)
        slow = world.job(
            directory,
            sources=[
                ov.Source(
                    s.name,
                    Tardy(s.uri.rows, seed + i),
                    transforms=[ov.Map(tardy, rows=True), *s.transforms],
                    weight=s.weight,
                    epochs=s.epochs,
                    shuffle=s.shuffle,
                )
                for i, s in enumerate(quick.sources)
            ],
        )
        a, failed, _, _ = run(quick, prefetch=2)
        b, again, _, _ = run(slow, loaders={"s0": loaders}, workers=workers)
        n = len(a[0])
        assert type(failed) is type(again)
        assert [s.plan_digest for s in a[0]] == [s.plan_digest for s in b[0]]
        assert delivered(a, n) == delivered(b, n)
        assert fingerprint(a) == fingerprint(b)
