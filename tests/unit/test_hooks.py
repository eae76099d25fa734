"""Stories of the low level: functions of the user's in place of the planner, the loaders and the
constructors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.job.hooks import CONTRACT
from overlord.planning.balance.binpack import best_fit
from overlord.setup.state_json import code_text
from tests.processes import until
from tests.worlds import Rows

pytestmark = pytest.mark.timeout(200)


def rows(n: int, first: int) -> Rows:
    return Rows([{"tokens": [first + k] * (1 + k % 5)} for k in range(n)])


def job(**changes: Any) -> ov.Job:
    sources = [
        ov.Source(name, rows(60, first), transforms=[ov.Tokens("tokens")], epochs=1)
        for name, first in (("a", 100), ("b", 1000))
    ]
    settings: dict[str, Any] = {
        "name": "hooked",
        "sources": sources,
        "batch": ov.Batch(samples=8, microbatches=2, context=64),
        "place": ov.ClientPlaceTree(dp=2),
        "seed": 3,
        "slice_rows": 8,
        "strategy": "vanilla",
    }
    return ov.Job(**{**settings, **changes})


def run(made: ov.Job, **options: Any) -> list[list[ov.Step]]:
    """All steps of all ranks."""
    with ov.launch(made, **{"check": True, "stall_limit_s": 20, **options}) as session:
        clients = [session.client(r) for r in range(made.place.world_size)]
        return [list(group) for group in zip(*clients, strict=True)]


def tokens_of(steps: list[list[ov.Step]]) -> list[list[int]]:
    """Of all ranks by step, padding left out: no document holds a 0."""
    return [[int(t) for step in group for mb in step for t in mb["tokens"] if t] for group in steps]


# the planner


def by_row(
    columns: dict[str, Any], place: ov.ClientPlaceTree, batch: ov.Batch, step: int
) -> dict[str, Any]:
    """Odd rows to one rank, even ones to the other, every other pair of them to the second
    microbatch.
    """
    return {"bucket": columns["row"] % place.dp, "microbatch": columns["row"] // 2 % 2}


def test_a_raw_function_places_every_sample() -> None:
    for group in run(job(strategy=ov.plan_raw(by_row))):
        for rank, step in enumerate(group):
            assert [p.sample.row % 2 for mb in step for p in mb.samples] == [rank] * sum(
                len(mb.samples) for mb in step
            )
            assert [
                p.sample.row // 2 % 2
                for m, mb in enumerate(step)
                for p in mb.samples
                if p.sample.row // 2 % 2 != m
            ] == []


def test_a_raw_function_sees_raw_arrays_in_the_order_of_the_draw() -> None:
    seen: list[Any] = []

    def watch(
        columns: dict[str, Any], place: ov.ClientPlaceTree, batch: ov.Batch, step: int
    ) -> dict[str, Any]:
        seen.append(
            (
                step,
                sorted(columns),
                batch,
                place,
                columns["tokens"].flags.writeable,
                columns["source"].tolist(),
            )
        )
        return by_row(columns, place, batch, step)

    made = job(strategy=ov.plan_raw(watch), until=2)
    run(made)
    assert [s[0] for s in seen] == [0, 1]
    assert seen[0][1] == ["bytes", "epoch", "file", "part", "row", "source", "tokens"]
    assert seen[0][2:] == (made.batch, made.place, False, [0, 1] * 4)


def in_four(
    columns: dict[str, Any], place: ov.ClientPlaceTree, batch: ov.Batch, step: int
) -> dict[str, Any]:
    bins = best_fit(columns["tokens"], 4, batch.context)
    return {"bucket": bins % 2, "microbatch": bins // 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"look_ahead": 3},
        {"overflow": "defer", "batch": ov.Batch(samples=8, microbatches=2, context=6)},
    ],
)
def test_a_raw_function_gets_what_a_step_takes_of_what_it_could(changes: dict[str, Any]) -> None:
    groups = run(job(strategy=ov.plan_raw(in_four), **changes))
    taken = [[p.sample for step in group for mb in step for p in mb.samples] for group in groups]
    assert sorted(i for ids in taken for i in ids) == [
        ov.SampleId(name, 0, 0, row) for name in ("a", "b") for row in range(60)
    ]
    assert (min(map(len, taken[:3])) < 8) == ("overflow" in changes)


def test_a_raw_function_may_say_slots_and_costs() -> None:
    def reversed_slots(
        columns: dict[str, Any], place: ov.ClientPlaceTree, batch: ov.Batch, step: int
    ) -> dict[str, Any]:
        n = len(columns["row"])
        return {
            "bucket": np.zeros(n, int),
            "microbatch": np.zeros(n, int),
            "slot": np.arange(n)[::-1],
            "cost": np.full(n, 2.5),
        }

    made = job(strategy=ov.plan_raw(reversed_slots), place=ov.ClientPlaceTree(), until=1)
    with ov.launch(made) as session:
        step = next(session.client(0))
        plan = session.plan(0)
    assert [p.sample for p in step[0].samples] == [plan.sample_id(i) for i in reversed(range(8))]
    assert plan.imbalance()["bucket"] == 1.0
    assert plan.main.cost.tolist() == [2.5] * 8
    assert len(step) == 2, "microbatches is a minimum"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda p: None,
            "expected a mapping with bucket and microbatch, got NoneType; return arrays by name",
        ),
        (lambda p: {"bucket": p["bucket"]}, "got keys bucket"),
        (lambda p: p | {"rank": p["bucket"]}, "known names: bucket, microbatch, slot, cost"),
        (lambda p: p | {"bucket": p["bucket"][:3]}, "expected 8 whole numbers for bucket"),
        (
            lambda p: p | {"bucket": p["bucket"] * 0.5},
            "expected 8 whole numbers for bucket, got float64",
        ),
        (lambda p: p | {"bucket": p["bucket"] + 1}, "expected bucket from 0 to 1, got 1 to 2"),
        (lambda p: p | {"microbatch": p["microbatch"] - 1}, "expected microbatch from 0 to"),
        (lambda p: p | {"slot": p["bucket"] * 0}, "share a slot"),
        (lambda p: p | {"cost": p["bucket"] * np.nan}, "negative, infinite or NaN"),
        (lambda p: 1 / 0, "division by zero"),
    ],
)
def test_a_raw_plan_that_breaks_a_rule_ends_the_job_at_its_step(
    change: Callable[[Any], Any], said: str
) -> None:
    def from_step_2(
        columns: dict[str, Any], place: ov.ClientPlaceTree, batch: ov.Batch, step: int
    ) -> Any:
        placed = by_row(columns, place, batch, step)
        return placed if step < 2 else change(placed)

    with ov.launch(
        job(strategy=ov.plan_raw(from_step_2), place=ov.ClientPlaceTree(dp=2))
    ) as session:
        client = session.client(0)
        assert [next(client).step for _ in range(2)] == [0, 1]
        with pytest.raises((ov.PlanError, ZeroDivisionError), match=said):
            next(client)


def test_a_plan_for_another_place_is_refused() -> None:
    def elsewhere(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        return ov.plan_raw(by_row)(buffer, place.replace(tp=2))

    with ov.launch(job(strategy=elsewhere)) as session:
        client = session.client(0)
        with pytest.raises(
            ov.PlanError, match="expected a plan for pp1xdp2xcp1xtp1, got one for pp1xdp2xcp1xtp2"
        ):
            next(client)


def test_raw_plans_are_told_apart_by_the_text_of_the_function() -> None:
    other = ov.plan_raw(lambda columns, place, batch, step: by_row(columns, place, batch, step))
    assert code_text(ov.plan_raw(by_row)) == code_text(ov.plan_raw(by_row)) != code_text(other)
    assert code_text(ov.plan_raw(by_row)) != code_text(ov.plan_raw(by_row, broadcast=("CP",)))
    assert "0x" not in code_text(ov.plan_raw(by_row))


# what the planner sees


def next_step_in(seen: ov.Buffer) -> ov.Buffer | None:
    """3 of each source: both are looked at in one buffer, as others come and go."""
    return seen if len(seen) and np.bincount(seen.source, minlength=2).min() >= 3 else None


def test_the_summary_buffer_holds_what_comes_next_in_stream_order() -> None:
    made = job(
        batch=ov.Batch(samples=6, context=64), until=4
    )  # 3 of each: the ends of steps are no ends of windows
    with ov.launch(made, prefetch=1, read_ahead=2) as session:
        assert len(session.summary_buffer()) == 0
        client = session.client(0)
        next(client)
        seen = until(
            lambda: next_step_in(session.summary_buffer())
        )  # loaders read two steps ahead, when they get to it
        later = [next(client) for _ in range(3)]
        plans = [session.plan(step.step) for step in later]
    assert not seen.drawn
    assert seen.source.tolist() == sorted(seen.source.tolist())
    assert seen.weights == {"a": 1.0, "b": 1.0}
    for i, name in enumerate(made.names):
        ready = [seen[j] for j in np.flatnonzero(seen.source == i)]
        drawn = [
            p.sample_id(j)
            for p in plans
            if p.step >= seen.step
            for j in range(len(p))
            if p.sample_id(j).source == name
        ]
        both = min(len(ready), len(drawn))
        assert ready[:both] == drawn[:both]
        assert both > 0
    plan = (
        ov.DGraph.from_buffer(seen, made.place)
        .mix(dict(seen.weights))
        .distribute("DP")
        .balance("greedy")
        .plan()
    )
    assert len(plan) == 6, "a what-if of the next step"


def test_the_summary_buffer_holds_what_look_ahead_passed_over_before_the_rest() -> None:
    with ov.launch(job()) as session:
        client = session.client(0)
        plans = [session.plan(step.step) for step in client]
    stream = {
        name: [
            p.sample_id(i) for p in plans for i in range(len(p)) if p.sample_id(i).source == name
        ]
        for name in ("a", "b")
    }
    with ov.launch(job(strategy="llm_balance", look_ahead=3), prefetch=1) as session:
        next(session.client(0))
        seen = session.summary_buffer()
        taken = {session.plan(k).sample_id(i) for k in range(seen.step) for i in range(8)}
    ids = [seen[i] for i in range(len(seen))]
    assert not taken & set(ids)
    assert seen.source.tolist() == sorted(seen.source.tolist())
    for name, order in stream.items():
        ready = [i for i in ids if i.source == name]
        known = len(ready) + sum(i.source == name for i in taken)
        assert ready == [i for i in order[:known] if i not in taken], (
            "all that is not taken, without holes, in stream order"
        )


# loaders


def add_one(samples: ov.Popped) -> ov.Ragged:
    return ov.Ragged(samples.tokens.values + 1, samples.tokens.offsets)


def only_b(samples: ov.Popped) -> ov.Ragged:
    return (
        ov.Ragged(samples.tokens.values * 10, samples.tokens.offsets)
        if samples.source == "b"
        else samples.tokens
    )


def test_a_loader_hook_changes_tokens_and_nothing_else() -> None:
    plain, hooked = run(job()), run(job(hooks=[ov.loader_do_plan(add_one)]))
    assert tokens_of(hooked) == [[t + 1 for t in step] for step in tokens_of(plain)]
    assert [[s.plan_digest for s in group] for group in plain] == [
        [s.plan_digest for s in group] for group in hooked
    ]


def test_loader_hooks_run_in_order_and_know_their_source() -> None:
    plain = tokens_of(run(job()))
    after = tokens_of(run(job(hooks=[ov.loader_do_plan(add_one), ov.loader_do_plan(only_b)])))
    before = tokens_of(run(job(hooks=[ov.loader_do_plan(only_b), ov.loader_do_plan(add_one)])))
    assert after == [[t + 1 if t < 1000 else (t + 1) * 10 for t in step] for step in plain]
    assert before == [[t + 1 if t < 1000 else t * 10 + 1 for t in step] for step in plain]


def masked(samples: ov.Popped) -> ov.Ragged:
    """By chance, and by how many samples came together: neither may depend on the loaders."""
    values = samples.tokens.values.astype(np.int64)
    values[samples.chance("mask") < 0.5] = len(samples)
    return ov.Ragged(values, samples.tokens.offsets)


def test_the_number_of_loaders_does_not_show_in_a_loader_hook() -> None:
    made = job(
        hooks=[ov.loader_do_plan(masked)], shuffle_chunks=3, slice_rows=1
    )  # chunks of 16 rows: each loader has some
    one = tokens_of(run(made))
    assert tokens_of(run(made, loaders={"a": 3, "b": 2})) == one
    assert tokens_of(run(replace(made, hooks=()))) != one


@pytest.mark.parametrize("seed", range(5))
def test_hooks_give_the_same_in_whatever_order_work_ends(seed: int) -> None:
    made = job(hooks=[ov.loader_do_plan(masked), ov.constructor_do_plan(with_lengths)], until=6)
    simulated = ov.simulate(made, seed=seed)
    assert tokens_of(
        [list(group) for group in zip(*simulated.steps.values(), strict=True)]
    ) == tokens_of(run(made))


def test_a_loader_hook_sees_ids_and_read_only_tokens() -> None:
    seen: list[tuple[list[Any], list[list[int]], bool]] = []

    def watch(samples: ov.Popped) -> ov.Ragged:
        held = [samples.tokens[i].tolist() for i in range(len(samples))]
        seen.append(
            ([samples[i] for i in range(len(samples))], held, samples.tokens.values.flags.writeable)
        )
        return samples.tokens

    with ov.launch(job(hooks=[ov.loader_do_plan(watch)], until=1)) as session:
        list(session.client(0))
        plan = session.plan(0)
    ids = [plan.sample_id(i) for i in range(8)]
    assert [s[0] for s in seen] == [[i for i in ids if i.source == name] for name in ("a", "b")]
    assert all(
        tokens == [tokens[0]] * (1 + i.row % 5) and tokens[0] % 100 == i.row
        for s in seen
        for i, tokens in zip(*s[:2], strict=True)
    )
    assert not any(s[2] for s in seen)


def test_chance_is_spread_and_differs_by_purpose_and_sample() -> None:
    ids = {n: np.zeros(400, np.int64) for n in ("epoch", "file", "part")}
    samples = ov.Popped(
        step=0,
        source="a",
        row=np.arange(400),
        tokens=ov.Ragged(np.zeros(4000, int), np.arange(0, 4001, 10)),
        seed=1,
        **ids,
    )
    found = samples.chance()
    assert found.shape == (4000,)
    assert len(set(found.tolist())) == 4000
    assert ((found >= 0) & (found < 1)).all()
    assert abs(found.mean() - 0.5) < 0.03
    assert (found != samples.chance("mask")).all()
    later = replace(samples, step=9, row=np.arange(200, 600), epoch=samples.epoch)
    assert later.chance()[:2000].tolist() == found[2000:].tolist(), "by the sample's id alone"


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda s: s.tokens.values, "expected a Ragged of token ids, got ndarray"),
        (lambda s: ov.Ragged(s.tokens.values / 2, s.tokens.offsets), "got Ragged of float64"),
        (
            lambda s: ov.Ragged(np.stack([s.tokens.values] * 2, 1), s.tokens.offsets),
            r"got Ragged of \w+ \(\d+, 2\)",
        ),
        (
            lambda s: s.tokens.slice(0, len(s) - 1),
            "expected 4 rows with the lengths of samples.tokens, 16 tokens in all, got 3 rows",
        ),
        (lambda s: ov.Ragged(s.tokens.values, s.tokens.offsets + 1), "expected 4 rows"),
        (
            lambda s: ov.Ragged(s.tokens.values.astype(int) - 2000, s.tokens.offsets),
            "expected token ids from 0",
        ),
        (
            lambda s: ov.Ragged(s.tokens.values.astype(int) + 2**31, s.tokens.offsets),
            "got 21474837",
        ),
        (lambda s: s.pixels, r"loader_do_plan\(<lambda>\) raised AttributeError"),
    ],
)
def test_a_loader_hook_that_breaks_a_rule_ends_the_job_at_its_step(
    fn: Callable[[Any], Any], said: str
) -> None:
    def from_step_2(samples: ov.Popped) -> Any:
        return samples.tokens if samples.step < 2 else fn(samples)

    from_step_2.__name__ = fn.__name__
    ends_at_step_2(job(hooks=[ov.loader_do_plan(from_step_2)]), said)


def ends_at_step_2(made: ov.Job, said: str) -> None:
    with ov.launch(made, check=True) as session:
        clients = [session.client(rank) for rank in range(2)]
        for client in clients:
            assert [next(client).step for _ in range(2)] == [0, 1]
        for client in clients:
            with pytest.raises(ov.PlanError, match=said) as error:
                next(client)
            assert error.value.step == 2


# constructors


def with_lengths(assembly: ov.Assembly) -> list[dict[str, np.ndarray]]:
    return [mb | {"lengths": np.diff(mb["cu_seqlens"])} for mb in assembly.default()]


def doubled(assembly: ov.Assembly) -> list[dict[str, np.ndarray]]:
    return [mb | {"lengths": mb["lengths"] * 2} for mb in assembly.default()]


def test_a_constructor_hook_adds_keys_to_the_default() -> None:
    plain, hooked = run(job()), run(job(hooks=[ov.constructor_do_plan(with_lengths)]))
    assert tokens_of(plain) == tokens_of(hooked)
    for mb in (mb for group in hooked for step in group for mb in step):
        assert mb["lengths"].tolist() == np.diff(mb["cu_seqlens"]).tolist()
        assert not mb["lengths"].flags.writeable


def test_the_default_of_a_constructor_hook_is_what_the_one_before_it_gave() -> None:
    [[step, _], *_] = run(
        job(hooks=[ov.constructor_do_plan(with_lengths), ov.constructor_do_plan(doubled)])
    )
    assert all(mb["lengths"].tolist() == (2 * np.diff(mb["cu_seqlens"])).tolist() for mb in step)


def from_documents(assembly: ov.Assembly) -> list[dict[str, np.ndarray]]:
    """Builds the packed layout anew, without the package's own: documents, and the plan's rows."""
    made = []
    for m, (documents, rows) in enumerate(zip(assembly.documents, assembly.rows, strict=True)):
        if not len(documents):
            made.append(assembly.default()[m])
            continue
        tokens, ends = documents.values.astype(np.int64), documents.offsets.astype(np.int32)
        labels = np.append(tokens[1:], 0)
        labels[ends[1:] - 1] = -100
        assert [assembly.plan.sample_id(i) for i in rows] == assembly.ids(m)
        made.append(
            {
                "tokens": tokens,
                "labels": labels,
                "loss_mask": (labels != -100).astype(np.float32),
                "position_ids": np.concatenate([np.arange(n) for n in documents.lengths]),
                "cu_seqlens": ends,
                "cu_seqlens_padded": ends,
                "max_seqlen": np.int32(documents.lengths.max()),
                "source_ids": assembly.plan.source[rows],
            }
        )
    return made


def test_a_constructor_hook_can_build_everything_itself() -> None:
    def arrays(steps: list[list[ov.Step]]) -> list[dict[str, list[Any]]]:
        return [
            {k: v.tolist() for k, v in sorted(mb.items())}
            for group in steps
            for step in group
            for mb in step
        ]

    assert arrays(run(job(hooks=[ov.constructor_do_plan(from_documents)]))) == arrays(run(job()))


def test_both_kinds_together_on_the_padded_layout() -> None:
    made = job(
        batch=ov.Batch(samples=8, microbatches=2, context=64, layout="padded"),
        hooks=[ov.constructor_do_plan(with_lengths), ov.loader_do_plan(add_one)],
    )
    hooked, plain = run(made), run(replace(made, hooks=()))
    for a, b in zip(
        (mb for g in hooked for s in g for mb in s),
        (mb for g in plain for s in g for mb in s),
        strict=True,
    ):
        assert (
            a["tokens"][a["attention_mask"]].tolist()
            == (b["tokens"] + (len(b.samples) > 0))[b["attention_mask"]].tolist()
        )
        assert "lengths" in a


def changed(key: str, change: Callable[[np.ndarray], Any]) -> Callable[[ov.Assembly], Any]:
    return lambda assembly: [mb | {key: change(mb.get(key))} for mb in assembly.default()]


def without(key: str) -> Callable[[ov.Assembly], Any]:
    return lambda assembly: [{k: v for k, v in mb.items() if k != key} for mb in assembly.default()]


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda a: a.default()[:1], "expected a list of 2 microbatches, got 1 of them"),
        (lambda a: None, "got NoneType"),
        (lambda a: [1, 2], "expected a mapping, got int"),
        (changed("tokens", lambda t: t.astype(np.int32)), "expected int64 for 'tokens', got int32"),
        (changed("loss_mask", lambda t: t[:-1]), "expected per-token arrays of one shape"),
        (changed("cu_seqlens_padded", lambda t: t[:-1]), "cu_seqlens_padded: expected bounds of"),
        (
            changed("cu_seqlens_padded", lambda t: t + np.int32(1)),
            "cu_seqlens_padded: expected bounds of",
        ),
        (changed("cu_seqlens", lambda t: t[::-1].copy()), "cu_seqlens: expected bounds of"),
        (changed("cu_seqlens", lambda t: t * np.int32(99)), "cu_seqlens: expected bounds of"),
        (changed("source_ids", lambda t: np.append(t, t[:1])), "one for each of source_ids"),
        (
            changed("cu_seqlens_padded", lambda t: t // np.int32(2)),
            "cu_seqlens_padded: expected .* at its end",
        ),
        (
            changed("cu_seqlens", lambda t: np.append(t[:1], np.full(len(t) - 1, t[-1]))),
            "expected documents no longer than in cu_seqlens_padded",
        ),
        (
            changed("max_seqlen", lambda t: t[None]),
            r"expected one number for 'max_seqlen', got shape \(1,\)",
        ),
        (
            changed("note", lambda t: "hello"),
            "expected a numpy array of numbers for 'note', got str",
        ),
        (changed("note", lambda t: np.array([{}])), "got object"),
        (changed("tokens", lambda t: t.sort()), "raised ValueError: .*read-only"),
        (lambda a: a.pixels, r"constructor_do_plan\(<lambda>\) raised AttributeError"),
        *((without(key), f"expected the keys {key}, got none") for key in CONTRACT),
    ],
)
def test_a_constructor_hook_that_breaks_a_rule_ends_the_job_at_its_step(
    fn: Callable[[Any], Any], said: str
) -> None:
    def from_step_2(assembly: ov.Assembly) -> Any:
        return assembly.default() if assembly.step < 2 else fn(assembly)

    from_step_2.__name__ = fn.__name__
    ends_at_step_2(job(hooks=[ov.constructor_do_plan(from_step_2)]), said)


def test_a_hook_that_ends_the_program_ends_the_job_instead() -> None:
    def leave(assembly: ov.Assembly) -> Any:
        raise SystemExit(3)

    with (
        ov.launch(job(hooks=[ov.constructor_do_plan(leave)])) as session,
        pytest.raises(ov.PlanError, match=r"\(leave\) raised SystemExit: 3"),
    ):
        next(session.client(0))


# as part of the job


def test_a_state_remembers_the_hooks() -> None:
    with ov.launch(job(hooks=[ov.loader_do_plan(add_one)])) as session:
        client = session.client(0)
        next(client)
        state = client.state_dict()
    with ov.launch(job(hooks=[ov.loader_do_plan(add_one)]), resume=state) as session:
        assert next(session.client(0)).step == 1
    for other in ((), [ov.loader_do_plan(only_b)], [ov.constructor_do_plan(add_one)]):
        with pytest.raises(ov.StateMismatch, match="hooks"):
            ov.launch(job(hooks=other), resume=state)


def test_what_is_no_hook_is_refused() -> None:
    with pytest.raises(
        ov.JobError,
        match=r"hooks\[0\]: expected ov.loader_do_plan\(fn\) or ov.constructor_do_plan\(fn\), got add_one",
    ):
        job(hooks=[add_one])
    with pytest.raises(ov.JobError, match=r"got plan_raw\(by_row\) \(pass it as strategy=\)"):
        job(hooks=[ov.plan_raw(by_row)])
    with pytest.raises(ov.JobError, match="hooks: expected a list"):
        job(hooks="add_one")
    for make in (ov.plan_raw, ov.loader_do_plan, ov.constructor_do_plan):
        with pytest.raises(ov.JobError, match="expected a function, got 3"):
            make(3)  # type: ignore[arg-type]


def test_hooks_have_no_place_in_a_file() -> None:
    with pytest.raises(
        ov.JobError, match=r"hooks: expected a value that a file can hold, got the code"
    ):
        job(hooks=[ov.loader_do_plan(add_one)]).to_yaml()
