"""The first question of a client that connects to a session served elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from overlord.client.connect import _started
from overlord.errors import DataStall


class StalledServer:
    """Answer every question at once with a stall, as a session does while one of its workers is
    stopped.
    """

    def __init__(self) -> None:
        self.questions = 0

    def ask(self, question: str, timeout_s: float) -> Mapping[str, Any]:
        self.questions += 1
        raise DataStall("constructor-worker/0 to answer", timeout_s, rank=0)


def test_a_client_that_is_answered_with_a_stall_pauses_before_it_asks_again():
    server = StalledServer()
    with pytest.raises(DataStall, match="constructor-worker/0"):
        _started(server, timeout_s=0.35)
    assert 2 <= server.questions <= 6  # without a pause: tens of thousands
