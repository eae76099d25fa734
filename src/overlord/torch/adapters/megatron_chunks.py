"""Iterators of model chunks, for Megatron's interleaved schedule (virtual pipeline stages).

    iterators = megatron_chunks.iterators(client.microbatches(), job.place, rank)
    forward_backward_func(data_iterator=iterators, num_microbatches=job.batch.microbatches, ...)

A rank has ``vpp`` chunks of the model, and chunk c runs every microbatch by itself. So every chunk
has an iterator over all microbatches of the rank, and reads at its own time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from overlord.errors import JobError
from overlord.mesh import Mesh
from overlord.plan.view import FIRST, LAST
from overlord.torch.tensor_step import TensorMicrobatch

MOST_AHEAD = 4096  # microbatches that one chunk may read before another; they stay in memory


def iterators(
    microbatches: Iterable[Mapping[str, Any]], place: Mesh, rank: int
) -> list[Iterator[TensorMicrobatch]]:
    """Return an iterator for each model chunk of a rank, in the order of chunks.

    ``microbatches``: ``client.microbatches()``, or one step. Each iterator has all of them as
    tensors that share their memory. Tokens and positions are for the first chunk of the first
    stage, labels and loss mask for the last chunk of the last stage. All other keys are for every
    chunk. A microbatch is released when every chunk has read it, so every chunk must read.
    """
    if place.vpp == 1:
        raise JobError(
            ["place.vpp: expected at least 2 chunks of each stage, got 1; use the microbatches"],
            "megatron_chunks.iterators",
        )
    stage, last = place.coords(rank)["pp"], (place.pp - 1, place.vpp - 1)
    reader = _SharedReader(microbatches, place.vpp)
    return [
        reader.of_chunk(
            chunk,
            without=(() if stage == chunk == 0 else FIRST)
            + (() if (stage, chunk) == last else LAST),
        )
        for chunk in range(place.vpp)
    ]


class _SharedReader:
    """The microbatches of one iterator, each given to every chunk once."""

    def __init__(self, microbatches: Iterable[Mapping[str, Any]], chunks: int):
        self._source = iter(microbatches)
        self._waiting = [deque[TensorMicrobatch]() for _ in range(chunks)]

    def of_chunk(self, chunk: int, without: tuple[str, ...]) -> Iterator[TensorMicrobatch]:
        """Yield all microbatches, without some of their keys."""
        mine = self._waiting[chunk]
        while mine or self._read():
            yield mine.popleft().without(without)

    def _read(self) -> bool:
        """Take the next microbatch for all chunks; return whether there was one."""
        held = [len(waiting) for waiting in self._waiting]
        if max(held) >= MOST_AHEAD:
            raise JobError(
                [
                    f"expected every chunk to read all microbatches, got {max(held)} that chunk "
                    f"{held.index(max(held))} has not read; call get_batch in its forward step"
                ],
                "megatron_chunks.iterators",
            )
        mb = next(self._source, None)
        if mb is None:
            return False
        made = mb if isinstance(mb, TensorMicrobatch) else TensorMicrobatch.of(mb)
        for waiting in self._waiting:
            waiting.append(made)
        return True
