"""Read-only views of a planner: its progress, its ready samples, its invariants. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from overlord.messages.control import EndOfJob, StreamState
from overlord.planning.look_ahead import LookAheadPool
from overlord.planning.spec import PlannerSpec
from overlord.planning.step import PieceColumns, StepContext, gather
from overlord.planning.stream import SourceStream
from overlord.sample import Buffer

SHOWN = 5  # sources that ``waiting_for`` lists


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerStatus:
    """The progress of a planner, and the cause that blocks its next plan."""

    step: int  # the next step to plan
    finished: EndOfJob | None
    lacking: Mapping[str, int]  # source -> samples that the draw of the step lacks
    # rank that fills the prefetch window, and the last step it took; None: the window is open
    slowest: tuple[int, int] | None
    prefetch: int

    def waiting_for(self) -> str:
        """Describe what blocks the next plan."""
        if self.finished:
            return f"nothing: the job ends before step {self.finished.step}"
        if self.lacking:
            rows = [f"{n} more of source {name!r}" for name, n in self.lacking.items()]
            more = ", ..." if len(rows) > SHOWN else ""
            return f"samples that step {self.step} draws: {', '.join(rows[:SHOWN])}{more}"
        if self.slowest is not None:
            rank, step = self.slowest
            return (
                f"rank {rank}, which holds {self.prefetch} steps it has not taken (it took step "
                f"{step} last)"
            )
        return f"the plan of step {self.step}"


def ready_buffer(
    streams: Sequence[SourceStream], pool: LookAheadPool | None, context: StepContext
) -> Buffer:
    """Return a buffer of all ready samples that no step has drawn, by source in stream order.

    It is for inspection and experiments, never for a plan of the job. It is empty before weights
    are known.
    """
    spec, state, weights = context
    opened = [0 if pool is None else pool.open(i) for i in range(len(streams))]
    held = pool.candidates(opened) if pool is not None and any(opened) else None
    pieces = list(held.pieces) if held else []
    first = sum(p.stop - p.start for _, p in pieces)
    pieces += [(i, piece) for i, stream in enumerate(streams) for piece in stream.ahead()]
    if not pieces or not weights:
        nothing: dict[str, dict[str, Any]] = {name: {"tokens": []} for name in spec.names}
        return Buffer.from_columns(nothing, batch=context.batch, step=state.step)
    source = np.repeat([i for i, _ in pieces], [p.stop - p.start for _, p in pieces])
    rows = np.concatenate(
        [held.rows if held else np.zeros(0, np.int64), np.arange(first, len(source))]
    )
    order = rows[np.argsort(source[rows], kind="stable")]
    buffer = gather(PieceColumns(pieces), order, None, context)
    return replace(buffer, drawn=False)


def check_accounts(spec: PlannerSpec, state: StreamState) -> None:
    """Assert that every account is within one sample, if the weights were always the same.

    Changed weights, exhausted sources and deferred samples leave larger accounts, which are not
    checked.
    """
    constant = isinstance(spec.schedule, Mapping) and not state.events and spec.overflow == "grow"
    if spec.batch.samples and spec.draw == "exact" and constant and all(state.active):
        assert all(abs(o) < 2**40 for o in state.owed), "expected every account within one sample"
