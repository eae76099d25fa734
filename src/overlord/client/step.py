"""What the trainer holds: a Step of Microbatches, read-only, each knowing which samples it was made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlord.sample import SampleId

if TYPE_CHECKING:
    from overlord.constructor.builder import Bucket
    from overlord.messages import Stage


class Piece(NamedTuple):
    """Where one sample lies in a microbatch: ``tokens[offset:offset + length]`` (packed), or row ``offset`` (padded)."""

    sample: SampleId
    offset: int
    length: int


class Microbatch(Mapping[str, np.ndarray]):
    """A mapping of name to read-only array, and ``.samples``."""

    __slots__ = ("_arrays", "_padded", "_plan", "_rows")

    def __init__(self, arrays: dict[str, np.ndarray], stage: Stage, rows: np.ndarray):
        self._arrays, self._plan, self._rows = arrays, stage.plan, rows
        self._padded = arrays["tokens"].ndim == 2

    def __getitem__(self, key: str) -> np.ndarray:
        try:
            return self._arrays[key]
        except KeyError:
            raise KeyError(f"{key!r} is not in this microbatch; it has {', '.join(self._arrays)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def samples(self) -> list[Piece]:
        """The samples in it, in order; made when asked for, so that packing costs no object per sample."""
        starts = range(len(self._rows)) if self._padded else self._arrays["cu_seqlens_padded"][:-1].tolist()
        lengths = self._plan.tokens[self._rows].tolist()
        ids = [self._plan.sample_id(i) for i in self._rows.tolist()]
        return [Piece(i, o, n) for i, o, n in zip(ids, starts, lengths, strict=False)]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{k} {v.dtype}{list(v.shape)}" for k, v in self._arrays.items())
        return f"Microbatch({len(self._rows)} samples: {shapes})"


class Step:
    """One step of one rank."""

    __slots__ = ("_bucket", "_stage", "rank")

    def __init__(self, stage: Stage, bucket: Bucket, rank: int):
        self._stage, self._bucket, self.rank = stage, bucket, rank

    @property
    def step(self) -> int:
        return self._stage.plan.step

    @property
    def plan_digest(self) -> str:
        return self._stage.digest

    @property
    def global_valid_tokens(self) -> int:
        """Tokens with a loss, over all ranks: divide summed losses by this."""
        return int(np.maximum(self._stage.plan.tokens - 1, 0).sum())

    def __len__(self) -> int:
        return len(self._bucket.microbatches)

    def __getitem__(self, m: int) -> Microbatch:
        m = range(len(self))[m]
        b = self._bucket
        return Microbatch(b.microbatches[m], self._stage, b.samples[b.bounds[m] : b.bounds[m + 1]])

    def __iter__(self) -> Iterator[Microbatch]:
        return (self[m] for m in range(len(self)))

    def __repr__(self) -> str:
        return f"Step({self.step}, rank {self.rank}, {len(self)} microbatches, {self.global_valid_tokens} valid tokens in all)"
