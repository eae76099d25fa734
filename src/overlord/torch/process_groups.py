"""The roles of ranks if a plan broadcasts, and one process group for each fetching rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from overlord.errors import JobError
from overlord.mesh import ClientPlaceTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The role of one rank in a broadcast: its fetcher, its group, and the queue of its steps."""

    rank: int
    fetcher: int
    queue_rank: int  # the rank whose step queue holds this rank's microbatches, un-sliced
    members: tuple[int, ...]  # ranks with the same fetcher, in increasing order
    queue_ranks: tuple[int, ...]  # queues that the fetcher reads: one per bucket of its members
    fetchers: int  # number of fetching ranks in the world

    @property
    def fetches(self) -> bool:
        """Whether this rank is the fetcher of its group."""
        return self.rank == self.fetcher

    def __str__(self) -> str:
        if len(self.members) == 1:
            return f"rank {self.rank} fetches for itself"
        if self.fetches:
            return f"rank {self.rank} fetches for ranks {', '.join(map(str, self.members))}"
        return f"rank {self.rank} is served by rank {self.fetcher}"


def service_of(place: ClientPlaceTree, rank: int, axis: str, broadcast: Sequence[str]) -> Service:
    """Return the role of a rank, for plans that split along ``axis`` and broadcast at some axes."""
    served = place.served_by(broadcast)
    queues = place.seats(axis, broadcast)
    members = np.flatnonzero(served == served[rank])
    return Service(
        rank=rank,
        fetcher=int(served[rank]),
        queue_rank=int(queues[rank]),
        members=tuple(members.tolist()),
        queue_ranks=tuple(np.unique(queues[members]).tolist()),
        fetchers=len(np.unique(served)),
    )


def make_group(
    place: ClientPlaceTree,
    rank: int,
    broadcast: Sequence[str],
    *,
    backend: str | None,
    timeout_s: float,
) -> Any:
    """Return the process group of the ranks with this rank's fetcher; None if it has only one rank.

    Every rank of the world must call it: torch requires that all ranks create all groups in the
    same order.
    """
    served, mine = place.served_by(broadcast), None
    fetchers, counts = np.unique(served, return_counts=True)
    if counts.max() == 1:
        return None
    if not dist.is_available() or not dist.is_initialized():
        raise JobError(
            [
                f"expected process groups, since the plan broadcasts at {', '.join(broadcast)}, "
                "got none: call torch.distributed.init_process_group() "
                "before overlord.torch.join, or pass broadcast=False and let every rank "
                "fetch its own"
            ],
            "join",
        )
    if (world := dist.get_world_size()) != place.world_size:
        raise JobError(
            [
                f"place: expected the {world} ranks of the process group, got "
                f"{place.world_size} in {place}; start as many processes as the mesh has ranks"
            ],
            "join",
        )
    for fetcher, count in zip(fetchers.tolist(), counts.tolist(), strict=True):
        if count > 1:
            ranks = np.flatnonzero(served == fetcher).tolist()
            made = dist.new_group(
                ranks,
                timeout=timedelta(seconds=timeout_s),
                backend=backend,
                group_desc=f"overlord-{fetcher}",
            )
            mine = made if rank in ranks else mine
    return mine
