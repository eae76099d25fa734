"""The inside of an actor: it is built, its methods are called one after another, it is closed. The
same in a thread and a process.
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

# the number of no call: to an actor, that it is to leave; from it, that it started, or cannot start
# or close
ITSELF = 0

NOBODY = 2**64 - 1  # nor this: who called wants no answer

log = logging.getLogger("overlord")

Reply = Callable[[int, bytes, list[np.ndarray]], None]


class ActorServer:
    """Runs encoded calls (method, arguments) on an actor and hands out encoded replies (whether it
    went well, value or error).
    """

    def __init__(self, name: str, reply: Reply):
        self.name, self._reply, self._actor = name, reply, None

    def build(self, make: Callable[[], Any]) -> bool:
        """False, and the fault told, when the actor cannot be made."""
        try:
            self._actor = make()
        except Exception as e:
            self._answer(ITSELF, "its factory", False, e)
            return False
        return True

    def perform(self, number: int, header: Any, columns: list[np.ndarray]) -> None:
        """One call. Its answer may come later, from another thread, when the method returns a
        future.
        """
        method = "a call"
        try:
            method, args = decode(header, columns)
            value = self._find(method)(*args)
        except SystemExit:  # as in any program: this is the end of the actor, not an answer
            raise
        except BaseException as e:
            self._answer(number, method, False, e)
            return
        if isinstance(value, Future):
            value.add_done_callback(lambda future: self._later(number, method, future))
        else:
            self._answer(number, method, True, value)

    def close(self) -> None:
        """``close()`` of the actor, where it has one; a fault is told."""
        close = getattr(self._actor, "close", None)
        if callable(close):
            try:
                close()
            except Exception as e:
                self._answer(ITSELF, "close", False, e)

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

    def _later(self, number: int, method: str, future: Future[Any]) -> None:
        try:
            value = future.result()
        except BaseException as e:
            self._answer(number, method, False, e)
        else:
            self._answer(number, method, True, value)

    def _answer(self, number: int, method: str, ok: bool, value: Any) -> None:
        if not ok:
            self._say_where(method, value)
        if number == NOBODY:
            if not ok:
                log.error(
                    "%s of actor %s failed, and nobody waits for it: %s",
                    method,
                    self.name,
                    value,
                    exc_info=value,
                )
            return
        try:
            self._reply(number, *encode((ok, value)))
        except FrameError as e:
            where = (
                f"what {method!r} of actor {self.name!r} returned{e.where.removeprefix('value[1]')}"
            )
            self._reply(number, *encode((False, FrameError(e.problem, where, e.remedy))))

    def _say_where(self, method: str, error: BaseException) -> None:
        """The caller sees no stack of ours, so an error that we did not foresee brings it along."""
        where = f"in actor {self.name!r}, {method}"
        if not isinstance(error, OverlordError):
            where += ":\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip()
        error.add_note(where)


def open_reply(name: str, header: Any, columns: list[np.ndarray]) -> tuple[bool, Any]:
    """A reply at the caller. One that cannot be opened (a record that only the actor knows) is an
    error of its call alone.
    """
    try:
        ok, value = decode(header, columns)
    except FrameError as e:
        return False, FrameError(e.problem, f"answer of actor {name!r}, {e.where}", e.remedy)
    return ok, value


def factory_failed(error: BaseException) -> str:
    return f"its factory failed: {type(error).__name__}: {error}"


def exit_code(error: SystemExit) -> int:
    """What a program that ends like this returns to its shell."""
    return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
