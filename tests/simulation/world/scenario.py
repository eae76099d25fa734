"""What a seed draws: a job, a cluster for it, and what goes wrong there. Plain values, the same for
the same seed for ever.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from overlord.job.job import Job, Source
from overlord.mesh import Batch, ClientPlaceTree
from overlord.messages.control import SetMixture, Skip
from overlord.planning.schedule.odm import odm
from overlord.planning.schedule.schedules import staged
from overlord.transforms.base import Tokens
from tests.simulation.world.faults import (
    Fault,
    draw_around,
    draw_births,
    draw_faults,
    draw_overlaps,
    draw_reshards,
    draw_scales,
)

STEPS = 30
LONGEST = 14  # tokens of a row
ROWS_PER_SHARD = 64  # more than any shard has: rows are told apart by their tokens
MESHES = (
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (3, 1, 1, 1),
    (2, 2, 1, 1),
    (2, 1, 2, 1),
    (2, 1, 1, 2),
    (1, 2, 2, 1),
    (4, 1, 1, 1),
    (1, 2, 1, 2),
)  # dp, cp, tp, pp
Mesh = tuple[int, int, int, int]
RESHARDS, OVERLAPS, SCALES, BIRTHS = (
    0.3,
    0.5,
    0.4,
    0.2,
)  # how many seeds have such faults, of those that can
SAYINGS = 0.15  # how many have people who change the job in mid-run
SALT, SCALE_SALT, BIRTH_SALT, SAYING_SALT = (
    17,
    363,
    3772,
    5460,
)  # with it seeds that failed before there were such faults have none of them
STRATEGIES = ("vanilla", "packed", "llm_balance", "backbone_balance")


def content(source: int, file: int, row: int) -> list[int]:
    """The tokens of a row. Every token of the world is found in one place of one row, so nothing
    can be taken for something else.
    """
    first = 1 + ((source * 16 + file) * ROWS_PER_SHARD + row) * 16
    return list(range(first, first + 2 + (row * 7 + file * 3 + source) % (LONGEST - 1)))


@dataclass(frozen=True, slots=True)
class Rows:
    """The factory of a source: shard by shard the same rows every time."""

    source: int
    shards: tuple[int, ...]  # rows of each

    def __call__(self, shard: int) -> Iterator[Mapping[str, Any]]:
        return (
            {"tokens": np.array(content(self.source, shard, row), np.int32)}
            for row in range(self.shards[shard])
        )


@dataclass(frozen=True, slots=True)
class Saying:
    """``session.set_mixture`` or ``session.skip``, said when every rank has taken ``step``; -1: as
    soon as the job runs.
    """

    step: int
    event: SetMixture | Skip

    @property
    def first(self) -> int:
        """The first step that it changes."""
        return self.event.at if isinstance(self.event, SetMixture) else self.event.steps[0]

    def __str__(self) -> str:
        if isinstance(self.event, Skip):
            return f"behind step {self.step}: skip {list(self.event.steps)}"
        return (
            f"behind step {self.step}: weights {list(self.event.weights.values())} from step "
            f"{self.event.at} on"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A seed, spelled out."""

    seed: int
    rows: tuple[tuple[int, ...], ...]  # rows of every shard of every source
    weights: tuple[float, ...]
    learns: bool  # the mixture follows what trainers report
    changes: bool  # the mixture changes in mid-run
    mesh: Mesh  # that the job begins with
    samples: int  # of a step; 0: the batch is in tokens
    microbatches: int
    strategy: str
    look_ahead: int
    overflow: str
    shuffle_chunks: int
    slice_rows: int
    options: Mapping[str, Any]
    journal: bool
    outlives: (
        bool  # whoever is taken for dead while stopped or cut off lives on, as on another machine
    )
    faults: tuple[Fault, ...]
    sayings: tuple[Saying, ...] = ()  # in their order

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"source{i}" for i in range(len(self.rows)))

    @property
    def world_size(self) -> int:
        dp, cp, tp, pp = self.mesh
        return dp * cp * tp * pp

    @property
    def steady(self) -> bool:
        """The weights are the sources' own from the first step to the last."""
        return (
            not self.learns
            and not self.changes
            and not any(isinstance(s.event, SetMixture) for s in self.sayings)
        )

    @property
    def skipped(self) -> frozenset[int]:
        """Steps that no rank is handed."""
        return frozenset(
            step for s in self.sayings if isinstance(s.event, Skip) for step in s.event.steps
        )

    @property
    def room(self) -> int:
        """The planner is at most so many steps ahead of the slowest rank: those it skips do not
        count.
        """
        return int(self.options["prefetch"]) + len(self.skipped)

    def other_mesh(self, now: Mesh, which: int) -> Mesh:
        """What a reshard changes the mesh to."""
        others = [mesh for mesh in MESHES if mesh != now]
        return others[which % len(others)]

    def job(self, mesh: Mesh | None = None) -> Job:
        sources = [
            Source.from_factory(
                name,
                Rows(i, self.rows[i]),
                shards=len(self.rows[i]),
                fingerprint=f"{self.rows[i]}",
                weight=self.weights[i],
                transforms=(Tokens("tokens"),),
            )
            for i, name in enumerate(self.names)
        ]
        size: dict[str, Any] = {"samples": self.samples} if self.samples else {"tokens": 72}
        return Job(
            name="simulated",
            sources=sources,
            place=tree_of(mesh or self.mesh),
            seed=self.seed % 1009,
            batch=Batch(microbatches=self.microbatches, context=32, **size),
            mixture=self._mixture(),
            strategy=self.strategy,
            until=STEPS,
            look_ahead=self.look_ahead,
            overflow=self.overflow,
            shuffle_chunks=self.shuffle_chunks,
            slice_rows=self.slice_rows,
            feedback_lag=self.options["prefetch"] + 2,
            max_age=4,
        )

    def _mixture(self) -> Any:
        if self.learns:
            return odm(warmup=2, scale=2.0)
        if self.changes:
            first = dict(zip(self.names, self.weights, strict=True))
            return staged(
                {0: first, 11: dict(zip(self.names, reversed(self.weights), strict=True))}
            )
        return None

    def report(self, rank: int, step: int) -> dict[str, float]:
        """What a trainer measured: a function of rank and step, so that it can be said again."""
        return {
            f"loss/{name}": 1.0 + ((step * 7 + rank * 3 + i * 5) % 11) / 4
            for i, name in enumerate(self.names)
        }

    def __str__(self) -> str:
        size = f"{self.samples} samples" if self.samples else "72 tokens"
        mixture = "learned" if self.learns else "staged" if self.changes else "fixed"
        said = [
            f"seed {self.seed}: {len(self.rows)} sources of {[sum(r) for r in self.rows]} "
            f"rows in {[len(r) for r in self.rows]} shards, "
            f"weights {list(self.weights)} ({mixture})",
            f"  mesh {shown(self.mesh)}, {size} a step, {self.microbatches} microbatches, "
            f"{self.strategy}, "
            f"look-ahead {self.look_ahead}, overflow {self.overflow}, groups of "
            f"{self.shuffle_chunks}, slices of {self.slice_rows}",
            f"  {', '.join(f'{k}={v}' for k, v in self.options.items())}, journal "
            f"{'yes' if self.journal else 'no'}",
        ]
        return "\n".join(
            said
            + [f"  {saying}" for saying in self.sayings]
            + [f"  {fault}" for fault in self.faults]
        )


def tree_of(mesh: Mesh) -> ClientPlaceTree:
    dp, cp, tp, pp = mesh
    return ClientPlaceTree(dp=dp, cp=cp, tp=tp, pp=pp)


def shown(mesh: Mesh) -> str:
    return " ".join(f"{axis}={n}" for axis, n in zip(("dp", "cp", "tp", "pp"), mesh, strict=True))


def draw(seed: int) -> Scenario:
    """Everything that a seed decides before the world starts."""
    r = random.Random(seed * 2654435761 % 2**32)
    n = r.choice((3, 3, 3, 4, 5))
    weights = tuple(float(r.randint(1, 5)) for _ in range(n))
    samples = r.choice((0, 6, 8, 8, 9, 12))
    drawn = [w / sum(weights) * STEPS * (samples or 9) for w in weights]
    rows = tuple(_shards(r, max(6, int(d / r.uniform(2.1, 3.5)))) for d in drawn)
    mesh = r.choice(MESHES)
    holes = r.random() < 0.15 and samples > 0
    look_ahead = r.choice((1, 2)) if holes else 1
    learns = r.random() < 0.15
    journal = r.random() < 0.6
    prefetch = r.choice((1, 2, 3, 4, 6))
    options = {
        "prefetch": prefetch,
        "build_ahead": r.choice((1, 2, 3)),
        "read_ahead": r.choice((1, 2, 4)),
        "loaders": {f"source{i}": r.choice((1, 1, 2, 3)) for i in range(n)},
        "hosts": r.randint(1, 4),
        "sources_per_host": r.choice((2, 3, 5)),
        "constructor_hosts": r.randint(1, min(3, mesh[0])),
        "buffer_bytes": r.choice((2**8, 2**12, 2**20)),
        "lost_after_s": r.choice((1.0, 3.0)),
        "max_restarts": 20,
        "shadows": "none" if holes else r.choice(("none", "none", "heavy", "all")),
    }
    scenario = Scenario(
        seed=seed,
        rows=rows,
        weights=weights,
        learns=learns,
        changes=not learns and r.random() < 0.2,
        mesh=mesh,
        samples=samples,
        microbatches=r.choice((1, 2, 3)),
        strategy="look_ahead_balance" if look_ahead > 1 else r.choice(STRATEGIES),
        look_ahead=look_ahead,
        overflow="defer" if holes and look_ahead == 1 else "grow",
        shuffle_chunks=r.choice((1, 2, 3, 8)),
        slice_rows=r.choice((4, 8, 16, 32)),
        options=options,
        journal=journal,
        outlives=r.random() < 0.5,
        faults=draw_faults(r, STEPS, journal=journal),
    )
    return _with_sayings(replace(scenario, faults=_with_more(scenario, holes)), holes)


def _with_sayings(scenario: Scenario, holes: bool) -> Scenario:
    """With what people change in mid-run, or without; drawn apart too."""
    r = random.Random(scenario.seed * 2246822519 + SAYING_SALT)
    if r.random() >= SAYINGS:
        return scenario
    sayings, moves = _sayings(r, scenario), _moves(scenario, holes)
    faults = draw_around(
        r,
        [saying.step for saying in sayings],
        scenario.faults,
        journal=scenario.journal,
        moves=moves,
    )
    return replace(scenario, sayings=sayings, faults=faults)


def _sayings(r: random.Random, scenario: Scenario) -> tuple[Saying, ...]:
    """One to three. Each is said before any planner can have come to its first step, so that the
    stream does not depend on when it is heard: trainers stop before that (``people.py``). The last
    step comes for all.
    """
    kinds = [r.choice(("mixture", "mixture", "skip")) for _ in range(r.choice((1, 2, 2, 3)))]
    sizes = [r.choice((1, 1, 2)) if kind == "skip" else 0 for kind in kinds]
    room, made = scenario.options["prefetch"] + sum(sizes), list[Saying]()
    for kind, size, step in zip(
        kinds, sizes, sorted(r.randint(-1, min(16, STEPS - 8 - room)) for _ in kinds), strict=True
    ):
        first = step + room + r.randint(1, 4)
        if kind == "skip":
            gap = r.randint(1, 2)
            made.append(Saying(step, Skip(tuple(range(first, first + gap * size, gap)))))
            continue
        later = [s.first for s in made if isinstance(s.event, SetMixture) and s.first > step + room]
        at = (
            r.choice(later) if later and r.random() < 0.5 else first
        )  # of two for one step the last one counts
        weights = [float(r.choice((0, 1, 1, 2, 3, 5))) for _ in scenario.names]
        weights[r.randrange(len(weights))] += 1.0
        made.append(Saying(step, SetMixture(at, dict(zip(scenario.names, weights, strict=True)))))
    return tuple(made)


def _with_more(scenario: Scenario, holes: bool) -> tuple[Fault, ...]:
    """Faults that came later, drawn apart."""
    r = random.Random(scenario.seed * 2246822519 + SALT)
    reshards, overlaps, faults = r.random() < RESHARDS, r.random() < OVERLAPS, scenario.faults
    if overlaps and scenario.options["shadows"] != "none":
        faults = draw_overlaps(r, STEPS, faults)
    if (
        reshards and not scenario.learns and not holes
    ):  # there other ranks report other things, or what is left over depends on the mesh
        faults = draw_reshards(r, STEPS, faults)
    r = random.Random(scenario.seed * 2246822519 + SCALE_SALT)
    if r.random() < SCALES and max(scenario.options["loaders"].values()) > 1:
        faults = draw_scales(r, STEPS, faults)
    r = random.Random(scenario.seed * 2246822519 + BIRTH_SALT)
    if r.random() < BIRTHS:
        faults = draw_births(
            r, STEPS, faults, journal=scenario.journal, moves=_moves(scenario, holes)
        )
    return faults


def _moves(scenario: Scenario, holes: bool) -> tuple[str, ...]:
    """What may end its sessions."""
    may = (
        ("rewind", True),
        ("restart", scenario.journal),
        ("reshard", not scenario.learns and not holes),
    )
    return tuple(move for move, can in may if can)


def _shards(r: random.Random, rows: int) -> tuple[int, ...]:
    """About so many rows over some shards."""
    n = max(r.randint(1, 5), -(-rows // (ROWS_PER_SHARD - 4)))
    return tuple(max(1, min(ROWS_PER_SHARD, rows // n + r.randint(-2, 2))) for _ in range(n))
