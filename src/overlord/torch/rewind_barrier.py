"""A barrier before ranks rewind a shared session: a rewind drops steps that others still need."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from overlord.client.world import process_groups
from overlord.errors import DataStall, JobError

BARRIER_S = 1800.0  # seconds for all ranks to begin the pass; ``stall_limit_s`` overrides it


def refuse_without_group(ranks: int) -> None:
    """Raise ``JobError`` if a mesh of several ranks has no process group of exactly these ranks.

    ``ranks``: the number of ranks of the mesh.
    """
    groups = process_groups()
    found = (
        "no process group" if groups is None else f"a process group of {groups.get_world_size()}"
    )
    if ranks > 1 and (groups is None or groups.get_world_size() != ranks):
        raise JobError(
            [
                f"rewind=True: expected a process group of the {ranks} ranks of the mesh, "
                f"for a barrier before each pass, got {found}; "
                "call torch.distributed.init_process_group() on every rank before the "
                "first pass. For all ranks in one process: "
                "launch the job again for each pass, without rewind"
            ],
            "Dataset",
        )


def wait_for_all(ranks: int, options: Mapping[str, Any]) -> None:
    """Wait until every rank begins the pass; raise ``DataStall`` at the time limit.

    Only gloo accepts a limit per barrier; other backends use the limit of the process group.
    """
    groups, start = process_groups(), time.monotonic()
    if ranks == 1 or groups is None:
        return
    try:
        if groups.get_backend() == "gloo":
            limit = timedelta(seconds=float(options.get("stall_limit_s", BARRIER_S)))
            groups.monitored_barrier(timeout=limit, wait_all_ranks=True)
        else:
            groups.barrier()
    except RuntimeError as fault:  # its first lines name the ranks
        what = (
            f"all {ranks} ranks to begin the next pass of a loader with rewind=True; every "
            f"rank must begin each pass: {fault}"
        )
        raise DataStall(what, time.monotonic() - start, rank=groups.get_rank()) from fault
