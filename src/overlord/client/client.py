"""The Client: what a trainer iterates. It holds prefetched steps and waits with a deadline that names its reason."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from overlord.client.step import Microbatch, Step
from overlord.constructor.builder import Bucket
from overlord.errors import DataStall, OverlordError
from overlord.messages import Stage, StreamState

log = logging.getLogger("overlord")


class Inbox:
    """Steps on their way to one client: filled by the pump, emptied by the trainer's thread."""

    def __init__(self) -> None:
        self._steps: deque[tuple[Stage, Bucket]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None

    def put(self, stage: Stage, bucket: Bucket) -> None:
        with self._changed:
            self._steps.append((stage, bucket))
            self._changed.notify()

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        """No step comes after those already here; with ``drop`` not even those."""
        with self._changed:
            self._ended, self._error = True, error
            if drop:
                self._steps.clear()
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._steps)

    def get(self, timeout_s: float) -> tuple[Stage, Bucket] | None:
        """The next step; None when the time is over; StopIteration, or the error, when there is none."""
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


class Client:
    """Iterates the Steps of one rank. Made by ``session.client(rank)``."""

    def __init__(
        self, rank: int, inbox: Inbox, *, begin: Callable[[], None], consumed: Callable[[Inbox, int], None], waiting_for: Callable[[], str],
        export: Callable[[Inbox, StreamState], dict[str, Any]],
        rewind: Callable[[Mapping[str, Any], tuple[str, ...]], tuple[Inbox, StreamState]],
        report: Callable[[Inbox, Any, Any, int], None], start: StreamState, close: Callable[[], None],
        stall_warn_s: float, stall_limit_s: float,
    ):  # fmt: skip
        self.rank, self._inbox, self._state = rank, inbox, start
        self._begin: Callable[[], None] | None = begin  # called before the first wait: demand starts the work
        self._consumed, self._waiting_for, self._export, self._rewind, self._close = consumed, waiting_for, export, rewind, close
        self._report = report
        self._warn_s, self._limit_s = stall_warn_s, stall_limit_s
        self._pid = os.getpid()
        self.waited_s = 0.0  # time the trainer spent waiting here
        self.steps = 0

    def __iter__(self) -> Client:
        return self

    def __next__(self) -> Step:
        self._refuse_fork()
        if self._begin is not None:
            self._begin()
            self._begin = None
        inbox = self._inbox
        stage, bucket = self._wait(inbox)
        if inbox is self._inbox:  # else the session was moved meanwhile, and this client with it
            self._state = stage.after
        self.steps += 1
        self._consumed(inbox, stage.plan.step)
        return Step(stage, bucket, self.rank)

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:  # the threads that fill the inbox stayed behind
            raise OverlordError(
                f"rank {self.rank}: the client was opened in process {self._pid} and this is process {os.getpid()}; a session does not "
                "survive a fork: launch it in the process that iterates"
            )

    def _wait(self, inbox: Inbox) -> tuple[Stage, Bucket]:
        start = time.monotonic()
        warned = False
        while True:
            waited = time.monotonic() - start
            got = inbox.get(max(0.0, min(self._warn_s, self._limit_s) - waited) if not warned else min(1.0, self._limit_s))
            if got is not None:
                self.waited_s += time.monotonic() - start
                return got
            waited = time.monotonic() - start
            if waited >= self._limit_s:
                raise DataStall(self._waiting_for(), waited, self._state.step, self.rank)
            if not warned and waited >= self._warn_s:
                warned = True
                log.warning("rank %d has waited %.0f s for step %d: %s", self.rank, waited, self._state.step, self._waiting_for())

    def microbatches(self) -> Iterator[Microbatch]:
        """All microbatches in a row, for trainers that pull them one by one."""
        for step in self:
            yield from step

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """What was measured in a step this rank was handed, for a mixture that learns: ``{"loss/web": 2.31, "tokens/web": 8192}``.

        Plan ``step + feedback_lag`` uses it; say it before asking for ``step + 2`` and it is in time. Values of several ranks
        are averaged, by ``tokens/<source>`` where given; of a rank's reports of one step the last counts. Returns at once.
        """
        self._refuse_fork()
        self._report(self._inbox, step, metrics, self._state.step)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: the stream behind the last step yielded. The same on every rank, valid on any mesh."""
        return self._export(self._inbox, self._state)

    def load_state_dict(self, state: Mapping[str, Any], allow: tuple[str, ...] = ()) -> None:
        """Go on from a saved state. The first rank to do so moves the session; the others must load the same state.
        ``allow`` names fingerprint parts that may differ."""
        self._inbox, self._state = self._rewind(state, allow)

    def close(self) -> None:
        """Leave: nobody waits for this rank any more."""
        self._close()
        self._inbox.end(OverlordError(f"the client of rank {self.rank} is closed"), drop=True)

    def __repr__(self) -> str:
        return f"Client(rank {self.rank}, next step {self._state.step}, {len(self._inbox)} steps ready, waited {self.waited_s:.2f} s)"
