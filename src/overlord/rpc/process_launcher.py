"""Actors as processes of this machine: their launcher, and the start of the child process."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost
from overlord.process import forkserver
from overlord.process.exit import exit_now
from overlord.process.shutdown import Steps
from overlord.rpc.actor_process import CallConnection, LaunchSpec
from overlord.rpc.actors import ActorRecord, Somewhere, this_machine_only
from overlord.rpc.launched_actors import LaunchedActorSystem
from overlord.rpc.peers import ActorListener
from overlord.rpc.timeouts import TIMEOUTS

log = logging.getLogger("overlord")

# ----------------------------------------------------------------------------
# The child process of an actor: it connects to its parent, builds the actor and executes calls.
#
# The connection closes when the parent exits, for any reason. Then this process exits too, even in
# the middle of a method.

# For the parent, the end of the connection is the end of the process. So it is kept open.
_open_connections: list[CallConnection] = []


def serve(spec: LaunchSpec, environ: Mapping[str, str], code: bytes) -> None:
    """Run the process of an actor, until the parent exits or requests its exit.

    ``code`` has factory and arguments. Later messages contain no code.
    """
    # Ctrl-C reaches the whole process group; the parent decides when to exit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.die_with_parent()
    forkserver.share_server()
    _adopt_environment(environ)
    # Once it is connected, later failures are those of the factory.
    calls = CallConnection.open(spec, {}, _parent_files())
    _open_connections.append(calls)
    forkserver.release_startup_output()
    status = calls.serve(spec.name, code)
    if status is not None:  # without waiting for threads of the actor
        sys.stdout.flush()
        sys.stderr.flush()
        exit_now(status)


def _adopt_environment(environ: Mapping[str, str]) -> None:
    """Replace the environment by the current one of the parent.

    The environment that was inherited is that of the fork server, which is older.
    """
    for key in os.environ.keys() - environ.keys():
        del os.environ[key]
    os.environ.update(environ)


def _parent_files() -> list[int]:
    """Return a file that is readable once the parent has exited, if the system has one.

    A forked copy of the parent (a DataLoader worker) holds the connection open, but not this file.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or not hasattr(os, "pidfd_open"):
        return []
    try:
        return [os.pidfd_open(parent.pid)]
    except ProcessLookupError:
        exit_now(1)
    except OSError:  # a sandbox that forbids it; the connection must suffice
        return []


# ----------------------------------------------------------------------------
# The launcher: it starts processes of the fork server, kills them and watches for their exits.
#
# The thread of the listener watches the files that the fork server closes at an exit.


class ChildProcess:
    """The process of one actor, started by the fork server.

    ``starts`` guards Python's list of processes, which a start scans.
    """

    def __init__(
        self, record: ActorRecord, listener: ActorListener, *, daemon: bool, starts: threading.Lock
    ) -> None:
        self._record, self._listener = record, listener
        self._daemon, self._starts = daemon, starts
        self._process: forkserver.Process | None = None
        self._output = forkserver.StartupOutput()
        self._pidfd = -1
        self._killed = self._closed = False
        self._lock = threading.Lock()

    def spawn(self, spec: LaunchSpec, code: bytes) -> None:
        with self._starts:
            try:
                process = forkserver.process(
                    target=serve,
                    args=(spec, dict(os.environ), code),
                    name=spec.name,
                    daemon=self._daemon,
                    startup_output=self._output,
                )
                _begin(process, spec.name)
            except BaseException:
                self._close()
                raise
            self._started(process)
        assert self._record.handle is not None
        self._record.handle.pid = process.pid
        self._listener.later(
            lambda: self._listener.watch(process.sentinel, lambda: self._exited(process))
        )

    def _started(self, process: forkserver.Process) -> None:
        """Use the process for kills, including one that was requested while it was started."""
        with self._lock:
            self._process, self._pidfd = process, _pidfd(process.pid)
            if self._killed:
                self._send_kill()

    def kill(self) -> None:
        """Send SIGKILL."""
        with self._lock:
            self._killed = True
            if self._process is not None and not self._closed:
                self._send_kill()

    def _send_kill(self) -> None:
        try:
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                assert self._process is not None
                os.kill(self._process.pid or 0, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def connected(self, hello: Mapping[str, Any]) -> None:
        """Drop the output of the start; the pid is known from the start of the process."""
        self._output.close()

    def disconnected(self, reason: str) -> None:
        """Kill the process, if it has not exited already."""
        self.kill()

    def awaits(self) -> str:
        process = self._process
        what = "" if process is None else f", whose process {process.pid} has not connected yet"
        return f"{self._record.name} to be started{what}"

    def pid_here(self) -> int:
        return 0 if self._process is None else self._process.pid or 0

    def asked(self) -> dict[str, float]:
        return {}

    def _exited(self, process: forkserver.Process) -> None:
        """Report the exit of the process. Runs on: thread of the listener."""
        self._listener.unwatch(process.sentinel)
        with self._starts:
            code = process.exitcode
        reason, inbound = forkserver.describe_exit(code), self._record.inbound
        if not inbound.connected:
            reason = _early_end(self._record.name, self._output, code, reason)
        self._close()
        self._listener.exited(inbound.lease_id, reason)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._output.close()
            if self._process is not None:
                self._process.close()


class ProcessLauncher:
    """The launcher of processes of the fork server.

    ``daemon``: the processes have no children, and this process does not wait for them at its end.
    """

    def __init__(self, *, daemon: bool) -> None:
        self._daemon, self._starts = daemon, threading.Lock()
        self.exit_s = self.killed_s = TIMEOUTS.killed_s

    def place(self, name: str, resources: Mapping[str, float], node: Somewhere) -> None:
        this_machine_only(name, resources, node)

    def process(self, record: ActorRecord, listener: ActorListener) -> ChildProcess:
        return ChildProcess(record, listener, daemon=self._daemon, starts=self._starts)

    def nodes(self) -> list[Any]:
        return []

    def node_here(self) -> str:
        return ""

    def in_callback(self) -> bool:
        return False  # deaths are reported in the thread of the listener

    def closing(self) -> Steps:
        return []  # the watch of the processes ends with the listener


def process_actors(*, daemon: bool = False) -> LaunchedActorSystem:
    """Return an actor system that runs every actor in a process of the fork server.

    ``daemon``: actors have no child processes, and this process does not wait for them at its end.
    """
    return LaunchedActorSystem(ProcessLauncher(daemon=daemon), Platform())


def _early_end(name: str, output: forkserver.StartupOutput, code: int | None, how: str) -> str:
    """Return why a process ended before it connected; log its error output."""
    lines, said = output.last_lines(), ""
    if lines:
        log.warning("error output of %s before it could start:\n  %s", name, "\n  ".join(lines))
        said = f"; its last error output: {lines[-1].strip():.300}"
    if code is None or code < 0:  # killed from outside, or a crash
        return f"{how}{said and ' before it could start'}{said}"
    return f"its process ended before it could start ({how}){said}; correct that, and launch again"


def _begin(process: forkserver.Process, name: str) -> None:
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
