"""Many seeds, on all cores: those that failed once come first, those that fail now are noted, and
what struck whom is counted.

A hundred thousand take hours. What was counted can be kept in a file, from which a soak that was
stopped goes on; it tells how many seeds ran on which code, since a soak says something of one
version only.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path

import msgspec

from overlord.errors import JobError
from overlord.process import resources
from tests.simulation.world.faults import LEAST
from tests.simulation.world.seed_run import run_seed
from tests.simulation.world.world import Killed

PACKAGE = Path(__file__).resolve().parents[1]
KEEP_EVERY = 100  # seeds: half a minute of work at most is lost with a machine
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
    versions: Counter[str] = field(default_factory=Counter)  # of the code, by how many seeds it ran

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.versions[code_version()] += 1
        self.seconds += outcome.seconds
        self.fewest = min(self.fewest, outcome.fired.total())
        self.fired += outcome.fired
        if outcome.violations:
            self.failed[outcome.seed] = outcome.violations

    def table(self) -> str:
        """How often each fault struck each role."""
        kinds = sorted({kind for kind, _ in self.fired})
        rows = [
            [kind, *(str(self.fired[kind, role] or "") for role in ROLES), str(self._of(kind))]
            for kind in kinds
        ]
        rows.append(
            [
                "all",
                *(str(sum(self.fired[kind, role] for kind in kinds)) for role in ROLES),
                str(self.fired.total()),
            ]
        )
        every = [["fault", *ROLES, "all"], *rows]
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in every
        )

    def _of(self, kind: str) -> int:
        return sum(n for (k, _), n in self.fired.items() if k == kind)


@cache
def code_version() -> str:
    """A digest of the package's sources: what was kept may be of others."""
    state = blake2b(digest_size=4)
    for path in sorted(PACKAGE.rglob("*.py")):
        state.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return state.hexdigest()


class _Kept(msgspec.Struct, kw_only=True):
    """A tally in a file."""

    first: int
    done: int  # seeds from the first on
    seconds: float
    fewest: int
    fired: dict[str, dict[str, int]]  # by fault and role
    failed: dict[int, tuple[str, ...]]
    versions: dict[str, int]


def read_kept(path: Path, first: int) -> Tally:
    """What was counted before; nothing where there is no file."""
    if not path.exists():
        return Tally()
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except msgspec.MsgspecError as fault:
        raise JobError(
            [f"{path} is no file of a soak: {fault}; give another name, or remove it"], "keep"
        ) from fault
    if kept.first != first:
        problem = (
            f"{path} counts seeds from {kept.first} on, and {first} is asked for: give "
            f"--first {kept.first}, or another file"
        )
        raise JobError([problem], "keep")
    fired = Counter(
        {(kind, role): n for kind, roles in kept.fired.items() for role, n in roles.items()}
    )
    return Tally(kept.done, kept.seconds, kept.fewest, fired, kept.failed, Counter(kept.versions))


def write_kept(path: Path, first: int, tally: Tally) -> None:
    """Whole or not at all."""
    fired: dict[str, dict[str, int]] = {}
    for (kind, role), n in sorted(tally.fired.items()):
        fired.setdefault(kind, {})[role] = n
    kept = _Kept(
        first=first,
        done=tally.seeds,
        seconds=tally.seconds,
        fewest=tally.fewest,
        fired=fired,
        failed=tally.failed,
        versions=dict(tally.versions),
    )
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1))
    beside.replace(path)


def outcome_of(seed: int) -> Outcome:
    """A seed in this process; an exception is a violation, too."""
    start = time.process_time()
    try:
        verdict = run_seed(seed)
    except (Exception, Killed):
        return Outcome(
            seed,
            (f"it raised: {traceback.format_exc()}",),
            Counter(),
            "",
            time.process_time() - start,
        )
    found = tuple(verdict.violations)
    if verdict.fired.total() < LEAST:
        found += (f"only {verdict.fired.total()} faults struck",)
    return Outcome(
        seed, found, verdict.fired, verdict.history.digest(), time.process_time() - start
    )


def _quiet() -> None:
    logging.disable(logging.CRITICAL)  # parts are lost all the time
    # what was imported stays: to look through it after every tenth seed costs as much as a seed
    gc.freeze()
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A soak that is killed leaves nobody behind: its workers would wait for their next seed for
    ever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def outcomes(seeds: Iterable[int], processes: int) -> Iterator[Outcome]:
    if processes <= 1:
        yield from map(outcome_of, seeds)
        return
    # A process that dies with its seeds is an error here, where a Pool would wait for them for
    # ever.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _quiet) as pool:
        yield from pool.map(outcome_of, seeds, chunksize=8)


def past_failures(path: Path | None) -> list[int]:
    """Seeds that failed once, a line each; what follows a number is for people."""
    if path is None or not path.exists():
        return []
    lines = (line.split("#")[0].split() for line in path.read_text().splitlines())
    return [int(words[0]) for words in lines if words]


def soak(
    seeds: Sequence[int],
    *,
    past: Path | None = None,
    processes: int | None = None,
    every: int = 500,
    keep: Path | None = None,
) -> Tally:
    """Run seeds, past failures first, and say how it goes; seeds that fail are appended to
    ``past``. What ``keep`` has is not run again.
    """
    known, n = past_failures(past), resources.cores() if processes is None else processes
    tally = read_kept(keep, seeds[0]) if keep is not None and len(seeds) else Tally()
    for outcome in outcomes(
        [] if tally.seeds else known, n
    ):  # once, and not among those that are counted: they were chosen
        _tell(outcome, known, past)
        if outcome.violations:
            tally.failed[outcome.seed] = outcome.violations
    start, before, rest = time.monotonic(), tally.seeds, seeds[tally.seeds :]
    try:
        for outcome in outcomes(rest, n):
            tally.add(outcome)
            _tell(outcome, known, past)
            if tally.seeds % every == 0:
                took = time.monotonic() - start
                print(
                    f"{tally.seeds} of {len(seeds)} seeds, {len(tally.failed)} failed, "
                    f"{took:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
            if keep is not None and tally.seeds % KEEP_EVERY == 0:
                write_kept(keep, seeds[0], tally)
    finally:
        if keep is not None and tally.seeds > before:
            write_kept(keep, seeds[0], tally)
    return tally


def _tell(outcome: Outcome, known: Sequence[int], past: Path | None) -> None:
    """Of one that failed: what, how to replay it, and a line for the file of those that did."""
    if not outcome.violations:
        return
    print(f"seed {outcome.seed}: {outcome.violations[0]}", flush=True)
    print(f"    replay: python -m tests.simulation.world --seed {outcome.seed}", flush=True)
    if past is not None and outcome.seed not in known:
        with past.open("a") as out:
            out.write(f"{outcome.seed}  # {outcome.violations[0].splitlines()[-1][:160]}\n")
