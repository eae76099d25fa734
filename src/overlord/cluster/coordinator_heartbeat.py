"""Heartbeats of a coordinator in its own process, as its launcher polls them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from overlord.errors import OverlordError
from overlord.rpc.actors import ActorHandle, ActorSystem

log = logging.getLogger("overlord")

# within which a coordinator must answer: one that sleeps with the whole machine is not lost
TICKS = 4
AT_S = 0.5  # for a blocked coordinator to report where it is


class CoordinatorHeartbeat:
    """Kills a coordinator that does not answer, or whose event loop is blocked.

    Its death is then handled like any other. ``on_tick`` is called before every poll. Runs on: a
    thread of its own, except where stated.
    """

    def __init__(self, control: ActorSystem, lost_after_s: float, on_tick: Callable[[], None]):
        self._control, self._lost_after_s, self._on_tick = control, lost_after_s, on_tick
        self._watched: ActorHandle | None = None
        self._killed: tuple[ActorHandle | None, str] = (None, "")  # the last one, and the cause
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self.run, name="overlord-planner-beats", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def watch(self, coordinator: ActorHandle) -> None:
        """Poll this coordinator from now on: its process runs. Runs on: any thread."""
        self._watched = coordinator

    def cause(self, coordinator: ActorHandle | None) -> str | None:
        """Return why a coordinator was killed here; None if it was not. Runs on: any thread."""
        killed, why = self._killed
        return why if killed is coordinator else None

    def run(self) -> None:
        silent, answers, beat, of = 0, False, Future[Any](), self._watched
        beat.set_result(True)
        while not self._stop.wait(self._lost_after_s / TICKS):
            self._on_tick()
            coordinator = self._watched
            moves = coordinator is not of or _moves(beat)
            # the last answer may be under way
            silent, answers = (0, False) if moves else (silent + 1, answers or beat.done())
            if silent >= TICKS and coordinator is not None:
                for_s = f"for {self._lost_after_s:g} s"
                blocked = self._blocked(coordinator, for_s) if answers else ""
                self.kill(coordinator, blocked or f"it answered nothing {for_s}")
            if (coordinator is not of or beat.done()) and coordinator is not None:
                beat = self._control.call(coordinator, "beat")
            of = coordinator

    def _blocked(self, coordinator: ActorHandle, for_s: str) -> str:
        """Describe what a blocked event loop executes, if its process answers."""
        try:
            at = f": {self._control.get(self._control.call(coordinator, 'doing'), AT_S)}"
        except Exception:
            at = ""
        return f"it plans, and does not come to an end {for_s}{at}"

    def kill(self, coordinator: ActorHandle, why: str) -> None:
        log.warning("the planner is killed: %s", why)
        self._killed = (coordinator, why)
        with contextlib.suppress(OverlordError):
            self._control.kill(coordinator)


def _moves(beat: Future[Any]) -> bool:
    """Return whether a coordinator has answered, and its event loop has run."""
    return beat.done() and (beat.exception() is not None or bool(beat.result()))
