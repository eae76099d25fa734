"""The inside of an actor: build it, execute its calls one after another, close it.

The code is the same in all processes.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from overlord.errors import FrameError, OverlordError
from overlord.transport.codec import decode, encode

# Call numbers with a special meaning. To an actor CONTROL asks it to exit; from an actor it reports
# that it started, or failed to start or to close. A call with NO_REPLY has no reply.
CONTROL, NO_REPLY = 0, 2**64 - 1

log = logging.getLogger("overlord")

Reply = Callable[[int, bytes, list[np.ndarray]], None]


class ActorServer:
    """Executes encoded calls (method, arguments) on an actor.

    Replies are encoded too: (success, value or error).
    """

    def __init__(self, name: str, reply: Reply):
        self.name, self._reply, self._actor = name, reply, None

    def build(self, make: Callable[[], Any]) -> bool:
        """Build the actor; if that fails, reply with the exception and return False."""
        try:
            self._actor = make()
        except Exception as e:
            self._respond(CONTROL, "its factory", False, e)
            return False
        return True

    def perform(self, number: int, header: Any, columns: list[np.ndarray]) -> None:
        """Execute one call.

        If the method returns a future, the reply is sent later from another thread.
        """
        method = "a call"
        try:
            method, args = decode(header, columns)
            value = self._find(method)(*args)
        except SystemExit:  # as in any program, this ends the actor and is not a reply
            raise
        except BaseException as e:
            self._respond(number, method, False, e)
            return
        if isinstance(value, Future):
            value.add_done_callback(lambda future: self._reply_later(number, method, future))
        else:
            self._respond(number, method, True, value)

    def close(self) -> None:
        """Call ``close()`` of the actor if it has one; reply with its exception."""
        close = getattr(self._actor, "close", None)
        if callable(close):
            try:
                close()
            except Exception as e:
                self._respond(CONTROL, "close", False, e)

    def _find(self, method: str) -> Callable[..., Any]:
        found = None if method.startswith("_") else getattr(self._actor, method, None)
        if callable(found):
            return found
        known = [
            n
            for n in dir(self._actor)
            if not n.startswith("_") and callable(getattr(type(self._actor), n, None))
        ]
        raise AttributeError(
            f"actor {self.name!r} has no method {method!r}; it has: {', '.join(known) or 'none'}"
        )

    def _reply_later(self, number: int, method: str, future: Future[Any]) -> None:
        try:
            value = future.result()
        except BaseException as e:
            self._respond(number, method, False, e)
        else:
            self._respond(number, method, True, value)

    def _respond(self, number: int, method: str, ok: bool, value: Any) -> None:
        if not ok:
            self._add_location(method, value)
        if number == NO_REPLY:
            if not ok:
                log.error(
                    "%s of actor %s failed, and no caller waits for it: %s",
                    method,
                    self.name,
                    value,
                    exc_info=value,
                )
            return
        try:
            self._reply(number, *encode((ok, value)))
        except FrameError as e:
            where = f"result of {method!r} of actor {self.name!r}{e.where.removeprefix('value[1]')}"
            self._reply(number, *encode((False, FrameError(e.problem, where, e.remedy))))

    def _add_location(self, method: str, error: BaseException) -> None:
        """Add actor and method to an error; for unforeseen errors also the stack."""
        where = f"in actor {self.name!r}, {method}"
        if not isinstance(error, OverlordError):
            where += ":\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip()
        error.add_note(where)


def open_reply(name: str, header: Any, columns: list[np.ndarray]) -> tuple[bool, Any]:
    """Decode a reply at the caller.

    If it cannot be decoded (a record that only the actor has registered), only its call fails.
    """
    try:
        ok, value = decode(header, columns)
    except FrameError as e:
        return False, FrameError(e.problem, f"reply of actor {name!r}, {e.where}", e.remedy)
    return ok, value


def factory_failed(error: BaseException) -> str:
    """Return the reason of death for an exception of the factory."""
    return f"its factory failed: {type(error).__name__}: {error}"


def exit_code(error: SystemExit) -> int:
    """Return the exit code of a program that ends with this exception."""
    return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
