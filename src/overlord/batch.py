"""Batch: the size and form of one global step, frozen and validated."""

from __future__ import annotations

from dataclasses import dataclass

from overlord.checks import is_int, one_of
from overlord.errors import JobError
from overlord.mesh import Mesh

LAYOUTS = ("packed", "padded")


LABELS = ("shifted", "unshifted")


CP_SPLITS = ("zigzag", "zigzag_whole", "contiguous", "none")


# fields of a Batch that decide how a step is sliced for the mesh, not which samples form it
NOT_THE_STREAM = ("cp_split", "sequence_parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The size and form of one global step. Give its size in ``samples`` or in ``tokens``.

    Arguments
    ---------
    samples: number of samples in a step. Default None: the size is given in ``tokens``.
    tokens: number of tokens in a step, at least about; the mixture is then one of tokens. Default
        None: the size is given in ``samples``.
    microbatches: least number of microbatches per rank and step; a step that does not fit has
        more. Default 1.
    context: tokens of one microbatch of one bucket, before context-parallel slicing; also the
        length of the longest sample. Required.
    layout: "packed" (documents one after another) or "padded" (one document per row). Default
        "packed".
    pad_multiple: every document is padded to a multiple of this many tokens, and ``context`` must
        be a multiple of it. Default 1: no padding.
    pad_id: token id of the padding. Default 0.
    labels: "shifted" (labels[i] is the token after i) or "unshifted". Default "shifted".
    cp_split: slicing of a microbatch over context-parallel ranks: "zigzag", "zigzag_whole",
        "contiguous" or "none" (every rank gets all of it). Not in the fingerprint. Default
        "zigzag".
    sequence_parallel: whether documents are padded so that tensor-parallel ranks can slice the
        sequence, too. Not in the fingerprint. Default False.
    """

    samples: int | None = None
    tokens: int | None = None
    microbatches: int = 1
    context: int = 0
    layout: str = "packed"
    pad_multiple: int = 1
    pad_id: int = 0
    labels: str = "shifted"
    cp_split: str = "zigzag"
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise JobError(problems, "batch")

    def document_multiple(self, place: Mesh) -> int:
        """Return the number of tokens to a multiple of which every document is padded.

        The batch, context parallelism and sequence parallelism determine it.
        """
        pieces = (
            {"none": 1, "contiguous": place.cp}.get(self.cp_split, 2 * place.cp)
            if place.cp > 1
            else 1
        )
        return self.pad_multiple * pieces * (place.tp if self.sequence_parallel else 1)

    def problems(self) -> list[str]:
        """Return every problem of the fields, as text."""
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
