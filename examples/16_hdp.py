"""One step of hybrid data parallelism: 4 ranks, documents longer than a rank, unequal counts.

A rank has room for 256 tokens. The document of 700 tokens is split over ranks 2, 0 and 3; others
share a rank or two. The tasks are written by hand here; further ranks would have none. Run it:
python examples/16_hdp.py, or torchrun --nproc-per-node 4 examples/16_hdp.py
"""

import os
import socket

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import overlord.torch as ot
from overlord import ring
from overlord.plan.tasks import TaskRules, TaskTable
from overlord.torch import hdp

WORLD, CAPACITY, VOCABULARY, WIDTH, HEADS, KV_HEADS = 4, 256, 61, 32, 4, 2
LENGTHS = np.array([700, 300, 250, 120, 90, 1, 60])
TASK = np.array([0, 3, 1, 2, 2, 2, 4])  # of each document
TABLE = TaskTable.of(
    rings=[[2, 0, 3], [1], [1], [3, 1], [0]],  # in ring order
    index=[0, 0, 1, 2, 1],  # of the microbatch, on every rank of the ring
    offload=[0.5, 0, 0, 0.5, 0],
)
# Documents count upwards in steps of their own, which a model can learn from a few tokens.
DOCUMENTS = [(np.arange(n) * (1 + i) + 5 * i) % VOCABULARY for i, n in enumerate(LENGTHS)]


def microbatches(rank: int) -> list[dict[str, torch.Tensor]]:
    """Return what the loader will deliver to a rank: its pieces of every document of its tasks."""
    made = []
    for task in TABLE.tasks(rank):
        members = TABLE.ranks(task)
        d, position = len(members), int(np.flatnonzero(members == rank)[0])
        mine = [DOCUMENTS[i] for i in np.flatnonzero(task == TASK)]
        bounds = np.cumsum([0, *map(len, mine)]).astype(np.int32)
        here = ring.token_index(bounds, d, position)
        columns = {
            "tokens": np.concatenate(mine),
            "labels": np.concatenate([[*tokens[1:], -100] for tokens in mine]),
            "position_ids": np.concatenate([np.arange(len(tokens)) for tokens in mine]),
        }
        made.append(
            {name: torch.from_numpy(column[here]) for name, column in columns.items()}
            | {"cu_seqlens_padded": bounds, "cp_ranks": members, "cp_rank": np.int32(position)}
            | {"offload": TABLE.offload[task]}
        )
    return made


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH * KV_HEADS // HEADS)
        self.ffn = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)
        )

    def forward(self, x: torch.Tensor, positions: torch.Tensor, around: hdp.Ring) -> torch.Tensor:
        h = nn.functional.layer_norm(x, (WIDTH,))
        q = rotated(self.q(h).unflatten(-1, (HEADS, -1)), positions)
        k, v = self.kv(h).unflatten(-1, (2, KV_HEADS, -1)).unbind(1)
        x = x + self.out(hdp.ring_attention(q, rotated(k, positions), v, around).flatten(1))
        return x + self.ffn(x)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    rates = 100.0 ** -torch.linspace(0, 1, x.shape[-1] // 2, dtype=x.dtype)
    angle, (a, b) = positions[:, None, None] * rates, x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


def train(rank: int, port: int = 0) -> None:
    if port:
        # As torchrun does.
        os.environ.update(
            RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hdp.startup_barrier()
    world = dist.get_world_size()
    TABLE.check(TaskRules(ranks=world, capacity=CAPACITY), task=TASK, tokens=LENGTHS)
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(VOCABULARY, WIDTH),
            "layers": nn.ModuleList(Layer() for _ in range(3)),
            "head": nn.Linear(WIDTH, VOCABULARY),
        }
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    valid, losses = int((LENGTHS - 1).sum()), []
    for _ in range(60):
        total = torch.zeros(())
        with hdp.local_gradients(model):
            for mb in microbatches(rank):  # as many as this rank has
                around = hdp.Ring.of(mb)
                with ot.offload(mb["offload"], model["layers"]):
                    x = model["embed"](mb["tokens"])
                    for layer in model["layers"]:
                        x = layer(x, mb["position_ids"], around)
                    loss = ot.token_loss(x, mb["labels"], valid, head=model["head"])
                loss.backward()
                total += loss.detach()
        hdp.sum_gradients(model)
        dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    if rank == 0:
        for r in range(world):
            tasks = TABLE.tasks(r).tolist()
            rings = ", ".join(f"task {t} on {TABLE.ranks(t).tolist()}" for t in tasks)
            tokens = [len(mb["tokens"]) for mb in microbatches(r)]
            print(f"rank {r}: {rings}: {tokens} tokens")
        print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]))
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        mp.start_processes(train, (port,), WORLD, start_method="fork")
