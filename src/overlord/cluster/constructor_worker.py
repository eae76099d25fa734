"""The process that runs some of a job's constructors.

It gathers payload, builds microbatches in shared memory, and sends them to clients.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from overlord.batch_by_step import BatchByStep
from overlord.client.sent_reports import KeptReports
from overlord.cluster.worker import Worker, WorkerConfig
from overlord.constructor.assembler import Assembler
from overlord.constructor.images import PixelForm
from overlord.constructor.payload_gather import PayloadGatherer, check_payload
from overlord.constructor.service import ConstructorService
from overlord.errors import OverlordError
from overlord.job.hooks import Hook
from overlord.mesh import Batch
from overlord.messages.control import (
    Attach,
    ConstructorPlan,
    Detach,
    EndOfJob,
    Rollback,
    SentReport,
    StepsAcked,
)
from overlord.messages.data import Build, Deliver, EndRank, RankWait, Release, StepPayload, Unfinish
from overlord.serving.step_publisher import SharedBufferPool, StepPublisher
from overlord.transport.connection import Connection
from overlord.transport.server import Server

READ_ACKS_S = 5.0  # for a server to read received acknowledgements; callers wait no longer


class ConstructorWorker(Worker):
    """The constructors of some buckets, and the shared memory that their clients read."""

    def __init__(
        self,
        number: int,
        settings: WorkerConfig,
        buckets: Mapping[int, Sequence[int]],
        batch: Batch | BatchByStep,
        multiple: int,
        hooks: Sequence[Hook],
        images: PixelForm | None = None,
    ):
        super().__init__(f"constructor-worker/{number}", settings)
        self._pool = self._platform.memory_pool(self.name, settings.ring_bytes)
        self._session = settings.generation
        # Building never waits for a segment: short work runs on the event loop, and only the loop
        # releases segments.
        slabs = SharedBufferPool(self._pool)
        self._building = ConstructorService(
            [Assembler(b, ranks, settings.build_ahead) for b, ranks in buckets.items()],
            batch=batch,
            multiple=multiple,
            executor=self._executor,
            run=self.run,
            cannot=self._events.put,
            hooks=hooks,
            slabs=slabs,
            broadcast=settings.broadcast,
            images=images,
            spoiled=self._events.put,
            compact=True,
        )
        self._delivery = StepPublisher(
            on_taken=self._acked,
            on_reports=lambda queue, sent: self._reports_received(sent),
            shared=slabs,
        )
        # acknowledgements, by rank, and reports that the event loop has not handled yet
        self._acks, self._acks_lock = dict[int, int](), threading.Lock()
        self._received: list[SentReport] = []
        # by rank: a coordinator that takes over may lack the last ones
        self._reports: dict[int, KeptReports] = defaultdict(
            lambda: KeptReports(settings.feedback_lag)
        )
        for rank in self._building.bucket_of:  # clients may connect before they are attached
            self._delivery.queue(rank, settings.generation)
        self._gathering = PayloadGatherer(self._building, failover=settings.failover)
        self._loaders: dict[Connection, int] = {}
        self._incarnations: dict[int, int] = {}  # highest one of each connected loader worker
        self._taken: dict[int, int] = {}  # rank -> the last step that its client took
        # the highest step of all rollbacks, of this coordinator and earlier ones: all ranks took it
        self._floor = -1
        # step of the last rollback; that of a coordinator that takes over may be below ``_floor``
        self._rolled_back_to = -1
        self._generation = 0  # of the last rollback
        self._reported = -1  # last step that was reported to the coordinator as taken by all ranks
        self._acks_sent: dict[int, int] = {}  # rank -> last step that was reported for it
        self._servers = [self._serve(settings.token, **self._platform.inside())]
        self._start()

    def _serve(self, token: str, **where: Any) -> Server:
        return self._platform.serve(
            token, self._pool, self._message, self._opened, self._closed, **where
        )

    def listen(self, interface: str, token: str) -> str:
        """Accept clients of other processes, which present ``token``; return the address."""
        self._servers.append(self._serve(token, **self._platform.outside(interface)))
        return self._servers[-1].address

    def address(self) -> str:
        return self._servers[0].address

    # connections, on the server thread

    def _opened(self, link: Connection, hello: Mapping[str, Any]) -> dict[str, Any]:
        if hello.get("role") == "loader":
            return self._loader_connected(link, hello.get("host"), hello.get("incarnation", 0))
        return self._delivery.opened(link, dict(hello))

    def _loader_connected(self, link: Connection, worker: Any, incarnation: Any) -> dict[str, Any]:
        """Register the connection of a loader worker, and close its former one.

        The end of the former connection may not have been detected yet. Refuse an incarnation
        older than the last one.
        """
        if type(worker) is not int or worker < 0 or type(incarnation) is not int or incarnation < 0:
            raise OverlordError(
                f"{self.name}: expected the number and incarnation of a loader worker, got "
                f"{worker!r:.60} and {incarnation!r:.60}; run the same version in all processes"
            )
        is_known = worker in self._incarnations
        if incarnation < (last := self._incarnations.get(worker, 0)):
            raise OverlordError(
                f"{self.name}: expected incarnation {last} or later of loader-worker/{worker}, got "
                f"{incarnation}; stop the process of incarnation {incarnation}: it was replaced"
            )
        former = next((other for other, h in self._loaders.items() if h == worker), None)
        self._loaders[link], self._incarnations[worker] = worker, incarnation
        if former is not None:
            del self._loaders[former]
            former.close(f"loader-worker/{worker} reconnected, and this connection was replaced")
        if is_known:  # it may have been lost meanwhile
            self._event_loop.post(lambda: self._gathering.found(worker))
        return {}

    def _message(self, link: Connection, value: Any) -> None:
        if (worker := self._loaders.get(link)) is not None:
            if not isinstance(value, StepPayload):
                raise OverlordError(
                    f"{self.name}: expected a StepPayload of loader-worker/{worker}, got "
                    f"{type(value).__name__}; run the same version in all processes"
                )
            check_payload(value, worker)
            self._event_loop.post(lambda: self.run(self._gathering.payload(value)))
        else:
            self._delivery.message(link, value)

    def _closed(self, link: Connection, reason: str) -> None:
        worker = self._loaders.pop(link, None)
        if worker is None:
            self._delivery.closed(link, reason)
        else:
            self._event_loop.post(lambda: self.run(self._gathering.lost(worker, reason)))

    def _acked(self, rank: int, step: int) -> None:
        """Record an acknowledgement. Runs on: server thread.

        All ranks take a step at about the same time, so the event loop is woken once for them.
        """
        with self._acks_lock:
            woken = bool(self._acks or self._received)
            self._acks[rank] = step
        if not woken:
            self._event_loop.post(self._apply_acks)

    def _reports_received(self, sent: Sequence[SentReport]) -> None:
        """Record the reports of a client. Runs on: server thread."""
        with self._acks_lock:
            woken = bool(self._acks or self._received)
            self._received += sent
        if not woken:
            self._event_loop.post(self._apply_acks)

    # messages, on the event loop

    def _take(self, message: Any) -> None:
        match message:
            case ConstructorPlan():
                self.commands.queue.extend(self._gathering.plan(message))
            case Attach(rank=rank):
                if rank not in self._taken:
                    self._taken[rank] = self._floor
                    if self._floor > self._rolled_back_to:
                        self._events.put(
                            StepsAcked([rank], [self._floor], generation=self._generation)
                        )
                self.commands.queue.extend(
                    self._building.attach({rank: self._delivery.queue(rank, self._session)})
                )
                self.commands.queue.extend(self._building.consumed([rank], self._taken[rank]))
            case Detach(rank=rank):
                self._taken.pop(rank, None)
                self.commands.queue.extend(self._building.detach(rank))
                self._report_acks()
            case EndOfJob():  # not queued: memory is released before the step may be repeated
                self.run(self._gathering.finish(message))
            case Rollback():
                self._roll_back(message)
            case _:
                raise TypeError(
                    f"{self.name}: expected a message to a constructor worker, got "
                    f"{type(message).__name__}; this is a bug in Overlord: report it"
                )

    def _roll_back(self, rollback: Rollback) -> None:
        """Roll back to a step that all ranks have taken.

        A coordinator that takes over may roll back to an earlier step than the ranks have taken.
        So the last steps and reports of the ranks are sent again.
        """
        self.run(self._gathering.rollback(rollback))
        self._generation = rollback.generation
        self._floor, self._rolled_back_to = max(rollback.step, self._floor), rollback.step
        self._delivery.begin_after(self._floor)
        for rank, step in self._taken.items():
            self._taken[rank] = max(step, self._floor)
            self.run(self._building.consumed([rank], self._floor))
        self._reported, self._acks_sent = self._rolled_back_to, {}
        self._report_acks([sent for kept in self._reports.values() for sent in kept.after()])

    def _apply_acks(self) -> None:
        """Pass new acknowledgements to the constructors, and report them."""
        with self._acks_lock:
            acks, self._acks = self._acks, {}
            reports, self._received = self._received, []
        for sent in reports:
            self._reports[sent.report.rank].add(sent)
        commands: list[Any] = []
        for rank, step in acks.items():
            if step > self._taken.get(rank, step):
                self._taken[rank] = step
                commands += self._building.consumed([rank], step)
                if rank in self._reports:
                    self._reports[rank].drop_passed(step)
        # Release before building, so that memory is reused. The sort makes the buckets of a step
        # adjacent, so that they are built together.
        self.run(sorted(commands, key=lambda c: c.step if isinstance(c, Build) else -1))
        self._report_acks(reports)

    def _report_acks(self, reports: Sequence[SentReport] = ()) -> None:
        """Send acknowledgements when the slowest rank takes a step, and reports at once.

        Only an acknowledgement of the slowest rank has a plan as a consequence. A report is never
        sent after the acknowledgements that it arrived with.
        """
        slowest, acks = min(self._taken.values(), default=-1), dict[int, int]()
        if slowest > self._reported:
            self._reported = slowest
            acks = {
                rank: step
                for rank, step in self._taken.items()
                if step > self._acks_sent.get(rank, -1)
            }
            self._acks_sent |= acks
        if acks or reports:
            self._events.put(
                StepsAcked(list(acks), list(acks.values()), list(reports), self._generation)
            )

    def _execute(self, command: Any) -> None:
        match command:
            case Build() | Deliver() | EndRank() | Unfinish() | Release():
                self._building.execute(command, self.commands.queue)
            case _:
                raise TypeError(
                    f"{self.name}: expected a constructor command, got {type(command).__name__}; "
                    "this is a bug in Overlord: report it"
                )

    def _after_turn(self) -> float | None:
        wait_s = super()._after_turn()
        for link in list(self._loaders):  # release segments whose payload is built
            link.flush()
        return wait_s

    # status

    def waiting_for(self, rank: int) -> str:
        """Describe what a rank's next step waits for in this process; empty if it needs a plan."""

        def describe() -> str:
            return (
                ""
                if self._gathering.wants_plans
                else self._gathering.waiting() or self._building.waiting(rank)
            )

        return self._event_loop.call(describe, "the constructor worker's event loop", 1.0)

    def taken(self, rank: int) -> int:
        """Return the last step that a rank's client took; -1 before the first.

        All received acknowledgements are read first, also those of a client that died. Otherwise
        the next client of the rank could request a step that is not kept any more.
        """
        for server in self._servers:
            server.caught_up(READ_ACKS_S)
        return self._delivery.taken(rank)

    def reports(self) -> list[SentReport]:
        """Return the kept reports of all ranks, with those that have just arrived."""
        for server in self._servers:
            server.caught_up(READ_ACKS_S)

        def kept() -> list[SentReport]:
            self._apply_acks()
            return [sent for kept in self._reports.values() for sent in kept.after()]

        return self._event_loop.call(kept, "the constructor worker's event loop", READ_ACKS_S)

    def work(self) -> list[RankWait]:
        """Return the seconds that the trainer of each attached rank has waited, for autoscaling."""
        return [
            RankWait(rank, float(row["waited_s"]))
            for rank, row in self._delivery.metrics().items()
            if rank in self._taken
        ]

    def metrics(self) -> dict[str, Any]:
        """Return the process, memory, constructors and clients of this worker as plain values."""
        return self._event_loop.call(
            lambda: {
                "pid": os.getpid(),
                "node": self._platform.node(),
                "pss": self._platform.pss_bytes(),
                "constructors": self._building.figures(),
                "memory": self._building.held_bytes(),
                "clients": self._delivery.metrics(),
                "links": len([link for server in self._servers for link in server.links]),
            },
            "the constructor worker's event loop",
            5.0,
        )

    def close(self) -> None:
        self._building.stopped = True
        super().close()
        for server in self._servers:
            server.close()
        self._pool.close()

    def check(self) -> None:
        self._building.check()
