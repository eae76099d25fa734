"""All cores of a job in one pump: the host of the runtimes that live in one process. Payload is
handed over as it is, without a copy.

Work that takes time (reading, transforming, building) goes to an *executor*, whose outcome comes
back as an event; the local runtime's is a pool of threads, the simulated one's a virtual clock.
Everything else happens in the pump, in order.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.batch import Batch
from overlord.buffer_pool import BufferPool
from overlord.client.step_queue import LocalStepQueue
from overlord.cluster.loader_stats import Watching, onlooker
from overlord.cluster.plan_history import RecentPlans
from overlord.concurrency.command_loop import Done, Executor
from overlord.concurrency.event_loop import ThreadExecutor
from overlord.constructor.assembler import Assembler
from overlord.constructor.build import StepDocuments
from overlord.constructor.images import PixelForm
from overlord.constructor.service import ConstructorService, RankQueue
from overlord.errors import JobError
from overlord.job.hooks import CONSTRUCTOR, LOADER, Hook, of_kind, popped_by
from overlord.journal.write_ahead import WriteAhead
from overlord.loader.loader import Loader
from overlord.loader.reader import SourceReader
from overlord.loader.service import LoaderService
from overlord.messages.client import StepInfo
from overlord.messages.constructor import Build, Deliver, EndRank, Release
from overlord.messages.control import (
    Attach,
    Consumed,
    Cursor,
    Detach,
    DropHeldSamples,
    EndOfJob,
    PlannedStep,
    Refill,
    RestartLoader,
    SourceLost,
    StreamState,
)
from overlord.messages.loader import Announce, Evaluate, Read
from overlord.planning.images.encoding import Encodings
from overlord.planning.planner import Planner
from overlord.planning.spec import NewSource
from overlord.sample import Content, Ragged, Scattered
from overlord.transforms.transform_process import TransformWorker

if TYPE_CHECKING:
    from overlord.setup.options import Options
    from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")


__all__ = ["Done", "Executor", "LocalRuntime", "RecentPlans", "RankQueue"]


class LocalRuntime(WriteAhead, Watching):
    """All cores of a job and what they hold: payload, staged steps, built microbatches."""

    def __init__(
        self,
        *,
        planner: Planner,
        loaders: Sequence[Loader],
        readers: Sequence[SourceReader],
        assemblers: Sequence[Assembler],
        batch: Batch,
        multiple: int,
        executor: Executor,
        check: bool = False,
        hooks: Sequence[Hook] = (),
        seed: int = 0,
        images: PixelForm | None = None,
        broadcast: bool = True,
    ):
        super().__init__(check=check)
        self.planner, self._executor = planner, executor
        self.loading = LoaderService(executor, self.run)
        for loader, reader in zip(loaders, readers, strict=True):
            self.loading.open(loader, reader)
        self.building = ConstructorService(
            assemblers,
            batch=batch,
            multiple=multiple,
            executor=executor,
            run=self.run,
            cannot=self.event,
            hooks=of_kind(hooks, CONSTRUCTOR),
            images=images,
            broadcast=broadcast,
            spoiled=self.event,
        )
        self._images, self._batch, self._multiple = images, batch, multiple
        self._pop_hooks, self._seed = of_kind(hooks, LOADER), seed
        self._taken = -1  # the last step that all clients took
        self._watch(None)
        self.plans = RecentPlans()
        self.on_stage: list[Callable[[PlannedStep], None]] = []
        self.on_lost: list[Callable[[SourceLost], None]] = []
        self.on_late: list[Callable[[Any], None]] = []
        self.on_taken: Callable[[int, int], None] = lambda rank, step: None  # never called here

    # what comes in

    def attach(self, mailboxes: Mapping[int, RankQueue]) -> None:
        """Clients of these ranks exist. All that will take part come together: a step is not kept
        for one who comes later.
        """
        self._queue.extend(self.building.attach(mailboxes))
        self.run([command for rank in mailboxes for command in self.planner.handle(Attach(rank))])

    def detach(self, rank: int) -> None:
        if rank in self.building.mailboxes:
            self._queue.extend(self.building.detach(rank))
            self.run(self.planner.handle(Detach(rank)))

    def stop(self) -> None:
        """Nobody is served any more; outcomes of work still under way lead to nothing that is
        seen.
        """
        for rank in list(self.building.mailboxes):
            self.detach(rank)

    def consumed(self, ranks: Sequence[int], step: int) -> None:
        here = [rank for rank in ranks if rank in self.building.mailboxes]
        self._taken = max(self._taken, step)
        self._queue.extend(self.building.consumed(here, step))
        self.run(
            [command for rank in here for command in self.planner.handle(Consumed(rank, step))]
        )
        self._was_taken()

    def inbox(self, rank: int, next_step: int) -> LocalStepQueue:
        """Where a client in this process gets its steps."""
        return LocalStepQueue()

    def prepare_source(self, blueprint: PreparedJob) -> list[tuple[Loader, SourceReader]]:
        """Loaders for the last source of a blueprint, still to be added."""
        return blueprint.loaders_for(len(blueprint.job.sources) - 1, Cursor())

    def drop_prepared(self, prepared: object) -> None:
        """They hold nothing yet; worker processes are the blueprint's."""

    def add_source(
        self,
        new: NewSource,
        cores: Sequence[tuple[Loader, SourceReader]],
        budget_bytes: int,
        joined: Callable[[], None] = lambda: None,
    ) -> None:
        """A source joins, with loaders behind all others; the planner refuses before anything has
        changed. ``joined`` is called when it has, before a step with the source reaches anyone.
        """
        commands = self.planner.handle(new)
        for loader, reader in cores:
            self.loading.open(loader, reader)
        for hosted in self.loading.hosted.values():
            hosted.loader.set_budget(budget_bytes)
        joined()
        self.run(commands)

    # carrying out commands

    def _carry_out(self, command: Any) -> None:
        match command:
            case Refill() | Read() | Evaluate():
                self._queue.extend(self.loading.carry_out(command))
            case Announce():
                self._queue.extend(self.planner.handle(command))
            case DropHeldSamples(loaders=loaders):
                self.loading.forget(loaders)
            case SourceLost():
                self._lose(command)
            case RestartLoader():
                self.loading.reopen(command)
            case PlannedStep():
                self._stage(command)
            case Build() | Deliver() | EndRank() | Release():
                self.building.carry_out(command, self._queue)
            case EndOfJob():
                self._queue.extend(self.building.finish(command))
            case _:
                raise TypeError(f"no one carries out {type(command).__name__}")

    def _stage(self, stage: PlannedStep) -> None:
        """Pop the step's samples from their loaders and hand them to the constructors: the
        payload's one hop.
        """
        loaders = np.flatnonzero(stage.pops)
        pops = dict(zip(loaders.tolist(), stage.pops[loaders].tolist(), strict=True))
        pieces, commands = self.loading.pop(stage.plan.step, pops, stage.kept)
        self._queue.extend(commands)
        self.plans.keep(stage)
        for watcher in self.on_stage:
            watcher(stage)
        self.building.plan(stage)
        if stage.skipped:
            return
        if stage.kept is not None:  # what stays held would keep all it was popped with alive
            pieces, stage = (
                [Content.pick(pieces, stage.doc)],
                replace(stage, doc=np.arange(len(stage.doc))),
            )
        staged = StepDocuments(stage, Ragged.concat([p.tokens for p in pieces]))
        if self._images is not None:
            staged = self._with_images(staged, Scattered.of(pieces))
        if self._pop_hooks:
            self._executor.submit(
                "loader hooks", lambda: self._popped(staged), self._pop_done(stage), urgent=True
            )
        else:  # ahead of what the planner asked loaders for: a step is what a trainer waits for
            self._queue.extendleft(reversed(self.building.staged(staged, StepInfo.of(stage))))

    def _with_images(self, staged: StepDocuments, found: Scattered | None) -> StepDocuments:
        """Who encodes what; the images themselves lie as they were popped."""
        stage, ranks = staged.stage, self.building.served()
        made, items = (
            Encodings(stage.plan, self._batch, self._multiple),
            found or Scattered([], np.zeros(len(staged.tokens), np.int64)),
        )
        wanted = made.encoded_by(ranks)
        doc, number = stage.doc[made.sample[wanted]], made.routes.number[wanted]
        assert (number < items.counts[doc]).all(), "more images are planned than documents have"
        return replace(
            staged,
            stage=replace(stage, encoding=made.of(ranks, items.first[doc] + number)),
            items=items,
        )

    def _popped(self, staged: StepDocuments) -> StepDocuments:
        doc, tokens = popped_by(
            self._pop_hooks, staged.plan, staged.stage.doc, staged.tokens, self._seed
        )
        return replace(staged, stage=replace(staged.stage, doc=doc), tokens=tokens)

    def _pop_done(self, stage: PlannedStep) -> Done:
        def done(outcome: Any, error: BaseException | None) -> None:
            if error is not None:
                self.building.cannot(stage.plan.step, None, "popping", error)
            else:
                self.run(self.building.staged(outcome, StepInfo.of(stage)))

        return done

    # looking

    def look(self, options: Options, waited_s: float, now: float) -> None:
        """What loaders and trainers did since the last look, and what follows from it.
        ``waited_s``: trainers so far, on average.
        """
        if self._scaler is None:
            self._watch(onlooker(options, self.planner.spec.read_ahead))
        if self.planner.finished is None and self.building.mailboxes:
            self._conclude(
                self._observed(now, {0: self.loading.gauge()}, self._taken, waited_s, hosts=1), now
            )

    def _numbers(self, source: int) -> range:
        loaders = [s.loaders for s in self.planner.spec.sources]
        first = sum(loaders[:source])
        return range(first, first + loaders[source])

    def _n_processes(self, source: int) -> int:
        """Return 1, this process; loaders with worker processes have one each."""
        mine = [
            self.loading.hosted[n].reader.stages
            for n in self._numbers(source)
            if n in self.loading.hosted
        ]
        return len(mine) if any(isinstance(stages, TransformWorker) for stages in mine) else 1

    def _free_s(self, source: int) -> float:
        """Return 0 where nothing but code of the user's can be what takes long in this process."""
        hosted = self.loading.hosted.get(self._numbers(source)[0])
        transforms = () if hosted is None else getattr(hosted.reader.stages, "transforms", ())
        own, heavy = (
            any(t.user_code for t in transforms),
            any(t.kind in ("tokenize", "images") for t in transforms),
        )
        return 0.0 if own and not heavy else math.inf

    def move(self, source: int, hosts: Sequence[str]) -> None:
        raise JobError(
            ["all loaders live in this process; runtime='process' has hosts to move them to"],
            "move",
        )

    def spread(self, source: int, n: int) -> bool:
        raise JobError(
            ["all loaders live in this process; runtime='process' has hosts to spread them over"],
            "scale",
        )

    def kill(self, name: str) -> None:
        raise JobError(
            [
                f"{name!r}: all actors live in this process; with runtime='process' there "
                "are others to kill"
            ],
            "kill",
        )

    # clients in other processes: this process serves them itself

    absent, actor_system = "", None

    def use_buffers(self, buffers: Any) -> None:
        self.building.slabs = buffers

    def listen(self, host: str, token: str) -> None:
        """Do nothing: there are no constructor workers."""

    def outside(self, rank: int) -> None:
        """Return None: there are no constructor workers."""

    def taken_by(self, rank: int) -> None:
        """Return None: there are no constructor workers."""

    # what people ask

    def waiting_for(self, rank: int) -> str:
        """Why a rank has no step, in words: the constructor first, then the planner, then the
        loaders it waits for.
        """
        if words := self.building.waiting(rank) or self._writing():
            return words
        busy = self.loading.busy()
        return self.planner.waiting_for() + (f" ({'; '.join(busy[:3])})" if busy else "")

    def held_bytes(self) -> dict[str, int]:
        """What the roles hold now."""
        return self.loading.held_bytes() | self.building.held_bytes()

    def figures(self) -> dict[str, Any]:
        """What loaders and constructors do and have cost, each with the process it lives in."""
        here = {"pid": os.getpid()}
        return {
            "loaders": [row | here for row in self.loading.figures()],
            "constructors": [row | here for row in self.building.figures()],
            "memory": self.held_bytes(),
            "hosts": [],
            "scaling": self._watch_figures(time.monotonic()),
        }

    def broke(self, error: Exception) -> None:
        """The pump has stopped for good: whoever waits is told by the session."""

    def close(self) -> None:
        """Take no more work; outcomes of what is under way lead nowhere."""
        self.building.stopped = True
        if isinstance(self._executor, ThreadExecutor):
            self._executor.close()
        self.slabs.close()

    @property
    def loaders(self) -> list[Loader]:
        return [h.loader for h in self.loading.hosted.values()]

    @property
    def assemblers(self) -> list[Assembler]:
        return list(self.building.assemblers.values())

    @property
    def slabs(self) -> Any:
        return self.building.slabs

    def check(self) -> None:
        self.planner.check()
        self.loading.check()
        self.building.check()


def local_runtime(
    blueprint: PreparedJob, executor: Executor, state: StreamState | None = None
) -> LocalRuntime:
    """Build the planner, loaders and constructors of a job in this process, at a state."""
    job, options, planner = blueprint.job, blueprint.options, blueprint.planner(state)
    cursors = planner.state().cursors.tolist()
    cores = [
        core
        for i in range(len(job.sources))
        for core in blueprint.loaders_for(i, Cursor(*cursors[i]))
    ]
    host = LocalRuntime(
        planner=planner,
        loaders=[loader for loader, _ in cores],
        readers=[reader for _, reader in cores],
        assemblers=[
            Assembler(b, ranks, options.build_ahead or options.prefetch)
            for b, ranks in enumerate(job.place.buckets("DP"))
        ],
        batch=job.batch,
        multiple=job.document_multiple,
        executor=executor,
        check=options.check,
        hooks=tuple(job.hooks),
        seed=job.seed,
        images=blueprint.images,
        broadcast=options.broadcast,
    )
    if options.memory is not None and options.ring_bytes is not None:
        host.building.slabs = BufferPool(options.ring_bytes)
    return host
