"""Execution of the loaders of a process: their state machines, readers and samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from overlord.checks import as_exception
from overlord.concurrency.event_loop import Done, Executor
from overlord.content import Content
from overlord.loader.loader import Loader
from overlord.loader.reader import SourceReader
from overlord.loader.samples import SampleBuffer
from overlord.messages.control import LoaderStart, Refill, RestartLoader, Rollback
from overlord.messages.data import Evaluate, LoaderWork, Pop, Read, ReadFailed
from overlord.process.resources import pss_bytes
from overlord.sample import Ragged
from overlord.transforms.transform_process import TransformWorker

# Steps between two releases of samples: visiting all loaders costs more than retaining samples.
STEPS_PER_RELEASE = 4
NOTHING = Content(Ragged(np.zeros(0, np.int32), np.zeros(1, np.int64)))


@dataclass(slots=True, eq=False)
class ReaderQueue:
    """Queue that serializes the work of a reader.

    The work of a restarted loader waits for work that its predecessor started.
    """

    in_use: bool = False
    pending: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class LoaderSlot:
    """One logical loader and its samples.

    ``ready`` of the loader is the number of samples in the buffer. A standby repeats the pops of a
    loader of another worker, perhaps later. Its announcements are ignored until it is promoted.
    """

    loader: Loader
    reader: SourceReader
    buffer: SampleBuffer
    queue: ReaderQueue = field(default_factory=ReaderQueue)
    standby: bool = False
    # Unacknowledged steps, and the front of the loader after each.
    popped: deque[tuple[int, int]] = field(default_factory=deque)
    last: int = -1  # the last step that was popped, or that the loader rolled back to

    @property
    def activity(self) -> str:
        """Description of a slow read or slow user code, else the state of the loader."""
        return getattr(self.reader, "activity", "") or self.loader.activity

    @property
    def nbytes(self) -> int:
        """Bytes of all samples and raw rows that the loader holds."""
        return self.buffer.nbytes + self.buffer.kept_bytes + self.reader.stats.raw_bytes

    def pop(self, step: int, n: int) -> tuple[list[Content], list[Any]]:
        """Pop the next n samples; return them and the resulting commands.

        A standby pops the samples that it holds, and the others as soon as they are read.
        """
        pieces = self.buffer.pop(min(n, self.buffer.rows) if self.standby else n)
        left = None if self.standby else self.buffer.ready_bytes
        commands = self.loader.handle(Pop(step, n, left))
        self.last = step
        if self.loader.replay_buffer is not None:
            self.popped.append((step, self.loader.front))
        return pieces, commands

    def release_acked(self, step: int) -> None:
        """Release the samples that were popped up to this step, which all ranks acknowledged."""
        front = -1
        while self.popped and self.popped[0][0] <= step:
            front = self.popped.popleft()[1]
        if front >= 0 and self.loader.replay_buffer is not None:
            self.loader.replay_buffer.release(front)
            self.sync_buffer()

    def rollback(self, opening: LoaderStart, step: int) -> list[Any] | None:
        """Roll back to the position after a step; return the announcements and commands.

        Return None if the loader must be reopened: the replay buffer starts after the position, or
        a read of a standby has failed. That failure was not announced, and may have been transient.
        """
        commands = (
            None
            if self.standby and self.loader.failed
            else self.loader.rollback(opening.cursor, opening.generation)
        )
        if commands is None:
            return None
        self.sync_buffer()
        front = self.loader.front
        self.popped = deque((s, f) for s, f in self.popped if f < front)
        self.popped.append((step, front))
        self.last = step
        return commands

    def sync_buffer(self) -> None:
        """Make the sample buffer, with its retained rows, agree with the position of the loader."""
        assert self.loader.replay_buffer is not None
        # Below 0: samples that are popped as soon as they are read.
        ready = max(0, self.loader.ready)
        if self.buffer.rows > ready:
            self.buffer.pop(self.buffer.rows - ready)
        elif self.buffer.rows < ready:
            self.buffer.restore(ready - self.buffer.rows)
        wanted = max(0, self.loader.announced - ready - self.loader.replay_buffer.released)
        if self.buffer.kept_rows > wanted:
            self.buffer.release(self.buffer.kept_rows - wanted)


class LoaderService:
    """Executor of the commands of the loaders of a process.

    Announcements and commands that result from completed work are passed to ``run``. With ``keeps``
    popped samples are retained until they are acknowledged, so that loaders can roll back.
    """

    def __init__(
        self, executor: Executor, run: Callable[[Sequence[Any]], None], *, keeps: bool = False
    ):
        self._executor, self._run, self._keeps = executor, run, keeps
        self.generation, self._step = 0, -1  # generation and step of the last Rollback
        # The last steps acknowledged by all ranks, and released.
        self._acked, self._released = (-1, -STEPS_PER_RELEASE)
        self.slots: dict[int, LoaderSlot] = {}  # by number of the loader, ascending
        self.held = NOTHING  # samples that look-ahead skipped
        self._held_by = np.zeros(0, np.int64)  # the loader that read each of them

    def open(self, loader: Loader, reader: SourceReader) -> None:
        """Add or replace a loader; results of work of a replaced loader are dropped."""
        self.slots[loader.number] = self._slot(loader, reader, ReaderQueue())
        if loader.number != max(self.slots):
            self.slots = dict(sorted(self.slots.items()))

    def reopen(self, command: RestartLoader) -> None:
        """Restart a loader at a cursor; its samples and results of work in progress are dropped."""
        old = self.slots[command.loader]
        old.queue.pending = None
        self.slots[command.loader] = self._slot(
            old.loader.restarted(command.cursor, command.generation), old.reader, old.queue
        )

    def _slot(self, loader: Loader, reader: SourceReader, queue: ReaderQueue) -> LoaderSlot:
        if self._keeps:
            loader.enable_replay()
        return LoaderSlot(loader, reader, SampleBuffer(keeps=self._keeps), queue)

    def close(self, number: int) -> None:
        self.slots.pop(number, None)

    def forget(self, loaders: Iterable[int]) -> None:
        """Drop the samples of these loaders that look-ahead skipped."""
        left = np.flatnonzero(~np.isin(self._held_by, list(loaders)))
        if len(left) < len(self._held_by):
            self.held, self._held_by = self.held.take(left), self._held_by[left]

    # Rollback and standby

    def acked(self, step: int) -> None:
        """Record that every rank acknowledged the steps up to ``step``.

        Samples are released a few steps at a time.
        """
        self._acked = max(step, self._acked)
        if self._acked >= self._released + STEPS_PER_RELEASE:
            self._release()

    def _release(self) -> None:
        self._released = self._acked
        for slot in self.slots.values():
            slot.release_acked(self._acked)

    def rollback(self, rollback: Rollback, open: Callable[[LoaderStart], None]) -> list[Any]:
        """Roll the loaders of ``rollback.openings`` back to a step; return what they announce.

        The result has their announcements and commands. A loader that does not retain enough is
        reopened with ``open``. Idempotent: a repeated rollback changes nothing.
        """
        if rollback.generation < self.generation:
            return []
        if rollback.generation > self.generation:
            self.generation, self._step, self._acked = (
                rollback.generation,
                rollback.step,
                min(self._acked, rollback.step),
            )
            self._released = min(self._released, rollback.step)
            # A planner that continues after this step has skipped no samples.
            self.held, self._held_by = (NOTHING, np.zeros(0, np.int64))
        commands: list[Any] = []
        for opening in rollback.openings:
            slot = self.slots.get(opening.loader)
            if slot is None or slot.standby or slot.loader.generation < opening.generation:
                commands += self._move(
                    opening, open, rollback.step, standby=False, afresh=rollback.afresh
                )
        return commands

    def attach_standby(
        self, opening: LoaderStart, open: Callable[[LoaderStart], None]
    ) -> list[Any]:
        """Make the loader of ``opening`` a standby at a position of its stream.

        An existing loader moves to that position, unless it has this generation already. Return the
        resulting commands.
        """
        slot = self.slots.get(opening.loader)
        if slot is not None and slot.loader.generation >= opening.generation:
            return []
        # In the other case only the source was restarted, without a rollback.
        step = self._step if slot is None or slot.loader.generation < self.generation else slot.last
        return self._move(opening, open, step, standby=True)

    def promote(
        self, opening: LoaderStart, open: Callable[[LoaderStart], None], step: int
    ) -> list[Any]:
        """Make the loader of ``opening`` a primary at its position after a step.

        Samples that a standby holds stay valid. If they do not suffice, the loader is reopened.
        Return the announcements and commands.
        """
        return self._move(opening, open, step, standby=False)

    def caught_up(self, loaders: Iterable[int]) -> bool | None:
        """Return True if all these loaders hold enough samples, False if one failed, else None.

        Loaders that this process does not have are ignored.
        """
        here = [self.slots[number].loader for number in loaders if number in self.slots]
        if any(loader.failed for loader in here):
            return False
        return True if all(loader.full for loader in here) else None

    def pop_standbys(self, step: int, pops: Mapping[int, int]) -> tuple[dict[int, int], list[Any]]:
        """Pop and drop the samples of a step from standby loaders.

        Return the other pops, and the resulting commands.
        """
        commands: list[Any] = []
        for slot in (h for number in pops if (h := self.slots[number]).standby):
            # Otherwise the standby has popped this step, or its rollback has not arrived yet.
            if step > slot.last and slot.loader.generation >= self.generation:
                commands += slot.pop(step, pops[slot.loader.number])[1]
        return {number: n for number, n in pops.items() if not self.slots[number].standby}, commands

    def _move(
        self,
        opening: LoaderStart,
        open: Callable[[LoaderStart], None],
        step: int,
        *,
        standby: bool,
        afresh: bool = False,
    ) -> list[Any]:
        """Move a loader to its position after a step; return the announcements and commands.

        ``open`` opens the loader if it is missing, if the retained samples do not suffice, or with
        ``afresh``.
        """
        slot = self.slots.get(opening.loader)
        commands = None if slot is None or afresh else slot.rollback(opening, step)
        if commands is None:
            open(opening)
        self.slots[opening.loader].standby = standby
        return commands or []

    # Commands

    def execute(self, command: Refill | Read | Evaluate) -> Sequence[Any]:
        slot = self.slots.get(command.loader)
        if slot is None:  # the loader was moved while the command was in transit
            return ()
        if not isinstance(command, Refill) and command.generation != slot.loader.life:
            return ()  # the work was requested before the loader was restarted
        match command:
            case Refill():
                return slot.loader.handle(command)
            case Read():
                self._submit("read", slot, lambda: slot.reader.read_on(command), command.urgent)
            case Evaluate():
                self._submit(
                    "evaluate",
                    slot,
                    lambda: slot.reader.evaluate(command),
                    command.urgent,
                    command.rows,
                )
        return ()

    def _submit(
        self, what: str, slot: LoaderSlot, work: Callable[[], Any], urgent: bool, size: int = 1
    ) -> None:
        queue, name = slot.queue, f"{what} {slot.reader.order.name}"
        waits = getattr(slot.reader, "waits" if what == "read" else "evaluation_waits", None)

        def go() -> None:
            queue.in_use = True
            self._executor.submit(
                name, work, self._work_done(slot), size=size, urgent=urgent, waits=waits
            )

        if queue.in_use:
            queue.pending = go
        else:
            go()

    def _work_done(self, slot: LoaderSlot) -> Done:
        def done(outcome: Any, error: BaseException | None) -> None:
            slot.queue.in_use = False
            if (pending := slot.queue.pending) is not None:
                slot.queue.pending = None
                pending()
            if self.slots.get(slot.loader.number) is not slot:
                return
            if error is not None:
                self._run(
                    slot.loader.handle(ReadFailed(as_exception(error, slot.reader.order.name)))
                )
            elif isinstance(outcome, tuple):
                evaluated, payload = outcome
                for content in payload if isinstance(payload, list) else [payload]:
                    # Retained samples must not keep the window alive that they are spans of.
                    slot.buffer.put(content.adjacent() if self._keeps else content)
                commands = slot.loader.handle(evaluated)
                if self._keeps:
                    slot.sync_buffer()
                self._run(commands)
            else:
                self._run(slot.loader.handle(outcome))

        return done

    def pop(
        self, step: int, pops: Mapping[int, int], kept: np.ndarray | None
    ) -> tuple[list[Content], list[Any]]:
        """Pop ``pops[l]`` samples off the front of loader l.

        Return the payload, loader by loader, and the resulting commands. With look-ahead, the
        samples that were skipped before come first in the payload. ``kept`` then selects the
        documents of the payload to hold for a later step; None: no look-ahead.
        """
        pieces: list[Content] = []
        commands: list[Any] = []
        for number, n in pops.items():
            popped, more = self.slots[number].pop(step, n)
            pieces += popped
            commands += more
        if kept is None:
            return pieces, commands
        # Samples that look-ahead skipped are not retained by step: a rollback reads again.
        self._acked = max(step, self._acked)
        self._release()
        pieces.insert(0, self.held)
        # Images are not copied: they are most of the bytes.
        if all(p.items is None for p in pieces):
            pieces = [Content.concat(pieces)]
        by = np.concatenate(
            [self._held_by, np.repeat(np.fromiter(pops, np.int64, len(pops)), list(pops.values()))]
        )
        self.held, self._held_by = Content.pick(pieces, kept), by[kept]
        return pieces, commands

    def busy(self) -> list[str]:
        """Return a description of each loader with work in progress, standbys excluded."""
        every = (
            (f"loader/{h.reader.order.name}/{number}", h.activity)
            for number, h in self.slots.items()
            if not h.standby
        )
        return [
            f"{name} is {activity}" for name, activity in every if activity not in ("idle", "done")
        ]

    def held_bytes(self) -> dict[str, int]:
        """Return the held bytes by kind.

        ``ready``: samples in buffers; ``windows``: raw rows; ``held``: samples that look-ahead
        skipped; ``kept``: samples retained for a rollback; ``shadows``: all of standbys.
        """
        primary = [h for h in self.slots.values() if not h.standby]
        return {
            "ready": sum(h.buffer.nbytes for h in primary),
            "windows": sum(h.reader.stats.raw_bytes for h in primary),
            "held": self.held.nbytes,
            "kept": sum(h.buffer.kept_bytes for h in primary),
            "shadows": sum(h.nbytes for h in self.slots.values() if h.standby),
        }

    def work(self) -> list[LoaderWork]:
        """Return the work and the read latency of each loader, standbys included.

        The autoscaler polls this method often, so it is cheap.
        """
        stats = ((number, h.standby, h.reader.stats) for number, h in self.slots.items())
        return [
            LoaderWork(number, standby, *s.work, s.samples, *s.latency)
            for number, standby, s in stats
        ]

    def figures(self) -> list[dict[str, Any]]:
        """Return the activity, the held bytes and the cost of each loader, as plain values."""
        return [
            {
                "loader": number,
                "source": h.reader.order.name,
                "doing": h.activity,
                "ready": h.loader.ready,
                "ready_bytes": h.buffer.nbytes,
                "kept_bytes": h.buffer.kept_bytes,
                "shadow": h.standby,
                "window_bytes": h.reader.stats.raw_bytes,
                "open_bytes": getattr(h.reader.chunks, "open_bytes", 0),
                "read_s": h.reader.stats.read_s,
                "transform_s": h.reader.stats.staged_s + h.reader.stats.transform_s,
                "of_samples_s": h.reader.stats.sample_seconds,
                "core_s": h.reader.stats.work[0],
                "samples": h.reader.stats.samples,
                "tokens": h.reader.stats.tokens,
                "store": getattr(h.reader.chunks, "store_metrics", None),
                "storage": getattr(h.reader.chunks, "storage_metrics", None),
                "images": h.reader.stats.images,
                "worker": isinstance(h.reader.stages, TransformWorker),
                "worker_pid": (pid := getattr(h.reader.stages, "pid", None)),
                "worker_pss": pss_bytes(pid) if pid else 0,
            }
            for number, h in self.slots.items()
        ]

    def check(self) -> None:
        for slot in self.slots.values():
            slot.loader.check()
            assert slot.buffer.rows == max(0, slot.loader.ready), (
                slot.buffer.rows,
                slot.loader.state(),
            )
            assert slot.standby or slot.loader.ready >= 0, slot.loader.state()
        assert len(self.held) == len(self._held_by)
