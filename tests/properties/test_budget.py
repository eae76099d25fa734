"""What is held is bounded: samples ready beyond the draw, planned steps, and everything else that
lives as long as a job.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.dryrun.virtual_run import Delays, VirtualExecutor
from overlord.loader.reader import SourceReader
from overlord.messages.control import PlannedStep, Refill
from overlord.messages.data import Evaluate, Pop, Read, StepInfo
from overlord.session.local_runtime import Done, LocalRuntime
from overlord.setup.prepared_job import Options, PreparedJob
from tests.internals import (
    acked_steps,
    collection_sizes,
    planned_and_built,
    unpopped_bytes,
    waits_for_samples,
)
from tests.laws import examples
from tests.worlds import Rows


class Seen:
    """A reader under a name of its own for each loader; remembers the largest block it gave."""

    def __init__(self, reader: SourceReader, number: int):
        self._reader, self.stats, self.order, self.largest = (
            reader,
            reader.stats,
            SimpleNamespace(name=str(number)),
            0,
        )
        self.chunks = reader.chunks

    def read(self, command: Read) -> Any:
        return self._reader.read(command)

    def read_on(self, command: Read) -> Any:
        outcome = self._reader.read_on(command)
        if isinstance(outcome, tuple):
            self.largest = max(self.largest, *(block.nbytes for _, block in outcome[0].windows))
        return outcome

    def evaluate(self, command: Evaluate) -> Any:
        evaluated, tokens = self._reader.evaluate(command)
        self.largest = max(self.largest, tokens.nbytes)
        return evaluated, tokens


class Watched(VirtualExecutor):
    """Tells of every block that is asked for without need."""

    ahead: Callable[[int], None] = staticmethod(lambda loader: None)

    def submit(
        self,
        name: str,
        work: Callable[[], Any],
        done: Done,
        *,
        size: int = 1,
        urgent: bool = False,
        waits: bool = False,
    ) -> None:
        kind, _, number = name.partition(" ")
        if not urgent and kind in ("read", "evaluate"):
            self.ahead(int(number))
        super().submit(name, work, done, size=size, urgent=urgent)


class Rank:
    """A client that takes what it is given, slowly: loaders have all the time to read ahead."""

    def __init__(self, executor: VirtualExecutor, host: LocalRuntime, rank: int):
        self.executor, self.host, self.rank, self.ended = executor, host, rank, False

    def put(self, told: StepInfo, bucket: Any) -> None:
        self.executor.call_later(
            self.executor.delay(2.0), lambda: self.host.consumed([self.rank], told.step)
        )

    def end(self, error: Exception | None) -> None:
        assert error is None, error
        self.ended = True


class Held:
    """A job on the virtual clock, looked at from outside."""

    def __init__(self, job: ov.Job, seed: int, **options: Any):
        self.blueprint = PreparedJob(job, Options(**options))
        self.executor = Watched(seed, Delays(sigma=1.5))
        self.host = LocalRuntime(self.blueprint, self.executor)
        self.seen = [Seen(hosted.reader, k) for k, hosted in self.host.loading.slots.items()]
        for hosted, seen in zip(self.host.loading.slots.values(), self.seen, strict=True):
            hosted.reader = seen  # type: ignore[assignment]
        self.ranks = [Rank(self.executor, self.host, r) for r in range(job.place.world_size)]

    def run(self, look: Callable[[], None] = lambda: None) -> None:
        self.host.attach({r.rank: r for r in self.ranks})
        while not all(r.ended for r in self.ranks):
            assert self.executor.step(), f"it stands still: {self.host.waiting_for(0)}"
            look()
        self.blueprint.close()

    def bytes_of(self, loader: int) -> int:
        return unpopped_bytes(self.host.loading.slots[loader].buffer)

    @property
    def ready(self) -> int:
        return sum(unpopped_bytes(hosted.buffer) for hosted in self.host.loading.slots.values())

    @property
    def blocks(self) -> int:
        return sum(s.largest for s in self.seen)


def job_of(
    lengths: list[int],
    sources: int,
    *,
    tokens: int | None = None,
    until: int = 25,
    rows: int = 40,
    bad: bool = False,
) -> ov.Job:
    """Endless sources of a few rows each."""
    made = []
    for i in range(sources):
        rng = random.Random(i)
        data = Rows(
            [
                {"tokens": [] if bad and k % 9 == 4 else [i + 1] * rng.choice(lengths)}
                for k in range(rows)
            ]
        )
        made.append(
            ov.Source(f"s{i}", data, transforms=[ov.Tokens("tokens")], epochs=None, weight=1.0 + i)
        )
    batch = ov.Batch(tokens=tokens, context=64) if tokens else ov.Batch(samples=12, context=64)
    return ov.Job(
        name="long",
        sources=made,
        batch=batch,
        place=ov.ClientPlaceTree(dp=2),
        until=until,
        slice_rows=5,
        shuffle_chunks=2,
    )


def every(sources: int, loaders: int) -> dict[str, int]:
    return {f"s{i}": loaders for i in range(sources)}


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3000),
    st.integers(1, 6),
    st.sampled_from([[7], [1, 8, 40]]),
    st.booleans(),
    st.integers(0, 2**20),
)
@examples(40)
def test_ready_beyond_the_draw_stays_within_the_budget_and_a_block_for_each_loader(
    sources: int,
    loaders: int,
    budget: int,
    read_ahead: int,
    lengths: list[int],
    in_tokens: bool,
    seed: int,
) -> None:
    job = job_of(lengths, sources, tokens=200 if in_tokens else None)
    held = Held(
        job, seed, loaders=every(sources, loaders), buffer_bytes=budget, read_ahead=read_ahead
    )
    share = max(1, budget // (sources * loaders))
    seen: list[int] = []
    # a draw in tokens must guess how many samples it needs, and asks every loader whose word is
    # missing
    waited_for = 0

    def ahead(loader: int) -> None:
        assert held.host.loaders[loader].ready_bytes < share, (
            "it reads ahead although its share is full"
        )
        if len(lengths) == 1:
            assert held.bytes_of(loader) == held.host.loaders[loader].ready_bytes

    def staged(stage: PlannedStep) -> None:
        nonlocal waited_for
        seen.append(held.ready)
        if in_tokens or loaders > 1:
            waited_for = max(waited_for, 2 * loaders * 8 * int(stage.plan.tokens.sum()))
        assert held.ready <= share * sources * loaders + held.blocks + waited_for

    def look() -> None:
        if not waits_for_samples(held.host.planner):
            assert held.ready <= share * sources * loaders + held.blocks + waited_for

    held.executor.ahead = ahead
    held.host.on_stage.append(staged)
    held.run(look)
    assert len(seen) == 25


def test_a_loader_that_has_given_what_was_waited_for_reads_no_more_for_it() -> None:
    held = Held(job_of([7], 1), 0)
    loader, reader = held.host.loaders[0], held.host.loading.slots[0].reader
    read, *_ = loader.handle(Refill(0, must=3, level=0))
    (evaluate,) = loader.handle(reader.read(read))
    assert len(loader.handle(reader.evaluate(evaluate)[0])) == 1  # the announcement
    assert loader.handle(Pop(0, 3)) == []


def test_without_a_budget_more_is_held_so_the_bound_above_is_one() -> None:
    most = {}
    for budget in (1, 2**30):
        held, seen = Held(job_of([7], 1), 0, buffer_bytes=budget, read_ahead=6), list[int]()
        held.host.on_stage.append(lambda stage, held=held, seen=seen: seen.append(held.ready))  # type: ignore[misc]
        held.run()
        most[budget] = max(seen) - held.blocks
    assert most[1] <= 1 < 100 < most[2**30]


def test_the_first_step_of_a_batch_in_tokens_evaluates_about_what_it_draws() -> None:
    held, evaluated = Held(job_of([20], 1, tokens=2000, until=2, rows=3000), 0), list[int]()
    held.host.on_stage.append(lambda stage: evaluated.append(held.seen[0].stats.samples))
    held.run()
    assert 100 <= evaluated[0] <= 200  # 100 samples of 20 tokens


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 2**20))
@examples(40)
def test_no_more_steps_are_planned_than_prefetch_allows(
    prefetch: int, loaders: int, seed: int
) -> None:
    held = Held(job_of([3, 9], 2), seed, prefetch=prefetch, loaders=every(2, loaders))
    planner, ahead = held.host.planner, set[int]()

    def look() -> None:
        ahead.add(planner.next_step - 1 - min(acked_steps(planner).values()))
        planned, built = planned_and_built(held.host.building)
        assert planned <= prefetch
        assert built <= prefetch * len(held.ranks)

    held.run(look)
    assert max(ahead) == prefetch


@pytest.mark.parametrize("loaders", [1, 3])
def test_nothing_grows_over_a_long_run(loaders: int) -> None:
    """The second half of 500 steps (endless sources, hundreds of epochs) holds no more than the
    first did.
    """
    held = Held(
        job_of([1, 8, 40], 3, tokens=300, until=500, rows=23, bad=True),
        1,
        loaders=every(3, loaders),
        open_files=4,
    )
    halves: list[dict[str, int]] = [{}, {}]

    def staged(stage: PlannedStep) -> None:
        half = halves[stage.plan.step >= 250]
        for name, n in collection_sizes(held.host, held.blueprint, held.executor).items():
            half[name] = max(half.get(name, 0), n)

    held.host.on_stage.append(staged)
    held.run()
    assert held.host.planner.state().cursors[:, 0].min() > 40
    # Timing is random: a maximum may move a little, growth would double it.
    grown = {
        name: (n, halves[1][name]) for name, n in halves[0].items() if halves[1][name] > 1.5 * n + 4
    }
    assert grown == {}


def test_the_list_of_quarantined_rows_is_bounded_and_all_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("overlord.planning.spec.KEPT_BAD", 50)
    held = Held(job_of([8], 1, until=400, rows=23, bad=True), 0)
    held.run()
    assert len(held.host.planner.ledger.quarantine) == 50
    assert held.host.planner.ledger.quarantined.sum() > 400


def test_a_pool_of_slabs_keeps_within_its_bytes_whatever_is_asked_for() -> None:
    from overlord.buffer_pool import BufferPool

    pool, kept = BufferPool(max_bytes=2**20), list[np.ndarray]()
    rng = random.Random(0)
    for _ in range(2000):
        kept = [*kept[-3:], pool(rng.randrange(1, 2**17))]
        assert pool.nbytes <= 2**20
        assert len({slab.__array_interface__["data"][0] for slab in kept}) == len(kept), (
            "memory in use was given out again"
        )
