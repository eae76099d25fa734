"""The ring of one microbatch: its ranks in ring order, and the rows that meet at each step.

Everything here follows from the lengths of the documents, so both ends of a transfer know its
size. Rows are numbered in the order of ``ring.token_index``: document by document, first chunk
before second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from overlord import ring
from overlord.errors import PlanError

Group = Any  # a ProcessGroup, or None for all ranks
Rows = slice | torch.Tensor  # consecutive rows, or an index


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The queries of one rank against the keys of one visiting block, packed by document.

    Documents without a query or a key are left out.
    """

    queries: Rows
    keys: Rows
    query_bounds: np.ndarray  # int32 [documents + 1]
    key_bounds: np.ndarray  # int32 [documents + 1]
    on_device: tuple[torch.Tensor, torch.Tensor]  # both bounds
    causal: bool

    @property
    def longest(self) -> tuple[int, int]:
        """The most queries and the most keys of a document."""
        return int(np.diff(self.query_bounds).max()), int(np.diff(self.key_bounds).max())


class Ring:
    """The ranks that share the documents of one microbatch, seen from one of them.

    A ring is made once per microbatch and serves all layers. A ring of one rank needs no process
    group: it is plain attention over packed documents.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        ranks: Sequence[int] = (0,),
        position: int = 0,
        *,
        group: Group = None,
        peers: Sequence[int] | None = None,
    ):
        """Make the ring of documents with these whole lengths.

        ``ranks``: ranks of the HDP axis in ring order. ``position``: of this rank among them.
        ``peers``: the rank in ``group`` of every HDP rank; None: the same numbers. Give it if the
        group has more ranks than the HDP axis, as with pipeline stages.
        """
        self.lengths = np.asarray(lengths, np.int64)
        self.ranks, self.position = tuple(int(r) for r in ranks), int(position)
        self.size, self._group = len(self.ranks), group
        self._peers = None if peers is None else tuple(int(p) for p in peers)
        self._check()
        self._halves = ring.halves(self.lengths, self.size)
        self._blocks: dict[tuple[int, torch.device], Block | None] = {}

    @staticmethod
    def of(
        microbatch: Mapping[str, Any], group: Group = None, peers: Sequence[int] | None = None
    ) -> Ring:
        """Return the ring of a microbatch with the keys of a task.

        ``document_lengths``, or ``cu_seqlens_padded``, has the whole documents; on a device, the
        second costs one synchronization. Without ``cp_ranks`` the ring has one rank.
        """
        if "document_lengths" in microbatch:
            lengths = _host(microbatch["document_lengths"])
        else:
            lengths = np.diff(_host(microbatch["cu_seqlens_padded"]))
        if "cp_ranks" not in microbatch:
            return Ring(lengths)
        ranks = _host(microbatch["cp_ranks"]).reshape(-1).tolist()
        position = int(_host(microbatch["cp_rank"]).reshape(()))
        return Ring(lengths, ranks, position, group=group, peers=peers)

    def _check(self) -> None:
        where = f"ring {list(self.ranks)}"
        if len(set(self.ranks)) != self.size or not self.size:
            raise PlanError(f"{where}: expected distinct ranks, at least one, got {self.size}")
        if not 0 <= self.position < self.size:
            raise PlanError(
                f"{where}: expected a position of 0 to {self.size - 1}, got {self.position}"
            )
        if self.lengths.ndim != 1 or (len(self.lengths) and int(self.lengths.min()) < 0):
            raise PlanError(f"{where}: expected lengths of documents, got {self.lengths.tolist()}")
        if self.size == 1:
            return
        if not dist.is_available() or not dist.is_initialized():
            raise PlanError(
                f"{where}: expected a process group, got none",
                remedy="call torch.distributed.init_process_group() first",
            )
        last = (
            len(self._peers) if self._peers is not None else dist.get_world_size(self._group)
        ) - 1
        if not 0 <= min(self.ranks) <= max(self.ranks) <= last:
            raise PlanError(f"{where}: expected ranks of 0 to {last}")
        here = dist.get_rank(self._group)
        if self._peer(self.position) != here:
            raise PlanError(
                f"{where}: expected this rank, {here}, at position {self.position}, "
                f"got {self._peer(self.position)}",
                remedy="the ring of another rank was given, or peers= is missing",
            )

    def __repr__(self) -> str:
        return (
            f"Ring({list(self.ranks)}, position {self.position}, {len(self.lengths)} documents, "
            f"{self.tokens()} of {int(self.lengths.sum())} tokens)"
        )

    def tokens(self, step: int = 0) -> int:
        """Return the tokens of the block that is here at a step; at step 0 it is the own one."""
        return int(self._halves[:, self.source(step)].sum())

    def source(self, step: int) -> int:
        """Return the position whose block is here at a step."""
        return (self.position - step) % self.size

    def token_index(self) -> np.ndarray:
        """Return the tokens of the whole packed documents that this rank holds: int64."""
        bounds = np.concatenate(([0], np.cumsum(self.lengths)))
        return ring.token_index(bounds, self.size, self.position)

    @property
    def group(self) -> Group:
        return self._group

    @cached_property
    def following(self) -> int:
        """The global rank at the next position."""
        return self._global(self.position + 1)

    @cached_property
    def previous(self) -> int:
        """The global rank at the position before."""
        return self._global(self.position - 1)

    def _peer(self, position: int) -> int:
        rank = self.ranks[position % self.size]
        return rank if self._peers is None else self._peers[rank]

    def _global(self, position: int) -> int:
        peer = self._peer(position)
        return peer if self._group is None else int(dist.get_global_rank(self._group, peer))

    def block(self, step: int, device: torch.device) -> Block | None:
        """Return what is computed at a step, with indices on a device; None: nothing.

        Step 0 is causal attention inside the own block. A block from an earlier position counts
        with its first chunks, for all queries. A block from a later position counts whole, for the
        queries of the second chunks.
        """
        key = (step, device)
        if key not in self._blocks:
            self._blocks[key] = self._block(step, device)
        return self._blocks[key]

    def _block(self, step: int, device: torch.device) -> Block | None:
        source = self.source(step)
        (q1, q2), (k1, k2) = self._halves[:, self.position], self._halves[:, source]
        q_skip = q1 if source > self.position else np.zeros_like(q1)
        q_count = q2 if source > self.position else q1 + q2
        k_count = k1 if source < self.position else k1 + k2
        used = (q_count > 0) & (k_count > 0)
        if not used.any():
            return None
        q_start = np.cumsum(q1 + q2) - (q1 + q2) + q_skip
        k_start = np.cumsum(k1 + k2) - (k1 + k2)
        query_bounds, key_bounds = _bounds(q_count[used]), _bounds(k_count[used])
        return Block(
            queries=_rows(q_start[used], q_count[used], device),
            keys=_rows(k_start[used], k_count[used], device),
            query_bounds=query_bounds,
            key_bounds=key_bounds,
            on_device=(
                torch.from_numpy(query_bounds).to(device),
                torch.from_numpy(key_bounds).to(device),
            ),
            causal=step == 0,
        )


def _bounds(counts: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _rows(starts: np.ndarray, counts: np.ndarray, device: torch.device) -> Rows:
    """Return the rows of runs: a slice if they are consecutive, so that nothing is copied."""
    ends = np.cumsum(counts)
    if (starts[1:] == starts[:-1] + counts[:-1]).all():
        return slice(int(starts[0]), int(starts[0]) + int(ends[-1]))
    index = np.repeat(starts - (ends - counts), counts) + np.arange(int(ends[-1]))
    return torch.from_numpy(index).to(device)


def _host(value: Any) -> np.ndarray:
    return (
        np.asarray(value.detach().cpu()) if isinstance(value, torch.Tensor) else np.asarray(value)
    )
