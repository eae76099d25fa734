"""Cleanup after Ray: files of its clusters, environment variables, a SIGTERM handler.

This module does not import Ray.
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

from overlord.ray.private_folder import (
    REMEDY,
    NotPrivate,
    exposure_of,
    make_private,
    rename_private,
)

log = logging.getLogger("overlord")

FOLDER = "ov-ray-"
UNFINISHED = "ov-new-"  # prefix of a folder that is not locked yet
LOCK = "lock"
RAY = "r"  # inside the folder: Ray creates files with mode 0777, whatever the umask is
# characters: the path of a socket has 107; Ray's own part takes 65, the folder 24, ``RAY`` 2
MAX_ROOT = 16
MAKING_S = 3600.0  # age after which the creator of an unfinished folder counts as killed


class SigtermHandler:
    """The SIGTERM handler of the program, to be restored after ``ray.init``.

    Ray replaces it by a handler that exits, so a trainer could not save its state on SIGTERM. If
    the program has no handler, Ray's stays while it is connected: it ends the processes of Ray.
    """

    def __init__(self) -> None:
        self._before = signal.getsignal(signal.SIGTERM)
        self._ray_handler: Any = None

    def keep(self) -> None:
        """Restore the program's handler after ``ray.init``, if the program has one."""
        now = signal.getsignal(signal.SIGTERM)
        if now is not self._before:
            self._ray_handler = now
            if self._before is not signal.SIG_DFL:
                self.restore()

    def restore(self) -> None:
        """Restore the program's handler after the disconnect, unless it has set another one since.

        It has an effect only in the main thread, in which Ray could set its own.
        """
        if self._ray_handler is not None and signal.getsignal(signal.SIGTERM) is self._ray_handler:
            # Not the main thread, or a handler that was not set from Python.
            with contextlib.suppress(ValueError, TypeError):
                signal.signal(signal.SIGTERM, self._before)


class Folder:
    """A folder of mode 0700 for the files of one Ray cluster.

    Ray opens its files to all accounts, but no other account can enter this folder. Its owner holds
    a lock in it. The kernel releases the lock when the process exits, for any reason. A pid would
    not suffice: containers that share the folder have their own pids.
    """

    def __init__(self, root: Path | None = None):
        root = root or _root()
        remove_leftovers(root)
        made = make_private(root, UNFINISHED)
        self._lock = os.open(made / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        # On a file system without locks, other programs cannot lock either and keep the folder.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The name appears only once the lock is held: a new folder is not taken for a leftover.
        self.path = root / f"{FOLDER}{os.getpid()}-{made.name.removeprefix(UNFINISHED)}"
        try:
            rename_private(made, self.path)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            os.close(self._lock)
            raise

    @property
    def for_ray(self) -> Path:
        """The folder for Ray's sessions."""
        return self.path / RAY

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_leftovers(root: Path) -> None:
    """Remove the folders below ``root`` that killed programs of this account have left."""
    for old in root.glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):
            if _is_own_folder(old):
                _remove_unheld(old)
    for old in root.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):
            if _is_own_folder(old) and time.time() - old.stat().st_mtime > MAKING_S:
                shutil.rmtree(old, ignore_errors=True)


def _remove_unheld(old: Path) -> None:
    try:
        lock = os.open(old / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    # It is being removed, or belongs to a version without locks, which has only the pid.
    except FileNotFoundError:
        pid = old.name.removeprefix(FOLDER).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(old, ignore_errors=True)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is held
        shutil.rmtree(old, ignore_errors=True)
    finally:
        os.close(lock)


def _is_own_folder(old: Path) -> bool:
    found = os.lstat(old)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _root() -> Path:
    """Return the folder of temporary files, in which folders for Ray are created.

    Return /tmp if its path is longer than ``MAX_ROOT``, or if other accounts can change it. Raise
    ``NotPrivate`` if they can change /tmp too.
    """
    root, standard = Path(tempfile.gettempdir()), Path("/tmp")
    why = exposure_of(root) if len(str(root)) <= MAX_ROOT else "too long"
    if why and root != standard:
        if why != "too long":
            log.warning(
                "files of Ray put into /tmp instead of %s, which other accounts can change (%s); "
                "set TMPDIR to a folder of this account to choose another",
                root,
                why,
            )
        root, why = standard, exposure_of(standard)
    if why:
        raise NotPrivate(
            f"{root}: expected a folder where other accounts cannot rename files of this "
            f"one, got one where {why}; {REMEDY}"
        )
    return root


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """Restore the environment after the block.

    With the variables that Ray sets, ``breakpoint()`` of a trainer opens Ray's debugger.
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
