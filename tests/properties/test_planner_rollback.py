"""A planner that begins again behind a step it had passed plans the same steps: whatever was said
meanwhile, and however late.

A planner and its loaders are driven by hand. At random moments the planner is replaced by one at
the state behind the last step that all ranks took, and its loaders begin again there. Plans,
states, quarantine, counts and the end must be those of the run that nobody disturbed.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import overlord as ov
from overlord.cluster.plan_router import PlanHistory
from overlord.dryrun.virtual_run import Add
from overlord.errors import PlanError
from overlord.mesh import Batch, ClientPlaceTree
from overlord.messages.control import (
    STRIDE,
    AddSource,
    Attach,
    Consumed,
    Cursor,
    EndOfJob,
    PlannedStep,
    Refill,
    Report,
    RestartLoader,
    SetMixture,
    Skip,
)
from overlord.messages.data import Announce, Pop
from overlord.planning.mixture import with_every_weight
from overlord.planning.planner import Planner
from overlord.planning.spec import NewSource, PlannerSpec, SourceSpec, initial_state
from overlord.planning.strategies import resolve
from overlord.session.local_runtime import LocalRuntime
from overlord.setup.prepared_job import Options, PreparedJob, schedule_of
from tests.internals import acked_steps, completed_state, end_planner, source_of_loader
from tests.laws import examples
from tests.properties.test_combined import LAG, Scene, plain, scenes
from tests.properties.test_cores import Nowhere, outcome_of
from tests.properties.test_feedback import trainer
from tests.worlds import World, folder, worlds

RANKS = 2


class Drive:
    """A planner, its loaders, ranks that take steps and report, and a queue between any two."""

    def __init__(self, job: ov.Job, seed: int, *, backs: int, prefetch: int, salt: int = 0):
        self.first = self.blueprint = PreparedJob(
            job, Options(prefetch=prefetch, loaders=dict.fromkeys(job.names, 1 + salt % 2))
        )
        self.planner = self.blueprint.planner()
        self.past = PlanHistory(self.planner.state(), job.feedback_lag)
        host = LocalRuntime(self.blueprint, Nowhere(), None)
        self.loaders, self.readers = (
            host.loaders,
            [hosted.reader for hosted in host.loading.slots.values()],
        )
        self.queues: list[deque[Any]] = [deque() for _ in self.loaders]
        self.stages: dict[int, tuple[str, bool]] = {}
        self.states: dict[int, Any] = {}
        self.steps: list[int] = []  # to be delivered
        self.taken = [-1] * RANKS
        self.finish: EndOfJob | None = None
        self.backs, self.base, self.replanned = backs, 0, 0
        self.random, self.say = random.Random(seed), trainer(salt)
        self.prefetch = prefetch

    def run(self, said: list[Any]) -> Drive:
        skips = any(isinstance(e, Skip) for e in said)
        todo = list(said)
        for rank in range(RANKS):
            self.do(self.planner.handle(Attach(rank)) if not todo else [])
        for _ in range(200_000):
            while todo and (skips or _first(todo[0]) <= self.planner.open_step + self.prefetch + 1):
                self._say(todo.pop(0))
            for rank in range(RANKS):
                if rank not in acked_steps(self.planner):
                    self.do(self.planner.handle(Attach(rank)))
            if self.finish is not None and not any(self._next(r) is not None for r in range(RANKS)):
                return self
            moves: list[Any] = [q for q in self.queues if q] + [
                r for r in range(RANKS) if self._next(r) is not None
            ]
            assert moves, f"nothing moves any more: {self.planner.waiting_for()}"
            if self.backs and self.random.random() < 0.02:
                self.go_back()
                continue
            if self.random.random() < 0.1:
                self._report_late()
            move = self.random.choice(moves)
            if isinstance(move, int):
                self._take(move)
            else:
                self.move(move.popleft())
            self.planner.check()
        raise AssertionError("no end")

    def go_back(self) -> None:
        self.backs -= 1
        old, self.base = self.planner, self.base + STRIDE
        state = self.past.rollback(old.spec.names)
        schedule = schedule_of(self.first.job, self.first.added)
        spec = replace(old.spec, schedule=schedule, prefer=getattr(schedule, "prefer", None))
        self.planner = Planner(
            spec, state, generation=self.base, floor=max(old.floor, old.next_step)
        )
        self.replanned += old.next_step - state.step
        cursors = [Cursor(*c) for c in state.cursors.tolist()]
        for number, loader in enumerate(self.loaders):
            self.loaders[number] = loader.restarted(
                cursors[source_of_loader(self.planner, number)], self.base
            )
            # What a loader of before said is still on its way; what it had begun leads to nothing.
            self.queues[number] = deque(m for m in self.queues[number] if isinstance(m, Announce))
        self.finish = None
        self.do(self.planner.adopt(old))

    def _say(self, what: Any) -> None:
        if isinstance(what, Add):
            more = self.blueprint.with_source(what.source, what.loaders)
            made = more.new_source(what.at)
            if self.planner.ended is not None:
                with pytest.raises(PlanError, match="the job ends"):
                    self.planner.handle(made)
                return
            commands = self.planner.handle(made)
            self.blueprint = more
            for loader, reader in more.loaders_for(len(more.job.sources) - 1, Cursor()):
                self.loaders.append(loader)
                self.readers.append(reader)
                self.queues.append(deque())
            what = made.event
        else:
            what = (
                with_every_weight(what, self.planner.spec.names)
                if isinstance(what, SetMixture)
                else what
            )
            commands = self.planner.handle(what)
        if self.planner.ended is None or any(isinstance(c, EndOfJob) for c in commands):
            self.past.applied(what)
        self.do(commands)

    def _next(self, rank: int) -> int | None:
        return next((s for s in self.steps if s > self.taken[rank]), None)

    def _take(self, rank: int) -> None:
        step = self._next(rank)
        assert step is not None
        self.taken[rank] = step
        if (metrics := self.say(rank, step)) is not None:
            self._report(Report(step, rank, metrics))
        self.do(self.planner.handle(Consumed(rank, step)))
        assert self.planner.taken is not None
        self.past.taken(self.planner.taken)

    def _report(self, report: Report) -> None:
        if self.planner.in_time(report):
            self.past.reported(report)
        self.planner.handle(report)

    def _report_late(self) -> None:
        """Of a step whose using plan was made already, once or twice: it must be refused."""
        if (step := max(self.planner.next_step, self.planner.floor) - 1 - LAG) >= 0:
            report = Report(
                step - self.random.randrange(2),
                self.random.randrange(RANKS),
                {"loss/s0": 99.0, "loss/s1": -5.0},
            )
            assert not self.planner.in_time(report)
            self._report(report)

    def move(self, message: Any) -> None:
        if isinstance(message, Announce):
            self.do(self.planner.handle(message))
        else:
            number, what = message
            for command in self.loaders[number].handle(what):
                said = (
                    command
                    if isinstance(command, Announce)
                    else (number, outcome_of(self.readers[number], command))
                )
                self.queues[number].append(said)

    def do(self, commands: list[Any]) -> None:
        for command in commands:
            match command:
                case Refill(loader=number):
                    self.queues[number].append((number, command))
                case PlannedStep(plan=plan, pops=pops, skipped=skipped):
                    first = self.past.planned(command)
                    assert first == (plan.step not in self.stages)
                    if first and not skipped:
                        self.steps.append(plan.step)
                    self.stages[plan.step] = (command.digest, skipped)
                    self.states[plan.step] = plain(
                        self.blueprint.export(
                            completed_state(self.past, command.after, self.blueprint.job.names)
                        )
                    )
                    for number in pops.nonzero()[0].tolist():
                        self.queues[number].append((number, Pop(plan.step, int(pops[number]))))
                case EndOfJob():
                    self.finish = command
                case RestartLoader():
                    raise AssertionError("nobody reopens here")

    @property
    def outcome(self) -> tuple[Any, ...]:
        assert self.finish is not None
        error = self.finish.error
        ledger = self.planner.ledger
        counts = {name: c.tolist() for name, c in ledger.counts().items()}
        return (
            self.stages,
            self.steps,
            (self.finish.step, type(error), str(error)),
            ledger.bad_rows(),
            counts,
            self.states,
        )


def _first(said: Any) -> int:
    return min(said.steps) if isinstance(said, Skip) else said.at


def assert_the_same(
    job: ov.Job, said: list[Any], seed: int, backs: int, prefetch: int, salt: int
) -> None:
    whole = Drive(job, seed, backs=0, prefetch=prefetch, salt=salt).run(said)
    again = Drive(job, seed + 1, backs=backs, prefetch=prefetch, salt=salt).run(said)
    for one, other in zip(again.outcome, whole.outcome, strict=True):
        assert one == other
    event(f"steps planned again: {min(again.replanned, 12)}")


@given(worlds(), st.integers(0, 2**20), st.integers(1, 6), st.integers(1, 5))
@examples(40)
def test_a_planner_that_begins_again_plans_what_was_planned(
    world: World, seed: int, backs: int, prefetch: int
) -> None:
    with folder() as directory:
        assert_the_same(world.job(directory), [], seed, backs, prefetch, seed)


@given(scenes(), st.integers(1, 6), st.integers(1, LAG - 2))
@examples(40)
def test_also_in_a_job_that_uses_everything(scene: Scene, backs: int, prefetch: int) -> None:
    with folder() as directory:
        job, _, said = scene.job(directory)
        assert_the_same(job, sorted(said, key=_first), scene.salt, backs, prefetch, scene.salt)


# the planner alone


def spec(**fields: Any) -> PlannerSpec:
    source = SourceSpec(name="a", n_groups=1, epochs=1, max_bad=9)
    return PlannerSpec(
        sources=(source,),
        batch=Batch(samples=2, context=8),
        place=ClientPlaceTree(),
        strategy=resolve("vanilla"),
        prefetch=9,
        **({"schedule": {"a": 1.0}} | fields),
    )


def test_steps_that_were_planned_once_are_closed_to_events() -> None:
    planner = Planner(spec(), generation=STRIDE, floor=5)
    assert planner.open_step == 5
    with pytest.raises(PlanError, match="expected step 5 or a later one for an event, got step 4"):
        planner.handle(SetMixture(4, {"a": 2.0}))
    planner.handle(SetMixture(5, {"a": 2.0}))
    with pytest.raises(PlanError, match="got step 4, which is planned already"):
        planner.handle(
            NewSource(
                event=AddSource(4, "b", ""),
                source=SourceSpec(name="b", n_groups=1, epochs=1, max_bad=9),
            )
        )


def test_and_to_reports() -> None:
    def learned(step: int, feedback: Any) -> dict[str, float]:
        return {"a": 1.0}

    made = spec(schedule=learned, takes_feedback=True, feedback_lag=4)
    planner = Planner(made, replace(initial_state(made), step=10), generation=STRIDE, floor=15)
    late, used = Report(10, 0, {"loss/a": 1.0}), Report(11, 0, {"loss/a": 1.0})
    assert [planner.in_time(late), planner.in_time(used)] == [False, True], (
        "plan 14 was made without the one, plan 15 was not made"
    )
    planner.handle(late)
    planner.handle(used)
    assert planner.feedback["late"] == planner.feedback["pending"] == 1


def test_after_the_end_was_found_no_source_joins_and_no_mixture_moves_the_end() -> None:
    old = Planner(spec(until=0))
    assert isinstance(old.handle(Attach(0))[0], EndOfJob)
    new = Planner(spec(until=0), generation=STRIDE)
    end_planner(new, old.finished)
    with pytest.raises(PlanError, match="the job ends before step 0"):
        new.handle(
            NewSource(
                event=AddSource(1, "b", ""),
                source=SourceSpec(name="b", n_groups=1, epochs=1, max_bad=9),
            )
        )
    new.handle(SetMixture(3, {"a": 2.0}))
    assert new.state().events == ()


def test_one_who_cannot_go_on_ends_the_job_at_the_same_step_again() -> None:
    old = Planner(spec())
    old.handle(Attach(0))
    error = ValueError("no")
    assert old.handle(EndOfJob(3, error)) == [EndOfJob(3, error)]
    new = Planner(
        replace(spec(), sources=old.spec.sources),
        replace(old.state(), step=3),
        generation=STRIDE,
        floor=3,
    )
    assert new.adopt(old) == [EndOfJob(3, error)]


def test_a_strategy_that_is_no_function_is_reported() -> None:
    made = [
        ov.Source.from_dataset("a", [{"tokens": [k]} for k in range(40)], transforms=[ov.Tokens()])
    ]
    asked: list[int] = []

    def moody(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        asked.append(buffer.step)
        plan = resolve("vanilla")(buffer, place)
        main = plan.main
        turned = replace(main, bucket=1 - main.bucket) if asked.count(buffer.step) > 1 else main
        return replace(plan, modules={"backbone": turned})

    job = ov.Job(
        name="moody",
        sources=made,
        batch=ov.Batch(samples=4, context=8),
        place=ov.ClientPlaceTree(dp=2),
        strategy=moody,
    )
    drive = Drive(job, 3, backs=0, prefetch=4)
    for rank in range(RANKS):
        drive.do(drive.planner.handle(Attach(rank)))
    while len(drive.stages) < 3:
        drive.move(next(q for q in drive.queues if q).popleft())
    drive.go_back()

    def go_on() -> None:
        for _ in range(1000):
            drive.move(next(q for q in drive.queues if q).popleft())

    with pytest.raises(
        PlanError,
        match="step 0: the step was planned again after a worker was lost: expected the first plan",
    ):
        go_on()
