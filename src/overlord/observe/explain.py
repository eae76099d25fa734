"""Explain a step (its rows and their placement) or a sample (its step and slot)."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.checks import did_you_mean, shown_name
from overlord.errors import PlanError
from overlord.line_numbers import rows_around
from overlord.messages.control import Cursor, PlannedStep, StreamState
from overlord.observe.balancing_model import shown_model
from overlord.observe.explanation import (
    ExpensiveItem,
    Explanation,
    FileRows,
    ModulePlacement,
    SampleExplanation,
    SlotOfSample,
    SourceShare,
    StepExplanation,
)
from overlord.observe.ring_text import host_memory, limit
from overlord.observe.sample_lookup import SampleLookup, parse_id
from overlord.observe.stage_text import stage_of_step
from overlord.planning.graph.lineage import constructors_of
from overlord.planning.mixture import latest
from overlord.planning.schedule.by_stage import mixture_starts
from overlord.sample import SampleId

if TYPE_CHECKING:
    from overlord.job.job import Job
    from overlord.loader.samples import SourceOrder
    from overlord.plan.plan import Assignment, LoadingPlan
    from overlord.planning.spec import Quarantined
    from overlord.sources.index import Index

DEAREST = 5  # most expensive samples of the slowest bucket that are named


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """A snapshot of the data of a session that explanations need."""

    job: Job
    names: tuple[str, ...]  # names of sources: the job's, then those added during the run
    indexes: Sequence[Index]
    orders: Sequence[SourceOrder]
    stages: Sequence[PlannedStep]  # planned steps that are retained, oldest first
    quarantine: Sequence[Quarantined]
    state: StreamState  # state after the last planned step
    start: int  # the first step of this session
    loaders: tuple[str, ...] = ()

    def lookup(self, source: int) -> SampleLookup:
        """Return the object that locates rows in the stream of a source."""
        return SampleLookup(
            index=self.indexes[source], order=self.orders[source], slice_rows=self.job.slice_rows
        )

    def path(self, source: int, file: int) -> str:
        """Return the path of a file; an empty text if the source has no such file."""
        files = self.indexes[source].files
        return files[file].path if file < len(files) else ""

    def row_unit(self, source: int) -> str:
        """Return the unit in which a source counts its rows: "row" or "byte"."""
        return self.indexes[source].row_unit

    def retained(self) -> str:
        """Return the range of steps whose plans are retained, as text; "none" if there is none."""
        steps = [s.plan.step for s in self.stages]
        return f"{steps[0]} to {steps[-1]}" if steps else "none"


def explain(what: int | str | SampleId, known: Known) -> Explanation:
    """Return the explanation of a step by its number, or of a sample by its id or the id's text.

    Raise ``PlanError`` for a step that is not retained, or an id that no run can have.
    """
    if isinstance(what, str):
        return explain_sample(parse_id(what), known)
    try:
        numbers = [operator.index(n) for n in (what[1:] if isinstance(what, SampleId) else (what,))]
    except TypeError:
        raise PlanError(
            f"explain: expected the number of a step, a SampleId or its text, got {what!r}"
        ) from None
    if isinstance(what, SampleId):
        return explain_sample(SampleId(what.source, *numbers), known)
    return explain_step(stage_of(numbers[0], known.stages, known.state.step), known)


def stage_of(step: int, stages: Sequence[PlannedStep], following: int) -> PlannedStep:
    """Return a retained planned step; raise ``PlanError`` if it is not retained.

    ``following``: the first step that is not planned yet.
    """
    for stage in stages:
        if stage.plan.step == step:
            return stage
    steps = [s.plan.step for s in stages]
    held = (
        f"name a step whose plan is kept: {steps[0]} to {steps[-1]}"
        if steps
        else "wait until a step is planned"
    )
    state = (
        "is not planned yet"
        if step >= following
        else "does not exist: steps count from 0"
        if step < 0
        else "was planned, but its plan is no longer kept"
    )
    raise PlanError(f"it {state}", step, held)


def explain_step(stage: PlannedStep, known: Known) -> StepExplanation:
    """Return the explanation of a planned step."""
    plan = stage.plan
    return StepExplanation(
        step=plan.step,
        skipped=stage.skipped,
        digest=stage.digest,
        samples=len(plan),
        documents=documents_of_plan(plan),
        rows=plan.row_kind,
        tokens=int(plan.tokens.sum()),
        unit="tokens" if known.job.batch.mixes_tokens else "samples",
        sources=_shares(plan, known),
        weights_from=weights_from(stage, known.job),
        trail=tuple(plan.extra.get("trail", ())),
        sync=known.job.sync,
        model=shown_model(known.job),
        fill=plan.fill(),
        modules=tuple(
            _placement(plan, name, known.job)
            for name in sorted(plan.modules, key=lambda n: (n != "backbone", n))
        ),
        stage=known.job.batches.stage(plan.step),
        stage_words=stage_of_step(known.job, plan.step),
    )


def documents_of_plan(plan: LoadingPlan) -> int:
    """Return the number of documents of a plan's samples."""
    return len(plan) if plan.documents is None else int(plan.documents.counts.sum())


def weights_from(stage: PlannedStep, job: Job) -> str:
    """Describe the origin of a step's weights: set_mixture, the sources, the job or a schedule."""
    after, step = stage.after, stage.plan.step
    assert isinstance(after, StreamState), "explanations need the steps of the planner itself"
    since = (
        ""
        if after.mix_step == step
        else f", in force since step {after.mix_step} (mix_every={job.mix_every!r})"
    )
    if change := latest(after.events, -1, after.mix_step, mixture_starts(job)):
        return f"set_mixture from step {change[0].at}{since}"
    number = job.batches.number(step)
    if job.stages and (own := job.stages[number]).mixture is not None:
        if isinstance(own.mixture, Mapping):
            return "the mixture of the stage"
        of = step - job.batches.parts[number].first
        return f"the schedule of the stage, {shown_name(own.mixture)}, at its step {of}"
    if job.mixture is None:
        return f"the sources' own weights{since}"
    if isinstance(job.mixture, Mapping):
        return f"the job's mixture{since}"
    name = getattr(job.mixture, "__name__", None) or repr(job.mixture)
    return f"the job's schedule {name} at step {after.mix_step}{since}"


def _shares(plan: LoadingPlan, known: Known) -> tuple[SourceShare, ...]:
    n, weights = len(plan.names), dict(plan.extra.get("weights", {}))
    samples = np.bincount(plan.source, minlength=n)
    tokens = np.bincount(plan.source, weights=plan.tokens, minlength=n).astype(np.int64)
    mixed = tokens if known.job.batch.mixes_tokens else samples
    total, all_mixed = sum(weights.values()) or 1.0, int(mixed.sum()) or 1
    return tuple(
        SourceShare(
            name=name,
            weight=float(weights.get(name, 0.0)),
            wanted=float(weights.get(name, 0.0)) / total,
            realised=int(mixed[i]) / all_mixed,
            samples=int(samples[i]),
            tokens=int(tokens[i]),
            files=_files(plan, i, known),
        )
        for i, name in enumerate(plan.names)
    )


def _files(plan: LoadingPlan, source: int, known: Known) -> tuple[FileRows, ...]:
    mine = np.flatnonzero(plan.source == source)
    order = mine[np.lexsort((plan.row[mine], plan.file[mine], plan.epoch[mine]))]
    if not len(order):
        return ()
    epoch, file, row = plan.epoch[order], plan.file[order], plan.row[order]
    first = np.flatnonzero(np.append(True, (epoch[1:] != epoch[:-1]) | (file[1:] != file[:-1])))
    last = np.append(first[1:], len(order)) - 1
    return tuple(
        FileRows(
            path=known.path(source, int(file[a])),
            file=int(file[a]),
            epoch=int(epoch[a]),
            first=int(row[a]),
            last=int(row[b]),
            samples=b - a + 1,
            unit=known.row_unit(source),
        )
        for a, b in zip(first.tolist(), last.tolist(), strict=True)
    )


def _placement(plan: LoadingPlan, name: str, job: Job) -> ModulePlacement:
    a, loads = plan.pieces(name), plan.loads(name).sum(axis=1)
    slowest = int(loads.argmax())
    inside = np.flatnonzero(a.bucket == slowest)
    dearest = inside[np.argsort(-a.cost[inside], kind="stable")][:DEAREST]
    held = np.bincount(a.bins(), weights=a.size, minlength=a.n_buckets * a.n_microbatches).astype(
        np.int64
    )
    return ModulePlacement(
        name=name,
        axis=a.axis if a.on is None else f"{a.axis} on {a.on}",
        buckets=a.n_buckets,
        microbatches=a.n_microbatches,
        capacity=a.capacity,
        items=len(plan.modules[name].sample),
        imbalance=plan.imbalance(name),
        slowest=slowest,
        slowest_ranks=_ranks(plan, a, job, slowest),
        slowest_over_mean=float(loads[slowest]) / (float(loads.mean()) or 1.0),
        slowest_items=len(inside),
        dearest=tuple(
            ExpensiveItem(
                sample=str(plan.sample_id(int(a.sample[i]))),
                tokens=int(a.size[i]),
                cost=float(a.cost[i]),
                share=float(a.cost[i]) / (float(loads[slowest]) or 1.0),
            )
            for i in dearest.tolist()
        ),
        peak_tokens=int(held.max()),
        peak_at=divmod(int(held.argmax()), a.n_microbatches),
        limit=limit(plan, plan.imbalance(name), name),
        host_memory=host_memory(plan) if name == "backbone" else "",
    )


def _ranks(plan: LoadingPlan, a: Assignment, job: Job, bucket: int) -> tuple[int, ...]:
    return tuple((a.on or plan.place or job.place).buckets(a.axis)[bucket])


def _ring(plan: LoadingPlan, name: str, sample: int) -> list[int]:
    """Return the buckets that share a sample, in ring order; empty if it is not split."""
    if plan.tasks is None or name != "backbone":
        return []
    found: list[int] = plan.tasks.table.ranks(int(plan.tasks.task[sample])).tolist()
    return found if len(found) > 1 else []


def explain_sample(sample: SampleId, known: Known) -> SampleExplanation:
    """Return the explanation of a sample; raise ``PlanError`` for an id that no run can have."""
    source, chunk = _checked(sample, known)
    base: dict[str, Any] = {
        "sample": str(sample),
        "path": known.path(source, sample.file),
        "row": sample.row,
        "row_unit": known.row_unit(source),
    }
    row = (source, sample.epoch, sample.file, sample.row)
    faults = [bad for bad in known.quarantine if (bad.source, bad.epoch, bad.file, bad.row) == row]
    for stage in reversed(known.stages):
        if (at := find(sample, stage.plan)) >= 0:
            placed = _placed(stage, at, known, base)
            # A placed sample is in quarantine if one of its images failed to decode.
            late = "".join(
                f" In quarantine: {bad.reason}." for bad in faults if bad.part == sample.part
            )
            return replace(placed, words=placed.words + late, pieces=_pieces(sample, known))
    if faults:
        return SampleExplanation(
            status="quarantined", words=f"The row is in quarantine: {faults[0].reason}.", **base
        )
    status, words = _without_plan(sample, source, chunk, known)
    return SampleExplanation(status=status, words=words, **base)


def refuse_no_row(found: Explanation) -> None:
    """Raise ``PlanError`` if a row number is a byte inside a line, where no row begins.

    The file is read up to that line. An answer with a plan or a reason is not checked, since its
    row exists.
    """
    if not isinstance(found, SampleExplanation) or found.row_unit != "byte":
        return
    if found.status in ("placed", "skipped", "quarantined"):
        return
    around = rows_around(found.path, found.row)
    if around is None or around[0] == found.row:
        return
    start, counted = around

    def at(row: int) -> str:
        given = parse_id(found.sample)
        return str(SampleId(given.source, given.epoch, given.file, row, given.part))

    remedy = f"the id of the line with this byte is {at(start)}"
    if counted is not None:
        remedy += f", and that of line {found.row + 1} is {at(counted)}"
    raise PlanError(
        f"no sample {found.sample}: expected the byte at which a row of {found.path} begins, got "
        f"byte {found.row}, where no row begins",
        remedy=remedy,
    )


def _pieces(sample: SampleId, known: Known) -> tuple[str, ...]:
    """Return a text for each piece of a sample in the retained plans, in stream order."""
    found = []
    for stage in known.stages:
        if (plan := stage.plan).offset is None:
            continue
        node = np.empty(len(plan), np.int64)
        node[plan.main.sample] = np.arange(len(plan))
        for i in rows_of_sample(sample, plan).tolist():
            first, at = int(plan.offset[i]), int(node[i])
            found.append(
                f"step {plan.step}: tokens {first} to {first + int(plan.tokens[i]) - 1} in "
                f"microbatch {plan.main.microbatch[at]} of bucket {plan.main.bucket[at]}"
            )
    return tuple(found)


def find(sample: SampleId, plan: LoadingPlan) -> int:
    """Return the row of a sample in a plan; -1 if the plan does not have it."""
    at = rows_of_sample(sample, plan)
    return int(at[0]) if len(at) else -1


def rows_of_sample(sample: SampleId, plan: LoadingPlan) -> np.ndarray:
    """Return the rows of a sample in a plan: one, or its pieces."""
    if sample.source not in plan.names:
        return np.zeros(0, np.int64)
    columns = ("epoch", "file", "row", "part")
    hit = plan.source == plan.names.index(sample.source)
    for name in columns:
        hit = hit & (getattr(plan, name) == getattr(sample, name))
    return np.flatnonzero(hit)


def _checked(sample: SampleId, known: Known) -> tuple[int, int]:
    """Return the numbers of the source and the chunk of a sample id.

    Raise ``PlanError`` for an id that no run of the job can have.
    """
    if sample.source not in known.names:
        raise PlanError(
            f"no sample {sample}: unknown source "
            f"{sample.source!r}{did_you_mean(sample.source, known.names)}"
        )
    source = known.names.index(sample.source)
    files, given = (
        known.indexes[source].files,
        known.job.sources[source].epochs if source < len(known.job.sources) else None,
    )
    epochs = known.orders[source].begun(given)
    if not 0 <= sample.file < len(files):
        raise PlanError(
            f"no sample {sample}: source {sample.source!r} has files 0 to {len(files) - 1}"
        )
    if sample.epoch < 0 or (epochs is not None and sample.epoch >= epochs):
        wanted = "an epoch of at least 0"
        if epochs is not None:
            wanted = "epoch 0" if epochs == 1 else f"an epoch from 0 to {epochs - 1}"
            wanted += f" of source {sample.source!r}"
        raise PlanError(f"no sample {sample}: expected {wanted}, got {sample.epoch}")
    chunk = known.lookup(source).chunk_of(sample.file, sample.row)
    if chunk < 0:
        raise PlanError(
            f"no sample {sample}: {files[sample.file].path} has no "
            f"{known.row_unit(source)} {sample.row}"
        )
    if not known.lookup(source).in_epoch(sample, chunk):
        raise PlanError(f"no sample {sample}: its epoch ends before it, since epochs is {given}")
    return source, chunk


def _without_plan(sample: SampleId, source: int, chunk: int, known: Known) -> tuple[str, str]:
    """Return the status, and its sentence, of a row in no retained plan and not in quarantine."""
    cursor = Cursor(*known.state.cursors[source].tolist())
    passed = known.lookup(source).passed(sample, chunk, cursor)
    where = (
        f"the stream of {sample.source!r} is in epoch {cursor.epoch}, group "
        f"{cursor.group} of {known.orders[source].n_groups}"
    )
    where += f", window {cursor.window}; the next step is {known.state.step}"
    dropper = "a filter or on_long" if known.job.on_long == "drop" else "a filter"
    complete = known.start == 0 and (not known.stages or known.stages[0].plan.step == 0)
    if passed is None:
        return (
            "undecided",
            "It is in the group that the stream reads now: not drawn yet, or dropped by "
            f"{dropper}; {where}.",
        )
    if not passed and not known.state.active[source]:
        return "never", f"Never drawn: the source has left the job, as by a budget; {where}."
    if not passed and not complete and (known.job.look_ahead > 1 or known.job.overflow == "defer"):
        return (
            "undecided",
            f"Not drawn yet, or chosen early by a step whose plan is no longer kept; {where}.",
        )
    if not passed:
        return "ahead", f"Not drawn yet: {where}."
    if complete:
        return (
            "no sample",
            f"The stream has passed this row and has no such sample: {dropper} dropped the "
            f"row, or it has fewer pieces; {where}.",
        )
    return (
        "gone",
        f"Drawn in a step whose plan is no longer kept (steps {known.retained()} are), or "
        f"dropped by {dropper}; {where}.",
    )


def _placed(stage: PlannedStep, at: int, known: Known, base: dict[str, Any]) -> SampleExplanation:
    plan = stage.plan
    placed = tuple(
        _item(plan, name, i, known.job)
        for name in sorted(plan.modules, key=lambda n: (n != "backbone", n))
        for i in np.flatnonzero(plan.modules[name].sample == at).tolist()
    )
    sentence = (
        "The step was skipped: planned and not delivered."
        if stage.skipped
        else f"In step {plan.step}."
    )
    return SampleExplanation(
        status="skipped" if stage.skipped else "placed",
        words=sentence,
        step=plan.step,
        position=at,
        of_samples=len(plan),
        substep=None if plan.substep is None else int(plan.substep[at]),
        tokens=int(plan.tokens[at]),
        documents=() if plan.documents is None else tuple(plan.documents.lengths[at].tolist()),
        loader=None
        if stage.loader is None or not known.loaders
        else known.loaders[int(stage.loader[at])],
        placed=placed,
        **base,
    )


def _item(plan: LoadingPlan, name: str, i: int, job: Job) -> SlotOfSample:
    a, place = plan.modules[name], plan.place or job.place
    bucket, cost = int(a.bucket[i]), float(a.cost[i])
    inside = np.flatnonzero(a.bucket == bucket)
    load = float(a.cost[inside].sum())
    in_bucket, in_step = _cost_rank(a.cost[inside], int((inside < i).sum())), _cost_rank(a.cost, i)
    mean = float(a.cost.mean()) or 1.0
    method = (
        next(
            (t for t in reversed(plan.extra.get("trail", ())) if not t.startswith("broadcast_at")),
            "",
        )
        if name == "backbone"
        else ""
    )
    why = f"cost rank {in_step:,} of {len(a.cost):,} in the step ({cost / mean:.2f}x the mean)"
    why += f", rank {in_bucket:,} of {len(inside):,} in its bucket"
    ring = _ring(plan, name, int(a.sample[i]))
    if ring:
        why += f"; in pieces on the ring of buckets {', '.join(map(str, ring))}"
    if name == "backbone" and plan.tasks is not None:
        ratio = float(plan.tasks.table.offload[plan.tasks.task[a.sample[i]]])
        why += f"; offload ratio {ratio:.2f}" if ratio else ""
    return SlotOfSample(
        module=name,
        bucket=bucket,
        microbatch=int(a.microbatch[i]),
        slot=int(a.slot[i]),
        ranks=tuple(r for b in ring or [bucket] for r in _ranks(plan, a, job, b)),
        constructor=constructors_of(place, a.axis, a.on)[bucket],
        size=int(a.size[i]),
        cost=cost,
        share=cost / (load or 1.0),
        nth_of_bucket=in_bucket,
        nth_of_step=in_step,
        why=why + (f"; placed by {method}" if method else ""),
    )


def _cost_rank(costs: np.ndarray, i: int) -> int:
    """Return the rank of item ``i`` by decreasing cost, from 1; ties keep the order of the draw.

    Balance methods break ties in the same way.
    """
    return 1 + int((costs > costs[i]).sum()) + int((costs[:i] == costs[i]).sum())
