"""The events that a coordinator in its own process sends to the session."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from overlord.cluster.coordinator_actor import SessionEvents
from overlord.cluster.recovery import KEPT_RECOVERIES, RecoveryManager
from overlord.cluster.supervisor import Loss
from overlord.messages.launcher import PlacementChanged, WorkerRecovered


def recovering() -> RecoveryManager:
    """A manager without workers: only losses and recoveries are noted."""
    context: Any = SimpleNamespace(event_loop=None, platform=SimpleNamespace(now=lambda: 2.0))
    options: Any = SimpleNamespace(lost_after_s=1.0, max_restarts=3, failover=True)
    nothing: Any = None
    return RecoveryManager(nothing, nothing, context, options, 0, nothing)


def coordinator(recovery: RecoveryManager) -> Any:
    ledger = SimpleNamespace(quarantine=[], spoiled=[])
    return SimpleNamespace(
        recovery=recovery,
        planner=SimpleNamespace(ledger=ledger),
        placement=SimpleNamespace(worker_of=np.array([0, 1])),
    )


def lose(recovery: RecoveryManager, name: str) -> None:
    recovery.losses[name] = (3, Loss(worker=name, reason="killed", since=1.0))
    recovery.planned(5, 6)


def test_every_recovery_is_sent_once_however_many_came_before() -> None:
    recovery = recovering()
    events = SessionEvents(coordinator(recovery))
    for i in range(KEPT_RECOVERIES + 2):
        lose(recovery, f"loader-worker/{i}")
        assert list(events.collect()) == [WorkerRecovered(f"loader-worker/{i}", "killed", 1.0, 3)]
        assert list(events.collect()) == []
    assert len(recovery.recoveries) == KEPT_RECOVERIES


def test_a_move_of_a_loader_is_sent_once() -> None:
    made = coordinator(recovering())
    events = SessionEvents(made)
    made.placement.worker_of[1] = 7
    assert list(events.collect()) == [PlacementChanged([0, 7])]
    assert list(events.collect()) == []
