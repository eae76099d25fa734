"""Small plans as they were when they were written down: a change of any placement is seen, and
where.

If a change is meant, ``python -m tests.golden plans`` writes them anew; look at the difference, and
the changelog says **Breaks:**.
"""

from __future__ import annotations

import json

import pytest

from overlord.planning.strategies import STRATEGIES
from tests.golden.plans import FILE, cases, written

KEPT = json.loads(FILE.read_text())
CASES = cases()


def test_the_file_holds_these_plans_and_every_strategy_has_some() -> None:
    assert sorted(KEPT) == sorted(CASES)
    assert {
        name for name in STRATEGIES if not any(case.startswith(f"{name}, ") for case in KEPT)
    } == set()
    placed = {
        json.dumps(kept["buckets"]) for name, kept in KEPT.items() if name.startswith("balance ")
    }
    assert (
        len(placed) > 15
    )  # methods and levels differ; greedy with room to spare may equal Karmarkar-Karp


@pytest.mark.parametrize("name", KEPT)
def test_a_plan_is_what_it_always_was(name: str) -> None:
    found = written(CASES[name]())
    assert found["buckets"] == KEPT[name]["buckets"]
    assert found["digest"] == KEPT[name]["digest"]
