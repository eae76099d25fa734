"""Ranks with a process group and none of torchrun's variables: every interface gives each rank its
own data, from one session.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

import overlord as ov
import overlord.torch as ot
from overlord.mesh import ClientPlaceTree
from tests.processes import until
from tests.torch.ranks.jobs import broadcasting, job

WITHOUT_ENVIRONMENT = True
STEPS = 2
PLACE = ClientPlaceTree(dp=2)


def everyone(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def samples(steps: Any) -> list[list[str]]:
    return [sorted(str(piece.sample) for mb in step for piece in mb.samples) for step in steps]


def refusal(act: Callable[[], Any], kind: type[ov.OverlordError] = ov.JobError) -> str:
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError("it was not refused")


def each_rank_gets_its_own_data(out: Path) -> None:
    made = job(PLACE, until=STEPS)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} & os.environ.keys()
    with ov.launch(made) as session:
        clients = [session.client(rank) for rank in range(2)]
        wanted = [samples(steps) for steps in zip(*zip(*clients, strict=True), strict=True)]
    assert not set(chain(*wanted[0])) & set(chain(*wanted[1]))

    def by_loader(source: Any, loader: Any) -> list[list[str]]:
        found = samples(loader)
        assert source.client.rank == dist.get_rank()
        assert (source.client.session is not None) == (dist.get_rank() == 0), (
            "one rank launches, the others connect"
        )
        source.close()
        return found

    for join in (ov.join, ot.join):
        with join(made, stall_limit_s=30.0) as client:
            assert client.rank == dist.get_rank()
            assert everyone(samples(client)) == wanted
    loader, dataset = ot.StatefulLoader(made), ot.Dataset(made)
    assert everyone(by_loader(loader, loader)) == wanted
    assert everyone(by_loader(dataset, DataLoader(dataset, batch_size=None))) == wanted


def a_client_connects_as_the_rank_of_its_process_group(out: Path) -> None:
    session = ov.launch(job(PLACE)) if dist.get_rank() == 0 else None
    served = session.serve() if session is not None else None
    said = everyone(None if served is None else (served.address, served.token))[0]
    with ov.connect(said[0], token=said[1]) as client:
        assert client.rank == next(client).rank == dist.get_rank()
        dist.barrier()
    dist.barrier()
    if session is not None:
        session.close()


def a_mesh_of_another_size_is_refused(out: Path) -> None:
    for place in (ClientPlaceTree(), ClientPlaceTree(dp=4)):
        for join in (ov.join, ot.join, lambda made: next(iter(ot.StatefulLoader(made)))):
            said = refusal(lambda join=join, place=place: join(job(place)))
            assert f"expected the 2 ranks of the process group, got {place.world_size}" in said


def evaluation_starts_anew_on_every_rank(out: Path) -> None:
    """Though one rank begins its next pass while the other has not taken the last step of the one
    before.
    """
    made = job(PLACE)
    passes_of = ov.evaluation(made.sources, made.batch, PLACE, steps=3)
    with ot.StatefulLoader(passes_of, prefetch=1) as loader:
        passes = []
        for _ in range(3):
            seen = []
            for step in loader:
                seen.append(samples([step])[0])
                time.sleep(0.1 * dist.get_rank())
            passes.append(seen)
        assert passes[0] == passes[1] == passes[2]
        assert len(passes[0]) == 3


class _PrefetchDataFetcher:
    """Holds one item ahead, as Lightning's of this name does; it is known by its name."""

    prefetch_batches, length = 1, None

    def limited(self, loader: Any, n: int, pause_s: float) -> list[list[str]]:
        iterator, seen = iter(loader), []
        item = next(iterator)
        for _ in range(n):
            held, item = item, next(iterator)
            seen.append(samples([held])[0])
            time.sleep(pause_s)
        return seen


def limited_evaluation_starts_anew_on_every_rank(out: Path) -> None:
    """The trainer holds an item when a pass ends; a rank that is slower is in the middle of the
    pass then.
    """
    with ot.StatefulLoader(job(PLACE, until=8), rewind=True, prefetch=1) as loader:
        passes = [
            _PrefetchDataFetcher().limited(loader, 3, 0.3 * dist.get_rank()) for _ in range(3)
        ]
        assert passes[0] == passes[1] == passes[2]
        dist.barrier()


def evaluation_by_clients_starts_anew_on_every_rank(out: Path) -> None:
    for join in (ov.join, ot.join):
        client = join(job(PLACE, until=3), prefetch=1, stall_limit_s=30.0)
        with ot.StatefulLoader(client, rewind=True) as loader:
            passes = []
            for _ in range(3):
                seen = []
                for step in loader:
                    seen.append(samples([step])[0])
                    time.sleep(0.1 * dist.get_rank())
                passes.append(seen)
            assert passes[0] == passes[1] == passes[2]
            assert len(passes[0]) == 3


def a_refused_step_of_a_broadcast_is_in_the_state(out: Path) -> None:
    place = ClientPlaceTree(tp=2)
    with ot.join(
        job(place, broadcasting("TP"), batch={"microbatches": 1, "samples": 48}, until=3)
    ) as client:
        assert isinstance(client, ot.BroadcastClient)
        for _ in range(2):
            said = refusal(lambda: next(client.microbatches()), ov.PlanError)
            assert "plan of step 0: expected the 1 microbatches" in said
            assert everyone(client.state_dict()["step"]) == [0, 0]
        assert [step.step for step in client] == [0, 1, 2]
        assert everyone(client.state_dict()["step"]) == [3, 3]


def a_process_group_of_another_size_is_no_place_to_meet(out: Path) -> None:
    with ov.launch(job(ClientPlaceTree(dp=4))) as session:
        loader = ot.StatefulLoader(session.client(0), rewind=True)
        said = refusal(lambda: iter(loader))
        assert "expected a mesh of the 2 ranks of the process group, got a client of rank 0" in said


def a_rank_that_begins_no_pass_is_named(out: Path) -> None:
    with (
        mock.patch("overlord.torch.rewind_barrier.BARRIER_S", 1.0),
        ot.StatefulLoader(job(PLACE, until=3), rewind=True) as loader,
    ):
        next(iter(loader))
        dist.barrier()
        if dist.get_rank() == 0:
            said = refusal(lambda: iter(loader), ov.DataStall)
            assert "all 2 ranks to begin the next pass of a loader with rewind=True" in said
            assert "every rank must begin each pass: [Rank 0]: Ranks 1 failed to pass" in said
            (out / "named").touch()
        else:
            until((out / "named").exists)
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # gloo's links do not outlive a wait that passed its limit
    dist.init_process_group("gloo", init_method=f"file://{out}/anew", rank=rank, world_size=world)


class Stateless:
    """Something with a state and no rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"rank": dist.get_rank()}


def one_rank_writes_a_state(out: Path) -> None:
    ot.save_state(Stateless(), out / "state.json")
    dist.barrier()
    assert ot.load_state(out / "state.json") == {"rank": 0}


def a_worker_is_refused(out: Path) -> None:
    iterator = iter(DataLoader(ot.Dataset(job(PLACE)), batch_size=None, num_workers=1))
    said = refusal(lambda: next(iterator))
    assert "num_workers: expected 0 where ranks share a session (WORLD_SIZE=2), got 1" in said


def accelerate_does_not_deal_out_the_items_of_one_rank(out: Path) -> None:
    """It knows its processes by the environment; rank 0 would read for all of them."""
    where = {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    with mock.patch.dict(os.environ, {**where, "MASTER_PORT": "1"}):
        for dispatches, name in ((True, "DataLoaderDispatcher"), (False, "IterableDatasetShard")):
            settings = DataLoaderConfiguration(dispatch_batches=dispatches)
            accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
            assert accelerator.num_processes == 2
            loader = accelerator.prepare(
                DataLoader(
                    ot.Dataset(job(PLACE), microbatches=True),
                    batch_size=1,
                    collate_fn=lambda b: b[0],
                )
            )
            said = refusal(lambda loader=loader: next(iter(loader)))
            assert f"got {name}, which distributes" in said
            assert "overlord.torch.Loader(job)" in said
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def gradients_are_summed_on_gloo(out: Path) -> None:
    """As docs/torch.md has it: a divide factor of 1, and sums alone, which gloo has."""
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 1, bias=False)
    )
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
    assert torch.equal(model[0].weight.grad.full_tensor(), torch.full((2, 4), 0.5 * (1.0 + 2.0)))


CHECKS: dict[str, Callable[[Path], None]] = {
    check.__name__: check
    for check in (
        each_rank_gets_its_own_data,
        a_client_connects_as_the_rank_of_its_process_group,
        a_mesh_of_another_size_is_refused,
        evaluation_starts_anew_on_every_rank,
        limited_evaluation_starts_anew_on_every_rank,
        evaluation_by_clients_starts_anew_on_every_rank,
        a_refused_step_of_a_broadcast_is_in_the_state,
        a_process_group_of_another_size_is_no_place_to_meet,
        one_rank_writes_a_state,
        a_worker_is_refused,
        accelerate_does_not_deal_out_the_items_of_one_rank,
        gradients_are_summed_on_gloo,
        a_rank_that_begins_no_pass_is_named,
    )
}
