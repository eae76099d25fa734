"""Ray Train: two workers of a TorchTrainer receive steps from an Overlord job on the same cluster.

They connect by its address and token. One worker is killed. Train restarts both, they load the last
checkpoint, and each continues with the steps of an undisturbed run.

Run it: python examples/15_ray_train.py
"""

import os
import signal
import tempfile
import zlib

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer

import overlord as ov
import overlord.torch as ot

# Documents count upwards, which a model can learn.
DOCUMENTS = [{"tokens": [(7 * i + k) % 64 for k in range(2 + i % 40)]} for i in range(500)]


def digest(step: ov.Step) -> int:
    return zlib.crc32(b"".join(mb["tokens"].tobytes() for mb in step))


def train(config: dict) -> None:
    """Train in one worker; ``config`` holds the address and the token of the job."""
    rank, seen, state = ray.train.get_context().get_world_rank(), [], config["start"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64))
    if (last := ray.train.get_checkpoint()) is not None:
        with last.as_directory() as folder:
            saved, seen = torch.load(f"{folder}/all.pt"), torch.load(f"{folder}/{rank}.pt")
        state = saved["data"]
        model.load_state_dict(saved["model"])
    # The client is not closed: a closed one cannot reconnect.
    client = ov.connect(config["address"], rank, config["token"])
    # Also without a checkpoint: otherwise a rank would continue after the last step it took.
    client.load_state_dict(state)
    dist.barrier()  # no rank takes a step before all have loaded the state
    for step in client:
        total = torch.zeros(())
        for mb in step:
            logits, labels = model(torch.tensor(mb["tokens"])), torch.tensor(mb["labels"])
            (loss := ot.token_loss(logits, labels, step.global_valid_tokens)).backward()
            total += loss.detach()
        for value in (total, *(p.grad for p in model.parameters())):
            dist.all_reduce(value)
        for p in model.parameters():
            p.data -= 10 * p.grad
            p.grad = None
        seen.append(digest(step))
        if step.step % 4 == 3:
            # Train merges the files of all ranks into one checkpoint.
            with tempfile.TemporaryDirectory() as folder:
                torch.save(seen, f"{folder}/{rank}.pt")
                if rank == 0:  # the state of the data is the same on every rank
                    torch.save(
                        {"model": model.state_dict(), "data": client.state_dict()},
                        f"{folder}/all.pt",
                    )
                said = {
                    "step": step.step,
                    "loss": total.item(),
                    "group": "first" if last is None else "second",
                }
                ray.train.report(said, checkpoint=ray.train.Checkpoint.from_directory(folder))
        if step.step == 5 and rank == 1 and last is None:
            # Train polls every two seconds; a checkpoint that it has not seen yet is lost.
            ray.train.get_all_reported_checkpoints()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    source = ov.Source.from_dataset("counting", DOCUMENTS, transforms=[ov.Tokens()])
    batch = ov.Batch(samples=32, microbatches=2, context=512)
    place = ov.Mesh(dp=2)
    # sync="step": gradients are summed once per step.
    job = ov.Job(
        name="ray-train", sources=[source], batch=batch, place=place, sync="step", until=12
    )
    with (
        tempfile.TemporaryDirectory() as storage,
        ov.launch(job, runtime="ray", cache_dir=f"{storage}/cache") as session,
    ):
        served = session.serve()  # launch has started a cluster, and Train uses it
        config = {"address": served.address, "token": served.token, "start": session.state_dict()}
        run = ray.train.RunConfig(
            name="run", storage_path=storage, failure_config=ray.train.FailureConfig(max_failures=1)
        )
        # Half a core each, so that a machine with one core is enough.
        workers = ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
        result = TorchTrainer(
            train, train_loop_config=config, scaling_config=workers, run_config=run
        ).fit()
        with result.checkpoint.as_directory() as folder:
            seen = [torch.load(f"{folder}/{rank}.pt") for rank in range(2)]
    print("step {step}, by the {group} group of workers: loss {loss:.2f}".format(**result.metrics))
    with ov.launch(job) as session:
        calm = [
            [digest(step) for step in steps]
            for steps in zip(*map(session.client, range(2)), strict=True)
        ]
    print(
        f"{len(calm)} steps on both ranks are those of a calm run: "
        f"{[list(both) for both in zip(*seen, strict=True)] == calm}"
    )


if __name__ == "__main__":
    main()
