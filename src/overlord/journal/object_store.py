"""A journal in an object store: one object for every append.

A store cannot append and has no locks. But it can refuse to overwrite an object, and segments are
numbered. The writer that creates the next number continues, and a writer that finds it taken has
been replaced. So a new writer fences off the old one with its first object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from overlord.errors import JournalError
from overlord.journal.segment import SUFFIX, ordinal_of
from overlord.journal.storage import NameTaken
from overlord.sources.base import File, StorageUnreachable
from overlord.sources.object_store import RemoteStore

T = TypeVar("T")
READERS = 16  # concurrent requests while a journal is read: each takes some ten milliseconds
AT_ONCE = 256  # objects held in memory while the first of them are parsed
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
        # The name is taken. It may be this very object: a request whose response was lost may have
        # been executed.
        found = self._look(name)
        # A store may report a conflict of two requests of which neither succeeded.
        if found is None and self._put(name, data):
            return
        found = self._look(name) if found is None else found
        if found != data:
            raise NameTaken(name, found or b"")

    def prove(self, name: str, data: bytes) -> None:
        """Check that the store refuses a second object of that name.

        A store that does not would let two writers continue concurrently.
        """
        if self._put(name, data):
            raise JournalError(
                f"{self.shown}/{name}",
                "expected the store to refuse a second object of that name, got it written",
                _NO_CONDITIONS,
            )

    def append(self, name: str, data: bytes, at: int) -> None:
        raise AssertionError("an object cannot be appended to")

    def remove(self, names: Sequence[str]) -> None:
        self._ask("", lambda: self._remote.delete([self._path(name) for name in names]))

    def close(self) -> None:
        """Do nothing: no file or lock is held."""

    def _put(self, name: str, data: bytes) -> bool:
        return self._ask(name, lambda: self._remote.create(self._path(name), data))

    def _look(self, name: str) -> bytes | None:
        entry = self._ask(name, lambda: self._remote.look(self._path(name)))
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
        """Execute a request; raise ``JournalError`` if the store refuses it."""
        try:
            return ask()
        except StorageUnreachable as error:
            raise self._refused(name, error) from None

    def _refused(self, name: str, error: StorageUnreachable) -> JournalError:
        remedy = (
            "Overlord never changes a segment: find and stop what does"
            if error.kind == "changed"
            else error.remedy
        )
        return JournalError(f"{self.shown}/{name}".rstrip("/"), error.problem, remedy)
