"""Messages between a constructor and the client of a rank.

    StepMessage   constructor -> client   one step of a rank: its arrays and a StepInfo
    StepInfo      constructor -> client   ids of the samples, digest, state after the step
    EndOfStream   constructor -> client   no later step follows, with an error or without
    StepAck       client -> constructor   a step was given to the trainer

``CompactLayout`` describes arrays that a StepMessage carries in compact form.
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
    """Return the fields of StepInfo that map samples to ranks.

    They are broadcast axes with more than one rank, the axis of the buckets, and the mesh where it
    matters.
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
    """The description of a step without its arrays: samples, and the state after the step."""

    step: int
    digest: str
    valid_tokens: int
    names: tuple[str, ...]
    # int64 [samples, 6]: source, epoch, file, row, part, tokens; one array, since each array costs
    # time on the wire
    table: np.ndarray
    after: StreamState | EncodedState
    # axes along which the trainer broadcasts, with more than one rank
    broadcast: tuple[str, ...] = ()
    axis: str = "DP"  # axis of the plan's buckets
    # None: every rank of a data-parallel group gets all samples of the group
    place: Mesh | None = None

    @staticmethod
    def of(stage: PlannedStep, after: StreamState | EncodedState | None = None) -> StepInfo:
        """Return the StepInfo of all samples of a plan."""
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
        """Return this StepInfo without broadcasts: every rank fetches its own arrays."""
        return replace(
            self,
            broadcast=(),
            place=None if self.place is None else _needed(self.axis, (), self.place),
        )

    def of_rows(self, rows: np.ndarray) -> StepInfo:
        """Return this StepInfo with some samples only, as the clients of one bucket need it."""
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
    """Description of compact microbatches, for expansion (``constructor/compact.py``)."""

    keys: tuple[str, ...]  # arrays to compute, each with an entry for every token
    labels: str  # label convention, as in Batch
    context: int  # row length of the padded layout; 0: packed


@dataclass(frozen=True, slots=True, eq=False)
class StepMessage:
    """A step for the client of one rank.

    Its microbatches are concatenated (``constructor/batch_arrays.py``), or separate if their arrays
    do not fit together. Rows ``bounds[m]`` to ``bounds[m + 1]`` of the samples in ``info`` belong
    to microbatch m.
    """

    info: StepInfo
    bounds: np.ndarray
    wide: Mapping[str, np.ndarray]
    rows: np.ndarray  # int64 [keys, microbatches]
    microbatches: tuple[Mapping[str, np.ndarray], ...] = ()
    # images and routes of the rank, exchange by exchange
    encoder: Mapping[str, np.ndarray] = field(default_factory=dict)
    encoder_rows: np.ndarray | None = None  # int64 [keys, exchanges]
    per: str = ""  # "microbatch": exchange m belongs to microbatch m
    form: CompactLayout | None = None  # layout of ``wide``, where it is compact


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """The end of a rank's stream: no step follows those already sent."""

    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class StepAck:
    """The trainer has received this step and all steps before it."""

    step: int
    waited_s: float = 0.0  # total seconds that the trainer has waited for steps
    # generation of the session, if one connection carries steps of several
    generation: int | None = None
