"""Sources that leave a job: the state that the planner goes on from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from overlord.messages.control import AddSource, Cursor, SetMixture, SourceLost, StreamState
from overlord.planning.mixture import with_added_sources
from overlord.planning.spec import LostSources

LOST = SourceLost(3, "a", "the disk is gone")


def before() -> StreamState:
    return StreamState(
        step=3, cursors=np.array([Cursor()] * 2, np.int64), owed=(7, -7), active=(True, True)
    )


def test_a_step_that_has_begun_begins_again_from_the_accounts_before_it() -> None:
    lost, state = LostSources(0), before()
    lost.begin(state)
    charged = replace(state, owed=(9, -9))
    lost.begin(charged)
    assert lost.has_begun(3)
    assert lost.apply(LOST, charged).owed == state.owed
    assert not lost.has_begun(3)


def test_events_that_came_while_a_begun_step_waited_stay_in_the_log() -> None:
    lost, state = LostSources(0), before()
    lost.begin(state)
    mixture, added = SetMixture(4, {"a": 1.0, "b": 2.0}), AddSource(4, "c", "0")
    waiting = with_added_sources(replace(state, owed=(9, -9), events=(added, mixture)), 3)
    after = lost.apply(LOST, waiting)
    assert after.events == (added, LOST, mixture)
    assert after.owed == (7, -7, 0)
    assert len(after.cursors) == 3
