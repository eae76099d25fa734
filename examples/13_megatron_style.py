"""Megatron's `get_batch` on 2 stages x 2 replicas x 2 tensor-parallel ranks; one in four fetches.

The plan broadcasts at TP and PP, so one rank of each replica has a connection. The others receive
from it the keys that their stage needs. Run it: python examples/13_megatron_style.py, or
torchrun --nproc-per-node 8 examples/13_megatron_style.py
"""

import os
import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import overlord as ov
import overlord.torch as ot

PLACE = ov.Mesh(pp=2, dp=2, tp=2)
# Documents count upwards, which a model can learn.
DOCUMENTS = [{"tokens": [(7 * i + k) % 64 for k in range(2 + i % 40)]} for i in range(500)]


def balanced(buffer: ov.Buffer, place: ov.Mesh) -> ov.LoadingPlan:
    samples = (
        ov.DGraph.from_buffer(buffer, place, meta="tokens")
        .mix()
        .distribute("DP")
        .cost(ov.strategy.DENSE_12B)
    )
    return samples.balance("greedy").broadcast_at("TP", "PP").plan()


def forward_backward(
    stage: torch.nn.Module, microbatches: Iterator, at: dict[str, int], valid_tokens: int
) -> torch.Tensor:
    """Run one microbatch through both stages and back.

    Real tensor-parallel ranks would each compute a part; here all compute the same.
    """
    batch, peer = (
        ot.adapters.megatron.get_batch(microbatches),
        PLACE.rank(**{**at, "pp": 1 - at["pp"]}),
    )
    if at["pp"] == 0:
        hidden = stage(batch.tokens[0])
        dist.send(hidden.detach(), peer)
        dist.recv(grad := torch.empty_like(hidden), peer)
        hidden.backward(grad)
        return torch.zeros(())
    dist.recv(hidden := torch.empty(int(batch.packed_seq_params.cu_seqlens_q[-1]), 32), peer)
    loss = ot.token_loss(stage(hidden.requires_grad_()), batch.labels[0], valid_tokens)
    loss.backward()
    dist.send(hidden.grad, peer)
    return loss.detach()


def train(rank: int, port: int = 0) -> None:
    if port:
        # As torchrun does.
        os.environ.update(
            RANK=str(rank), WORLD_SIZE="8", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    at, losses = PLACE.coords(rank), []
    replicas = {
        (p, t): dist.new_group([PLACE.rank(pp=p, dp=d, tp=t) for d in range(2)])
        for p in range(2)
        for t in range(2)
    }
    stage = torch.nn.Embedding(64, 32) if at["pp"] == 0 else torch.nn.Linear(32, 64)
    source = ov.Source.from_dataset("counting", DOCUMENTS, transforms=[ov.Tokens()])
    batch = ov.Batch(samples=32, microbatches=2, context=512)
    job = ov.Job(
        name="megatron",
        sources=[source],
        batch=batch,
        place=PLACE,
        strategy=balanced,
        sync="microbatch",
        until=20,
    )
    with ot.join(job) as client:
        for step in client:
            microbatches = iter(step)
            loss = sum(
                forward_backward(stage, microbatches, at, step.global_valid_tokens)
                for _ in range(len(step))
            )
            for value in (loss, *(p.grad for p in stage.parameters())):
                dist.all_reduce(value, group=replicas[at["pp"], at["tp"]])
            for p in stage.parameters():
                p.data -= 10 * p.grad
                p.grad = None
            losses.append(loss.item())
        everyone = [None] * PLACE.world_size
        dist.all_gather_object(everyone, (client.figures(), ", ".join(sorted(step[0])), losses))
    if rank == 0:
        (first, tokens, _), (_, labels, losses) = everyone[0], everyone[-1]
        print(
            f"ranks that fetch: {[f['rank'] for f, _, _ in everyone if f['fetches']]} of "
            f"8; rank 0 for ranks {first['group']}"
        )
        print(f"first stage: {tokens}\nlast stage: {labels}")
        print(
            f"{sum(f['bytes_fetched'] for f, _, _ in everyone)} bytes fetched; loss "
            f"{losses[0]:.2f} to {losses[-1]:.2f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]))
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        mp.start_processes(train, (port,), 8, start_method="fork")
