"""Feedback and sources that join: laws of the stream. What trainers say, and not when they say it,
decides what is drawn.
"""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.dryrun.virtual_run import Add, Run
from overlord.messages.control import Report, SetMixture, Skip
from overlord.planning.mixture import reduce_reports
from overlord.planning.schedule import bind
from tests.laws import examples
from tests.properties.test_stream import delivered, fingerprint
from tests.reference import reference_stream
from tests.worlds import World, folder, worlds


class Chaser:
    """A schedule that learns from whatever it is told: the worst source so far gets the most."""

    def __init__(self, names: tuple[str, ...]):
        self.names, self.seen, self.calls = names, dict.fromkeys(names, 1.0), 0

    def __call__(self, step: int, feedback: Any) -> dict[str, float]:
        assert step == self.calls, "called out of turn"
        self.calls += 1
        for name in self.names:
            self.seen[name] = (
                self.seen[name] / 2
                + feedback.get(f"loss/{name}", 0.25)
                + feedback.get("lr", 0.0) * step
            )
        return dict(self.seen)

    def __repr__(self) -> str:
        return f"Chaser({self.names})"

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": self.seen,
            "calls": self.calls,
        }  # not a copy: a state must not change with it

    def load_state_dict(self, state: Any) -> None:
        self.seen, self.calls = dict(state["seen"]), state["calls"]


def schedule(kind: str, names: tuple[str, ...]) -> Any:
    return (
        Chaser(names) if kind == "chaser" else ov.schedule.odm(warmup=1)
    )  # which begins with the sources' own weights


def trainer(salt: int) -> Any:
    """(rank, step) -> metrics, the same every time: some ranks say nothing, some leave sources out,
    some say how many tokens.
    """

    def say(rank: int, step: int) -> dict[str, float] | None:
        x = hash((salt, rank, step)) & 0xFFFF
        if x % 7 == 0:
            return None
        said = {f"loss/s{i}": (x % (17 + i)) / 4 for i in range(4) if x >> i & 1}
        if x % 3:
            said |= {f"tokens/s{i}": float(x % 5 * 10) for i in range(4)}
        return said | {"lr": 0.125}

    return say


def learning(world: World, directory: str, kind: str, **changes: Any) -> ov.Job:
    made = world.job(directory, **changes)
    return replace(made, mixture=schedule(kind, made.names))


def digests(run: Run) -> list[tuple[int, str]]:
    return [(s.step, s.plan_digest) for s in run.steps[0]]


def wanted(job: ov.Job, **said: Any) -> tuple[list[Any], bool]:
    """The reference's steps, and whether it breaks behind them."""
    steps: list[Any] = []
    try:
        for step in reference_stream(job, **said):
            steps.append(step)
    except ValueError:
        return steps, True
    return steps, False


def some(run: Run) -> list[tuple[int, ov.Step]]:
    """Places to restore a run at: all of a short one, the first and a few more of a long one."""
    steps = list(enumerate(run.steps[0]))
    return steps[:8] + steps[8 :: max(1, len(steps) // 4)]


KINDS = st.sampled_from(("chaser", "odm"))


@given(worlds(), KINDS, st.integers(0, 2**20), st.integers(3, 9))
@examples(30)
def test_a_stream_with_feedback_equals_the_reference(
    world: World, kind: str, salt: int, lag: int
) -> None:
    with folder() as directory:
        job = learning(world, directory, kind, feedback_lag=lag)
        say = trainer(salt)
        got = ov.simulate(job, seed=salt, report=say, prefetch=lag - 2, check=True)
        assert got.feedback["late"] == 0
        n = len(got.steps[0])
        reports = {
            s: {r: said for r in range(job.place.world_size) if (said := say(r, s)) is not None}
            for s in range(n)
        }
        bound = replace(job, mixture=bind(job.mixture, {s.name: s.weight for s in job.sources}, {}))
        steps, broken = wanted(bound, reports=reports)
        assert (got.error is not None) == broken, got.error
        assert delivered(got.steps, n) == steps


@given(
    worlds(),
    KINDS,
    st.sampled_from(("step", "epoch")),
    st.integers(0, 2**20),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=2, max_size=3),
)
@examples(20)
def test_neither_timing_nor_prefetch_decides_what_a_schedule_knew(
    world: World, kind: str, mix_every: str, salt: int, ways: list[tuple[int, int]]
) -> None:
    with folder() as directory:
        job = learning(world, directory, kind, feedback_lag=7, mix_every=mix_every)
        prints = set()
        for k, (prefetch, loaders) in enumerate(ways):
            run = ov.simulate(
                job,
                seed=salt + k,
                report=trainer(salt),
                prefetch=prefetch,
                loaders={"s0": loaders},
                check=True,
            )
            prints.add((fingerprint(run.steps), type(run.error)))
            assert run.feedback["late"] == 0
        assert len(prints) == 1


EVENTS = st.lists(
    st.one_of(
        st.builds(lambda at, w: SetMixture(at, {"s0": w}), st.integers(0, 6), st.floats(0.5, 4.0)),
        st.builds(
            lambda steps: Skip(tuple(steps)), st.lists(st.integers(0, 6), min_size=1, max_size=3)
        ),
    ),
    max_size=3,
)


@given(
    worlds(),
    KINDS,
    st.sampled_from(("step", "microbatch", "epoch")),
    st.integers(0, 2**20),
    st.integers(3, 8),
    EVENTS,
)
@examples(15)
def test_restored_at_every_step_a_run_with_feedback_goes_on_identically(
    world: World, kind: str, mix_every: str, salt: int, lag: int, events: list[Any]
) -> None:
    with folder() as directory:
        job = learning(world, directory, kind, feedback_lag=lag, mix_every=mix_every)
        whole = ov.simulate(
            job,
            seed=salt,
            report=trainer(salt),
            prefetch=lag - 2,
            events=events,
            save=True,
            check=True,
        )
        for k, step in some(whole):
            state = json.loads(json.dumps(whole.states[step.step]))
            options: dict[str, Any] = {
                "report": trainer(salt),
                "prefetch": 1 + salt % (lag - 2),
                "check": True,
            }
            again = ov.simulate(job, seed=salt + k, resume=state, save=k == 1, **options)
            assert digests(again) == digests(whole)[k + 1 :], f"restored after step {step.step}"
            assert type(again.error) is type(whole.error)
            for j, saved in enumerate(
                list(again.states.values())[:3]
            ):  # a state of a run that was itself restored
                third = ov.simulate(job, seed=salt, resume=json.loads(json.dumps(saved)), **options)
                assert digests(third) == digests(again)[j + 1 :]


@given(worlds(), KINDS, st.integers(0, 2**20))
@examples(8)
def test_a_checkpoint_of_the_local_runtime_holds_what_was_reported(
    world: World, kind: str, salt: int
) -> None:
    """The loop people write: take a step, train, report, save; and after a crash the reports of the
    rest again.
    """
    say = trainer(salt)
    with folder() as directory:
        job = learning(world, directory, kind, place=ov.ClientPlaceTree(dp=1), feedback_lag=4)

        def run(resume: Any = None) -> list[tuple[str, Any]]:
            with ov.launch(job, resume=resume, prefetch=2, check=True) as session:
                client, out = session.client(0), []
                try:
                    for step in client:
                        if (said := say(0, step.step)) is not None:
                            client.report(step.step, said)
                        out.append((step.plan_digest, json.loads(json.dumps(client.state_dict()))))
                except ov.OverlordError as error:
                    out.append((str(error), None))
                assert session.metrics()["feedback"]["late"] == 0
                return out

        whole = run()
        for k in range(0, len(whole) - 1, 2):
            assert whole[k][1] is not None
            assert run(whole[k][1]) == whole[k + 1 :], f"restored after step {k}"


@given(
    st.dictionaries(
        st.integers(0, 9),
        st.dictionaries(
            st.sampled_from(("loss/a", "loss/b", "tokens/a", "tokens/b", "lr")),
            st.floats(0, 1e6, allow_subnormal=False),
            min_size=1,
        ),
        min_size=1,
    ),
    st.randoms(),
)
def test_reports_of_several_ranks_are_averaged_by_tokens_whoever_came_first(
    ranks: dict[int, dict[str, float]], random: Any
) -> None:
    reports = [Report(3, rank, metrics) for rank, metrics in ranks.items()]
    random.shuffle(reports)
    got = reduce_reports(reports)
    assert got == reduce_reports(sorted(reports, key=lambda r: r.rank))
    for name, value in got.items():
        mine = [m for m in ranks.values() if name in m]
        if name.startswith("tokens/"):
            exact = sum(Fraction(m[name]) for m in mine)
        else:
            by = f"tokens/{name[5:]}" if "/" in name else ""
            shares = [
                Fraction(m.get(by, 0)) if all(by in m for m in mine) else Fraction(1) for m in mine
            ]
            shares = shares if sum(shares) else [Fraction(1)] * len(mine)
            exact = sum(Fraction(m[name]) * s for m, s in zip(mine, shares, strict=True)) / sum(
                shares
            )
        assert abs(Fraction(value) - exact) <= abs(exact) / 2**40


# Sources that join


def grown(world: World) -> World:
    """The world with one more source, which is not there from the start."""
    return replace(world, sources=(*world.sources, ("jsonl", 25, 2, 0.75, 2, True, "even")))


@given(
    worlds(),
    st.integers(0, 2**20),
    st.integers(0, 6),
    st.integers(1, 3),
    st.sampled_from((None, "mapping", "function")),
)
@examples(25)
def test_a_source_that_joins_equals_the_reference_and_one_that_weighed_nothing_before(
    world: World, seed: int, at: int, loaders: int, kind: str | None
) -> None:
    with folder() as directory:
        all_of_it = grown(world).job(directory)
        *others, last = all_of_it.sources
        weights = {s.name: s.weight for s in others}
        mixture: Any = {
            None: None,
            "mapping": weights,
            "function": lambda step, feedback: list(weights.values()),
        }[kind]
        by_name = weights if kind else None
        job = replace(all_of_it, sources=others, mixture=mixture)
        got = ov.simulate(job, seed=seed, events=[Add(last, at, loaders)], check=True)
        n = len(got.steps[0])
        steps, broken = wanted(replace(all_of_it, mixture=by_name), joins={last.name: at})
        assert (got.error is not None) == broken, got.error
        assert delivered(got.steps, n) == steps

        def listed_from_the_start(step: int, feedback: Any) -> dict[str, float]:
            return {**weights, last.name: last.weight if step >= at else 0.0}

        other = ov.simulate(
            replace(all_of_it, mixture=listed_from_the_start), seed=seed + 1, check=True
        )
        assert delivered(other.steps, len(other.steps[0])) == delivered(got.steps, n)


@given(
    worlds(),
    KINDS,
    st.sampled_from(("step", "microbatch", "epoch")),
    st.integers(0, 2**20),
    st.integers(0, 6),
    EVENTS,
    EVENTS,
)
@examples(15)
def test_restored_at_every_step_a_run_with_a_source_that_joined_goes_on_identically(
    world: World, kind: str, mix_every: str, salt: int, at: int, before: list[Any], after: list[Any]
) -> None:
    with folder() as directory:
        *others, last = grown(world).job(directory).sources
        names = tuple(s.name for s in others)
        mixture = schedule(kind, names) if salt % 2 else None
        job = world.job(directory, sources=others, mixture=mixture, mix_every=mix_every)
        whole = ov.simulate(
            job,
            seed=salt,
            report=trainer(salt),
            events=[*before, Add(last, at), *after],
            save=True,
            check=True,
        )
        wider = replace(job, sources=[*others, last])
        for k, step in some(whole):
            state = json.loads(json.dumps(whole.states[step.step]))
            again = ov.simulate(
                wider,
                seed=salt + k,
                resume=state,
                report=trainer(salt),
                loaders={last.name: 2},
                check=True,
            )
            assert digests(again) == digests(whole)[k + 1 :], f"restored after step {step.step}"
            assert type(again.error) is type(whole.error)
