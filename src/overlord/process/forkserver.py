"""Processes of ours: started by one fork server that has the heavy modules loaded, and none
outlives the process that wanted it.
"""

from __future__ import annotations

import atexit
import fcntl
import io
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, popen_forkserver, reduction, spawn, util
from multiprocessing.context import ForkServerContext, ForkServerProcess, set_spawning_popen
from typing import Any

from overlord import import_path

# Loaded once, in the fork server: a process then starts in tens of milliseconds and shares these
# pages with all others. What
# stands here must start no Python thread when imported (a fork does not copy threads), and is best
# what every host needs.
PRELOAD = (
    "numpy",
    "overlord.process.preload",
    "overlord.rpc.process_server",
    "overlord.transforms.transform_process",
    "overlord.cluster.loader_worker",
    "overlord.cluster.constructor_worker",
    "overlord.cluster.coordinator_actor",
    "overlord.process.frozen_heap",
)

# A child that is sent something of the program's main file imports that file again.
UNGUARDED = (
    "; with worker processes a program is a file that can be imported, launches under "
    '`if __name__ == "__main__":`, '
    "and has the functions it sends above that line"
)


_starting = threading.Lock()
_server: Any = getattr(
    forkserver, "_forkserver", None
)  # private to Python; whatever is missing in it, we do without


class _Popen(popen_forkserver.Popen):
    """As Python's own, but a child imports the program's main file only if something it is sent is
    defined there. A trainer's main file imports torch: seconds, and hundreds of megabytes, in every
    host.
    """

    def _launch(self, process_obj: Any) -> None:
        prepared: dict[str, Any] = spawn.get_preparation_data(process_obj._name)
        sent = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(process_obj, sent)
            if b"__main__" not in sent.getbuffer().tobytes():
                prepared = {
                    key: value for key, value in prepared.items() if not key.startswith("init_main")
                }
            first = io.BytesIO()
            reduction.dump(prepared, first)
        finally:
            set_spawning_popen(None)
        _ensure_server()
        self.sentinel, pipe = forkserver.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        copy = os.dup(pipe)  # the child's sentinel of its parent
        self.finalizer = util.Finalize(self, util.close_fds, (copy, self.sentinel))  # type: ignore[attr-defined]
        with open(pipe, "wb", closefd=True) as file:
            file.write(first.getbuffer())
            file.write(sent.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class Process(ForkServerProcess):
    """A child of the fork server. Python joins all children when the program ends, and a thread of
    ours may close one at that moment.
    """

    _ended = False  # it is closed, or being closed

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        return _Popen(process_obj)

    def close(self) -> None:
        self._ended = True
        try:
            super().close()
        except ValueError:  # it still runs
            self._ended = False
            raise

    def join(self, timeout: float | None = None) -> None:
        """One that is closed has ended: nobody has to wait for it."""
        try:
            super().join(timeout)
        except (ValueError, AssertionError, AttributeError):  # by how far the closing is
            if not self._ended:
                raise


def context() -> ForkServerContext:
    """What every process of ours is started with. The list counts when the server starts, which is
    at the first process.
    """
    found = multiprocessing.get_context("forkserver")
    asked = list(getattr(_server, "_preload_modules", ["__main__"]))  # by the program itself
    asked = [] if asked == ["__main__"] else asked  # Python's default: see _Popen
    missing = [name for name in PRELOAD if name not in asked]
    if missing:
        found.set_forkserver_preload(
            missing + asked
        )  # how Arrow has its memory is decided by who loads it first
    return found


def process(**what: Any) -> Process:
    """One that is still to be started."""
    context()
    return Process(**what)


def warm_up() -> None:
    """Start the fork server now, so that it loads its modules while this process does something
    else.
    """
    context()
    _ensure_server()


def _ensure_server() -> None:
    """Start the fork server if none runs. It looks for modules where this process does.

    Python starts it with ``-c``, and an interpreter so started looks in its working directory
    first.
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
    """Set variables for a process that is started meanwhile."""
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


def leave_no_socket() -> None:
    """In the fork server: the file of its socket, and the folder of it, go when it ends. Python
    leaves that to the program, which cannot do it after a ``kill -9``. A child that was forked has
    the same function, and leaves the file where it is.
    """
    atexit.register(_remove_socket, os.getpid())


def _remove_socket(server: int) -> None:
    path = getattr(_server, "_forkserver_address", None)
    if os.getpid() == server and isinstance(path, str) and os.path.isabs(path):
        with suppress(OSError):  # the program was quicker, or keeps other things there
            os.unlink(path)
            os.rmdir(os.path.dirname(path))


def share_server() -> None:
    """In a child: its own children come from the same fork server. Python's ``ensure_running`` says
    so too, but starts a server for every child that has children, which costs 50 MB and a third of
    a second each.
    """
    if (
        getattr(_server, "_forkserver_address", None) is not None
        and getattr(_server, "_forkserver_alive_fd", None) is not None
    ):
        _server.ensure_running = lambda: None


def die_with_parent() -> None:
    """In a child: the kernel kills this process when its parent is gone, however that ended and
    whatever runs here.

    The parent holds the other end of a pipe that nobody writes to. A thread that waits for its end
    would need the interpreter lock, and user code in C may hold that for ever.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not hasattr(
        fcntl, "F_SETSIG"
    ):  # Linux only; elsewhere the end of the socket has to do
        return
    with suppress(OSError):  # a sandbox that does not know it
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(
            parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC
        )
    if select.select([parent.sentinel], [], [], 0)[0]:  # it went before we asked
        os._exit(1)


def how_it_ended(code: int | None) -> str:
    """An exit code in words; None: the fork server, which knows it, has not said it in time."""
    if code is None:
        return "it is not known how"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
