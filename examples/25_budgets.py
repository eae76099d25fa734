"""Budgets: 2.5 passes over one source, a number of tokens of another, and a third that goes on.

The budgets hold over two launches. The second one raises a budget, and the source that had ended
continues with its next sample.

Run it: python examples/25_budgets.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import overlord as ov

STEPS = 120


def documents(n: int, seed: int) -> list[dict[str, list[int]]]:
    """Return documents of 5 to 60 tokens."""
    chance = np.random.default_rng(seed)
    return [{"tokens": chance.integers(1, 500, chance.integers(5, 61)).tolist()} for _ in range(n)]


def main() -> None:
    job = ov.Job(
        name="budgets",
        sources=[
            ov.Source.from_dataset("web", documents(2000, 0), weight=0.5),
            ov.Source.from_dataset("code", documents(100, 1), weight=0.3, epochs=2.5),
            ov.Source.from_dataset("licensed", documents(2000, 2), weight=0.2, max_tokens=5e3),
        ],
        batch=ov.Batch(samples=16, microbatches=2, context=256),
        until=STEPS,
        seed=3,
    )

    last: dict[str, int] = {}
    with ov.launch(job) as session:
        client = session.client(0)
        for _ in range(80):
            step = next(client)
            last |= {step.info.names[i]: step.step for i in set(step.info.source.tolist())}
        state = client.state_dict()
    samples, tokens = (state["counts"][what] for what in ("samples", "tokens"))
    for name, active in state["active"].items():
        ends = "goes on" if active else f"ended after step {last[name]}"
        print(f"{name}: {samples[name]} documents, {tokens[name]:,} tokens; {ends}")
    assert samples["code"] == 250, "2.5 passes over 100 rows"

    web, code, licensed = job.sources
    more = replace(job, sources=[web, code, replace(licensed, max_tokens=8_000)])
    with ov.launch(more, resume=state, allow=("source licensed: reading",)) as session:
        for _ in session.client(0):
            pass
        raised = session.metrics()["sources"]["licensed"]
    print(
        f"licensed, with a raised budget: {raised['tokens']:,} of {raised['max_tokens']:,} tokens"
    )


if __name__ == "__main__":
    main()
