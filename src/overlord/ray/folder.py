"""What Ray would leave behind: files of its clusters, settings in the environment, a handler of
SIGTERM. Nothing of Ray is imported in this file.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overlord.ray.private_folder import REMEDY, NotPrivate, exposed, make_private, rename_private

log = logging.getLogger("overlord")

FOLDER = "ov-ray-"
UNFINISHED = "ov-new-"  # a folder that has no lock yet
LOCK = "lock"
RAY = "r"  # inside the folder: Ray gives what it makes mode 0777, whatever the umask is
# letters: a socket's path has 107, of which Ray's own part takes 65, the folder 24 and ``RAY`` 2
MAX_ROOT = 16
MAKING_S = (
    3600.0  # far above what it takes to make a folder: who has not done so by then was killed
)


class Terminated:
    """What the program does when it is asked to end. Ray puts a handler of its own in its place,
    which leaves the program: a trainer that saves its state then would lose it. Where the program
    has none, Ray's is kept while it is connected: it ends what Ray has started.
    """

    def __init__(self) -> None:
        self._before = signal.getsignal(signal.SIGTERM)
        self._rays: Any = None

    def keep(self) -> None:
        """Ray is connected."""
        now = signal.getsignal(signal.SIGTERM)
        if now is not self._before:
            self._rays = now
            if self._before is not signal.SIG_DFL:
                self.restore()

    def restore(self) -> None:
        """It is not any more; one that somebody else has set meanwhile stays. Only in the thread in
        which Ray could set its own.
        """
        if self._rays is not None and signal.getsignal(signal.SIGTERM) is self._rays:
            with contextlib.suppress(
                ValueError, TypeError
            ):  # not of this thread; or set by another language
                signal.signal(signal.SIGTERM, self._before)


class Folder:
    """A folder of mode 0700 for one cluster: no other account reaches what Ray opens to all below
    it.

    Its owner holds a lock in it for as long as it lives: the kernel lets go of it when the process
    ends, however that ends. A number of a process would not do: containers that share the folder
    have numbers of their own.
    """

    def __init__(self, root: Path | None = None):
        root = root or _root()
        remove_left(root)
        made = make_private(root, UNFINISHED)
        self._lock = os.open(made / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with contextlib.suppress(
            OSError
        ):  # where files cannot be locked, others cannot either, and leave it alone
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Others see the name only now that the lock is held: one that is being made is not taken
        # for one that was left.
        self.path = root / f"{FOLDER}{os.getpid()}-{made.name.removeprefix(UNFINISHED)}"
        try:
            rename_private(made, self.path)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            os.close(self._lock)
            raise

    @property
    def for_ray(self) -> Path:
        """Where Ray puts its sessions."""
        return self.path / RAY

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left(root: Path) -> None:
    """Folders of programs that were killed."""
    for old in root.glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):
            if _ours(old):
                _remove_unheld(old)
    for old in root.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):
            if _ours(old) and time.time() - old.stat().st_mtime > MAKING_S:
                shutil.rmtree(old, ignore_errors=True)


def _remove_unheld(old: Path) -> None:
    try:
        lock = os.open(old / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    # it was being removed, or is of a version that had no locks: there the number is all that there
    # is
    except FileNotFoundError:
        pid = old.name.removeprefix(FOLDER).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(old, ignore_errors=True)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where somebody holds it
        shutil.rmtree(old, ignore_errors=True)
    finally:
        os.close(lock)


def _ours(old: Path) -> bool:
    found = os.lstat(old)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _root() -> Path:
    """Return the folder of temporary files, or /tmp where that has too long a path or other
    accounts can change it.
    """
    root, standard = Path(tempfile.gettempdir()), Path("/tmp")
    why = exposed(root) if len(str(root)) <= MAX_ROOT else "too long"
    if why and root != standard:
        if why != "too long":
            log.warning(
                "%s is not used for the files of Ray, /tmp is: other accounts can change "
                "it, since %s",
                root,
                why,
            )
        root, why = standard, exposed(standard)
    if why:
        raise NotPrivate(
            f"{root}: expected a folder where other accounts cannot rename files of this "
            f"one, got one where {why}; {REMEDY}"
        )
    return root


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """What is put into the environment meanwhile is taken out again: with Ray's, a trainer's
    ``breakpoint()`` opens a debugger of Ray.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        for key in os.environ.keys() - before.keys():
            del os.environ[key]
        os.environ.update(
            {key: value for key, value in before.items() if os.environ.get(key) != value}
        )
