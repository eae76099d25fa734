"""A ``StreamState`` as plain JSON values, and the fingerprint that ties it to its job."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from overlord.batch_ramp import Ramp
from overlord.checks import describe_error
from overlord.errors import MOST, StateMismatch
from overlord.hashing import digest
from overlord.job.hooks import Hook
from overlord.job.job import Job, Source
from overlord.job.stages import Stage
from overlord.loader.samples import SourceOrder
from overlord.mesh import LATER_FIELDS, NOT_THE_STREAM, Batch
from overlord.messages.control import AddSource, Cursor, SourceLost, StreamState
from overlord.planning.schedule.base import has_state
from overlord.planning.schedule.by_stage import job_schedule
from overlord.planning.state_json import (
    event_in,
    event_out,
    fingerprint_in,
    fingerprint_out,
    reports_in,
    reports_out,
    state_problem,
)
from overlord.planning.strategies import RawPlan
from overlord.setup.changed_budgets import with_changed_budgets
from overlord.sources.index import Index, RemovedSource
from overlord.transforms.pipeline import Pipeline

# ----------------------------------------------------------------------------
# The fingerprint of a job: one text for each property that shapes the stream.
#
# An error can name each entry that differs. A saved state holds the fingerprint of its job.
# ``setup/job_agreement.py`` compares some of the same texts between ranks.

# Fields of a Job that shape the stream; their texts are entries of the fingerprint.
STREAM_FIELDS = (
    "until",
    "draw",
    "mix_every",
    "look_ahead",
    "max_age",
    "overflow",
    "shuffle_chunks",
    "slice_rows",
    "chunk_bytes",
    "feedback_lag",
    "on_long",
)
# The entry with the tokens of the longest sample: where it is not the context, and of chunks.
LIMIT = "max_document"


def job_fingerprint(
    job: Job, indexes: Sequence[Index], pipelines: Sequence[Pipeline], added: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the fingerprint of a job: a text for each entry.

    ``place``, ``sync`` and ``model`` are left out, since they change the slots of a step and not
    its samples. So a state fits any mesh. The weight of a source in ``added`` applies next to any
    mixture, and has its own entry.
    """
    entries = {
        "sources": digest(*job.names),
        "seed": str(job.seed),
        "batch": digest(json.dumps(batch_fields(job), sort_keys=True)),
        "mixture": digest(mixture_text(job)),
        "strategy": job.strategy
        if isinstance(job.strategy, str)
        else "function " + digest(code_text(job.strategy)),
    }
    entries |= {name: str(getattr(job, name)) for name in STREAM_FIELDS}
    if job.document_limit != job.batch.context or job.batch.in_chunks:
        entries[LIMIT] = str(job.document_limit)
    for k, stage in enumerate(job.stages):
        entries[f"stage {k}"] = digest(stage_text(job, stage))
    if job.hooks:
        entries["hooks"] = digest(*(code_text(hook) for hook in job.hooks))
    for source, index, pipeline in zip(job.sources, indexes, pipelines, strict=True):
        entries[f"source {source.name}: files"] = index.fingerprint
        entries[f"source {source.name}: transforms"] = pipeline.fingerprint
        entries[f"source {source.name}: reading"] = reading_text(source)
        if source.name in added:
            entries[f"source {source.name}: weight"] = repr(float(source.weight))
    return entries


def saved_limit(saved: Any, job: Job) -> int:
    """Return the longest sample of a saved run, for a job whose own default depends on its mesh.

    The job's own limit is returned if it was given.
    """
    then = saved.get("fingerprint") if isinstance(saved, Mapping) else None
    if job.max_document is not None or not job.hybrid or not isinstance(then, Mapping):
        return job.document_limit
    try:
        return max(1, int(then.get(LIMIT, job.batch.context)))
    except (TypeError, ValueError):  # damaged: ``restore`` raises the error
        return job.document_limit


def source_mark(entries: Mapping[str, str], name: str) -> str:
    """Return one digest of the entries of a source."""
    return digest(
        *(
            f"{entry}={entries[entry]}"
            for entry in sorted(entries)
            if entry.startswith(f"source {name}: ")
        )
    )


def batch_fields(job: Job, batch: Batch | None = None) -> dict[str, Any]:
    """Return the fields of a batch, by default the job's, that shape the stream; ramps as text.

    Fields of packing and shape are left out at their defaults, as in earlier saved states.
    """
    batch = batch or job.batch
    every = {f.name: getattr(batch, f.name) for f in fields(batch)}
    found = {
        k: repr(v) if isinstance(v, Ramp) else v
        for k, v in every.items()
        if k not in NOT_THE_STREAM
    }
    for field in fields(batch):
        if field.name in LATER_FIELDS and found[field.name] == field.default:
            del found[field.name]
    return found


def reading_text(source: Source) -> str:
    """Return a text of the options of a source that decide which of its rows are read."""
    return (
        f"epochs {source.epochs}, shuffle {source.shuffle}, max_sample_bytes "
        f"{source.max_sample_bytes}"
        + (f", on_lost {source.on_lost}" if source.on_lost != "fail" else "")
        + (f", max_tokens {source.max_tokens}" if source.max_tokens is not None else "")
    )


def mixture_text(job: Job) -> str:
    """Return the text of the job's mixture: weights as JSON, or the text of its schedule."""
    if job.mixture is None:
        return json.dumps([float(s.weight) for s in job.sources])
    return _weights_text(job, job.mixture)


def _weights_text(job: Job, mixture: Any) -> str:
    if isinstance(mixture, Mapping):
        return json.dumps([float(mixture.get(n, 0.0)) for n in job.names])
    return code_text(mixture)


def stage_text(job: Job, stage: Stage) -> str:
    """Return a text of the steps, the batch and the mixture of a stage."""
    fields = batch_fields(job, stage.batch_of(job))
    mixture = "" if stage.mixture is None else _weights_text(job, stage.mixture)
    own = "own" if stage.batch is not None else "job's"
    return json.dumps([stage.steps, own, fields, mixture], sort_keys=True)


def code_text(function: Any) -> str:
    """Return a text that identifies a user's function or object, the same in every process.

    The text must not contain a memory address.
    """
    if isinstance(own := getattr(function, "fingerprint", None), str):
        return own
    if isinstance(function, functools.partial):
        return (
            f"{code_text(function.func)} of {function.args!r} {sorted(function.keywords.items())!r}"
        )
    if isinstance(function, (Hook, RawPlan)):
        return (
            f"{[getattr(function, f.name) for f in fields(function) if f.name != 'fn']} "
            f"{code_text(function.fn)}"
        )
    if not inspect.isroutine(function) and repr(function) != object.__repr__(function):
        return repr(function)
    code = function if inspect.isroutine(function) else type(function)
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        module = getattr(code, "__module__", "")
        return f"{module}.{getattr(code, '__qualname__', type(code).__qualname__)}"


# ----------------------------------------------------------------------------
# Conversion of a ``StreamState`` to JSON values and back, with the errors of a wrong state.
#
# A state holds names and numbers only; nothing in it is ever executed. The JSON form of events
# and reports is in ``planning/state_json.py``.

STATE_VERSION = 1
OTHER_VERSION = "resume it with the version of Overlord that saved it"
NOT_A_STATE = "pass the result of state_dict(), or a file that `overlord run --save` wrote"
DATASET_STATE = "it is the state of a Loader: load it there, or json.loads its 'stream'"


def state_to_json(
    state: StreamState,
    job: str,
    names: Sequence[str],
    fingerprint: Mapping[str, str],
    stage: str | int | None = None,
) -> dict[str, Any]:
    """Return a state as plain JSON values, keyed by the names of its sources.

    ``stage``: that of the next step, for readers of the state; it follows from the job.
    """
    return {
        "version": STATE_VERSION,
        "job": job,
        "fingerprint": fingerprint_out(fingerprint, names),
        "step": state.step,
        **({} if stage is None else {"stage": stage}),
        "cursors": dict(zip(names, state.cursors.tolist(), strict=True)),
        "owed": dict(zip(names, state.owed, strict=True)),
        "active": dict(zip(names, state.active, strict=True)),
        "events": [event_out(e) for e in state.events],
        "mix": [state.mix_step, state.mix_epoch],
        **(
            {"ahead": ahead}
            if (
                ahead := {n: a.tolist() for n, a in zip(names, state.ahead, strict=False) if len(a)}
            )
            else {}
        ),
        **(
            {"cut": {name: n for name, n in zip(names, state.cut, strict=False) if n}}
            if any(state.cut)
            else {}
        ),
        "counts": {
            k: {name: n for name, n in zip(names, v.tolist(), strict=True) if n}
            for k, v in state.counts.items()
        },
        **({"weights": dict(zip(names, state.weights, strict=True))} if state.weights else {}),
        **({"schedule": dict(state.schedule)} if state.schedule else {}),
        **({"reports": reports_out(state.reports)} if state.reports else {}),
    }


def state_from_json(
    saved: Mapping[str, Any],
    job: Job,
    orders: Sequence[SourceOrder],
    fingerprint: Mapping[str, str],
    allow: tuple[str, ...] = (),
) -> StreamState:
    """Return the state that ``saved`` holds, after checking that it belongs to this job.

    A difference is a ``StateMismatch``, unless ``allow`` names its entry.
    """
    _check_form(saved)
    try:
        _check_cut(saved, job, fingerprint)
        allowed = _check_fingerprint(saved, job, fingerprint, allow)
        state = with_changed_budgets(_state_of(saved, job, orders), job, orders, allowed)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as e:
        remedy = "save and load the result of state_dict() unchanged"
        problem = f"the state is damaged: {type(e).__name__}: {e}"
        raise StateMismatch({}, remedy, problem) from e
    _check_ahead(state, job)
    return _with_schedule(state, job, allow)


def _check_form(saved: Any) -> None:
    if problem := state_problem(saved):
        of_dataset = isinstance(saved, Mapping) and "stream" in saved
        raise StateMismatch({}, DATASET_STATE if of_dataset else NOT_A_STATE, problem)
    if saved["version"] != STATE_VERSION:
        raise StateMismatch(
            {"version": (str(saved["version"]), str(STATE_VERSION))},
            OTHER_VERSION,
            "the state has another version",
        )


def _state_of(saved: Mapping[str, Any], job: Job, orders: Sequence[SourceOrder]) -> StreamState:
    names = job.names
    cursors = [Cursor(*map(int, saved["cursors"].get(n, Cursor()))) for n in names]
    if any(len(c) != len(Cursor()) for c in saved["cursors"].values()):
        raise ValueError("cursors: expected six numbers for each source, got another number")
    # If ``allow`` permits fewer files than the cursor has passed, its epoch is over.
    cursors = [
        c if c.group < o.n_groups else Cursor(c.epoch + 1)
        for c, o in zip(cursors, orders, strict=True)
    ]
    return StreamState(
        step=int(saved["step"]),
        cursors=np.array(cursors, np.int64),
        owed=tuple(int(saved["owed"].get(n, 0)) for n in names),
        active=tuple(bool(saved["active"].get(n, True)) for n in names),
        events=tuple(
            e
            for e in map(event_in, saved["events"])
            if not isinstance(e, AddSource) or e.name in names
        ),
        mix_step=int(saved["mix"][0]),
        mix_epoch=int(saved["mix"][1]),
        ahead=tuple(np.array(saved["ahead"].get(n, ()), np.int32) for n in names)
        if saved.get("ahead")
        else (),
        cut=tuple(int(saved.get("cut", {}).get(n, 0)) for n in names)
        if job.batch.in_chunks
        else (),
        counts={
            k: np.array([v.get(n, 0) for n in names], np.int64) for k, v in saved["counts"].items()
        },
        weights=tuple(float(saved["weights"].get(n, 0.0)) for n in names)
        if "weights" in saved
        else (),
        schedule=dict(saved["schedule"])
        if "schedule" in saved and has_state(job_schedule(job))
        else None,
        reports=reports_in(saved.get("reports", {})),
    )


def _check_ahead(state: StreamState, job: Job) -> None:
    """Refuse a state with passed-over samples if the batch is counted in tokens."""
    if job.batch.tokens is None or job.batch.in_chunks or not any(map(len, state.ahead)):
        return
    raise StateMismatch(
        {
            "ahead": (
                "samples that were passed over",
                "a batch in tokens, which takes samples in order",
            )
        },
        "continue with a batch in samples and look_ahead=1 until a state has no 'ahead'; change "
        "the batch then",
    )


def _check_cut(saved: Mapping[str, Any], job: Job, fingerprint: Mapping[str, str]) -> None:
    """Refuse a state with cut samples for a job that has no rest of them, whatever it allows."""
    if not saved.get("cut"):
        return
    if not job.batch.in_chunks:
        raise StateMismatch(
            {"cut": ("samples of which steps have received a part", "a batch of whole samples")},
            'continue with packing="concat"; the end of an epoch or of the data has no cut sample',
        )
    then = saved["fingerprint"]
    if other := {
        name: (str(then.get(name)), fingerprint[name])
        for name in (LIMIT, "on_long")
        if then.get(name) != fingerprint[name]
    }:
        raise StateMismatch(
            other,
            "set the saved values: steps have received parts of samples, which would end elsewhere",
        )


def _with_schedule(state: StreamState, job: Job, allow: tuple[str, ...]) -> StreamState:
    """Return the state, without the state of its schedule if that does not fit.

    ``allow`` must permit dropping it; otherwise raise ``StateMismatch``.
    """
    if state.schedule is None:
        return state
    try:  # on a copy: a state that does not fit must change nothing
        copy.deepcopy(job_schedule(job)).load_state_dict(copy.deepcopy(state.schedule))
    except Exception as e:
        if {"mixture", "schedule"} & set(allow):  # the other mixture starts without a state
            return replace(state, schedule=None)
        raise StateMismatch(
            {"schedule": ("its saved state", describe_error(e))},
            "pass allow=('schedule',) to start it without its state",
        ) from e
    return state


# mismatches


def _check_fingerprint(
    saved: Mapping[str, Any], job: Job, now: Mapping[str, str], allow: tuple[str, ...]
) -> dict[str, tuple[str, str]]:
    """Return the differences that ``allow`` permits; raise ``StateMismatch`` for others."""
    differ, absent = _differences(saved, job, now)
    allowed = {entry: pair for entry, pair in differ.items() if entry in allow}
    differ = {entry: pair for entry, pair in differ.items() if entry not in allow}
    if not differ:
        return allowed
    if "batch" in differ:
        differ["batch"] = describe_batches(*differ["batch"], job)
    entries = (
        f"({', '.join(repr(entry) for entry in sorted(differ))},)"
        if len(differ) <= MOST
        else "tuple(error.differences)"
    )
    remedy = f"pass allow={entries}; the stream then continues, but differs from the saved one"
    problem = "the state belongs to another job"
    if saved["job"] != job.name:
        problem += f", {saved['job']!r}; this is {job.name!r}"
    if absent:
        known = (
            f"a state holds no code: list the sources added in mid-run ({', '.join(absent)}) "
            "last in Job.sources"
        )
        raise StateMismatch(differ, f"{known}; or, to continue without, {remedy}", problem)
    raise StateMismatch(differ, f"if this is intended, {remedy}", problem)


def _differences(
    saved: Mapping[str, Any], job: Job, now: Mapping[str, str]
) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return the entries of the fingerprint that differ, and added sources that are missing.

    Each entry has the texts of the saved and of the current job.
    """
    then = fingerprint_in(saved["fingerprint"], list(saved["cursors"]))
    differ = {
        entry: (then.get(entry, "nothing"), now.get(entry, "nothing"))
        for entry in sorted({*then, *now})
        if then.get(entry) != now.get(entry)
    }
    absent = []
    for event in map(event_in, saved["events"]):
        if not isinstance(event, AddSource):
            continue
        if event.name not in job.names:
            absent.append(event.name)
            differ[f"source {event.name}: added"] = (
                f"at step {event.at}",
                "not among the job's sources",
            )
        elif not any(
            entry.startswith(f"source {event.name}: ") for entry in differ
        ) and event.fingerprint != source_mark(now, event.name):
            differ[f"source {event.name}: added"] = (
                event.fingerprint,
                source_mark(now, event.name),
            )
    return differ, absent


def describe_batches(saved: str, found: str, job: Job) -> tuple[str, str]:
    """Return both sides of a difference in the batch as text for an error.

    The saved state has only a digest of the batch, so the current batch is shown in full next to
    its digest.
    """
    here = batch_fields(job)
    values = ", ".join(f"{k}={v!r}" for k, v in here.items())
    return f"{saved}, a digest of {', '.join(here)}", f"{found}, which is {values}"


# ----------------------------------------------------------------------------
# Sources that were removed from a job before the state that is resumed.


def removed_before(saved: Mapping[str, Any], shuffle_chunks: int) -> dict[str, RemovedSource]:
    """Return the sources that were removed before the step of a saved state."""
    try:
        lost = [
            e
            for e in map(event_in, saved["events"])
            if isinstance(e, SourceLost) and e.at <= saved["step"]
        ]
        groups = {e.name: int(saved["cursors"][e.name][1]) + 1 for e in lost}
        return {
            e.name: RemovedSource(
                saved["fingerprint"][f"source {e.name}: files"], groups[e.name] * shuffle_chunks
            )
            for e in lost
        }
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return {}  # not a state: ``restore`` raises the error
