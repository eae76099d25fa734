"""Delivery of steps to clients in other processes; a step is kept until its client acked it.

Steps are pushed as soon as they are built; the prefetch window bounds their number. A client that
reconnects sends the step it expects next, and receives everything from there on. So a lost
connection loses nothing and repeats nothing.

A restarted process rebuilds steps that a client received from the process that died. They are kept
too: if that client dies, the next client of its rank receives all steps that it had not taken.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from overlord.buffer_pool import BufferPool
from overlord.client.client import State
from overlord.constructor.build import BucketBatch
from overlord.constructor.service import RankQueue
from overlord.errors import ActorLost, DataStall, FrameError, OverlordError
from overlord.messages.control import EncodedState, Report, SentReport
from overlord.messages.data import EndOfStream, StepAck, StepInfo, StepMessage
from overlord.transport.codec import encode_state
from overlord.transport.connection import Connection
from overlord.transport.server_connection import ServerConnection
from overlord.transport.shared_memory import SharedMemoryPool

log = logging.getLogger("overlord")

MOVED = "another rank rewound the session to a saved state; load the same state on this rank"
UNBOUNDED = 2**62
KEPT_STATES = 16  # encoded states of recent steps, which ranks of several buckets receive
# Below this, a copy in the message of each rank costs less than a reference.
SHARED_STATE_BYTES = 2**14


def encoded(state: State) -> EncodedState:
    return state if isinstance(state, EncodedState) else encode_state(state)


class SharedBufferPool:
    """Memory for microbatches that clients map.

    While clients use all of it, the pool returns private memory of this process, and does not
    block. Arrays in private memory are copied when they are sent.
    """

    def __init__(self, pool: SharedMemoryPool):
        self._pool, self._more = pool, BufferPool(min(2**30, pool.max_bytes))

    def __call__(self, nbytes: int) -> np.ndarray:
        found = self._pool.take(nbytes) if nbytes <= self._pool.max_bytes else None
        return self._more(nbytes) if found is None else found

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes + self._more.nbytes

    def close(self) -> None:
        self._more.close()


class PublishedQueue:
    """The steps of one rank that its client has not acked.

    ``put`` and ``end`` run on the event loop and never block. ``former``: the queue of the same
    rank in the previous generation.
    """

    def __init__(
        self,
        delivery: StepPublisher,
        rank: int,
        generation: int | None,
        former: PublishedQueue | None = None,
    ):
        self.rank, self.generation, self.former = rank, generation, former
        if former is not None:
            former.retire()
        self._delivery = delivery
        self._steps: deque[tuple[StepInfo, BucketBatch, StepMessage]] = deque()  # not acked yet
        self._put = self._taken = -1  # last step that was put, and last step that its client took
        self._next = 0  # first step that the client does not have, as it reported
        # last step that the client took from an earlier process; accepted once it is rebuilt here
        self._claimed = -1
        self.waited_s = 0.0  # seconds that the trainer has waited for steps, as the client reported
        self.steps = 0  # number of steps that the client took
        self._ended: EndOfStream | None = None
        self._link: Connection | None = None
        # the queue of a client in this process that took the rank over
        self._inside: RankQueue | None = None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def finished(self) -> bool:
        """Whether the stream has ended and all steps were taken."""
        return self._ended is not None and not self._steps

    def put(self, info: StepInfo, bucket: BucketBatch) -> None:
        with self._delivery.lock:
            if self._inside is not None:
                self._inside.put(info, bucket)
                return
            if info.step <= max(self._put, self._taken):
                return
            self._put = info.step
            if claimed := info.step <= self._claimed:
                self._taken = info.step
            else:
                message = self._delivery.message_of(info, bucket)
                self._steps.append((info, bucket, message))
                if info.step >= self._next:
                    self._send(message)
        if claimed:
            self._delivery.acked(self, info.step)

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        with self._delivery.lock:
            if self._inside is not None:
                self._inside.end(error)  # type: ignore[arg-type]
                return
            if drop:
                self._steps.clear()
            if self._ended is None or error is not None:
                self._ended = EndOfStream(
                    error
                    if error is None or isinstance(error, Exception)
                    else ActorLost("the event loop", repr(error))
                )
                self._send(self._ended)

    def resume(self) -> None:
        """Withdraw the end of the stream, and notify the client."""
        with self._delivery.lock:
            if self._inside is not None:
                self._inside.resume()
            elif self._ended is not None:
                self._ended = None
                self._send({"resumed": True})

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None:
        raise OverlordError(
            f"rank {self.rank}: expected a client of this process, got one of another process; "
            "this is a bug in Overlord: report it"
        )

    def _send(self, value: Any) -> None:
        """Send without blocking; drop a connection that is full. The caller holds the lock."""
        if self._link is None:
            return
        try:
            self._link.send(value, timeout_s=0.0)
        except ActorLost as lost:  # the server still reads acks before the end of the connection
            log.debug("rank %d: message not sent: %s", self.rank, lost)
        except DataStall as stall:
            log.debug("rank %d: connection dropped: %s", self.rank, stall)
            link, self._link = self._link, None
            link.close()
        except FrameError as fault:  # a hook built an array that cannot be sent
            self._ended = EndOfStream(fault)
            self._send(self._ended)

    # messages of the client

    def connect(self, link: Connection, next_step: int) -> None:
        """Send all steps from ``next_step`` on to ``link``, which replaces a former connection.

        Raise if ``next_step`` is not kept any more. The caller holds the lock.
        """
        if next_step <= self._taken:
            raise OverlordError(
                f"rank {self.rank}: expected a request for step {self._taken + 1} or later, got "
                f"step {next_step}, which was taken and is not kept; "
                "load a saved state on every rank"
            )
        if isinstance(link, ServerConnection):
            # the prefetch window bounds it, and the event loop must not wait for a slow client
            link.max_queued_bytes = UNBOUNDED
        former, self._link, self._next, self._claimed = self._link, link, next_step, -1
        if former is not None:
            words = (
                f"rank {self.rank}: another client of this rank connected, and this one was "
                "disconnected; run one client per rank"
            )
            self._delivery.dismiss(former, EndOfStream(OverlordError(words)))
        self.send_from(next_step)

    def send_from(self, next_step: int) -> None:
        """Send the kept steps from ``next_step`` on. The caller holds the lock."""
        for info, _, message in list(self._steps):
            if info.step >= next_step:
                self._send(message)
        if self._ended is not None:
            self._send(self._ended)

    def accepts(self, link: Connection, generation: int | None) -> bool:
        """Return whether an ack is of the current connection and generation."""
        return generation in (None, self.generation) and link is self._link

    def handle_ack(self, step: int, waited_s: float) -> int | None:
        """Free the steps up to an acked one; return the acked step, or None if the ack is ignored.

        An ack is ignored if it is not new, or of a step that was never sent. If the client received
        that step from an earlier process, the ack counts up to the last step built here. The caller
        holds the lock.
        """
        if self._put < step < self._next:
            self._claimed, step = max(step, self._claimed), self._put
        if not self._taken < step <= self._put:
            return None
        self._taken, self.waited_s = step, waited_s
        self._drop_taken()
        return step

    def _drop_taken(self) -> None:
        while self._steps and self._steps[0][0].step <= self._taken:
            self.steps += 1
            self._delivery.release(self._steps.popleft()[1])

    def begin_after(self, step: int) -> None:
        """Count all steps up to ``step`` as taken: the planner was rolled back to it.

        A restarted process does not have these steps. The caller holds the lock.
        """
        self._taken, self._put = max(step, self._taken), max(step, self._put)
        self._drop_taken()

    def disconnect(self, link: Connection) -> None:
        if link is self._link:
            self._link = None

    def release_link(self) -> Connection | None:
        """Detach the connection, and return it. The caller holds the lock."""
        link, self._link = self._link, None
        return link

    def adopt(self, link: Connection, state: State) -> None:
        """Continue a connection of the old generation at ``state``. The caller holds the lock."""
        self._link = link
        self._send({"moved": self.generation, "after": encoded(state)})
        self.send_from(state.step)

    def ack(self, step: int) -> None:
        """Do nothing: the client sends its acks over its connection."""

    def report(self, report: Report, in_time: bool) -> None:
        """Do nothing: the client sends its reports over its connection."""

    def reports(self) -> tuple[SentReport, ...]:
        """Return nothing: the runtime has the reports that arrived."""
        return ()

    @property
    def taken(self) -> int:
        """The last step that the client took; -1 before the first."""
        return self._taken

    def metrics(self) -> dict[str, Any]:
        return {
            "connected": self._link is not None,
            "kept": len(self),
            "took": self._taken,
            "steps": self.steps,
            "waited_s": self.waited_s,
        }

    def retire(self) -> None:
        """Free all steps: the generation is over. The caller holds the lock."""
        self.former = None
        for _, bucket, _ in self._steps:
            self._delivery.release(bucket)
        self._steps.clear()

    def hand_over(self, inside: RankQueue) -> None:
        """Pass all kept steps, and all later ones, to the queue of a client in this process."""
        with self._delivery.lock:
            for info, bucket, _ in self._steps:
                inside.put(info, bucket)
                self._delivery.release(bucket)
            self._steps.clear()
            if self._ended is not None:
                inside.end(self._ended.error)
            self._inside = inside
            self._delivery.forget(self.rank)


class StepPublisher:
    """The queues of all ranks that this process serves, and the callbacks of its server."""

    def __init__(
        self,
        *,
        on_taken: Callable[[int, int], None],
        on_reports: Callable[[PublishedQueue, Sequence[SentReport]], None],
        welcome: Callable[[int], dict[str, Any]] = lambda rank: {},
        shared: Callable[[int], np.ndarray] | None = None,
    ):
        """``shared`` allocates memory that clients map, if there is any."""
        # held briefly: ``put`` runs on the event loop, callbacks on the server thread
        self.lock = threading.RLock()
        self._on_taken, self._on_reports, self._welcome = on_taken, on_reports, welcome
        # called instead of ``on_taken``, if a session has queues of several generations
        self.on_ack: Callable[[PublishedQueue, int], None] | None = None
        self._queues: dict[int, PublishedQueue] = {}
        self._of_link: dict[Connection, PublishedQueue] = {}
        # by identity of the bucket; the last element counts the queues that keep it
        self._made: dict[int, tuple[BucketBatch, StepMessage, list[int]]] = {}
        # the last step and the identities of its buckets: other ranks may receive the same ones
        self._latest: tuple[int, set[int]] = (-1, set())
        self._encoded_infos: dict[int, tuple[State, StepInfo]] = {}
        self._shared = shared
        self.n_made = 0

    def queue(self, rank: int, generation: int | None = None) -> PublishedQueue:
        """Return the queue of a rank; a new one for a new generation of the session.

        Connections of the old generation receive nothing from it. ``generation`` None: there is
        only one, since a worker process does not outlive a generation.
        """
        with self.lock:
            queue = self._queues.get(rank)
            if queue is None or queue.generation != generation:
                queue = self._queues[rank] = PublishedQueue(self, rank, generation, queue)
            return queue

    def forget(self, rank: int, why: str = "") -> None:
        """Close the connection of a rank that takes no more steps from here."""
        with self.lock:
            queue = self._queues.pop(rank, None)
            if queue is not None and (link := queue.release_link()) is not None:
                words = why or f"the client of rank {rank} is closed"
                self.dismiss(link, EndOfStream(OverlordError(words)))

    def move_connection(self, rank: int, state: State) -> None:
        """Continue an open connection of the old generation in the new one, at ``state``.

        The whole session was rewound, with its clients.
        """
        with self.lock:
            queue = self._queues.get(rank)
            if queue is None or queue.former is None:
                return
            if (link := queue.former.release_link()) is not None:
                self._of_link[link] = queue
                queue.adopt(link, state)

    def metrics(self) -> dict[int, dict[str, Any]]:
        """Return the metrics of every rank: connection, kept steps, time its trainer waited."""
        with self.lock:
            return {rank: queue.metrics() for rank, queue in self._queues.items()}

    # messages that several queues share

    def message_of(self, info: StepInfo, bucket: BucketBatch) -> StepMessage:
        """Return the message for all ranks of a bucket, created once and without copies.

        The caller holds the lock.
        """
        if (made := self._made.get(id(bucket))) is None:
            bounds = np.asarray(bucket.bounds)
            first = int(bounds[0]) if len(bounds) else 0
            rows = bucket.samples[first : int(bounds[-1]) if len(bounds) else 0]
            part = self._encoded(info).of_rows(rows)
            if bucket.wide is not None:
                message = StepMessage(part, bounds - first, *bucket.part(), form=bucket.form)
            else:  # built by a hook, in its own layout
                message = StepMessage(
                    part,
                    bounds - first,
                    {},
                    np.zeros((0, len(bucket)), np.int64),
                    tuple(bucket.microbatches),
                )
            if bucket.encoder is not None:
                encoder, rows = bucket.encoder.part(0, bucket.encoder.n)
                message = replace(message, encoder=encoder, encoder_rows=rows, per=bucket.per)
            made = self._made[id(bucket)] = (bucket, message, [0])
            self.n_made += 1
            if self._latest[0] != info.step:
                before, self._latest = self._latest[1], (info.step, set())
                for old in before:
                    self._forget_unkept(old)
            self._latest[1].add(id(bucket))
        made[2][0] += 1
        return made[1]

    def release(self, bucket: BucketBatch) -> None:
        """Record that a queue no longer keeps a bucket. The caller holds the lock."""
        if (made := self._made.get(id(bucket))) is not None:
            made[2][0] -= 1
            # a fast client may ack the latest step before it is put for other ranks
            if id(bucket) not in self._latest[1]:
                self._forget_unkept(id(bucket))

    def _forget_unkept(self, bucket: int) -> None:
        """Remove the message of a bucket, given by its identity, if no queue keeps it."""
        if (made := self._made.get(bucket)) is not None and made[2][0] <= 0:
            del self._made[bucket]

    def _encoded(self, info: StepInfo) -> StepInfo:
        found = self._encoded_infos.get(info.step)
        if found is None or found[0] is not info.after:
            found = (info.after, replace(info, after=self._shared_state(encoded(info.after))))
            self._encoded_infos[info.step] = found
            while len(self._encoded_infos) > KEPT_STATES:
                del self._encoded_infos[next(iter(self._encoded_infos))]
        return found[1]

    def _shared_state(self, state: EncodedState) -> EncodedState:
        """Return a state of many sources in memory that all clients map, not one copy for each."""
        nbytes = state.data.nbytes
        if self._shared is None or nbytes < SHARED_STATE_BYTES:
            return state
        data = self._shared(nbytes)[:nbytes]
        data[:] = state.data
        data.flags.writeable = False
        return EncodedState(state.step, data)

    # callbacks of the server; run on: server thread

    def opened(self, link: Connection, hello: dict[str, Any]) -> dict[str, Any]:
        rank, next_step, generation = (
            _whole(hello, name) for name in ("rank", "next", "generation")
        )
        with self.lock:
            queue = self._queues.get(rank)
            if queue is None:
                raise OverlordError(
                    f"rank {rank}: expected a rank that this process serves "
                    f"({_listed(sorted(self._queues))}), got another; connect to its constructor"
                )
            if queue.generation not in (None, generation):
                raise OverlordError(f"rank {rank}: {MOVED}")
            queue.connect(link, next_step)
            self._of_link[link] = queue
        return self._welcome(rank)

    def message(self, link: Connection, value: Any) -> None:
        if not isinstance(value, StepAck):
            raise OverlordError(
                f"step publisher: expected a StepAck from a client, got {type(value).__name__}; "
                "run the same version in all processes"
            )
        with self.lock:
            queue = self._of_link.get(link)
            if queue is None or not queue.accepts(link, value.generation):
                return
            step = queue.handle_ack(value.step, value.waited_s)
        # outside the lock: callbacks take other locks
        if value.reports:  # sent before the step was taken
            self._on_reports(queue, value.reports)
        if step is not None:
            self.acked(queue, step)

    def acked(self, queue: PublishedQueue, step: int) -> None:
        """Report that a client took a step, unless its queue was replaced."""
        if self._queues.get(queue.rank) is not queue:
            return
        if self.on_ack is not None:
            self.on_ack(queue, step)
        else:
            self._on_taken(queue.rank, step)

    def begin_after(self, step: int) -> None:
        """Count the steps up to ``step`` as taken by every rank."""
        with self.lock:
            for queue in self._queues.values():
                queue.begin_after(step)

    def taken(self, rank: int) -> int:
        """Return the last step that the client of the rank took; -1 before the first."""
        with self.lock:
            queue = self._queues.get(rank)
            return -1 if queue is None else queue.taken

    def closed(self, link: Connection, reason: str) -> None:
        with self.lock:
            if (queue := self._of_link.pop(link, None)) is not None:
                queue.disconnect(link)

    def dismiss(self, link: Connection, last: EndOfStream) -> None:
        """Send a last message and close; later acks are ignored. The caller holds the lock."""
        self._of_link.pop(link, None)
        with contextlib.suppress(ActorLost, DataStall):
            link.send(last, timeout_s=0.0)
        link.close("another client of the rank connected, or the rank was closed")


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return ", ".join(map(str, ranks[:16])) + more


def _whole(hello: dict[str, Any], name: str) -> int:
    value = hello.get(name, 0)
    if type(value) is not int:
        raise OverlordError(
            f"step publisher: expected a whole number as {name!r} of a hello, got {value!r:.60}; "
            "run the same version in all processes"
        )
    return value
