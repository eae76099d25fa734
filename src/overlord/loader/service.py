"""The loader side of a host: logical loaders, what reads for them, and the payload they hold. One
in every process with loaders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from overlord.concurrency.command_loop import Done, Executor
from overlord.loader.loader import Loader
from overlord.loader.reader import SourceReader
from overlord.loader.sample_buffer import SampleBuffer
from overlord.messages.control import LoaderStart, Refill, RestartLoader, Rollback
from overlord.messages.loader import Evaluate, Pop, Read, ReadFailed
from overlord.process.memory import pss_bytes
from overlord.sample import Content, Ragged
from overlord.transforms.transform_process import TransformWorker
from overlord.user_code import as_exception

# steps: to look through all loaders at every step costs more than what is kept a little longer
RELEASED_TOGETHER = 4
NOTHING = Content(Ragged(np.zeros(0, np.int32), np.zeros(1, np.int64)))


@dataclass(slots=True, eq=False)
class Turn:
    """A reader does one thing at a time, whoever asks: a loader that began again waits for what the
    one before it had begun.
    """

    working: bool = False
    then: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class LoaderSlot:
    """One logical loader, and its payload: the front of the shelf is where the loader's ``ready``
    says. A shadow follows one on another host: it is popped as that one is, though perhaps later,
    and nobody hears of it until it takes the other's place.
    """

    loader: Loader
    reader: SourceReader
    shelf: SampleBuffer
    turn: Turn = field(default_factory=Turn)
    shadow: bool = False
    popped: deque[tuple[int, int]] = field(
        default_factory=deque
    )  # steps not acknowledged, and the loader's front behind each
    last: int = -1  # the last step it gave to, or went back to

    @property
    def doing(self) -> str:
        """In words; what storage does not give is named, and code that takes long."""
        return getattr(self.reader, "doing", "") or self.loader.doing

    @property
    def nbytes(self) -> int:
        """All that is held for it."""
        return self.shelf.nbytes + self.shelf.kept_bytes + self.reader.stats.raw_bytes

    def pop(self, step: int, n: int) -> tuple[list[Content], list[Any]]:
        """The next n samples; of a shadow as many of them as there are, the others as soon as they
        are read.
        """
        commands = self.loader.handle(Pop(step, n))
        pieces = self.shelf.pop(min(n, self.shelf.rows) if self.shadow else n)
        self.last = step
        if self.loader.memory is not None:
            self.popped.append((step, self.loader.front))
        return pieces, commands

    def acked(self, step: int) -> None:
        """What was popped up to this step is not wanted again."""
        front = -1
        while self.popped and self.popped[0][0] <= step:
            front = self.popped.popleft()[1]
        if front >= 0 and self.loader.memory is not None:
            self.loader.memory.release(front)
            self.settle()

    def back(self, opening: LoaderStart, step: int) -> list[Any] | None:
        """Stand where the loader stood behind a step; None: memory does not reach so far. What a
        shadow could not read is read again when it takes the other's place: nobody has heard of it,
        and it may be long ago.
        """
        commands = (
            None
            if self.shadow and self.loader.failed
            else self.loader.back(opening.cursor, opening.generation)
        )
        if commands is None:
            return None
        self.settle()
        front = self.loader.front
        self.popped = deque((s, f) for s, f in self.popped if f < front)
        self.popped.append((step, front))
        self.last = step
        return commands

    def settle(self) -> None:
        """Bring the shelf where the loader stands: its front, and how far before it is kept."""
        assert self.loader.memory is not None
        ready = max(
            0, self.loader.ready
        )  # below 0: samples that are popped as soon as they are read
        if self.shelf.rows > ready:
            self.shelf.pop(self.shelf.rows - ready)
        elif self.shelf.rows < ready:
            self.shelf.unpop(ready - self.shelf.rows)
        wanted = max(0, self.loader.announced - ready - self.loader.memory.released)
        if self.shelf.kept_rows > wanted:
            self.shelf.release(self.shelf.kept_rows - wanted)


class LoaderService:
    """``carry_out(command) -> commands``; what work leads to goes to ``run``. With ``keeps`` it can
    go back over steps that were not acknowledged; else nothing is kept, and nothing paid.
    """

    def __init__(
        self, executor: Executor, run: Callable[[Sequence[Any]], None], *, keeps: bool = False
    ):
        self._executor, self._run, self._keeps = executor, run, keeps
        self.generation, self._step = 0, -1  # of the last Back, and what it went back to
        self._acked, self._released = (
            -1,
            -RELEASED_TOGETHER,
        )  # the last steps taken by all, and let go
        self.hosted: dict[int, LoaderSlot] = {}  # by the loader's number, in rising order
        self.held = NOTHING  # payload of samples that look-ahead passed over
        self._held_by = np.zeros(0, np.int64)  # which loader read each of them

    def open(self, loader: Loader, reader: SourceReader) -> None:
        """A loader takes part, or takes the place of one that did; outcomes of the old one's work
        lead to nothing.
        """
        self.hosted[loader.number] = self._hosting(loader, reader, Turn())
        if loader.number != max(self.hosted):
            self.hosted = dict(sorted(self.hosted.items()))

    def reopen(self, command: RestartLoader) -> None:
        """A loader begins again where it is: what it held goes, what it had begun leads to
        nothing.
        """
        old = self.hosted[command.loader]
        old.turn.then = None
        self.hosted[command.loader] = self._hosting(
            old.loader.again(command.cursor, command.generation), old.reader, old.turn
        )

    def _hosting(self, loader: Loader, reader: SourceReader, turn: Turn) -> LoaderSlot:
        if self._keeps:
            loader.remember()
        return LoaderSlot(loader, reader, SampleBuffer(keeps=self._keeps), turn)

    def close(self, number: int) -> None:
        self.hosted.pop(number, None)

    def forget(self, loaders: Iterable[int]) -> None:
        """Held payload of these loaders goes; the rest close ranks."""
        left = np.flatnonzero(~np.isin(self._held_by, list(loaders)))
        if len(left) < len(self._held_by):
            self.held, self._held_by = self.held.take(left), self._held_by[left]

    # going back, and following

    def acked(self, step: int) -> None:
        """Every rank took the steps up to here: what is kept of them goes, that of a few steps
        together.
        """
        self._acked = max(step, self._acked)
        if self._acked >= self._released + RELEASED_TOGETHER:
            self._release()

    def _release(self) -> None:
        self._released = self._acked
        for hosted in self.hosted.values():
            hosted.acked(self._acked)

    def back(self, back: Rollback, open: Callable[[LoaderStart], None]) -> list[Any]:
        """Bring the named loaders to where they stood behind a step: in memory where it reaches so
        far, else opened afresh. Said again, it changes nothing. Returns what they say and want
        then.
        """
        if back.generation < self.generation:
            return []
        if back.generation > self.generation:
            self.generation, self._step, self._acked = (
                back.generation,
                back.step,
                min(self._acked, back.step),
            )
            self._released = min(self._released, back.step)
            self.held, self._held_by = (
                NOTHING,
                np.zeros(0, np.int64),
            )  # whoever plans from there on has passed over nothing
        commands: list[Any] = []
        for opening in back.openings:
            hosted = self.hosted.get(opening.loader)
            if hosted is None or hosted.shadow or hosted.loader.generation < opening.generation:
                commands += self._stand(opening, open, back.step, shadow=False, afresh=back.afresh)
        return commands

    def follow(self, opening: LoaderStart, open: Callable[[LoaderStart], None]) -> list[Any]:
        """Be a shadow of this loader, from a place of its stream on. One that was is brought
        there.
        """
        hosted = self.hosted.get(opening.loader)
        if hosted is not None and hosted.loader.generation >= opening.generation:
            return []
        step = (
            self._step
            if hosted is None or hosted.loader.generation < self.generation
            else hosted.last
        )  # its source was opened again
        return self._stand(opening, open, step, shadow=True)

    def stand(
        self, opening: LoaderStart, open: Callable[[LoaderStart], None], step: int
    ) -> list[Any]:
        """Be this loader from a place on, behind a step: what it holds, or held as a shadow, stays;
        else it is opened there.
        """
        return self._stand(opening, open, step, shadow=False)

    def caught_up(self, loaders: Iterable[int]) -> bool | None:
        """Whether all these hold as much as they were told to; None: not yet; False: one of them
        could not read.
        """
        here = [self.hosted[number].loader for number in loaders if number in self.hosted]
        if any(loader.failed for loader in here):
            return False
        return True if all(loader.full for loader in here) else None

    def pop_shadows(self, step: int, pops: Mapping[int, int]) -> tuple[dict[int, int], list[Any]]:
        """What a step takes from loaders that are shadows here leaves them and goes nowhere.
        Returns the other pops, and what they want.
        """
        commands: list[Any] = []
        for hosted in (h for number in pops if (h := self.hosted[number]).shadow):
            if (
                step > hosted.last and hosted.loader.generation >= self.generation
            ):  # else it was not told yet where to go on
                commands += hosted.pop(step, pops[hosted.loader.number])[1]
        return {number: n for number, n in pops.items() if not self.hosted[number].shadow}, commands

    def _stand(
        self,
        opening: LoaderStart,
        open: Callable[[LoaderStart], None],
        step: int,
        *,
        shadow: bool,
        afresh: bool = False,
    ) -> list[Any]:
        """Bring a loader to where it stood behind a step; ``open`` opens it afresh."""
        hosted = self.hosted.get(opening.loader)
        commands = None if hosted is None or afresh else hosted.back(opening, step)
        if commands is None:
            open(opening)
        self.hosted[opening.loader].shadow = shadow
        return commands or []

    # work

    def carry_out(self, command: Refill | Read | Evaluate) -> Sequence[Any]:
        hosted = self.hosted.get(command.loader)
        if hosted is None:  # it was moved away while this was on its way
            return ()
        if not isinstance(command, Refill) and command.generation != hosted.loader.life:
            return ()  # wanted by a loader that has begun again since
        match command:
            case Refill():
                return hosted.loader.handle(command)
            case Read():
                self._submit("read", hosted, lambda: hosted.reader.read(command), command.urgent)
            case Evaluate():
                self._submit(
                    "evaluate",
                    hosted,
                    lambda: hosted.reader.evaluate(command),
                    command.urgent,
                    command.rows,
                )
        return ()

    def _submit(
        self, what: str, hosted: LoaderSlot, work: Callable[[], Any], urgent: bool, size: int = 1
    ) -> None:
        turn, name = hosted.turn, f"{what} {hosted.reader.order.name}"
        waits = getattr(hosted.reader, "waits" if what == "read" else "evaluation_waits", None)

        def go() -> None:
            turn.working = True
            self._executor.submit(
                name, work, self._read_done(hosted), size=size, urgent=urgent, waits=waits
            )

        if turn.working:
            turn.then = go
        else:
            go()

    def _read_done(self, hosted: LoaderSlot) -> Done:
        def done(outcome: Any, error: BaseException | None) -> None:
            hosted.turn.working = False
            if (then := hosted.turn.then) is not None:
                hosted.turn.then = None
                then()
            if self.hosted.get(hosted.loader.number) is not hosted:
                return
            if error is not None:
                self._run(
                    hosted.loader.handle(ReadFailed(as_exception(error, hosted.reader.order.name)))
                )
            elif isinstance(outcome, tuple):
                evaluated, payload = outcome
                hosted.shelf.put(payload)
                commands = hosted.loader.handle(evaluated)
                if self._keeps:
                    hosted.settle()
                self._run(commands)
            else:
                self._run(hosted.loader.handle(outcome))

        return done

    def pop(
        self, step: int, pops: Mapping[int, int], kept: np.ndarray | None
    ) -> tuple[list[Content], list[Any]]:
        """Take ``pops[l]`` samples off the front of loader l. Returns the payload, loader by
        loader, and what the loaders want then.

        With look-ahead, payload held over comes first; ``kept`` says which documents of all this
        stay held.
        """
        pieces: list[Content] = []
        commands: list[Any] = []
        for number, n in pops.items():
            found, wanted = self.hosted[number].pop(step, n)
            pieces += found
            commands += wanted
        if kept is None:
            return pieces, commands
        self._acked = max(
            step, self._acked
        )  # what is held over is not kept by step: such jobs read again
        self._release()
        pieces.insert(0, self.held)
        if all(
            p.items is None for p in pieces
        ):  # images are left where they lie: they are most of the bytes
            pieces = [Content.concat(pieces)]
        by = np.concatenate(
            [self._held_by, np.repeat(np.fromiter(pops, np.int64, len(pops)), list(pops.values()))]
        )
        self.held, self._held_by = Content.pick(pieces, kept), by[kept]
        return pieces, commands

    def busy(self) -> list[str]:
        """What loaders are doing, in words."""
        every = (
            (f"loader/{h.reader.order.name}/{number}", h.doing)
            for number, h in self.hosted.items()
            if not h.shadow
        )
        return [f"{name} is {doing}" for name, doing in every if doing not in ("idle", "done")]

    def held_bytes(self) -> dict[str, int]:
        """What loaders hold, in bytes: ready, kept until it is acknowledged, raw rows, held over;
        and all that shadows hold.
        """
        primary = [h for h in self.hosted.values() if not h.shadow]
        return {
            "ready": sum(h.shelf.nbytes for h in primary),
            "windows": sum(h.reader.stats.raw_bytes for h in primary),
            "held": self.held.nbytes,
            "kept": sum(h.shelf.kept_bytes for h in primary),
            "shadows": sum(h.nbytes for h in self.hosted.values() if h.shadow),
        }

    def gauge(self) -> list[tuple[int, bool, float, float, int, float, float]]:
        """What each loader has done and how long its reads take, in short: scaling asks for it all
        the time.
        """
        stats = ((number, h.shadow, h.reader.stats) for number, h in self.hosted.items())
        return [(number, shadow, *s.work, s.samples, *s.latency) for number, shadow, s in stats]

    def figures(self) -> list[dict[str, Any]]:
        """What each loader does and has cost, as plain values."""
        return [
            {
                "loader": number,
                "source": h.reader.order.name,
                "doing": h.doing,
                "ready": h.loader.ready,
                "ready_bytes": h.shelf.nbytes,
                "kept_bytes": h.shelf.kept_bytes,
                "shadow": h.shadow,
                "window_bytes": h.reader.stats.raw_bytes,
                "open_bytes": getattr(h.reader.chunks, "open_bytes", 0),
                "read_s": h.reader.stats.read_s,
                "transform_s": h.reader.stats.staged_s + h.reader.stats.transform_s,
                "of_samples_s": h.reader.stats.of_samples,
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
            for number, h in self.hosted.items()
        ]

    def check(self) -> None:
        for hosted in self.hosted.values():
            hosted.loader.check()
            assert hosted.shelf.rows == max(0, hosted.loader.ready), (
                hosted.shelf.rows,
                hosted.loader.state(),
            )
            assert hosted.shadow or hosted.loader.ready >= 0, hosted.loader.state()
        assert len(self.held) == len(self._held_by)
