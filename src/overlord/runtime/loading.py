"""The loader side of a host: logical loaders, what reads for them, and the payload they hold. One in every process with loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from overlord.errors import OverlordError, SourceError
from overlord.loader.buffer import Shelf
from overlord.loader.loader import Loader
from overlord.loader.reader import SourceReader
from overlord.messages import Evaluate, Open, Pop, Read, ReadFailed, Refill
from overlord.runtime.carrier import Done, Executor
from overlord.sample import Content, Ragged
from overlord.transforms.worker import TransformWorker

NOTHING = Content(Ragged(np.zeros(0, np.int32), np.zeros(1, np.int64)))


@dataclass(slots=True, eq=False)
class Turn:
    """A reader does one thing at a time, whoever asks: a loader that began again waits for what the one before it had begun."""

    working: bool = False
    then: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class Hosted:
    """One logical loader."""

    loader: Loader
    reader: SourceReader
    shelf: Shelf = field(default_factory=Shelf)
    turn: Turn = field(default_factory=Turn)


class Loading:
    """``carry_out(command) -> commands``; what work leads to goes to ``run``."""

    def __init__(self, executor: Executor, run: Callable[[Sequence[Any]], None]):
        self._executor, self._run = executor, run
        self.hosted: dict[int, Hosted] = {}  # by the loader's number, in rising order
        self.held = NOTHING  # payload of samples that look-ahead passed over
        self._held_by = np.zeros(0, np.int64)  # which loader read each of them

    def open(self, loader: Loader, reader: SourceReader) -> None:
        """A loader takes part, or takes the place of one that did; outcomes of the old one's work lead to nothing."""
        self.hosted[loader.number] = Hosted(loader, reader)
        if loader.number != max(self.hosted):
            self.hosted = dict(sorted(self.hosted.items()))

    def reopen(self, command: Open) -> None:
        """A loader begins again where it is: what it held goes, what it had begun leads to nothing."""
        old = self.hosted[command.loader]
        old.turn.then = None
        self.hosted[command.loader] = Hosted(old.loader.again(command.cursor, command.generation), old.reader, turn=old.turn)

    def close(self, number: int) -> None:
        self.hosted.pop(number, None)

    def forget(self, loaders: Iterable[int]) -> None:
        """Held payload of these loaders goes; the rest close ranks."""
        left = np.flatnonzero(~np.isin(self._held_by, list(loaders)))
        if len(left) < len(self._held_by):
            self.held, self._held_by = self.held.take(left), self._held_by[left]

    def carry_out(self, command: Refill | Read | Evaluate) -> Sequence[Any]:
        hosted = self.hosted.get(command.loader)
        if hosted is None:  # it was moved away while this was on its way
            return ()
        if not isinstance(command, Refill) and command.generation != hosted.loader.generation:
            return ()  # wanted by a loader that has begun again since
        match command:
            case Refill():
                return hosted.loader.handle(command)
            case Read():
                self._submit("read", hosted, lambda: hosted.reader.read(command), command.urgent)
            case Evaluate():
                self._submit("evaluate", hosted, lambda: hosted.reader.evaluate(command), command.urgent, command.rows)
        return ()

    def _submit(self, what: str, hosted: Hosted, work: Callable[[], Any], urgent: bool, size: int = 1) -> None:
        turn, name = hosted.turn, f"{what} {hosted.reader.order.name}"
        waits = what == "read" and getattr(hosted.reader.chunks, "store_metrics", None) is not None

        def go() -> None:
            turn.working = True
            self._executor.submit(name, work, self._read_done(hosted), size=size, urgent=urgent, waits=waits)

        if turn.working:
            turn.then = go
        else:
            go()

    def _read_done(self, hosted: Hosted) -> Done:
        def done(outcome: Any, error: BaseException | None) -> None:
            hosted.turn.working = False
            if (then := hosted.turn.then) is not None:
                hosted.turn.then = None
                then()
            if self.hosted.get(hosted.loader.number) is not hosted:
                return
            if error is not None:
                self._run(hosted.loader.handle(ReadFailed(as_exception(error, hosted.reader.order.name))))
            elif isinstance(outcome, tuple):
                evaluated, payload = outcome
                hosted.shelf.put(payload)
                self._run(hosted.loader.handle(evaluated))
            else:
                self._run(hosted.loader.handle(outcome))

        return done

    def pop(self, step: int, pops: Mapping[int, int], kept: np.ndarray | None) -> tuple[list[Content], list[Any]]:
        """Take ``pops[l]`` samples off the front of loader l. Returns the payload, loader by loader, and what the loaders want then.

        With look-ahead, payload held over comes first; ``kept`` says which documents of all this stay held.
        """
        pieces: list[Content] = []
        commands: list[Any] = []
        for number, n in pops.items():
            hosted = self.hosted[number]
            pieces += hosted.shelf.pop(n)
            commands += hosted.loader.handle(Pop(step, n))
        if kept is None:
            return pieces, commands
        pieces.insert(0, self.held)
        if all(p.items is None for p in pieces):  # images are left where they lie: they are most of the bytes
            pieces = [Content.concat(pieces)]
        by = np.concatenate([self._held_by, np.repeat(np.fromiter(pops, np.int64, len(pops)), list(pops.values()))])
        self.held, self._held_by = Content.pick(pieces, kept), by[kept]
        return pieces, commands

    def busy(self) -> list[str]:
        """What loaders are doing, in words."""
        every = ((f"loader/{h.reader.order.name}/{number}", h.loader.doing) for number, h in self.hosted.items())
        return [f"{name} is {doing}" for name, doing in every if doing not in ("idle", "done")]

    def held_bytes(self) -> dict[str, int]:
        return {
            "ready": sum(h.shelf.nbytes for h in self.hosted.values()),
            "windows": sum(h.reader.stats.raw_bytes for h in self.hosted.values()),
            "held": self.held.nbytes,
        }

    def figures(self) -> list[dict[str, Any]]:
        """What each loader does and has cost, as plain values."""
        return [
            {"loader": number, "source": h.reader.order.name, "doing": h.loader.doing, "ready": h.loader.ready,
             "ready_bytes": h.shelf.nbytes, "read_s": h.reader.stats.read_s, "transform_s": h.reader.stats.transform_s,
             "store": getattr(h.reader.chunks, "store_metrics", None), "images": h.reader.stats.images,
             "worker": isinstance(h.reader.stages, TransformWorker), "worker_pid": getattr(h.reader.stages, "pid", None)}
            for number, h in self.hosted.items()
        ]  # fmt: skip

    def check(self) -> None:
        for hosted in self.hosted.values():
            hosted.loader.check()
            assert hosted.shelf.rows >= 0
        assert len(self.held) == len(self._held_by)


def as_exception(error: BaseException, source: str = "") -> Exception:
    if isinstance(error, Exception) and not isinstance(error, StopIteration):  # which would look like the end of the data
        return error
    what = f"{type(error).__name__}: {error}"
    return SourceError(source, what, remedy="a transform must not end the program") if source else OverlordError(what)
