"""Two ranks with a process group and without torchrun's variables. Each check runs on all ranks at
once (checks_spawned.py).
"""

from __future__ import annotations

import pytest

from tests.torch.ranks.checks_spawned import CHECKS
from tests.torch.ranks.rank_launcher import SECONDS, Worlds

pytestmark = pytest.mark.timeout(SECONDS + 30)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds("tests.torch.ranks.checks_spawned", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("world", [2])
def test_on_all_ranks(world: int, worlds: Worlds) -> None:
    worlds.check(world, CHECKS)
