"""Peers with a wrong token or version, or silent ones, are refused with the reason, and disturb no
other peer.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from overlord.errors import ActorLost, DataStall, LinkRefused, OverlordError
from overlord.transport import connection
from overlord.transport.address import (
    HANDSHAKE_MAGIC,
    HELLO,
    LATER,
    PREFIX,
    REFUSED,
    VERSION,
    Address,
    client_side,
    refusal,
)
from overlord.transport.connection import open_connection
from overlord.transport.server import MAX_PENDING
from tests.connections import (
    SOON_S,
    TOKEN,
    Story,
    dialled,
    exactly,
    message,
    raw_silent,
    wait_until,
    watched_story,
)
from tests.internals import pending_handshakes


@pytest.fixture
def story() -> Iterator[Story]:
    with watched_story() as story:
        yield story


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_wrong_token_is_said_to_be_wrong(story: Story, transport: str):
    with pytest.raises(LinkRefused, match="wrong token"):
        open_connection(story.address, "another token", {}, timeout_s=SOON_S, transport=transport)
    assert len(story.opened) == 1


def test_the_token_never_travels(story: Story):
    """A server in the middle records everything that a client sends."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        middle = threading.Thread(
            target=_relay, args=(listener, Address.parse(story.address), heard)
        )
        middle.start()
        link, _ = open_connection(
            f"overlord://127.0.0.1:{listener.getsockname()[1]}/nowhere", TOKEN, {}, timeout_s=SOON_S
        )
        link.close()
        middle.join(SOON_S)
    assert b"".join(heard).startswith(HANDSHAKE_MAGIC)
    assert TOKEN.encode() not in b"".join(heard)


def _relay(listener: socket.socket, address: Address, heard: list[bytes]) -> None:
    near, _ = listener.accept()
    far = socket.create_connection((address.host, address.port))

    def pump(a: socket.socket, b: socket.socket) -> None:
        while data := a.recv(65536):
            heard.append(data)
            b.sendall(data)
        b.shutdown(socket.SHUT_WR)

    back = threading.Thread(target=pump, args=(far, near))
    back.start()
    pump(near, far)
    back.join(SOON_S)
    near.close()
    far.close()


def test_a_recorded_proof_is_worth_nothing_the_second_time(story: Story):
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        middle = threading.Thread(
            target=_relay, args=(listener, Address.parse(story.address), heard)
        )
        middle.start()
        open_connection(
            f"overlord://127.0.0.1:{listener.getsockname()[1]}/nowhere", TOKEN, {}, timeout_s=SOON_S
        )[0].close()
        middle.join(SOON_S)
    with raw_silent(Address.parse(story.address), "tcp") as sock:
        sock.sendall(heard[0])
        exactly(sock, PREFIX.size + 32)
        sock.sendall(next(data for data in heard[1:] if PREFIX.unpack_from(data)[2] == 3))
        assert _refusal(sock).startswith("wrong token; ")


def _refusal(sock: socket.socket, wanted: int = REFUSED) -> str:
    _, _, kind, size = PREFIX.unpack(exactly(sock, PREFIX.size))
    assert kind == wanted
    return exactly(sock, size).decode()


def test_a_server_that_does_not_know_the_token_is_not_believed():
    """It answers in the right form, but its proof is wrong."""

    def impostor(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            exactly(sock, PREFIX.size + 32)
            sock.sendall(PREFIX.pack(HANDSHAKE_MAGIC, VERSION, 2, 32) + bytes(32))
            _, _, _, size = PREFIX.unpack(exactly(sock, PREFIX.size))
            exactly(sock, size)
            sock.sendall(PREFIX.pack(HANDSHAKE_MAGIC, VERSION, 4, 40) + bytes(40))

    _against(impostor, LinkRefused, "does not have the token")


def test_a_server_of_another_version_is_named_with_both_versions():
    _against(
        _saying(PREFIX.pack(HANDSHAKE_MAGIC, 99, 2, 32) + bytes(32)),
        LinkRefused,
        "version 1 .* version 99",
    )


def test_another_kind_of_server_is_recognised():
    _against(_saying(b"HTTP/1.1 400 Bad Request\r\n\r\n"), LinkRefused, "another kind of service")


def test_a_server_that_hangs_up_is_lost():
    _against(_saying(b""), ActorLost, "closed the connection")


def test_a_server_that_says_nothing_is_given_up_in_time():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(DataStall, match="answer the handshake"),
    ):
        open_connection(
            f"overlord://127.0.0.1:{listener.getsockname()[1]}/nowhere", TOKEN, {}, timeout_s=0.2
        )


def _saying(data: bytes) -> Callable[[socket.socket], None]:
    def body(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            exactly(sock, PREFIX.size + 32)
            sock.sendall(data)

    return body


def _against(body: Callable[[socket.socket], None], error: type[Exception], text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=body, args=(listener,))
        thread.start()
        with pytest.raises(error, match=text):
            open_connection(
                f"overlord://127.0.0.1:{listener.getsockname()[1]}/nowhere",
                TOKEN,
                {},
                timeout_s=SOON_S,
            )
        thread.join(SOON_S)


def test_a_client_of_another_version_is_told_both_versions(story: Story):
    with raw_silent(Address.parse(story.address)) as sock:
        sock.sendall(PREFIX.pack(HANDSHAKE_MAGIC, 99, HELLO, 32) + bytes(32))
        assert "version 99" in (said := _refusal(sock))
        assert "version 1" in said


GREETINGS = {
    "garbage": random.Random(1).randbytes(500),
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "too long a message": PREFIX.pack(HANDSHAKE_MAGIC, VERSION, HELLO, 2**31) + bytes(100),
    "the wrong message": PREFIX.pack(HANDSHAKE_MAGIC, VERSION, 4, 32) + bytes(32),
    "a short nonce": PREFIX.pack(HANDSHAKE_MAGIC, VERSION, HELLO, 8) + bytes(8),
}


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("what", GREETINGS)
def test_what_is_no_handshake_is_refused(story: Story, what: str, transport: str):
    with raw_silent(Address.parse(story.address), transport) as sock:
        sock.sendall(GREETINGS[what])
        assert _refusal(sock)
    assert len(story.opened) == 1


def test_a_peer_that_says_nothing_or_not_enough_is_cut():
    with watched_story(handshake_s=2.0) as story, contextlib.ExitStack() as sockets:
        silent, halting = (
            sockets.enter_context(raw_silent(Address.parse(story.address), how))
            for how in ("unix", "tcp")
        )
        halting.sendall(PREFIX.pack(HANDSHAKE_MAGIC, VERSION, HELLO, 32) + bytes(5))
        for sock in (silent, halting):
            assert "did not finish the handshake" in _refusal(sock, LATER)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_client_that_stood_still_in_its_handshake_comes_again(
    monkeypatch: pytest.MonkeyPatch, transport: str
):
    """A client that was suspended for seconds retries, so that its trainer does not end."""
    with Story(handshake_s=1.0) as story:
        tries = []

        def halting(token: str, hello: dict[str, Any], peer: str) -> Any:
            tries.append(peer)
            inner = client_side(token, hello, peer)
            step = next(inner)
            while True:
                answer = yield step
                if len(tries) == 1 and not isinstance(step, bytes):
                    wait_until(lambda: not pending_handshakes(story.server))
                try:
                    step = inner.send(answer)
                except StopIteration as done:
                    return done.value

        monkeypatch.setattr(connection, "client_side", halting)
        with dialled(story.address, transport) as link:
            link.send(message(1))
            story.wait(lambda s: s.got)
        assert len(tries) == 2


def test_a_server_that_takes_nobody_for_now_is_reported_when_time_is_over():
    def full(listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                sock.sendall(refusal("no room", later=True))
                sock.shutdown(socket.SHUT_WR)
                sock.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=full, args=(listener,), daemon=True).start()
        with pytest.raises(
            DataStall, match=r"to accept a connection, which it refuses temporarily \(no room\)"
        ):
            open_connection(
                f"overlord://127.0.0.1:{listener.getsockname()[1]}/full", TOKEN, {}, timeout_s=1.0
            )
        listener.shutdown(socket.SHUT_RDWR)


def test_hundreds_of_connections_that_say_nothing_keep_nobody_out():
    """They would be disconnected after a minute; long before that the oldest make room."""
    with Story(handshake_s=60.0) as story:
        address = Address.parse(story.address)
        crowd = [raw_silent(address, "unix" if i % 2 else "tcp") for i in range(MAX_PENDING + 150)]
        with dialled(story.address) as link:
            link.send("through")
            story.wait(lambda s: "through" in s.got)
        assert pending_handshakes(story.server) <= MAX_PENDING
        assert "too many connections" in _refusal(crowd[0], LATER)
        for sock in crowd:
            sock.close()
        wait_until(lambda: not pending_handshakes(story.server))


def test_who_is_not_wanted_gets_the_reason():
    def on_open(link: Any, hello: dict[str, Any]) -> dict[str, Any]:
        raise (
            OverlordError(f"rank {hello['rank']} is taken")
            if hello["rank"] < 9
            else ZeroDivisionError("oops")
        )

    from overlord.transport.server import Server

    with Server(token=TOKEN, on_message=lambda link, value: None, on_open=on_open) as server:
        with pytest.raises(LinkRefused, match="refused: rank 3 is taken"):
            open_connection(server.address, TOKEN, {"rank": 3}, timeout_s=SOON_S)
        with pytest.raises(LinkRefused, match="ZeroDivisionError: oops"):
            open_connection(server.address, TOKEN, {"rank": 10}, timeout_s=SOON_S)
