"""The queue of a client in the process of its session."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from overlord.client.sent_reports import ReportSender
from overlord.constructor.build import BucketBatch
from overlord.messages.control import Report, SentReport
from overlord.messages.data import StepInfo


class LocalStepQueue:
    """The queue of one client, filled by the event loop and read by the thread of the trainer.

    ``on_report`` posts a report to the event loop, before later steps count as taken.
    """

    def __init__(self, on_report: Callable[[SentReport], None], sender: ReportSender) -> None:
        self._on_report, self._sender = on_report, sender
        self._steps: deque[tuple[StepInfo, BucketBatch]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None

    def put(self, info: StepInfo, bucket: BucketBatch) -> None:
        with self._changed:
            self._steps.append((info, bucket))
            self._changed.notify()

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        """End the stream after the queued steps, or with ``drop`` now, and discard them.

        ``get`` then raises ``error``; None: ``StopIteration``.
        """
        with self._changed:
            self._ended, self._error = True, error
            if drop:
                self._steps.clear()
            self._changed.notify_all()

    def resume(self) -> None:
        """Withdraw the end of the stream."""
        with self._changed:
            self._ended, self._error = False, None

    def ack(self, step: int) -> None:
        """Drop old reports. The session counts the steps of clients in this process."""
        if self._sender.used:
            self._sender.drop_passed(step)

    def report(self, report: Report, in_time: bool) -> None:
        self._on_report(self._sender.add(report, in_time))

    def reports(self) -> tuple[SentReport, ...]:
        return self._sender.kept()

    def __len__(self) -> int:
        return len(self._steps)

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None:
        """Return the next step, or None if none arrives within ``timeout_s``.

        At the end of the stream raise ``StopIteration``, or the error that ended it.
        """
        with self._changed:
            if not self._steps and not self._ended:
                self._changed.wait(timeout_s)
            if self._steps:
                return self._steps.popleft()
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopIteration
            return None
