"""Reader of the members of a tar file, by offset: ustar, pax and GNU long names.

Nothing is extracted to disk. Files are not trusted: every size is compared with that of the file,
and extended headers are bounded. A header with a wrong checksum ends the reading with an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from overlord.sources.base import short_read
from overlord.sources.files import BLOCK

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_SIZE = 512
MAX_HEADER = 2**20  # bytes of one pax or long-name header; real ones have hundreds
_ZEROS = bytes(BLOCK_SIZE)
_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a fifo",
    b"S": "a sparse file",
    b"M": "a part of a multi-volume archive",
    b"V": "a volume label",
}


class Member(NamedTuple):
    name: str
    header: int  # offset of its first header block, extended headers included
    data: int  # offset of its first byte of content
    size: int
    problem: str = ""  # reason why the member is refused; empty if it is a regular file


class BrokenTar(Exception):
    """Raised if the archive is invalid from ``offset`` on, or lacks its end-of-archive block.

    ``offset`` is that of the first header of the member that cannot be read.
    """

    def __init__(self, offset: int, problem: str):
        super().__init__(offset, problem)
        self.offset, self.problem = offset, problem


class TarCursor:
    """Reader of a tar file in large pieces, front to back; large skipped members are not read.

    In a store a few long reads are faster than many short ones.
    """

    def __init__(self, handle: pa.NativeFile, size: int):
        self.size = size
        self._handle, self._at, self._piece = handle, 0, b""

    def read(self, offset: int, n: int) -> bytes:
        """Return n bytes at ``offset``; fewer only at the end of the file.

        Raises StorageUnreachable if the file is shorter than its indexed size.
        """
        skip = offset - self._at
        if skip >= 0 and skip + n <= len(self._piece):
            return self._piece[skip : skip + n]
        self._handle.seek(offset)
        data = self._handle.read(max(n, BLOCK))
        if (missing := min(offset + max(n, BLOCK), self.size) - offset - len(data)) > 0:
            raise short_read(missing)
        if n >= BLOCK:
            return data
        self._at, self._piece = offset, data
        return data[:n]


def members(cursor: TarCursor) -> Iterator[Member]:
    """Yield regular and refused members, in file order; directories are skipped.

    Raises BrokenTar.
    """
    at, first, long_name, pax = 0, 0, b"", dict[str, bytes]()
    while True:
        block = cursor.read(at, BLOCK_SIZE)
        if block == _ZEROS:
            return
        if len(block) < BLOCK_SIZE:
            wanted = "a complete header" if block else "the end-of-archive block"
            raise BrokenTar(
                first,
                f"expected {wanted} of the tar file at byte {at}, got the end of the file: it is "
                "truncated",
            )
        _check(block, first)
        kind, size = block[156:157], _size(block, pax, first)
        data, following = at + BLOCK_SIZE, at + BLOCK_SIZE + -(-size // BLOCK_SIZE) * BLOCK_SIZE
        if kind in (b"5", b"1", b"2", b"3", b"4", b"6"):
            following = data if kind != b"5" or size == 0 else following
        if following > data and data + size > cursor.size:
            raise BrokenTar(
                first,
                f"expected a member up to byte {data + size} of the tar file, got the end of the "
                f"file at byte {cursor.size}: it is truncated",
            )
        if kind in (b"x", b"X", b"L", b"K", b"g"):
            if size > MAX_HEADER:
                raise BrokenTar(
                    first,
                    f"expected an extended tar header of at most {MAX_HEADER} bytes at byte {at}, "
                    f"got {size}",
                )
            body = cursor.read(data, size)
            if kind in (b"x", b"X"):
                pax = _pax(body, first)
            elif kind == b"L":
                long_name = body.rstrip(b"\0")
            at = following
            continue
        if kind != b"5":
            yield _member(block, kind, pax, long_name, (first, data, size))
        at = first = following
        long_name, pax = b"", {}


def _member(
    block: bytes, kind: bytes, pax: dict[str, bytes], long_name: bytes, place: tuple[int, int, int]
) -> Member:
    raw = pax.get("path") or long_name or _short_name(block)
    problem = ""
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        name, problem = raw.decode(errors="backslashreplace"), "has a name that is not UTF-8"
    if kind in _KINDS:
        problem = f"is {_KINDS[kind]}"
    elif kind not in (b"0", b"\0", b"7"):
        problem = f"has the unknown type {kind!r}"
    elif any(key.startswith("GNU.sparse") for key in pax):
        problem = "is a sparse file"
    elif name.startswith("/") or ".." in name.split("/"):
        problem = problem or "has a name outside the archive"
    return Member(name, *place, problem)


def _short_name(block: bytes) -> bytes:
    name = block[:100].split(b"\0", 1)[0]
    # GNU tar has the magic "ustar " and stores other data where ustar has the prefix.
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _check(block: bytes, first: int) -> None:
    """Raise BrokenTar if the checksum of a header is wrong; the checksum field counts as blanks.

    Some old writers sum signed bytes, so that sum is accepted too.
    """
    try:
        wanted = int(block[148:156].strip(b" \0") or b"0", 8)
    except ValueError:
        wanted = -1
    body = block[:148] + block[156:]
    unsigned = 256 + sum(body)
    if wanted != unsigned and wanted != unsigned - 256 * sum(b > 127 for b in body):
        raise BrokenTar(first, f"expected the checksum {unsigned} in a tar header, got {wanted}")


def _size(block: bytes, pax: dict[str, bytes], first: int) -> int:
    field = block[124:136]
    try:
        if "size" in pax:
            size = int(pax["size"])
        elif field[0] & 0x80:  # base 256, for members of 8 GB and more
            size = int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1
        else:
            size = int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError:
        size = -1
    if size < 0:
        given = pax.get("size", field)
        raise BrokenTar(first, f"expected a size of at least 0 in a tar header, got {given[:20]!r}")
    return size


def _pax(body: bytes, first: int) -> dict[str, bytes]:
    """Return the values of a pax header by key. Raises BrokenTar.

    A record is ``"<length> <key>=<value>\\n"``; the length counts the whole record.
    """
    records, at = dict[str, bytes](), 0
    while at < len(body) and body[at : at + 1] != b"\0":
        blank = body.find(b" ", at, at + 20)
        digits = body[at:blank] if blank > 0 else b""
        end = at + int(digits) if digits.isdigit() else -1
        record = body[blank + 1 : end - 1]
        if (
            blank < 0
            or end <= blank + 1
            or end > len(body)
            or body[end - 1 : end] != b"\n"
            or b"=" not in record
        ):
            got = body[at : at + 20]
            raise BrokenTar(
                first, f"expected a record '<length> <key>=<value>' in a pax header, got {got!r}"
            )
        key, _, value = record.partition(b"=")
        records[key.decode(errors="replace")] = value
        at = end
    return records
