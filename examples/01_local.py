"""Three small sources, four ranks, one process: the steps of a rank, and the balance of the plan.

Run it: python examples/01_local.py
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import overlord as ov


def make_source(folder: Path, name: str, rows: int, longest: int) -> str:
    """Write JSON lines with token ids of very uneven lengths, like real documents."""
    chance = random.Random(name)
    (folder / name).mkdir()
    for part in range(2):
        lengths = [min(longest, int(chance.paretovariate(0.8) * 8)) for _ in range(rows // 2)]
        lines = [
            json.dumps({"tokens": [chance.randrange(1000) for _ in range(n)]}) for n in lengths
        ]
        (folder / name / f"part-{part}.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / name / "*.jsonl")


def main() -> None:
    with tempfile.TemporaryDirectory() as tmp:
        weights = {"web": 0.6, "code": 0.3, "books": 0.1}
        sources = [
            ov.Source(
                name,
                make_source(Path(tmp), name, 400, 512),
                transforms=[ov.Tokens()],
                weight=weight,
            )
            for name, weight in weights.items()
        ]
        job = ov.Job(
            name="example",
            sources=sources,
            place=ov.Mesh(dp=4),
            batch=ov.Batch(samples=64, microbatches=2, context=1024),
            until=5,
            seed=7,
        )
        with ov.launch(job, cache_dir=f"{tmp}/cache") as session:
            clients = [session.client(rank) for rank in range(4)]
            # All ranks in one loop; in training, each rank has a process of its own.
            for steps in zip(*clients, strict=True):
                print(steps[0])
            first = steps[0][0]
            print(
                "\n",
                first,
                "\n first samples:",
                ", ".join(str(piece.sample) for piece in first.samples[:3]),
                "\n",
            )
            print(session.plan(0).to_table(), "\n")
            for name, source in session.metrics()["sources"].items():
                print(
                    f"{name:>6}: expected {source['wanted']:.1%}, realised "
                    f"{source['realised']:.1%} of {source['samples']} samples"
                )


if __name__ == "__main__":
    main()
