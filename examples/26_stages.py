"""Stages of a run: pretraining, annealing and long-context extension in one job.

The batch grows in the first stage, the mixture moves in the second, and the context grows in the
third. Every rank changes at the same step. A second launch resumes inside a stage.

Run it: python examples/26_stages.py
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import overlord as ov

CONTEXT, LONG = 256, 1024


def documents(n: int, longest: int, seed: int) -> list[dict[str, list[int]]]:
    """Return documents of up to ``longest`` tokens."""
    chance = np.random.default_rng(seed)
    lengths = np.minimum(longest, chance.lognormal(4.5, 1.2, n).astype(int) + 1)
    return [{"tokens": chance.integers(1, 1000, length).tolist()} for length in lengths]


def staged_job() -> ov.Job:
    return ov.Job(
        name="stages",
        sources=[
            ov.Source.from_dataset("web", documents(600, 2000, 0), weight=0.8),
            ov.Source.from_dataset("code", documents(600, 2000, 1), weight=0.2),
            ov.Source.from_dataset("books", documents(200, LONG, 2), weight=0.0),
        ],
        # the batch of the first two stages: 2048 to 8192 tokens
        batch=ov.Batch(tokens=ov.schedule.linear(2048, 8192, 6, multiple=512), context=CONTEXT),
        stages=[
            ov.Stage(8, name="pretraining"),
            ov.Stage(
                4,
                name="annealing",
                mixture=ov.schedule.linear({"web": 8, "code": 2}, {"code": 1, "books": 1}, 4),
            ),
            ov.Stage(
                4, name="long", batch=ov.Batch(tokens=8192, context=LONG), mixture={"books": 1}
            ),
        ],
        place=ov.Mesh(dp=2),
        seed=3,
    )


def steps_of(session: ov.Session) -> Iterator[tuple[ov.Step, ...]]:
    """Return the steps of both ranks."""
    return zip(*[session.client(rank) for rank in range(2)], strict=True)


def main() -> None:
    job, state, digests = staged_job(), {}, []
    with ov.launch(job) as session:
        for steps in steps_of(session):
            stages = {step.stage for step in steps}
            assert len(stages) == 1, "every rank is in the same stage"
            rows = [piece for step in steps for mb in step for piece in mb.samples]
            tokens = sum(piece.length for piece in rows)
            books = sum(piece.length for piece in rows if piece.sample.source == "books")
            longest = max(piece.length for piece in rows)
            print(
                f"step {steps[0].step:2} {steps[0].stage:12} {tokens:5} tokens, "
                f"{books / tokens:4.0%} books, longest piece {longest}"
            )
            digests.append(steps[0].plan_digest)
            if steps[0].step == 9:
                state = session.state_dict()
        print(session.explain(15))
    with ov.launch(job, resume=state) as session:
        rest = [steps[0].plan_digest for steps in steps_of(session)]
    print(f"resumed in stage {state['stage']!r} at step {state['step']}: {rest == digests[10:]}")


if __name__ == "__main__":
    main()
