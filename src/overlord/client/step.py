"""What the trainer holds: a Step of Microbatches, read-only, each knowing which samples it was made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlord.sample import SampleId

if TYPE_CHECKING:
    from overlord.constructor.builder import Bucket
    from overlord.messages import Told


class Piece(NamedTuple):
    """Where one sample lies in a microbatch: ``tokens[offset:offset + length]`` (packed), or row ``offset`` (padded)."""

    sample: SampleId
    offset: int
    length: int


class Microbatch(Mapping[str, np.ndarray]):
    """A mapping of name to read-only array, and ``.samples``."""

    __slots__ = ("_arrays", "_padded", "_rows", "_told")

    def __init__(self, arrays: dict[str, np.ndarray], told: Told, rows: np.ndarray):
        self._arrays, self._told, self._rows = arrays, told, rows
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
        lengths = self._told.tokens[self._rows].tolist()
        ids = [self._told.sample_id(i) for i in self._rows.tolist()]
        return [Piece(i, o, n) for i, o, n in zip(ids, starts, lengths, strict=False)]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{k} {v.dtype}{list(v.shape)}" for k, v in self._arrays.items())
        return f"Microbatch({len(self._rows)} samples: {shapes})"


class Step:
    """One step of one rank."""

    __slots__ = ("_bucket", "_cut", "_told", "rank")

    def __init__(self, told: Told, bucket: Bucket, rank: int):
        self._told, self._bucket, self.rank = told, bucket, rank
        self._cut: tuple[Microbatch, ...] | None = None

    @property
    def step(self) -> int:
        return self._told.step

    @property
    def plan_digest(self) -> str:
        return self._told.digest

    @property
    def global_valid_tokens(self) -> int:
        """Tokens with a loss, over all ranks: divide summed losses by this."""
        return self._told.valid_tokens

    def __len__(self) -> int:
        return len(self._bucket)

    def _microbatches(self) -> tuple[Microbatch, ...]:
        """Made once: what is the same microbatch is the same object."""
        if self._cut is None:
            b = self._bucket
            self._cut = tuple(
                Microbatch(arrays, self._told, b.samples[b.bounds[m] : b.bounds[m + 1]]) for m, arrays in enumerate(b.microbatches)
            )
        return self._cut

    def __getitem__(self, m: int) -> Microbatch:
        return self._microbatches()[m]

    def __iter__(self) -> Iterator[Microbatch]:
        return iter(self._microbatches())

    def __repr__(self) -> str:
        return f"Step({self.step}, rank {self.rank}, {len(self)} microbatches, {self.global_valid_tokens} valid tokens in all)"
