"""Line numbers of byte offsets in text files, for messages.

Rows of JSON lines, CSV and text files are numbered by the offset of their first byte, which needs
no scan of the file. A line number needs one, so it is counted only for a message.
"""

from __future__ import annotations

import gzip
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from overlord.errors import SourceError

MAX_BYTES = 2**28  # text of one file that is read: a quarter of a second
WAIT_S = 2.0  # a message without line numbers is better than a late one
_BLOCK = 2**20
Place = tuple[str, int]  # path, and offset of a byte in its text


def line_numbers(places: Iterable[Place], wait_s: float = WAIT_S) -> dict[Place, int]:
    """Return the number of the line, counted from 1, with the byte at each place.

    The text of a compressed file is the decompressed one. Places are left out in files of a store
    or without lines, beyond ``MAX_BYTES``, and in files that cannot be read in time. Runs on: any
    thread.
    """
    by_file: dict[str, set[int]] = defaultdict(set)
    for path, offset in places:
        if 0 <= offset <= MAX_BYTES and "://" not in path and not path.endswith(".tar"):
            by_file[path].add(offset)
    found: dict[Place, int] = {}
    if not by_file:
        return found

    def count() -> None:
        for path, offsets in by_file.items():
            try:
                _count(path, sorted(offsets), found)
            except Exception:  # a message does not fail for its line numbers
                continue

    thread = threading.Thread(target=count, name="overlord-line-numbers", daemon=True)
    thread.start()
    thread.join(wait_s)
    return dict(found)


def rows_around(path: str, offset: int, wait_s: float = WAIT_S) -> tuple[int, int | None] | None:
    """Return the first byte of the line with the byte ``offset``, and that of row ``offset``.

    Rows count from 0. None: the file has no such byte or line, or cannot be read in time, as for
    ``line_numbers``. Runs on: any thread.
    """
    if not 0 <= offset <= MAX_BYTES or "://" in path or path.endswith(".tar"):
        return None
    found: list[tuple[int, int | None]] = []

    def search() -> None:
        try:
            found.extend(_around(path, offset))
        except Exception:  # an explanation does not fail for it
            return

    thread = threading.Thread(target=search, name="overlord-line-numbers", daemon=True)
    thread.start()
    thread.join(wait_s)
    return found[-1] if found else None


def add_line_number(error: BaseException) -> None:
    """Add a note with the line number to an error that names a byte of a file, unless it has one.

    Runs on: any thread.
    """
    if not isinstance(error, SourceError) or error.byte < 0:
        return
    where = f"byte {error.byte} of {error.path} is in line "
    if any(note.startswith(where) for note in getattr(error, "__notes__", ())):
        return
    place = (error.path, error.byte)
    if (line := line_numbers([place]).get(place)) is not None:
        error.add_note(f"{where}{line}")


def _count(path: str, offsets: list[int], found: dict[Place, int]) -> None:
    """Add the line numbers of ascending offsets of one file, which is read once."""
    at, line = 0, 1
    with _opened(path) as file:
        for offset in offsets:
            while at < offset and (block := file.read(min(offset - at, _BLOCK))):
                at, line = at + len(block), line + block.count(b"\n")
            if at < offset:
                return  # the file is shorter
            found[path, offset] = line


def _around(path: str, offset: int) -> Iterator[tuple[int, int | None]]:
    """Yield the start of the line with a byte, and then again with the start of that row."""
    at = start = lines = 0
    with _opened(path) as file:
        while at <= MAX_BYTES and (block := file.read(_BLOCK)):
            if at <= offset and (last := block[: offset - at].rfind(b"\n")) >= 0:
                start = at + last + 1
            if at <= offset < at + len(block):
                yield start, None
            count = block.count(b"\n")
            if lines <= offset <= lines + count and at + len(block) > offset:
                row = -1
                for _ in range(offset - lines):
                    row = block.index(b"\n", row + 1)
                if row + 1 < len(block) or file.read(1):
                    yield start, at + row + 1
                return
            at, lines = at + len(block), lines + count


def _opened(path: str) -> Any:
    opened: dict[str, Callable[[str], Any]] = {".gz": gzip.open, ".zst": _open_zstd}
    return opened.get(os.path.splitext(path)[1].lower(), _open_plain)(path)


def _open_plain(path: str) -> Any:
    return open(path, "rb", buffering=0)


def _open_zstd(path: str) -> Any:
    import zstandard  # an extra; the index refuses such files without it

    packed = open(path, "rb")  # noqa: SIM115 - the reader closes it
    return zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True, closefd=True)
