"""Peers that send invalid data after the handshake: only their own connection ends, with the
reason.
"""

from __future__ import annotations

import array
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from overlord.errors import ActorLost, FrameError
from overlord.transport import codec, frame
from overlord.transport.frame import BYE, FORGET, FRAME, HEAD, POOL, SHARED
from overlord.transport.frame import HEAD_MAGIC as ENVELOPE
from overlord.transport.shared_memory import RELEASE_FLAGS, sealed_memfd
from overlord.transport.value_codec import SMALL_BYTES
from tests.connections import MB, SOON_S, TOKEN, Story, dialled, message, raw, watched_story


@pytest.fixture
def story() -> Iterator[Story]:
    with watched_story() as story:
        yield story


def packet(
    kind: int, body: bytes, files: int = 0, *, reserved: int = 0, size: int | None = None
) -> bytes:
    return HEAD.pack(ENVELOPE, kind, files, reserved, len(body) if size is None else size) + body


def framed(header: bytes, *columns: np.ndarray) -> bytes:
    return b"".join(bytes(piece) for piece in frame.pack(header, columns))


def value_of(value: Any) -> bytes:
    header, columns = codec.encode(value)
    return framed(header, *columns)


def shared(grants: list[tuple[int, int, int]], *refs: tuple[int, ...]) -> bytes:
    """Return a message by reference, with one row of (column, grant, offset, dtype code, dims,
    shape...) per column.
    """
    header, _ = codec.encode([np.zeros(SMALL_BYTES + 1, np.uint8) for _ in refs])
    table = struct.pack("<II", len(grants), len(refs)) + b"".join(
        struct.pack("<QQQ", *grant) for grant in grants
    )
    for column, grant, offset, code, dims, *shape in refs:
        table += struct.pack(
            "<QQQBB6x8Q", column, grant, offset, code, dims, *shape, *[0] * (8 - len(shape))
        )
    return table + bytes(-len(table) % frame.ALIGN) + framed(header)


def memfd(nbytes: int = 4096) -> int:
    return sealed_memfd("x", nbytes, others_write=False)[0]


def send(sock: socket.socket, data: bytes, files: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    sock.sendmsg([data], rights)
    for fd in files:
        os.close(fd)


def opened_pool(sock: socket.socket) -> None:
    send(
        sock,
        packet(POOL, struct.pack("<I", RELEASE_FLAGS), 2),
        [sealed_memfd("c", RELEASE_FLAGS, others_write=True)[0], os.eventfd(0)],
    )


Attack = Callable[[socket.socket], None]
Files = Callable[[], list[int]]


def of_segment(
    refs: Callable[[], bytes], files: Files = lambda: [memfd()], said: int | None = None
) -> Attack:
    def attack(sock: socket.socket) -> None:
        opened_pool(sock)
        passed = files()
        send(sock, packet(SHARED, refs(), len(passed) if said is None else said), passed)

    return attack


def just(data: bytes, files: Files = list) -> Attack:
    return lambda sock: send(sock, data, files())


NEW = [(1, 0, 4096)]  # segment 1, flag 0, new with 4096 bytes
CODE = frame.CODES[np.dtype(np.uint8)]
ONE = (0, 0, 0, CODE, 1, 10)  # column 0 is in the first grant at offset 0: ten bytes
POOL_OF = packet(POOL, struct.pack("<I", RELEASE_FLAGS), 2)
ATTACKS: dict[str, tuple[Attack, str]] = {
    "garbage": (just(random.Random(2).randbytes(100_000)), "expected the header of a message"),
    "an unknown kind": (just(packet(9, b"")), "expected the header of a message"),
    "reserved bits": (
        just(packet(FRAME, value_of(1), reserved=5)),
        "expected the header of a message",
    ),
    "an endless body": (just(packet(FRAME, b"", size=2**62)), "bytes in a message of kind"),
    "an endless notice": (just(packet(BYE, b"", size=2**20)), "bytes in a message of kind"),
    "a broken frame": (just(packet(FRAME, random.Random(3).randbytes(300))), "expected a frame"),
    "a broken checksum": (just(packet(FRAME, value_of([1, 2])[:-1] + b"\x99")), "checksum"),
    "a value that cannot be": (just(packet(FRAME, framed(b"\xc1"))), "frame"),
    "half a segment number": (just(packet(FORGET, b"123")), "segment ids of 8 bytes"),
    "a file that nothing announced": (
        just(packet(FRAME, value_of(1)), lambda: [memfd()]),
        "no message announced",
    ),
    "a file that a frame does not want": (
        just(packet(FRAME, value_of(1), 1), lambda: [memfd()]),
        "expected 0 open files",
    ),
    "files that did not come": (just(packet(FRAME, value_of(1), 3)), "expected 3 open files"),
    "more files than announced": (
        of_segment(lambda: shared(NEW, ONE), lambda: [memfd(), memfd()], said=1),
        "no message announced",
    ),
    "more files than segments": (
        of_segment(lambda: shared(NEW, ONE), lambda: [memfd(), memfd()]),
        "expected 1 open files",
    ),
    "too many files": (
        just(packet(FRAME, value_of(1), 200), lambda: [memfd() for _ in range(200)]),
        "at most 128 open files",
    ),
    "a segment without a ring": (
        just(packet(SHARED, shared(NEW, ONE), 1), lambda: [memfd()]),
        "expected one of the mapped segments",
    ),
    "an unknown segment": (of_segment(lambda: shared([(7, 0, 0)], ONE), list), "got segment 7"),
    "a place outside the segment": (
        of_segment(lambda: shared(NEW, (0, 0, 4090, CODE, 1, 10))),
        "within the 4096 bytes of its segment",
    ),
    "a place far outside": (
        of_segment(lambda: shared(NEW, (0, 0, 2**64 - 8, CODE, 1, 10))),
        "within the 4096 bytes",
    ),
    "a size that overflows": (
        of_segment(lambda: shared(NEW, (0, 0, 0, CODE, 3, 2**62, 2**62, 2**62))),
        "within the 4096 bytes",
    ),
    "a shape that cannot be": (
        of_segment(lambda: shared(NEW, (0, 0, 0, CODE, 3, 0, 2**62, 2**62))),
        "a shape that fits memory",
    ),
    "too many dimensions": (
        of_segment(lambda: shared(NEW, (0, 0, 0, CODE, 9))),
        "at most 8 dimensions",
    ),
    "an unknown dtype": (
        of_segment(lambda: shared(NEW, (0, 0, 0, 77, 1, 10))),
        "a dtype code below",
    ),
    "an unknown grant": (
        of_segment(lambda: shared(NEW, (0, 3, 0, CODE, 1, 10))),
        "a dtype code below",
    ),
    "a column twice": (of_segment(lambda: shared(NEW, ONE, ONE)), "distinct columns"),
    "a column too far": (
        of_segment(lambda: shared(NEW, (5, 0, 0, CODE, 1, 10))),
        "distinct columns",
    ),
    "a flag too far": (
        of_segment(lambda: shared([(1, RELEASE_FLAGS, 4096)], ONE)),
        "a free release flag",
    ),
    "a flag twice": (
        of_segment(lambda: shared([(1, 0, 4096), (1, 0, 0)], ONE)),
        "a free release flag",
    ),
    "a segment twice": (
        of_segment(lambda: shared([(1, 0, 4096), (1, 1, 4096)], ONE), lambda: [memfd(), memfd()]),
        "expected a new segment",
    ),
    "more references than there are": (
        of_segment(lambda: struct.pack("<II", 2**31, 2**31) + bytes(500), list),
        "grants and",
    ),
    "no references": (of_segment(lambda: b"123", list), "bytes in a shared message"),
    "columns that nobody fills": (
        of_segment(
            lambda: struct.pack("<II", 0, 0) + bytes(56) + value_of(np.zeros(5))[:-40], list
        ),
        "frame",
    ),
    "a file that is no memory": (
        of_segment(lambda: shared(NEW, ONE), lambda: [os.open("/dev/zero", os.O_RDWR)]),
        "another kind of file",
    ),
    "memory that is shorter than said": (
        of_segment(lambda: shared(NEW, ONE), lambda: [memfd(100)]),
        "expected 4096 bytes",
    ),
    "memory that can shrink": (
        of_segment(
            lambda: shared(NEW, ONE),
            lambda: [os.memfd_create("x", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)],
        ),
        "no seal",
    ),
    "a notifier that is none": (
        just(
            POOL_OF,
            lambda: [
                sealed_memfd("c", RELEASE_FLAGS, others_write=True)[0],
                os.open("/dev/null", os.O_RDWR),
            ],
        ),
        "expected an eventfd",
    ),
    "flags that others may not write": (
        just(
            POOL_OF,
            lambda: [sealed_memfd("c", RELEASE_FLAGS, others_write=False)[0], os.eventfd(0)],
        ),
        "could not map",
    ),
}


@pytest.mark.parametrize("what", ATTACKS)
def test_a_connection_that_lies_ends_with_its_reason_and_no_other(story: Story, what: str):
    attack, text = ATTACKS[what]
    with raw(story.address) as sock:
        attack(sock)
        story.wait(lambda s: s.closed)
        link, reason = story.closed[0]
        assert (link.peer, text in reason) == ("hostile", True), reason
        assert b"OV" in _rest(sock)  # it received the reason
    assert story.got == []


def _rest(sock: socket.socket) -> bytes:
    got = b""
    try:
        while some := sock.recv(65536):
            got += some
    except ConnectionResetError:
        pass
    return got


def test_files_over_tcp_are_no_files(story: Story):
    with raw(story.address, transport="tcp") as sock:
        sock.sendall(packet(FRAME, value_of(1), 1))
        story.wait(lambda s: s.closed)
        assert "at most 0 open files" in story.closed[0][1]


def test_a_segment_passed_as_it_should_be_is_read(story: Story):
    """The counter-test of the attacks above: the same message without a fault."""
    fd, memory = sealed_memfd("x", 4096, others_write=False)
    memory[:10] = b"0123456789"
    with raw(story.address) as sock:
        opened_pool(sock)
        send(sock, packet(SHARED, shared(NEW, (0, 0, 2, CODE, 1, 4)), 1), [fd])
        story.wait(lambda s: s.got)
        assert bytes(story.got[0][0]) == b"2345"
    story.wait(lambda s: s.closed)


def test_garbage_from_a_server_ends_the_clients_connection_with_its_reason():
    """A client checks as carefully as a server."""
    with Story() as story, dialled(story.address) as link:
        story.wait(lambda s: s.opened)
        os.write(story.opened[0].fileno(), b"not a message, not at all")
        with pytest.raises(FrameError, match="expected the header of a message"):
            link.recv(SOON_S)
        with pytest.raises(ActorLost, match="expected the header of a message"):
            link.recv(SOON_S)
        story.wait(lambda s: s.closed)
        assert "expected the header of a message" in story.closed[0][1]


def test_a_callback_that_fails_ends_only_its_connection():
    from overlord.transport.server import Server

    def on_message(link: Any, value: Any) -> None:
        link.send(1 / value)

    with (
        Server(token=TOKEN, on_message=on_message) as server,
        dialled(server.address) as bad,
        dialled(server.address) as good,
    ):
        bad.send(0)
        with pytest.raises(ActorLost, match="ZeroDivisionError"):
            bad.recv(SOON_S)
        good.send(2)
        assert good.recv(SOON_S) == 0.5


def test_random_bytes_of_every_length_never_stop_the_server(story: Story):
    rng = random.Random(7)
    before = len(story.closed)
    for k in range(60):
        good = packet(FRAME, value_of({"k": k, "a": np.arange(rng.randrange(50))}))
        broken = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        with raw(story.address, transport=rng.choice(["unix", "tcp"])) as sock:
            sock.sendall(bytes(broken[: rng.randrange(1, len(broken) + 1)]))
    story.wait(lambda s: len(s.closed) == before + 60)
    story.got.clear()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_message_that_comes_byte_by_byte_is_one_message(story: Story, transport: str):
    with raw(story.address, transport=transport) as sock:
        for byte in packet(FRAME, value_of({"k": 5})) + packet(FRAME, value_of("next")):
            sock.sendall(bytes([byte]))
        story.wait(lambda s: len(s.got) == 2)
        assert story.got == [{"k": 5}, "next"]
    story.wait(lambda s: s.closed)
    assert len(message(0, MB)["data"]) == MB
