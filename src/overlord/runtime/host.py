"""The pump: events through cores, commands carried out. The same for every runtime that lives in one process.

Work that takes time (reading, transforming, building) goes to an *executor*, whose outcome comes back as an event; the
local runtime's is a pool of threads, the simulated one's a virtual clock. Everything else happens in the pump, in order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from overlord.constructor.assembler import Assembler
from overlord.constructor.builder import Bucket, StagedStep, build_buckets
from overlord.constructor.slabs import SlabPool
from overlord.errors import OverlordError, SourceError
from overlord.hooks import CONSTRUCTOR, LOADER, Hook, of_kind, popped_by
from overlord.job import Batch
from overlord.loader.buffer import Shelf
from overlord.loader.loader import Loader
from overlord.loader.reader import SourceReader
from overlord.messages import (
    Announce,
    Attach,
    Build,
    Built,
    Consumed,
    Deliver,
    Detach,
    End,
    Evaluate,
    Finish,
    Pop,
    Read,
    ReadFailed,
    Refill,
    Release,
    Stage,
    Staged,
)  # fmt: skip
from overlord.planner.planner import Planner
from overlord.planner.spec import NewSource
from overlord.sample import Ragged

log = logging.getLogger("overlord")

KEPT_PLANS = 256
KEPT_SAMPLES = 2**21  # of the plans kept for people: about 100 bytes each, and a step may have 262,144

Done = Callable[[Any, BaseException | None], None]


class Executor(Protocol):
    """Runs work somewhere, some time, and hands its outcome to ``done`` in the pump. Works of one name cost alike by ``size``."""

    def submit(self, name: str, work: Callable[[], Any], done: Done, *, size: int = 1, urgent: bool = False) -> None: ...


class Mailbox(Protocol):
    """Where a client's steps arrive."""

    def put(self, stage: Stage, bucket: Bucket) -> None: ...
    def end(self, error: Exception | None) -> None: ...


class Host:
    """All cores of a job and what they hold: payload, staged steps, built microbatches."""

    def __init__(
        self, *, planner: Planner, loaders: Sequence[Loader], readers: Sequence[SourceReader], assemblers: Sequence[Assembler],
        batch: Batch, multiple: int, executor: Executor, check: bool = False, hooks: Sequence[Hook] = (), seed: int = 0,
    ):  # fmt: skip
        self.planner, self.loaders, self.readers, self.assemblers = planner, list(loaders), list(readers), list(assemblers)
        self.shelves = [Shelf() for _ in self.loaders]
        self._batch, self._multiple, self._executor, self._check = batch, multiple, executor, check
        self._pop_hooks, self._build_hooks, self._seed = of_kind(hooks, LOADER), of_kind(hooks, CONSTRUCTOR), seed
        self.slabs = SlabPool()
        self._held = Ragged(np.zeros(0, np.int32), np.zeros(1, np.int64))  # payload of samples that look-ahead passed over
        self._staged: dict[int, StagedStep] = {}
        self._holders: dict[int, set[int]] = {}  # step -> buckets that still need its payload
        self._built: dict[tuple[int, int], tuple[Stage, Bucket]] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        self._bucket_of = {rank: a.bucket for a in self.assemblers for rank in a.ranks}
        self._queue: deque[Any] = deque()  # commands not yet carried out
        self._running = False
        self.plans: deque[Stage] = deque(maxlen=KEPT_PLANS)  # the last plans, for people who ask
        self.on_stage: list[Callable[[Stage], None]] = []

    # what comes in

    def attach(self, mailboxes: Mapping[int, Mailbox]) -> None:
        """Clients of these ranks exist. All that will take part come together: a step is not kept for one who comes later."""
        self._mailboxes.update(mailboxes)
        for rank in mailboxes:
            self._queue.extend(self.assemblers[self._bucket_of[rank]].handle(Attach(rank)))
        self._run([command for rank in mailboxes for command in self.planner.handle(Attach(rank))])

    def detach(self, rank: int) -> None:
        if self._mailboxes.pop(rank, None) is not None:
            self._queue.extend(self.assemblers[self._bucket_of[rank]].handle(Detach(rank)))
            self._run(self.planner.handle(Detach(rank)))

    def stop(self) -> None:
        """Nobody is served any more; outcomes of work still under way lead to nothing that is seen."""
        for rank in list(self._mailboxes):
            self.detach(rank)

    def consumed(self, ranks: Sequence[int], step: int) -> None:
        events = [Consumed(rank, step) for rank in ranks if rank in self._mailboxes]
        for event in events:
            self._queue.extend(self.assemblers[self._bucket_of[event.rank]].handle(event))
        self._run([command for event in events for command in self.planner.handle(event)])

    def event(self, event: Any) -> None:
        """An event of the log, for the planner."""
        self._run(self.planner.handle(event))

    def add_source(
        self, new: NewSource, cores: Sequence[tuple[Loader, SourceReader]], budget_bytes: int, joined: Callable[[], None] = lambda: None
    ) -> None:
        """A source joins, with loaders behind all others; the planner refuses before anything has changed. ``joined`` is called
        when it has, before a step with the source reaches anyone."""
        commands = self.planner.handle(new)
        self.loaders += [loader for loader, _ in cores]
        self.readers += [reader for _, reader in cores]
        self.shelves += [Shelf() for _ in cores]
        for loader in self.loaders:
            loader.set_budget(budget_bytes)
        joined()
        self._run(commands)

    # carrying out commands

    def _run(self, commands: Sequence[Any]) -> None:
        """Carry out commands in order; those they lead to come behind them. Never re-entered."""
        self._queue.extend(commands)
        if self._running:
            return
        self._running = True
        try:
            while self._queue:
                self._carry_out(self._queue.popleft())
                if self._check:
                    self.check()
        finally:
            self._running = False

    def _carry_out(self, command: Any) -> None:
        match command:
            case Refill(loader=loader):
                self._queue.extend(self.loaders[loader].handle(command))
            case Announce():
                self._queue.extend(self.planner.handle(command))
            case Read(loader=loader):
                reader = self.readers[loader]
                self._executor.submit(
                    f"read {reader.order.name}", lambda: reader.read(command), self._read_done(loader), urgent=command.urgent
                )
            case Evaluate(loader=loader):
                reader = self.readers[loader]
                work = lambda: reader.evaluate(command)  # noqa: E731
                self._executor.submit(
                    f"evaluate {reader.order.name}", work, self._read_done(loader), size=command.rows, urgent=command.urgent
                )  # fmt: skip
            case Stage():
                self._stage(command)
            case Build(step=step, bucket=bucket):
                buckets = [bucket]
                while self._queue and isinstance(self._queue[0], Build) and self._queue[0].step == step:
                    buckets.append(self._queue.popleft().bucket)
                staged = self._staged[step]
                self._executor.submit(
                    "build", lambda: build_buckets(staged, buckets, self._batch, self._multiple, self.slabs, self._build_hooks),
                    self._build_done(step, buckets), urgent=True,
                )  # fmt: skip
            case Deliver(step=step, rank=rank):
                if rank in self._mailboxes:
                    self._mailboxes[rank].put(*self._built[step, self._bucket_of[rank]])
            case End(rank=rank, error=error):
                if rank in self._mailboxes:
                    self._mailboxes[rank].end(error)
            case Release(step=step, bucket=bucket):
                self._built.pop((step, bucket), None)
                self._let_go(step, bucket)
            case Finish():
                for assembler in self.assemblers:
                    self._queue.extend(assembler.handle(command))
            case _:
                raise TypeError(f"no one carries out {type(command).__name__}")

    def _stage(self, stage: Stage) -> None:
        """Pop the step's samples from their loaders and hand them to the constructors: the payload's one hop."""
        pieces: list[Ragged] = []
        step = stage.plan.step
        for loader in np.flatnonzero(stage.pops).tolist():
            n = int(stage.pops[loader])
            pieces += self.shelves[loader].pop(n)
            self._queue.extend(self.loaders[loader].handle(Pop(step, n)))
        self._keep(stage)
        for watcher in self.on_stage:
            watcher(stage)
        if stage.kept is not None:
            held = Ragged.concat([self._held, *pieces])
            self._held, pieces = held.take(stage.kept), [held.take(stage.doc)]
            stage = replace(stage, doc=np.arange(len(stage.doc)))
        if not stage.skipped:
            self._staged[step] = StagedStep(stage, Ragged.concat(pieces))
            self._holders[step] = {a.bucket for a in self.assemblers}
        for assembler in self.assemblers:
            assembler.handle(stage)
        if not stage.skipped and self._pop_hooks:
            staged = self._staged[step]
            self._executor.submit("loader hooks", lambda: self._popped(staged), self._pop_done(step), urgent=True)
        elif not stage.skipped:
            # Ahead of what the planner asked loaders for: a step is what a trainer waits for.
            self._queue.extendleft(reversed(self._staged_now(step)))

    def _staged_now(self, step: int) -> list[Any]:
        return [command for a in self.assemblers for command in a.handle(Staged(step))]

    def _popped(self, staged: StagedStep) -> StagedStep:
        doc, tokens = popped_by(self._pop_hooks, staged.plan, staged.stage.doc, staged.tokens, self._seed)
        return replace(staged, stage=replace(staged.stage, doc=doc), tokens=tokens)

    def _keep(self, stage: Stage) -> None:
        self.plans.append(stage)
        while len(self.plans) > 1 and len(self.plans) * len(stage.plan) > KEPT_SAMPLES:
            self.plans.popleft()

    def _let_go(self, step: int, bucket: int) -> None:
        holders = self._holders.get(step)
        if holders is not None:
            holders.discard(bucket)
            if not holders:
                del self._holders[step], self._staged[step]

    # outcomes of work

    def _read_done(self, loader: int) -> Callable[[Any, BaseException | None], None]:
        def done(outcome: Any, error: BaseException | None) -> None:
            if error is not None:
                self._run(self.loaders[loader].handle(ReadFailed(_as_exception(error, self.readers[loader].order.name))))
            elif isinstance(outcome, tuple):
                evaluated, payload = outcome
                self.shelves[loader].put(payload)
                self._run(self.loaders[loader].handle(evaluated))
            else:
                self._run(self.loaders[loader].handle(outcome))

        return done

    def _pop_done(self, step: int) -> Callable[[Any, BaseException | None], None]:
        def done(outcome: Any, error: BaseException | None) -> None:
            if error is not None:
                self._cannot(step, [a.bucket for a in self.assemblers], "popping", error)
            elif step in self._staged:
                self._staged[step] = outcome
                self._run(self._staged_now(step))

        return done

    def _cannot(self, step: int, buckets: Sequence[int], what: str, error: BaseException) -> None:
        """A step that cannot be delivered: the job ends before it."""
        log.error("%s step %d for buckets %s failed: %s", what, step, buckets, error)
        for bucket in buckets:
            self._let_go(step, bucket)
        self._run(self.planner.handle(Finish(step, _as_exception(error))))

    def _build_done(self, step: int, buckets: Sequence[int]) -> Callable[[Any, BaseException | None], None]:
        def done(outcome: Any, error: BaseException | None) -> None:
            if error is not None:
                self._cannot(step, buckets, "building", error)
                return
            stage = self._staged[step].stage
            for bucket, built in zip(buckets, outcome, strict=True):
                self._built[step, bucket] = (stage, built)
                self._let_go(step, bucket)
                self._queue.extend(self.assemblers[bucket].handle(Built(step)))
            self._run([])

        return done

    # what people ask

    def waiting_for(self, rank: int) -> str:
        """Why a rank has no step, in words: the constructor first, then the planner, then the loaders it waits for."""
        assembler = self.assemblers[self._bucket_of[rank]]
        if words := assembler.waiting():
            return words
        words = self.planner.waiting_for()
        busy = [f"{r.order.name} is {c.doing}" for c, r in zip(self.loaders, self.readers, strict=True) if c.doing not in ("idle", "done")]
        return words + (f" ({'; '.join(busy[:3])})" if busy else "")

    def held_bytes(self) -> dict[str, int]:
        """What the roles hold now."""
        return {
            "ready": sum(s.nbytes for s in self.shelves),
            "windows": sum(r.stats.raw_bytes for r in self.readers),
            "held": self._held.nbytes,
            "staged": sum(s.tokens.nbytes for s in self._staged.values()),
            "assembled": sum(a.nbytes for _, b in self._built.values() for m in b.microbatches for a in m.values()),
            "slabs": self.slabs.nbytes,  # the memory assembled steps lie in, with what is kept for the next ones
        }

    def check(self) -> None:
        self.planner.check()
        for loader, shelf in zip(self.loaders, self.shelves, strict=True):
            loader.check()
            assert shelf.rows >= 0
        for assembler in self.assemblers:
            assembler.check()


def _as_exception(error: BaseException, source: str = "") -> Exception:
    if isinstance(error, Exception) and not isinstance(error, StopIteration):  # which would look like the end of the data
        return error
    what = f"{type(error).__name__}: {error}"
    return SourceError(source, what, remedy="a transform must not end the program") if source else OverlordError(what)
