"""The queue of a client in the launching process, whose constructor is in another process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from overlord.client.remote_queue import RemoteStepQueue
from overlord.client.sent_reports import ReportSender
from overlord.constructor.build import BucketBatch
from overlord.errors import OverlordError
from overlord.messages.control import Report, SentReport
from overlord.messages.data import StepInfo


class LaunchedStepQueue:
    """A ``RemoteStepQueue`` that connects when the first step is requested.

    ``where`` returns address and token of the constructor. ``siblings``: a shared list of the
    queues of all ranks of this process, which reconnect each other.
    """

    def __init__(
        self,
        rank: int,
        where: Callable[[], tuple[str, str]],
        *,
        next_step: int,
        generation: int,
        prefetch: int,
        sender: ReportSender,
        siblings: list[RemoteStepQueue],
    ):
        self._rank, self._where, self._next, self._generation, self._prefetch = (
            rank,
            where,
            next_step,
            generation,
            prefetch,
        )
        self._sender = sender
        self._remote: RemoteStepQueue | None = None
        self._over: BaseException | None = None
        self._siblings = siblings

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None:
        if self._over is not None:
            raise self._over
        return self._connected().get(timeout_s)

    def _connected(self) -> RemoteStepQueue:
        """Return the connected queue; connect at the first call, since the address may change."""
        if self._remote is None:
            self._remote = RemoteStepQueue(
                rank=self._rank,
                address="",
                token="",
                where=lambda generation: self._where(),
                next_step=self._next,
                generation=self._generation,
                prefetch=self._prefetch,
                sender=self._sender,
                siblings=lambda queue: list(self._siblings),
            )
            self._siblings.append(self._remote)
            if self._over is not None:  # another thread ended the queue meanwhile
                self._remote.end(self._over)
        return self._remote

    @property
    def connection_problem(self) -> str:
        """A description of the fault of the connection; empty while the connection works."""
        return "" if self._remote is None else self._remote.connection_problem

    def ack(self, step: int) -> None:
        if self._remote is not None:
            self._remote.ack(step)

    def report(self, report: Report, in_time: bool) -> None:
        if self._remote is not None:
            self._remote.report(report, in_time)
        else:  # of a loaded state: it is sent once the queue is connected
            self._sender.add(report, in_time)

    def reports(self) -> tuple[SentReport, ...]:
        return self._sender.kept()

    def put(self, info: StepInfo, bucket: BucketBatch) -> None:
        raise OverlordError(
            f"rank {self._rank}: expected steps from its constructor worker, got a step from this "
            "process; this is a bug: report it"
        )

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        self._over = error
        if self._remote is not None:
            with suppress(ValueError):
                self._siblings.remove(self._remote)
            self._remote.end(error, drop=drop)

    def __len__(self) -> int:
        return 0 if self._remote is None else len(self._remote)
