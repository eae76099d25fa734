"""A rank that is killed while others wait for what it fetches (checks_killed.py)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.torch.ranks.rank_launcher import start

pytestmark = pytest.mark.timeout(150)


def test_those_whom_a_dead_fetcher_served_are_told_who_is_gone(tmp_path: Path) -> None:
    world = start(4, "tests.torch.ranks.checks_killed", tmp_path, seconds=100)
    assert world.codes[1] == -signal.SIGKILL, world.log
    assert "rank 1, which fetches for this one" in (tmp_path / "said").read_text(), world.log
