"""A journal in a directory.

Files are only ever appended to, by one writer at a time. No append is acknowledged before it is on
the disk.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from overlord.errors import JournalError
from overlord.journal.segment import SUFFIX, ordinal_of
from overlord.journal.storage import NameTaken, refusal, whoami
from overlord.scaling.profile import PROFILE

log = logging.getLogger("overlord")

LOCK = "journal.lock"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
_sync_data = getattr(os, "fdatasync", os.fsync)  # it also makes a file's new length durable
# Storages that hold a lock. Not weak references: a log that is dropped without being closed still
# has its files open.
_held: set[DirectoryStorage] = set()


class DirectoryStorage:
    """Segments as files of one directory.

    The lock is the kernel's (flock): it is released when its process exits, for any reason. The
    lock file stays.
    """

    whole = False

    def __init__(self, path: str):
        self.path = Path(path).absolute()
        self.shown = str(self.path)
        self._lock = -1
        self._file = -1
        self._name = ""

    def hold(self) -> None:
        if self._lock >= 0:
            return
        try:
            self._make()
            others = (
                []
                if (self.path / LOCK).exists()
                else sorted(
                    n for n in os.listdir(self.path) if not n.endswith(SUFFIX) and n != PROFILE
                )
            )
            fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise refusal(self.shown, "be opened for writing", error) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise refusal(self.shown, "be locked", error) from None
            raise JournalError(
                self.shown,
                f"{holder} writes to it",
                "stop that process first, or give this job another journal",
            ) from None
        with suppress(OSError):  # only for people; the first append detects a full disk
            os.ftruncate(fd, 0)
            os.pwrite(fd, whoami().encode(), 0)
        self._lock = fd
        _held.add(self)
        if others:
            names = f"{', '.join(others[:3])}{', ...' * (len(others) > 3)}"
            log.warning(
                "journal %s: the directory also holds other files (%s); give the journal a "
                "directory of its own",
                self.shown,
                names,
            )

    def _make(self) -> None:
        """Create the directory and its missing parents, each durable in its own parent."""
        missing = [p for p in (self.path, *self.path.parents) if not p.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for made in reversed(missing):
            _sync_directory(made.parent)

    def names(self) -> list[str]:
        try:
            found = sorted(name for name in os.listdir(self.path) if name.endswith(SUFFIX))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise refusal(self.shown, "be listed", error) from None
        if strange := [name for name in found if ordinal_of(name) < 0]:
            raise JournalError(
                self.shown,
                f"expected segments like 000000000000.ovj, got {strange[0]!r}",
                "remove it from the journal",
            )
        return found

    def fetch(self, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        for name in names:
            try:
                data = (self.path / name).read_bytes()
            except FileNotFoundError:
                raise
            except OSError as error:
                raise refusal(f"{self.shown}/{name}", "be read", error) from None
            yield name, data

    def settle(self, name: str) -> None:
        try:
            fd = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise refusal(f"{self.shown}/{name}", "be made durable", error) from None
        self._sync_names()

    def create(self, name: str, data: bytes) -> None:
        self._close_file()
        path = self.path / name
        try:
            self._file = os.open(path, _NEW, 0o644)
        except FileExistsError:
            raise NameTaken(name, next(self.fetch([name]))[1]) from None
        except OSError as error:
            raise refusal(f"{self.shown}/{name}", "be created", error) from None
        self._name = name
        try:
            self._write(name, data, 0)
            self._sync_names()
        except BaseException:
            self._close_file()
            # The segment was never acknowledged. If it stays, the next segment leaves it out.
            with suppress(OSError):
                path.unlink()
            raise

    def prove(self, name: str, data: bytes) -> None:
        """Do nothing: the lock excludes other writers, and the kernel refuses a second file."""

    def append(self, name: str, data: bytes, at: int) -> None:
        assert name == self._name, (
            f"expected an append to {self._name or 'none'}, got one to {name}"
        )
        assert self._file >= 0
        self._check_unchanged(name, at)
        try:
            self._write(name, data, at)
        except BaseException:
            self._close_file()
            raise

    def _check_unchanged(self, name: str, at: int) -> None:
        """Check that the file exists and has the size it had after the last append.

        A file that was removed accepts every write and keeps none.
        """
        try:
            found = os.fstat(self._file)
        except OSError as error:  # the server of a network file system has lost the file
            self._close_file()
            raise refusal(
                f"{self.shown}/{name}", f"be checked before an append at byte {at}", error
            ) from None
        if found.st_nlink and found.st_size == at:
            return
        self._close_file()
        what = (
            f"expected a file of {at} bytes, got "
            f"{f'one of {found.st_size}' if found.st_nlink else 'a file that was removed'}"
        )
        raise JournalError(
            f"{self.shown}/{name}",
            what,
            "another process changes the journal: stop it, then resume",
        )

    def _write(self, name: str, data: bytes, at: int) -> None:
        view, doing = memoryview(data), f"append {len(data)} bytes at byte {at}"
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            with suppress(OSError):  # only for people; readers know where the records end
                os.ftruncate(self._file, at)
            raise refusal(f"{self.shown}/{name}", doing, error) from None
        try:
            _sync_data(self._file)
        except OSError as error:
            # The kernel may have dropped the bytes and marked them clean. A second sync would then
            # succeed without writing them.
            raise refusal(f"{self.shown}/{name}", f"{doing} and make them durable", error) from None

    def _close_file(self) -> None:
        """Close the open file; nothing more is appended to it."""
        if self._file >= 0:
            with suppress(OSError):  # the file is closed all the same, and its appends were synced
                os.close(self._file)
        self._file, self._name = -1, ""

    def remove(self, names: Sequence[str]) -> None:
        """Remove segments, oldest first: after a kill the rest is a sequence without gaps."""
        for name in names:
            try:
                (self.path / name).unlink(missing_ok=True)
            except OSError as error:
                raise refusal(f"{self.shown}/{name}", "be removed", error) from None
        if names:
            self._sync_names()

    def _sync_names(self) -> None:
        try:
            _sync_directory(self.path)
        except OSError as error:
            raise refusal(self.shown, "make its list of segments durable", error) from None

    def close(self) -> None:
        self._close_file()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1
        _held.discard(self)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _close_in_child() -> None:
    """Close all storages in a forked child.

    The child must not write, nor keep the lock when its parent exits.
    """
    for storage in list(_held):
        storage.close()


os.register_at_fork(after_in_child=_close_in_child)
