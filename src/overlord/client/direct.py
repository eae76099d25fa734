"""Steps of a client that has no constructor (``constructors=False``): it is sent payload by every
loader host and builds for itself.

The baseline of the Overlord paper's appendix B. Unlike a client with a constructor it needs threads
in the trainer's process: a pump, one for the links of loader hosts, one for the planner's link, and
one that builds where that takes long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from overlord.batch import Batch
from overlord.client.client import LocalStepQueue
from overlord.concurrency.command_loop import CommandLoop
from overlord.concurrency.event_loop import EventLoop, ThreadExecutor
from overlord.constructor.assembler import Assembler
from overlord.constructor.build import BucketBatch
from overlord.constructor.payload_gather import PayloadGatherer, check_payload
from overlord.constructor.service import ConstructorService
from overlord.errors import ActorLost, DataStall, FrameError, LinkRefused, OverlordError
from overlord.messages.client import StepAck, StepInfo
from overlord.messages.control import ConstructorPlan, EncodedState, EndOfJob
from overlord.messages.loader import StepPayload
from overlord.process.memory import pss_bytes
from overlord.transport.address import HAS_SHARED_MEMORY
from overlord.transport.connect import dial
from overlord.transport.connection import CLOSES, TIMEOUT, Connection
from overlord.transport.server import Server

log = logging.getLogger("overlord")

PLANNER = "the planner"
DIAL_S = 5.0  # for one attempt
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # between attempts
CLOSE_S = 0.5
LEFT = "left"  # the last word of a client that ends in order; one that says nothing is lost

Where = Callable[[int], tuple[str, str] | None]


class Followed(Exception):
    """No error: the whole session was moved to a state, and its clients with it. It ends what is
    waited for.
    """

    def __init__(self, generation: int, state: EncodedState, address: str, token: str):
        super().__init__(
            f"the session was moved to step {state.step}"
        )  # the token is for no one's eyes
        self.generation, self.state, self.address, self.token = generation, state, address, token


class DirectInbox:
    """The ``Box`` of such a client. ``where(generation)`` gives the planner's address and token;
    None: whoever closed it says why.
    """

    def __init__(
        self,
        *,
        rank: int,
        address: str,
        token: str,
        where: Where,
        generation: int,
        reconnect_s: float = 60.0,
        on_moved: Callable[[EncodedState], None] = lambda state: None,
    ):
        self.rank, self.generation, self.taken, self.waited_s = rank, generation, -1, 0.0
        self._where, self._on_moved, self._reconnect_s = where, on_moved, reconnect_s
        self._own: OwnConstructor | None = None
        self._open(address, token)

    def _open(self, address: str, token: str) -> None:
        """What is wrong is told when a step is asked for: a state may be loaded before."""
        self._inbox = LocalStepQueue()
        start, pause = time.monotonic(), FIRST_PAUSE_S
        while self._own is None:
            try:
                self._own = OwnConstructor(
                    self.rank,
                    self._inbox,
                    address,
                    token,
                    self._where,
                    self.generation,
                    self._reconnect_s,
                )
            except LinkRefused as refused:
                if refused.reason != CLOSES or time.monotonic() - start >= self._reconnect_s:
                    return self._inbox.end(OverlordError(refused.reason))
                time.sleep(pause)  # the session is being moved, and tells soon where
                pause = min(2 * pause, LONGEST_PAUSE_S)
                try:
                    address, token = self._where(self.generation) or (address, token)
                except (ActorLost, DataStall):
                    continue
                except (Followed, OverlordError) as over:
                    return self._inbox.end(over)
        return None

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None:
        start = time.monotonic()
        try:
            while True:
                try:
                    self._ask_whether_moved()
                    return self._inbox.get(max(0.0, start + timeout_s - time.monotonic()))
                except Followed as moved:
                    self._follow(moved)
        finally:
            self.waited_s += time.monotonic() - start

    def _ask_whether_moved(self) -> None:
        """The planner's link is gone: if the whole session was moved, what waits here is of a time
        that is over.
        """
        if self._own is not None and self._own.trouble:
            with contextlib.suppress(
                OverlordError
            ):  # nobody to ask, or no steps to come: those that are here are handed out
                self._where(self.generation)

    def _follow(self, moved: Followed) -> None:
        """In the trainer's thread, so that it knows of which generation a step is."""
        if self._own is not None:
            self._own.close()
        self.generation, self.taken, self._own = moved.generation, -1, None
        self._on_moved(moved.state)
        self._open(moved.address, moved.token)

    def took(self, step: int) -> None:
        self.taken = step
        if self._own is not None:
            self._own.took(step, self.waited_s)

    def put(self, told: StepInfo, bucket: BucketBatch) -> None:
        raise OverlordError(f"rank {self.rank} builds its steps itself")

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        self._inbox.end(error, drop=drop)
        if self._own is not None:
            self._own.close()

    def __len__(self) -> int:
        return len(self._inbox)

    @property
    def trouble(self) -> str:
        """What is wrong with the planner's link, in words; empty while it holds."""
        return "" if self._own is None else self._own.trouble


class OwnConstructor(CommandLoop):
    """What a constructor host does, for one rank, in the rank's own process."""

    def __init__(
        self,
        rank: int,
        inbox: LocalStepQueue,
        address: str,
        token: str,
        where: Where,
        generation: int,
        reconnect_s: float,
    ):
        super().__init__()
        self._rank, self._inbox, self._where, self._reconnect_s = rank, inbox, where, reconnect_s
        self._generation, self._closed, self.trouble = generation, False, ""
        self._closing = threading.Lock()
        self._loaders: dict[Connection, int] = {}
        self._received = 0  # bytes of payload
        self._failed = 2**62  # the first step that could not be built
        self._pump = EventLoop(f"rank-{rank}")
        self._executor = ThreadExecutor(1, self._pump)
        self._server = Server(
            token=token,
            on_message=self._message,
            on_open=self._opened,
            on_close=self._left,
            tcp=not HAS_SHARED_MEMORY,
        )
        try:
            self._link, told = self._dial(address, token)
        except BaseException:
            self._server.close(CLOSE_S)
            raise
        self._furnish(told)
        self._pump.start(inbox.end, self._after_turn)
        threading.Thread(
            target=self._listen, name=f"overlord-planner-link-{rank}", daemon=True
        ).start()

    def _dial(self, address: str, token: str) -> tuple[Connection, dict[str, Any]]:
        hello = {
            "role": "constructor",
            "rank": self._rank,
            "generation": self._generation,
            "address": self._server.address,
            "pid": os.getpid(),
        }
        return dial(address, token, hello, timeout_s=DIAL_S)

    def _furnish(self, told: Mapping[str, Any]) -> None:
        self._check = bool(told["check"])
        self._building = ConstructorService(
            [Assembler(int(told["bucket"]), (self._rank,))],
            batch=Batch(**told["batch"]),
            multiple=int(told["multiple"]),
            executor=self._executor,
            run=self.run,
            cannot=self._cannot,
            broadcast=bool(told["broadcast"]),
        )
        self._building.attach({self._rank: self._inbox})
        self._gathering = PayloadGatherer(self._building)

    # links of loader hosts, in the server's thread

    def _opened(self, link: Connection, hello: Mapping[str, Any]) -> dict[str, Any]:
        if hello.get("role") != "loader" or type(hello.get("host")) is not int:
            raise OverlordError(f"rank {self._rank}: expected a loader host, got {hello!r:.100}")
        host = self._loaders[link] = hello["host"]
        self._pump.post(lambda: self._gathering.found(host))
        return {}

    def _message(self, link: Connection, value: Any) -> None:
        if not isinstance(value, StepPayload):
            raise OverlordError(
                f"expected payload of loader-host/{self._loaders[link]}, got {type(value).__name__}"
            )
        check_payload(value, self._loaders[link])
        self._pump.post(lambda: self._payload(value))

    def _left(self, link: Connection, reason: str) -> None:
        host = self._loaders.pop(link)
        if host not in self._loaders.values():  # else it has come again
            self._pump.post(lambda: self.run(self._gathering.lost(host, reason)))

    # the planner's link, in a thread of its own

    def _listen(self) -> None:
        while not self._closed:
            try:
                value = self._link.recv(60.0)
            except (ActorLost, FrameError) as fault:
                if self._closed or not self._find_again(fault):
                    return
                continue
            if value is not TIMEOUT:
                self._pump.post(lambda value=value: self._take(value))  # type: ignore[misc]

    def _find_again(self, fault: OverlordError) -> bool:
        """Whether the planner is there again. Once steps were sent it refuses: what was said
        meanwhile is said no more.
        """
        start, pause = time.monotonic(), FIRST_PAUSE_S
        while not self._closed:
            gone = time.monotonic() - start
            self.trouble = f"{PLANNER}, whose link broke {gone:.1f} s ago: {fault}"
            if gone >= self._reconnect_s:
                return self._give_up(
                    ActorLost(PLANNER, f"it could not be reached for {gone:.1f} s: {fault}")
                )
            try:
                if (found := self._where(self._generation)) is None:
                    return False
                link, _ = self._dial(*found)
                with self._closing:
                    self._link, over = link, self._closed
                if over:  # meanwhile, by another thread, which knew of the old link only
                    link.close("the client is closed")
                self.trouble = ""
                return not over
            except Followed as moved:
                self._inbox.end(moved, drop=True)
                return False
            except (ActorLost, DataStall) as again:
                fault = again
            except LinkRefused as refused:
                if refused.reason != CLOSES:
                    return self._give_up(OverlordError(refused.reason))
                fault = ActorLost(
                    PLANNER, CLOSES
                )  # the session is being moved, and tells soon where
            except OverlordError as over:  # the session was moved, or is closed
                return self._give_up(over)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return False

    def _give_up(self, error: OverlordError) -> bool:
        """Steps that are complete are still built; behind them it ends."""

        def finish() -> None:
            step = min(self._gathering.complete_until, self._failed)
            self.run(self._gathering.finish(EndOfJob(step, error)))

        self._pump.post(finish)
        return False

    # in the pump

    def _take(self, value: Any) -> None:
        match value:
            case ("do", list(messages)):
                for message in messages:
                    self._queue.extend(
                        self._gathering.plan(message)
                        if isinstance(message, ConstructorPlan)
                        else self._gathering.finish(message)
                    )
                self.run()
            case ("end", Exception() as error):
                self._inbox.end(error)
            case ("figures", int(number)):
                self._say((number, self._figures()))
            case ("why", int(number), int()):
                self._say((number, self._gathering.waiting() or self._building.waiting(self._rank)))
            case _:
                raise OverlordError(
                    f"rank {self._rank}: {PLANNER} said what is not known here: {value!r:.100}"
                )

    def _payload(self, payload: StepPayload) -> None:
        self._received += payload.tokens.nbytes
        self.run(self._gathering.payload(payload))

    def _carry_out(self, command: Any) -> None:
        self._building.carry_out(command, self._queue)

    def _after_turn(self) -> None:
        for link in list(self._loaders):  # slots whose payload has been built into microbatches
            with contextlib.suppress(ActorLost):
                link.flush()

    def _cannot(self, finish: EndOfJob) -> None:
        """A step that cannot be built; the planner decides where all end, if it is there."""
        self._failed = min(self._failed, finish.step)
        self._say(finish)

    def _say(self, value: Any) -> None:
        """A planner that does not hear is lost, which is found where its link is read."""
        with contextlib.suppress(ActorLost, DataStall):
            self._link.send(value, timeout_s=DIAL_S)

    def _figures(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "constructors": [row | {"rank": self._rank} for row in self._building.figures()],
            "memory": self._building.held_bytes(),
            "pss": pss_bytes(),
            "links": len(self._loaders) + 1,
            "received_bytes": self._received,
        }

    # the client's side

    def took(self, step: int, waited_s: float) -> None:
        self._say(StepAck(step, waited_s))
        self._pump.post(lambda: self.run(self._building.consumed([self._rank], step)))

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._say(LEFT)
        self._link.close("the client is closed")
        self._pump.stop()
        self._executor.close()
        self._server.close(CLOSE_S)

    def check(self) -> None:
        self._building.check()
