"""The inside of an actor that Ray started: it connects to its launcher and executes its calls.

Ray starts the process and reports its end. Calls do not pass through Ray. A call by connection
costs a tenth, nothing is pickled, and the code is the same as between processes of one machine.
This module does not import Ray.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from overlord.concurrency.platform import INTERFACE, NODE
from overlord.errors import ActorLost, FrameError
from overlord.process.code import build_code
from overlord.process.exit import exit_now
from overlord.ray.timeouts import TIMEOUTS
from overlord.rpc.actors import CONTROL, ActorServer, exit_code
from overlord.rpc.process_launcher import HANGUP
from overlord.transport.connection import TIMEOUT, SocketConnection
from overlord.transport.server import open_connection


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """The data with which an actor connects to its launching process.

    ``environ``, ``directory`` and ``path`` are those of the launching program.
    """

    name: str
    address: str
    token: str
    lease_id: int
    environ: Mapping[str, str] | None = None  # None: another machine, which has its own
    directory: str = ""
    path: tuple[str, ...] = ()  # sys.path


Call = tuple[int, bytes, list[np.ndarray]]


class ActorBody:
    """The base of the Ray actor class: its one method runs as long as the actor lives."""

    def serve(
        self, spec: LaunchSpec, interface: str, code: bytes, output: Mapping[str, Any]
    ) -> int | None:
        """Serve calls until the exit is requested (return None) or the actor exits (its exit code).

        Return 1 if the actor failed to start or to close. ``code`` has factory and arguments.
        ``output`` names the log files of the process, for the report of its end.
        """
        adopt_environment(spec, interface)
        hello = {
            "name": spec.name,
            "lease_id": spec.lease_id,
            "pid": os.getpid(),
            "machine": this_machine(),
            "output": output,
        }
        connection, _ = open_connection(
            spec.address, spec.token, hello, timeout_s=TIMEOUTS.connect_s
        )
        connection.max_held = 0  # messages are kept for long, so they are copied
        connection.waits_for_segments = False
        calls = CallConnection(connection)
        server = ActorServer(spec.name, calls.reply)
        try:
            # It is connected: from now on a failure or a suspension is detected.
            if server.build(lambda: build_code(code)):
                calls.serve(server)
                server.close()
        except SystemExit as e:
            return exit_code(e)
        else:
            return 1 if calls.faulty else None
        finally:
            calls.close()
            sys.stdout.flush()
            sys.stderr.flush()


class CallConnection:
    """The actor's end of the connection to its launching process.

    The thread that executes the calls also reads them. Another thread watches for the end of the
    connection. Then the process exits, even in the middle of a method.
    """

    def __init__(self, connection: SocketConnection):
        self._connection, self._closing = connection, False
        self.faulty = False  # whether the actor failed to start or to close
        threading.Thread(target=self._watch, name="overlord-watch", daemon=True).start()

    def serve(self, server: ActorServer) -> None:
        """Run calls until the launching process requests the exit of the actor."""
        while (call := self._next_call())[0] != CONTROL:
            server.perform(*call)

    def _next_call(self) -> Call:
        try:
            while (call := self._connection.recv(TIMEOUTS.idle_s)) is TIMEOUT:
                pass
        except (ActorLost, FrameError):
            self._exit()
            raise SystemExit(1) from None
        return call

    def reply(self, number: int, header: bytes, columns: list[np.ndarray]) -> None:
        """Send a reply; end this process if the launching one has exited or disconnected."""
        self.faulty = self.faulty or number == CONTROL
        try:
            self._connection.send((number, header, columns), timeout_s=TIMEOUTS.reply_s)
        except ActorLost:
            self._exit()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._connection.fileno(), HANGUP)
        poller.poll()
        self._exit()

    def _exit(self) -> None:
        """Exit, because the launching process has exited or disconnected.

        This also ends a process that Ray wrongly considers dead.
        """
        if not self._closing:
            exit_now(1)

    def close(self) -> None:
        self._closing = True
        self._connection.close("it exits")


def this_machine() -> str:
    """Return an id that is equal for processes that can signal each other by pid.

    The id is empty if the system does not report it.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink(
            "/proc/self/ns/pid"
        )
    except OSError:
        return ""


def adopt_environment(spec: LaunchSpec, interface: str) -> None:
    """Replace environment, directory and module path by those of the launching program.

    The environment of a Ray worker is from the start of the cluster. On another machine it stays,
    and only the module path is extended.
    """
    if spec.environ is not None:
        for key in [
            k
            for k in os.environ
            if k not in spec.environ and k != NODE and not k.startswith("RAY_")
        ]:
            del os.environ[key]
        os.environ.update({k: v for k, v in spec.environ.items() if not k.startswith("RAY_")})
        os.chdir(spec.directory)
    sys.path.extend(p for p in spec.path if p not in sys.path)
    if interface:  # unless the start of the node set one
        os.environ.setdefault(INTERFACE, interface)
