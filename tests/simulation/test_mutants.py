"""The checker is seen failing: every planted bug is found by the history of a seed that is clean
without it.
"""

from __future__ import annotations

import logging

import pytest

from tests.simulation.mutants import MUTANTS, Mutant, first_found
from tests.simulation.world.seed_run import run_seed

ENOUGH = 150


@pytest.fixture(autouse=True)
def quiet() -> object:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_planted_bug_is_found(mutant: Mutant) -> None:
    """By the seed that found it first; a change elsewhere may make it another one of the first
    few.
    """
    found = first_found(mutant, [mutant.found_at, *range(ENOUGH)])
    assert found is not None, f"none of the first {ENOUGH} seeds finds it"
    assert run_seed(found[0]).violations == []


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 12
