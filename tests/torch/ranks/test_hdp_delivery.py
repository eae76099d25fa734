"""Hybrid jobs that are delivered to gloo ranks: the gradients of every step equal one process."""

from __future__ import annotations

import pytest

from tests.sizes import part
from tests.torch.ranks.checks_hdp_delivery import CHECKS
from tests.torch.ranks.rank_launcher import SECONDS, Worlds

pytestmark = pytest.mark.timeout(SECONDS + 30)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds("tests.torch.ranks.checks_hdp_delivery", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("world", part([4], [1, 3]))
def test_on_all_ranks(world: int, worlds: Worlds) -> None:
    worlds.check(world, CHECKS)
