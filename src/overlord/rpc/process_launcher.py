"""Actors as processes of this machine. A socket pair each, one thread here that reads for all of
them, real kills.

Calls and replies are frames: the number of the call, then (method, arguments) and (whether it went
well, value or error).
"""

from __future__ import annotations

import atexit
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from overlord.errors import ActorLost, DataStall, FrameError, JobError, OverlordError
from overlord.process import forkserver
from overlord.rpc.actors import (
    HURRY_S,
    SHUT_DOWN,
    SHUTDOWN_S,
    ActorHandle,
    ActorRecord,
    BaseActorSystem,
    log,
)
from overlord.rpc.process_server import opened, packed, room, serve
from overlord.rpc.server import ITSELF, factory_failed, open_reply
from overlord.transport.socket_io import ReceiveBuffer, SendBuffer

KILL_S = 5.0  # for a killed process to be gone; one that waits for a disk may take its time
MAX_WAITING_BYTES = (
    2**30
)  # of calls an actor has not taken: it is stuck, and to go on would fill the memory
READS = 16  # of one actor in a row, before others get their turn


class ProcessRecord(ActorRecord):
    """An actor that is a process. Only the I/O thread reads and closes; any thread may send."""

    def __init__(self, name: str):
        super().__init__(name)
        self.process: ForkServerProcess
        self.sock: socket.socket
        self.pidfd = -1
        self.inbox, self.outbox = ReceiveBuffer(room, files=False), SendBuffer()
        self.send_lock = threading.Lock()  # for the outbox, the pidfd and what closes them
        self.moved_at = time.monotonic()  # when it last took something
        self.started = self.closed = False
        self.broken = ""  # what it sent that is no frame

    def put(self, number: int, header: bytes, columns: list[np.ndarray]) -> bool:
        """Send, or keep for later; True: the I/O thread has to go on with it."""
        parcel = packed(number, header, columns)
        with self.send_lock:
            if self.closed:
                return False
            waiting = len(self.outbox) > 0
            if waiting and self.outbox.nbytes + parcel.nbytes > MAX_WAITING_BYTES:
                raise DataStall(
                    f"actor {self.name!r} to take its calls", time.monotonic() - self.moved_at
                )
            self.outbox.put(parcel)
            return not waiting and not self._write()

    def write_more(self) -> bool:
        """True when all is sent."""
        with self.send_lock:
            return self.closed or self._write()

    def _write(self) -> bool:
        before = self.outbox.taken
        try:
            return self.outbox.write(self.sock)
        except OSError:  # it is gone, and that will be told by the end of its process
            self.outbox.clear()
            return True
        finally:
            if self.outbox.taken != before:
                self.moved_at = time.monotonic()

    def kill(self) -> None:
        with self.send_lock:
            if not self.closed:
                try:
                    if self.pidfd >= 0:
                        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
                    else:
                        os.kill(self.process.pid or 0, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def close(self) -> None:
        with self.send_lock:
            self.closed = True
            self.outbox.clear()
            self.sock.close()
            if self.pidfd >= 0:
                os.close(self.pidfd)
        self.process.close()


class ProcessActorSystem(BaseActorSystem[ProcessRecord]):
    """A process an actor, from a fork server. Callbacks of futures and deaths run in the one I/O
    thread.
    """

    _kind = ProcessRecord

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._todo: deque[Callable[[], None]] = deque()
        self._stop = False
        self._start_lock = (
            threading.Lock()
        )  # for Python's own list of processes, which a start looks through
        self._selector.register(self._woken, selectors.EVENT_READ, self._wake_up)
        self._thread = threading.Thread(target=self._run, name="overlord control", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def call(self, handle: ActorHandle, method: str, *args: Any) -> Future[Any]:
        self._check_process()
        return super().call(handle, method, *args)

    def tell(self, handle: ActorHandle, method: str, *args: Any) -> None:
        self._check_process()
        super().tell(handle, method, *args)

    def kill(self, handle: ActorHandle) -> None:
        """SIGKILL; returns when the process is gone and everyone who waited for it has been
        told.
        """
        self._check_process()
        record = self._mine(handle)
        record.kill()
        if threading.current_thread() is not self._thread and not record.gone.wait(KILL_S):
            raise DataStall(
                f"the process of actor {handle.name!r} to end after it was killed", KILL_S
            )

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Every actor finishes its calls, is closed and goes; one that has not at the deadline is
        killed.
        """
        if os.getpid() != self._pid:  # a forked copy of the program: the actors are not its own
            return
        if threading.current_thread() is self._thread:
            raise OverlordError(
                "shutdown waits for the thread that runs callbacks; call it from another thread"
            )
        self._end_by(
            lambda: [
                lambda: self._dismiss_all(timeout_s),
                lambda: self._post(self._end),
                lambda: self._thread.join(KILL_S),
                self._waker.close,
                lambda: atexit.unregister(self._at_exit),
            ]
        )

    def _dismiss_all(self, timeout_s: float) -> None:
        with self._start_lock:
            records = [record for record in self._living() if record.handle is not None]
        for record in self._dismiss(records, timeout_s, ProcessRecord.kill):
            record.gone.wait(KILL_S)

    def _at_exit(self) -> None:
        self.shutdown(HURRY_S)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise OverlordError(
                "this process was forked from the one that has the actors; only that one "
                "can call them"
            )

    # starting

    def _start(
        self, record: ProcessRecord, factory: Callable[..., Any], args: tuple[Any, ...]
    ) -> ActorHandle:
        self._check_process()
        ours, theirs = socket.socketpair()
        with self._start_lock:
            try:
                self._check_open(record.name)
                process = forkserver.process(
                    target=serve,
                    args=(theirs, record.name, dict(os.environ), factory, args),
                    name=record.name,
                    daemon=False,
                )
                _begin(process, record.name, factory, args)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            ours.setblocking(False)
            record.process, record.sock, record.pidfd = process, ours, _pidfd(process.pid)
            record.handle = ActorHandle(record.name, process.pid, record)
        self._post(lambda: self._watch(record))
        return record.handle

    def _send(
        self, record: ProcessRecord, number: int, header: bytes, columns: list[np.ndarray]
    ) -> None:
        if record.put(number, header, columns):
            self._post(lambda: self._want(record, selectors.EVENT_READ | selectors.EVENT_WRITE))

    # the I/O thread

    def _post(self, work: Callable[[], None]) -> None:
        self._todo.append(work)
        with suppress(OSError):  # woken often enough, or no more there
            self._waker.send(b"\0")

    def _run(self) -> None:
        while not self._stop:
            for key, events in self._selector.select():
                try:
                    key.data(events)
                except Exception:
                    log.exception("a fault in the control plane's own thread")
        self._selector.close()
        self._woken.close()

    def _end(self) -> None:
        self._stop = True

    def _wake_up(self, _: int) -> None:
        self._woken.recv(4096)
        while self._todo:
            self._todo.popleft()()

    def _watch(self, record: ProcessRecord) -> None:
        self._selector.register(
            record.sock, selectors.EVENT_READ, lambda events: self._ready(record, events)
        )
        self._selector.register(
            record.process.sentinel, selectors.EVENT_READ, lambda _: self._ended(record)
        )

    def _want(self, record: ProcessRecord, events: int) -> None:
        if not record.closed and record.sock in self._selector.get_map():
            self._selector.modify(record.sock, events, self._selector.get_key(record.sock).data)

    def _ready(self, record: ProcessRecord, events: int) -> None:
        if events & selectors.EVENT_WRITE and record.write_more():
            self._want(record, selectors.EVENT_READ)
        if events & selectors.EVENT_READ and not self._read(record, READS):
            # Its end comes with that of the process, but for one that is still being started and
            # fails. Should a process have
            # closed it and live, or have sent nonsense, it is of no use to anyone.
            self._selector.unregister(record.sock)
            if (
                record.started or record.broken
            ):  # nonsense may come in one read with the word that it has started
                record.kill()

    def _read(self, record: ProcessRecord, times: int) -> bool:
        """What has come, up to so many reads; False: no more will."""
        try:
            for _ in range(times):
                if not record.inbox.read(record.sock):
                    return False
                while record.inbox.ready:
                    self._handle(record, *opened(record.inbox.ready.popleft().body))
        except BlockingIOError:
            return True
        except OSError:
            return False
        except FrameError as e:
            record.broken = f"it sent what is no reply, and was killed: {e}"
            return False
        return True

    def _handle(
        self, record: ProcessRecord, number: int, header: memoryview, columns: list[np.ndarray]
    ) -> None:
        ok, value = open_reply(record.name, header, columns)
        if number != ITSELF:
            record.answered(number, ok, value)
        elif ok:
            record.started = True
        elif record.leaving:
            log.warning("actor %s did not close well: %s", record.name, value)
        else:
            record.fault = value

    def _ended(self, record: ProcessRecord) -> None:
        """The process is gone. What it said before still counts."""
        self._selector.unregister(record.process.sentinel)
        with self._start_lock:
            code = record.process.exitcode
        if record.sock in self._selector.get_map():
            self._selector.unregister(record.sock)
            self._read(record, sys.maxsize)
        record.close()
        if record.leaving:
            self._over(record, SHUT_DOWN, quiet=True)
        else:
            self._over(record, _reason(record, code), fault=record.fault)
        record.gone.set()


def _reason(record: ProcessRecord, code: int | None) -> str:
    how = forkserver.how_it_ended(code)
    if record.broken:
        return record.broken
    if record.fault is not None:
        return factory_failed(record.fault)
    if record.started or code is None or code < 0:
        return how
    return (
        f"its process ended before it could start ({how}) and said why on stderr; it may miss "
        f"a module{forkserver.UNGUARDED}"
    )


def _begin(
    process: ForkServerProcess, name: str, factory: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        process.start()
    except (EOFError, ConnectionError) as e:
        raise ActorLost(
            name, f"the fork server ended when it was to start it{forkserver.UNGUARDED}"
        ) from e
    except Exception as e:
        if what := _unsendable(factory, args):
            remedy = (
                "use a function or a class of a module, not a lambda or an inner one, and "
                "arguments that can be pickled"
            )
            raise JobError(
                [f"{what} cannot be sent to a process: {e}; {remedy}"], f"actor {name!r}"
            ) from e
        raise


def _unsendable(factory: Callable[..., Any], args: tuple[Any, ...]) -> str:
    for what, value in (
        ("the factory", factory),
        *((f"argument {i} of the factory", a) for i, a in enumerate(args, 1)),
    ):
        try:
            ForkingPickler.dumps(value)
        except (
            Exception
        ):  # PicklingError, AttributeError, TypeError, or what a class of the user raises
            return f"{what} {value!r:.80}"
    return ""


def _pidfd(pid: int | None) -> int:
    """A process by this, and not by a number that another process may have by then. -1 where there
    is none.
    """
    try:
        return os.pidfd_open(pid or 0)
    except (AttributeError, OSError):
        return -1
