"""Payload of planned steps on its way from several loader hosts: a step is staged when all of it is here.

Where microbatches are built there is one of these: in constructor hosts, and without constructors in every client.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from overlord.constructor.builder import StagedStep
from overlord.errors import ActorLost, OverlordError, PlanError
from overlord.messages import Finish, Payload, Placed, Told
from overlord.runtime.building import Building
from overlord.sample import Ragged, Scattered

log = logging.getLogger("overlord")

NOBODY = np.zeros(0, np.int64)  # images are of documents that need not be here
MAX_EARLY = 1024  # steps whose payload may come before they are told: far above any prefetch window


class Gathering:
    """In the pump of whoever builds. What comes in leads to commands of the building."""

    def __init__(self, building: Building):
        self._building = building
        self._expected: dict[int, tuple[Placed, dict[int, Payload]]] = {}  # steps whose payload is on its way, by loader host
        self._early: dict[int, dict[int, Payload]] = {}  # payload that came before its step was told
        self._gone: dict[int, str] = {}  # loader hosts that will send no more, and why
        self._over: int | None = None  # the first step that there is not
        self._planned = -1

    def plan(self, placed: Placed) -> list[Any]:
        """A step is planned; some of its payload may be here already."""
        step = self._planned = placed.stage.plan.step
        self._building.plan(placed.stage)
        if self._over is not None and step >= self._over:
            return []
        self._expected[step] = (placed, self._early.pop(step, {}))
        return self._see(step)

    def payload(self, payload: Payload) -> list[Any]:
        """``check_payload`` has looked at what it is; whether it fits its plan is seen when both are here."""
        step = payload.step
        if self._over is not None and step >= self._over:
            return []
        if step in self._expected:
            self._expected[step][1].setdefault(payload.origin, payload)
            return self._see(step)
        if step <= self._planned or (step not in self._early and len(self._early) >= MAX_EARLY):
            log.warning("payload of loader-host/%d for step %d is for no step that is wanted", payload.origin, step)
            return []
        self._early.setdefault(step, {}).setdefault(payload.origin, payload)
        return []

    def finish(self, finish: Finish) -> list[Any]:
        self._end_before(finish.step)
        return self._building.finish(finish)

    def _end_before(self, step: int) -> None:
        over = self._over = step if self._over is None else min(step, self._over)
        self._expected = {s: e for s, e in self._expected.items() if s < over}
        self._early = {s: e for s, e in self._early.items() if s < over}

    def lost(self, host: int, reason: str) -> list[Any]:
        """A loader host sends no more: steps that wait for it cannot be."""
        self._gone[host] = reason
        return [command for step in sorted(self._expected) for command in self._see(step)]

    def found(self, host: int) -> None:
        """A loader host is linked, or linked again."""
        self._gone.pop(host, None)

    def _see(self, step: int) -> list[Any]:
        """Whether all payload of a step is here."""
        if step not in self._expected:  # the one before it could not be, which ended the job
            return []
        placed, found = self._expected[step]
        missing = [origin for origin in placed.origins if origin not in found]
        if not missing:
            del self._expected[step]
            stage, parts = placed.stage, [found[origin] for origin in placed.origins]
            tokens = Ragged.concat([p.tokens for p in parts if len(p.tokens)] or [p.tokens for p in parts[:1]])
            items = None if stage.encoding is None else Scattered([p.items for p in parts if p.items is not None], NOBODY)
            if problem := _misfit(placed, tokens, items, parts):
                return self._cannot(step, PlanError(problem, step, "this is a fault of the package: report it"))
            return self._building.staged(StagedStep(stage, tokens, items), Told.of(stage))
        if lost := [origin for origin in missing if origin in self._gone]:
            return self._cannot(step, ActorLost(f"loader-host/{lost[0]}", self._gone[lost[0]]))
        return []

    def _cannot(self, step: int, error: Exception) -> list[Any]:
        """The job ends before this step. The planner will say so; what is behind it is not waited for from here on."""
        self._end_before(step)
        self._building.cannot(step, None, "gathering", error)
        return []

    @property
    def complete_until(self) -> int:
        """The first step that cannot be built with what is here."""
        first = min(self._expected, default=self._planned + 1)
        return first if self._over is None else min(first, self._over)

    def waiting(self) -> str:
        """What the next step waits for here, in words; empty when nothing is on its way."""
        for step, (placed, found) in sorted(self._expected.items()):
            missing = [f"loader-host/{origin}" for origin in placed.origins if origin not in found]
            return f"step {step}: payload of {', '.join(missing)}"
        return ""


def check_payload(payload: Payload, host: int) -> None:
    """Where it comes in: a peer may say what it likes. That offsets lie within their values was seen when the frame was opened."""
    step, tokens = payload.step, payload.tokens
    if type(step) is not int or step < 0 or type(payload.origin) is not int or payload.origin != host:
        raise OverlordError(f"wanted payload of loader-host/{host} for a step, found that of {payload.origin!r:.40} for {step!r:.40}")
    kinds = [(a.dtype, a.ndim) for a in (tokens.values, tokens.offsets)] if isinstance(tokens, Ragged) else []
    if not kinds or kinds[0][0].kind not in "iu" or kinds[0][1] != 1 or kinds[1] != (np.dtype(np.int64), 1):
        raise OverlordError(
            f"payload of loader-host/{host} for step {step}: wanted documents of whole numbers, found {kinds or type(tokens)}"
        )
    if (items := payload.items) is None:
        return
    kinds = [(a.dtype, a.ndim) for a in (items.values, items.offsets)] if isinstance(items, Ragged) else []
    if kinds != [(np.dtype(np.uint8), 1), (np.dtype(np.int64), 1)]:
        raise OverlordError(f"payload of loader-host/{host} for step {step}: wanted images as bytes, found {kinds or type(items)}")


def _misfit(placed: Placed, tokens: Ragged, items: Scattered | None, parts: list[Payload]) -> str:
    """Why payload is not that of its plan, in words: every document must have the length that was planned, every image be there."""
    doc = placed.stage.doc
    here = np.flatnonzero(doc >= 0)  # for hooks the plan is whole, and the payload is not
    hosts = ", ".join(f"loader-host/{origin}" for origin in placed.origins)
    if len(tokens) != len(here):
        return f"wanted {len(here)} documents of {hosts}, found {len(tokens)}"
    wanted = 0 if placed.stage.encoding is None else len(placed.stage.encoding.item)
    if wanted != (0 if items is None else len(items)):
        return f"wanted {wanted} images of {hosts}, found {0 if items is None else len(items)}"
    wrong = np.flatnonzero(tokens.lengths[doc[here]] != placed.stage.plan.tokens[here])
    if not len(wrong):
        return ""
    row = int(here[wrong[0]])
    origin = placed.origins[int(np.searchsorted(np.cumsum([len(p.tokens) for p in parts]), doc[row], side="right"))]
    wanted, found = int(placed.stage.plan.tokens[row]), int(tokens.lengths[doc[row]])
    return f"wanted {wanted} tokens of {placed.stage.plan.sample_id(row)} from loader-host/{origin}, found {found}"
