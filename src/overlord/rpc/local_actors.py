"""Actors as threads of this process: the same contract without processes, for tests, notebooks and
small jobs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

from overlord.rpc.actors import (
    SHUT_DOWN,
    SHUTDOWN_S,
    ActorHandle,
    ActorRecord,
    BaseActorSystem,
    log,
)
from overlord.rpc.server import ITSELF, ActorServer, exit_code, factory_failed, open_reply

KILLED = "killed"
_LEAVE: tuple[int, bytes, list[np.ndarray]] = (
    ITSELF,
    b"",
    [],
)  # a call like others, behind those that were made before


class ThreadRecord(ActorRecord):
    """An actor that is a thread, with the queue of its calls."""

    def __init__(self, name: str):
        super().__init__(name)
        self.inbox: SimpleQueue[tuple[int, bytes, list[np.ndarray]]] = SimpleQueue()
        self.thread: threading.Thread


class LocalControl(BaseActorSystem[ThreadRecord]):
    """A thread an actor. Arrays are handed over as they are, read-only; everything else is copied,
    as between processes.
    """

    _kind = ThreadRecord

    def kill(self, handle: ActorHandle) -> None:
        """A thread cannot be killed: it is given up. Its calls fail now, what it still does is seen
        by nobody, then it goes.
        """
        record = self._mine(handle)
        self._over(record, KILLED)
        record.inbox.put(_LEAVE)  # wakes it

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Every actor finishes its calls, is closed and goes; one that has not at the deadline is
        given up.
        """
        if not self._close_once():
            return
        deadline, records = time.monotonic() + timeout_s, self._living()
        for record in records:
            record.inbox.put(_LEAVE)
        for record in records:
            if record.thread is not threading.current_thread():
                record.thread.join(max(0.0, deadline - time.monotonic()))
            if self._over(record, SHUT_DOWN, quiet=True):
                log.warning(
                    "actor %s did not leave in %.1f s and was given up", record.name, timeout_s
                )

    def _start(
        self, record: ThreadRecord, factory: Callable[..., Any], args: tuple[Any, ...]
    ) -> ActorHandle:
        record.thread = threading.Thread(
            target=self._live,
            args=(record, factory, args),
            name=f"overlord actor {record.name}",
            daemon=True,
        )
        record.thread.start()
        return ActorHandle(record.name, None, record)

    def _send(
        self, record: ThreadRecord, number: int, header: bytes, columns: list[np.ndarray]
    ) -> None:
        record.inbox.put((number, header, columns))

    # in the actor's thread

    def _live(
        self, record: ThreadRecord, factory: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        faults: list[Exception] = []

        def reply(number: int, header: bytes, columns: list[np.ndarray]) -> None:
            ok, value = open_reply(record.name, header, [_read_only(c) for c in columns])
            if number == ITSELF:
                faults.append(value)
            else:
                record.answered(number, ok, value)

        performer = ActorServer(record.name, reply)
        try:
            if not performer.build(lambda: factory(*args)):
                self._over(record, factory_failed(faults[0]), fault=faults[0])
                return
            self._serve(record, performer)
        except SystemExit as e:
            self._over(record, f"exit code {exit_code(e)}")
        if faults:
            log.warning("actor %s did not close well: %s", record.name, faults[0])

    def _serve(self, record: ThreadRecord, performer: ActorServer) -> None:
        while True:
            number, header, columns = record.inbox.get()
            if record.reason is not None:  # given up
                return
            if number == ITSELF:
                performer.close()
                self._over(record, SHUT_DOWN, quiet=True)
                return
            performer.perform(number, header, [_read_only(c) for c in columns])


def _read_only(column: np.ndarray) -> np.ndarray:
    """A view: the sender keeps its own way of seeing the same memory."""
    view = column.view()
    view.flags.writeable = False
    return view
