"""Steps that came by a broadcast are those that every rank would have fetched for itself, to the
last bit; on any mesh, along any axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import overlord as ov
import overlord.torch as ot
from overlord.mesh import ClientPlaceTree
from overlord.planning.strategies import DENSE_12B, VIT_1B
from tests import images
from tests.processes import plain, written
from tests.torch.ranks.jobs import broadcasting, job

STEPS = 3
MESHES = {  # by world size
    4: [
        ({"dp": 2, "tp": 2}, ["TP"]),
        ({"dp": 2, "cp": 2}, ["CP"]),
        ({"pp": 2, "dp": 2}, ["PP"]),
        ({"dp": 4}, ["DP"]),
        ({"pp": 4}, ["PP"]),
        ({"pp": 2, "dp": 2}, ["PP", "DP"]),
    ],
    8: [
        ({"dp": 2, "cp": 2, "tp": 2}, ["TP"]),
        ({"dp": 2, "cp": 2, "tp": 2}, ["CP", "TP"]),
        ({"pp": 2, "dp": 2, "cp": 2}, ["PP", "CP"]),
        ({"pp": 2, "dp": 2, "cp": 2}, ["DP"]),
        ({"pp": 2, "cp": 2, "tp": 2}, ["TP", "CP", "PP", "DP"]),
    ],
}


def taken(
    made: ov.Job, steps: int = STEPS, **options: Any
) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    with ot.join(made, stall_limit_s=30.0, **options) as client:
        got = [written(next(client)) for _ in range(steps)]
        state = client.state_dict()
        assert isinstance(client, ot.BroadcastClient) == options.get("broadcast", True), (
            f"another kind of client was wanted: {client}"
        )
        figures = client.figures()
        dist.barrier()  # nobody leaves before all have asked
    return got, state, figures


def equals_fetching(
    place: ClientPlaceTree, axes: list[str], split: str = "DP", **changes: Any
) -> None:
    made = job(place, broadcasting(*axes, split=split), **changes)
    alone, state, own = taken(made, broadcast=False)
    served, same, figures = taken(made)
    assert own.keys() == figures.keys()
    assert (own["fetches"], own["group"], own["fetching_ranks"]) == (
        True,
        [dist.get_rank()],
        dist.get_world_size(),
    )
    assert own["bytes_fetched"] > own["bytes_broadcast"] == own["held_bytes"] == 0
    assert [s[:3] for s in served] == [s[:3] for s in alone]
    assert served == alone
    assert plain(same) == plain(state)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (figures, plain(same)))
    fetching = [f for f, _ in everyone if f["fetches"]]
    assert len(fetching) == len(place.fetchers(axes)) == figures["fetching_ranks"]
    assert all(f["connections"] == 0 for f, _ in everyone if not f["fetches"])
    assert all(s == everyone[0][1] for _, s in everyone), "the state differs between ranks"
    assert sum(f["bytes_fetched"] for f in fetching) > 0
    assert (
        figures["bytes_broadcast"]
        == next(f for f in fetching if f["rank"] == figures["fetcher"])["bytes_broadcast"]
    )


def every_mesh(out: Path) -> None:
    for degrees, axes in MESHES[dist.get_world_size()]:
        equals_fetching(ClientPlaceTree(**degrees), axes)


def other_layouts(out: Path) -> None:
    """Padded rows, unshifted labels, microbatches of a CP group's own, splits that leave slicing to
    the trainer.
    """
    w = dist.get_world_size()
    place = ClientPlaceTree(dp=w // 4, cp=2, tp=2)
    equals_fetching(place, ["TP", "CP"], batch={"layout": "padded", "labels": "unshifted"})
    equals_fetching(place, ["TP"], split="CP")
    equals_fetching(place, ["CP"], split="CP")
    equals_fetching(place, ["CP"], batch={"cp_split": "none"})
    equals_fetching(place, ["CP"], batch={"cp_split": "contiguous"})


def with_weights(assembly: ov.Assembly) -> list[dict[str, np.ndarray]]:
    """Microbatches of a hook: with a weight for each token, and two numbers for each document."""
    made = assembly.default()
    return [
        {**mb, "weights": mb["tokens"] * 0.5, "pairs": np.stack([mb["cu_seqlens"]] * 2, axis=1)}
        for mb in made
    ]


def microbatches_of_a_hook(out: Path) -> None:
    place = ClientPlaceTree(dp=dist.get_world_size() // 4, cp=2, tp=2)
    equals_fetching(place, ["TP", "CP"], hooks=[ov.constructor_do_plan(with_weights)])


def another_order_of_ranks(out: Path) -> None:
    equals_fetching(
        ClientPlaceTree(dp=dist.get_world_size() // 4, cp=2, tp=2, order=("tp", "cp", "pp", "dp")),
        ["TP"],
    )


def images_come_to_who_encodes_them(out: Path) -> None:
    """A rank that is served still encodes its own images; tokens are fetched once, pixels by each
    for itself.
    """
    w = dist.get_world_size()
    base = images.job(
        out / f"images{dist.get_rank()}", batch=ov.Batch(samples=10, context=64)
    )  # it writes the files; one rank reads them
    for degrees, axes, per in (
        ({"dp": w // 2, "tp": 2}, ["TP"], "iteration"),
        ({"dp": w // 2, "tp": 2}, ["TP"], "microbatch"),
        ({"dp": w // 4, "cp": 2, "tp": 2}, ["TP"], "CP"),
        ({"dp": w}, ["DP"], "iteration"),
        ({"pp": 2, "dp": w // 2}, ["DP", "PP"], "microbatch"),
    ):
        made = replace(
            base, place=ClientPlaceTree(**degrees), strategy=broadcasting_images(axes, per)
        )
        alone, _, _ = taken(made, broadcast=False)
        served, _, _ = taken(made)
        assert served == alone
        assert sum(len(exchange) for step in alone for exchange in step[5]) > 0, "no images came"


def broadcasting_images(axes: list[str], per: str) -> Any:
    def strategy(buffer: ov.Buffer, place: ClientPlaceTree) -> ov.LoadingPlan:
        drawn = ov.DGraph.from_buffer(buffer, place).mix()
        samples = (
            drawn.select("tokens")
            .distribute("CP" if per == "CP" else "DP")
            .cost(DENSE_12B)
            .balance("greedy")
            .broadcast_at(*axes)
        )
        items = drawn.select("image_patches").distribute("WORLD").cost(VIT_1B)
        return samples.plan(
            encoder=items.balance("greedy")
            if per != "microbatch"
            else items.follow(samples, "greedy", per=per)
        )

    return strategy


CHECKS: dict[str, Callable[[Path], None]] = {
    "every_mesh": every_mesh,
    "other_layouts": other_layouts,
    "another_order_of_ranks": another_order_of_ranks,
    "microbatches_of_a_hook": microbatches_of_a_hook,
    "images_come_to_who_encodes_them": images_come_to_who_encodes_them,
}
