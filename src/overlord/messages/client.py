"""Messages between a constructor and the client of a rank: steps with their arrays, the end,
acknowledgements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from overlord.mesh import Mesh
from overlord.messages.control import EncodedState, PlannedStep, StreamState
from overlord.plan.plan import LoadingPlan
from overlord.sample import SampleId


def _shares(plan: LoadingPlan) -> tuple[tuple[str, ...], str, Mesh | None]:
    """What says who gets what of a plan: broadcasts that serve anyone, the axis of its buckets, and
    the mesh where it matters.
    """
    main, place = plan.main, plan.place
    if place is None:
        return (), main.axis, None
    broadcast = tuple(dim for dim in main.broadcast if getattr(place, dim.lower()) > 1)
    return broadcast, main.axis, _needed(main.axis, broadcast, place)


def _needed(axis: str, broadcast: tuple[str, ...], place: Mesh) -> Mesh | None:
    return None if axis == "DP" and not broadcast and place.cp == place.pp == 1 else place


@dataclass(frozen=True, slots=True, eq=False)
class StepInfo:
    """What a client is told of a step beside its arrays: the samples, a row each, and the state
    behind the step.
    """

    step: int
    digest: str
    valid_tokens: int
    names: tuple[str, ...]
    # int64 [samples, 6]: source, epoch, file, row, part, tokens; one array, since each costs on its
    # way
    table: np.ndarray
    after: StreamState | EncodedState
    broadcast: tuple[str, ...] = ()  # axes of more than one rank along which the trainer broadcasts
    axis: str = "DP"  # whose buckets the plan has
    # None: every rank of a data-parallel group gets all that the group has
    place: Mesh | None = None

    @staticmethod
    def of(stage: PlannedStep, after: StreamState | EncodedState | None = None) -> StepInfo:
        """The whole plan's samples, as they are."""
        p = stage.plan
        return StepInfo(
            p.step,
            stage.digest,
            stage.valid_tokens,
            p.names,
            np.column_stack((p.source, p.epoch, p.file, p.row, p.part, p.tokens)),
            stage.after if after is None else after,
            *_shares(p),
        )

    def without_broadcast(self) -> StepInfo:
        """Every rank fetches for itself."""
        return replace(
            self,
            broadcast=(),
            place=None if self.place is None else _needed(self.axis, (), self.place),
        )

    def of_rows(self, rows: np.ndarray) -> StepInfo:
        """These samples only, in a table of their own: what one bucket's clients need to know."""
        return replace(self, table=self.table[rows])

    def __len__(self) -> int:
        return len(self.table)

    @property
    def source(self) -> np.ndarray:
        return self.table[:, 0]

    @property
    def row(self) -> np.ndarray:
        return self.table[:, 3]

    @property
    def tokens(self) -> np.ndarray:
        return self.table[:, 5]

    def sample_id(self, i: int) -> SampleId:
        source, *place, _ = self.table[i].tolist()
        return SampleId(self.names[source], *place)


class CompactLayout(NamedTuple):
    """How compact microbatches are widened (``constructor/compact.py``)."""

    keys: tuple[str, ...]  # to be made, an entry for every token each
    labels: str  # as in Batch
    context: int  # of the padded layout; 0: packed


@dataclass(frozen=True, slots=True, eq=False)
class StepMessage:
    """A step on its way to the client of one rank: its microbatches side by side
    (``constructor/batch_arrays.py``), or one by one where they do not go together; rows
    ``bounds[m]`` to ``bounds[m + 1]`` of the told samples are in microbatch m.
    """

    told: StepInfo
    bounds: np.ndarray
    wide: Mapping[str, np.ndarray]
    rows: np.ndarray  # int64 [keys, microbatches]
    microbatches: tuple[Mapping[str, np.ndarray], ...] = ()
    # the rank's images and routes, exchange by exchange
    encoder: Mapping[str, np.ndarray] = field(default_factory=dict)
    encoder_rows: np.ndarray | None = None  # int64 [keys, exchanges]
    per: str = ""  # "microbatch": exchange m belongs to microbatch m
    form: CompactLayout | None = None  # of ``wide``, where it is compact


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """No step comes after those already sent."""

    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class StepAck:
    """A client handed this step to the trainer, and with it all before it."""

    step: int
    waited_s: float = 0.0  # that its trainer has waited for steps, in all
    generation: int | None = None  # of the session, where steps of several come by one link
