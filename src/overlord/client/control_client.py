"""Requests of a connected client to the session's front door: one at a time, each with a deadline,
again after a cut.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from overlord.errors import ActorLost, DataStall, LinkRefused, OverlordError
from overlord.transport.connect import dial
from overlord.transport.connection import TIMEOUT, Connection

FRONT_DOOR = "the session's front door"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # between attempts to reach it


class ControlClient:
    """The control link of one rank. All requests may be said twice, so a link that was cut costs
    time and nothing else.
    """

    def __init__(
        self, address: str, token: str, rank: int, *, timeout_s: float, role: str = "control"
    ):
        self.address, self.token, self.rank, self._role = (
            address,
            token,
            rank,
            role,
        )  # "served": takes no steps, and only asks
        self._reach_s = timeout_s  # to find the door; an answer may take longer
        self._lock = threading.Lock()
        self._said = 0
        self._over: Exception | None = None  # why there will be no more answers
        self._link: Connection | None = None
        self.welcome: dict[str, Any] = {}
        self._linked(time.monotonic() + timeout_s)

    def ask(self, what: str, *, timeout_s: float, **given: Any) -> Any:
        """The answer, or the error that the other side raised."""
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise DataStall(
                f"another request to {FRONT_DOOR} at {self.address}", timeout_s, rank=self.rank
            )
        try:
            self._said += 1
            return _opened(
                self._answer({"ask": what, "id": self._said, **given}, deadline, timeout_s)
            )
        finally:
            self._lock.release()

    def _answer(self, request: dict[str, Any], deadline: float, timeout_s: float) -> dict[str, Any]:
        while True:
            link = self._linked(min(deadline, time.monotonic() + self._reach_s))
            try:
                while (
                    self._heard(link, 0.0) is not TIMEOUT
                ):  # an answer that was given up, or a last word
                    pass
                link.send(request, timeout_s=max(0.01, deadline - time.monotonic()))
                while (
                    reply := self._heard(link, max(0.0, deadline - time.monotonic()))
                ) is not TIMEOUT:
                    if isinstance(reply, dict) and reply.get("id") == request["id"]:
                        return reply
                raise DataStall(
                    f"{FRONT_DOOR} at {self.address} to answer {request['ask']!r}",
                    timeout_s,
                    rank=self.rank,
                )
            except ActorLost:
                self._drop()
                if time.monotonic() >= deadline:
                    raise
            except DataStall:
                raise
            except BaseException:  # Ctrl-C in the middle of a message, or bytes that make none
                self._drop()
                raise

    def _heard(self, link: Connection, seconds: float) -> Any:
        reply = link.recv(seconds)
        if isinstance(reply, dict) and isinstance(reply.get("over"), Exception):
            self._over = reply["over"]
            self._drop()
            raise self._over
        return reply

    def _linked(self, deadline: float) -> Connection:
        """The open link, or a new one as soon as the door can be reached."""
        pause, fault, start = FIRST_PAUSE_S, None, time.monotonic()
        while self._link is None:
            if self._over is not None:
                raise self._over
            left = deadline - time.monotonic()
            if left <= 0:
                words = (
                    f"{self.address} could not be reached for {time.monotonic() - start:.1f} "
                    f"s: {reason_of(fault)}"
                )
                raise ActorLost(FRONT_DOOR, words) from fault
            try:
                link, welcome = dial(
                    self.address,
                    self.token,
                    {"role": self._role, "rank": self.rank},
                    timeout_s=left,
                )
                self._check(welcome)
                self._link, self.welcome = link, welcome
            except (ActorLost, DataStall) as problem:
                fault = problem
                time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
                pause = min(2 * pause, LONGEST_PAUSE_S)
        return self._link

    def _check(self, welcome: dict[str, Any]) -> None:
        if self.welcome and welcome.get("session") != self.welcome.get("session"):
            self._over = LinkRefused(
                self.address,
                "another session is served there than the one this client belongs to; "
                "connect anew, and load a saved state",
            )
            raise self._over

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def close(self) -> None:
        self._over = self._over or OverlordError(f"the client of rank {self.rank} is closed")
        self._drop()


def _opened(reply: dict[str, Any]) -> Any:
    if isinstance(error := reply.get("error"), BaseException):
        raise error
    return reply.get("value")


def reason_of(fault: BaseException | None) -> str:
    """Why someone could not be reached, without who could not reach whom on the way to that."""
    while isinstance(fault, ActorLost) and isinstance(fault.__cause__, (ActorLost, DataStall)):
        fault = fault.__cause__
    return fault.reason if isinstance(fault, ActorLost) else str(fault)
