"""Simulated clusters of hybrid jobs: whatever dies, every rank of a ring gets its bytes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import pytest

from overlord.job.job import Job
from overlord.planning.strategies import hdp
from tests.simulation.world.scenario import LONGEST, Mesh, Scenario, draw, shown
from tests.simulation.world.seed_run import played
from tests.sizes import ALL

SEEDS = 36 if ALL else 18


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid(Scenario):
    """A scenario whose ranks share documents."""

    def job(self, mesh: Mesh | None = None) -> Job:
        made = Scenario.job(self, mesh)
        moves = any(fault.kind == "reshard" for fault in self.faults)
        alone = moves or self.mesh[0] * self.mesh[1] == 1
        context = LONGEST if alone else 8  # no row is cut
        number = self.seed % 3
        return replace(
            made,
            strategy=(hdp(), hdp(groups="power_of_two"), hdp(padded=True, node=2))[number],
            batch=replace(made.batch, context=context, labels=("shifted", "unshifted")[number % 2]),
            max_document=max(LONGEST, context),
            sync=("microbatch", "step")[self.seed % 2],
        )


def scenario(seed: int) -> Hybrid:
    plain = draw(seed)
    values = {f.name: getattr(plain, f.name) for f in fields(Scenario)}
    return Hybrid(**{**values, "look_ahead": 1, "overflow": "grow"})


@pytest.mark.parametrize("block", range(6))
def test_whatever_dies_every_rank_gets_the_pieces_of_the_undisturbed_run(block: int) -> None:
    rings = 0
    for seed in range(block, SEEDS, 6):
        made = scenario(seed)
        history, _, undisturbed = played(made)
        mesh, got = shown(made.mesh), dict[int, set[int]]()
        assert not [e for e in history.events if e.what == "error"], f"seed {seed}"
        for e in history.events:
            if e.what == "reshard":
                mesh, got = e.words, {}
            elif e.what == "deliver" and e.seen is not None:
                wanted = undisturbed[mesh][e.seen.rank, e.seen.step]
                assert e.seen == wanted, f"seed {seed}, step {e.seen.step}, rank {e.seen.rank}"
                rings += "cp_ranks" in e.seen.keys
                got.setdefault(e.seen.rank, set()).add(e.seen.step)
        last = max(step for _, step in undisturbed[mesh])
        left = {e.rank for e in history.events if e.what == "leave"}
        late = [rank for rank, steps in got.items() if rank not in left and last not in steps]
        assert not late, f"seed {seed}: ranks that never ended"
    assert rings > 0
