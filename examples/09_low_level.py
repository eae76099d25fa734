"""The low-level API: custom functions in planner, loaders and constructors.

``plan_raw`` places samples from raw arrays, ``summary_buffer`` returns the input of the planner.
Two hooks of the job change the payload.

Run it: python examples/09_low_level.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import overlord as ov

MASK = 999


def snake(columns: dict[str, Any], place: ov.Mesh, batch: ov.Batch, step: int) -> dict[str, Any]:
    """Return a bucket and a microbatch per sample, from raw arrays.

    The longest samples come first, assigned in the order 0 1 2 3 3 2 1 0.
    """
    turn = np.arange(len(columns["tokens"]))
    lap, at = turn // place.dp, turn % place.dp
    bucket = np.empty_like(turn)
    bucket[np.argsort(-columns["tokens"], kind="stable")] = np.where(lap % 2, place.dp - 1 - at, at)
    return {"bucket": bucket, "microbatch": np.zeros_like(bucket)}


def mask_some(samples: ov.Popped) -> ov.Ragged:
    """Mask a seventh of the tokens of source "code".

    They are the same in every run, for any number of loaders.
    """
    if samples.source != "code":
        return samples.tokens
    return ov.Ragged(
        np.where(samples.chance("mask") < 1 / 7, MASK, samples.tokens.values),
        samples.tokens.offsets,
    )


def count_masks(assembly: ov.Assembly) -> list[dict[str, np.ndarray]]:
    """Build the default arrays, without loss on masked labels and with one more key."""
    made = []
    for mb in assembly.default():
        hidden = mb["labels"] == MASK
        made.append(
            mb
            | {
                "loss_mask": np.where(hidden, np.float32(0), mb["loss_mask"]),
                "masked": hidden.sum(),
            }
        )
    return made


def main() -> None:
    rows = ov.Factory(lambda shard: ({"tokens": [i % 900] * (1 + i * i % 97)} for i in range(300)))
    job = ov.Job(
        name="low-level",
        sources=[ov.Source(name, rows, transforms=[ov.Tokens()]) for name in ("web", "code")],
        place=ov.Mesh(dp=4),
        batch=ov.Batch(samples=64, context=1024),
        until=3,
        strategy=ov.plan_raw(snake),
        hooks=[ov.loader_do_plan(mask_some), ov.constructor_do_plan(count_masks)],
    )
    with ov.launch(job) as session:
        for step in session.client(rank=0):
            print(
                f"step {step.step}: {sum(int(mb['masked']) for mb in step)} of "
                f"{sum(mb['tokens'].size for mb in step)} tokens masked"
            )
        print(session.plan(2), "\n", session.summary_buffer())


if __name__ == "__main__":
    main()
