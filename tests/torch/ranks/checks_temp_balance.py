"""TempBalance on sharded weights has the exponents and rates of the whole model, the same in every
bit on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiStepLR

import overlord.torch as ot
from overlord.errors import JobError
from overlord.torch.weight_matrices import model_matrices

SIDE = 40
STEPS = 8


class Block(nn.Module):
    """Tall, wide, square, fused, convolutional and expert weights; some sides do not divide."""

    def __init__(self, k: int):
        super().__init__()
        self.qkv_proj = nn.Linear(SIDE, 2 * SIDE)
        self.up = nn.Linear(SIDE, 3 * SIDE + 1)
        self.down = nn.Linear(3 * SIDE + 1, SIDE)
        self.conv = nn.Conv1d(12, 18, 3)
        self.experts = nn.Module()
        self.experts.w = nn.Parameter(torch.randn(5, SIDE, SIDE + 8) / 8)
        for p in self.parameters():
            if p.ndim == 2:
                p.data *= torch.linspace(1, 2 + 3 * k, len(p))[:, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, kv = self.qkv_proj(x).split((SIDE, SIDE), -1)
        x = x + torch.tanh(q) * kv.mean()
        mixed = torch.einsum("bs,est->bt", x, self.experts.w)[:, :SIDE]
        conv = self.conv(x[:, :36].reshape(-1, 12, 3)).mean()
        return x + self.down(torch.tanh(self.up(x))) * 0.1 + mixed * 0.1 + conv


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.config = SimpleNamespace(
            num_attention_heads=4, num_key_value_heads=2, head_dim=10, hidden_size=SIDE
        )
        self.embed = nn.Embedding(9, SIDE)
        self.layers = nn.ModuleList([Block(k) for k in range(blocks)])
        self.lm_head = nn.Linear(SIDE, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        for block in self.layers:
            y = block(y)
        return self.lm_head(y)


def trained(model: nn.Module, **changes: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"every": 2, "smooth": 3, "min_eigs": 8, **changes}
    balance = ot.TempBalance(optimizer, CosineAnnealingLR(optimizer, 20), model=model, **settings)
    for k in range(STEPS):
        x = torch.arange(8) * (k + 2) % 9
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x + 1) % 9).backward()
        optimizer.step()
        balance.step()
    return optimizer, balance


def alone(model: nn.Module, **changes: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Exponents and multipliers of the whole model, trained by this rank without the others."""
    me = dist.new_subgroups(group_size=1)[0]
    _, balance = trained(model, process_group=me, **changes)
    return balance.alphas, balance.multipliers


def same_everywhere(*values: Any) -> None:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    assert all(repr(other) == repr(values) for other in found), "ranks differ"


def near(found: dict[str, float], wanted: dict[str, float], tolerance: float) -> None:
    assert list(found) == list(wanted)
    off = {k: (v, wanted[k]) for k, v in found.items() if not abs(v - wanted[k]) <= tolerance}
    assert not off, off


def sharded(settings: dict[str, Any]) -> Callable[[Path], None]:
    def check(_: Path) -> None:
        model = Model()
        for part in (*model.layers, model):
            fully_shard(part)
        assert any(isinstance(p, DTensor) for p in model.parameters())
        optimizer, balance = trained(model, **settings)
        alphas, multipliers = alone(Model(), **settings)
        near(balance.alphas, alphas, 1e-4)  # sums of gradients in another order
        near(balance.multipliers, multipliers, 2e-4)
        assert len(set(multipliers.values())) > 1
        rates = [float(g["lr"]) for g in optimizer.param_groups]
        same_everywhere(balance.alphas, balance.multipliers, rates)

    return check


def without_training(_: Path) -> None:
    """Of the same weights exponents agree to rounding, by every estimator."""
    for name in ("hill", "farms", "ks", "published"):
        model = Model()
        wanted = _local(model, name)
        for part in (*model.layers, model):
            fully_shard(part)
        found = ot.spectra(model, estimator=name, min_eigs=8)
        near(values(found), wanted, 1e-9)
        same_everywhere(found.alphas, [row.norm for row in found])


def _local(model: nn.Module, name: str) -> dict[str, float]:
    return values(_alone(model, name))


def _alone(model: nn.Module, name: str) -> Any:
    me = dist.new_subgroups(group_size=1)[0]
    return ot.spectra(model, estimator=name, min_eigs=8, process_group=me)


def values(found: Any) -> dict[str, float]:
    """Exponents and norms: an exponent alone does not change if a shard counts twice."""
    return found.alphas | {f"{row.name} norm": row.norm for row in found}


def tensor_parallel(_: Path) -> None:
    """Columns, rows, and both with replicas: two axes of the mesh on four ranks."""
    size = dist.get_world_size()
    line = init_device_mesh("cpu", (size,))
    places: list[tuple[Any, list[Any]]] = [(line, [Shard(0)]), (line, [Shard(1)])]
    if size == 4:
        grid = init_device_mesh("cpu", (2, 2))
        places += [
            (grid, [Replicate(), Shard(0)]),
            (grid, [Shard(0), Replicate()]),
            (grid, [Shard(0), Shard(0)]),
            (grid, [Shard(0), Shard(1)]),
            (grid, [Shard(1), Shard(0)]),
        ]
    for name in ("hill", "farms"):
        wanted = _local(Model(), name)
        for mesh, placements in places:
            model = Model()
            for module in model.modules():
                for key, p in module.named_parameters(recurse=False):
                    if p.ndim > 1:
                        value = distribute_tensor(p.data, mesh, placements)
                        setattr(module, key, nn.Parameter(value))
            found = ot.spectra(model, estimator=name, min_eigs=8)
            near(values(found), wanted, 1e-9)


def fsdp_over_tensor_parallel(_: Path) -> None:
    """Rows are sharded by tp first and by dp then, so that a rank's rows are not consecutive."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    wanted, model = _local(Model(), "farms"), Model()
    for block in model.layers:
        for module in (block.qkv_proj, block.up):
            for key, p in list(module.named_parameters(recurse=False)):
                value = distribute_tensor(p.data, mesh["tp"], [Shard(0)])
                setattr(module, key, nn.Parameter(value))
        fully_shard(block, mesh=mesh["dp"])
    near(values(ot.spectra(model, estimator="farms", min_eigs=8)), wanted, 1e-9)


def nothing_is_gathered_that_need_not_be(_: Path) -> None:
    """Only matrices whose short side is sharded are gathered, one at a time."""
    model, gathered = Model(), []
    for part in (*model.layers, model):
        fully_shard(part)
    whole = DTensor.full_tensor

    def counted(self: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        gathered.append(tuple(self.shape))
        return whole(self, *args, **kwargs)

    DTensor.full_tensor = counted
    try:
        ot.spectra(model, min_eigs=8)
    finally:
        DTensor.full_tensor = whole
    # wide ones: down, and the k and v parts of qkv, which are gathered together
    assert sorted(set(gathered)) == [(SIDE, 3 * SIDE + 1), (2 * SIDE, SIDE)], gathered
    assert len(gathered) == 2 * len(model.layers)


def work_is_spread(_: Path) -> None:
    model, solved = Model(6), []
    solve = torch.linalg.eigvalsh
    torch.linalg.eigvalsh = lambda grams: solved.append(grams.numel()) or solve(grams)
    try:
        ot.spectra(model, min_eigs=8)
    finally:
        torch.linalg.eigvalsh = solve
    mine, total = torch.tensor(float(sum(solved))), torch.tensor(float(sum(solved)))
    dist.all_reduce(total)
    expected = sum(m.small**2 * m.stack for m in model_matrices(model))
    assert total == expected, "each problem is solved once"
    assert mine < 1.3 * total / dist.get_world_size()


def checkpointed(out: Path) -> None:
    """A distributed checkpoint gives back the state, with keys of any type in it."""

    def make() -> Any:
        model = Model()
        for part in (*model.layers, model):
            fully_shard(part)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = MultiStepLR(optimizer, [2, 5], 0.5)  # its state has integers as keys
        settings: dict[str, Any] = {"every": 2, "smooth": 4, "min_eigs": 8}
        return ot.TempBalance(optimizer, scheduler, model=model, **settings)

    folder = str(out / "checkpoint")
    balance = make()
    for _ in range(3):
        balance.step()
    dcp.save({"balance": balance}, checkpoint_id=folder)
    again = make()
    dcp.load({"balance": again}, checkpoint_id=folder)
    assert again.state_dict() == balance.state_dict()
    for _ in range(4):
        balance.step()
        again.step()
        assert again.get_last_lr() == balance.get_last_lr()
        assert again.state_dict() == balance.state_dict()
    assert len({float(r) for r in again.get_last_lr()}) > 1
    same_everywhere(again.get_last_lr())


def other_models_are_refused(_: Path) -> None:
    """As pipeline stages have: with the group of one stage each is balanced by itself."""
    blocks = 2 + dist.get_rank() % 2
    model = Model(blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    with pytest.raises(JobError, match="process_group"):
        ot.TempBalance(optimizer, scheduler, model=model, min_eigs=8)
    size = dist.get_world_size()
    stages = [dist.new_group(list(range(s, size, 2))) for s in (0, 1)]
    with pytest.raises(JobError, match="expected a group with this rank"):
        ot.spectra(model, process_group=stages[1 - dist.get_rank() % 2])
    balance = ot.TempBalance(
        optimizer,
        scheduler,
        model=model,
        min_eigs=8,
        every=1,
        process_group=stages[dist.get_rank() % 2],
    )
    balance.step()
    assert len(balance.multipliers) == blocks
    near(balance.alphas, _alone(Model(blocks), "hill").alphas, 1e-9)


CHECKS: dict[str, Callable[[Path], None]] = {
    "exponents of sharded weights": without_training,
    "tensor parallel": tensor_parallel,
    "fsdp over tensor parallel": fsdp_over_tensor_parallel,
    "blocks": sharded({"unit": "block"}),
    "matrices": sharded({"unit": "matrix", "estimator": "farms", "map": "sigmoid"}),
    "gathers": nothing_is_gathered_that_need_not_be,
    "work": work_is_spread,
    "checkpoint": checkpointed,
    "stages": other_models_are_refused,
}
