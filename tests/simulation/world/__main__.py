"""``python -m tests.simulation.world --seed 123`` replays a seed; ``--seeds 1000`` runs many."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from overlord.errors import JobError
from tests.simulation.world.seed_run import run_seed
from tests.simulation.world.soak import soak


def main(argv: list[str] | None = None) -> int:
    about = "Simulated clusters with faults, checked against undisturbed runs."
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.world", description=about)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--seed",
        type=int,
        help="replay one seed exactly: its fault script, what happened, the verdict",
    )
    what.add_argument("--seeds", type=int, help="run so many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument(
        "--past",
        type=Path,
        help="file of seeds that failed once: they come first, and those that fail now are added",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="file of what was counted: a soak that was stopped goes on from it",
    )
    parser.add_argument("--processes", type=int, help="default: all cores")
    parser.add_argument("--log", action="store_true", help="with --seed: what the parts log")
    given = parser.parse_args(argv)
    if not given.log:
        logging.disable(logging.CRITICAL)
    if given.seed is not None:
        verdict = run_seed(given.seed)
        print(verdict)
        return 1 if verdict.violations else 0
    try:
        tally = soak(
            range(given.first, given.first + given.seeds),
            past=given.past,
            processes=given.processes,
            keep=given.keep,
        )
    except JobError as error:
        parser.error(str(error))
    print(tally.table())
    each = tally.seconds / max(1, tally.seeds)
    print(
        f"{tally.seeds} seeds, {each:.2f} s of CPU each, at least {tally.fewest} faults "
        f"in each, {len(tally.failed)} failed"
    )
    if len(tally.versions) > 1:
        print(
            "on several versions of the code: "
            + ", ".join(f"{n} seeds on {version}" for version, n in tally.versions.items())
        )
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
