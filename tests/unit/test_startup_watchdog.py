"""Workers that are stopped by a signal before they answer their first heartbeat."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from overlord.cluster import launched_workers
from overlord.cluster.launched_workers import StartupWatchdog
from overlord.cluster.supervisor import TICKS
from overlord.rpc.actors import ActorHandle, ActorRecord

NAME = "loader-worker/3"


class Control:
    """Workers that never answer."""

    def call(self, worker: ActorHandle, method: str) -> Future[Any]:
        return Future()


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch) -> StartupWatchdog:
    monkeypatch.setattr(launched_workers, "is_stopped", lambda pid: pid == 7)
    return StartupWatchdog(Control(), 2.0)  # type: ignore[arg-type]


def test_a_stopped_worker_is_returned_once_with_its_reason(watchdog: StartupWatchdog) -> None:
    stopped = ActorHandle(NAME, 7, ActorRecord(NAME))
    watchdog.watch(stopped)
    found = [watchdog.overdue() for _ in range(3 * TICKS)]
    assert found[: TICKS + 1] == [[]] * TICKS + [[stopped]]
    assert found[TICKS + 1 :] == [[]] * (2 * TICKS - 1), "its kill may take a while"
    assert watchdog.reason_of(NAME, "signal 9").startswith("it was stopped for 2 s")
    watchdog.overdue()
    assert watchdog.reason_of(NAME, "signal 9") == "signal 9", "the reason of its successor"


def test_a_starting_worker_that_runs_is_never_returned(watchdog: StartupWatchdog) -> None:
    watchdog.watch(ActorHandle(NAME, 8, ActorRecord(NAME)))
    assert [watchdog.overdue() for _ in range(3 * TICKS)] == [[]] * (3 * TICKS)
