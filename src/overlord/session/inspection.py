"""Read-only queries of a running job: plans, explanations, quarantined rows, metrics.

Except for ``profile``, the job is read in calls on its event loop: such an answer is of one moment.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overlord.errors import JobError, PlanError
from overlord.line_numbers import line_numbers
from overlord.observe.metrics import actors, job_metrics, loader_name, sum_counters
from overlord.plan.plan import LoadingPlan
from overlord.sample import Buffer
from overlord.session.running_job import RunningJob
from overlord.session.runtime import counted
from overlord.setup.options import Options, ring_bytes

if TYPE_CHECKING:
    from overlord.client.client import Client
    from overlord.observe.explain import Known
    from overlord.observe.explanation import Explanation
    from overlord.planning.graph.dgraph import DGraph
    from overlord.planning.spec import Quarantined
    from overlord.sample import SampleId
    from overlord.scaling.profile import JobProfile
    from overlord.serving.control_server import RemoteClient


def plan(running: RunningJob, step: int) -> LoadingPlan:
    step = step_number("plan", step)
    found, steps = running.loop.call(
        lambda: (running.runtime.plans.of(step), running.runtime.plans.steps()), "the planner"
    )
    if not found:
        kept = f"{min(steps)} to {max(steps)}" if steps else "none"
        raise PlanError(f"expected a kept step, got step {step}", step, f"kept steps: {kept}")
    last: LoadingPlan = found[-1].plan
    return last


def graph(running: RunningJob, step: int) -> DGraph:
    from overlord.observe.explain import stage_of
    from overlord.planning.graph.lineage import planned_graph

    step = step_number("graph", step)
    known = current_knowledge(running)
    stage = stage_of(step, known.stages, known.state.step)
    assert stage.loader is not None
    job = running.job
    return planned_graph(
        stage.plan, job.batches.at(step), job.place, stage.loader, known.loaders, job.sync
    )


def explain(running: RunningJob, what: int | str | SampleId) -> Explanation:
    """Explain a step or a sample; the error for an unplanned step says what its plan waits for."""
    from overlord.observe import explain as explaining

    known = current_knowledge(running)
    try:
        found = explaining.explain(what, known)
    except PlanError as e:
        if not running.begun or running.closed or e.step < known.state.step:
            raise
        waits = running.waiting_for(min(running.clients, default=0))
        over = waits.startswith("nothing: ")
        reason = f", since {waits.removeprefix('nothing: ')}" if over else f", waiting for {waits}"
        raise PlanError(f"{e.problem}{reason}", e.step, e.remedy) from None
    explaining.refuse_no_row(found)
    return found


def current_knowledge(running: RunningJob) -> Known:
    """Return a snapshot of the job, its plans and its state, for explanations."""
    from overlord.observe.explain import Known

    def act() -> Known:
        runtime, prepared = running.runtime, running.generation.prepared
        return Known(
            job=running.job,
            names=runtime.planner.spec.names,
            indexes=tuple(prepared.indexes),
            orders=tuple(prepared.orders),
            stages=tuple(runtime.plans),
            quarantine=tuple(runtime.planner.ledger.bad_rows()),
            state=runtime.planner.state(),
            start=running.generation.start.step,
            loaders=tuple(loader_name(row) for row in runtime.metrics()["loaders"]),
        )

    known: Known = running.loop.call(act, "the planner")
    return known


def summary_buffer(running: RunningJob) -> Buffer:
    buffer: Buffer = running.loop.call(
        lambda: running.runtime.planner.summary_buffer(), "the planner"
    )
    return buffer


def quarantine(running: RunningJob) -> list[dict[str, Any]]:
    rows = running.loop.call(lambda: running.runtime.planner.ledger.bad_rows(), "the planner")
    names, indexes = running.job.names, running.generation.prepared.indexes

    def path_of(q: Quarantined) -> str:
        files = indexes[q.source].files
        return files[q.file].path if q.file < len(files) else ""

    offsets = [(path_of(q), q.row) for q in rows if indexes[q.source].row_unit == "byte"]
    lines = line_numbers(offsets)
    return [
        {
            "source": names[q.source],
            "epoch": q.epoch,
            "file": q.file,
            "row": q.row,
            "part": q.part,
            "path": path_of(q),
            "reason": q.reason,
            "row_unit": (unit := indexes[q.source].row_unit),
            "line": lines.get((path_of(q), q.row)) if unit == "byte" else None,
        }
        for q in rows
    ]


def profile(running: RunningJob) -> JobProfile:
    if running.refresher is None:
        raise JobError(
            [
                "expected partition='auto', which measures sources, got "
                f"{running.options.partition!r}; launch with partition='auto'"
            ],
            "profile",
        )
    return running.refresher.refresh()


def metrics(running: RunningJob) -> dict[str, Any]:
    found: dict[str, Any] = running.loop.call(lambda: _metrics(running), "the event loop")
    return found


def _metrics(running: RunningJob) -> dict[str, Any]:
    generation = running.generation
    runtime, prepared = generation.runtime, generation.prepared
    running_metrics = runtime.metrics()
    planner = counted(runtime)
    at_nothing = running.prepared_for(len(planner.totals.samples)).zero_metrics()
    job = running.job
    found = job_metrics(
        planner, running_metrics, at_nothing, job.on_long, by_tokens=job.batch.mixes_tokens
    )
    for source in job.sources:
        found["sources"].get(source.name, {})["max_tokens"] = source.max_tokens
    for name, event in generation.lost_sources.items():
        found["sources"].get(name, {})["lost"] = {"step": event.at, "reason": event.reason}
    found["memory"]["budget"] = _budget(prepared.options)
    clients = dict(running.clients)
    of_clients = running_metrics.get("clients", {})
    return {
        **found,
        "stage": running.job.batches.stage(max(0, found["planned_steps"] - 1)),
        "uptime_s": time.monotonic() - running.started,
        "feedback": {**found["feedback"], "invalid": running.events.refused_reports},
        "files": sum_counters([prepared.handles.metrics(), *running_metrics.get("files", ())]),
        "clients": {r: _client_row(c, of_clients.get(r, {})) for r, c in clients.items()},
        "actors": actors(running_metrics, clients),
        "transfer": running_metrics.get("transfer", {}),
        "recoveries": running_metrics.get("recoveries", []),
        "shadows": running_metrics.get("shadows", []),
        "scaling": running_metrics.get("scaling", {}),
        "placement": running_metrics.get("placement", {}),
        "journal": running_metrics.get("journal") or runtime.journal.metrics(),
    }


def _budget(options: Options) -> dict[str, int]:
    """Return the memory bounds of ready samples, open files and steps of one worker."""
    return {"ready": options.buffer_bytes, "open": options.open_bytes, "steps": ring_bytes(options)}


def _client_row(client: Client | RemoteClient, there: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a client; ``there`` are the counts of its constructor worker."""
    return {
        "steps": max(client.steps, there.get("steps", 0)),
        "waited_s": max(client.waited_s, there.get("waited_s", 0.0)),
        "ready": max(len(client.queue), there.get("kept", 0)),
    }


def step_number(what: str, step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise PlanError(f"session.{what}: expected the number of a step, got {step!r}") from None
