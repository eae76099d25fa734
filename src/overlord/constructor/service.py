"""Execution of the constructors of a process: payload, built microbatches and deliveries."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from overlord.batch_by_step import BatchByStep
from overlord.buffer_pool import BufferPool
from overlord.checks import as_exception
from overlord.concurrency.event_loop import Done, Executor
from overlord.constructor.assembler import Assembler
from overlord.constructor.build import BucketBatch, StepDocuments, build_groups, build_with_images
from overlord.constructor.images import PixelForm
from overlord.job.hooks import Hook
from overlord.mesh import Batch
from overlord.messages.control import Attach, Consumed, Detach, EndOfJob, PlannedStep, Rollback
from overlord.messages.data import (
    Build,
    Built,
    DecodeFailures,
    Deliver,
    EndRank,
    PayloadReady,
    Release,
    StepInfo,
    Unfinish,
)

log = logging.getLogger("overlord")


class RankQueue(Protocol):
    """Queue that delivers the steps of one rank to its client."""

    def put(self, info: StepInfo, bucket: BucketBatch) -> None: ...
    def end(self, error: Exception | None) -> None: ...
    def resume(self) -> None: ...


class ConstructorService:
    """The executor of the constructor commands of some buckets.

    Builds run in ``executor``; their commands go to ``run``. ``cannot`` receives the end of the job
    before a step that failed, ``spoiled`` the images that could not be decoded. ``slabs``: the
    allocator of arrays. Runs on: event loop.
    """

    def __init__(
        self,
        assemblers: Sequence[Assembler],
        *,
        batch: Batch | BatchByStep,
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
        in_place: bool = False,
    ):
        self.assemblers = {a.bucket: a for a in assemblers}
        self._batches, self._multiple = batch, multiple
        self._executor, self._run = executor, run
        self._on_failure, self._hooks, self._broadcast, self._images = (
            cannot,
            tuple(hooks),
            broadcast,
            images,
        )
        # Built batches are stored and sent in compact form, and expanded by the receiver.
        self._compact = compact
        # Ids stay in the payload of the step until a client in this process reads a microbatch.
        self.in_place = in_place
        # ``stopped`` is set when no client needs the steps in progress any more.
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
        """Attach the queues of these ranks.

        Attach all ranks by one call: a step is not retained for a rank that attaches later.
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
        """Add the payload of a step, for the buckets that need it."""
        step, wanting = (
            info.step,
            [a for a in self.assemblers.values() if a.needs_payload(info.step)],
        )
        if wanting:
            stages = self._batches if isinstance(self._batches, BatchByStep) else None
            stage = None if stages is None else stages.stage(step)
            info = info.in_stage(stage, self._batches.at(step).microbatches)
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
        """Roll back to a step: later steps will be planned again, and steps held here stay."""
        return [command for a in self.assemblers.values() for command in a.handle(rollback)]

    def execute(
        self, command: Build | Deliver | EndRank | Unfinish | Release, queue: deque[Any]
    ) -> None:
        match command:
            case Build(step=step, bucket=bucket):
                buckets = [bucket]
                while queue and isinstance(queue[0], Build) and queue[0].step == step:
                    buckets.append(queue.popleft().bucket)
                # Buckets that do not need the step yet are built too. One gather for all costs
                # less. Allocations of one size are reused; those of varying sets of buckets would
                # not fit.
                self._build(
                    step,
                    sorted(
                        [*buckets, *(b for b, a in self.assemblers.items() if a.join_build(step))]
                    ),
                )
            case Deliver():
                self._deliver(command)
                while queue and type(queue[0]) is Deliver:  # one for each rank
                    self._deliver(queue.popleft())
            case EndRank(rank=rank, error=error):
                if rank in self.mailboxes:
                    self.mailboxes[rank].end(error)
            case Unfinish(rank=rank):
                if rank in self.mailboxes:
                    self.mailboxes[rank].resume()
            case Release():
                self._release(command)
                while queue and type(queue[0]) is Release:  # one for each bucket
                    self._release(queue.popleft())

    def _deliver(self, command: Deliver) -> None:
        step, rank = command.step, command.rank
        if rank in self.mailboxes:
            info, built = self._built[step, self.bucket_of[rank]]
            self.mailboxes[rank].put(info, built.for_rank(rank))

    def _release(self, command: Release) -> None:
        step, bucket = command.step, command.bucket
        self._built.pop((step, bucket), None)
        self._release_payload(step, bucket)

    def _build(self, step: int, buckets: list[int]) -> None:
        staged, info = self._staged[step], self._infos[step]
        groups = {
            b: [rank for rank in self.assemblers[b].ranks if rank in self.mailboxes]
            for b in buckets
        }
        options = (
            self._batches.at(step),
            self._multiple,
            self.slabs,
            self._hooks,
            self._compact,
            self.in_place,
        )
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
                    self.assemblers[bucket].mark_failed(step)
                self.fail_step(step, buckets, "building", error)
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

    def fail_step(
        self, step: int, buckets: Sequence[int] | None, what: str, error: BaseException
    ) -> None:
        """End the job before a step that failed for ``buckets`` (None: all), and log the error.

        ``what``: the phase that failed.
        """
        buckets = list(self.assemblers) if buckets is None else buckets
        if not self.stopped:  # if stopped, the failure is intended
            log.error("step %d: %s failed for buckets %s: %s", step, what, _few(buckets), error)
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
        """Describe the wait of the next step of a rank; empty if no step is planned."""
        return self.assemblers[self.bucket_of[rank]].waiting()

    def held_bytes(self) -> dict[str, int]:
        return {
            "staged": sum(s.nbytes for s in self._staged.values()),
            "assembled": sum(bucket.nbytes for _, bucket in self._built.values()),
            # memory of built steps, and buffers that are kept for the next steps
            "slabs": self.slabs.nbytes,
        }

    def figures(self) -> list[dict[str, Any]]:
        return [{"bucket": b, "doing": a.waiting() or "idle"} for b, a in self.assemblers.items()]

    def check(self) -> None:
        for assembler in self.assemblers.values():
            assembler.check()


def _few(buckets: Sequence[int]) -> str:
    """Return the numbers of buckets as text, at most eight of them."""
    shown = ", ".join(map(str, buckets[:8]))
    return shown if len(buckets) <= 8 else f"{shown} and {len(buckets) - 8} more"
