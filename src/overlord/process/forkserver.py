"""Child processes, started by one fork server with the heavy modules loaded.

No child outlives its parent.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib
import io
import multiprocessing
import operator
import os
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, popen_forkserver, reduction, spawn, util
from multiprocessing.context import ForkServerContext, ForkServerProcess, set_spawning_popen
from typing import IO, Any

from overlord import import_path
from overlord.process.exit import exit_now

# Modules that are loaded once, in the fork server: a process then starts in tens of milliseconds
# and shares their pages with all others. They must start no Python thread on import, since a fork
# does not copy threads. Every worker should need them.
PRELOAD = (
    "numpy",
    "overlord.process.preload",
    "cloudpickle",
    "overlord.rpc.process_launcher",
    "overlord.transforms.transform_process",
    "overlord.cluster.loader_worker",
    "overlord.cluster.constructor_worker",
    "overlord.cluster.coordinator_actor",
    "overlord.process.frozen_heap",
)

_starting = threading.Lock()
_server: Any = getattr(forkserver, "_forkserver", None)  # private to Python: it may be missing


class _Popen(popen_forkserver.Popen):
    """Python's fork-server ``Popen``, except that no child imports the program's main file.

    Definitions of that file cross by value (``process/code.py``). A trainer's main file imports
    torch: seconds, and hundreds of megabytes, in every worker.
    """

    def _launch(self, process_obj: Any) -> None:
        prepared = {
            key: value
            for key, value in spawn.get_preparation_data(process_obj._name).items()
            if not key.startswith("init_main")
        }
        sent = io.BytesIO()
        set_spawning_popen(self)
        try:
            if process_obj.startup_output is not None:  # first: from then on all is collected
                prepared = {"startup_output": process_obj.startup_output.redirect(), **prepared}
            reduction.dump(prepared, sent)
            reduction.dump(process_obj, sent)
        finally:
            set_spawning_popen(None)
        _ensure_server()
        self.sentinel, pipe = forkserver.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        copy = os.dup(pipe)  # the child's sentinel of its parent
        self.finalizer = util.Finalize(self, util.close_fds, (copy, self.sentinel))  # type: ignore[attr-defined]
        with open(pipe, "wb", closefd=True) as file:
            file.write(sent.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


_STARTUP = "_overlord_startup_output"  # attribute of ``sys`` in a child
OUTPUT_BYTES = 2**16  # of the error output that is read
OUTPUT_LINES = 20  # the most that is reported


class _Deferred:
    """A call that is executed where the object is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self._reduced = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


class StartupOutput:
    """The error output of a child before it has started, in a file without a name.

    A child that fails then, for example in an import, can report no error in another way. The
    child's own error output is restored by ``release_startup_output``.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] = (
            open(os.memfd_create("startup-output"), "w+b", buffering=0)  # noqa: SIM115
            if hasattr(os, "memfd_create")
            else tempfile.TemporaryFile()  # noqa: SIM115
        )

    def redirect(self) -> list[_Deferred]:
        """Return the calls that redirect the error output of a child.

        They use Python's own modules only, because they precede the module path of the child. Call
        while the child is being spawned.
        """
        copy = reduction.DupFd(self._file.fileno())
        file = _Deferred(operator.methodcaller("detach"), copy)
        module = _Deferred(importlib.import_module, "sys")
        return [
            _Deferred(setattr, module, _STARTUP, (_Deferred(os.dup, 2), file)),
            _Deferred(os.dup2, file, 2),
        ]

    def last_lines(self) -> list[str]:
        """Return the last lines of the output, without empty ones."""
        size = os.fstat(self._file.fileno()).st_size
        start = max(0, size - OUTPUT_BYTES)
        text = os.pread(self._file.fileno(), size - start, start).decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-OUTPUT_LINES:]

    def close(self) -> None:
        self._file.close()


def release_startup_output() -> None:
    """Restore the error output of this process, and write there what was collected before.

    Call it in a child that has started.
    """
    kept, file = sys.__dict__.pop(_STARTUP, (None, None))
    if kept is None:
        return
    sys.stderr.flush()
    os.dup2(kept, 2)
    at = 0
    with suppress(OSError):  # the error output is closed
        while data := os.pread(file, OUTPUT_BYTES, at):
            at += os.write(2, data)
    os.close(kept)
    os.close(file)


class Process(ForkServerProcess):
    """A child of the fork server that may be closed while another thread joins it.

    Python joins all children at the end of the program, and a thread of this package may close one
    at that moment.
    """

    _ended = False  # closed, or being closed
    startup_output: StartupOutput | None = None  # receives its error output until it has started

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        return _Popen(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        return {key: v for key, v in self.__dict__.items() if key != "startup_output"}

    def close(self) -> None:
        self._ended = True
        try:
            super().close()
        except ValueError:  # it is still running
            self._ended = False
            raise

    def join(self, timeout: float | None = None) -> None:
        """Wait for the process to exit; a closed process has exited already."""
        try:
            super().join(timeout)
        except (
            ValueError,
            AssertionError,
            AttributeError,
        ):  # depends on the progress of the concurrent close
            if not self._ended:
                raise


def context() -> ForkServerContext:
    """Return the multiprocessing context of all workers, with ``PRELOAD`` in its preload list.

    The preload list takes effect when the fork server starts.
    """
    found = multiprocessing.get_context("forkserver")
    requested = list(
        getattr(_server, "_preload_modules", ["__main__"])
    )  # set by the program itself
    requested = [] if requested == ["__main__"] else requested  # Python's default: see _Popen
    missing = [name for name in PRELOAD if name not in requested]
    if missing:
        # PRELOAD comes first, since the first import of Arrow decides its memory pool.
        found.set_forkserver_preload(missing + requested)
    return found


def process(*, startup_output: StartupOutput | None = None, **arguments: Any) -> Process:
    """Return a child process of the fork server that is not started yet.

    ``startup_output`` receives its error output until it calls ``release_startup_output``.
    """
    context()
    made = Process(**arguments)
    made.startup_output = startup_output
    return made


def warm_up() -> None:
    """Start the fork server now, so that it loads its modules while this process continues."""
    context()
    _ensure_server()


def _ensure_server() -> None:
    """Start the fork server if none runs, with the module path of this process.

    Python starts it with ``-c``, and such an interpreter searches its working directory first.
    """
    if (
        _server is None
        or not hasattr(_server, "ensure_running")
        or _runs(getattr(_server, "_forkserver_pid", None))
    ):
        return
    with _starting, _environment(import_path.settings()):
        _server.ensure_running()


def _runs(pid: int | None) -> bool:
    try:
        return (
            pid is not None
            and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        )
    except ChildProcessError:
        return False


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, for a process that is started there."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def remove_socket_at_exit() -> None:
    """Remove the fork server's socket and its folder when the server exits.

    Call it in the fork server. Python leaves the removal to the program, which cannot do it after
    ``kill -9``. A forked child inherits the handler, which then does nothing.
    """
    atexit.register(_remove_socket, os.getpid())


def _remove_socket(server: int) -> None:
    path = getattr(_server, "_forkserver_address", None)
    if os.getpid() == server and isinstance(path, str) and os.path.isabs(path):
        with suppress(OSError):  # the program removed it first, or keeps other files there
            os.unlink(path)
            os.rmdir(os.path.dirname(path))


def share_server() -> None:
    """Make this child start its own children from the fork server of its parent.

    Call it in a child. Python's ``ensure_running`` would start another server in every child that
    has children. Each costs 50 MB and a third of a second.
    """
    if (
        getattr(_server, "_forkserver_address", None) is not None
        and getattr(_server, "_forkserver_alive_fd", None) is not None
    ):
        _server.ensure_running = lambda: None


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent exits. Call it in a child.

    The parent holds the other end of a pipe to which nothing is written, so its exit is signalled.
    A thread that waits for the exit would need the interpreter lock, which user code in C may hold
    forever.
    """
    parent = multiprocessing.parent_process()
    # Linux only; elsewhere the closed connection must suffice.
    if parent is None or not hasattr(fcntl, "F_SETSIG"):
        return
    with suppress(OSError):  # a sandbox may forbid these calls
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(
            parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC
        )
    if select.select([parent.sentinel], [], [], 0)[0]:  # the parent exited before the calls above
        exit_now(1)


def describe_exit(code: int | None) -> str:
    """Return an exit code as text; None means that the fork server has not reported it in time."""
    if code is None:
        return "exit code unknown"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
