"""Where segments lie: what the log asks of a place, which place a URI names, and what is said when
one refuses.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Protocol
from urllib.parse import unquote, urlsplit

from overlord.errors import JournalError
from overlord.uris import OBJECT_STORES, SCHEME, shown_uri, uri_problems

_FULL = (
    "free some space and append again, or resume when there is some: all that was "
    "acknowledged is kept"
)
_DENIED = "let the job write there, or give it another journal"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f) or make segments smaller: all that "
    "was acknowledged is kept",
    errno.EROFS: _DENIED,
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EIO: "the disk fails: copy the journal to another one and resume there; the segment is "
    "not written again",
    errno.ESTALE: "the server of the file system has lost the file: mount it anew, see that the "
    "segments are there, and resume",
    errno.ENOTDIR: "name a directory",
    errno.EEXIST: "name a directory",
    errno.ENOENT: "name a directory that is there",
}


class NameTaken(Exception):
    """There is a segment of that name, and it is not this one. ``data``: what it holds."""

    def __init__(self, name: str, data: bytes):
        super().__init__(name)
        self.name, self.data = name, data


class JournalStorage(Protocol):
    """Everything that is written is durable when the call returns; whatever goes wrong is a
    ``JournalError``.
    """

    shown: str  # for people: no secrets
    whole: bool  # a segment is written once and cannot be appended to

    def hold(self) -> None:
        """Become the writer, or say who is."""

    def names(self) -> list[str]:
        """Segments that are there, in order."""

    def fetch(self, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """What they hold. One that went away meanwhile is a ``FileNotFoundError``."""

    def settle(self, name: str) -> None:
        """Make durable what can be read of a segment: another process may have written it and
        died.
        """

    def create(self, name: str, data: bytes) -> None:
        """A new segment; ``NameTaken`` where there is one."""

    def prove(self, name: str, data: bytes) -> None:
        """That a second segment of that name would be refused; these are the bytes it was created
        with.
        """

    def append(self, name: str, data: bytes, at: int) -> None:
        """To the segment that was created last, which has so many bytes. After an error it is never
        appended to again.
        """

    def remove(self, names: Sequence[str]) -> None: ...

    def close(self) -> None: ...


def place_of(uri: str | os.PathLike[str]) -> JournalStorage:
    """The place of a directory's path or a store's URI. Nothing is opened yet."""
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
        shown_uri(text), f"expected a directory, or a URI with one of {known}, got {scheme}://"
    )


def refusal(path: str, doing: str, error: OSError) -> JournalError:
    """What the operating system said, with what to do."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    remedy = _REMEDIES.get(error.errno or 0, "mend it, and resume")
    return JournalError(path, f"could not {doing}: {error.strerror or error} ({name})", remedy)


def whoami() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
