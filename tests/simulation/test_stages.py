"""Simulated clusters of jobs with stages: whatever dies, all ranks change at the same step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import pytest

import overlord as ov
from overlord.job.job import Job
from tests.simulation.world.scenario import LONGEST, Mesh, Scenario, draw, shown
from tests.simulation.world.seed_run import played

SEEDS = 24


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged(Scenario):
    """A scenario with stages of other sizes, contexts and mixtures; every third in chunks."""

    def job(self, mesh: Mesh | None = None) -> Job:
        made = Scenario.job(self, mesh)
        context = made.batch.context
        if self.seed % 3 == 0:
            batch = replace(
                made.batch,
                samples=ov.schedule.linear(2, 6, steps=5),
                tokens=None,
                packing="concat",
                cp_split="zigzag_whole",
            )
            made = replace(made, batch=batch, max_document=LONGEST)
        sizes = {"samples": 3} if made.batch.tokens is None else {"tokens": 2 * context}
        first = made.sources[self.seed % len(made.sources)].name
        return replace(
            made,
            on_long="split",
            stages=(
                ov.Stage(2 + self.seed % 3, context=context // 2),
                ov.Stage(3, mixture=None if callable(made.mixture) else {first: 1.0}),
                ov.Stage(4, batch=replace(made.batch, **sizes, context=context * 2)),
                ov.Stage(),
            ),
        )


def scenario(seed: int) -> Staged:
    plain = draw(seed)
    values = {f.name: getattr(plain, f.name) for f in fields(Scenario)}
    return Staged(**{**values, "look_ahead": 1, "overflow": "grow"})


@pytest.mark.parametrize("block", range(4))
def test_whatever_dies_every_rank_gets_the_stages_of_the_undisturbed_run(block: int) -> None:
    for seed in range(block, SEEDS, 4):
        made = scenario(seed)
        history, _, undisturbed = played(made)
        mesh, got = shown(made.mesh), dict[int, set[int]]()
        errors = [e for e in history.events if e.what == "error"]
        assert not errors, f"seed {seed}: {errors}"
        for e in history.events:
            if e.what == "reshard":
                mesh, got = e.words, {}
            elif e.what == "deliver" and e.seen is not None:
                wanted = undisturbed[mesh][e.seen.rank, e.seen.step]
                assert e.seen == wanted, f"seed {seed}, step {e.seen.step}, rank {e.seen.rank}"
                got.setdefault(e.seen.rank, set()).add(e.seen.step)
        last = max(step for _, step in undisturbed[mesh])
        left = {e.rank for e in history.events if e.what == "leave"}
        late = [rank for rank, steps in got.items() if rank not in left and last not in steps]
        assert not late, f"seed {seed}: ranks that never ended"
