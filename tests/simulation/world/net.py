"""The virtual network: wires that keep their order and nothing else, servers, links. What was sent
arrives, unless its wire is cut.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from overlord.errors import ActorLost, DataStall, LinkRefused, OverlordError
from overlord.transport.connection import CLOSES, TIMEOUT, Connection
from tests.simulation.world.world import Process, World

HOP_S = 0.0005  # median of one hop
CLOSED = "the link was closed"
GONE = "the connection was reset"


class Wire:
    """One way from one process to another. In order; while it is cut what was sent waits, and comes
    late.
    """

    def __init__(self, net: Net, source: Process, target: Process):
        self._net, self.source, self.target = net, source, target
        self._last = 0.0
        self._sent: deque[Callable[[], None]] = (
            deque()
        )  # on its way: what arrives is the oldest, however times were rounded
        self._held: deque[Callable[[], None]] = deque()
        self.cut, self.slow = False, 1.0
        net.wires.append(self)

    def send(self, arrive: Callable[[], None]) -> None:
        world, slow = self._net.world, self.slow
        if self._net.slow:
            slow *= self._net.slow.get(self.source, 1.0) * self._net.slow.get(self.target, 1.0)
        self._last = max(self._last, world.now + world.delay(HOP_S) * slow)
        self._sent.append(arrive)
        world.at(self._last - world.now, self._arrive, None)

    def _arrive(self) -> None:
        arrive = self._sent.popleft()
        if self.is_cut or self._held:
            self._held.append(arrive)
        else:
            self.target.run(arrive)

    @property
    def is_cut(self) -> bool:
        return self.cut or self.source in self._net.cut or self.target in self._net.cut

    def mend(self) -> None:
        """What waited goes on, in its order."""
        self._net.world.at(0.0, self._flush, None)

    def _flush(self) -> None:
        while self._held and not self.is_cut:
            self.target.run(self._held.popleft())


class Net:
    """All wires, and who listens where."""

    def __init__(self, world: World):
        self.world = world
        self.wires: list[Wire] = []
        self.cut: dict[Process, None] = {}  # processes nothing comes from or goes to
        self.slow: dict[Process, float] = {}
        self._servers: dict[str, SimServer] = {}
        self._numbers = itertools.count(1)

    def wire(self, source: Process, target: Process) -> Wire:
        return Wire(self, source, target)

    def part(self, process: Process) -> None:
        self.cut[process] = None

    def mend(self, process: Process) -> None:
        self.cut.pop(process, None)
        for wire in [w for w in self.wires if process in (w.source, w.target)]:
            wire.mend()

    def listen(self, server: SimServer) -> str:
        address = f"sim:{next(self._numbers)}"
        self._servers[address] = server
        return address

    def open_connection(
        self, process: Process, address: str, token: str, hello: dict[str, Any], timeout_s: float
    ) -> tuple[SimLink, dict[str, Any]]:
        server = self._servers.get(address)
        if server is None or not server.process.alive or server.closed:
            raise ActorLost(address, "nobody answers: Connection refused")
        there = server.process
        if there.stopped or there in self.cut or process in self.cut:
            if self.world.fiber is not None:
                self.world.sleep(timeout_s)
            raise DataStall(f"{address} to finish the handshake", timeout_s)
        near, far = SimLink(self, address), SimLink(self, process.name, server)
        near.joined(process, there, far)
        far.joined(there, process, near)
        return near, server.welcome(far, token, hello)


class SimLink(Connection):
    """One end. The server's end hands what comes to the server; the other is read by whoever
    dialled.
    """

    def __init__(self, net: Net, peer: str, server: SimServer | None = None):
        self._net, self.peer, self._server = net, peer, server
        self._came: deque[Any] = deque()
        self._lost: str | None = None
        self._wake: Callable[[], None] | None = None
        self.shares_memory, self.max_held, self.waits_for_segments, self.max_queued_bytes = (
            True,
            8,
            False,
            0,
        )

    def joined(self, here: Process, there: Process, other: SimLink) -> None:
        self._here, self._other, self._wire = here, other, self._net.wire(here, there)
        here.on_end.append(self._died)

    def refuse(self) -> None:
        """Close this end without a word to the other: the server did not accept it."""
        self._lost = CLOSED

    def _died(self) -> None:
        """Its process is gone; the other side learns of it behind what was sent."""
        if self._lost is None:
            self._lost = GONE
            self._wire.send(lambda: self._other.end(GONE))

    def send(self, value: Any, *, timeout_s: float = 60.0) -> None:
        if self._lost is not None:
            raise ActorLost(self.peer, self._lost)
        self._wire.send(lambda: self._other.arrived(value))

    def arrived(self, value: Any) -> None:
        if self._lost is not None:
            return
        if self._server is not None:
            self._server.hear(self, value)
            return
        self._came.append(value)
        self._stir()

    def _stir(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def end(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._stir()
            if self._server is not None:
                self._server.lost(self, reason)

    def recv(self, timeout_s: float, *, polled: bool = False) -> Any:
        if not self._came and self._lost is None and timeout_s > 0:
            self._net.world.wait(timeout_s, self._register)
        if self._came:
            return self._came.popleft()
        if self._lost is not None:
            raise ActorLost(self.peer, self._lost)
        return TIMEOUT

    def on_word(self, call: Callable[[], None]) -> None:
        """Call once when something comes, or the link ends; at once if that has happened."""
        self._wake = call
        if self._came or self._lost is not None:
            self._stir()

    def _register(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def flush(self) -> None:
        pass

    def fileno(self) -> int:
        return -1

    def close(self, reason: str = "") -> None:
        if self._lost is None:
            why = f"{CLOSED}: {reason}" if reason else CLOSED
            self._wire.send(lambda: self._other.end(why))
            self.end(why)


class SimServer:
    """A server of links in a process of the world: the callbacks are those of the real one."""

    def __init__(
        self,
        net: Net,
        process: Process,
        token: str,
        on_message: Callable[[Any, Any], None],
        on_open: Callable[[Any, dict[str, Any]], dict[str, Any]],
        on_close: Callable[[Any, str], None],
    ):
        self.process, self._token, self.closed = process, token, False
        self._on_message, self._on_open, self._on_close = on_message, on_open, on_close
        self._links: dict[SimLink, None] = {}
        self.address = net.listen(self)

    @property
    def links(self) -> list[SimLink]:
        return list(self._links)

    def caught_up(self, timeout_s: float) -> bool:
        """A message that has come is handled in the moment it comes."""
        return True

    def welcome(self, link: SimLink, token: str, hello: dict[str, Any]) -> dict[str, Any]:
        if token != self._token:
            raise LinkRefused(self.address, "the token is wrong")
        try:
            said = self._on_open(link, hello)
        except OverlordError as refused:
            link.refuse()
            raise LinkRefused(self.address, str(refused)) from refused
        self._links[link] = None
        return said

    def hear(self, link: SimLink, value: Any) -> None:
        try:
            self._on_message(link, value)
        except OverlordError as unwanted:
            link.close(str(unwanted))

    def lost(self, link: SimLink, reason: str) -> None:
        if link in self._links:
            del self._links[link]
            self._on_close(link, reason)

    def close(self, timeout_s: float = 5.0) -> None:
        self.closed = True
        for link in self.links:
            link.close(CLOSES)
