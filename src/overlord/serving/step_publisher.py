"""The outgoing half of constructors: steps for clients in other processes, kept until their client
took them.

Steps are pushed as soon as they are built; the prefetch window bounds how many there are. A client
that lost its link comes again and says which step it wants next: it is sent everything from there,
so a cut costs nothing and repeats nothing.

Steps that a client has from a process that died come again in the one that was started in its
place. They are kept as any other: if that client dies too, whoever comes for its rank gets all it
had not taken.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from overlord.buffer_pool import BufferPool
from overlord.client.client import State
from overlord.constructor.build import BucketBatch
from overlord.constructor.service import RankQueue
from overlord.errors import ActorLost, DataStall, FrameError, OverlordError
from overlord.messages.client import EndOfStream, StepAck, StepInfo, StepMessage
from overlord.messages.control import EncodedState
from overlord.transport.connection import Connection
from overlord.transport.server_connection import ServerConnection
from overlord.transport.shared_memory import SharedMemoryPool
from overlord.transport.state_codec import seal

log = logging.getLogger("overlord")

MOVED = "another rank moved the session to a saved state; load the same state on this rank"
UNBOUNDED = 2**62
KEPT_SEALS = 16  # states of the last steps as bytes: ranks of other buckets are sent the same


def sealed(state: State) -> EncodedState:
    return state if isinstance(state, EncodedState) else seal(state)


class SharedBufferPool:
    """Memory for microbatches that clients map. When all of it is in use, by trainers that keep
    what they got, memory of this process serves: what is built there is copied on its way, and
    nobody waits for anybody.
    """

    def __init__(self, ring: SharedMemoryPool):
        self._ring, self._more = ring, BufferPool(min(2**30, ring.max_bytes))

    def __call__(self, nbytes: int) -> np.ndarray:
        found = self._ring.take(nbytes) if nbytes <= self._ring.max_bytes else None
        return self._more(nbytes) if found is None else found

    @property
    def nbytes(self) -> int:
        return self._ring.nbytes + self._more.nbytes

    def close(self) -> None:
        self._more.close()


class PublishedQueue:
    """The steps of one rank on their way out. ``put`` and ``end`` run in the pump and never
    wait.
    """

    def __init__(
        self,
        delivery: StepPublisher,
        rank: int,
        generation: int | None,
        former: PublishedQueue | None = None,
    ):
        self.rank, self.generation, self.former = (
            rank,
            generation,
            former,
        )  # former: of the generation before
        if former is not None:
            former.retire()
        self._delivery = delivery
        self._steps: deque[tuple[StepInfo, BucketBatch, StepMessage]] = deque()  # not taken yet
        self._put = self._taken = -1  # the last step that came, and that its client took
        self._next = 0  # the first step that its client, as it said, does not have
        self._claimed = -1  # of those, the last it took: believed when they have come here too
        self.waited_s = 0.0  # that its trainer has waited, as it said
        self.steps = 0  # that it took
        self._ended: EndOfStream | None = None
        self._link: Connection | None = None
        self._inside: RankQueue | None = None  # a client in this process that took the seat

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def finished(self) -> bool:
        """Nothing comes any more, and all that came was taken."""
        return self._ended is not None and not self._steps

    def put(self, told: StepInfo, bucket: BucketBatch) -> None:
        with self._delivery.lock:
            if self._inside is not None:
                self._inside.put(told, bucket)
                return
            if told.step <= max(self._put, self._taken):
                return
            self._put = told.step
            if took := told.step <= self._claimed:
                self._taken = told.step
            else:
                handed = self._delivery.handed(told, bucket)
                self._steps.append((told, bucket, handed))
                if told.step >= self._next:
                    self._send(handed)
        if took:
            self._delivery.heard(self, told.step)

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
                    else ActorLost("the pump", repr(error))
                )
                self._send(self._ended)

    def resume(self) -> None:
        """The end that was told is none: its client hears so, if it has not left."""
        with self._delivery.lock:
            if self._inside is not None:
                self._inside.resume()
            elif self._ended is not None:
                self._ended = None
                self._send({"resumed": True})

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None:
        raise OverlordError(f"rank {self.rank} is served to another process")

    def _send(self, value: Any) -> None:
        """Under the lock. A link that does not take it is given up: its client comes again."""
        if self._link is None:
            return
        try:
            self._link.send(value, timeout_s=0.0)
        except (
            ActorLost
        ) as lost:  # what its client said before it died is still to be heard, and then its end
            log.debug("rank %d: %s", self.rank, lost)
        except DataStall as stall:
            log.debug("rank %d: its link is given up: %s", self.rank, stall)
            link, self._link = self._link, None
            link.close()
        except (
            FrameError
        ) as fault:  # a hook made an array that cannot travel: this rank ends, and says why
            self._ended = EndOfStream(fault)
            self._send(self._ended)

    # what comes from the client

    def connect(self, link: Connection, next_step: int) -> None:
        """Under the lock: all from this step on goes to this link."""
        if next_step <= self._taken:
            raise OverlordError(
                f"rank {self.rank}: step {next_step} was handed out already and is kept "
                f"no longer (step {self._taken} was taken last); "
                "load a saved state on every rank"
            )
        if isinstance(link, ServerConnection):
            # the prefetch window bounds it, and the pump must not wait for a slow client
            link.max_queued_bytes = UNBOUNDED
        former, self._link, self._next, self._claimed = self._link, link, next_step, -1
        if former is not None:
            words = (
                f"rank {self.rank}: another client of this rank has connected and takes this "
                "one's place"
            )
            self._delivery.dismiss(former, EndOfStream(OverlordError(words)))
        self.send_from(next_step)

    def send_from(self, next_step: int) -> None:
        """Under the lock."""
        for told, _, handed in list(self._steps):
            if told.step >= next_step:
                self._send(handed)
        if self._ended is not None:
            self._send(self._ended)

    def took(
        self, link: Connection, step: int, waited_s: float, generation: int | None = None
    ) -> int | None:
        """Under the lock: the step, if this is news. Those up to it may go. One that was never sent
        is not believed, unless the client came with it from a process of before; and one that was
        taken before the session was moved is not the one of that number here.
        """
        if generation not in (None, self.generation) or link is not self._link:
            return None
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
            self._delivery.let_go(self._steps.popleft()[1])

    def begin_behind(self, step: int) -> None:
        """Under the lock: its client took all up to here, as the planner knows; a process that was
        started anew has none of them.
        """
        self._taken, self._put = max(step, self._taken), max(step, self._put)
        self._drop_taken()

    def disconnect(self, link: Connection) -> None:
        if link is self._link:
            self._link = None

    def retire(self) -> None:
        """Under the lock: its generation is over."""
        self.former = None
        for _, bucket, _ in self._steps:
            self._delivery.let_go(bucket)
        self._steps.clear()

    def hand_over(self, inside: RankQueue) -> None:
        """A client in this process takes the rank: it gets all that is kept, and whatever comes."""
        with self._delivery.lock:
            for told, bucket, _ in self._steps:
                inside.put(told, bucket)
                self._delivery.let_go(bucket)
            self._steps.clear()
            if self._ended is not None:
                inside.end(self._ended.error)
            self._inside = inside
            self._delivery.forget(self.rank)


class StepPublisher:
    """The boxes of all ranks served here, and the callbacks of a channel server for the links of
    their clients.
    """

    def __init__(
        self,
        *,
        took: Callable[[int, int], None],
        welcome: Callable[[int], dict[str, Any]] = lambda rank: {},
    ):
        self.lock = (
            threading.RLock()
        )  # put runs in the pump, the rest in the server's thread; held for a moment only
        self._took, self._welcome = took, welcome
        self.on_took: Callable[[PublishedQueue, int], None] | None = (
            None  # in place of ``took``, for whoever has boxes of several generations
        )
        self._boxes: dict[int, PublishedQueue] = {}
        self._of_link: dict[Connection, PublishedQueue] = {}
        self._made: dict[
            int, tuple[BucketBatch, StepMessage, list[int]]
        ] = {}  # by identity of the bucket; the last counts who keeps it
        self._latest: tuple[int, set[int]] = (
            -1,
            set(),
        )  # the last step of which something was made, and what: others may be put the same
        self._seals: dict[int, tuple[State, StepInfo]] = {}
        self.n_made = 0

    def box(self, rank: int, generation: int | None = None) -> PublishedQueue:
        """The box of a rank; a new one for a new generation of the session, and links of the old
        one get nothing from it. None: there is but one, since this process lives no longer than a
        generation does.
        """
        with self.lock:
            box = self._boxes.get(rank)
            if box is None or box.generation != generation:
                box = self._boxes[rank] = PublishedQueue(self, rank, generation, box)
            return box

    def forget(self, rank: int, why: str = "") -> None:
        """The rank left, or is served otherwise."""
        with self.lock:
            if (box := self._boxes.pop(rank, None)) is not None and box._link is not None:
                self.dismiss(
                    box._link,
                    EndOfStream(OverlordError(why or f"the client of rank {rank} is closed")),
                )

    def carry(self, rank: int, state: State) -> None:
        """The session was moved to a state, and its clients with it: an open link of the generation
        before goes on there.
        """
        with self.lock:
            box = self._boxes.get(rank)
            former, link = (
                (None, None)
                if box is None or box.former is None
                else (box.former, box.former._link)
            )
            if box is not None and former is not None and link is not None:
                former._link = None
                box._link, self._of_link[link] = link, box
                box._send({"moved": box.generation, "after": sealed(state)})
                box.send_from(state.step)

    def figures(self) -> dict[int, dict[str, Any]]:
        """Of every rank: whether its client is there, what is kept for it, how long its trainer has
        waited.
        """
        with self.lock:
            return {
                rank: {
                    "connected": box._link is not None,
                    "kept": len(box),
                    "took": box._taken,
                    "steps": box.steps,
                    "waited_s": box.waited_s,
                }
                for rank, box in self._boxes.items()
            }

    # what boxes share

    def handed(self, told: StepInfo, bucket: BucketBatch) -> StepMessage:
        """Under the lock. What all ranks of the bucket are sent: made once, the arrays are those
        that were built.
        """
        if (made := self._made.get(id(bucket))) is None:
            bounds = np.asarray(bucket.bounds)
            first = int(bounds[0]) if len(bounds) else 0
            rows = bucket.samples[first : int(bounds[-1]) if len(bounds) else 0]
            part = self._sealed(told).of_rows(rows)
            if bucket.wide is not None:
                handed = StepMessage(part, bounds - first, *bucket.part(), form=bucket.form)
            else:  # of a hook, which builds what it likes
                handed = StepMessage(
                    part,
                    bounds - first,
                    {},
                    np.zeros((0, len(bucket)), np.int64),
                    tuple(bucket.microbatches),
                )
            if bucket.encoder is not None:
                encoder, rows = bucket.encoder.part(0, bucket.encoder.n)
                handed = replace(handed, encoder=encoder, encoder_rows=rows, per=bucket.per)
            made = self._made[id(bucket)] = (bucket, handed, [0])
            self.n_made += 1
            if self._latest[0] != told.step:
                before, self._latest = self._latest[1], (told.step, set())
                for old in before:
                    self._forget_unkept(old)
            self._latest[1].add(id(bucket))
        made[2][0] += 1
        return made[1]

    def let_go(self, bucket: BucketBatch) -> None:
        """Under the lock."""
        if (made := self._made.get(id(bucket))) is not None:
            made[2][0] -= 1
            if (
                id(bucket) not in self._latest[1]
            ):  # a quick client may have taken it before it was put for the others of its bucket
                self._forget_unkept(id(bucket))

    def _forget_unkept(self, bucket: int) -> None:
        """By its identity."""
        if (made := self._made.get(bucket)) is not None and made[2][0] <= 0:
            del self._made[bucket]

    def _sealed(self, told: StepInfo) -> StepInfo:
        found = self._seals.get(told.step)
        if found is None or found[0] is not told.after:
            found = self._seals[told.step] = (told.after, replace(told, after=sealed(told.after)))
            while len(self._seals) > KEPT_SEALS:
                del self._seals[next(iter(self._seals))]
        return found[1]

    # callbacks of the server, in its thread

    def opened(self, link: Connection, hello: dict[str, Any]) -> dict[str, Any]:
        rank, next_step, generation = (
            _whole(hello, name) for name in ("rank", "next", "generation")
        )
        with self.lock:
            box = self._boxes.get(rank)
            if box is None:
                raise OverlordError(
                    f"rank {rank} is not served here; served are ranks {sorted(self._boxes)}"
                )
            if box.generation not in (None, generation):
                raise OverlordError(f"rank {rank}: {MOVED}")
            box.connect(link, next_step)
            self._of_link[link] = box
        return self._welcome(rank)

    def message(self, link: Connection, value: Any) -> None:
        if not isinstance(value, StepAck):
            raise OverlordError(f"expected Took from a client, got {type(value).__name__}")
        with self.lock:
            box = self._of_link.get(link)
            step = (
                None
                if box is None
                else box.took(link, value.step, value.waited_s, value.generation)
            )
        if (
            step is not None and box is not None
        ):  # outside the lock: whoever is told has locks of its own
            self.heard(box, step)

    def heard(self, box: PublishedQueue, step: int) -> None:
        """A client took a step."""
        if self._boxes.get(box.rank) is not box:
            return
        if self.on_took is not None:
            self.on_took(box, step)
        else:
            self._took(box.rank, step)

    def begin_behind(self, step: int) -> None:
        """Every rank took the steps up to here."""
        with self.lock:
            for box in self._boxes.values():
                box.begin_behind(step)

    def taken(self, rank: int) -> int:
        """The last step that the rank's client took; -1: none."""
        with self.lock:
            box = self._boxes.get(rank)
            return -1 if box is None else box._taken

    def closed(self, link: Connection, reason: str) -> None:
        with self.lock:
            if (box := self._of_link.pop(link, None)) is not None:
                box.disconnect(link)

    def dismiss(self, link: Connection, last: EndOfStream) -> None:
        """Under the lock: a last word, and no more; what the client still says counts for
        nothing.
        """
        self._of_link.pop(link, None)
        with contextlib.suppress(ActorLost, DataStall):
            link.send(last, timeout_s=0.0)
        link.close("another client of the rank has come, or it was closed")


def _whole(hello: dict[str, Any], name: str) -> int:
    value = hello.get(name, 0)
    if type(value) is not int:
        raise OverlordError(f"{name}: expected a whole number, got {value!r:.60}")
    return value
