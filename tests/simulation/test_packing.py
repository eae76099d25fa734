"""Simulated clusters of jobs in chunks or of fixed shape: whatever dies, the bytes stay."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import pytest

from overlord.job.job import Job
from tests.simulation.world.scenario import LONGEST, Mesh, Scenario, draw, shown
from tests.simulation.world.seed_run import played

SEEDS = 28


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed(Scenario):
    """A scenario in chunks, shorter and longer than its documents; every fourth in whole ones."""

    def job(self, mesh: Mesh | None = None) -> Job:
        made = Scenario.job(self, mesh)
        moves = any(fault.kind == "reshard" for fault in self.faults)  # steps would be others
        if self.seed % 4 == 3 and not moves:
            batch = replace(made.batch, samples=made.batch.samples or 6, tokens=None, shape="fixed")
            return replace(made, batch=batch, look_ahead=1 + self.seed % 3, strategy="llm_balance")
        batch = replace(
            made.batch,
            samples=2 + self.seed % 5,
            tokens=None,
            context=(8, 16, 32)[self.seed % 3],
            packing="concat",
            shape=("free", "fixed")[self.seed // 2 % 2],
            cp_split="zigzag_whole",
        )
        return replace(made, batch=batch, max_document=LONGEST)


def scenario(seed: int) -> Packed:
    plain = draw(seed)
    values = {f.name: getattr(plain, f.name) for f in fields(Scenario)}
    return Packed(**{**values, "look_ahead": 1, "overflow": "grow"})


@pytest.mark.parametrize("block", range(4))
def test_whatever_dies_every_rank_gets_the_chunks_of_the_undisturbed_run(block: int) -> None:
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
