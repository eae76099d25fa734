"""The process of some constructors: it gathers payload, builds microbatches into shared memory, and
hands them to clients.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from overlord.batch import Batch
from overlord.cluster.worker import Worker, WorkerConfig
from overlord.constructor.assembler import Assembler
from overlord.constructor.images import PixelForm
from overlord.constructor.payload_gather import PayloadGatherer, check_payload
from overlord.constructor.service import ConstructorService
from overlord.errors import OverlordError
from overlord.job.hooks import Hook
from overlord.messages.constructor import Build, Deliver, EndRank, Release, Unfinish
from overlord.messages.control import (
    Attach,
    ConstructorPlan,
    Detach,
    EndOfJob,
    Rollback,
    StepsAcked,
)
from overlord.messages.loader import StepPayload
from overlord.process.memory import pss_bytes
from overlord.serving.step_publisher import SharedBufferPool, StepPublisher
from overlord.transport.connection import Connection
from overlord.transport.server import Server

HEARD_S = 5.0  # for what clients have said to be read: longer than who asks waits at a time


class ConstructorWorker(Worker):
    """The constructors of some buckets, and the memory their clients read from."""

    def __init__(
        self,
        number: int,
        settings: WorkerConfig,
        buckets: Mapping[int, Sequence[int]],
        batch: Batch,
        multiple: int,
        hooks: Sequence[Hook],
        images: PixelForm | None = None,
    ):
        super().__init__(f"constructor-host/{number}", settings)
        self._ring = self._machine.ring(self.name, settings.ring_bytes)
        self._session = settings.generation
        # Building never waits for a slot: short work is done in the pump, and without the pump no
        # slot is let go.
        self._building = ConstructorService(
            [Assembler(b, ranks, settings.build_ahead) for b, ranks in buckets.items()],
            batch=batch,
            multiple=multiple,
            executor=self._executor,
            run=self.run,
            cannot=self._events.put,
            hooks=hooks,
            slabs=SharedBufferPool(self._ring),
            broadcast=settings.broadcast,
            images=images,
            spoiled=self._events.put,
            compact=True,
        )
        self._delivery = StepPublisher(took=self._heard)
        self._news, self._news_lock = (
            dict[int, int](),
            threading.Lock(),
        )  # what clients took and the pump has not seen yet
        for (
            rank
        ) in self._building.bucket_of:  # clients may come before the planner has told of them
            self._delivery.box(rank, settings.generation)
        self._gathering = PayloadGatherer(self._building, failover=settings.failover)
        self._loaders: dict[Connection, int] = {}
        self._incarnations: dict[int, int] = {}  # of loader hosts: the last that came
        self._taken: dict[int, int] = {}
        self._floor = (
            -1
        )  # the last step behind which a planner began, or went back to: all ranks have taken it
        self._behind = -1  # the one of this planner, which may know of less than the one before it
        self._told = -1  # the last step all took, as the planner knows
        self._said: dict[int, int] = {}  # and the last that each took
        self._servers = [self._serve(settings.token, **self._machine.inside())]
        self._start()

    def _serve(self, token: str, **where: Any) -> Server:
        return self._machine.serve(
            token, self._ring, self._message, self._opened, self._closed, **where
        )

    def listen(self, host: str, token: str) -> str:
        """Take clients of other processes at this interface, who show another token than ours;
        where they find it.
        """
        self._servers.append(self._serve(token, **self._machine.outside(host)))
        return self._servers[-1].address

    def address(self) -> str:
        return self._servers[0].address

    # links, in the server's thread

    def _opened(self, link: Connection, hello: Mapping[str, Any]) -> dict[str, Any]:
        if hello.get("role") == "loader":
            return self._loader_came(link, hello.get("host"), hello.get("incarnation", 0))
        return self._delivery.opened(link, dict(hello))

    def _loader_came(self, link: Connection, host: Any, incarnation: Any) -> dict[str, Any]:
        """One that comes again, or was started anew, takes the place of the link before it, whose
        end may not have been seen yet.
        """
        if type(host) is not int or host < 0 or type(incarnation) is not int or incarnation < 0:
            raise OverlordError(
                f"expected the number of a loader host, got {host!r:.60} and {incarnation!r:.60}"
            )
        if incarnation < self._incarnations.get(host, 0):
            raise OverlordError(
                "expected the number of a loader host that is not linked yet, got "
                f"{host}: a later one has its place"
            )
        former = next((other for other, h in self._loaders.items() if h == host), None)
        self._loaders[link], self._incarnations[host] = host, incarnation
        if former is not None:
            del self._loaders[former]
            former.close(f"loader-host/{host} has come again: its place is taken")
        self._pump.post(lambda: self._gathering.found(host))
        return {}

    def _message(self, link: Connection, value: Any) -> None:
        if (host := self._loaders.get(link)) is not None:
            if not isinstance(value, StepPayload):
                raise OverlordError(
                    f"expected payload of loader-host/{host}, got {type(value).__name__}"
                )
            check_payload(value, host)
            self._pump.post(lambda: self.run(self._gathering.payload(value)))
        else:
            self._delivery.message(link, value)

    def _closed(self, link: Connection, reason: str) -> None:
        host = self._loaders.pop(link, None)
        if host is None:
            self._delivery.closed(link, reason)
        else:
            self._pump.post(lambda: self.run(self._gathering.lost(host, reason)))

    def _heard(self, rank: int, step: int) -> None:
        """All ranks of a host take a step at about the same time: the pump is woken once for
        them.
        """
        with self._news_lock:
            woken = bool(self._news)
            self._news[rank] = step
        if not woken:
            self._pump.post(self._took)

    # what comes in, in the pump

    def _take(self, message: Any) -> None:
        match message:
            case ConstructorPlan():
                self.commands.queue.extend(self._gathering.plan(message))
            case Attach(rank=rank):
                if rank not in self._taken:
                    self._taken[rank] = self._floor
                    if self._floor > self._behind:
                        self._events.put(StepsAcked([rank], [self._floor]))
                self.commands.queue.extend(
                    self._building.attach({rank: self._delivery.box(rank, self._session)})
                )
                self.commands.queue.extend(self._building.consumed([rank], self._taken[rank]))
            case Detach(rank=rank):
                self._taken.pop(rank, None)
                self.commands.queue.extend(self._building.detach(rank))
                self._tell()
            case EndOfJob():  # what it lets go is gone before a step of that number comes again
                self.run(self._gathering.finish(message))
            case Rollback():
                self._back(message)
            case _:
                raise TypeError(f"a constructor host does not know {type(message).__name__}")

    def _back(self, back: Rollback) -> None:
        """The planner plans again behind a step that all have taken. If it is another one, it must
        hear what they took since.
        """
        self.run(self._gathering.back(back))
        self._floor, self._behind = max(back.step, self._floor), back.step
        self._delivery.begin_behind(self._floor)
        for rank, step in self._taken.items():
            self._taken[rank] = max(step, self._floor)
            self.run(self._building.consumed([rank], self._floor))
        self._told, self._said = self._behind, {}
        self._tell()

    def _took(self) -> None:
        with self._news_lock:
            news, self._news = self._news, {}
        commands: list[Any] = []
        for rank, step in news.items():
            if step > self._taken.get(rank, step):
                self._taken[rank] = step
                commands += self._building.consumed([rank], step)
        # What is let go comes first, so that its memory is used again; buckets of a step stand side
        # by side, and are built together.
        self.run(sorted(commands, key=lambda c: c.step if isinstance(c, Build) else -1))
        self._tell()

    def _tell(self) -> None:
        """The planner hears when the slowest has moved on: it plans for no one else."""
        slowest = min(self._taken.values(), default=-1)
        if slowest > self._told:
            self._told = slowest
            news = {
                rank: step for rank, step in self._taken.items() if step > self._said.get(rank, -1)
            }
            self._said |= news
            self._events.put(StepsAcked(list(news), list(news.values())))

    def _execute(self, command: Any) -> None:
        match command:
            case Build() | Deliver() | EndRank() | Unfinish() | Release():
                self._building.carry_out(command, self.commands.queue)
            case _:
                raise TypeError(f"a constructor host does not carry out {type(command).__name__}")

    def _after_turn(self) -> float | None:
        patience = super()._after_turn()
        for link in list(self._loaders):  # slots whose payload has been built into microbatches
            link.flush()
        return patience

    # what people ask

    def why(self, rank: int) -> str:
        """What the rank's next step waits for here, in words; empty when it is for a plan."""

        def say() -> str:
            return (
                ""
                if self._gathering.wants_plans
                else self._gathering.waiting() or self._building.waiting(rank)
            )

        return self._pump.ask(say, "the constructor host's pump", 1.0)

    def taken(self, rank: int) -> int:
        """The last step that the rank's client took; the planner hears of it when the slowest has.
        One that died may have said so in words that were not read yet, and whoever comes in its
        place would be told a step that is kept no longer.
        """
        for server in self._servers:
            server.caught_up(HEARD_S)
        return self._delivery.taken(rank)

    def gauge(self) -> list[tuple[int, float]]:
        """For scaling: how long the trainer of every rank has waited, in all."""
        return [
            (rank, float(row["waited_s"]))
            for rank, row in self._delivery.figures().items()
            if rank in self._taken
        ]

    def figures(self) -> dict[str, Any]:
        return self._pump.ask(
            lambda: {
                "pid": os.getpid(),
                "node": self._machine.node(),
                "pss": pss_bytes(),
                "constructors": self._building.figures(),
                "memory": self._building.held_bytes(),
                "clients": self._delivery.figures(),
                "links": len([link for server in self._servers for link in server.links]),
            },
            "the constructor host's pump",
            5.0,
        )

    def close(self) -> None:
        self._building.stopped = True
        super().close()
        for server in self._servers:
            server.close()
        self._ring.close()

    def check(self) -> None:
        self._building.check()
