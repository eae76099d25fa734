"""Simulated clusters of jobs whose sources have budgets: whatever dies, the bytes stay."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import pytest

from overlord.job.job import Job
from tests.simulation.world.scenario import Mesh, Scenario, draw, shown
from tests.simulation.world.seed_run import played

SEEDS = 28


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited(Scenario):
    """A scenario in which every source but one ends in mid-run, by tokens or by epochs."""

    def job(self, mesh: Mesh | None = None) -> Job:
        made = Scenario.job(self, mesh)
        first, *rest = made.sources
        limited = [
            replace(source, max_tokens=60 + (self.seed * 37 + i * 91) % 300)
            if (self.seed + i) % 3
            else replace(source, epochs=(0.5, 1.25, 2.75)[(self.seed + i) // 3 % 3])
            for i, source in enumerate(rest)
        ]
        return replace(made, sources=[first, *limited])


def scenario(seed: int) -> Limited:
    plain = draw(seed)
    return Limited(**{f.name: getattr(plain, f.name) for f in fields(Scenario)})


@pytest.mark.parametrize("block", range(4))
def test_whatever_dies_every_rank_gets_the_steps_of_the_undisturbed_run(block: int) -> None:
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
