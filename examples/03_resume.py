"""Save the state after three steps and resume with three ranks instead of two.

Every later step holds the same samples as in an uninterrupted run. The state is small, the same on
all ranks, and plain JSON.

Run it: python examples/03_resume.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import overlord as ov


def make_job(folder: Path, dp: int) -> ov.Job:
    sources = [
        ov.Source("even", str(folder / "even.jsonl"), transforms=[ov.Tokens()], weight=2),
        ov.Source("odd", str(folder / "odd.jsonl"), transforms=[ov.Tokens()], weight=1),
    ]
    batch = ov.Batch(samples=24, context=256)
    return ov.Job(
        name="resume", sources=sources, batch=batch, place=ov.Mesh(dp=dp), until=6, seed=3
    )


def samples(steps: tuple[ov.Step, ...]) -> set[str]:
    """Return the samples of one step, over all ranks."""
    return {
        str(piece.sample) for step in steps for microbatch in step for piece in microbatch.samples
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as tmp:
        for name, first in (("even", 0), ("odd", 1)):
            rows = [{"tokens": list(range(first, first + 2 * (1 + k % 30), 2))} for k in range(50)]
            (Path(tmp) / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        cache = f"{tmp}/cache"

        with ov.launch(make_job(Path(tmp), dp=2), cache_dir=cache) as session:
            undisturbed = [
                samples(steps) for steps in zip(*[session.client(r) for r in range(2)], strict=True)
            ]

        with ov.launch(make_job(Path(tmp), dp=2), cache_dir=cache) as session:
            clients = [session.client(rank) for rank in range(2)]
            for _ in range(3):
                steps = tuple(next(client) for client in clients)
            # The state is the same on every rank; it belongs into the checkpoint.
            saved = json.dumps(clients[0].state_dict())
        print(f"stopped behind step {steps[0].step}; the state is {len(saved)} bytes of JSON")

        with ov.launch(
            make_job(Path(tmp), dp=3), resume=json.loads(saved), cache_dir=cache
        ) as session:
            for steps in zip(*[session.client(rank) for rank in range(3)], strict=True):
                same = samples(steps) == undisturbed[steps[0].step]
                print(
                    f"step {steps[0].step} on 3 ranks: {len(samples(steps))} samples, "
                    f"{'the same' if same else 'OTHERS'} as on 2 ranks"
                )


if __name__ == "__main__":
    main()
