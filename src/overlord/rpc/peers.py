"""Actors of somebody else, called directly: the control plane of a process that did not start them.

Who started them (the launching process) tells each where to come: it dials, shows a token and the
ticket of the one who expects it, and takes calls by that link from then on. So whoever comes in the
place of a caller that died has the same actors, and the one that died, should it wake again, has
none: an actor listens to the last one it was sent to, and to nobody else. Calls and replies are
those of the other control planes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, DataStall, FrameError, LinkRefused, OverlordError
from overlord.rpc.actors import (
    SHUT_DOWN,
    SHUTDOWN_S,
    ActorHandle,
    ActorRecord,
    ActorSystem,
    BaseActorSystem,
    Somewhere,
)
from overlord.rpc.server import ActorServer, exit_code, open_reply
from overlord.transport.connection import TIMEOUT, Connection
from overlord.transport.server import Server, dial
from overlord.transport.server_connection import ServerConnection

log = logging.getLogger("overlord")

DIAL_S = 5.0  # for the one who called to answer
REPLY_S = 30.0  # for it to take an answer: far above what it needs while it lives
LOOK_S = 60.0  # between two looks whether a silent link is still wanted
KILL_S = 8.0  # for a process to be gone, when somebody else kills it
CUT_S = 1.0  # between the end of a link and the word that the process died, in either order
UNBOUNDED = (
    2**62
    # of bytes that wait for an actor: a pump must not wait for one that is stuck, which is noticed
    # otherwise
)


class RpcRecord(ActorRecord):
    """An actor that comes to us: what it is asked before it is there waits for it."""

    def __init__(self, name: str):
        super().__init__(name)
        self.ticket = 0
        self.link: ServerConnection | None = None
        self.early: list[tuple[int, bytes, list[np.ndarray]]] = []
        self.order = threading.Lock()  # what was asked before it came goes first
        self.end: tuple[str, BaseException | None] | None = (
            None  # how it ended, while what it said before is still being read
        )

    def came(self, link: ServerConnection, pid: int | None) -> None:
        with self.order:
            if self.link is not None or self.reason is not None:
                raise OverlordError(
                    f"{self.name} with ticket {self.ticket} is here already, or was given up"
                )
            link.max_held, link.max_queued_bytes, link.waits_for_slots = (
                0,
                UNBOUNDED,
                False,
            )  # what it says is kept for long: copied
            assert self.handle is not None
            self.link, self.handle.pid = link, pid
            for call in self.early:
                link.send(call, timeout_s=0.0)
            self.early.clear()

    def put(self, number: int, header: bytes, columns: list[np.ndarray]) -> None:
        with self.order:
            if self.link is None:
                self.early.append((number, header, columns))
            else:
                with contextlib.suppress(
                    ActorLost
                ):  # how it ended is told by who started it, and then to all who wait
                    self.link.send((number, header, columns), timeout_s=0.0)


Ender = Callable[[str, int, str], None]


def _nobody(name: str, ticket: int, why: str) -> None:
    """There is no one who could end it."""


class RpcServer(BaseActorSystem[RpcRecord]):
    """Calls to actors that come here. ``end(name, ticket, why)`` asks who started one to end it;
    ``cut`` the same for one whose link broke, which is nearly always the end of its process. In
    both cases ``died`` is to follow. Callbacks run in the server's thread.
    """

    _kind = RpcRecord

    def __init__(
        self, *, end: Ender = _nobody, cut: Ender | None = None, machine: Platform | None = None
    ) -> None:
        super().__init__()
        self.token = secrets.token_urlsafe(24)
        self._end, self._cut = end, cut
        self._tickets = itertools.count(1)
        self._by_ticket: dict[int, RpcRecord] = {}
        self._of_link: dict[ServerConnection, RpcRecord] = {}
        self._server = Server(
            token=self.token,
            on_open=self._opened,
            on_message=self._message,
            on_close=self._lost_link,
            **(machine or Platform()).inside(),
        )
        self.address = self._server.address

    def expect(self, name: str) -> tuple[ActorHandle, int]:
        """An actor that will come, or come again: its handle, and the ticket it has to show. It can
        be called at once.
        """
        record = RpcRecord(name)
        with self._names_lock:
            self._check_open(name)
            if (former := self._names.get(name)) is not None and former.reason is None:
                raise OverlordError(f"actor {name!r} is expected already")
            record.ticket = next(self._tickets)
            record.handle = ActorHandle(name, None, record)
            self._names[name] = self._by_ticket[record.ticket] = record
        return record.handle, record.ticket

    def died(self, ticket: int, reason: str, fault: BaseException | None = None) -> None:
        """Who started it says that it is gone; ``fault``: what its factory raised. What it had said
        before still counts.
        """
        if (record := self._by_ticket.pop(ticket, None)) is not None:
            with record.order:
                record.end, link = (reason, fault), record.link
            if link is None:
                self._ended(record)
            # its end is on the way, behind what it said last; of a machine that vanished none would
            # come
            else:
                after(CUT_S, lambda: link.cut("who started it says that it is gone"))

    def _ended(self, record: RpcRecord) -> None:
        assert record.end is not None
        self._over(record, record.end[0], fault=record.end[1])
        record.gone.set()

    def spawn(
        self,
        factory: Callable[..., Any],
        *args: Any,
        name: str,
        resources: Any = None,
        node: Somewhere = None,
    ) -> ActorHandle:
        raise OverlordError(
            f"actor {name!r}: actors are started where the job was launched; here they are expected"
        )

    def kill(self, handle: ActorHandle) -> None:
        self.kill_all([handle])

    def kill_all(self, handles: Sequence[ActorHandle]) -> None:
        """At the same time: one that is silent may take seconds."""
        records, deadline = [self._mine(handle) for handle in handles], time.monotonic() + KILL_S
        for record in records:
            self._end(record.name, record.ticket, "killed")
        if late := [
            r.name
            for r in records
            if r.reason is None and not r.gone.wait(max(0.0, deadline - time.monotonic()))
        ]:
            raise DataStall(
                f"the process of actor {', '.join(map(repr, late))} to end after it was killed",
                KILL_S,
            )

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """The actors live on, and are nobody's: who started them ends them."""
        if self._close_once():
            for record in self._living():
                self._over(record, SHUT_DOWN, quiet=True)
            self._server.close(timeout_s)

    def _send(
        self, record: RpcRecord, number: int, header: bytes, columns: list[np.ndarray]
    ) -> None:
        record.put(number, header, columns)

    # in the server's thread

    def _opened(self, link: ServerConnection, hello: Mapping[str, Any]) -> dict[str, Any]:
        name, ticket, pid = hello.get("name"), hello.get("ticket"), hello.get("pid")
        record = self._by_ticket.get(ticket) if type(ticket) is int else None
        if record is None or record.name != name or type(pid) is not int:
            raise OverlordError(
                f"expected an actor that is expected, got {name!r:.60} with ticket {ticket!r:.20}"
            )
        record.came(link, pid)
        self._of_link[link] = record
        return {}

    def _message(self, link: ServerConnection, value: Any) -> None:
        record = self._of_link[link]
        match value:
            case (int(number), bytes(header), list(columns)):
                record.answered(number, *open_reply(record.name, header, columns))
            case _:
                raise OverlordError(
                    f"expected an answer of {record.name}, got {type(value).__name__}"
                )

    def _lost_link(self, link: ServerConnection, reason: str) -> None:
        record = self._of_link.pop(link)
        with record.order:
            record.link, told = None, record.end is not None
        if told:
            self._ended(record)
        elif self._closed or record.reason is not None:
            return
        elif self._cut is not None:
            self._cut(record.name, record.ticket, reason)
        else:
            self.died(record.ticket, f"its link ended: {reason}")


def after(seconds: float, act: Callable[[], None]) -> None:
    """In a thread of its own, which holds up nobody who ends."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def fault_of(control: ActorSystem, dead: ActorHandle) -> BaseException | None:
    """What the factory of an actor raised that died of it: the answer to every call, there and
    wherever else it was expected.
    """
    error = control.call(dead, "").exception(0)
    return None if isinstance(error, ActorLost) else error


class Dial(Protocol):
    """How a link is made; ``channel.server.dial`` where the machine is a real one."""

    def __call__(
        self, address: str, token: str, hello: dict[str, Any], *, timeout_s: float
    ) -> tuple[Connection, dict[str, Any]]: ...


class RpcEndpoint:
    """The other side: an actor that takes calls from whoever it was sent to last, beside those of
    the one who started it.
    """

    def __init__(
        self,
        name: str,
        actor: object,
        *,
        dial: Dial = dial,
        leave: Callable[[int], None] = os._exit,
    ):
        self._name, self._actor, self._dial, self._leave = name, actor, dial, leave
        self._lock = threading.Lock()
        self._sent = 0  # how often
        self._link: Connection | None = None

    def meet(self, address: str, token: str, ticket: int) -> None:
        """Go there, and away from where it was before. Does not wait: whoever is there may be
        stuck, and another come in its place.
        """
        with self._lock:
            self._sent += 1
            sent, former, self._link = self._sent, self._link, None
        if former is not None:
            former.close("another one calls from here on")
        hello = {"name": self._name, "ticket": ticket, "pid": os.getpid()}
        threading.Thread(
            target=self._go,
            args=(sent, address, token, hello),
            name=f"overlord-calls-{ticket}",
            daemon=True,
        ).start()

    def _go(self, sent: int, address: str, token: str, hello: dict[str, Any]) -> None:
        while self._sent == sent:
            try:
                link, _ = self._dial(address, token, hello, timeout_s=DIAL_S)
            except DataStall:
                continue
            except (ActorLost, LinkRefused) as gone:  # another will say where to come
                log.debug("%s: %s", self._name, gone)
                return
            if hasattr(link, "max_held"):
                link.max_held = 0  # messages are kept for long: copied
            with self._lock:
                if wanted := self._sent == sent:
                    self._link = link
            if wanted:
                self._serve(link)
            link.close()
            return

    def _serve(self, link: Connection) -> None:
        performer = ActorServer(self._name, lambda *reply: self._reply(link, *reply))
        performer.build(lambda: self._actor)
        with contextlib.suppress(
            ActorLost, FrameError
        ):  # the one who called is gone; another will say where to come
            while self._link is link:
                if (call := link.recv(LOOK_S)) is TIMEOUT:
                    continue
                try:
                    performer.perform(*call)
                except SystemExit as e:
                    self._leave(exit_code(e))

    def _reply(
        self, link: Connection, number: int, header: bytes, columns: list[np.ndarray]
    ) -> None:
        try:
            link.send((number, header, columns), timeout_s=REPLY_S)
        except ActorLost:
            pass
        except DataStall as stalled:
            log.warning("%s: %s; its link is closed", self._name, stalled)
            link.close(str(stalled))

    def close(self) -> None:
        with self._lock:
            self._sent += 1
            link, self._link = self._link, None
        if link is not None:
            link.close("it leaves")
