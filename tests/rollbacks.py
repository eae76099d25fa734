"""Tests of rollbacks: a source, its loaders on one or two workers, and a stand-in for the planner.

The stand-in draws, acknowledges and rolls back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from overlord.content import Content
from overlord.loader.loader import Loader
from overlord.loader.service import LoaderService
from overlord.messages.control import Cursor, LoaderStart, Refill, Rollback
from overlord.messages.data import Announce
from overlord.planning.stream import SourceStream, StreamPiece
from overlord.setup.prepared_job import PreparedJob, open_loader

STRIDE = 2**20


class ByHand:
    """An executor that runs a piece of work when the test calls ``end``."""

    def __init__(self) -> None:
        self.begun: list[tuple[Any, Any]] = []

    def submit(
        self,
        name: str,
        work: Any,
        done: Any,
        *,
        size: int = 1,
        urgent: bool = False,
        waits: bool = False,
    ) -> None:
        self.begun.append((work, done))

    def close(self) -> None:
        pass

    def end(self, k: int = 0) -> None:
        work, done = self.begun.pop(k % len(self.begun))
        try:
            outcome = work()
        except Exception as error:
            done(None, error)
            return
        done(outcome, None)


class HostByHand:
    """A ``LoaderService`` and the loop around it. Announcements of its own loaders are appended to
    ``said``; those of standbys are dropped.
    """

    def __init__(self, blueprint: PreparedJob, *, keeps: bool = True):
        self.blueprint, self.executor = blueprint, ByHand()
        self.loading = LoaderService(self.executor, self._run, keeps=keeps)
        self.said: deque[Announce] = deque()
        self.opened: list[LoaderStart] = []  # loaders that were opened, not replayed

    def _run(self, commands: Any) -> None:
        queue = deque(commands)
        while queue:
            command = queue.popleft()
            if isinstance(command, Announce):
                if not self.loading.slots[command.loader].standby:
                    self.said.append(command)
            else:
                queue.extend(self.loading.execute(command))
        self.loading.check()

    def open(self, opening: LoaderStart) -> None:
        self.opened.append(opening)
        loader, reader, _ = open_loader(
            self.blueprint.reader_spec(opening.source), opening, self.blueprint.handles
        )
        self.loading.open(loader, reader)

    def refill(self, refill: Refill) -> None:
        self._run([refill])

    def back(self, back: Rollback) -> None:
        self._run(self.loading.rollback(back, self.open))

    def follow(self, opening: LoaderStart) -> None:
        self._run(self.loading.attach_standby(opening, self.open))

    def part(self, step: int, pops: dict[int, int]) -> list[Content]:
        mine, commands = self.loading.pop_standbys(
            step, {k: n for k, n in pops.items() if k in self.loading.slots}
        )
        pieces, wanted = self.loading.pop(step, mine, None)
        self._run([*commands, *wanted])
        return pieces

    def loader(self, number: int) -> Loader:
        return self.loading.slots[number].loader


@dataclass
class Step:
    """The samples that a step drew, and the position after it."""

    cursor: Cursor
    passed: np.ndarray  # rows dropped, documents that lost tokens, these tokens
    ids: list[tuple[int, ...]] = field(default_factory=list)
    bad: list[Any] = field(default_factory=list)
    pops: dict[int, int] = field(default_factory=dict)
    of_loader: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)


class Drawing:
    """A stand-in for the planner: one source's stream, drawn step by step.

    ``hosts[home[k]]`` runs loader k; the other workers may run a standby of it.
    """

    def __init__(
        self,
        blueprint: PreparedJob,
        source: int,
        loaders: int,
        *,
        hosts: int = 1,
        keeps: bool = True,
        cursor: Cursor | None = None,
    ):
        self.blueprint, self.source = (
            blueprint.with_loaders([loaders] * len(blueprint.job.sources), 2),
            source,
        )
        self.hosts = [HostByHand(self.blueprint, keeps=keeps) for _ in range(hosts)]
        self.first = source * loaders
        self.home = {self.first + k: k % hosts for k in range(loaders)}
        self.generation, self.acked, self.passed = 0, -1, np.zeros(3, np.int64)
        self.steps = [Step(cursor or Cursor(), self.passed)]  # steps[0] is step -1
        self.late: deque[tuple[int, dict[int, int]]] = deque()  # steps that were not delivered yet
        self.payload: dict[tuple[int, ...], list[bytes]] = {}
        self._words: list[tuple[Rollback, list[LoaderStart]]] = []  # the last rollback, by worker
        self._begin(self.steps[0].cursor)
        for opening in self.openings(self.steps[0].cursor):
            self.hosts[self.home[opening.loader]].open(opening)
        for host in self.hosts:
            host.opened.clear()

    def _begin(self, cursor: Cursor) -> None:
        s = self.blueprint.job.sources[self.source]
        self.stream = SourceStream(
            s.name,
            loaders=len(self.home),
            n_groups=self.blueprint.orders[self.source].n_groups,
            epochs=s.epochs,
            max_bad=s.max_bad,
            cursor=cursor,
        )

    def openings(self, cursor: Cursor) -> list[LoaderStart]:
        return [
            replace(o, generation=self.generation)
            for o in self.blueprint.loader_starts(self.source, cursor)
        ]

    # events

    def hear(self, n: int | None = None) -> None:
        """Receive the next n announcements of each worker."""
        for host in self.hosts:
            for _ in range(len(host.said) if n is None else min(n, len(host.said))):
                news = host.said.popleft()
                if news.generation == self.generation:
                    self.stream.add(news, news.loader - self.first)
                    self.stream.check()

    def refill(self, must: int, level: int) -> None:
        """Refill all loaders to a level. Without a horizon a loader whose rows are all dropped
        would read for ever.
        """
        for loader in self.home:
            for host in self.hosts:
                host.refill(Refill(loader, must, level, self.stream.group + 4))

    def work(self, h: int, k: int) -> None:
        if (host := self.hosts[h % len(self.hosts)]).executor.begun:
            host.executor.end(k)

    def go_on(self, n: int) -> None:
        """Draw and deliver one whole step without delays."""
        self.refill(n, 2 * n)
        for host in self.hosts:
            while host.executor.begun:
                host.executor.end()
        self.hear()
        self.draw(n)
        self.arrive(len(self.late))

    def draw(self, n: int) -> None:
        """Draw a step of up to n samples; its loader plans are queued in ``late``."""
        n = min(n, self.stream.ready)
        if not n:
            return
        before = np.array(self.stream.passed)
        pieces, bad = self.stream.take(n)
        self.passed = self.passed + self.stream.passed - before
        ids, by = ids_of(pieces), holders(pieces)
        of_loader = {
            k: [i for i, held in zip(ids, by, strict=True) if held == k - self.first]
            for k in self.home
        }
        pops = {k: len(v) for k, v in of_loader.items() if v}
        last, at = pieces[-1], pieces[-1].stop - 1
        place = (int(last.found.file[at]), int(last.found.row[at]), int(last.found.part[at]))
        cursor = Cursor(last.at.epoch, last.at.group, last.at.window, *place)
        self.steps.append(Step(cursor, self.passed, ids, bad, pops, of_loader))
        self.late.append((self.last, pops))

    @property
    def last(self) -> int:
        return len(self.steps) - 2

    def arrive(self, n: int = 1) -> None:
        """Deliver the next n queued steps to all workers."""
        for _ in range(min(n, len(self.late))):
            step, pops = self.late.popleft()
            for h, host in enumerate(self.hosts):
                mine = {k: m for k, m in pops.items() if self.home[k] == h}
                rows = payload_rows(host.part(step, pops))
                ids = [i for k in mine for i in self.steps[step + 1].of_loader[k]]
                assert len(ids) == len(rows)
                for name, row in zip(ids, rows, strict=True):
                    self.payload.setdefault(name, []).append(row)

    def ack(self, step: int) -> None:
        arrived = self.late[0][0] - 1 if self.late else self.last
        self.acked = max(self.acked, min(step, arrived))
        for host in self.hosts:
            host.loading.acked(self.acked)

    def back(self, step: int, *, afresh: bool = False) -> None:
        """Roll all workers back to a step; standbys receive their new starting point."""
        step = max(self.acked, min(step, self.last))
        self.generation += STRIDE
        del self.steps[step + 2 :]
        self.late.clear()  # steps from before the rollback do not count
        self.passed = self.steps[-1].passed
        cursor = self.steps[-1].cursor
        self._begin(cursor)
        self._words = [
            (
                Rollback(
                    self.generation,
                    step,
                    tuple(o for o in self.openings(cursor) if self.home[o.loader] == h),
                    afresh,
                ),
                [o for o in self.openings(cursor) if self.home[o.loader] != h],
            )
            for h in range(len(self.hosts))
        ]
        self.say_again()

    def say_again(self) -> None:
        """Send the last rollback to all workers; the first send calls it too."""
        for host, (back, others) in zip(self.hosts, self._words, strict=False):
            host.back(back)
            for o in others:
                host.follow(o)

    # at the end

    def to_the_end(self, samples: int = 10**9) -> None:
        """Draw all samples, or up to ``samples`` more."""
        idle, group = 0, -1
        for _ in range(100_000):
            self.arrive(len(self.late))
            self.refill(0, 64)
            for host in self.hosts:
                while host.executor.begun:
                    host.executor.end()
            self.hear()
            n = min(7, samples, self.stream.ready)
            samples -= n
            self.draw(n)
            self.ack(self.last - 2)
            if not n and (not samples or self.stream.ended or self.stream.error is not None):
                self.arrive(len(self.late))
                return
            idle, group = (
                (0, self.stream.group) if n or self.stream.group != group else (idle + 1, group)
            )
            if idle > 3:
                raise AssertionError(
                    "nothing happens any more: "
                    f"{[host.loading.busy() for host in self.hosts]}, "
                    f"{self.stream.behind()}"
                )

    def outcome(self) -> tuple[Any, ...]:
        """Return everything that was drawn and quarantined, and the error at the end."""
        ids = [i for s in self.steps for i in s.ids]
        bad = [b for s in self.steps for b in s.bad]
        before = np.array(self.stream.passed)
        bad += self.stream.last_failures()
        error = self.stream.error
        return (
            ids,
            bad,
            (self.passed + self.stream.passed - before).tolist(),
            f"{type(error).__name__}: {error}",
        )


def ids_of(pieces: list[StreamPiece]) -> list[tuple[int, ...]]:
    return [
        (p.at.epoch, int(p.found.file[i]), int(p.found.row[i]), int(p.found.part[i]))
        for p in pieces
        for i in range(p.start, p.stop)
    ]


def holders(pieces: list[StreamPiece]) -> list[int]:
    found = []
    for p in pieces:
        found += (
            [p.loader] * (p.stop - p.start)
            if isinstance(p.loader, int)
            else p.loader[p.start : p.stop].tolist()
        )
    return found


def payload_rows(pieces: list[Content]) -> list[bytes]:
    """Return each document's tokens and items as bytes."""
    rows = []
    for piece in pieces:
        first = None if piece.items is None else piece.items.first
        for i in range(len(piece)):
            tokens = np.asarray(piece.tokens[i]).astype(np.int64).tobytes()
            items = (
                b""
                if first is None or piece.items is None
                else b"|".join(
                    piece.items.bytes[j].tobytes() for j in range(int(first[i]), int(first[i + 1]))
                )
            )
            rows.append(tokens + b"/" + items)
    return rows
