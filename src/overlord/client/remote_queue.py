"""Steps from a constructor in another process. On the same machine the trainer's own thread reads
them: no thread is added.

What was sent stays readable when the constructor dies: descriptors wait in the socket, bytes in
shared memory. Meanwhile another may be started in its place: the session tells where, and the steps
go on where those that are here end.
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
from overlord.client.control_client import FRONT_DOOR, reason_of
from overlord.constructor.batch_arrays import BatchArrays
from overlord.constructor.build import BucketBatch
from overlord.errors import ActorLost, DataStall, FrameError, LinkRefused, OverlordError
from overlord.messages.client import EndOfStream, StepAck, StepInfo, StepMessage
from overlord.messages.control import EncodedState
from overlord.transport.address import shown
from overlord.transport.connect import dial
from overlord.transport.connection import CLOSES, TIMEOUT, SocketConnection

log = logging.getLogger("overlord")

DIAL_S = 5.0  # for one attempt
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # between attempts
HOSTS = "constructor-worker/"  # whom only the session calls so
FOR_GOOD = (HOSTS, "planner")  # of whom the session says that they are lost when no other comes
SHORT_PAUSE_S = 0.2  # the same while a constructor is being started: it is there in a second
GLANCE_S = 0.2  # for an attempt while there are steps to hand out: they wait for it
BESIDE_S = 0.5  # without a step: then those beside it are seen to
# without a word from the constructor: then the session is asked whether it is still the one
LOOK_S = 5.0
# that a trainer may keep views of, beside the steps that wait; beyond them what comes is copied
SPARE_SLOTS = 8


class RemoteStepQueue:
    """The ``Box`` of a connected client. ``where(generation)`` asks for the constructor's address
    and token: after a fall it may be another one, and after the session was moved there is none for
    those who have not moved with it. Without an address it is asked for when the first step is.

    One thread may take the steps of several ranks in turn. When their constructor is lost and they
    live on what they have, it is the first that waits for the next step, and the others ask for
    nothing any more: nobody would tell the new constructor what they have taken. So whoever waits
    looks after those ``beside`` it, too, of this process and of one session.
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
        reconnect_s: float = 60.0,
        on_moved: Callable[[EncodedState], None] = lambda state: None,
        beside: Callable[[RemoteStepQueue], Iterable[RemoteStepQueue]] = lambda box: (),
        dial: Callable[..., tuple[Any, Any]] = dial,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._dial, self._now, self._sleep = dial, now, sleep  # of a virtual clock, in simulations
        self.rank, self.generation, self.address = rank, generation, address
        self._token, self._where, self._next, self._on_moved = token, where, next_step, on_moved
        self._reconnect_s, self._max_held, self._beside = (
            reconnect_s,
            prefetch + SPARE_SLOTS,
            beside,
        )
        self._steps: deque[tuple[StepInfo, BucketBatch]] = deque()
        self._slabs = BufferPool()  # for what the trainer widens
        self.taken = -1
        self._before = (
            next_step - 1
        )  # taken by whoever was this rank before: a constructor that was started anew may not know
        self._taking = generation  # of which the step is that was handed out last
        self._ended = False
        self._error: BaseException | None = None
        self._lost_at: float | None = None  # when the link broke; None while it holds
        self._fault: BaseException | None = None
        self._told_lost = logging.NOTSET  # how loud the loss of the link was told: so is its return
        self._told_end = False  # by the constructor, who may take it back
        self._pause = FIRST_PAUSE_S
        self._tried_at: float | None = None  # since when the link is tried again
        self._linked_at = self._retry_at = (
            0.0  # when a link was made last, and before when none is tried again
        )
        self._silent = False  # the session was asked, since the link broke, and is not there either
        self._waited_s = 0.0
        self._heard_at = now()  # when something came by the link
        self._changed = threading.Condition()  # for the reading thread, where there is one
        self.taker = (0, 0)  # the process and the thread that has asked last
        self._mine = (
            threading.Lock()
        )  # held by whoever reads the link: two readers would swap steps
        self._link: SocketConnection | None = None
        if address:
            self._connect(DIAL_S)
        else:
            self._lost_at, self._fault = now(), DataStall("the session to say where it is", 0.0)

    # the client's side

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None:
        """The next step; None when the time is over; StopIteration, or the error, when there is
        none.
        """
        start, self.taker = self._now(), (os.getpid(), threading.get_ident())
        try:
            with self._mine:
                return self._get(start + timeout_s)
        finally:
            self._waited_s += self._now() - start

    def look_around(self) -> None:
        """Nobody asks for a step just now, and somebody else waits for one: a constructor that was
        lost meanwhile, and is there again, is to know how far this rank is. Does nothing while it
        is asked.
        """
        if self._mine.acquire(blocking=False):
            try:
                self._drain()
                if self._link is None and not self._ended:
                    self._silent = False  # no step that is here waits for this
                    self._look_again()
            finally:
                self._mine.release()

    def _get(self, deadline: float) -> tuple[StepInfo, BucketBatch] | None:
        self._drain()
        while True:
            if self._link is None and (self._steps or self._ended):
                self._look_again()
            if self._steps:
                told, bucket = self._steps[0]
                self._taking = self.generation
                self._next = told.step + 1  # first: what comes again is known by it
                self._steps.popleft()
                return told, bucket
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopIteration
            left = deadline - self._now()
            if left <= 0:
                return None
            self._wait(min(left, BESIDE_S if self._others() else LOOK_S))
            self._see_who_is_there()
            self._look_after_others()

    def _others(self) -> list[RemoteStepQueue]:
        return [box for box in self._beside(self) if box is not self]

    def _look_after_others(self) -> None:
        for box in self._others() if not self._steps else ():
            with contextlib.suppress(OverlordError):  # it is told when it asks
                box.look_around()

    def _see_who_is_there(self) -> None:
        """Nothing has come for long. Perhaps the constructor was given up, being stopped or cut
        off, and another has its place: the link to it would hold for ever, and nothing come.
        """
        if (
            (link := self._link) is None
            or self._steps
            or self._ended
            or self._now() - self._heard_at < LOOK_S
        ):
            return
        self._heard_at = self._now()
        try:
            address, _ = self._where(self.generation)
        except OverlordError as fault:
            if isinstance(fault, ActorLost) and fault.name.startswith(FOR_GOOD):
                self._broke(link, fault)
            return  # what else it is will be heard by the link, or it is asked again
        if address != self.address:
            self._broke(link, ActorLost(self._name, "another was started in its place"))

    def took(self, step: int) -> None:
        """The step is the trainer's now. If the link is gone the constructor learns of it when we
        come again.
        """
        self.taken = step
        self._say_took(step)

    def _say_took(self, step: int) -> None:
        if step >= 0 and (link := self._link) is not None:
            with contextlib.suppress(ActorLost, DataStall):
                link.send(StepAck(step, self._waited_s, self._taking), timeout_s=DIAL_S)

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        """This side ends it."""
        with self._changed:
            self._ended, self._error, self._told_end = True, error, False
            if drop:
                self._steps.clear()
            self._changed.notify_all()
        self._drop_link("the client is closed")

    def __len__(self) -> int:
        """Steps already in this process. Those that wait in the socket are read for it, unless the
        trainer reads just now.
        """
        if self._mine.acquire(blocking=False):
            try:
                with contextlib.suppress(OverlordError):
                    self._drain()
            finally:
                self._mine.release()
        return len(self._steps)

    @property
    def trouble(self) -> str:
        """What is wrong with the link, in words; empty while it holds."""
        if self._lost_at is None:
            return ""
        if isinstance(self._fault, DataStall):  # the session says what is done about it
            return self._fault.waiting_for
        return (
            f"{self._name} at {shown(self.address)}, whose link broke "
            f"{self._now() - self._lost_at:.1f} s ago: {reason_of(self._fault)}"
        )

    # reading

    @property
    def _threaded(self) -> bool:
        return self._link is not None and not self._link.shares_memory

    def _drain(self) -> None:
        """Take in all that is there, without waiting."""
        while (
            not self._threaded
            and (link := self._link) is not None
            and self._read(link, 0.0) is not TIMEOUT
        ):
            pass

    def _wait(self, seconds: float) -> None:
        """Until something comes, or the time is over; where the link is gone, until it may be tried
        again.
        """
        link = self._link
        if link is None:
            self._try_again(seconds)
        elif self._threaded:
            with self._changed:
                if not self._steps and not self._ended and self._link is link:
                    self._changed.wait(seconds)
        else:
            self._read(link, seconds, looked=True)

    def _read(self, link: SocketConnection, seconds: float, *, looked: bool = False) -> Any:
        try:
            value = link.recv(seconds, looked=looked)
            if value is not TIMEOUT:
                self._heard_at = self._now()
                self._take_in(value)
                self._be_patient_anew()
            return value
        except (ActorLost, FrameError) as fault:
            self._broke(link, fault)
            return TIMEOUT
        # Ctrl-C in the middle of a message: a new link begins at the step that is missing
        except BaseException as fault:
            self._broke(link, fault)
            raise

    def _read_on(self, link: SocketConnection) -> None:
        """The reading thread of a TCP link: prefetched steps are in this process before they are
        asked for.
        """
        while self._link is link:
            self._read(link, 1.0)

    def _take_in(self, value: Any) -> None:
        with self._changed:
            if isinstance(value, StepMessage):
                if value.told.step >= self._wanted:  # else it came before the cut
                    n = int(value.bounds[-1]) if len(value.bounds) else 0
                    wide = BatchArrays.of_part(value.wide, value.rows) if value.wide else None
                    built = tuple(dict(arrays) for arrays in value.microbatches)
                    bucket = BucketBatch(
                        np.arange(n),
                        value.bounds,
                        wide,
                        built=built,
                        form=value.form,
                        slab=self._slabs,
                    )
                    if value.encoder_rows is not None:
                        bucket = replace(
                            bucket,
                            encoder=BatchArrays.of_part(value.encoder, value.encoder_rows),
                            per=value.per,
                        )
                    self._steps.append((value.told, bucket))
            elif isinstance(value, EndOfStream):
                self._ended, self._error, self._told_end = True, value.error, True
            elif isinstance(value, dict) and "moved" in value:
                self.move(int(value["moved"]), value["after"])
            elif isinstance(value, dict) and "resumed" in value and self._told_end:
                self._ended, self._error, self._told_end = False, None, False
            self._changed.notify_all()

    def _look_again(self) -> None:
        """The link is gone while there are steps to hand out. The session is asked whether it was
        moved: then what is kept here is of a time that is over. Else a constructor that is there
        again is to know how far we are, or no step is planned beyond those here.
        """
        if self._silent or self._now() < self._retry_at:
            return
        self._retry_at = self._now() + LONGEST_PAUSE_S
        try:
            self.address, self._token = self._where(self.generation)
            if self._link is None and not self._ended:
                self._connect(GLANCE_S)
        except (ActorLost, DataStall) as fault:
            if _is_replaced(fault):
                self._fault, self._retry_at = fault, self._now() + FIRST_PAUSE_S
            # Once for each fall: the steps that are here must not wait for who is not there.
            self._silent = (
                fault.name == FRONT_DOOR
                if isinstance(fault, ActorLost)
                else FRONT_DOOR in fault.waiting_for
            )
        except OverlordError as fault:  # what it means is seen when the steps are handed out
            log.debug("rank %d: %s", self.rank, fault)

    def move(self, generation: int, after: EncodedState) -> None:
        """The whole session was moved, and this client with it."""
        self._steps.clear()
        self._told_end, self._retry_at = False, 0.0
        self._ended, self._error, self.taken = (
            False,
            None,
            -1,
        )  # what was taken before says nothing of the steps to come
        if self._link is None and self._lost_at is None:  # it had ended
            self._lost_at = self._now()
        self.generation, self._next, self._before = generation, after.step, after.step - 1
        self._on_moved(after)

    # the link

    @property
    def _wanted(self) -> int:
        """The first step that is not here."""
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
        if self._told_lost and self._lost_at is not None:
            log.log(
                self._told_lost,
                "rank %d: %s is linked again after %.1f s",
                self.rank,
                self._name,
                self._now() - self._lost_at,
            )
        self._told_lost = logging.NOTSET
        self._link, self._lost_at, self._fault, self._linked_at, self._silent = (
            link,
            None,
            None,
            self._now(),
            False,
        )
        self._pause_next()  # if this one breaks at once
        self._say_took(max(self.taken, self._before))  # while the link was gone, perhaps
        if not link.shares_memory:
            threading.Thread(
                target=self._read_on, args=(link,), name=f"overlord-reader-{self.rank}", daemon=True
            ).start()

    def _broke(self, link: SocketConnection, fault: BaseException) -> None:
        with self._changed:
            if self._link is not link:
                return
            self._link = None
            if not self._ended:
                self._lost_at, self._fault = self._now(), fault
            # One that breaks as soon as it is made is tried with pauses, and not for ever.
            if self._now() - self._linked_at > LONGEST_PAUSE_S:
                self._be_patient_anew()
            self._changed.notify_all()
        if not self._ended:
            self._say_lost(fault)
        link.close()

    def _say_lost(self, fault: BaseException) -> None:
        """One that closes in order does so since the session is moved, resharded or closed: nothing
        to be alarmed at.
        """
        level, words = (
            logging.WARNING if isinstance(fault, Exception) else logging.DEBUG,
            str(fault),
        )
        if isinstance(fault, ActorLost) and fault.reason.endswith(CLOSES):
            level, words = logging.INFO, "it closed the link, as it does when the session is moved"
        self._told_lost = level
        log.log(
            level,
            "rank %d: %s: %s; it is looked for again for %.0f s",
            self.rank,
            self._name,
            words,
            self._reconnect_s,
        )

    def _try_again(self, seconds: float) -> None:
        """One attempt, when it is time for it."""
        assert self._lost_at is not None
        if (
            self._tried_at is None
        ):  # a trainer may have been busy with the steps it had for longer than that
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
            if isinstance(fault, ActorLost) and fault.name.startswith(FOR_GOOD):
                self.end(fault)
                return
            self._fault = fault
            self._pause_next(SHORT_PAUSE_S if _is_replaced(fault) else LONGEST_PAUSE_S)
        except LinkRefused as refused:
            if refused.reason != CLOSES:
                self.end(OverlordError(refused.reason))
                return
            self._fault = ActorLost(
                self._name, CLOSES
            )  # the session is being moved, and tells soon where
            self._pause_next(SHORT_PAUSE_S)
        except (
            OverlordError
        ) as over:  # the session was moved, or is closed: no step comes from there
            self.end(over)

    def _pause_next(self, longest: float = LONGEST_PAUSE_S) -> None:
        self._retry_at = self._now() + min(self._pause, longest)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    def _be_patient_anew(self) -> None:
        """The link does what it should: if it breaks, that is another fall."""
        self._pause, self._tried_at, self._retry_at = FIRST_PAUSE_S, None, 0.0

    def _give_up(self, gone: float) -> NoReturn:
        fault, who = self._fault, shown(self.address) or "it"
        either = (
            f" ({FRONT_DOOR} could not be reached either)"
            if isinstance(fault, ActorLost) and fault.name == FRONT_DOOR
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
    """Whether the session says that it is about to start another."""
    return isinstance(fault, DataStall) and fault.waiting_for.startswith(HOSTS)
