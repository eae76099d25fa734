"""Queues of steps: ``StepQueue`` is the source of a client's steps, in any process."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from overlord.constructor.build import BucketBatch
from overlord.messages.client import StepInfo
from overlord.messages.control import EncodedState, StreamState

State = StreamState | EncodedState


class StepQueue(Protocol):
    """Steps on their way to one client, from this process or over a connection."""

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None: ...
    def end(self, error: BaseException | None, *, drop: bool = False) -> None: ...
    def ack(self, step: int) -> None:
        """Send an ack to the constructor: the trainer has the step."""

    def __len__(self) -> int: ...


Mark = tuple[StepQueue, State]


class LocalStepQueue:
    """Steps of one client, put by the event loop and taken by the thread of the trainer."""

    def __init__(self) -> None:
        self._steps: deque[tuple[StepInfo, BucketBatch]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None

    def put(self, info: StepInfo, bucket: BucketBatch) -> None:
        with self._changed:
            self._steps.append((info, bucket))
            self._changed.notify()

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        """End the stream after the steps that are queued; ``drop``: discard those too."""
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
        """Do nothing: the session counts the steps of clients in this process."""

    def __len__(self) -> int:
        return len(self._steps)

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None:
        """Return the next step, or None after the timeout.

        Raise StopIteration, or the error, at the end of the stream.
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
