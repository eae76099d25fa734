"""A session serves trainers in other processes.

Each receives its steps through shared memory, and needs two sockets and no thread. Under torchrun,
``ov.join(job)`` in every process does all of this.

Run it: python examples/11_connect.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import overlord as ov


def make_job(folder: Path) -> ov.Job:
    rows = [{"tokens": list(range(1 + k % 30))} for k in range(500)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = ov.Source("rows", str(folder / "rows.jsonl"), transforms=[ov.Tokens()], epochs=1)
    return ov.Job(
        name="served",
        sources=[source],
        batch=ov.Batch(samples=32, context=256),
        place=ov.Mesh(dp=2),
        until=10,
        seed=3,
    )


def train() -> None:
    """Run one trainer; OVERLORD_ADDRESS, OVERLORD_TOKEN and RANK are in its environment."""
    found = []
    with ov.connect() as client:
        for step in client:
            found += [str(piece.sample) for microbatch in step for piece in microbatch.samples]
        said = {"rank": client.rank, "steps": client.steps, "samples": found}
    print(json.dumps(said))


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as tmp,
        ov.launch(make_job(Path(tmp)), cache_dir=f"{tmp}/cache") as session,
    ):
        # print(served) prints two lines for the environment of the trainers.
        served = session.serve()
        env = {**os.environ, "OVERLORD_ADDRESS": served.address, "OVERLORD_TOKEN": served.token}
        command = [sys.executable, __file__, "train"]
        trainers = [
            subprocess.Popen(command, env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE)
            for rank in range(2)
        ]
        said = [json.loads(trainer.communicate()[0]) for trainer in trainers]
    for trainer in said:
        print(
            f"rank {trainer['rank']} of another process: steps 0 to "
            f"{trainer['steps'] - 1}, {len(trainer['samples'])} samples"
        )
    every = [sample for trainer in said for sample in trainer["samples"]]
    print(f"{len(every)} samples, each once: {len(set(every)) == len(every)}")


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else main()
