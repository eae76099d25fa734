"""A model of two modules: images are balanced over all ranks, samples over data-parallel replicas.

The encoder processes the images, the backbone the samples.

Run it: python examples/08_vlm_hybrid.py
"""

from __future__ import annotations

import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ov

LLM, VIT = ov.strategy.DENSE_12B, ov.strategy.VIT_1B


def llm(buffer: ov.Buffer, place: ov.Mesh) -> ov.LoadingPlan:
    samples = ov.DGraph.from_buffer(buffer, place, meta="tokens").mix()
    return samples.distribute("DP").cost(LLM).balance("greedy").broadcast_at("TP").plan()


def vlm(buffer: ov.Buffer, place: ov.Mesh) -> ov.LoadingPlan:
    drawn = ov.DGraph.from_buffer(buffer, place).mix()
    images = drawn.select("image_patches", merge=2).distribute("WORLD").cost(VIT).balance("greedy")
    samples = drawn.select("tokens").distribute("DP").cost(LLM).balance("greedy").broadcast_at("TP")
    return samples.plan(encoder=images)


def apart(buffer: ov.Buffer, place: ov.Mesh) -> ov.LoadingPlan:
    """Encode on the first ranks alone, and train the backbone on the others."""
    quarter = place.world_size // 4
    encoder = ov.Mesh(dp=quarter)
    backbone = ov.Mesh(dp=place.world_size - quarter, first_rank=quarter)
    drawn = ov.DGraph.from_buffer(buffer, place).mix()
    images = drawn.select("image_patches", merge=2).distribute("WORLD", on=encoder)
    samples = drawn.select("tokens").distribute("DP", on=backbone).cost(LLM).balance("greedy")
    return samples.plan(encoder=images.cost(VIT).balance("greedy"))


def columns(n: int) -> dict[str, list]:
    """Return samples with up to four images of 16 to 4096 patches, followed by text.

    An image has one token per four patches.
    """
    chance = np.random.default_rng(0)
    patches = [
        np.clip(chance.lognormal(5.5, 1.0, k), 16, 4096).astype(int).tolist()
        for k in chance.integers(0, 5, n)
    ]
    return {
        "image_patches": patches,
        "tokens": [sum(p) // 4 + int(chance.integers(8, 2000)) for p in patches],
    }


def main() -> None:
    place, batch = (ov.Mesh(dp=4, tp=2), ov.Batch(samples=256, microbatches=4, context=16384))
    buffer = ov.Buffer.from_columns(
        {"photos": columns(256), "text": {"tokens": [300, 7000] * 32}}, batch=batch
    )
    # One draw, planned in several ways.
    buffer = ov.DGraph.from_buffer(buffer, place).mix({"photos": 0.8, "text": 0.2}).buffer
    print(
        "llm: time over mean, 4 replicas that wait at every microbatch: "
        f"{llm(buffer, place).imbalance()['microbatch']:.3f}"
    )
    for strategy in (
        ov.strategy.vanilla,
        ov.strategy.backbone_balance,
        ov.strategy.encoder_balance,
        ov.strategy.vlm_hybrid,
        vlm,
    ):
        plan = strategy(buffer, place)
        encoder, backbone = plan.imbalance("encoder")["bucket"], plan.imbalance()["microbatch"]
        print(
            f"{strategy.__name__}: time over mean, encoder on 8 ranks: {encoder:.3f}; "
            f"backbone on 4 replicas: {backbone:.3f}"
        )
    route = plan.routes("encoder").for_rank(2)
    print(
        f"rank 2 encodes {len(route.items)} images, sends {route.send_splits.tolist()} "
        f"rows, gets {route.recv_splits.tolist()}"
    )
    plan = apart(buffer, place)
    print(
        f"apart: encoder on ranks {plan.fetchers('encoder')}: "
        f"{plan.imbalance('encoder')['bucket']:.3f}; backbone on ranks {plan.fetchers()}: "
        f"{plan.imbalance()['microbatch']:.3f}"
    )
    with tempfile.TemporaryDirectory() as tmp:
        pq.write_table(
            pa.table((rows := columns(600)) | {"ids": [[7] * n for n in rows["tokens"]]}),
            f"{tmp}/photos.parquet",
        )
        data = ov.Source(
            "photos",
            f"{tmp}/*.parquet",
            transforms=[ov.Tokens("ids"), ov.Meta("image_patches", "image_patches")],
            epochs=1,
        )
        job = ov.Job(
            name="vlm",
            sources=[data],
            place=ov.Mesh(dp=2),
            batch=batch,
            strategy="vlm_hybrid",
            until=3,
        )
        with ov.launch(job, cache_dir=f"{tmp}/cache") as session:
            for step in session.client(rank=0):
                print(
                    f"step {step.step}: {len(session.plan(step.step).routes('encoder'))} "
                    f"images, {step.global_valid_tokens} tokens"
                )


if __name__ == "__main__":
    main()
