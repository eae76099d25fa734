"""The constructor core when everything may come twice: whatever is planned, staged, ended and
resumed again, every rank gets every step once and in order, and in the end nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from overlord.constructor.assembler import Assembler
from overlord.errors import ActorLost
from overlord.messages.control import Attach, Consumed, EndOfJob, PlannedStep, Rollback
from overlord.messages.data import Build, Built, Deliver, EndRank, PayloadReady, Release, Unfinish
from tests.internals import has_step
from tests.laws import examples

BUCKET = 4


def stage(step: int, skipped: bool) -> PlannedStep:
    return PlannedStep(
        plan=SimpleNamespace(step=step), pops=None, doc=None, digest="", after=None, skipped=skipped
    )  # type: ignore[arg-type]


class Job:
    """One assembler in the middle of a job of ``n`` steps: a planner that goes back, payload that
    comes in any order, builds that fail.
    """

    def __init__(
        self, ranks: int, n: int, skipped: set[int], took_before: list[int], build_ahead: int
    ):
        self.assembler, self.n, self.skipped = (
            Assembler(BUCKET, range(ranks), build_ahead),
            n,
            skipped,
        )
        # Some ranks may have steps of a process of before: they go on where they were, and planning
        # begins behind the last all had.
        self.taken = {rank: took_before[rank % len(took_before)] for rank in range(ranks)}
        self.got = {
            rank: [s for s in range(last + 1) if s not in skipped]
            for rank, last in self.taken.items()
        }
        self.next = self.floor = min(self.taken.values()) + 1
        self.expected, self.complete = set[int](), set[int]()
        self.held, self.building = set[int](), list[int]()
        self.over: int | None = None
        self.ended = set[int]()
        for rank in range(ranks):
            self.tell(Attach(rank))
            self.tell(Consumed(rank, self.taken[rank]))

    def tell(self, event: Any) -> None:
        for command in self.assembler.handle(event):
            match command:
                case Build(step=step, bucket=4):
                    assert step in self.held, "built without payload"
                    assert step not in self.building, "built twice at a time"
                    self.building.append(step)
                case Deliver(step=step, rank=rank):
                    assert step in self.held
                    assert step not in self.building
                    assert step == self._due(rank), "out of order, twice, or one was left out"
                    assert self.over is None or step < self.over
                    self.got[rank].append(step)
                case Release(step=step, bucket=4):
                    assert step not in self.building, "released while it is being built"
                    self.held.discard(step)
                case EndRank(rank=rank):
                    assert self.over is not None
                    assert self._due(rank) >= self.over, "ended before its last step"
                    assert rank not in self.ended, "ended twice"
                    self.ended.add(rank)
                case Unfinish(rank=rank):
                    self.ended.remove(rank)
                case _:
                    raise AssertionError(command)
        self.assembler.check()

    def _due(self, rank: int) -> int:
        """The next step that a rank must be delivered."""
        return next(
            (
                s
                for s in range(self.n)
                if s not in self.skipped and s > max(self.got[rank], default=-1)
            ),
            self.n,
        )

    # what may happen

    def plan(self, pick: int) -> None:
        """The next step; perhaps one of before again, which nobody minds."""
        if self.next < self.n and (self.over is None or self.next < self.over):
            self._plan(self.next)
            self.next += 1
        elif self.next > self.floor and pick % 3 == 0:
            self._plan(self.floor + pick % (self.next - self.floor))

    def _plan(self, step: int) -> None:
        # Whoever gathers payload knows what is here, and tells nobody of a step behind the end: it
        # comes again when the end is undone.
        if step not in self.complete | self.expected and (self.over is None or step < self.over):
            self.tell(stage(step, step in self.skipped))
            if step not in self.skipped:
                self.expected.add(step)

    def payload(self, pick: int) -> None:
        """Of a step that waits for it; perhaps of one that has it."""
        if self.expected:
            step = sorted(self.expected)[pick % len(self.expected)]
            self.expected.discard(step)
            self.complete.add(step)
            self._stage(step)
        elif self.complete and pick % 3 == 0:
            step = sorted(self.complete)[pick % len(self.complete)]
            if has_step(self.assembler, step):
                self._stage(step)

    def _stage(self, step: int) -> None:
        if self.assembler.needs_payload(step):
            self.held.add(step)
            self.tell(PayloadReady(step))

    def built(self, pick: int) -> None:
        if self.building:
            self.tell(Built(self.building.pop(pick % len(self.building))))

    def fail(self, pick: int) -> None:
        """A step cannot be built, and the job ends there, unless the planner goes back first."""
        if self.building:
            step = self.building.pop(pick % len(self.building))
            self.assembler.mark_failed(step)
            self.held.discard(step)
            self.complete.discard(step)
            if pick % 2:
                self.finish(step)
            else:
                self.back(pick)

    def take(self, pick: int) -> None:
        ready = [
            rank for rank in self.got if self.got[rank] and self.got[rank][-1] > self.taken[rank]
        ]
        if ready:
            rank = ready[pick % len(ready)]
            self.taken[rank] = next(s for s in self.got[rank] if s > self.taken[rank])
            self.tell(Consumed(rank, self.taken[rank]))
            if pick % 4 == 0:
                self.tell(Consumed(rank, self.taken[rank] - 1))  # again, and late

    def fault(self, pick: int) -> None:
        """The job ends early, as when a part is lost for good."""
        first = max([self.floor, *(max(got, default=-1) + 1 for got in self.got.values())])
        if first <= self.next:
            self.finish(first + pick % (self.next - first + 1))

    def finish(self, step: int) -> None:
        self.over = step if self.over is None else min(step, self.over)
        self.complete = {s for s in self.complete if s < self.over}
        self.expected = {s for s in self.expected if s < self.over}
        self.tell(
            EndOfJob(self.over, ActorLost("loader-worker/3", "killed") if step < self.n else None)
        )

    def back(self, pick: int) -> None:
        """To the last step that all have taken; what is complete stays so, and the end is found
        again.
        """
        last = min(self.taken.values())
        self.over, self.next = None, last + 1
        self.expected.clear()
        self.tell(Rollback(2**20, last))

    def play_out(self) -> None:
        """No faults any more: the job must come to its end."""
        self.back(0)
        for _ in range(20 * self.n):
            for act in (self.plan, self.payload, self.built, self.take):
                act(1)
            if self.next == self.n and self.over is None:
                self.finish(self.n)


ACTS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 11)), max_size=120)


@given(
    st.integers(1, 3),
    st.integers(1, 10),
    st.sets(st.integers(0, 9), max_size=3),
    st.lists(st.integers(-1, 4), min_size=1, max_size=3),
    st.integers(1, 3),
    ACTS,
)
@examples(600)
@example(1, 1, set(), [-1], 1, [(0, 0), (18, 0), (0, 0), (4, 0)])  # planned again behind an end
def test_whatever_comes_again_every_rank_gets_every_step_once_in_order_and_nothing_is_held(
    ranks: int,
    n: int,
    skipped: set[int],
    took_before: list[int],
    build_ahead: int,
    acts: list[tuple[int, int]],
) -> None:
    real = [-1, *(s for s in range(n) if s not in skipped)]
    took_before = [max(s for s in real if s <= last) for last in took_before]
    job = Job(ranks, n, skipped, took_before, build_ahead)
    moves: list[Callable[[int], None]] = (
        [job.plan] * 4 + [job.payload] * 4 + [job.built] * 3 + [job.take] * 4
    )
    moves += [job.back] * 2 + [job.fail, job.fault]
    for act, pick in acts:
        moves[act % len(moves)](pick)
    job.play_out()
    wanted = real[1:]
    assert job.got == dict.fromkeys(range(ranks), wanted)
    assert job.ended == set(range(ranks))
    assert (job.held, job.building) == (set(), [])
    assert job.assembler.waiting() == ""
