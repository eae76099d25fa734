"""Equal gradients on every mesh of 4 ranks, which torchrun started, and of 8, whatever the plan.
Each check runs on all ranks at once (checks_training.py).
"""

from __future__ import annotations

import pytest

from tests.sizes import part
from tests.torch.ranks.checks_training import CHECKS
from tests.torch.ranks.rank_launcher import SECONDS, Worlds

pytestmark = pytest.mark.timeout(SECONDS + 30)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds("tests.torch.ranks.checks_training", tmp_path_factory.mktemp("ranks"), torchrun=4)


@pytest.mark.parametrize("world", part([4], [8]))
def test_on_all_ranks(world: int, worlds: Worlds) -> None:
    worlds.check(world, CHECKS)
