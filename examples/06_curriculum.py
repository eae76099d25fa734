"""A curriculum: easy samples first, chosen among look-ahead candidates by a difficulty column.

Run it: python examples/06_curriculum.py
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import overlord as ov

RAMP = 8  # steps until samples come in the order of the stream


def corpus(folder: Path) -> list[ov.Source]:
    """Write two sources with easy and hard rows in random order.

    Each row holds its difficulty, 0 to 99, eight times, so that a batch shows it.
    """
    chance = random.Random(7)
    for name in ("web", "code"):
        rows = [
            {"level": level, "tokens": [level] * 8} for level in chance.choices(range(100), k=2000)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    transforms = [ov.Meta("difficulty", "level"), ov.Tokens()]
    return [
        ov.Source(name, str(folder / f"{name}.jsonl"), transforms=transforms)
        for name in ("web", "code")
    ]


def main() -> None:
    more_code = ov.schedule.linear(
        start={"web": 9, "code": 1}, end={"web": 1, "code": 1}, steps=RAMP
    )
    easy_to_hard = ov.schedule.curriculum(
        column="difficulty", low=10, high=99, steps=RAMP, weights=more_code
    )
    print(easy_to_hard)
    with tempfile.TemporaryDirectory() as tmp:
        job = ov.Job(
            name="curriculum",
            sources=corpus(Path(tmp)),
            batch=ov.Batch(samples=64, context=512),
            mixture=easy_to_hard,
            look_ahead=4,  # each step chooses among four times its samples
            max_age=12,  # a sample that was passed over 12 times is taken
            until=RAMP + 5,
        )
        means = []
        with ov.launch(job, cache_dir=f"{tmp}/cache") as session:
            for step in session.client():
                means.append(sum(mb["tokens"].mean() for mb in step) / len(step))
                names = [piece.sample.source for mb in step for piece in mb.samples]
                print(
                    f"step {step.step:2}: mean difficulty {means[-1]:4.1f} "
                    f"{'#' * round(means[-1] / 2):48} code {names.count('code')} of 64"
                )
    print(
        "rising over the ramp:",
        means[: RAMP + 1] == sorted(means[: RAMP + 1]),
        "- what was held back has come, then the plain stream",
    )


if __name__ == "__main__":
    main()
