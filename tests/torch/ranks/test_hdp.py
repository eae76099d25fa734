"""Hybrid plans on worlds of gloo ranks: a fixed set here, random plans with ``make hdp``."""

from __future__ import annotations

import os

import pytest

from tests.sizes import part
from tests.torch.ranks.checks_hdp import CHECKS
from tests.torch.ranks.rank_launcher import SECONDS, Worlds, start

pytestmark = pytest.mark.timeout(SECONDS + 30)
EXAMPLES = "OVERLORD_HDP_EXAMPLES"


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds("tests.torch.ranks.checks_hdp", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("world", part([1, 4], [2, 3]))
def test_on_all_ranks(world: int, worlds: Worlds) -> None:
    worlds.check(world, CHECKS)


@pytest.mark.timeout(3600)
@pytest.mark.skipif(EXAMPLES not in os.environ, reason="minutes: make hdp")
@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_random_plans(world: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("random")
    done = start(world, "tests.torch.ranks.checks_hdp_random", out, seconds=3500)
    assert done["random_plans"] == "ok"
