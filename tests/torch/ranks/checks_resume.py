"""A run saved under one mesh goes on under another: each following step has the same samples.
Worlds of 4 and of 8 share a folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import overlord as ov
import overlord.torch as ot
from overlord.mesh import ClientPlaceTree
from tests.processes import plain
from tests.torch.ranks.jobs import broadcasting, job, samples_of

BEFORE, AFTER = 3, 3
STRATEGY = broadcasting("TP", "CP", "PP")  # one and the same: another would be another job
FIRST = ClientPlaceTree(dp=2, tp=2)
NEXT = [ClientPlaceTree(pp=2, dp=2, cp=2), ClientPlaceTree(dp=8), ClientPlaceTree(dp=2, cp=2, tp=2)]


def samples(place: ClientPlaceTree, step: ov.Step) -> list[str]:
    """Of the step, over all replicas, in no order."""
    everyone: list[Any] = [None] * place.world_size
    dist.all_gather_object(everyone, [str(piece.sample) for mb in step for piece in mb.samples])
    first = {place.coords(rank)["dp"]: found for rank, found in enumerate(everyone)}
    return samples_of([[s for found in first.values() for s in found]])[0]


def saved(out: Path) -> None:
    """The state by DCP and as a file; then the steps behind it, for whoever resumes."""
    place = FIRST
    with ot.join(job(place, STRATEGY), stall_limit_s=30.0) as client:
        for _ in range(BEFORE):
            next(client)
        weights = {"w": torch.full((2,), float(BEFORE))}
        dcp.save({"model": weights, "loader": ot.LoaderState(client)}, checkpoint_id=out / "dcp")
        ot.save_state(client, out / "plain")
        following = [samples(place, next(client)) for _ in range(AFTER)]
        if dist.get_rank() == 0:
            (out / "following.json").write_text(json.dumps(following))
        dist.barrier()


def resumed(out: Path) -> None:
    wanted = json.loads((out / "following.json").read_text())
    for k, place in enumerate(NEXT):
        made = job(place, STRATEGY)
        if k % 2:  # handed to launch: the session begins there
            with ot.join(made, stall_limit_s=30.0, resume=ot.load_state(out / "plain")) as client:
                assert [samples(place, next(client)) for _ in range(AFTER)] == wanted
                dist.barrier()
            continue
        with ot.join(made, stall_limit_s=30.0) as client:
            weights = {"w": torch.zeros(2)}
            dcp.load(
                {"model": weights, "loader": ot.LoaderState(client)}, checkpoint_id=out / "dcp"
            )
            assert float(weights["w"][0]) == BEFORE
            assert plain(client.state_dict()) == plain(ot.load_state(out / "plain"))
            assert [samples(place, next(client)) for _ in range(AFTER)] == wanted
            dist.barrier()


def saved_or_resumed(out: Path) -> None:
    (saved if dist.get_world_size() == 4 else resumed)(out)


CHECKS: dict[str, Callable[[Path], None]] = {"resume": saved_or_resumed}
