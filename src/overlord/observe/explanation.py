"""Explanations of steps and samples: values that print as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The base of explanations: print one, read its fields, or convert it by ``to_dict()``."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        from overlord.observe import explain_text

        return explain_text.text(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRows:
    """The rows of one file and epoch in a step: ``samples`` from row ``first`` to row ``last``.

    Rows are numbers, or byte offsets if ``unit`` is "byte". Rows between may be missing.
    """

    path: str
    file: int
    epoch: int
    first: int
    last: int
    samples: int
    unit: str  # row, or byte


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShare:
    """The contribution of a source to a step.

    The shares ``wanted`` and ``realised`` are of samples, or of tokens if the batch is in tokens.
    """

    name: str
    weight: float
    wanted: float
    realised: float
    samples: int
    tokens: int
    files: tuple[FileRows, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpensiveItem:
    """One of the most expensive items of a bucket."""

    sample: str
    tokens: int
    cost: float
    share: float  # of its bucket's cost


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlacement:
    """The placement of one module in a step, and its slowest bucket."""

    name: str
    axis: str
    buckets: int
    microbatches: int
    capacity: int
    items: int
    imbalance: Mapping[str, float]
    slowest: int  # bucket
    slowest_ranks: tuple[int, ...]
    slowest_over_mean: float
    slowest_items: int
    dearest: tuple[ExpensiveItem, ...]  # the most expensive items of the slowest bucket
    peak_tokens: int  # tokens in the fullest microbatch
    peak_at: tuple[int, int]  # bucket and number of the fullest microbatch
    limit: str  # the lower bound of the imbalance by bucket, as text
    host_memory: str = ""  # what offload needs; empty without offload


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExplanation(Explanation):
    """An explanation of a planned step: its mixture, and the placement of each module."""

    step: int
    skipped: bool
    digest: str
    samples: int  # rows of the plan
    documents: int  # more than samples if some have several documents
    rows: str  # what a row is: samples, or pieces of samples
    tokens: int
    unit: str  # the unit of the mixture: samples or tokens
    sources: tuple[SourceShare, ...]
    weights_from: str
    trail: tuple[str, ...]
    sync: str  # when ranks wait for each other: microbatch, or step
    model: str  # by which the strategy balances; empty if a user's strategy decides
    fill: float
    modules: tuple[ModulePlacement, ...]
    stage: str | int | None = None  # name or number of its stage; None: the job has no stages
    stage_words: str = ""  # the stage and the size of the step; empty without stages and ramps


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOfSample:
    """The place of one item of a sample in one module."""

    module: str
    bucket: int
    microbatch: int
    slot: int
    ranks: tuple[int, ...]
    constructor: str
    size: int
    cost: float
    share: float  # of its bucket's cost
    nth_of_bucket: int  # rank by decreasing cost in its bucket, from 1
    nth_of_step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleExplanation(Explanation):
    """An explanation of a sample, or of a row without a sample.

    ``status`` is "placed", "skipped", "quarantined", "ahead", "gone", "never", "no sample" or
    "undecided".
    The fields from ``step`` on are set if a retained plan has the sample.
    """

    sample: str
    status: str
    words: str  # the status as a sentence
    path: str
    row: int
    row_unit: str  # row, or byte
    step: int | None = None
    position: int | None = None  # position in the order of the draw, from 0
    of_samples: int | None = None
    substep: int | None = None
    tokens: int | None = None
    documents: tuple[int, ...] = ()  # tokens of each, if the sample has several
    loader: str | None = None
    placed: tuple[SlotOfSample, ...] = ()
    pieces: tuple[str, ...] = ()  # its pieces in retained plans, with packing="concat"
