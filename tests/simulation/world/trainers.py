"""Simulated trainers: the one part of the world that is a model. Their clients are the real
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from overlord.client.client import Step
from overlord.client.remote_queue import CHECK_AFTER_S, RemoteStepQueue
from overlord.client.sent_reports import ReportSender
from overlord.constructor.build import BucketBatch
from overlord.errors import ActorLost, DataStall, LinkRefused, OverlordError
from overlord.messages.control import EncodedState, Report, SentReport, StreamState
from overlord.messages.data import StepInfo
from tests.internals import connection_of
from tests.simulation.world.history import History, Seen
from tests.simulation.world.net import SimLink
from tests.simulation.world.virtual import SimMachine
from tests.simulation.world.world import Process

STEP_S = 0.03  # median of what a trainer computes between two steps
# one that is slow computes no longer: what it began would outlast the fault, and the wait for it be
# told as ours
MOST_S = 60.0
ASK_S = 1.0


class Seat(Protocol):
    """What a trainer needs of its job."""

    history: History
    session: int
    prefetch: int

    def where(self, rank: int, session: int) -> tuple[str, str]: ...
    def took(self, rank: int, step: int, after: StreamState | EncodedState) -> None: ...
    @property
    def feedback_lag(self) -> int: ...
    def next_client(self) -> int: ...
    def sent_report(self) -> None: ...
    def reports(self, rank: int, step: int) -> Report | None: ...
    def failed(self, rank: int, error: Exception) -> bool: ...
    def holds(self, step: int) -> bool: ...


class Trainer:
    """One rank: takes a step, computes, reports, takes the next. Restarted, it asks for the step it
    had not finished with.
    """

    def __init__(
        self,
        rank: int,
        machine: SimMachine,
        seat: Seat,
        next_step: int,
        kept: Sequence[SentReport] = (),
    ):
        """``kept``: what the trainer that crashed in its place left of its reports, as the session
        passes them on.
        """
        self._left = kept
        self.rank, self._machine, self._seat, self._next = rank, machine, seat, next_step
        self.process: Process = machine.process
        self.session = seat.session
        self.slow, self.ended, self.gone, self.stopped = 1.0, False, False, False
        self.crash_with_step = (
            False  # the next step is handed to it, and it dies before it can say so
        )
        seat.history.add(machine.now(), "begin", rank=rank, step=next_step, session=self.session)
        self._box: RemoteStepQueue | None = None
        self._kept: tuple[StepInfo, BucketBatch] | None = (
            None  # it came, and nobody takes a step just now
        )
        machine.thread(self._wait, f"trainer-{rank}")

    # Steps that are there are taken as they come; only where one must wait with patience (to
    # connect, to look for another constructor) a
    # fiber does so, since switching to one costs more than all the rest.

    def _wait(self) -> None:
        """In a fiber: until there is a step, or a link by which it will come."""
        try:
            if self._box is None:
                self._box = self._connected()
                for step in range(
                    max(0, self._next - 2), self._next
                ):  # what it may have had no time to say
                    self._report(step)
            while True:
                got = self._box.get(ASK_S)
                if got is not None or connection_of(self._box) is not None:
                    return self._go_on(got)
        except (StopIteration, OverlordError) as end:
            self._end(end)

    def _look(self) -> None:
        """Take the step that is there, or wait for one."""
        box = self._box
        assert box is not None
        try:
            self._go_on(box.get(0.0))
        except (StopIteration, OverlordError) as end:
            self._end(end)

    def _go_on(self, got: tuple[StepInfo, BucketBatch] | None) -> None:
        box, world = self._box, self._machine.world
        assert box is not None
        if got is not None and self._seat.holds(got[0].step):
            self._kept = got
            return
        if got is not None:
            self._take(box, *got)
            return
        link, turn = connection_of(box), [True]

        def again(look: Callable[[], None]) -> None:
            if turn:
                turn.clear()
                look()

        if isinstance(link, SimLink):
            link.on_word(lambda: world.at(0.0, lambda: again(self._look), self.process))
            world.at(
                CHECK_AFTER_S + 0.1,
                lambda: again(lambda: self._machine.thread(self._wait, "")),
                self.process,
            )
        else:
            self._machine.thread(self._wait, "")

    def release(self) -> None:
        """Steps are taken again."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self._machine.world.at(0.0, lambda: self._go_on(kept), self.process)

    def _take(self, box: RemoteStepQueue, told: StepInfo, bucket: BucketBatch) -> None:
        seat, now, step = self._seat, self._machine.now(), told.step
        seen = Seen.of(Step(told, bucket, self.rank))
        seat.history.add(now, "deliver", rank=self.rank, step=step, session=self.session, seen=seen)
        if self.crash_with_step:
            self.process.kill()
            return
        box.ack(step)
        seat.history.add(now, "took", rank=self.rank, step=step, session=self.session)
        seat.took(self.rank, step, told.after)
        world = self._machine.world
        world.at(
            min(MOST_S, world.delay(STEP_S) * self.slow), lambda: self._computed(step), self.process
        )

    def _computed(self, step: int) -> None:
        self._report(step)
        self._look()

    def _report(self, step: int) -> None:
        if (report := self._seat.reports(self.rank, step)) is not None:
            self.report(report, in_time=True)

    @property
    def kept_reports(self) -> Sequence[SentReport]:
        return self._left if self._box is None else self._box.reports()

    def report(self, report: Report, *, in_time: bool) -> None:
        if self._box is not None and self.process.alive:
            self._seat.sent_report()
            self._box.report(report, in_time)

    def _end(self, end: BaseException) -> None:
        self.ended = True
        if isinstance(end, OverlordError):
            self.stopped = self._seat.failed(self.rank, end)
        else:
            self._seat.history.add(self._machine.now(), "end", rank=self.rank, session=self.session)

    @property
    def over(self) -> bool:
        """For good: it has all, or an error that ends the job."""
        return self.ended and not self.stopped

    def _sender(self) -> ReportSender:
        sender = ReportSender(self._seat.feedback_lag, self._seat.next_client())
        for sent in self._left:
            self._seat.sent_report()
            sender.add(sent.report, sent.in_time)
        return sender

    def _connected(self) -> RemoteStepQueue:
        """As long as nobody is there a trainer waits, as one does that the scheduler started too
        early.
        """
        while True:
            try:
                address, token = self._seat.where(self.rank, self.session)
                return RemoteStepQueue(
                    rank=self.rank,
                    address=address,
                    token=token,
                    where=lambda session: self._seat.where(self.rank, session),
                    next_step=self._next,
                    generation=self.session,
                    prefetch=self._seat.prefetch,
                    sender=self._sender(),
                    open_connection=self._machine.open_connection,
                    now=self._machine.now,
                    sleep=self._machine.sleep,
                )
            except (ActorLost, DataStall):
                self._machine.sleep(0.2)
            except LinkRefused as refused:
                raise OverlordError(refused.reason) from refused
