"""The front door of a session that serves: where clients in other processes say who they are and
ask for things.

Links are read by the server's one thread, which must not wait; what a request leads to is done by a
few threads of its own, and why someone waits by another, so that the reason can be had while
everything else is busy.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overlord.client.client import State
from overlord.concurrency.thread_queue import ThreadQueue
from overlord.errors import ActorLost, DataStall, OverlordError
from overlord.serving.step_publisher import StepPublisher, sealed
from overlord.transport.server import Server
from overlord.transport.server_connection import ServerConnection
from overlord.transport.shared_memory import SharedMemoryPool

if TYPE_CHECKING:
    from overlord.serving.session_server import SessionServer

log = logging.getLogger("overlord")

HANDS = 4  # threads that carry out requests
CLOSE_S = 0.5  # for last words to be sent; whoever does not read them finds the link closed


class ControlServer:
    """The server of a session. Control links are answered here; data links go to ``delivery``, if
    the steps are served here too.
    """

    def __init__(
        self,
        serving: SessionServer,
        delivery: StepPublisher | None,
        *,
        token: str,
        host: str,
        port: int,
        ring: SharedMemoryPool | None,
    ):
        self._serving, self._delivery = serving, delivery
        self.session_id = secrets.token_hex(
            8
        )  # a client that comes again must find the session it left
        self._ranks: dict[ServerConnection, int] = {}  # of control links
        self._served: set[ServerConnection] = (
            set()
        )  # those of ranks that take no steps here, beside the one who takes theirs
        self._lock = threading.Lock()
        self._hands, self._telling = ThreadQueue(HANDS, "front"), ThreadQueue(1, "why")
        self._server = Server(
            token=token,
            on_open=self._opened,
            on_message=self._message,
            on_close=self._closed,
            ring=ring,
            host=host,
            port=port,
            hold=serving.prefetch,
        )
        self.address = self._server.address

    # in the server's thread

    def _opened(self, link: ServerConnection, hello: dict[str, Any]) -> dict[str, Any]:
        rank, role = hello.get("rank"), hello.get("role")
        if role == "client" and self._delivery is not None:
            return self._delivery.opened(link, hello)
        if role not in ("control", "served") or type(rank) is not int:
            raise OverlordError(
                f"expected a hello with role 'control' and a rank, got {hello!r:.100}"
            )
        if role == "served":
            self._serving.admit_served(rank)
            with self._lock:
                self._ranks[link] = rank
                self._served.add(link)
            return {"session": self.session_id}
        self._serving.admit(rank)
        with self._lock:
            former = [
                other for other, r in self._ranks.items() if r == rank and other not in self._served
            ]
            self._ranks[link] = rank
            for other in former:
                del self._ranks[other]
        for other in former:
            words = (
                f"rank {rank}: another client of this rank has connected and takes this one's place"
            )
            log.warning("%s", words)
            _last_word(other, OverlordError(words))
        self._serving.came(rank, link.peer)
        return {"session": self.session_id}

    def _message(self, link: ServerConnection, value: Any) -> None:
        rank = self._ranks.get(link)
        if rank is None:
            if self._delivery is not None:
                self._delivery.message(link, value)
            return
        if (
            not isinstance(value, dict)
            or type(value.get("id")) is not int
            or not isinstance(value.get("ask"), str)
        ):
            raise OverlordError(f"expected a request with 'ask' and 'id', got {value!r:.100}")
        hands = self._telling if value["ask"] == "why" else self._hands
        hands.do(lambda: self._answer(link, rank, value))

    def _closed(self, link: ServerConnection, reason: str) -> None:
        with self._lock:
            rank, served = self._ranks.pop(link, None), link in self._served
            self._served.discard(link)
        if served:
            return
        if rank is not None:
            self._serving.went(rank, reason)
        elif self._delivery is not None:
            self._delivery.closed(link, reason)

    # in threads that may wait

    def _answer(self, link: ServerConnection, rank: int, request: Mapping[str, Any]) -> None:
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            reply["value"] = self._serving.carry_out(rank, request, served=link in self._served)
        except Exception as error:  # whatever it is, it is the answer
            reply["error"] = error
        try:
            link.send(reply)
        except (ActorLost, DataStall) as fault:  # it asks again when it comes again
            log.debug("rank %d did not hear the answer to %r: %s", rank, request["ask"], fault)

    # the end

    def close(self, error: Exception) -> None:
        """All who are there hear why."""
        with self._lock:
            links = list(self._ranks)
        for link in links:
            _last_word(link, error)
        self._hands.close()
        self._telling.close()
        self._server.close(CLOSE_S)


def _last_word(link: ServerConnection, error: Exception) -> None:
    with contextlib.suppress(ActorLost, DataStall):
        link.send({"over": error}, timeout_s=0.0)
    link.close(str(error))


class RemoteClient:
    """Stands in a session for a client in another process: how far it is, and whether it is
    there.
    """

    def __init__(self, rank: int, inbox: Any, state: State):
        self.rank, self._inbox, self._state = rank, inbox, state
        self.steps = 0
        self.waited_s = 0.0
        self.peer = ""  # who it is, as its link says
        self.there = False
        self.since = time.monotonic()  # it came, or went, or was first expected

    def be(self, *, there: bool, peer: str = "") -> None:
        self.there, self.peer, self.since = there, peer or self.peer, time.monotonic()

    @property
    def whereabouts(self) -> tuple[int | None, str]:
        """Its process, where it is one of this machine, and whether it is there."""
        kind, _, number = self.peer.partition(" ")
        state = "connected" if self.there else "went away" if self.peer else "not connected yet"
        return int(
            number
        ) if kind == "process" and self.there and number.isdecimal() else None, state

    @property
    def absent(self) -> str:
        """Why it takes nothing, in words; empty while its client is there."""
        if self.there:
            return ""
        for_s = time.monotonic() - self.since
        return (
            f"whose client ({self.peer}) went away {for_s:.0f} s ago"
            if self.peer
            else "which has not connected yet"
        )


class ServedElsewhere:
    """The box of a seat whose steps never pass through this process."""

    def __init__(self, rank: int, generation: int):
        self.rank, self.generation = rank, generation

    def put(self, told: Any, bucket: Any) -> None:
        raise OverlordError(f"rank {self.rank} is served by its constructor host")

    def get(self, timeout_s: float) -> None:
        raise OverlordError(f"rank {self.rank} is served by its constructor host")

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        """Its client hears of it at the front door."""

    def __len__(self) -> int:
        return 0


def where_it_stands(state: State, generation: int, constructor: tuple[str, str]) -> dict[str, Any]:
    """What a client needs to take its next step."""
    return {
        "state": sealed(state),
        "generation": generation,
        "constructor": constructor[0],
        "token": constructor[1],
    }
