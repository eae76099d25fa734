"""Train a small Llama with FSDP2 and resume from a checkpoint.

Half way, model, optimizer and the position in the data are saved in one distributed checkpoint. A
second run resumes from it, and its losses equal those of an uninterrupted run.

Run it: python examples/12_fsdp2.py, or torchrun --nproc-per-node 2 examples/12_fsdp2.py
"""

import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import overlord as ov
import overlord.torch as ot

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class Counting:
    """Write documents that count upwards, which a model can learn."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return {"tokens": [(7 * i + k) % 64 for k in range(2 + i % 40)]}


def train(job: ov.Job, folder: str, *, save_at: int = -1, resume: bool = False) -> list[float]:
    torch.manual_seed(0)
    model, ranks, losses = LlamaForCausalLM(LlamaConfig(**SIZES)), dist.get_world_size(), []
    for part in (*model.model.layers, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with ot.DevicePrefetcher(ot.join(job), "cpu") as steps:
        if resume:
            weights, moments = get_state_dict(model, optimizer)
            dcp.load(
                {"model": weights, "optimizer": moments, "data": ot.LoaderState(steps)},
                checkpoint_id=folder,
            )
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        for step in steps:
            total = torch.zeros(())
            for mb in step:
                logits = model(**ot.adapters.huggingface.flattened(mb) | {"labels": None}).logits
                loss = ot.token_loss(
                    logits, mb["labels"], step.global_valid_tokens, gradients="mean", dp_size=ranks
                )
                loss.backward()
                total += loss.detach() / ranks
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            losses.append(total.item())
            if step.step == save_at:
                weights, moments = get_state_dict(model, optimizer)
                dcp.save(
                    {"model": weights, "optimizer": moments, "data": ot.LoaderState(steps)},
                    checkpoint_id=folder,
                )
    return losses


def main() -> None:
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    # a folder that all ranks can read
    folder = f"{tempfile.gettempdir()}/fsdp2-{os.environ.get('MASTER_PORT', os.getpid())}"
    source = ov.Source("counting", Counting(), transforms=[ov.Tokens()])
    place = ov.Mesh(dp=dist.get_world_size())
    # "microbatch" is the default: FSDP gathers weights in every microbatch.
    batch, sync = ov.Batch(samples=32, microbatches=2, context=512), "microbatch"
    job = ov.Job(name="fsdp2", sources=[source], batch=batch, place=place, sync=sync, until=10)
    whole, rest = train(job, folder, save_at=4), train(job, folder, resume=True)
    if dist.get_rank() == 0:
        same = all(abs(a - b) < 1e-5 for a, b in zip(rest, whole[5:], strict=True))
        print(f"{place.dp} rank(s), 10 steps: loss {whole[0]:.2f} to {whole[-1]:.2f}")
        print(f"steps 5 to 9 again, from the checkpoint: same losses: {same}")
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
