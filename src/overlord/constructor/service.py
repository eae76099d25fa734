"""Executes the constructors of a process: gathers payload, builds and delivers steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from overlord.buffer_pool import BufferPool
from overlord.checks import as_exception
from overlord.concurrency.event_loop import Done, Executor
from overlord.constructor.assembler import Assembler
from overlord.constructor.build import BucketBatch, StepDocuments, build_groups, build_with_images
from overlord.constructor.images import PixelForm
from overlord.errors import ActorLost, OverlordError, PlanError
from overlord.job.hooks import Hook
from overlord.mesh import Batch
from overlord.messages.control import (
    STRIDE,
    Attach,
    ConstructorPlan,
    Consumed,
    Detach,
    EndOfJob,
    PlannedStep,
    Rollback,
)
from overlord.messages.data import (
    Build,
    Built,
    DecodeFailures,
    Deliver,
    EndRank,
    PayloadReady,
    Release,
    StepInfo,
    StepPayload,
    Unfinish,
)
from overlord.sample import Ragged, Scattered

log = logging.getLogger("overlord")

# ----------------------------------------------------------------------------
# Execute the constructors of a process: payload, built microbatches and deliveries of steps.


class RankQueue(Protocol):
    """Queue of the steps of one client."""

    def put(self, info: StepInfo, bucket: BucketBatch) -> None: ...
    def end(self, error: Exception | None) -> None: ...
    def resume(self) -> None: ...


class ConstructorService:
    """Executes the constructor commands of some buckets: ``carry_out(command) -> commands``.

    Results of work are passed to ``run``.
    """

    def __init__(
        self,
        assemblers: Sequence[Assembler],
        *,
        batch: Batch,
        multiple: int,
        executor: Executor,
        run: Callable[[Sequence[Any]], None],
        cannot: Callable[[EndOfJob], None],
        hooks: Sequence[Hook] = (),
        slabs: Callable[[int], np.ndarray] | None = None,
        broadcast: bool = True,
        images: PixelForm | None = None,
        spoiled: Callable[[DecodeFailures], None] = lambda event: None,
        compact: bool = False,
    ):
        self.assemblers = {a.bucket: a for a in assemblers}
        self._batch, self._multiple, self._executor, self._run = batch, multiple, executor, run
        self._on_failure, self._hooks, self._broadcast, self._images = (
            cannot,
            tuple(hooks),
            broadcast,
            images,
        )
        # built batches are stored and sent in compact form, and expanded by the receiver
        self._compact = compact
        # Set when nobody waits for the steps being built.
        self._on_decode_failures, self.stopped = (spoiled, False)
        self.slabs: Any = BufferPool() if slabs is None else slabs
        self._staged: dict[int, StepDocuments] = {}
        self._infos: dict[int, StepInfo] = {}
        self._holders: dict[int, set[int]] = {}  # step -> buckets that still need its payload
        self._built: dict[tuple[int, int], tuple[StepInfo, BucketBatch]] = {}
        self.failed: set[int] = set()  # steps that could not be built: their payload is released
        self.mailboxes: dict[int, RankQueue] = {}
        self.bucket_of = {rank: a.bucket for a in assemblers for rank in a.ranks}

    # Clients

    def attach(self, mailboxes: Mapping[int, RankQueue]) -> list[Any]:
        """Attach the clients of these ranks.

        All of them attach together: a step is not kept for a later one.
        """
        self.mailboxes.update(mailboxes)
        return [
            command
            for rank in mailboxes
            for command in self.assemblers[self.bucket_of[rank]].handle(Attach(rank))
        ]

    def detach(self, rank: int) -> list[Any]:
        if self.mailboxes.pop(rank, None) is None:
            return []
        return list(self.assemblers[self.bucket_of[rank]].handle(Detach(rank)))

    def consumed(self, ranks: Sequence[int], step: int) -> list[Any]:
        here = [rank for rank in ranks if rank in self.mailboxes]
        return [
            command
            for rank in here
            for command in self.assemblers[self.bucket_of[rank]].handle(Consumed(rank, step))
        ]

    # Steps

    def plan(self, stage: PlannedStep) -> None:
        """Add a planned step whose payload is in transit."""
        for assembler in self.assemblers.values():
            assembler.handle(stage)

    def staged(self, staged: StepDocuments, info: StepInfo) -> list[Any]:
        """Add the payload of a step; buckets that already have the step ignore it."""
        step, wanting = (
            info.step,
            [a for a in self.assemblers.values() if a.needs_payload(info.step)],
        )
        if wanting:
            self._staged[step], self._infos[step] = (
                staged,
                info if self._broadcast else info.without_broadcast(),
            )
            self._holders.setdefault(step, set()).update(a.bucket for a in wanting)
        return [command for a in wanting for command in a.handle(PayloadReady(step))]

    def served(self) -> list[int]:
        """Return all ranks of buckets with an attached rank."""
        return [
            rank
            for a in self.assemblers.values()
            if any(r in self.mailboxes for r in a.ranks)
            for rank in a.ranks
        ]

    def finish(self, finish: EndOfJob) -> list[Any]:
        return [command for a in self.assemblers.values() for command in a.handle(finish)]

    def rollback(self, rollback: Rollback) -> list[Any]:
        """Roll back: the planner plans later steps again, and steps that are here stay."""
        return [command for a in self.assemblers.values() for command in a.handle(rollback)]

    def carry_out(
        self, command: Build | Deliver | EndRank | Unfinish | Release, queue: deque[Any]
    ) -> None:
        match command:
            case Build(step=step, bucket=bucket):
                buckets = [bucket]
                while queue and isinstance(queue[0], Build) and queue[0].step == step:
                    buckets.append(queue.popleft().bucket)
                # Buckets whose ranks lag a little are built together with it. One gather for
                # all costs less. Allocations of one size are reused, while those of varying sets of
                # buckets would not fit.
                self._build(
                    step,
                    sorted(
                        [*buckets, *(b for b, a in self.assemblers.items() if a.join_build(step))]
                    ),
                )
            case Deliver(step=step, rank=rank):
                if rank in self.mailboxes:
                    info, built = self._built[step, self.bucket_of[rank]]
                    self.mailboxes[rank].put(info, built.for_rank(rank))
            case EndRank(rank=rank, error=error):
                if rank in self.mailboxes:
                    self.mailboxes[rank].end(error)
            case Unfinish(rank=rank):
                if rank in self.mailboxes:
                    self.mailboxes[rank].resume()
            case Release(step=step, bucket=bucket):
                self._built.pop((step, bucket), None)
                self._release_payload(step, bucket)

    def _build(self, step: int, buckets: list[int]) -> None:
        staged, info = self._staged[step], self._infos[step]
        groups = {
            b: [rank for rank in self.assemblers[b].ranks if rank in self.mailboxes]
            for b in buckets
        }
        options = (self._batch, self._multiple, self.slabs, self._hooks, self._compact)
        if (form := self._images) is None:
            self._executor.submit(
                "build",
                lambda: (build_groups(staged, info, groups, *options), None),
                self._build_done(info, buckets),
                urgent=True,
            )
            return
        members = [rank for b in buckets for rank in self.assemblers[b].ranks]
        self._executor.submit(
            "build",
            lambda: build_with_images(
                staged, info, groups, members, form, *options, lambda: self.stopped
            ),
            self._build_done(info, buckets),
            urgent=True,
        )

    def _build_done(self, info: StepInfo, buckets: Sequence[int]) -> Done:
        step = info.step

        def done(outcome: Any, error: BaseException | None) -> None:
            if error is not None:
                for bucket in buckets:
                    self.assemblers[bucket].failed(step)
                self.cannot(step, buckets, "building", error)
                return
            commands: list[Any] = []
            made, spoiled = outcome
            if spoiled is not None:
                self._on_decode_failures(spoiled)
            for bucket, built in zip(buckets, made, strict=True):
                self._built[step, bucket] = (info, built)
                self._release_payload(step, bucket)
                commands += self.assemblers[bucket].handle(Built(step))
            self._run(commands)

        return done

    def cannot(
        self, step: int, buckets: Sequence[int] | None, what: str, error: BaseException
    ) -> None:
        """Fail a step that cannot be delivered: the job ends before it."""
        buckets = list(self.assemblers) if buckets is None else buckets
        if not self.stopped:  # otherwise it was stopped on purpose
            log.error("%s step %d for buckets %s failed: %s", what, step, list(buckets), error)
        for bucket in buckets:
            self._release_payload(step, bucket)
        self.failed.add(step)
        self._on_failure(EndOfJob(step, as_exception(error)))

    def _release_payload(self, step: int, bucket: int) -> None:
        holders = self._holders.get(step)
        if holders is not None:
            holders.discard(bucket)
            if not holders:
                del self._holders[step], self._staged[step], self._infos[step]

    # Status

    def waiting(self, rank: int) -> str:
        """Describe what the rank's next step waits for; empty if no step is planned."""
        return self.assemblers[self.bucket_of[rank]].waiting()

    def held_bytes(self) -> dict[str, int]:
        return {
            "staged": sum(s.nbytes for s in self._staged.values()),
            "assembled": sum(bucket.nbytes for _, bucket in self._built.values()),
            # the memory of assembled steps, including what is kept for the next ones
            "slabs": self.slabs.nbytes,
        }

    def figures(self) -> list[dict[str, Any]]:
        return [{"bucket": b, "doing": a.waiting() or "idle"} for b, a in self.assemblers.items()]

    def check(self) -> None:
        for assembler in self.assemblers.values():
            assembler.check()


# ----------------------------------------------------------------------------
# Gather the payload of planned steps from several loader workers.
#
# A step is ready when all of it has arrived. Every constructor worker has one gatherer.
#
# After the loss of a worker the coordinator rolls back and plans steps again under a new
# *generation*. A step that is complete here stays. An incomplete step arrives again in full, and
# late payload of the previous generation is ignored. Plans and payload use different connections,
# so payload of a generation may arrive before its plan.

NO_DOCUMENTS = np.zeros(0, np.int64)  # images belong to documents that need not be here
# Steps of one loader worker whose payload may arrive before their plan: far above any prefetch
# window.
MAX_EARLY = 1024

Early = dict[tuple[int, int], StepPayload]  # by recovery and step


class PayloadGatherer:
    """Collects plans and payload, and returns commands for the constructor. Runs on: event loop."""

    def __init__(self, constructors: ConstructorService, *, failover: bool = False):
        self._constructors, self._failover = constructors, failover
        # Steps whose payload is in transit, by loader worker.
        self._expected: dict[int, tuple[ConstructorPlan, dict[int, StepPayload]]] = {}
        # By loader worker: payload that arrived before the plan of its step.
        self._early: dict[int, Early] = {}
        # loader workers that will send nothing more, and the reason
        self._lost_workers: dict[int, str] = {}
        self._end: int | None = None  # the first step that does not exist
        self._planned = -1
        self._replanned: set[int] = set()  # steps up to ``_planned`` that will be planned again
        self._no_restart = not failover  # a lost loader worker will not be restarted
        # Number of rollbacks: messages of an earlier one are ignored.
        self._recovery = 0

    def plan(self, routed: ConstructorPlan) -> list[Any]:
        """Add the plan of a step. Some or all of its payload may be here already."""
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

        It is compared with its plan when both have arrived.
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
                "payload of loader-worker/%d for step %d dropped: no such step is expected",
                payload.origin,
                step,
            )
            return []
        early.setdefault((recovery, step), payload)
        return []

    def _is_late(self, step: int, recovery: int) -> bool:
        """Return whether payload is obsolete.

        It is of an earlier recovery, of a complete step, or of no known step.
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
        """Drop everything from ``step`` on: if the end is undone later, all of it arrives again."""
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
        """Roll back: later steps are planned again.

        Complete steps stay, the others arrive again.
        """
        recovery = rollback.generation // STRIDE
        if recovery <= self._recovery:
            return []  # a repeated or outdated rollback
        self._recovery, self._end, self._no_restart = recovery, None, not self._failover
        # A step that could not be built must fail again: a lost planner may not have received the
        # failure.
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
        """Record that a loader worker sends nothing more.

        Steps that wait for it fail unless it is restarted and they arrive again.
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
        """Pass the step to the constructors if all its payload has arrived."""
        if step not in self._expected:  # an earlier step failed, which ended the job
            return []
        routed, arrived = self._expected[step]
        missing = [origin for origin in routed.origins if origin not in arrived]
        if not missing:
            del self._expected[step]
            stage, parts = routed.stage, [arrived[origin] for origin in routed.origins]
            tokens = Ragged.concat(
                [p.tokens for p in parts if len(p.tokens)] or [p.tokens for p in parts[:1]]
            )
            items = (
                None
                if stage.encoding is None
                else Scattered([p.items for p in parts if p.items is not None], NO_DOCUMENTS)
            )
            if problem := _mismatch(routed, tokens, items, parts):
                return self._fail(step, PlanError(problem, step, "this is a bug: report it"))
            return self._constructors.staged(
                StepDocuments(stage, tokens, items), StepInfo.of(stage)
            )
        if self._no_restart and (
            lost := [origin for origin in missing if origin in self._lost_workers]
        ):
            return self._fail(
                step, ActorLost(f"loader-worker/{lost[0]}", self._lost_workers[lost[0]])
            )
        return []

    def _fail(self, step: int, error: Exception) -> list[Any]:
        """End the job before this step.

        The planner will confirm it; later steps are no longer awaited.
        """
        self._end_before(step)
        self._constructors.cannot(step, None, "gathering", error)
        return []

    @property
    def complete_until(self) -> int:
        """Return the first step that cannot be built with the payload here."""
        first = min({*self._expected, *self._replanned}, default=self._planned + 1)
        return first if self._end is None else min(first, self._end)

    @property
    def wants_plans(self) -> bool:
        """Return whether the next step must be planned again and nothing is in transit.

        Only the planner can tell its reason.
        """
        return bool(self._replanned) and not self._expected

    def waiting(self) -> str:
        """Describe what the next step waits for; empty if nothing is in transit."""
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
    """Validate payload of a peer, which is not trusted.

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
            f"expected payload of loader-worker/{host} for a step, got that of "
            f"{payload.origin!r:.40} for {step!r:.40}"
        )
    if type(payload.generation) is not int or payload.generation < 0:
        raise OverlordError(
            f"payload of loader-worker/{host} for step {step}: expected a generation, got "
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
            f"payload of loader-worker/{host} for step {step}: expected documents of whole "
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
            f"payload of loader-worker/{host} for step {step}: expected images as bytes, "
            f"got {kinds or type(items)}"
        )


def _mismatch(
    routed: ConstructorPlan, tokens: Ragged, items: Scattered | None, parts: list[StepPayload]
) -> str:
    """Return why payload does not match its plan.

    Every document must have its planned length, every image must be there.
    """
    doc = routed.stage.doc
    here = np.flatnonzero(doc >= 0)  # for hooks the plan is complete, but not the payload
    hosts = ", ".join(f"loader-worker/{origin}" for origin in routed.origins)
    if len(tokens) != len(here):
        return f"expected {len(here)} documents of {hosts}, got {len(tokens)}"
    expected = 0 if routed.stage.encoding is None else len(routed.stage.encoding.item)
    if expected != (0 if items is None else len(items)):
        return f"expected {expected} images of {hosts}, got {0 if items is None else len(items)}"
    wrong = np.flatnonzero(tokens.lengths[doc[here]] != routed.stage.plan.tokens[here])
    if not len(wrong):
        return ""
    row = int(here[wrong[0]])
    origin = routed.origins[
        int(np.searchsorted(np.cumsum([len(p.tokens) for p in parts]), doc[row], side="right"))
    ]
    expected, got = int(routed.stage.plan.tokens[row]), int(tokens.lengths[doc[row]])
    return (
        f"expected {expected} tokens of {routed.stage.plan.sample_id(row)} from "
        f"loader-worker/{origin}, got {got}"
    )
