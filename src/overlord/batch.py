"""Batch: the size and form of one global step, frozen and validated."""

from __future__ import annotations

from dataclasses import dataclass

from overlord.checks import is_int, one_of
from overlord.errors import JobError
from overlord.mesh import Mesh

LAYOUTS = ("packed", "padded")


LABELS = ("shifted", "unshifted")


CP_SPLITS = ("zigzag", "zigzag_whole", "contiguous", "none")


# of a Batch: how a step is cut for the mesh, not which samples form it
NOT_THE_STREAM = ("cp_split", "sequence_parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One global step. Give its size in ``samples`` or in ``tokens``; ``microbatches`` is a
    minimum.
    """

    samples: int | None = None
    tokens: int | None = None
    microbatches: int = 1
    context: int = 0  # tokens of one microbatch of one bucket, before context-parallel slicing
    layout: str = "packed"
    pad_multiple: int = 1  # every document is padded to a multiple of this
    pad_id: int = 0
    labels: str = "shifted"
    # how context-parallel ranks share a microbatch; "none": each gets all of it
    cp_split: str = "zigzag"
    # tensor-parallel ranks share the sequence too: documents are padded for that
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise JobError(problems, "batch")

    def document_multiple(self, place: Mesh) -> int:
        """Every document is padded to a multiple of this: what the batch, context parallelism and
        sequence parallelism ask for.
        """
        pieces = (
            {"none": 1, "contiguous": place.cp}.get(self.cp_split, 2 * place.cp)
            if place.cp > 1
            else 1
        )
        return self.pad_multiple * pieces * (place.tp if self.sequence_parallel else 1)

    def problems(self) -> list[str]:
        found = []
        if (self.samples is None) == (self.tokens is None):
            found.append("batch: expected exactly one of samples= and tokens=")
        for name, least in (
            ("samples", 1),
            ("tokens", 1),
            ("microbatches", 1),
            ("context", 1),
            ("pad_multiple", 1),
            ("pad_id", 0),
        ):
            value = getattr(self, name)
            if name in ("samples", "tokens") and value is None:
                continue
            if not is_int(value) or value < least:
                found.append(
                    f"batch.{name}: expected a whole number of at least {least}, got {value!r}"
                )
        found += one_of("batch.layout", self.layout, LAYOUTS) + one_of(
            "batch.labels", self.labels, LABELS
        )
        found += one_of("batch.cp_split", self.cp_split, CP_SPLITS)
        if not isinstance(self.sequence_parallel, bool):
            found.append(
                f"batch.sequence_parallel: expected true or false, got {self.sequence_parallel!r}"
            )
        if not found and self.context % self.pad_multiple:
            found.append(
                f"batch.context: expected a multiple of pad_multiple={self.pad_multiple}, "
                f"got {self.context}"
            )
        return found
