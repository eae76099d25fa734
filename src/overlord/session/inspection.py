"""What people may ask of a running job: plans, where samples went, what is going on. Nothing here
changes it.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overlord.errors import JobError, PlanError
from overlord.job.job import Job
from overlord.observe.metrics import actors, added_up, job_metrics, loader_name
from overlord.plan.plan import LoadingPlan
from overlord.sample import Buffer
from overlord.session.runtime import counted
from overlord.setup.options import ring_bytes

if TYPE_CHECKING:
    from overlord.client.client import Client
    from overlord.concurrency.event_loop import EventLoop
    from overlord.messages.control import SourceLost, StreamState
    from overlord.observe.explain import Explanation, Known
    from overlord.planning.graph.dgraph import DGraph
    from overlord.sample import SampleId
    from overlord.scaling.profile import JobProfile
    from overlord.session.runtime import Runtime
    from overlord.setup.prepared_job import PreparedJob
    from overlord.setup.profile_store import Refresher


class Questions:
    """The half of ``Session`` that only looks. All answers come from the pump, so they are of one
    moment.
    """

    job: Job
    _blueprint: PreparedJob
    _clients: Mapping[int, Client]
    _host: Runtime
    _joining: PreparedJob | None
    _pump: EventLoop
    _start_state: StreamState
    _started: float
    _refused: int
    _refresher: Refresher | None
    _lost: dict[str, SourceLost]  # sources whose storage was given up, and that left

    def _blueprint_of(self, n: int, blueprint: PreparedJob | None = None) -> PreparedJob:
        """For what a planner says of so many sources: one elsewhere may have let a source join, and
        its answer be on the way.
        """
        known, joining = blueprint or self._blueprint, self._joining
        return (
            joining
            if joining is not None and len(known.job.names) < n == len(joining.job.names)
            else known
        )

    def plan(self, step: int) -> LoadingPlan:
        """The plan of a recent step (the last 256 are kept)."""
        step = step_number("plan", step)
        found, steps = self._pump.ask(
            lambda: (self._host.plans.of(step), self._host.plans.steps()), "the planner"
        )
        if not found:
            held = f"{min(steps)} to {max(steps)}" if steps else "none"
            raise PlanError(
                f"step {step} is not planned yet, or no longer held", step, f"steps held: {held}"
            )
        return found[-1].plan

    def graph(self, step: int) -> DGraph:
        """The graph of a planned step, with what strategies are not told: who read each sample, who
        builds each bucket.
        """
        from overlord.observe.explain import stage_of
        from overlord.planning.graph.lineage import planned_graph

        step = step_number("graph", step)
        known = self._pump.ask(self._known, "the planner")
        stage = stage_of(step, known.stages, known.state.step)
        assert stage.loader is not None
        return planned_graph(
            stage.plan, self.job.batch, self.job.place, stage.loader, known.loaders, self.job.sync
        )

    def explain(self, what: int | str | SampleId) -> Explanation:
        """A step by its number: which rows, which weights, how it was placed. A sample by its id:
        where it went, and why.
        """
        from overlord.observe.explain import explain

        return explain(what, self._pump.ask(self._known, "the planner"))

    def _known(self) -> Known:
        from overlord.observe.explain import Known

        host, made = self._host, self._blueprint
        return Known(
            job=self.job,
            names=host.planner.spec.names,
            indexes=tuple(made.indexes),
            orders=tuple(made.orders),
            stages=tuple(host.plans),
            quarantine=tuple(host.planner.ledger.bad_rows()),
            state=host.planner.state(),
            start=self._start_state.step,
            loaders=tuple(loader_name(row) for row in host.figures()["loaders"]),
        )

    def summary_buffer(self) -> Buffer:
        """What the planner sees now: metadata of all samples that are ready and not drawn, source
        by source in stream order.

        For what-if: ``DGraph.from_buffer(session.summary_buffer(), place).mix(weights)`` and so on.
        What is ready depends on timing, so nothing of the stream may be decided by it.
        """
        return self._pump.ask(lambda: self._host.planner.summary_buffer(), "the planner")

    def quarantine(self) -> list[dict[str, Any]]:
        """Rows passed so far that never reached a plan, each with its reason; and, behind them,
        samples of which an image could not be decoded: those were delivered, without it, and each
        reason says in which step.
        """
        rows = self._pump.ask(lambda: self._host.planner.ledger.bad_rows(), "the planner")
        indexes = self._blueprint.indexes
        return [
            {
                "source": self.job.names[q.source],
                "epoch": q.epoch,
                "file": q.file,
                "row": q.row,
                "part": q.part,
                "path": indexes[q.source].files[q.file].path
                if q.file < len(indexes[q.source].files)
                else "",
                "reason": q.reason,
            }
            for q in rows
        ]

    def profile(self) -> JobProfile:
        """What sources cost, with what loaders measured up to now; it is kept for the next
        launch.
        """
        if self._refresher is None:
            raise JobError(["profiles are refreshed with partition='auto' only"], "profile")
        return self._refresher.refresh()

    def _figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = self._pump.ask(lambda: self._host.figures(), "the pump")
        return figures

    def metrics(self) -> dict[str, Any]:
        """A dict of what is going on: steps, mix wanted and realised, memory, time spent reading
        and transforming.
        """
        return self._pump.ask(self._metrics, "the pump")

    def _budget(self) -> dict[str, int]:
        """What may be held ahead of the draw, in bytes: samples ready, files being read, and by
        each host steps on their way.
        """
        options = self._blueprint.options
        return {
            "ready": options.buffer_bytes,
            "open": options.open_bytes,
            "steps": ring_bytes(options),
        }

    def _metrics(self) -> dict[str, Any]:
        figures = self._host.figures()
        planner = counted(self._host)
        found = job_metrics(
            planner,
            figures,
            self._blueprint_of(len(planner.totals.samples)).at_nothing(),
            self.job.on_long,
        )
        for name, event in self._lost.items():
            found["sources"].get(name, {})["lost"] = {"step": event.at, "reason": event.reason}
        found["memory"]["budget"] = self._budget()
        return {
            **found,
            "uptime_s": time.monotonic() - self._started,
            "feedback": {**found["feedback"], "invalid": self._refused},
            "files": added_up([self._blueprint.handles.metrics(), *figures.get("files", ())]),
            "clients": {
                r: _client_row(c, figures.get("clients", {}).get(r, {}))
                for r, c in list(self._clients.items())
            },
            "actors": actors(figures, dict(self._clients)),
            "transfer": figures.get("transfer", {}),
            "recoveries": figures.get("recoveries", []),
            "shadows": figures.get("shadows", []),
            "scaling": figures.get("scaling", {}),
            "placement": figures.get("placement", {}),
            "journal": figures.get("journal") or self._host.journal.figures(),
        }


def _client_row(client: Client, told: Mapping[str, Any]) -> dict[str, Any]:
    """``told``: by its constructor host, which alone knows of a client in another process."""
    waited_s, ready = (
        max(client.waited_s, told.get("waited_s", 0.0)),
        max(len(client._inbox), told.get("kept", 0)),
    )
    return {"steps": max(client.steps, told.get("steps", 0)), "waited_s": waited_s, "ready": ready}


def step_number(what: str, step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise PlanError(f"session.{what}: expected the number of a step, got {step!r}") from None
