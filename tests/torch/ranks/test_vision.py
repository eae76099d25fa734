"""A model of two modules whose images are encoded anywhere, on 4 and 8 ranks. Each check runs on
all ranks at once (checks_vision.py).
"""

from __future__ import annotations

import pytest

from tests.sizes import part
from tests.torch.ranks.checks_vision import CHECKS
from tests.torch.ranks.rank_launcher import SECONDS, Worlds

pytestmark = pytest.mark.timeout(SECONDS + 30)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds("tests.torch.ranks.checks_vision", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("world", part([4], [8]))
def test_on_all_ranks(world: int, worlds: Worlds) -> None:
    worlds.check(world, CHECKS)
