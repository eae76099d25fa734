"""Train a model of two modules on 2 replicas x 2 tensor-parallel ranks.

The plan assigns images to any rank, and one all-to-all brings their rows to the ranks that hold the
text. The model learns to name colours, which is impossible without the images.

Run it: python examples/14_vlm_torchrun.py, or torchrun --nproc-per-node 4
examples/14_vlm_torchrun.py
"""

import io
import os
import shutil
import socket
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image

import overlord as ov
import overlord.torch as ot

PLACE, COLOURS, IMAGE = (
    ov.Mesh(dp=2, tp=2),
    [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255)],
    9,
)


def write_photos(folder: str) -> None:
    """Write samples with one to eight images, each followed by the token that names it."""
    os.makedirs(folder)
    chance, rows = np.random.default_rng(0), {"images": [], "tokens": []}
    for _ in range(240):
        named = chance.integers(0, len(COLOURS), chance.integers(1, 9)).tolist()
        files = [io.BytesIO() for _ in named]
        for file, colour in zip(files, named, strict=True):
            Image.new("RGB", (int(chance.integers(30, 80)), 40), COLOURS[colour]).save(file, "PNG")
        rows["images"].append([file.getvalue() for file in files])
        rows["tokens"].append([token for colour in named for token in (IMAGE, colour)])
    pq.write_table(pa.table(rows), f"{folder}/photos.parquet")


def train(rank: int, port: int = 0) -> None:
    if port:
        # As torchrun does.
        os.environ.update(
            RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    folder = f"{tempfile.gettempdir()}/vlm-{os.environ['MASTER_PORT']}"
    if rank == 0:  # it launches the job; no other rank reads files
        write_photos(folder)
    tp, dp = (
        [dist.new_group(ranks) for ranks in lists] for lists in (([0, 1], [2, 3]), ([0, 2], [1, 3]))
    )
    vit, llm, embed = (
        torch.nn.Linear(3 * 14 * 14, 16),
        torch.nn.Linear(16, 10),
        torch.nn.Embedding(10, 16),
    )
    # Four patches become one token.
    images = ov.Images("images", placeholder=IMAGE, at="marker", size=(28, 28), patch=14, merge=2)
    source, batch = (
        ov.Source("photos", f"{folder}/*.parquet", transforms=[ov.Tokens(), images]),
        ov.Batch(samples=16, context=128),
    )
    losses, counts = [], np.zeros((4, 2), int)
    # Replicas wait for each other once per step, to sum gradients.
    job = ov.Job(
        name="vlm",
        sources=[source],
        batch=batch,
        place=PLACE,
        strategy="vlm_hybrid",
        sync="step",
        until=30,
    )
    with ot.join(job, cache_dir=f"{folder}/cache") as client:
        for step in client:
            [maps], loss = step.encoder, torch.zeros(())
            # Without images there are 0 rows.
            rows = vit(torch.tensor(maps["pixel_values"])).view(-1, 4, 16).mean(1)
            exchange = ot.Exchange(rows, maps)
            for m, mb in enumerate(step):
                # Both ranks of a replica embed the tokens.
                mine = ot.share_rows(*exchange.microbatch(m), tp[rank // 2], gradients="own")
                hidden = ot.place_rows(embed(torch.tensor(mb["tokens"])), *mine)
                (
                    part := ot.token_loss(
                        llm(hidden), torch.tensor(mb["labels"]), step.global_valid_tokens
                    )
                ).backward()
                loss += part.detach()
            exchange.backward()
            # All ranks encode images; the ranks of a replica share its text.
            sums = {None: [vit], dp[rank % 2]: [llm, embed]}
            dist.all_reduce(loss, group=dp[rank % 2])
            for p, group in [
                (p, group)
                for group, parts in sums.items()
                for part in parts
                for p in part.parameters()
            ]:
                dist.all_reduce(p.grad, group=group)
                p.data -= 0.03 * p.grad
                p.grad = None
            losses.append(loss.item())
            counts[rank] += (
                len(maps["grid_thw"]),
                int(maps["send_splits"].sum() - maps["send_splits"][rank]),
            )
        dist.all_reduce(torch.from_numpy(counts))
    if rank == 0:
        print(
            f"images encoded by each rank: {counts[:, 0].tolist()}; rows sent to another: "
            f"{counts[:, 1].tolist()}"
        )
        print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    train(int(os.environ["RANK"])) if "RANK" in os.environ else mp.start_processes(
        train, (port,), 4, start_method="fork"
    )
