"""The storage of segments: its protocol, the storage that a URI names, and its errors."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Protocol
from urllib.parse import unquote, urlsplit

from overlord.errors import JournalError
from overlord.uris import OBJECT_STORES, SCHEME, masked_uri, uri_problems

_FULL = (
    "free some space and append again, or resume when there is some: all that was "
    "acknowledged is kept"
)
_DENIED = "let the job write there, or give it another journal"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f) or make segments smaller: all "
    "that was acknowledged is kept",
    errno.EROFS: _DENIED,
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EIO: "the disk fails: copy the journal to another one and resume there; the segment is "
    "not written again",
    errno.ESTALE: "the server of the file system has lost the file: mount it again, check that the "
    "segments are there, and resume",
    errno.ENOTDIR: "name a directory",
    errno.EEXIST: "name a directory",
    errno.ENOENT: "name a directory that exists",
}


class NameTaken(Exception):
    """Another segment already has that name. ``data`` is its content."""

    def __init__(self, name: str, data: bytes):
        super().__init__(name)
        self.name, self.data = name, data


class JournalStorage(Protocol):
    """A storage for segments.

    Everything written is durable when the call returns. Every failure is a ``JournalError``.
    """

    shown: str  # for people: no secrets
    whole: bool  # a segment is written once and cannot be appended to

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

    def prove(self, name: str, data: bytes) -> None:
        """Check that a second segment of that name is refused.

        ``data`` is the content of the first.
        """

    def append(self, name: str, data: bytes, at: int) -> None:
        """Append to the segment that was created last, which has ``at`` bytes.

        After an error nothing is appended to that segment again.
        """

    def remove(self, names: Sequence[str]) -> None: ...

    def close(self) -> None: ...


def storage_of(uri: str | os.PathLike[str]) -> JournalStorage:
    """Return the storage of a directory's path or a store's URI, without opening it."""
    text = os.fspath(uri)
    if problems := uri_problems(text):
        raise JournalError("URI", problems[0])
    if not SCHEME.match(text):
        from overlord.journal.directory import DirectoryStorage

        return DirectoryStorage(text)
    scheme = text.split("://", 1)[0].lower()
    if scheme == "file":
        from overlord.journal.directory import DirectoryStorage

        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise JournalError(
                text,
                f"expected a file of this machine, got one of {parts.netloc!r}",
                "write file:///path",
            )
        return DirectoryStorage(unquote(parts.path))
    if scheme in OBJECT_STORES:
        from overlord.journal.object_store import ObjectStoreStorage

        return ObjectStoreStorage(text)
    known = ", ".join(f"{name}://" for name in ("file", *OBJECT_STORES))
    raise JournalError(
        masked_uri(text), f"expected a directory, or a URI with one of {known}, got {scheme}://"
    )


def refusal(path: str, doing: str, error: OSError) -> JournalError:
    """Return the error of the operating system as a ``JournalError`` with a remedy."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    remedy = _REMEDIES.get(error.errno or 0, "fix the cause, and resume")
    return JournalError(path, f"could not {doing}: {error.strerror or error} ({name})", remedy)


def whoami() -> str:
    """Return process id and host name of this process, as text."""
    return f"process {os.getpid()} on {socket.gethostname()}"
