"""The same stories on every runtime: the embedded one with its threads, and the simulated one on
its virtual clock.

What is delivered is compared with the reference of the stream wherever there is one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.dryrun.virtual_run import Delays
from overlord.errors import PlanError, SourceError, TransformError
from overlord.hashing import digest
from overlord.messages.control import SetMixture, Skip
from overlord.planning.strategies import llm_balance
from tests.reference import reference_stream
from tests.sizes import on_runtimes
from tests.worlds import Rows

RUNTIMES = ("local", "simulated", "process", "ray")
pytestmark = pytest.mark.timeout(200)
runtimes = pytest.mark.parametrize("runtime", RUNTIMES)


@dataclass
class Held:
    """One microbatch of one rank, copied."""

    arrays: dict[str, np.ndarray]
    samples: list[Any]
    served_by: int
    begins: list[int] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return (
            "tokens" in self.arrays
            and self.arrays["tokens"].size == self.arrays["cu_seqlens_padded"][-1]
        )

    def texts(self) -> list[Any]:
        tokens = self.arrays["tokens"] if self.arrays["tokens"].ndim == 1 else None
        rows = [
            tokens[p.offset :] if tokens is not None else self.arrays["tokens"][p.offset]
            for p in self.samples
        ]
        return [
            (tuple(p.sample), row[: p.length].tolist())
            for p, row in zip(self.samples, rows, strict=True)
        ]

    def digest(self) -> str:
        parts = [
            part
            for key, array in sorted(self.arrays.items())
            for part in (key, str(array.shape), array)
        ]
        return digest(*parts, str(self.samples), str(self.served_by), str(self.begins))


@dataclass
class Outcome:
    """What every rank got: samples with their tokens by step, and what ended it."""

    steps: dict[int, dict[int, list[Any]]] = field(default_factory=dict)
    microbatches: dict[int, dict[int, list[Held]]] = field(default_factory=dict)
    error: dict[int, BaseException | None] = field(default_factory=dict)
    quarantine: list[tuple[str, int]] = field(default_factory=list)
    plans: dict[int, ov.LoadingPlan] = field(default_factory=dict)  # of a run that was launched
    dropped: dict[str, int] = field(default_factory=dict)  # tokens by source

    def put(self, rank: int, step: ov.Step) -> None:
        held = [
            Held(
                {key: np.array(array) for key, array in mb.items()},
                mb.samples,
                step.served_by,
                mb.begins.tolist(),
            )
            for mb in step
        ]
        self.microbatches.setdefault(rank, {})[step.step] = held
        self.steps.setdefault(rank, {})[step.step] = [
            found for mb in held if mb.whole for found in mb.texts()
        ]

    def digests(self) -> dict[int, dict[int, list[str]]]:
        """Of every array of every rank, and of what it was told beside them."""
        return {
            r: {s: [mb.digest() for mb in held] for s, held in steps.items()}
            for r, steps in self.microbatches.items()
        }

    def numbers(self) -> list[list[int]]:
        return [list(self.steps.get(rank, {})) for rank in sorted(self.error)]

    def together(self) -> dict[int, list[Any]]:
        """All ranks' samples of each step, sorted: what the draw gave, wherever it was placed."""
        out: dict[int, list[Any]] = {}
        for steps in self.steps.values():
            for step, found in steps.items():
                out[step] = sorted(out.get(step, []) + found)
        return out


def run(
    runtime: str,
    job: ov.Job,
    *,
    events: Sequence[SetMixture | Skip] = (),
    slow: int | None = None,
    **options: Any,
) -> Outcome:
    options = {"prefetch": 3, "check": True, **options}
    if runtime == "simulated":
        return _simulated(job, events, slow, options)
    return _launched(job, events, slow, {"runtime": runtime, **options})


def _simulated(
    job: ov.Job, events: Sequence[Any], slow: int | None, options: Mapping[str, Any]
) -> Outcome:
    delays = Delays(slow={} if slow is None else {slow: 50.0})
    done = ov.simulate(job, seed=job.seed, events=events, delays=delays, **options)
    out = Outcome(
        error=dict.fromkeys(done.steps, done.error),
        quarantine=[(job.names[q.source], q.row) for q in done.quarantine],
    )
    for rank, steps in done.steps.items():
        for step in steps:
            out.put(rank, step)
    out.dropped = done.end_state["counts"]["lost_tokens"] if done.end_state else {}
    return out


def _launched(
    job: ov.Job, events: Sequence[Any], slow: int | None, options: Mapping[str, Any]
) -> Outcome:
    """A thread for each rank. A slow one takes a step only when the others have taken all they
    can.
    """
    out, starving = Outcome(), threading.Event()
    with ov.launch(job, stall_limit_s=60, **options) as session:
        for event in events:
            if isinstance(event, Skip):
                session.skip(event.steps)
            else:
                session.set_mixture(event.weights, at=event.at)
        clients = [session.client(r) for r in range(job.place.world_size)]

        def train(client: ov.Client) -> None:
            try:
                while True:
                    if client.rank == slow:
                        starving.wait(0.05)
                        starving.clear()
                    elif not len(client.queue):
                        starving.set()
                    out.put(client.rank, next(client))
            except StopIteration:
                out.error[client.rank] = None
            except Exception as error:
                out.error[client.rank] = error
            starving.set()

        threads = [threading.Thread(target=train, args=(c,), daemon=True) for c in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        assert len(out.error) == len(clients), "a rank never ended"
        out.quarantine = [(q["source"], q["row"]) for q in session.quarantine()]
        out.dropped = {
            name: s["dropped_tokens"] for name, s in session.metrics()["sources"].items()
        }
        out.plans = {step: session.plan(step) for step in next(iter(out.steps.values()), {})}
    return out


def rows(n: int, first: int) -> Rows:
    return Rows([{"n": first + k, "tokens": [first + k] * (1 + k % 7)} for k in range(n)])


def job(sizes: Mapping[str, int] | None = None, **changes: Any) -> ov.Job:
    sizes = sizes or {"a": 60, "b": 90, "c": 40}
    sources = [
        ov.Source(
            name, rows(n, 1000 * i), transforms=[ov.Tokens("tokens")], weight=1.0 + i, epochs=1
        )
        for i, (name, n) in enumerate(sizes.items())
    ]
    settings = {
        "name": "scenario",
        "sources": sources,
        "batch": ov.Batch(samples=10, context=32, microbatches=2),
        "place": ov.ClientPlaceTree(dp=3),
        "seed": 11,
        "slice_rows": 8,
        "shuffle_chunks": 2,
    }
    return ov.Job(**{**settings, **changes})


def wanted(made: ov.Job) -> dict[int, list[Any]]:
    return {
        k: sorted((tuple(key), list(tokens)) for key, tokens in step)
        for k, step in enumerate(reference_stream(made, []))
    }


def all_clean(out: Outcome) -> None:
    assert set(out.error.values()) == {None}, out.error
    assert len({tuple(n) for n in out.numbers()}) == 1, "every rank ends at the same step"


@runtimes
def test_long_documents_are_dropped_and_their_tokens_counted(runtime: str) -> None:
    made = job(on_long="drop", batch=ov.Batch(samples=10, context=5, microbatches=2), until=8)
    out = run(runtime, made)
    all_clean(out)
    long: dict[str, list[int]] = {}
    steps = enumerate(reference_stream(made, long=long))
    assert out.together() == {
        k: sorted((tuple(key), list(tokens)) for key, tokens in step) for k, step in steps
    }
    assert out.dropped == {name: sum(lost) for name, lost in long.items()}
    assert min(out.dropped.values()) > 20


@runtimes
def test_the_mixture_changes_in_mid_run(runtime: str) -> None:
    made = job()
    out = run(
        runtime, made, events=[SetMixture(9, {"b": 1.0, "c": 1.0}), SetMixture(4, {"a": 1.0})]
    )
    all_clean(out)

    def spoken(step: int, feedback: Any) -> dict[str, float]:
        return (
            {"a": 1.0, "b": 2.0, "c": 3.0}
            if step < 4
            else {"a": 1.0}
            if step < 9
            else {"b": 1.0, "c": 1.0}
        )

    assert out.together() == wanted(replace(made, mixture=spoken))


@runtimes
def test_a_mixture_of_an_exhausted_source_alone_ends_the_job_for_all(runtime: str) -> None:
    out = run(runtime, job({"a": 10, "b": 200}), events=[SetMixture(8, {"a": 1.0})])
    all_clean(out)
    assert out.numbers()[0] == list(range(8))


@runtimes
def test_skipped_steps_are_drawn_and_not_delivered(runtime: str) -> None:
    made = job()
    skipped = {0, 3, 4, 5, 6, 7, 8, 9, 12}  # more in a row than are prefetched
    out = run(runtime, made, events=[Skip(tuple(sorted(skipped)))])
    all_clean(out)
    assert out.together() == {k: step for k, step in wanted(made).items() if k not in skipped}


ENDS: dict[str, Any] = {"all": "all", "first": "first", "7": 7, "10000": 10_000}


@pytest.mark.parametrize(
    ("runtime", "until"), on_runtimes({"all": "all", "9": 9}, RUNTIMES, ("all",))
)
def test_the_last_steps_may_be_skipped(runtime: str, until: Any) -> None:
    out = run(runtime, job(until=until), events=[Skip(tuple(range(6, 1000)))])
    all_clean(out)
    assert out.numbers() == [list(range(6))] * 3


@pytest.mark.parametrize(("runtime", "until"), on_runtimes(ENDS, RUNTIMES, ("all",)))
def test_the_data_end(runtime: str, until: Any) -> None:
    made = job({"a": 15, "b": 70, "c": 31}, until=until)
    out = run(runtime, made)
    all_clean(out)
    assert out.together() == wanted(made)


class Shards:
    """A factory's function one of whose shards cannot be read."""

    def __call__(self, shard: int) -> Iterator[dict[str, Any]]:
        if shard == 3:
            raise OSError("the disk is gone")
        return iter([{"tokens": [shard * 100 + k]} for k in range(16)])


@pytest.mark.parametrize(("runtime", "loaders"), on_runtimes({"1": 1, "2": 2}, RUNTIMES, ("1",)))
def test_a_broken_source_ends_the_job_where_the_draw_comes_to_it_and_names_itself(
    runtime: str, loaders: int
) -> None:
    made = job()
    broken = ov.Source(
        "d",
        ov.Factory(Shards(), shards=6, fingerprint="x"),
        transforms=[ov.Tokens("tokens")],
        weight=3.0,
        shuffle=False,
        epochs=1,
    )
    made = replace(made, sources=(*made.sources, broken))
    seen = []
    for ahead in (1, 6):
        out = run(runtime, made, loaders={"d": loaders}, read_ahead=ahead)
        for error in out.error.values():
            assert isinstance(error, SourceError)
            assert error.source == "d"
            assert "the disk is gone" in str(error)
        assert len({tuple(n) for n in out.numbers()}) == 1
        seen.append(out.together())
    assert seen[0] == seen[1]
    assert 0 < len(seen[0]) < len(wanted(job()))


def fails_at_five(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
    if buffer.step == 5:
        raise ZeroDivisionError("my strategy")
    return llm_balance(buffer, place)


@runtimes
def test_a_strategy_that_raises_ends_the_job_with_its_own_error_at_its_step(runtime: str) -> None:
    out = run(runtime, job(strategy=fails_at_five))
    assert out.numbers() == [[0, 1, 2, 3, 4]] * 3
    assert {(type(e), str(e)) for e in out.error.values()} == {(ZeroDivisionError, "my strategy")}
    assert out.together() == {k: step for k, step in wanted(job()).items() if k < 5}


@runtimes
def test_a_cost_function_that_gives_nonsense_is_a_plan_error_on_every_rank(runtime: str) -> None:
    def strategy(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        sign = -1.0 if buffer.step == 2 else 1.0
        return (
            ov.DGraph.from_buffer(buffer, place)
            .mix()
            .distribute("DP")
            .cost(lambda c: sign * c["tokens"])
            .balance()
            .plan()
        )

    out = run(runtime, job(strategy=strategy))
    assert out.numbers() == [[0, 1]] * 3
    assert all(isinstance(e, PlanError) and e.step == 2 for e in out.error.values())


@runtimes
def test_a_schedule_that_gives_nonsense_is_a_plan_error_on_every_rank(runtime: str) -> None:
    out = run(
        runtime,
        job(mixture=lambda step, feedback: {"a": 1.0, "d": 1.0} if step == 3 else {"a": 1.0}),
    )
    assert out.numbers() == [[0, 1, 2]] * 3
    assert all(
        isinstance(e, PlanError) and e.step == 3 and "'d'" in str(e) for e in out.error.values()
    )


def picky(row: dict[str, Any]) -> dict[str, Any]:
    if row["n"] % 5 == 2:
        raise ValueError("not to my liking")
    return row


@runtimes
def test_rows_on_which_a_map_raises_are_quarantined_and_nothing_else_is(runtime: str) -> None:
    source = ov.Source(
        "a", rows(60, 0), transforms=[ov.Map(picky, rows=True), ov.Tokens("tokens")], epochs=1
    )
    made = replace(job(), sources=(source,))
    out = run(runtime, made)
    all_clean(out)
    assert sorted(row for _, row in out.quarantine) == [n for n in range(60) if n % 5 == 2]
    assert out.together() == wanted(made)


def seven(columns: Any) -> int:
    return 7


@runtimes
def test_a_map_that_breaks_its_contract_ends_the_job_with_its_name(runtime: str) -> None:
    source = ov.Source("a", rows(60, 0), transforms=[ov.Map(seven), ov.Tokens("tokens")], epochs=1)
    out = run(runtime, replace(job(), sources=(source,)))
    assert out.numbers() == [[]] * 3
    assert all(isinstance(e, TransformError) and e.source == "a" for e in out.error.values()), (
        out.error
    )


@functools.cache
def usual(runtime: str) -> Outcome:
    """Return a run in which no rank is slow. It is the same for every slow rank and prefetch."""
    return run(runtime, job())


SLOW = {f"{prefetch}-{slow}": (prefetch, slow) for prefetch in (1, 4) for slow in (0, 2)}


@pytest.mark.parametrize(("runtime", "pace"), on_runtimes(SLOW, RUNTIMES, ("1-2",)))
def test_a_slow_rank_changes_nothing_but_the_pace(runtime: str, pace: tuple[int, int]) -> None:
    made, (prefetch, slow) = job(), pace
    out = run(runtime, made, slow=slow, prefetch=prefetch)
    all_clean(out)
    assert out.together() == wanted(made)
    assert out.steps == usual(runtime).steps


@runtimes
def test_all_runtimes_place_every_sample_alike(runtime: str) -> None:
    """Each is compared with the first one here, to the slot; the draw is compared with the
    reference above.
    """
    made = job(batch=ov.Batch(tokens=70, context=32, microbatches=2))
    assert run(runtime, made).steps == run("local", made).steps
