"""The inside of an actor that Ray started: it comes back to who wanted it by a link of ours, and
takes its calls there.

Ray has begun the process and tells of its end. What is said to the actor does not pass through Ray:
a call by link costs a tenth, nothing is pickled, and what works between processes works here.
Nothing of Ray is imported in this file.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from overlord.concurrency.platform import INTERFACE, NODE
from overlord.errors import ActorLost, FrameError
from overlord.rpc.process_server import HANGUP
from overlord.rpc.server import ITSELF, ActorServer, exit_code
from overlord.transport.connection import TIMEOUT, SocketConnection
from overlord.transport.server import dial

DIAL_S = 30.0  # for the one who wanted it to answer
REPLY_S = 60.0  # for it to take an answer: far above what it needs while it lives
LOOK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """What an actor must know to come back: where, what to show, and the surroundings it would have
    as a process of that program.
    """

    name: str
    address: str
    token: str
    ticket: int
    environ: Mapping[str, str] | None = (
        None  # of the program; None: on another machine, which has its own
    )
    directory: str = ""
    path: tuple[str, ...] = ()  # where Python looks for modules


Call = tuple[int, bytes, list[np.ndarray]]


class ActorBody:
    """What Ray calls an actor: one method, which is its whole life."""

    def live(
        self,
        home: Home,
        interface: str,
        code: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]],
        words: Mapping[str, Any],
    ) -> int | None:
        """Until it is asked to leave (None), or leaves by itself: with this exit code. ``code``:
        factory and arguments, as they came. ``words``: where its output is, for who is left without
        it.
        """
        _take_over(home, interface)
        hello = {
            "name": home.name,
            "ticket": home.ticket,
            "pid": os.getpid(),
            "machine": this_machine(),
            "words": words,
        }
        link, _ = dial(home.address, home.token, hello, timeout_s=DIAL_S)
        link.max_held = 0  # messages are kept for long: copied
        link.waits_for_slots = False
        line = Line(link)
        performer = ActorServer(home.name, line.reply)
        try:
            if performer.build(
                lambda: _made(*code())
            ):  # it has said who it is: what stands still or fails from here on is known
                line.serve(performer)
                performer.close()
        except SystemExit as e:
            return exit_code(e)
        else:
            return 1 if line.faulty else None
        finally:
            line.close()
            sys.stdout.flush()
            sys.stderr.flush()


def _made(factory: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return factory(*args)


class Line:
    """The actor's end of the link. Calls are read by who performs them, as in ``process_actor``; a
    thread of its own watches for the end of the link, with which the process ends, even in the
    middle of a method.
    """

    def __init__(self, link: SocketConnection):
        self._link, self._leaving = link, False
        self.faulty = False  # whether it could not be made, or did not close well
        threading.Thread(target=self._watch, name="overlord-watch", daemon=True).start()

    def serve(self, performer: ActorServer) -> None:
        while (call := self._next_call())[0] != ITSELF:
            performer.perform(*call)

    def _next_call(self) -> Call:
        try:
            while (call := self._link.recv(LOOK_S)) is TIMEOUT:
                pass
        except (ActorLost, FrameError):
            self._end()
            raise SystemExit(1) from None
        return call

    def reply(self, number: int, header: bytes, columns: list[np.ndarray]) -> None:
        self.faulty = self.faulty or number == ITSELF
        try:
            self._link.send((number, header, columns), timeout_s=REPLY_S)
        except ActorLost:
            self._end()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._link.fileno(), HANGUP)
        poller.poll()
        self._end()

    def _end(self) -> None:
        """There is nobody to work for. This also ends one that Ray takes for dead and that lives:
        who wanted it has hung up.
        """
        if not self._leaving:
            os._exit(1)

    def close(self) -> None:
        self._leaving = True
        self._link.close("it leaves")


def this_machine() -> str:
    """What tells two processes that each can signal the other by its number; empty where that
    cannot be known.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink(
            "/proc/self/ns/pid"
        )
    except OSError:
        return ""


def _take_over(home: Home, interface: str) -> None:
    """The surroundings of the program now; those of the worker are from when the cluster was
    started.
    """
    if home.environ is not None:
        for key in [
            k
            for k in os.environ
            if k not in home.environ and k != NODE and not k.startswith("RAY_")
        ]:
            del os.environ[key]
        os.environ.update({k: v for k, v in home.environ.items() if not k.startswith("RAY_")})
        os.chdir(home.directory)
    sys.path.extend(p for p in home.path if p not in sys.path)
    if interface:  # unless it was named where the node was started
        os.environ.setdefault(INTERFACE, interface)
