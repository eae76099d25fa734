"""TempBalance on 2 and 4 ranks: sharded weights have the rates of whole ones. Each check runs on all
ranks at once (checks_temp_balance.py).
"""

from __future__ import annotations

import pytest

from tests.sizes import part
from tests.torch.ranks.checks_temp_balance import CHECKS
from tests.torch.ranks.rank_launcher import SECONDS, Worlds

pytestmark = pytest.mark.timeout(SECONDS + 30)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds("tests.torch.ranks.checks_temp_balance", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("world", part([4], [2]))
def test_on_all_ranks(world: int, worlds: Worlds) -> None:
    worlds.check(world, CHECKS)
