"""Storage of journal segments: its protocol, directories, object stores, and their errors."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from overlord.errors import JournalError
from overlord.journal.segments import SUFFIX, ordinal_of
from overlord.scaling.profile import PROFILE
from overlord.sources.base import File, StorageUnreachable
from overlord.sources.object_store import RemoteStore
from overlord.uris import OBJECT_STORES, SCHEME, masked_uri, uri_problems

log = logging.getLogger("overlord")

# ----------------------------------------------------------------------------
# The storage protocol, the storage that a URI names, and errors with remedies.

_FULL = "free some space and resume: all that was acknowledged is kept"
_DENIED = "let the job write there, or give it another journal"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f) or make segments smaller: all "
    "that was acknowledged is kept",
    errno.EROFS: _DENIED,
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EIO: "the disk fails: copy the journal to another disk and resume there",
    errno.ESTALE: "the server of the file system has lost the file: mount it again, check that the "
    "segments are there, and resume",
    errno.ENOTDIR: "name a directory",
    errno.EEXIST: "name a directory",
    errno.ENOENT: "name a directory that exists",
}


class NameTaken(Exception):
    """A segment of that name exists already; ``data`` is its content (empty if it vanished)."""

    def __init__(self, name: str, data: bytes):
        super().__init__(name)
        self.name, self.data = name, data


class JournalStorage(Protocol):
    """A storage for segments.

    Everything written is durable when the call returns. A failure is a ``JournalError``, unless the
    method names another exception.
    """

    shown: str  # the location without secrets, for errors
    whole: bool  # a segment is written once and cannot be appended to

    @property
    def writer(self) -> str:
        """The process that writes here, for errors of others."""

    def hold(self) -> None:
        """Become the writer; raise a ``JournalError`` that names the current writer, if any."""

    def names(self) -> list[str]:
        """Return the names of the segments, in order."""

    def fetch(self, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Read segments; raise ``FileNotFoundError`` if one was removed meanwhile."""

    def settle(self, name: str) -> None:
        """Make the readable content of a segment durable.

        Its writer may have died before it synced.
        """

    def create(self, name: str, data: bytes) -> None:
        """Create a segment; raise ``NameTaken`` if one has that name."""

    def check_exclusive(self, name: str, data: bytes) -> None:
        """Check that the storage refuses a second segment of that name.

        ``data`` is the content of the first.
        """

    def append(self, name: str, data: bytes, at: int) -> None:
        """Append to the segment that was created last, which has ``at`` bytes.

        After an error nothing is appended to that segment again.
        """

    def remove(self, names: Sequence[str]) -> None: ...

    def close(self) -> None: ...


def storage_of(uri: str | os.PathLike[str]) -> JournalStorage:
    """Return the storage of a directory's path or a store's URI, without opening it.

    Raise ``JournalError`` for a malformed URI, and for one of another kind of store.
    """
    text = os.fspath(uri)
    if problems := uri_problems(text):
        raise JournalError("URI", problems[0])
    if not SCHEME.match(text):
        return DirectoryStorage(text)
    scheme = text.split("://", 1)[0].lower()
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise JournalError(
                text,
                f"expected a file of this machine, got one of {parts.netloc!r}",
                "write file:///path",
            )
        return DirectoryStorage(unquote(parts.path))
    if scheme in OBJECT_STORES:
        return ObjectStoreStorage(text)
    known = ", ".join(f"{name}://" for name in ("file", *OBJECT_STORES))
    raise JournalError(
        masked_uri(text),
        f"expected a directory, or a URI with one of {known}, got {scheme}://",
        "use one of these",
    )


def refusal(path: str, doing: str, error: OSError) -> JournalError:
    """Return the error of the operating system as a ``JournalError`` with a remedy."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    remedy = _REMEDIES.get(error.errno or 0, "fix the cause, and resume")
    return JournalError(path, f"could not {doing}: {error.strerror or error} ({name})", remedy)


def process_label() -> str:
    """Return the id of this process and the name of its machine, as text."""
    return f"process {os.getpid()} on {socket.gethostname()}"


# ----------------------------------------------------------------------------
# Storage in a directory.
#
# Files are only appended to, by one writer at a time. An append is acknowledged once it is on the
# disk.

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

    @property
    def writer(self) -> str:
        return process_label()

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
        with suppress(OSError):  # only for errors; the first append detects a full disk
            os.ftruncate(fd, 0)
            os.pwrite(fd, self.writer.encode(), 0)
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
            # The segment was never acknowledged. If it stays, the next segment excludes it.
            with suppress(OSError):
                path.unlink()
            raise

    def check_exclusive(self, name: str, data: bytes) -> None:
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
            with suppress(OSError):  # not required: readers detect the end of the records
                os.ftruncate(self._file, at)
            raise refusal(f"{self.shown}/{name}", doing, error) from None
        try:
            _sync_data(self._file)
        except OSError as error:
            # The kernel may have dropped the bytes and marked them clean. A second sync would then
            # succeed without writing them.
            raise refusal(f"{self.shown}/{name}", f"{doing} and make them durable", error) from None

    def _close_file(self) -> None:
        """Close the open segment, if any, so that nothing more is appended to it."""
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


# ----------------------------------------------------------------------------
# Storage in an object store: one object for every append.
#
# A store cannot append and has no locks, but it can refuse to overwrite an object. Segments are
# numbered: the writer that creates the next number continues, and a writer that finds it taken was
# replaced. So a new writer fences off the old one with its first object.

T = TypeVar("T")
READERS = 16  # concurrent requests while a journal is read: each takes about ten milliseconds
AT_ONCE = 256  # objects that are held in memory at a time
_NO_CONDITIONS = (
    "the journal needs a store that refuses to overwrite an object (If-None-Match); use "
    "another store, or a directory"
)


class ObjectStoreStorage:
    """Segments as objects below one prefix of a store."""

    whole = True

    def __init__(self, uri: str):
        self._remote, self._base = RemoteStore.of(uri)
        self.shown = self._base
        self._files: dict[str, File] = {}

    @property
    def writer(self) -> str:
        return process_label()

    def hold(self) -> None:
        """Do nothing: the first object of a writer fences off the writers before it."""

    def names(self) -> list[str]:
        listed = self._ask("", lambda: self._remote.list(self._base, recursive=False))
        found = {
            entry.path.rpartition("/")[2]: entry.file
            for entry in listed
            if entry.file is not None and entry.path.endswith(SUFFIX)
        }
        if strange := [name for name in found if ordinal_of(name) < 0]:
            raise JournalError(
                self.shown,
                f"expected segments like 000000000000.ovj, got {strange[0]!r}",
                "remove it from the journal",
            )
        self._files = dict(sorted(found.items()))
        return list(self._files)

    def fetch(self, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        with ThreadPoolExecutor(READERS, "overlord-journal") as pool:
            for i in range(0, len(names), AT_ONCE):
                run = names[i : i + AT_ONCE]
                yield from zip(run, pool.map(self._read, run), strict=True)

    def _read(self, name: str) -> bytes:
        file = self._files[name]
        try:
            return bytes(self._remote.read(file, 0, file.size)) if file.size else b""
        except StorageUnreachable as error:
            fault = error
        if fault.kind == "gone":
            raise FileNotFoundError(f"{self.shown}/{name}")
        raise self._refused(name, fault)

    def settle(self, name: str) -> None:
        """Do nothing: an object that a store lists is durable."""

    def create(self, name: str, data: bytes) -> None:
        if self._put(name, data):
            return
        # The name is taken. The object may be this one: a request whose response was lost may have
        # been executed.
        found = self._read_if_any(name)
        # A store may report a conflict of two requests of which neither succeeded.
        if found is None and self._put(name, data):
            return
        found = self._read_if_any(name) if found is None else found
        if found != data:
            raise NameTaken(name, found or b"")

    def check_exclusive(self, name: str, data: bytes) -> None:
        """Check that the store refuses a second object of that name.

        A store that does not would let two writers continue concurrently.
        """
        if self._put(name, data):
            raise JournalError(
                f"{self.shown}/{name}",
                "expected the store to refuse a second object of that name, got an overwrite",
                _NO_CONDITIONS,
            )

    def append(self, name: str, data: bytes, at: int) -> None:
        raise AssertionError("an object store cannot append: the log creates a new segment")

    def remove(self, names: Sequence[str]) -> None:
        self._ask("", lambda: self._remote.delete([self._path(name) for name in names]))

    def close(self) -> None:
        """Do nothing: no file or lock is held."""

    def _put(self, name: str, data: bytes) -> bool:
        return self._ask(name, lambda: self._remote.create(self._path(name), data))

    def _read_if_any(self, name: str) -> bytes | None:
        entry = self._ask(name, lambda: self._remote.find(self._path(name)))
        if entry is None or entry.file is None:
            return None
        self._files[name] = entry.file
        try:
            return self._read(name)
        except FileNotFoundError:
            return None

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _ask(self, name: str, ask: Callable[[], T]) -> T:
        """Return the result of a request; raise ``JournalError`` if the store refuses it.

        ``name`` is the segment that the error names; "" for the whole journal.
        """
        try:
            return ask()
        except StorageUnreachable as error:
            raise self._refused(name, error) from None

    def _refused(self, name: str, error: StorageUnreachable) -> JournalError:
        remedy = (
            "stop the program that changes the segments: Overlord never does"
            if error.kind == "changed"
            else error.remedy
        )
        return JournalError(f"{self.shown}/{name}".rstrip("/"), error.problem, remedy)
