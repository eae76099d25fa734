"""Hybrid data parallelism: documents longer than a rank, on rings of ranks that change every step.

A rank has room for 256 tokens, and documents have up to 900. The loader plans which ranks share a
document and gives each its piece; ranks run different numbers of microbatches. Run it:
python examples/16_hdp.py, or torchrun --nproc-per-node 8 examples/16_hdp.py
"""

import os
import shutil
import socket
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import overlord as ov
import overlord.torch as ot
from overlord.torch import hdp

WORLD, CAPACITY, VOCABULARY, WIDTH, HEADS, KV_HEADS = 4, 256, 61, 32, 4, 2
# Documents count upwards in steps of their own, which a model can learn from a few tokens.
LENGTHS = [700, 300, 250, 120, 90, 1, 60, 900]
DOCUMENTS = [
    {"tokens": [(k * (1 + i) + 5 * i) % VOCABULARY for k in range(n)]}
    for i, n in enumerate(LENGTHS)
]


def job(ranks: int) -> ov.Job:
    source = ov.Source.from_dataset("counting", DOCUMENTS, transforms=[ov.Tokens()])
    return ov.Job(
        name="hybrid",
        sources=[source],
        place=ov.Mesh(dp=ranks),
        batch=ov.Batch(samples=8, context=CAPACITY),  # context: tokens of one rank
        strategy="hdp_balance",
        max_document=900,
        sync="step",  # ranks wait for each other once a step, so their counts may differ
        until=40,
    )


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
            RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hdp.startup_barrier()
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(VOCABULARY, WIDTH),
            "layers": nn.ModuleList(Layer() for _ in range(3)),
            "head": nn.Linear(WIDTH, VOCABULARY),
        }
    )
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=5e-3), []
    folder = tempfile.mkdtemp()  # of the loader's measurements
    with ot.join(job(dist.get_world_size()), cache_dir=folder) as client:
        for step in client:
            total = torch.zeros(())
            with hdp.local_gradients(model):
                for mb in ot.TensorStep.of(step):  # as many as this rank has
                    around = hdp.Ring.of(mb)
                    with ot.offload(float(mb["offload"]), model["layers"]):
                        x = model["embed"](mb["tokens"])
                        for layer in model["layers"]:
                            x = layer(x, mb["position_ids"], around)
                        valid = step.global_valid_tokens
                        loss = ot.token_loss(x, mb["labels"], valid, head=model["head"])
                    loss.backward()
                    total += loss.detach()
            hdp.sum_gradients(model)
            dist.all_reduce(total)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
            if step.step == 0:
                say(rank, step)
    if rank == 0:
        print(f"{len(losses)} steps: loss {losses[0]:.2f} to {losses[-1]:.2f}")
    shutil.rmtree(folder)
    dist.destroy_process_group()


def say(rank: int, step: ov.Step) -> None:
    """Print the microbatches of every rank in its turn."""
    rings = [f"{len(mb['tokens'])} tokens on {mb['cp_ranks'].tolist()}" for mb in step]
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, ", ".join(rings))
    if rank == 0:
        print("\n".join(f"rank {r}: {text}" for r, text in enumerate(every)))


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]))
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        mp.start_processes(train, (port,), WORLD, start_method="fork")
