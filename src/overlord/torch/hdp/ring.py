"""The ring of one microbatch: its ranks in ring order, and the neighbours of this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from overlord.errors import PlanError
from overlord.torch.hdp.layout import RingLayout

Group = Any  # a ProcessGroup, or None for all ranks


class Ring:
    """The ranks that share the documents of one microbatch, and the position of this rank.

    Create a ring once per microbatch; it serves all layers. A ring of one rank needs no process
    group: it is plain attention over packed documents. ``layout`` has the rows of every step.
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
        """Create the ring of documents whose whole lengths are ``lengths``.

        ``ranks``: ranks of the HDP axis in ring order. ``position``: the index of this rank in
        ``ranks``. ``peers``: the rank in ``group`` of every HDP rank; None: the same numbers. Give
        it if the group has more ranks than the HDP axis, as with pipeline stages.
        """
        self.ranks = tuple(int(r) for r in ranks)
        self.layout = RingLayout(lengths, len(self.ranks), int(position))
        self.group = group
        self._peers = None if peers is None else tuple(int(p) for p in peers)
        if len(set(self.ranks)) != len(self.ranks):
            raise PlanError(f"ring {list(self.ranks)}: expected distinct ranks, got duplicates")
        self.previous = self.following = -1  # global ranks
        if self.layout.size > 1:
            self._check_group()
            self.previous, self.following = (self._global(position + by) for by in (-1, 1))

    @staticmethod
    def of(
        microbatch: Mapping[str, Any], group: Group = None, peers: Sequence[int] | None = None
    ) -> Ring:
        """Return the ring of a microbatch of a hybrid plan.

        Lengths come from ``document_lengths``, else from ``cu_seqlens_padded``, which costs one
        synchronization if it is on a device. Without ``cp_ranks`` the ring has one rank.
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

    def _check_group(self) -> None:
        where = f"ring {list(self.ranks)}"
        if not dist.is_available() or not dist.is_initialized():
            raise PlanError(
                f"{where}: expected a process group, got none",
                remedy="call torch.distributed.init_process_group() first",
            )
        world = dist.get_world_size(self.group)
        last = (world if self._peers is None else len(self._peers)) - 1
        if not 0 <= min(self.ranks) <= max(self.ranks) <= last:
            raise PlanError(
                f"{where}: expected ranks of 0 to {last}",
                remedy="ranks are those of the HDP axis; peers= maps them to the group",
            )
        here, position = dist.get_rank(self.group), self.layout.position
        if self._peer(position) != here:
            raise PlanError(
                f"{where}: expected this rank, {here}, at position {position}, got "
                f"{self._peer(position)}",
                remedy="the ring of another rank was given, or peers= is missing",
            )

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"Ring({list(self.ranks)}, position {layout.position}, {len(layout.lengths)} "
            f"documents, {layout.tokens()} of {int(layout.lengths.sum())} tokens)"
        )

    def token_index(self) -> np.ndarray:
        """Return the indices of this rank's tokens in the whole packed documents: int64."""
        return self.layout.token_index()

    def _peer(self, position: int) -> int:
        rank = self.ranks[position % len(self.ranks)]
        return rank if self._peers is None else self._peers[rank]

    def _global(self, position: int) -> int:
        peer = self._peer(position)
        return peer if self.group is None else int(dist.get_global_rank(self.group, peer))


def _host(value: Any) -> np.ndarray:
    return (
        np.asarray(value.detach().cpu()) if isinstance(value, torch.Tensor) else np.asarray(value)
    )
