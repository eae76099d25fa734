"""Actors as processes of this machine: their launcher, and the loop inside the child process."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from typing import Any, NoReturn

import numpy as np

from overlord.errors import ActorLost, DataStall, FrameError, OverlordError
from overlord.process import forkserver
from overlord.process.code import build_code, pack_code
from overlord.process.exit import exit_now
from overlord.rpc.actors import (
    CONTROL,
    INTERRUPTED_S,
    SHUT_DOWN,
    SHUTDOWN_S,
    ActorHandle,
    ActorRecord,
    ActorServer,
    BaseActorSystem,
    exit_code,
    factory_failed,
    log,
    open_reply,
)
from overlord.rpc.timeouts import TIMEOUTS
from overlord.transport.codec import encode
from overlord.transport.frame import FRAME, OutgoingMessage, ReceiveBuffer, SendBuffer, pack, unpack

# ----------------------------------------------------------------------------
# The child process of an actor: it builds the actor, then executes calls from its socket.
#
# The socket closes when the parent exits, for any reason. Then this process exits too, even in
# the middle of a method.

_NUMBER = struct.Struct("<Q")
HANGUP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
# For the parent, the end of the socket is the end of the process. So the socket is kept open.
_open_sockets: list[socket.socket] = []


class CallSocket:
    """The actor's end of the socket: it receives calls and sends replies.

    Any thread may reply.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(True)
        self._sock, self._lock = sock, threading.Lock()
        self._buffer = ReceiveBuffer(allocate, files=False)

    def next_call(self) -> tuple[int, memoryview, list[np.ndarray]]:
        """Wait for the next call; exit if the parent has exited."""
        while not self._buffer.ready:
            if not self._buffer.read(self._sock):
                exit_now(1)
        return decode_message(self._buffer.ready.popleft().body)

    def reply(self, number: int, header: bytes, columns: list[np.ndarray]) -> None:
        """Send a reply; exit if the parent has exited."""
        message = encode_message(number, header, columns)
        with self._lock:
            try:
                while not message.sent:
                    message.write(self._sock)
            except OSError:  # the parent has exited
                exit_now(1)


def encode_message(number: int, header: bytes, columns: list[np.ndarray]) -> OutgoingMessage:
    """Return a call or a reply as a message; the number of the call precedes its header."""
    return OutgoingMessage(FRAME, pack(_NUMBER.pack(number) + header, columns))


def decode_message(body: bytes | np.ndarray) -> tuple[int, memoryview, list[np.ndarray]]:
    """Return number, header and columns of a call or a reply; raise ``FrameError`` if invalid."""
    header, columns = unpack(body)
    if len(header) < _NUMBER.size:
        raise FrameError(
            f"expected a call number of {_NUMBER.size} bytes, got {len(header)} bytes",
            remedy="run the same version of Overlord on both sides",
        )
    return _NUMBER.unpack_from(header)[0], header[_NUMBER.size :], columns


def allocate(nbytes: int) -> np.ndarray:
    """Return ``nbytes`` of new memory for one large message."""
    return np.empty(nbytes, np.uint8)


def serve(sock: socket.socket, name: str, environ: Mapping[str, str], code: bytes) -> None:
    """Run the process of an actor, until the parent exits or requests its exit.

    ``code`` has factory and arguments. Later messages contain no code.
    """
    # Ctrl-C reaches the whole process group; the parent decides when to exit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.die_with_parent()
    forkserver.share_server()
    threading.Thread(
        target=_exit_with_parent, args=(sock,), name="overlord watch", daemon=True
    ).start()
    _open_sockets.append(sock)
    _adopt_environment(environ)
    calls = CallSocket(sock)
    # Report the start: later failures are those of the factory.
    calls.reply(CONTROL, *encode((True, None)))
    server = ActorServer(name, calls.reply)
    try:
        if not server.build(lambda: build_code(code)):
            _exit_now(1)
        while True:
            number, header, columns = calls.next_call()
            if number == CONTROL:
                break
            server.perform(number, header, columns)
    except SystemExit as e:
        _exit_now(exit_code(e))
    server.close()


def _adopt_environment(environ: Mapping[str, str]) -> None:
    """Replace the environment by the current one of the parent.

    The environment that was inherited is that of the fork server, which is older.
    """
    for key in os.environ.keys() - environ.keys():
        del os.environ[key]
    os.environ.update(environ)


def _exit_with_parent(sock: socket.socket) -> None:
    """Wait until the parent exits; then exit at once, whatever the main thread is doing."""
    poller, parent = select.poll(), multiprocessing.parent_process()
    poller.register(sock, HANGUP)
    if parent is not None and hasattr(os, "pidfd_open"):
        # A forked copy of the parent (a DataLoader worker) holds the socket open, but not this.
        try:
            poller.register(os.pidfd_open(parent.pid), select.POLLIN)  # type: ignore[arg-type]
        except ProcessLookupError:
            exit_now(1)
        except OSError:  # a sandbox that forbids it; the socket must suffice
            pass
    poller.poll()
    exit_now(1)


def _exit_now(code: int) -> NoReturn:
    """Flush stdout and stderr, and exit without waiting for threads of the actor."""
    sys.stdout.flush()
    sys.stderr.flush()
    exit_now(code)


# ----------------------------------------------------------------------------
# The launcher: one socket pair per actor, and one I/O thread for all.
#
# Calls and replies are frames: the number of the call, then (method, arguments) or (success,
# value or error).

MAX_WAITING_BYTES = 2**30  # queued calls to a stuck actor: more would fill the memory
READS = 16  # reads of one actor in a row, before others are served


class ProcessRecord(ActorRecord):
    """The record of an actor that is a process.

    Only the I/O thread reads and closes; any thread may send.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.process: ForkServerProcess
        self.sock: socket.socket
        self.pidfd = -1
        self.buffer, self.send_buffer = ReceiveBuffer(allocate, files=False), SendBuffer()
        self.send_lock = threading.Lock()  # for the send buffer, the pidfd and their closing
        self.moved_at = time.monotonic()  # time at which the actor last accepted data
        self.started = self.closed = False
        self.broken = ""  # why its replies cannot be read

    def put(self, number: int, header: bytes, columns: list[np.ndarray]) -> bool:
        """Send a call or queue it; return whether the I/O thread has to send the rest.

        Raise ``DataStall`` if more than ``MAX_WAITING_BYTES`` would be queued.
        """
        message = encode_message(number, header, columns)
        with self.send_lock:
            if self.closed:
                return False
            waiting = len(self.send_buffer) > 0
            if waiting and self.send_buffer.nbytes + message.nbytes > MAX_WAITING_BYTES:
                raise DataStall(
                    f"actor {self.name!r} to accept its calls", time.monotonic() - self.moved_at
                )
            self.send_buffer.put(message)
            return not waiting and not self._write()

    def write_more(self) -> bool:
        """Send queued calls; return whether all are sent."""
        with self.send_lock:
            return self.closed or self._write()

    def _write(self) -> bool:
        before = self.send_buffer.taken
        try:
            return self.send_buffer.write(self.sock)
        except OSError:  # the process has exited; its sentinel reports that
            self.send_buffer.clear()
            return True
        finally:
            if self.send_buffer.taken != before:
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
            self.send_buffer.clear()
            self.sock.close()
            if self.pidfd >= 0:
                os.close(self.pidfd)
        self.process.close()


class ProcessActorSystem(BaseActorSystem[ProcessRecord]):
    """An actor system that runs every actor in a process of the fork server.

    Callbacks of futures and deaths run in the I/O thread.
    """

    def __init__(self) -> None:
        super().__init__(ProcessRecord, send=self._send_call, start=self._launch)
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._calls: deque[Callable[[], None]] = deque()
        self._stop = False
        self._start_lock = threading.Lock()  # for Python's list of processes, which a start scans
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
        """Send SIGKILL, and wait until the process has exited and all its callbacks have run.

        Raise ``DataStall`` after ``Timeouts.killed_s``. In the I/O thread, return at once.
        """
        self._check_process()
        record = self._own(handle)
        record.kill()
        if threading.current_thread() is not self._thread and not record.exited.wait(
            TIMEOUTS.killed_s
        ):
            raise DataStall(
                f"the process of actor {handle.name!r} to exit after it was killed",
                TIMEOUTS.killed_s,
            )

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Let every actor finish its calls and exit; kill the others after ``timeout_s``."""
        if os.getpid() != self._pid:  # a forked copy of the program does not own the actors
            return
        if threading.current_thread() is self._thread:
            raise OverlordError(
                "shutdown: expected a caller outside of callbacks, got a callback; call it "
                "from another thread"
            )
        self._run_shutdown(
            lambda: [
                lambda: self._end_all(timeout_s),
                lambda: self._post(self._end),
                lambda: self._thread.join(TIMEOUTS.killed_s),
                self._waker.close,
                lambda: atexit.unregister(self._at_exit),
            ]
        )

    def _end_all(self, timeout_s: float) -> None:
        with self._start_lock:
            records = [record for record in self._living() if record.handle is not None]
        for record in self._request_exit(records, timeout_s, ProcessRecord.kill):
            record.exited.wait(TIMEOUTS.killed_s)

    def _at_exit(self) -> None:
        self.shutdown(INTERRUPTED_S)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise OverlordError(
                "actor system: expected the process that created it, got a forked copy; call "
                "actors in the original process"
            )

    # starting

    def _launch(
        self, record: ProcessRecord, factory: Callable[..., Any], args: tuple[Any, ...]
    ) -> ActorHandle:
        self._check_process()
        code = pack_code((factory, args), f"actor {record.name!r}")
        ours, theirs = socket.socketpair()
        with self._start_lock:
            try:
                self._check_open(record.name)
                process = forkserver.process(
                    target=serve,
                    args=(theirs, record.name, dict(os.environ), code),
                    name=record.name,
                    daemon=False,
                )
                _begin(process, record.name)
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

    def _send_call(
        self, record: ProcessRecord, number: int, header: bytes, columns: list[np.ndarray]
    ) -> None:
        if record.put(number, header, columns):
            self._post(lambda: self._want(record, selectors.EVENT_READ | selectors.EVENT_WRITE))

    # in the I/O thread

    def _post(self, work: Callable[[], None]) -> None:
        self._calls.append(work)
        with suppress(OSError):  # a wake-up is pending, or the thread has ended
            self._waker.send(b"\0")

    def _run(self) -> None:
        while not self._stop:
            for key, events in self._selector.select():
                try:
                    key.data(events)
                except Exception:
                    log.exception("handler failed in the I/O thread of the actor system")
        self._selector.close()
        self._woken.close()

    def _end(self) -> None:
        self._stop = True

    def _wake_up(self, _: int) -> None:
        self._woken.recv(4096)
        while self._calls:
            self._calls.popleft()()

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
            # The socket ends with the process, except for one that fails while it is being started.
            # A process that closed its socket, or sent invalid data, is useless: kill it.
            self._selector.unregister(record.sock)
            # Invalid data may arrive in one read with the notice that it has started.
            if record.started or record.broken:
                record.kill()

    def _read(self, record: ProcessRecord, times: int) -> bool:
        """Handle replies with at most ``times`` reads; return False at the end of the socket."""
        try:
            for _ in range(times):
                if not record.buffer.read(record.sock):
                    return False
                while record.buffer.ready:
                    self._handle(record, *decode_message(record.buffer.ready.popleft().body))
        except BlockingIOError:
            return True
        except OSError:
            return False
        except FrameError as e:
            record.broken = f"it sent invalid data and was killed: {e}"
            return False
        return True

    def _handle(
        self, record: ProcessRecord, number: int, header: memoryview, columns: list[np.ndarray]
    ) -> None:
        ok, value = open_reply(record.name, header, columns)
        if number != CONTROL:
            record.complete_call(number, ok, value)
        elif ok:
            record.started = True
        elif record.exiting:
            log.warning("actor %s failed to close: %s", record.name, value)
        else:
            record.fault = value

    def _ended(self, record: ProcessRecord) -> None:
        """Record that a process has exited, after reading the replies that it sent before."""
        self._selector.unregister(record.process.sentinel)
        with self._start_lock:
            code = record.process.exitcode
        if record.sock in self._selector.get_map():
            self._selector.unregister(record.sock)
            self._read(record, sys.maxsize)
        record.close()
        if record.exiting:
            self._mark_ended(record, SHUT_DOWN, quiet=True)
        else:
            self._mark_ended(record, _reason(record, code), fault=record.fault)
        record.exited.set()


def _reason(record: ProcessRecord, code: int | None) -> str:
    how = forkserver.describe_exit(code)
    if record.broken:
        return record.broken
    if record.fault is not None:
        return factory_failed(record.fault)
    if record.started or code is None or code < 0:
        return how
    return (
        f"its process ended before it could start ({how}); stderr has the reason: correct "
        "that, and launch again"
    )


def _begin(process: ForkServerProcess, name: str) -> None:
    try:
        process.start()
    except (EOFError, ConnectionError) as e:
        raise ActorLost(name, "the fork server exited before it could start it") from e


def _pidfd(pid: int | None) -> int:
    """Return a pidfd of a process, or -1 if the system has no pidfds.

    A pid may be reused by another process; a pidfd never is.
    """
    try:
        return os.pidfd_open(pid or 0)
    except (AttributeError, OSError):
        return -1
