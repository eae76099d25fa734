"""A simulated cluster for every seed: its own topology, sources, weights and faults, and the stream of an undisturbed run."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overlord.journal import place
from overlord.loader import reader
from overlord.simulation.faults import KINDS
from overlord.simulation.running import run_seed
from overlord.simulation.scenario import STEPS, draw
from overlord.simulation.soak import Tally, outcome_of, past_failures
from overlord.simulation.world import Killed

PAST = Path(__file__).with_name("past_failures.txt")
SEEDS = int(os.environ.get("OVERLORD_SEEDS", "1000"))
BLOCKS = 20  # so that the workers of a test run share them


@pytest.fixture(autouse=True)
def quiet() -> object:
    """Parts are lost all the time, and say so."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", past_failures(PAST))
def test_what_failed_once_does_not_fail_again(seed: int) -> None:
    assert outcome_of(seed).violations == ()


@pytest.mark.parametrize("block", range(BLOCKS))
def test_whatever_dies_every_rank_gets_the_stream_of_the_undisturbed_run(block: int) -> None:
    tally = Tally()
    for seed in range(block, SEEDS, BLOCKS):
        tally.add(outcome_of(seed))
    print(tally.table())
    assert tally.failed == {}, f"replay: python -m overlord.simulation --seed {next(iter(tally.failed))}"
    assert tally.fewest >= 3


def test_a_seed_replays_exactly_in_another_process() -> None:
    seeds = [7, 25, 41]
    code = "import sys, logging; logging.disable(50); from overlord.simulation.running import run_seed\n"
    code += "print(*(run_seed(int(s)).history.digest() for s in sys.argv[1:]))"
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    there = subprocess.run([sys.executable, "-c", code, *map(str, seeds)], env=env, capture_output=True, text=True, check=True, timeout=120)
    assert there.stdout.split() == [run_seed(s).history.digest() for s in seeds]


def test_a_seed_is_the_same_on_a_machine_whose_clock_runs_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders size what they evaluate by what it costs, and that is measured."""
    before = run_seed(24).history.digest()
    monkeypatch.setattr(reader.time, "perf_counter", itertools.count(0.0, 0.05).__next__)
    assert run_seed(24).history.digest() == before


def test_a_seed_is_the_same_in_a_process_of_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal names the process that writes it, and a write that is torn is cut somewhere."""
    found = set()
    for pid in (7, 4194304):
        monkeypatch.setattr(place.os, "getpid", lambda pid=pid: pid)
        found.add(run_seed(7074).history.digest())
    assert len(found) == 1


def test_seeds_draw_what_is_promised() -> None:
    scenarios = [draw(seed) for seed in range(400)]
    for s in scenarios:
        assert len(s.rows) >= 3
        assert len(s.faults) >= 3
        drawn = STEPS * (s.samples or 7)
        assert all(2 * sum(rows) <= drawn for rows in s.rows), "two epochs of each source come"
    assert len({(s.mesh, len(s.rows), s.options["prefetch"]) for s in scenarios}) > 100
    drawn_faults = {(f.kind, f.role) for s in scenarios for f in s.faults}
    assert drawn_faults == {(kind, role) for kind, roles in KINDS.items() for role in roles}


def test_one_command_replays_a_seed_and_says_what_happened() -> None:
    done = subprocess.run([sys.executable, "-m", "overlord.simulation", "--seed", "25"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 25:" in done.stdout
    assert "no violations" in done.stdout


def test_a_seed_that_raises_whatever_it_is_fails_and_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(seed: int) -> None:
        raise Killed

    monkeypatch.setattr("overlord.simulation.soak.run_seed", killed)
    [violation] = outcome_of(7).violations
    assert "it raised" in violation
