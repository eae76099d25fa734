"""A journal in a directory: files that are only ever appended to, one writer at a time, nothing
acknowledged before the disk has it.
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
_held: set[DirectoryStorage] = (
    set()
)  # not weak: who drops a log without closing it still has its files open


class DirectoryStorage:
    """The lock is the kernel's (flock): it ends with the process that holds it, however that ends.
    The file it is on stays.
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
                "stop that one first, or give this job another journal",
            ) from None
        with suppress(OSError):  # only for people; a full disk shows itself soon enough
            os.ftruncate(fd, 0)
            os.pwrite(fd, whoami().encode(), 0)
        self._lock = fd
        _held.add(self)
        if others:
            words = f"{', '.join(others[:3])}{', ...' * (len(others) > 3)}"
            log.warning(
                "journal %s: there are other things in this directory (%s); a journal "
                "had better have its own",
                self.shown,
                words,
            )

    def _make(self) -> None:
        """The directory, and every one above it that is missing, each durable in the one above."""
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
                "take it away",
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
        self._leave()
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
            self._leave()
            # What was never acknowledged may go; where it cannot, the next segment leaves it out.
            with suppress(OSError):
                path.unlink()
            raise

    def prove(self, name: str, data: bytes) -> None:
        """The kernel refuses it, and the lock stands before that."""

    def append(self, name: str, data: bytes, at: int) -> None:
        assert name == self._name, (
            f"expected an append to {self._name or 'none'}, got one to {name}"
        )
        assert self._file >= 0
        self._unchanged(name, at)
        try:
            self._write(name, data, at)
        except BaseException:
            self._leave()
            raise

    def _unchanged(self, name: str, at: int) -> None:
        """The file must be there, and as it was left: a journal that was removed takes every write
        and keeps none.
        """
        try:
            found = os.fstat(self._file)
        except OSError as error:  # the server of a network's file system has lost it
            self._leave()
            raise refusal(
                f"{self.shown}/{name}", f"be looked at before an append at byte {at}", error
            ) from None
        if found.st_nlink and found.st_size == at:
            return
        self._leave()
        what = (
            f"expected a file of {at} bytes, got "
            f"{f'one of {found.st_size}' if found.st_nlink else 'that it was removed'}"
        )
        raise JournalError(
            f"{self.shown}/{name}",
            what,
            "somebody else changes the journal: stop that, then resume",
        )

    def _write(self, name: str, data: bytes, at: int) -> None:
        view, doing = memoryview(data), f"append {len(data)} bytes at byte {at}"
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            with suppress(OSError):  # for those who look at the file; readers know where it ends
                os.ftruncate(self._file, at)
            raise refusal(f"{self.shown}/{name}", doing, error) from None
        try:
            _sync_data(self._file)
        except OSError as error:
            # The kernel may have dropped the bytes and call them clean: a second sync would succeed
            # and mean nothing.
            raise refusal(f"{self.shown}/{name}", f"{doing} and make them durable", error) from None

    def _leave(self) -> None:
        """No more appends to the file that is open."""
        if self._file >= 0:
            with suppress(OSError):  # it is closed all the same, and what counts was synced
                os.close(self._file)
        self._file, self._name = -1, ""

    def remove(self, names: Sequence[str]) -> None:
        """Oldest first: what is left after a kill is a run without holes."""
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
        self._leave()
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


def _let_go() -> None:
    """In a child after fork: it must neither write nor keep the lock alive when its parent is
    dead.
    """
    for place in list(_held):
        place.close()


os.register_at_fork(after_in_child=_let_go)
