"""Many seeds, on all cores: those that failed once come first, those that fail now are noted, and what struck whom is counted."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from overlord import limits
from overlord.simulation.faults import LEAST
from overlord.simulation.running import run_seed
from overlord.simulation.world import Killed

ROLES = ("loader", "constructor", "planner", "trainer", "job")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is told of a seed by the process that ran it."""

    seed: int
    violations: tuple[str, ...]
    fired: Counter[tuple[str, str]]
    digest: str
    seconds: float  # of this machine's time


@dataclass(slots=True)
class Tally:
    """All seeds so far."""

    seeds: int = 0
    seconds: float = 0.0
    fewest: int = 10**9  # faults in one run
    fired: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.seconds += outcome.seconds
        self.fewest = min(self.fewest, outcome.fired.total())
        self.fired += outcome.fired
        if outcome.violations:
            self.failed[outcome.seed] = outcome.violations

    def table(self) -> str:
        """How often each fault struck each role."""
        kinds = sorted({kind for kind, _ in self.fired})
        rows = [[kind, *(str(self.fired[kind, role] or "") for role in ROLES), str(self._of(kind))] for kind in kinds]
        rows.append(["all", *(str(sum(self.fired[kind, role] for kind in kinds)) for role in ROLES), str(self.fired.total())])
        every = [["fault", *ROLES, "all"], *rows]
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in every)

    def _of(self, kind: str) -> int:
        return sum(n for (k, _), n in self.fired.items() if k == kind)


def outcome_of(seed: int) -> Outcome:
    """A seed in this process; an exception is a violation, too."""
    start = time.process_time()
    try:
        verdict = run_seed(seed)
    except (Exception, Killed):
        return Outcome(seed, (f"it raised: {traceback.format_exc()}",), Counter(), "", time.process_time() - start)
    found = tuple(verdict.violations)
    if verdict.fired.total() < LEAST:
        found += (f"only {verdict.fired.total()} faults struck",)
    return Outcome(seed, found, verdict.fired, verdict.history.digest(), time.process_time() - start)


def _quiet() -> None:
    logging.disable(logging.CRITICAL)  # parts are lost all the time
    gc.freeze()  # what was imported stays: to look through it after every tenth seed costs as much as a seed


def outcomes(seeds: Iterable[int], processes: int) -> Iterator[Outcome]:
    if processes <= 1:
        yield from map(outcome_of, seeds)
        return
    # A process that dies with its seeds is an error here, where a Pool would wait for them for ever.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _quiet) as pool:
        yield from pool.map(outcome_of, seeds, chunksize=8)


def past_failures(path: Path | None) -> list[int]:
    """Seeds that failed once, a line each; what follows a number is for people."""
    if path is None or not path.exists():
        return []
    lines = (line.split("#")[0].split() for line in path.read_text().splitlines())
    return [int(words[0]) for words in lines if words]


def soak(seeds: Sequence[int], *, past: Path | None = None, processes: int | None = None, every: int = 500) -> Tally:
    """Run seeds, past failures first, and say how it goes; seeds that fail are appended to ``past``."""
    known = past_failures(past)
    order = [*known, *(s for s in seeds if s not in set(known))]
    tally, start = Tally(), time.monotonic()
    for outcome in outcomes(order, processes or limits.cores()):
        tally.add(outcome)
        if outcome.violations:
            print(f"seed {outcome.seed}: {outcome.violations[0]}", flush=True)
            print(f"    replay: python -m overlord.simulation --seed {outcome.seed}", flush=True)
            if past is not None and outcome.seed not in known:
                with past.open("a") as out:
                    out.write(f"{outcome.seed}  # {outcome.violations[0].splitlines()[-1][:160]}\n")
        if tally.seeds % every == 0:
            took = time.monotonic() - start
            print(f"{tally.seeds} of {len(order)} seeds, {len(tally.failed)} failed, {took:.0f} s", file=sys.stderr, flush=True)
    return tally
