"""Stages and ramps: every step has the batch and the mixture of its stage, whatever happens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

import overlord as ov
from overlord.messages.control import SetMixture
from tests.laws import examples
from tests.properties.test_chunk_weights import check_step
from tests.properties.test_chunk_weights import jobs as weighted_jobs
from tests.properties.test_concat import concat_worlds
from tests.properties.test_concat import delivered as delivered_chunks
from tests.properties.test_stream import fingerprint, run, state_after
from tests.reference import batch_of, pieces_in_stage, reference_stream, stage_of
from tests.reference_chunks import reference_chunks
from tests.reference_fixed import reference_fixed
from tests.worlds import World, folder, some_steps, worlds

STRATEGIES = st.sampled_from(("vanilla", "packed", "llm_balance", "backbone_balance"))
Piece = tuple[Any, int, list[int], int | None]  # id, place, tokens, next token


@st.composite
def ramps(draw: st.DrawFn, most: int, unit: int = 1) -> Any:
    """A size of a batch: a number, or a ramp."""
    number = st.integers(1, most).map(lambda n: n * unit)
    kind = draw(st.sampled_from(("number", "linear", "staged")))
    if kind == "number":
        return draw(number)
    if kind == "staged":
        return ov.schedule.staged({0: draw(number), draw(st.integers(1, 4)): draw(number)})
    steps, begin = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    return ov.schedule.linear(draw(number), draw(number), steps, begin, multiple=unit)


@st.composite
def mixtures(draw: st.DrawFn, world: World, least: float = 0.0) -> Any:
    """A mixture of a stage: none, weights of at least ``least``, or a schedule."""
    names = [f"s{i}" for i in range(len(world.sources))]

    def weights() -> dict[str, float]:
        given = {name: draw(st.sampled_from((least, 0.2, 1.0, 4.0))) for name in names}
        return given if any(given.values()) else {names[0]: 1.0}

    kind = draw(st.sampled_from(("none", "weights", "linear")))
    if kind == "none":
        return None
    if kind == "weights":
        return weights()
    return ov.schedule.linear(weights(), weights(), draw(st.integers(1, 5)))


@st.composite
def stages_of(
    draw: st.DrawFn,
    world: World,
    contexts: tuple[int, ...],
    most: int = 9,
    unit: int = 1,
    least: float = 0.0,
) -> tuple[ov.Stage, ...]:
    """One to four stages; sizes are in the unit of the world's batch."""
    base = dict(world.batch)
    size = "samples" if "samples" in base else "tokens"
    found = []
    for _ in range(draw(st.integers(1, 4))):
        given: dict[str, Any] = {"mixture": draw(mixtures(world, least))}
        kind = draw(st.sampled_from(("none", "context", "batch")))
        if kind == "context":
            given["context"] = draw(st.sampled_from(contexts))
        if kind == "batch":
            more = {
                "microbatches": draw(st.integers(1, 3)),
                "context": draw(st.sampled_from(contexts)),
            }
            fixed = base.get("shape") == "fixed"
            fields = (
                base | more | {size: draw(st.integers(1, most) if fixed else ramps(most, unit))}
            )
            given["batch"] = ov.Batch(**fields)
        name = draw(st.sampled_from((None, "named")))
        given["name"] = None if name is None else f"stage {len(found)}"
        found.append(ov.Stage(draw(st.integers(1, 4)), **given))
    if draw(st.booleans()):
        found[-1] = replace(found[-1], steps=None)
    return tuple(found)


@st.composite
def staged_worlds(
    draw: st.DrawFn, least: float = 0.0, **options: Any
) -> tuple[World, tuple[ov.Stage, ...]]:
    """A world with stages of whole samples, of which long ones are cut or shorter in all stages."""
    world = draw(worlds(**options))
    batch, fields = dict(world.batch), dict(world.fields)
    size = "samples" if "samples" in batch else "tokens"
    unit = 1 if size == "samples" else 13
    batch[size] = draw(ramps(12, unit))
    fields["strategy"] = draw(STRATEGIES)
    if draw(st.booleans()):  # cut where they are planned
        fields["on_long"] = draw(st.sampled_from(("split", "truncate")))
        sources = tuple((*s[:-1], "" if s[-1] == "images" else s[-1]) for s in world.sources)
        world = replace(world, sources=sources)
        contexts = (8, 16, 64)
    else:
        fields["max_document"] = 16
        contexts = (16, 48)
    batch["labels"] = draw(st.sampled_from(("shifted", "shifted", "unshifted")))
    batch["context"] = 64 if contexts[0] == 8 else 32
    if isinstance(fields["until"], int):
        fields["until"] = draw(st.integers(1, 9))
    world = replace(world, batch=tuple(batch.items()), fields=tuple(fields.items()))
    stages = draw(stages_of(world, contexts, unit=unit, least=least))
    known = [stage.steps for stage in stages]
    if isinstance(fields["until"], int) and None not in known:
        assume(fields["until"] <= sum(n or 0 for n in known))
    return world, stages


def job_of(case: tuple[World, tuple[ov.Stage, ...]], directory: str, **changes: Any) -> ov.Job:
    world, stages = case
    return world.job(directory, **{"stages": stages, **changes})


def delivered(job: ov.Job, steps: dict[int, list[ov.Step]]) -> list[list[Piece]]:
    """The pieces of every step in the order of the stream; what else arrays hold is checked."""
    out = []
    for k in range(len(steps[0])):
        info, found, valid = steps[0][k].info, dict[Any, Piece](), 0
        for rank in steps:
            step = steps[rank][k]
            assert step.stage == steps[0][k].stage
            assert len(step) == len(steps[0][k])
            for mb in step:
                valid += int(mb["loss_mask"].sum())
                assert mb["tokens"].shape[0] <= batch_of(job, step.step).context
                for piece, begin in zip(mb.samples, mb.begins.tolist(), strict=True):
                    at = slice(piece.offset, piece.offset + piece.length)
                    tokens, labels = mb["tokens"][at].tolist(), mb["labels"][at].tolist()
                    after = None
                    if job.batch.labels == "shifted":
                        assert labels[:-1] == tokens[1:]
                        after = None if labels[-1] == -100 else labels[-1]
                    else:
                        assert labels == [-100, *tokens[1:]]
                    key = (tuple(piece.sample), begin)
                    assert key not in found, "delivered twice"
                    found[key] = (*key, tokens, after)
        assert valid == steps[0][k].global_valid_tokens
        out.append([found[tuple(info.sample_id(i)), int(info.offset[i])] for i in range(len(info))])
        assert len(out[-1]) == len(found)
    return out


def wanted(job: ov.Job) -> tuple[list[list[Piece]], bool]:
    steps: list[list[Piece]] = []
    try:
        for step, samples in enumerate(reference_stream(job)):
            steps.append([p for sample in samples for p in pieces_of(job, step, sample)])
    except ValueError:
        return steps, True
    return steps, False


def pieces_of(job: ov.Job, step: int, sample: Any) -> Iterator[Piece]:
    whole = sample[1]
    for ident, at, tokens in pieces_in_stage(job, step, sample):
        rest = whole[at + len(tokens) :] if job.on_long == "split" else []
        yield ident, at, tokens, rest[0] if rest and job.batch.labels == "shifted" else None


def label_of(job: ov.Job, step: int) -> Any:
    number, _ = stage_of(job, step)
    return job.stages[number].name or number


@given(staged_worlds(), st.integers(0, 2**20))
@examples(150)
def test_every_step_equals_the_reference(case: Any, seed: int) -> None:
    with folder() as directory:
        job = job_of(case, directory)
        steps, broken = wanted(job)
        got, error, _, _ = run(job, seed)
        assert (error is not None) == broken, error
        assert delivered(job, got) == steps
        assert [s.stage for s in got[0]] == [label_of(job, k) for k in range(len(got[0]))]


@given(staged_worlds(), st.integers(1, 3), st.integers(1, 5))
@examples(20)
def test_the_local_runtime_delivers_the_steps_of_the_reference(
    case: Any, loaders: int, prefetch: int
) -> None:
    with folder() as directory:
        job = job_of(case, directory)
        steps, broken = wanted(job)
        got, error, _, _ = run(job, loaders={"s0": loaders}, prefetch=prefetch)
        assert (error is not None) == broken, error
        assert delivered(job, got) == steps


@given(staged_worlds(), st.integers(0, 2**20), st.integers(1, 4))
@examples(40)
def test_restored_at_every_step_the_rest_is_identical_to_the_byte(
    case: Any, seed: int, loaders: int
) -> None:
    with folder() as directory:
        job = job_of(case, directory)
        whole, error, _, _ = run(job, seed)
        for k in some_steps(len(whole[0]), seed):
            state = json.loads(json.dumps(state_after(job, whole[0][k])))
            assert state["stage"] == label_of(job, k + 1)
            rest, again, _, end = run(job, seed + k, resume=state, loaders={"s0": loaders})
            assert fingerprint(rest) == fingerprint({r: s[k + 1 :] for r, s in whole.items()}), (
                f"restored after step {k}"
            )
            assert type(again) is type(error)
            if rest[0]:
                assert end["counts"] == state_after(job, whole[0][-1])["counts"]


@given(staged_worlds(), st.integers(0, 2**20), st.integers(1, 5))
@examples(30)
def test_another_mesh_gets_the_same_samples_in_every_step(case: Any, seed: int, dp: int) -> None:
    with folder() as directory:
        job, other = job_of(case, directory), job_of(case, directory, place=ov.Mesh(dp=dp))
        a, _, _, _ = run(job, seed)
        b, _, _, _ = run(other, seed + 1)
        assert delivered(job, a) == delivered(other, b)
        if len(a[0]) > 1:
            rest, _, _, _ = run(other, seed, resume=state_after(job, a[0][0]))
            assert delivered(other, rest) == delivered(job, a)[1:]


@given(staged_worlds(least=0.1, endless=False), st.integers(0, 2**20))
@examples(40)
def test_every_sample_is_delivered_once_in_whole_or_truncated_as_counted(
    case: Any, seed: int
) -> None:
    with folder() as directory:
        world, stages = case
        job = job_of(
            (world, (*stages[:-1], replace(stages[-1], steps=None))), directory, until="all"
        )
        got, error, _, end = run(job, seed)
        if error is not None:
            return
        found = dict[Any, int]()
        for pieces in delivered(job, got):
            for ident, at, tokens, _ in pieces:
                assert found.get(ident, 0) == at, "out of order"
                found[ident] = at + len(tokens)
        limit = job.document_limit
        plain = world.job(
            directory,
            until="all",
            batch=ov.Batch(samples=5, context=limit),
            max_document=None,
            strategy="vanilla",
        )
        expected, _, _, totals = run(plain, seed)
        whole = {
            tuple(piece.sample): piece.length
            for rank in expected
            for step in expected[rank]
            for mb in step
            for piece in mb.samples
        }
        assert found.keys() == whole.keys()
        lost = {ident: whole[ident] - n for ident, n in found.items() if n < whole[ident]}
        assert not lost or job.on_long == "truncate"
        more = {
            what: sum(end["counts"][what].values()) - sum(totals["counts"][what].values())
            for what in ("long", "lost_tokens")
        }
        if job.on_long == "truncate":
            assert more["lost_tokens"] == sum(lost.values())
            assert more["long"] == len(lost)


@st.composite
def staged_chunks(draw: st.DrawFn, **options: Any) -> tuple[World, tuple[ov.Stage, ...]]:
    """A world of chunks whose stages change the number and the length of chunks."""
    world = draw(concat_worlds(**options))
    batch = dict(world.batch)
    if "tokens" in batch:
        batch["samples"] = batch.pop("tokens") // batch["context"]
    if batch["shape"] == "free":
        batch["samples"] = draw(ramps(6))
    most = 6
    world = replace(world, batch=tuple(batch.items()))
    stages = draw(stages_of(world, (8, 16, 32), most))
    fields = dict(world.fields)
    known = [stage.steps for stage in stages]
    if isinstance(fields["until"], int) and None not in known:
        assume(fields["until"] <= sum(n or 0 for n in known))
    return world, stages


@given(staged_chunks(), st.integers(0, 2**20))
@examples(60)
def test_chunks_of_stages_equal_the_reference_also_after_a_restore(case: Any, seed: int) -> None:
    with folder() as directory:
        job = job_of(case, directory)
        hide, steps, broken = job.batch.labels != "shifted", list[Any](), False
        try:
            for chunks in reference_chunks(job):
                steps.append([[p._replace(next=None) if hide else p for p in c] for c in chunks])
        except ValueError:
            broken = True
        got, error, _, _ = run(job, seed)
        assert (error is not None) == broken, error
        assert by_context(job, got) == steps
        for k in some_steps(len(got[0]), seed, 4):
            rest, _, _, _ = run(job, seed + k, resume=state_after(job, got[0][k]))
            assert fingerprint(rest) == fingerprint({r: s[k + 1 :] for r, s in got.items()})


def by_context(job: ov.Job, got: dict[int, list[ov.Step]]) -> list[Any]:
    """The chunks of every step; those of a step have the context of its stage."""
    out = []
    for k in range(len(got[0])):
        batch = batch_of(job, k)
        plain = replace(job, stages=(), batch=batch, max_document=job.document_limit)
        out += delivered_chunks(plain, {rank: [steps[k]] for rank, steps in got.items()})
    return out


@given(staged_chunks(), st.integers(0, 2**20))
@examples(25)
def test_shapes_are_constant_within_a_stage(case: Any, seed: int) -> None:
    world, stages = case
    batch = dict(world.batch) | {"shape": "fixed"}
    batch["samples"] = batch["samples"] if isinstance(batch["samples"], int) else 3
    flat = tuple(
        replace(s, batch=None if s.batch is None else replace(s.batch.at(0), shape="fixed"))
        for s in stages
    )
    with folder() as directory:
        job = job_of((replace(world, batch=tuple(batch.items())), flat), directory)
        got, _, _, _ = run(job, seed)
        shapes: dict[Any, set[Any]] = {}
        for rank in got:
            for step in got[rank]:
                for mb in step:
                    shape = (len(step), *((key, mb[key].shape, mb[key].dtype) for key in mb))
                    shapes.setdefault(step.stage, set()).add(shape)
        assert all(len(found) == 1 for found in shapes.values())


@given(worlds(batches="samples"), st.data(), st.integers(0, 2**20))
@examples(40)
def test_stages_of_fixed_documents_equal_the_reference(world: World, data: Any, seed: int) -> None:
    batch = {"samples": 6, "microbatches": 2, "context": 64, "shape": "fixed"}
    fields = dict(world.fields) | {
        "mix_every": "step",
        "strategy": "llm_balance",
        "max_document": 24,
        "look_ahead": data.draw(st.integers(1, 3)),
    }
    sources = tuple((*s[:-1], "" if s[-1] == "images" else s[-1]) for s in world.sources)
    world = replace(
        world, sources=sources, batch=tuple(batch.items()), fields=tuple(fields.items())
    )
    stages = data.draw(stages_of(world, (24, 64)))
    known = [stage.steps for stage in stages]
    if isinstance(fields["until"], int) and None not in known:
        assume(fields["until"] <= sum(n or 0 for n in known))
    with folder() as directory:
        job = job_of((world, stages), directory)
        steps, broken = list[Any](), False
        try:
            for samples in reference_fixed(job):
                steps.append([(ident, 0, tokens, None) for ident, tokens in samples])
        except ValueError:
            broken = True
        got, error, _, _ = run(job, seed)
        assert (error is not None) == broken, error
        assert delivered(job, got) == steps


@given(staged_worlds(), st.integers(0, 2**20), st.integers(0, 9), st.data())
@examples(40)
def test_a_change_of_mixture_ends_where_a_stage_with_a_mixture_starts(
    case: Any, seed: int, at: int, data: Any
) -> None:
    with folder() as directory:
        job = job_of(case, directory)
        firsts = [0]
        for stage in job.stages[:-1]:
            firsts.append(firsts[-1] + (stage.steps or 0))
        own = [f for f, s in zip(firsts, job.stages, strict=True) if s.mixture is not None]
        ends = min((f for f in own if f > at), default=1000)
        change = {name: data.draw(st.sampled_from((1.0, 2.0))) for name in job.names}
        got, error, _, _ = run(job, seed, events=[SetMixture(at, change)])
        assume(error is None)
        other = changed(job, at, ends, change)
        expected = list(reference_stream(other))
        steps = [
            [p for sample in samples for p in pieces_of(job, k, sample)]
            for k, samples in enumerate(expected)
        ]
        assert delivered(job, got) == steps
        for k in some_steps(len(got[0]), seed, 4):
            state = json.loads(json.dumps(state_after(job, got[0][k])))
            events = [SetMixture(at, change)] if at > k else []
            rest, _, _, _ = run(job, seed, resume=state, events=events)
            assert fingerprint(rest) == fingerprint({r: s[k + 1 :] for r, s in got.items()})


class Changed:
    """The mixture of a job or stage, replaced in some steps; steps count from ``first``."""

    def __init__(self, given: Any, own: dict[str, float], first: int, change: Any):
        self.given, self.own, self.first, self.change = given, own, first, change

    def __call__(self, step: int, feedback: Any) -> Any:
        at, end, weights = self.change
        if at <= step + self.first < end:
            return weights
        if callable(self.given):
            return self.given(step, feedback)
        return self.own if self.given is None else self.given


def changed(job: ov.Job, at: int, end: int, weights: dict[str, float]) -> ov.Job:
    """The job whose mixtures are replaced from step ``at`` to before step ``end``."""
    own, first, stages = {s.name: s.weight for s in job.sources}, 0, []
    wrap: Callable[[Any, int], Any] = lambda given, k: Changed(given, own, k, (at, end, weights))  # noqa: E731
    for stage in job.stages:
        mixture = None if stage.mixture is None else wrap(stage.mixture, first)
        stages.append(replace(stage, mixture=mixture))
        first += stage.steps or 0
    return replace(job, mixture=wrap(job.mixture, 0), stages=tuple(stages))


def cut_documents(job: ov.Job, **batch: Any) -> ov.Job:
    """The job with whole documents, which two of its stages cut."""
    return replace(
        job,
        batch=ov.Batch(samples=5, context=104, labels=job.batch.labels, **batch),
        stages=(ov.Stage(2, context=8), ov.Stage(2, context=32), ov.Stage()),
    )


@given(weighted_jobs(), st.integers(0, 2**20))
@examples(30)
def test_every_label_of_a_cut_sample_has_the_weight_of_its_token(job: ov.Job, seed: int) -> None:
    job = cut_documents(replace(job, place=ov.Mesh(dp=job.place.dp)))
    made, error, _, _ = run(job, seed)
    assert error is None
    for steps in zip(*made.values(), strict=True):
        check_step(job, list(steps))


@given(
    weighted_jobs(), st.sampled_from(("zigzag", "zigzag_whole", "contiguous")), st.integers(1, 4)
)
@examples(30)
def test_slices_of_context_parallelism_have_the_labels_of_the_whole(
    job: ov.Job, split: str, multiple: int
) -> None:
    whole = cut_documents(replace(job, place=ov.Mesh()), pad_multiple=2, cp_split=split)
    sliced = replace(whole, place=ov.Mesh(cp=2))
    expected, error, _, _ = run(whole, multiple)
    made, again, _, _ = run(sliced, multiple)
    assert error is None
    assert again is None
    for k, step in enumerate(expected[0]):
        pairs = zip(made[0][k], made[1][k], strict=True)
        got = [pair for a, b in pairs for pair in labelled(a) + labelled(b)]
        assert sorted(got) == sorted(pair for mb in step for pair in labelled(mb))
        assert made[0][k].global_valid_tokens == step.global_valid_tokens


def labelled(mb: ov.Microbatch) -> list[tuple[int, int, int, float]]:
    """The tokens of a microbatch that have a label: token, position, label, weight."""
    keys = ("tokens", "position_ids", "labels", "loss_mask")
    rows = zip(*(np.asarray(mb[key]).tolist() for key in keys), strict=True)
    return [row for row in rows if row[3]]
