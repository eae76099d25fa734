"""The queue of the steps that a constructor in another process sends.

On the same machine the thread of the trainer reads the steps, without another thread. Steps that
were sent stay readable when the constructor dies: descriptors are in the socket, bytes in shared
memory. The session sends the address of the restarted constructor, which sends the next steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from overlord.buffer_pool import BufferPool
from overlord.client.control_client import CONTROL_SERVER, reason_of
from overlord.client.sent_reports import ReportSender
from overlord.constructor.build import BucketBatch
from overlord.constructor.pack import BatchArrays
from overlord.errors import ActorLost, DataStall, FrameError, LinkRefused, OverlordError
from overlord.messages.control import EncodedState, Report, SentReport
from overlord.messages.data import EndOfStream, StepAck, StepInfo, StepMessage
from overlord.transport.address import address_text
from overlord.transport.connection import CLOSES, TIMEOUT, SocketConnection, open_connection

log = logging.getLogger("overlord")

DIAL_S = 5.0  # timeout of one attempt to connect
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # pauses between attempts to connect
WORKER_PREFIX = "constructor-worker/"  # prefix of names that only errors of the session have
# prefixes of processes that the session reports as lost only if they are not restarted
NOT_RESTARTED = (WORKER_PREFIX, "planner")
SHORT_PAUSE_S = 0.2  # pause between attempts while a constructor restarts, in about a second
EARLY_DIAL_S = 0.2  # timeout of an attempt while steps are ready, since it delays them
SIBLINGS_AFTER_S = 0.5  # wait for a step before other queues of this process are reconnected
# seconds without a message before the queue checks whether the constructor was replaced
CHECK_AFTER_S = 5.0
# Steps of which a trainer may keep views, in addition to ``prefetch``; further steps are copied.
SPARE_SLOTS = 8
# the fault of a queue whose constructor is not known yet
NO_ADDRESS = DataStall("the session to send its address", 0.0)


class RemoteStepQueue:
    """The ``StepQueue`` of a client whose constructor is in another process.

    ``where(generation)`` returns address and token of the constructor, or raises. The address may
    change after a loss. After a rewind there is none for ranks that have not loaded the state. With
    an empty ``address`` the first ``get`` requests it.

    One thread may take the steps of several ranks in turn. When their constructor is lost, the
    first rank without a step blocks, and ``get`` of the other ranks is no longer called. The new
    constructor would never receive their acks. So a queue that waits also reconnects its
    ``siblings``, the queues of the same session that the same thread reads.
    """

    def __init__(
        self,
        *,
        rank: int,
        address: str,
        token: str,
        where: Callable[[int], tuple[str, str]],
        next_step: int,
        generation: int = 0,
        prefetch: int = 4,
        sender: ReportSender | None = None,
        reconnect_s: float = 60.0,
        on_moved: Callable[[EncodedState], None] = lambda state: None,
        siblings: Callable[[RemoteStepQueue], Iterable[RemoteStepQueue]] = lambda queue: (),
        open_connection: Callable[..., tuple[Any, Any]] = open_connection,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._dial, self._now, self._sleep = (
            open_connection,
            now,
            sleep,
        )  # simulations replace these
        self.rank, self.generation, self.address = rank, generation, address
        self._token, self._where, self._next, self._on_moved = token, where, next_step, on_moved
        self._reconnect_s, self._max_held, self._siblings = (
            reconnect_s,
            prefetch + SPARE_SLOTS,
            siblings,
        )
        self._steps: deque[tuple[StepInfo, BucketBatch]] = deque()
        self._buffers = BufferPool()  # for arrays that the trainer expands
        self.taken = -1  # the last step that was acknowledged here; -1: none
        self._sender = sender or ReportSender(prefetch + 2)
        self._ack_lock = (
            threading.Lock()
        )  # held while acks and reports are sent: they stay in order
        # the connection of the last ack, and the last report that was sent on it
        self._acked_link: SocketConnection | None = None
        self._last_sent = 0
        # last step that an earlier client of this rank acked; sent to a restarted constructor
        self._acked_before = next_step - 1
        self._taking = generation  # generation of the last returned step
        self._ended = False
        self._error: BaseException | None = None
        self._lost_at: float | None = None  # when the connection broke; None while it works
        self._fault: BaseException | None = None
        self._loss_level = logging.NOTSET  # log level of the loss, and of the reconnection
        self._end_received = False  # the constructor ended the stream; it may withdraw that
        self._pause = FIRST_PAUSE_S
        self._tried_at: float | None = None  # when reconnection began
        self._linked_at = 0.0  # when the last connection was made
        self._retry_at = 0.0  # earliest time of the next attempt
        self._session_silent = False  # the session has not answered either since the loss
        self._waited_s = 0.0
        self._received_at = now()  # when the last message arrived
        self._changed = threading.Condition()  # shared with the reading thread, if there is one
        self.caller = (0, 0)  # process and thread of the last ``get``
        self._read_lock = threading.Lock()  # held by the reader: two readers would swap steps
        self._link: SocketConnection | None = None
        if address:
            self._connect(DIAL_S)
        else:
            self._lost_at, self._fault = now(), NO_ADDRESS

    # Methods of the client.

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None:
        """Return the next step, or None if none arrives within ``timeout_s``.

        At the end of the stream raise ``StopIteration``, or the error that ended it. Raise
        ``ActorLost`` if the constructor was not reached for ``reconnect_s``.
        """
        start, self.caller = self._now(), (os.getpid(), threading.get_ident())
        try:
            with self._read_lock:
                return self._get(start + timeout_s)
        finally:
            self._waited_s += self._now() - start

    def reconnect_idle(self) -> None:
        """Reconnect a lost queue while its trainer waits for a step of another rank.

        A restarted constructor needs the last ack of this rank. During ``get`` this does nothing.
        """
        if self._read_lock.acquire(blocking=False):
            try:
                self._drain()
                if self._link is None and not self._ended:
                    self._session_silent = False  # this attempt delays no ready step
                    self._reconnect_early()
            finally:
                self._read_lock.release()

    def _get(self, deadline: float) -> tuple[StepInfo, BucketBatch] | None:
        self._drain()
        while True:
            if self._link is None and (self._steps or self._ended):
                self._reconnect_early()
            if self._steps:
                info, bucket = self._steps[0]
                self._taking = self.generation
                self._next = info.step + 1  # before popleft: ``_wanted`` drops repeated steps by it
                self._steps.popleft()
                return info, bucket
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopIteration
            left = deadline - self._now()
            if left <= 0:
                return None
            self._wait(min(left, SIBLINGS_AFTER_S if self._other_queues() else CHECK_AFTER_S))
            self._check_replaced()
            self._reconnect_others()

    def _other_queues(self) -> list[RemoteStepQueue]:
        return [queue for queue in self._siblings(self) if queue is not self]

    def _reconnect_others(self) -> None:
        for queue in self._other_queues() if not self._steps else ():
            with contextlib.suppress(OverlordError):  # the next ``get`` of that queue raises it
                queue.reconnect_idle()

    def _check_replaced(self) -> None:
        """Detect a constructor that was replaced while its connection stayed open.

        A constructor that is stopped, or cut off from the network, keeps its connection and sends
        nothing.
        """
        if (
            (link := self._link) is None
            or self._steps
            or self._ended
            or self._now() - self._received_at < CHECK_AFTER_S
        ):
            return
        self._received_at = self._now()
        try:
            address, _ = self._where(self.generation)
        except OverlordError as fault:
            if isinstance(fault, ActorLost) and fault.name.startswith(NOT_RESTARTED):
                self._connection_lost(link, fault)
            return  # other faults appear on the connection, or at the next call
        if address != self.address:
            self._connection_lost(link, ActorLost(self._name, "the session started another one"))

    def ack(self, step: int) -> None:
        """Send an ack of the step; without a connection it is sent on reconnection."""
        self.taken = step
        if self._sender.used:
            self._sender.drop_passed(step)
        self._send_ack(step)

    def report(self, report: Report, in_time: bool) -> None:
        """Send a report with the last ack; without a connection it is sent on reconnection.

        It is kept, and sent again after a lost connection, while a plan or a state may need it.
        """
        self._sender.add(report, in_time)
        self._send_ack(self.taken)

    def reports(self) -> tuple[SentReport, ...]:
        """Return the kept reports."""
        return self._sender.kept()

    def _send_ack(self, step: int) -> None:
        """Send an ack, with the reports that were not sent on this connection yet."""
        with self._ack_lock:
            if (link := self._link) is None:
                return
            if link is not self._acked_link:
                self._acked_link, self._last_sent = link, 0
            reports = self._sender.kept(self._last_sent) if self._sender.used else ()
            if step < 0 and not reports:
                return
            # a rank that took no step of this generation reports on steps before it
            generation = self._taking if step >= 0 else self.generation
            with contextlib.suppress(ActorLost, DataStall):
                link.send(StepAck(step, self._waited_s, generation, reports), timeout_s=DIAL_S)
                if reports:
                    self._last_sent = reports[-1].number

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        """Close the queue locally; ``get`` then raises ``error``, or ``StopIteration`` for None.

        Steps that are ready are delivered first, unless ``drop`` discards them.
        """
        with self._changed:
            self._ended, self._error, self._end_received = True, error, False
            if drop:
                self._steps.clear()
            self._changed.notify_all()
        self._drop_link("the client is closed")

    def __len__(self) -> int:
        """Return the number of steps in this process.

        Steps in the socket are read first, unless another thread is reading.
        """
        if self._read_lock.acquire(blocking=False):
            try:
                with contextlib.suppress(OverlordError):
                    self._drain()
            finally:
                self._read_lock.release()
        return len(self._steps)

    @property
    def connection_problem(self) -> str:
        """A description of the fault of the connection; empty while the connection works."""
        if self._lost_at is None:
            return ""
        if isinstance(self._fault, DataStall):  # the session describes the remedy
            return self._fault.waiting_for
        return (
            f"{self._name} at {address_text(self.address)}, whose connection was lost "
            f"{self._now() - self._lost_at:.1f} s ago: {reason_of(self._fault)}"
        )

    # Reading of messages.

    @property
    def _threaded(self) -> bool:
        return self._link is not None and not self._link.shares_memory

    def _drain(self) -> None:
        """Read all messages that have arrived, without waiting."""
        while (
            not self._threaded
            and (link := self._link) is not None
            and self._read(link, 0.0) is not TIMEOUT
        ):
            pass

    def _wait(self, seconds: float) -> None:
        """Wait for a message; without a connection, wait for the next attempt or make it."""
        link = self._link
        if link is None:
            self._retry_connection(seconds)
        elif self._threaded:
            with self._changed:
                if not self._steps and not self._ended and self._link is link:
                    self._changed.wait(seconds)
        else:
            self._read(link, seconds, polled=True)

    def _read(self, link: SocketConnection, seconds: float, *, polled: bool = False) -> Any:
        try:
            value = link.recv(seconds, polled=polled)
            if value is not TIMEOUT:
                self._received_at = self._now()
                self._handle_message(value)
                self._reset_pauses()
            return value
        except (ActorLost, FrameError) as fault:
            self._connection_lost(link, fault)
            return TIMEOUT
        # Ctrl-C in the middle of a message: a new connection begins at the first missing step
        except BaseException as fault:
            self._connection_lost(link, fault)
            raise

    def _read_on(self, link: SocketConnection) -> None:
        """Read a TCP connection in a thread, so that prefetched steps arrive in this process."""
        while self._link is link:
            self._read(link, 1.0)

    def _handle_message(self, value: Any) -> None:
        with self._changed:
            if isinstance(value, StepMessage):
                if value.info.step >= self._wanted:  # otherwise the step arrived before the loss
                    n = int(value.bounds[-1]) if len(value.bounds) else 0
                    wide = BatchArrays.of_part(value.wide, value.rows) if value.wide else None
                    built = tuple(dict(arrays) for arrays in value.microbatches)
                    bucket = BucketBatch(
                        np.arange(n),
                        value.bounds,
                        wide,
                        built=built,
                        form=value.form,
                        allocate=self._buffers,
                    )
                    if value.encoder_rows is not None:
                        bucket = replace(
                            bucket,
                            encoder=BatchArrays.of_part(value.encoder, value.encoder_rows),
                            per=value.per,
                        )
                    self._steps.append((value.info, bucket))
            elif isinstance(value, EndOfStream):
                self._ended, self._error, self._end_received = True, value.error, True
            elif isinstance(value, dict) and "moved" in value:
                self.move(int(value["moved"]), value["after"])
            elif isinstance(value, dict) and "resumed" in value and self._end_received:
                self._ended, self._error, self._end_received = False, None, False
            self._changed.notify_all()

    def _reconnect_early(self) -> None:
        """Make at most one attempt to reconnect while steps are ready.

        If the session was rewound, these steps are obsolete. Otherwise a restarted constructor
        needs the last ack, or no step is planned beyond those in this process.
        """
        if self._session_silent or self._now() < self._retry_at:
            return
        self._retry_at = self._now() + LONGEST_PAUSE_S
        try:
            self.address, self._token = self._where(self.generation)
            if self._link is None and not self._ended:
                self._connect(EARLY_DIAL_S)
        except (ActorLost, DataStall) as fault:
            if _is_replaced(fault):
                self._fault, self._retry_at = fault, self._now() + FIRST_PAUSE_S
            # One attempt per loss: ready steps must not wait for a session that does not answer.
            self._session_silent = (
                fault.name == CONTROL_SERVER
                if isinstance(fault, ActorLost)
                else CONTROL_SERVER in fault.waiting_for
            )
        except OverlordError as fault:  # the next attempt, after the ready steps, raises it
            log.debug("rank %d: reconnection failed: %s", self.rank, fault)

    def move(self, generation: int, after: EncodedState) -> None:
        """Continue in a new generation, after the state ``after``; drop steps of the old one.

        The session calls it when it rewinds all its clients.
        """
        self._steps.clear()
        self._end_received, self._retry_at = False, 0.0
        # acks of the old generation do not apply to the new one
        goes_on = after.step == self.taken + 1  # on another mesh, from the step after the last one
        self._ended, self._error, self.taken = False, None, -1
        with self._ack_lock:
            if not goes_on:  # the state has the reports of the steps before it
                self._sender.clear()
            self._acked_link = None
        if self._link is None and self._lost_at is None:  # the stream had ended
            self._lost_at = self._now()
        self.generation, self._next, self._acked_before = generation, after.step, after.step - 1
        self._on_moved(after)

    # Connection to the constructor.

    @property
    def _wanted(self) -> int:
        """The first step that this process has not received."""
        return self._steps[-1][0].step + 1 if self._steps else self._next

    @property
    def _name(self) -> str:
        return f"the constructor of rank {self.rank}"

    def _connect(self, timeout_s: float) -> None:
        hello = {
            "role": "client",
            "rank": self.rank,
            "next": self._wanted,
            "generation": self.generation,
        }
        link, _ = self._dial(self.address, self._token, hello, timeout_s=timeout_s)
        link.max_held = self._max_held
        if self._loss_level and self._lost_at is not None:
            log.log(
                self._loss_level,
                "rank %d: reconnected to %s after %.1f s",
                self.rank,
                self._name,
                self._now() - self._lost_at,
            )
        self._loss_level = logging.NOTSET
        self._link, self._lost_at, self._fault, self._linked_at, self._session_silent = (
            link,
            None,
            None,
            self._now(),
            False,
        )
        self._pause_next()  # in case that this connection breaks at once
        self._send_ack(max(self.taken, self._acked_before))  # the acks of the interruption
        if not link.shares_memory:
            threading.Thread(
                target=self._read_on, args=(link,), name=f"overlord-reader-{self.rank}", daemon=True
            ).start()

    def _connection_lost(self, link: SocketConnection, fault: BaseException) -> None:
        with self._changed:
            if self._link is not link:
                return
            self._link = None
            if not self._ended:
                self._lost_at, self._fault = self._now(), fault
            # If a new connection breaks at once, the pauses and the deadline are kept.
            if self._now() - self._linked_at > LONGEST_PAUSE_S:
                self._reset_pauses()
            self._changed.notify_all()
        if not self._ended:
            self._log_loss(fault)
        link.close()

    def _log_loss(self, fault: BaseException) -> None:
        """Log the loss of the connection: a warning, or INFO if the session closed it in order."""
        level, reason = (
            logging.WARNING if isinstance(fault, Exception) else logging.DEBUG,
            str(fault),
        )
        if isinstance(fault, ActorLost) and fault.reason.endswith(CLOSES):
            level, reason = (
                logging.INFO,
                "connection closed by the session (rewind, reshard or end)",
            )
        self._loss_level = level
        log.log(
            level,
            "rank %d: connection to %s lost: %s; retrying for %.0f s",
            self.rank,
            self._name,
            reason,
            self._reconnect_s,
        )

    def _retry_connection(self, seconds: float) -> None:
        """Make one attempt to reconnect if it is due, else wait."""
        assert self._lost_at is not None
        # The limit counts from the first attempt: the trainer may have used ready steps for long.
        if self._tried_at is None:
            self._tried_at = self._now()
        gone = self._now() - self._tried_at
        if gone >= self._reconnect_s:
            self._give_up(gone)
        if (pause := self._retry_at - self._now()) > 0:
            self._sleep(min(pause, seconds, self._reconnect_s - gone))
            return
        try:
            self.address, self._token = self._where(self.generation)
            self._connect(max(0.1, min(DIAL_S, self._reconnect_s - gone)))
        except (ActorLost, DataStall) as fault:
            if isinstance(fault, ActorLost) and fault.name.startswith(NOT_RESTARTED):
                self.end(fault)
                return
            self._fault = fault
            self._pause_next(SHORT_PAUSE_S if _is_replaced(fault) else LONGEST_PAUSE_S)
        except LinkRefused as refused:
            if refused.reason != CLOSES:
                self.end(OverlordError(refused.reason))
                return
            # The session is being rewound, and will have the new address soon.
            self._fault = ActorLost(self._name, CLOSES)
            self._pause_next(SHORT_PAUSE_S)
        except OverlordError as over:  # the session was rewound or closed: no more steps
            self.end(over)

    def _pause_next(self, longest: float = LONGEST_PAUSE_S) -> None:
        self._retry_at = self._now() + min(self._pause, longest)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    def _reset_pauses(self) -> None:
        """Reset the pauses between attempts, since the connection works."""
        self._pause, self._tried_at, self._retry_at = FIRST_PAUSE_S, None, 0.0

    def _give_up(self, gone: float) -> NoReturn:
        fault, who = self._fault, address_text(self.address) or "it"
        either = (
            f" ({CONTROL_SERVER} could not be reached either)"
            if isinstance(fault, ActorLost) and fault.name == CONTROL_SERVER
            else ""
        )
        raise ActorLost(
            self._name,
            f"{who} could not be reached for {gone:.1f} s while step {self._next} was "
            f"expected: {reason_of(fault)}{either}",
        ) from fault

    def _drop_link(self, reason: str) -> None:
        with self._changed:
            link, self._link = self._link, None
        if link is not None:
            link.close(reason)


def _is_replaced(fault: Exception) -> bool:
    """Return whether a fault means that the session is restarting the constructor."""
    return isinstance(fault, DataStall) and fault.waiting_for.startswith(WORKER_PREFIX)
