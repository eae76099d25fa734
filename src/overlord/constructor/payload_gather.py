"""Gather the payload of planned steps from several loader workers.

A step is complete when its plan and all its payload have arrived. Every constructor worker has one
gatherer.

After the loss of a worker the coordinator rolls back and plans steps again under a new
*generation*. A complete step stays. An incomplete step arrives again in full, and late payload of
earlier generations is ignored. Plans and payload use different connections, so payload of a
generation may arrive before its plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from overlord.constructor.build import StepDocuments
from overlord.constructor.service import ConstructorService
from overlord.content import Content, Scattered
from overlord.errors import ActorLost, OverlordError, PlanError
from overlord.messages.control import STRIDE, ConstructorPlan, EndOfJob, Rollback
from overlord.messages.data import StepInfo, StepPayload
from overlord.sample import Ragged

log = logging.getLogger("overlord")


NO_DOCUMENTS = np.zeros(0, np.int64)  # images need no documents: those may be in another worker


# Steps of one loader worker whose payload may arrive before their plan: far above any prefetch
# window.
MAX_EARLY = 1024


Early = dict[tuple[int, int], StepPayload]  # by number of rollbacks and step


class PayloadGatherer:
    """The gatherer of plans and payload; its methods return commands for the constructors.

    ``failover``: lost loader workers are restarted. Runs on: event loop.
    """

    def __init__(self, constructors: ConstructorService, *, failover: bool = False):
        self._constructors, self._failover = constructors, failover
        # Steps whose payload is in transit, by loader worker.
        self._expected: dict[int, tuple[ConstructorPlan, dict[int, StepPayload]]] = {}
        # By loader worker: payload that arrived before the plan of its step.
        self._early: dict[int, Early] = {}
        # Loader workers that will send no more payload, and the reason.
        self._lost_workers: dict[int, str] = {}
        self._end: int | None = None  # the first step that does not exist
        self._planned = -1
        self._replanned: set[int] = set()  # steps up to ``_planned`` that will be planned again
        self._no_restart = not failover  # a lost loader worker will not be restarted
        # Number of rollbacks so far; messages sent before the latest one are ignored.
        self._recovery = 0

    def plan(self, routed: ConstructorPlan) -> list[Any]:
        """Add the plan of a step; some or all payload of the step may have arrived already."""
        step, recovery = routed.stage.plan.step, routed.generation // STRIDE
        if recovery < self._recovery:
            log.debug(
                "plan of step %d of generation %d ignored: a rollback followed",
                step,
                routed.generation,
            )
            return []
        # A restarted worker may not have received the rollback.
        commands = self.rollback(Rollback(routed.generation, step - 1))
        if self._end is not None and step >= self._end:
            return []
        if step in self._expected or (step <= self._planned and step not in self._replanned):
            log.debug(
                "plan of step %d of generation %d ignored: it is complete or in progress",
                step,
                routed.generation,
            )
            return []
        self._planned = max(step, self._planned)
        self._replanned.discard(step)
        self._constructors.plan(routed.stage)
        arrived = {
            origin: early.pop((recovery, step))
            for origin, early in self._early.items()
            if (recovery, step) in early
        }
        self._expected[step] = (routed, arrived)
        return [*commands, *self._check_step(step)]

    def payload(self, payload: StepPayload) -> list[Any]:
        """Add payload that passed ``check_payload``.

        A payload that arrives before its plan is kept, for at most ``MAX_EARLY`` steps per worker.
        """
        step, recovery = payload.step, payload.generation // STRIDE
        if recovery == self._recovery and step in self._expected:
            self._expected[step][1].setdefault(payload.origin, payload)
            return self._check_step(step)
        if self._is_late(step, recovery):
            log.debug(
                "payload of loader-worker/%d for step %d of generation %d ignored: it is late",
                payload.origin,
                step,
                payload.generation,
            )
            return []
        early = self._early.setdefault(payload.origin, {})
        if len(early) >= MAX_EARLY and (recovery, step) not in early:
            log.warning(
                "payload of loader-worker/%d for step %d dropped: %d steps already wait for a plan",
                payload.origin,
                step,
                len(early),
            )
            return []
        early.setdefault((recovery, step), payload)
        return []

    def _is_late(self, step: int, recovery: int) -> bool:
        """Return whether payload is obsolete and must be ignored.

        Such payload was sent before the latest rollback, for a complete step, or for a step after
        the end.
        """
        if recovery != self._recovery:
            return recovery < self._recovery
        return (self._end is not None and step >= self._end) or (
            step <= self._planned and step not in self._replanned
        )

    def finish(self, finish: EndOfJob) -> list[Any]:
        self._end_before(finish.step)
        self._no_restart = self._no_restart or isinstance(finish.error, ActorLost)
        return [*self._constructors.finish(finish), *self._check_all()]

    def _end_before(self, step: int) -> None:
        """Drop plans and payload from ``step`` on; after a rollback they arrive again."""
        over = self._end = step if self._end is None else min(step, self._end)
        self._planned = min(self._planned, over - 1)
        self._replanned = {s for s in self._replanned if s < over}
        self._expected = {s: e for s, e in self._expected.items() if s < over}
        self._forget_early(lambda recovery, s: recovery > self._recovery or s < over)

    def _forget_early(self, stays: Callable[[int, int], bool]) -> None:
        kept = {
            origin: {at: payload for at, payload in early.items() if stays(*at)}
            for origin, early in self._early.items()
        }
        self._early = {origin: early for origin, early in kept.items() if early}

    def rollback(self, rollback: Rollback) -> list[Any]:
        """Roll back to a step: later steps will be planned again.

        Complete steps stay; incomplete ones arrive again. A repeated or outdated rollback does
        nothing.
        """
        recovery = rollback.generation // STRIDE
        if recovery <= self._recovery:
            return []  # a repeated or outdated rollback
        self._recovery, self._end, self._no_restart = recovery, None, not self._failover
        # A step that could not be built must be built again: the planner may have been lost before
        # it received the failure.
        self._replanned.update(
            self._expected,
            (s for s in self._constructors.failed if rollback.step < s <= self._planned),
        )
        self._expected.clear()
        self._constructors.failed.clear()
        # In a restarted worker: no step up to this one will be planned.
        self._planned = max(self._planned, rollback.step)
        self._forget_early(lambda r, s: r >= recovery)
        return self._constructors.rollback(rollback)

    def lost(self, host: int, reason: str) -> list[Any]:
        """Record that a loader worker is lost and sends no more payload.

        Without a restart of the worker, steps that wait for its payload fail.
        """
        self._lost_workers[host] = reason
        return self._check_all()

    def _check_all(self) -> list[Any]:
        return (
            [command for step in sorted(self._expected) for command in self._check_step(step)]
            if self._no_restart
            else []
        )

    def found(self, host: int) -> None:
        """Record that a loader worker is connected."""
        self._lost_workers.pop(host, None)

    def _check_step(self, step: int) -> list[Any]:
        """Pass the step to the constructors if all its payload has arrived.

        End the job before the step if payload does not match the plan, or will never arrive.
        """
        if step not in self._expected:  # an earlier step failed and ended the job
            return []
        routed, arrived = self._expected[step]
        missing = [origin for origin in routed.origins if origin not in arrived]
        if not missing:
            del self._expected[step]
            stage, parts = routed.stage, [arrived[origin] for origin in routed.origins]
            some = [p for p in parts if len(p.tokens)] or parts[:1]
            tokens = Ragged.concat([p.tokens for p in some])
            weights = Content.weights_of([Content(p.tokens, weights=p.weights) for p in some])
            items = (
                None
                if stage.encoding is None
                else Scattered([p.items for p in parts if p.items is not None], NO_DOCUMENTS)
            )
            if problem := _mismatch(routed, tokens, items, parts):
                return self._fail(step, PlanError(problem, step, "this is a bug: report it"))
            return self._constructors.staged(
                StepDocuments(stage, tokens, items, weights=weights), StepInfo.of(stage)
            )
        if self._no_restart and (
            lost := [origin for origin in missing if origin in self._lost_workers]
        ):
            return self._fail(
                step, ActorLost(f"loader-worker/{lost[0]}", self._lost_workers[lost[0]])
            )
        return []

    def _fail(self, step: int, error: Exception) -> list[Any]:
        """End the job before this step, and drop later steps. The planner will confirm the end."""
        self._end_before(step)
        self._constructors.fail_step(step, None, "gathering", error)
        return []

    @property
    def complete_until(self) -> int:
        """The first step whose plan or payload is incomplete."""
        first = min({*self._expected, *self._replanned}, default=self._planned + 1)
        return first if self._end is None else min(first, self._end)

    @property
    def wants_plans(self) -> bool:
        """Whether steps must be planned again and no planned step is in transit.

        Then only the planner can report the reason for the wait.
        """
        return bool(self._replanned) and not self._expected

    def waiting(self) -> str:
        """Describe the wait of the next incomplete step; empty if there is none."""
        for step, (routed, arrived) in sorted(self._expected.items()):
            missing = [
                self._worker_text(origin) for origin in routed.origins if origin not in arrived
            ]
            return f"step {step}: payload of {', '.join(missing)}"
        return (
            f"step {min(self._replanned)}: to be planned again after a worker was lost"
            if self._replanned
            else ""
        )

    def _worker_text(self, host: int) -> str:
        return f"loader-worker/{host}" + (
            f", which is lost ({self._lost_workers[host]})" if host in self._lost_workers else ""
        )


def check_payload(payload: StepPayload, host: int) -> None:
    """Raise ``OverlordError`` if payload of loader worker ``host``, which is untrusted, is invalid.

    Decoding has checked that offsets are within their values.
    """
    step, tokens = payload.step, payload.tokens
    if (
        type(step) is not int
        or step < 0
        or type(payload.origin) is not int
        or payload.origin != host
    ):
        raise OverlordError(
            f"payload of loader-worker/{host}: expected this worker's number and a step of at "
            f"least 0, got {payload.origin!r:.40} and {step!r:.40}"
        )
    if type(payload.generation) is not int or payload.generation < 0:
        raise OverlordError(
            f"payload of loader-worker/{host} for step {step}: expected a generation of at least "
            f"0, got {payload.generation!r:.40}"
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
            f"payload of loader-worker/{host} for step {step}: expected documents of whole "
            f"numbers, got {kinds or type(tokens)}"
        )
    if (weights := payload.weights) is not None and not _are_weights(weights, tokens):
        raise OverlordError(
            f"payload of loader-worker/{host} for step {step}: expected a finite loss weight of at "
            f"least 0 for every token, got {type(weights).__name__}"
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
            f"payload of loader-worker/{host} for step {step}: expected images as bytes, "
            f"got {kinds or type(items)}"
        )


def _are_weights(weights: Any, tokens: Ragged) -> bool:
    """Return whether a value holds a loss weight for every token."""
    if not isinstance(weights, Ragged) or weights.values.dtype not in (np.uint8, np.float32):
        return False
    values = weights.values
    return (
        values.ndim == 1
        and weights.offsets.dtype == np.int64
        and np.array_equal(weights.offsets, tokens.offsets)
        and len(values) == len(tokens.values)
        and (not len(values) or bool(0 <= values.min() <= values.max() < np.inf))
    )


def _mismatch(
    routed: ConstructorPlan, tokens: Ragged, items: Scattered | None, parts: list[StepPayload]
) -> str:
    """Return the reason why payload does not match its plan, or an empty text.

    The payload must have every planned document, each of its planned length, and every image.
    """
    doc = routed.stage.doc
    here = np.flatnonzero(doc >= 0)  # with hooks the plan has all documents, the payload not
    hosts = ", ".join(f"loader-worker/{origin}" for origin in routed.origins)
    if len(tokens) != len(here):
        return f"expected {len(here)} documents of {hosts}, got {len(tokens)}"
    expected = 0 if routed.stage.encoding is None else len(routed.stage.encoding.item)
    if expected != (0 if items is None else len(items)):
        return f"expected {expected} images of {hosts}, got {0 if items is None else len(items)}"
    planned = routed.stage.plan.payload_tokens
    wrong = np.flatnonzero(tokens.lengths[doc[here]] != planned[here])
    if not len(wrong):
        return ""
    row = int(here[wrong[0]])
    origin = routed.origins[
        int(np.searchsorted(np.cumsum([len(p.tokens) for p in parts]), doc[row], side="right"))
    ]
    expected, got = int(planned[row]), int(tokens.lengths[doc[row]])
    return (
        f"expected {expected} tokens of {routed.stage.plan.sample_id(row)} from "
        f"loader-worker/{origin}, got {got}"
    )
