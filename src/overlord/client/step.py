"""A ``Step`` of ``Microbatch`` objects: read-only arrays, with the samples they were made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from overlord.constructor.compact import ExpandedMicrobatch
from overlord.errors import PlanError
from overlord.plan.rank_view import FIRST, LAST
from overlord.sample import SampleId

if TYPE_CHECKING:
    from overlord.constructor.build import BucketBatch
    from overlord.mesh import ClientPlaceTree
    from overlord.messages.client import StepInfo


class Piece(NamedTuple):
    """The position of one sample in a microbatch.

    It is ``tokens[offset:offset + length]`` (packed), or row ``offset`` (padded). It refers to the
    whole microbatch, before it is split for context parallelism. -1: this rank has no arrays.
    """

    sample: SampleId
    offset: int
    length: int


class Microbatch(Mapping[str, np.ndarray]):
    """A mapping of name to read-only array, and ``.samples``."""

    __slots__ = ("_arrays", "_info", "_rows", "_served_by")

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        info: StepInfo,
        rows: np.ndarray,
        served_by: int | None = None,
    ):
        self._arrays, self._info, self._rows = arrays, info, rows
        # the rank that fetches this microbatch for this one; None: this rank received it
        self._served_by = served_by

    def __getitem__(self, key: str) -> np.ndarray:
        try:
            return self._arrays[key]
        except KeyError:
            raise KeyError(self._why_not(key)) from None

    def _why_not(self, key: str) -> str:
        # cu_seqlens: every rank that receives a microbatch has it
        if "cu_seqlens" in self._arrays or self._served_by is None:
            stage = {**dict.fromkeys(FIRST, "first"), **dict.fromkeys(LAST, "last")}.get(key)
            why = (
                f" ({key} is for the {stage} pipeline stage)"
                if stage and self._arrays and self._info.place is not None
                else ""
            )
            return f"{key!r} is not in this microbatch; it has {', '.join(self._arrays)}{why}"
        along = ", ".join(self._info.broadcast)
        return (
            f"{key!r} is not here: rank {self._served_by} fetches this microbatch and the "
            f"trainer broadcasts it (broadcast_at {along}); "
            "join with overlord.torch.join, launch with broadcast=False, or use a "
            "strategy without broadcast_at"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def info(self) -> StepInfo:
        """The message that described the step, restricted to the samples of this microbatch."""
        return self._info.of_rows(self._rows)

    @property
    def samples(self) -> list[Piece]:
        """Return the samples in order, made on demand: packing makes no object per sample."""
        lengths = self._info.tokens[self._rows].tolist()
        if "attention_mask" in self._arrays:  # of the padded layout only
            starts: Sequence[int] = range(len(self._rows))
        elif "cu_seqlens_padded" in self._arrays:
            starts = self._arrays["cu_seqlens_padded"][:-1].tolist()
        else:
            starts = [-1] * len(lengths)
        ids = [self._info.sample_id(i) for i in self._rows.tolist()]
        return [Piece(i, o, n) for i, o, n in zip(ids, starts, lengths, strict=False)]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{k} {v.dtype}{list(v.shape)}" for k, v in self._arrays.items())
        if not shapes and self._served_by is not None:
            shapes = f"served by rank {self._served_by}"
        return f"Microbatch({len(self._rows)} samples: {shapes})"


@lru_cache(maxsize=16)
def _fetchers(place: ClientPlaceTree, broadcast: tuple[str, ...]) -> np.ndarray:
    return place.served_by(broadcast)


class Step:
    """One step of one rank."""

    __slots__ = ("_bucket", "_cut", "_exchanges", "_info", "rank")

    def __init__(self, info: StepInfo, bucket: BucketBatch, rank: int):
        self._info, self._bucket, self.rank = info, bucket, rank
        self._cut: tuple[Microbatch, ...] | None = None
        self._exchanges: tuple[Microbatch, ...] | None = None

    @property
    def step(self) -> int:
        return self._info.step

    @property
    def plan_digest(self) -> str:
        return self._info.digest

    @property
    def global_valid_tokens(self) -> int:
        """Tokens with a loss, over all ranks: divide summed losses by this."""
        return self._info.valid_tokens

    @property
    def served_by(self) -> int:
        """The rank that fetches these microbatches, for itself or for others by a broadcast."""
        place = self._info.place
        return (
            self.rank if place is None else int(_fetchers(place, self._info.broadcast)[self.rank])
        )

    @property
    def nbytes(self) -> int:
        """The bytes of the arrays of this step."""
        return self._bucket.nbytes

    @property
    def info(self) -> StepInfo:
        """The message that described this step."""
        return self._info

    @property
    def bucket(self) -> BucketBatch:
        """The arrays of this step as they were built."""
        return self._bucket

    def __len__(self) -> int:
        return len(self._bucket)

    def _microbatches(self) -> tuple[Microbatch, ...]:
        """Return the microbatches; repeated calls return the same objects."""
        if self._cut is None:
            b, bounds, served_by = self._bucket, self._bucket.bounds.tolist(), self.served_by
            self._cut = tuple(
                Microbatch(arrays, self._info, b.samples[bounds[m] : bounds[m + 1]], served_by)
                for m, arrays in enumerate(self._with_images(b))
            )
        return self._cut

    def _with_images(self, bucket: BucketBatch) -> Iterable[Mapping[str, np.ndarray]]:
        """Add the arrays of an exchange to the microbatch that it belongs to."""
        if bucket.encoder is None or bucket.per != "microbatch":
            return bucket.microbatches
        both = zip(bucket.microbatches, self.encoder, strict=True)
        return (
            arrays.also(more) if isinstance(arrays, ExpandedMicrobatch) else {**arrays, **more}
            for arrays, more in both
        )

    @property
    def encoder(self) -> tuple[Microbatch, ...]:
        """The inputs of the encoder of this rank and the routes of its outputs.

        One entry for each exchange; empty for a job without images.
        """
        if self._exchanges is None:
            wide = self._bucket.encoder
            cut = () if wide is None else wide.cut(0, wide.n)
            self._exchanges = tuple(
                Microbatch(arrays, self._info, np.zeros(0, np.int64)) for arrays in cut
            )
        return self._exchanges

    def __getitem__(self, m: int) -> Microbatch:
        return self._microbatches()[m]

    def __iter__(self) -> Iterator[Microbatch]:
        return iter(self._microbatches())

    def __repr__(self) -> str:
        return (
            f"Step({self.step}, rank {self.rank}, {len(self)} microbatches, "
            f"{self.global_valid_tokens} valid tokens in all)"
        )


def check_count(step: Any, expected: int | None) -> None:
    """Refuse a step whose number of microbatches is not that of the job; None: not known.

    For trainers that count microbatches.
    """
    if expected is None or len(step) == expected:
        return
    grown = (
        f"give Batch(microbatches={len(step)}) or more, fewer samples or tokens, or a "
        "larger context"
        if len(step) > expected
        else ""
    )
    raise PlanError(
        f"expected the {expected} microbatches of Batch.microbatches, got {len(step)}; a "
        "trainer with a fixed accumulation count would mix "
        "this step with others",
        step.step,
        f"{grown or 'use a strategy that fills Batch.microbatches'}, or iterate over whole steps",
    )
