"""Payload of planned steps on its way from several loader hosts: a step is staged when all of it is
here.

Every constructor worker has one.

When some part was lost, the planner goes back and plans steps again under a new *generation*. A
step that is complete here stays; of one that is not, all comes again, and what still comes of the
generation before is not heard. Plans come by another way than payload, so payload of a generation
may be here before the word of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from overlord.constructor.build import StepDocuments
from overlord.constructor.service import ConstructorService
from overlord.errors import ActorLost, OverlordError, PlanError
from overlord.messages.client import StepInfo
from overlord.messages.control import STRIDE, ConstructorPlan, EndOfJob, Rollback
from overlord.messages.loader import StepPayload
from overlord.sample import Ragged, Scattered

log = logging.getLogger("overlord")

NOBODY = np.zeros(0, np.int64)  # images are of documents that need not be here
# steps of one loader host whose payload may come before they are told: far above any prefetch
# window
MAX_EARLY = 1024

Early = dict[tuple[int, int], StepPayload]  # by recovery and step


class PayloadGatherer:
    """In the pump of whoever builds. What comes in leads to commands of the building."""

    def __init__(self, building: ConstructorService, *, failover: bool = False):
        self._building, self._failover = building, failover
        self._expected: dict[
            int, tuple[ConstructorPlan, dict[int, StepPayload]]
        ] = {}  # steps whose payload is on its way, by loader host
        self._early: dict[
            int, Early
        ] = {}  # by loader host: payload that came before its step was told
        self._gone: dict[int, str] = {}  # loader hosts that will send no more, and why
        self._over: int | None = None  # the first step that there is not
        self._planned = -1
        self._again: set[int] = set()  # steps up to that one which are to be planned again
        self._given_up = not failover  # a loader host that is lost will not be started again
        self._recovery = (
            0  # how often the planner went back: what is of an earlier time is not heard
        )

    def plan(self, placed: ConstructorPlan) -> list[Any]:
        """A step is planned; some of its payload may be here already. So may all of it, if it was
        planned before.
        """
        step, recovery = placed.stage.plan.step, placed.generation // STRIDE
        if recovery < self._recovery:
            log.debug("step %d of generation %d is planned again since", step, placed.generation)
            return []
        commands = self.back(
            Rollback(placed.generation, step - 1)
        )  # where no one said so: a host that is started anew
        if self._over is not None and step >= self._over:
            return []
        if step in self._expected or (step <= self._planned and step not in self._again):
            log.debug("step %d of generation %d is here already", step, placed.generation)
            return []
        self._planned = max(step, self._planned)
        self._again.discard(step)
        self._building.plan(placed.stage)
        found = {
            origin: early.pop((recovery, step))
            for origin, early in self._early.items()
            if (recovery, step) in early
        }
        self._expected[step] = (placed, found)
        return [*commands, *self._see(step)]

    def payload(self, payload: StepPayload) -> list[Any]:
        """``check_payload`` has looked at what it is; whether it fits its plan is seen when both
        are here.
        """
        step, recovery = payload.step, payload.generation // STRIDE
        if recovery == self._recovery and step in self._expected:
            self._expected[step][1].setdefault(payload.origin, payload)
            return self._see(step)
        if self._is_late(step, recovery):
            log.debug(
                "payload of loader-host/%d for step %d of generation %d is late",
                payload.origin,
                step,
                payload.generation,
            )
            return []
        early = self._early.setdefault(payload.origin, {})
        if len(early) >= MAX_EARLY and (recovery, step) not in early:
            log.warning(
                "payload of loader-host/%d for step %d is for no step that is expected",
                payload.origin,
                step,
            )
            return []
        early.setdefault((recovery, step), payload)
        return []

    def _is_late(self, step: int, recovery: int) -> bool:
        """Nobody will ask for it: it is of a time that is over, or the step is complete, or there
        is no such step.
        """
        if recovery != self._recovery:
            return recovery < self._recovery
        return (self._over is not None and step >= self._over) or (
            step <= self._planned and step not in self._again
        )

    def finish(self, finish: EndOfJob) -> list[Any]:
        self._end_before(finish.step)
        self._given_up = self._given_up or isinstance(finish.error, ActorLost)
        return [*self._building.finish(finish), *self._see_all()]

    def _end_before(self, step: int) -> None:
        """If the end is undone later, all from there on comes again: what was here of it is let
        go.
        """
        over = self._over = step if self._over is None else min(step, self._over)
        self._planned = min(self._planned, over - 1)
        self._again = {s for s in self._again if s < over}
        self._expected = {s: e for s, e in self._expected.items() if s < over}
        self._forget_early(lambda recovery, s: recovery > self._recovery or s < over)

    def _forget_early(self, stays: Callable[[int, int], bool]) -> None:
        kept = {
            origin: {at: payload for at, payload in early.items() if stays(*at)}
            for origin, early in self._early.items()
        }
        self._early = {origin: early for origin, early in kept.items() if early}

    def back(self, back: Rollback) -> list[Any]:
        """All behind a step is planned again: what is complete stays, the rest comes anew."""
        recovery = back.generation // STRIDE
        if recovery <= self._recovery:
            return []  # it was said before, or is over
        self._recovery, self._over, self._given_up = recovery, None, not self._failover
        # One that could not be built is to fail again: a planner that was lost may not have heard
        # of it.
        self._again.update(
            self._expected, (s for s in self._building.failed if back.step < s <= self._planned)
        )
        self._expected.clear()
        self._building.failed.clear()
        self._planned = max(
            self._planned, back.step
        )  # in a host that is started anew: no step up to there will be planned
        self._forget_early(lambda r, s: r >= recovery)
        return self._building.back(back)

    def lost(self, host: int, reason: str) -> list[Any]:
        """A loader host sends no more: steps that wait for it cannot be, unless another is started
        in its place and they come again.
        """
        self._gone[host] = reason
        return self._see_all()

    def _see_all(self) -> list[Any]:
        return (
            [command for step in sorted(self._expected) for command in self._see(step)]
            if self._given_up
            else []
        )

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
            tokens = Ragged.concat(
                [p.tokens for p in parts if len(p.tokens)] or [p.tokens for p in parts[:1]]
            )
            items = (
                None
                if stage.encoding is None
                else Scattered([p.items for p in parts if p.items is not None], NOBODY)
            )
            if problem := _misfit(placed, tokens, items, parts):
                return self._cannot(
                    step, PlanError(problem, step, "this is a fault of the package: report it")
                )
            return self._building.staged(StepDocuments(stage, tokens, items), StepInfo.of(stage))
        if self._given_up and (lost := [origin for origin in missing if origin in self._gone]):
            return self._cannot(step, ActorLost(f"loader-host/{lost[0]}", self._gone[lost[0]]))
        return []

    def _cannot(self, step: int, error: Exception) -> list[Any]:
        """The job ends before this step. The planner will say so; what is behind it is not waited
        for from here on.
        """
        self._end_before(step)
        self._building.cannot(step, None, "gathering", error)
        return []

    @property
    def complete_until(self) -> int:
        """The first step that cannot be built with what is here."""
        first = min({*self._expected, *self._again}, default=self._planned + 1)
        return first if self._over is None else min(first, self._over)

    @property
    def wants_plans(self) -> bool:
        """The next step is to be planned again, and nothing else is on its way: only the planner
        knows what that waits for.
        """
        return bool(self._again) and not self._expected

    def waiting(self) -> str:
        """What the next step waits for here, in words; empty when nothing is on its way."""
        for step, (placed, found) in sorted(self._expected.items()):
            missing = [self._named(origin) for origin in placed.origins if origin not in found]
            return f"step {step}: payload of {', '.join(missing)}"
        return (
            f"step {min(self._again)}: to be planned again, since some part was lost"
            if self._again
            else ""
        )

    def _named(self, host: int) -> str:
        return f"loader-host/{host}" + (
            f", which is lost ({self._gone[host]})" if host in self._gone else ""
        )


def check_payload(payload: StepPayload, host: int) -> None:
    """Where it comes in: a peer may say what it likes. That offsets lie within their values was
    seen when the frame was opened.
    """
    step, tokens = payload.step, payload.tokens
    if (
        type(step) is not int
        or step < 0
        or type(payload.origin) is not int
        or payload.origin != host
    ):
        raise OverlordError(
            f"expected payload of loader-host/{host} for a step, got that of "
            f"{payload.origin!r:.40} for {step!r:.40}"
        )
    if type(payload.generation) is not int or payload.generation < 0:
        raise OverlordError(
            f"payload of loader-host/{host} for step {step}: expected a generation, got "
            f"{payload.generation!r:.40}"
        )
    kinds = (
        [(a.dtype, a.ndim) for a in (tokens.values, tokens.offsets)]
        if isinstance(tokens, Ragged)
        else []
    )
    if (
        not kinds
        or kinds[0][0].kind not in "iu"
        or kinds[0][1] != 1
        or kinds[1] != (np.dtype(np.int64), 1)
    ):
        raise OverlordError(
            f"payload of loader-host/{host} for step {step}: expected documents of whole "
            f"numbers, got {kinds or type(tokens)}"
        )
    if (items := payload.items) is None:
        return
    kinds = (
        [(a.dtype, a.ndim) for a in (items.values, items.offsets)]
        if isinstance(items, Ragged)
        else []
    )
    if kinds != [(np.dtype(np.uint8), 1), (np.dtype(np.int64), 1)]:
        raise OverlordError(
            f"payload of loader-host/{host} for step {step}: expected images as bytes, "
            f"got {kinds or type(items)}"
        )


def _misfit(
    placed: ConstructorPlan, tokens: Ragged, items: Scattered | None, parts: list[StepPayload]
) -> str:
    """Why payload is not that of its plan, in words: every document must have the length that was
    planned, every image be there.
    """
    doc = placed.stage.doc
    here = np.flatnonzero(doc >= 0)  # for hooks the plan is whole, and the payload is not
    hosts = ", ".join(f"loader-host/{origin}" for origin in placed.origins)
    if len(tokens) != len(here):
        return f"expected {len(here)} documents of {hosts}, got {len(tokens)}"
    wanted = 0 if placed.stage.encoding is None else len(placed.stage.encoding.item)
    if wanted != (0 if items is None else len(items)):
        return f"expected {wanted} images of {hosts}, got {0 if items is None else len(items)}"
    wrong = np.flatnonzero(tokens.lengths[doc[here]] != placed.stage.plan.tokens[here])
    if not len(wrong):
        return ""
    row = int(here[wrong[0]])
    origin = placed.origins[
        int(np.searchsorted(np.cumsum([len(p.tokens) for p in parts]), doc[row], side="right"))
    ]
    wanted, found = int(placed.stage.plan.tokens[row]), int(tokens.lengths[doc[row]])
    return (
        f"expected {wanted} tokens of {placed.stage.plan.sample_id(row)} from "
        f"loader-host/{origin}, got {found}"
    )
