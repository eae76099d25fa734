"""Addresses of servers, and the handshake in which both sides prove that they have the token."""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import re
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from overlord.errors import LinkRefused, OverlordError
from overlord.transport.timeouts import TIMEOUTS

# ----------------------------------------------------------------------------
# Mutual authentication: both sides prove that they have the token, which is never sent.
#
#     client: nonce
#     server: nonce
#     client: HMAC over its role, both nonces and its hello; then the hello
#     server: HMAC over its role, both nonces and its welcome; then the welcome, or a refusal
#
# Each message is a prefix (magic, version, kind, length) and a short body. Both sides are
# generators. They yield a number of bytes to receive, or the bytes to send. So blocking sockets
# and the server's thread share the code.

VERSION = 1
HANDSHAKE_MAGIC = b"overlord"
PREFIX = struct.Struct("<8sHHI")
HELLO, CHALLENGE, PROOF, WELCOME, REFUSED, LATER = range(1, 7)
NONCE_BYTES = 32
MAX_BODY = 2**16

Steps = Generator[int | bytes, bytes, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """An authenticated peer: its hello, and the function that signs our welcome."""

    hello: dict[str, Any]
    sign_welcome: Callable[[dict[str, Any]], bytes]


def _packet(kind: int, body: bytes) -> bytes:
    if len(body) > MAX_BODY:
        raise ValueError(
            f"handshake: expected a hello or a welcome of at most {MAX_BODY} bytes, got "
            f"{len(body)}; send large values after the handshake"
        )
    return PREFIX.pack(HANDSHAKE_MAGIC, VERSION, kind, len(body)) + body


class TryLater(LinkRefused):
    """A temporary refusal, because of load or a slow handshake.

    The peer may connect again.
    """


def refusal(text: str, *, later: bool = False) -> bytes:
    """Return the handshake message that refuses a peer, with at most 1024 bytes of ``text``.

    ``later``: the refusal is temporary, so the peer may connect again.
    """
    return _packet(LATER if later else REFUSED, text.encode()[:1024])


def _proof(token: str, role: bytes, nonces: bytes, body: bytes) -> bytes:
    return hmac.new(
        token.encode(), HANDSHAKE_MAGIC + bytes([VERSION]) + role + nonces + body, hashlib.sha256
    ).digest()


def _read(
    wanted: int, peer: str, body_bytes: int | None = None
) -> Generator[int | bytes, bytes, bytes]:
    """Return the body of the next message, which must be of kind ``wanted``.

    ``body_bytes``: its exact size; None: at most ``MAX_BODY``. Raise ``LinkRefused`` for a refusal
    by the peer (``TryLater`` for a temporary one), and for any other message.
    """
    magic, version, kind, size = PREFIX.unpack((yield PREFIX.size))
    if magic != HANDSHAKE_MAGIC:
        raise LinkRefused(
            peer,
            f"expected Overlord's handshake, got {magic!r}: this is another kind of service; "
            "check the address",
        )
    if version != VERSION:
        raise LinkRefused(
            peer,
            f"expected version {VERSION} of the protocol, got version {version}; "
            "run the same version of Overlord on both sides",
        )
    limit = MAX_BODY if body_bytes is None or kind in (REFUSED, LATER) else body_bytes
    if size > limit:
        raise LinkRefused(
            peer,
            f"expected a handshake message of at most {limit} bytes, got {size}; check that the "
            "address belongs to Overlord",
        )
    body = (yield size) if size else b""
    if kind in (REFUSED, LATER):
        raise (LinkRefused if kind == REFUSED else TryLater)(
            peer, body.decode(errors="replace")[:1024]
        )
    if kind != wanted or (body_bytes is not None and size != body_bytes):
        raise LinkRefused(
            peer,
            f"expected handshake message {wanted}, got message {kind} of {size} bytes; run the "
            "same version of Overlord on both sides",
        )
    return body


def _decoded(body: bytes, peer: str) -> dict[str, Any]:
    try:
        return msgspec.msgpack.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise LinkRefused(
            peer,
            f"expected a map in its handshake, got invalid bytes: {e}; run the same version of "
            "Overlord on both sides",
        ) from e


def client_side(token: str, hello: dict[str, Any], peer: str) -> Steps:
    """Run the client's handshake; return the server's welcome.

    Raise ``LinkRefused`` if the server refuses the client, or does not prove that it has the token.
    """
    mine = secrets.token_bytes(NONCE_BYTES)
    yield _packet(HELLO, mine)
    theirs = yield from _read(CHALLENGE, peer, NONCE_BYTES)
    body = msgspec.msgpack.encode(hello)
    yield _packet(PROOF, _proof(token, b"client", mine + theirs, body) + body)
    answer = yield from _read(WELCOME, peer)
    if not hmac.compare_digest(answer[:32], _proof(token, b"server", mine + theirs, answer[32:])):
        raise LinkRefused(
            peer,
            "expected proof of the token, but the server does not have the token; check that the "
            "address belongs to this job",
        )
    return _decoded(answer[32:], peer)


def server_side(token: str, peer: str) -> Steps:
    """Run the server's handshake; return ``Accepted``.

    Raise ``LinkRefused`` for a peer without the token. The caller sends it the reason only.
    """
    theirs = yield from _read(HELLO, peer, NONCE_BYTES)
    mine = secrets.token_bytes(NONCE_BYTES)
    yield _packet(CHALLENGE, mine)
    answer = yield from _read(PROOF, peer)
    if not hmac.compare_digest(answer[:32], _proof(token, b"client", theirs + mine, answer[32:])):
        raise LinkRefused(peer, "wrong token; connect with the token of this server")

    def sign_welcome(welcome: dict[str, Any]) -> bytes:
        body = msgspec.msgpack.encode(welcome)
        return _packet(WELCOME, _proof(token, b"server", theirs + mine, body) + body)

    return Accepted(hello=_decoded(answer[32:], peer), sign_welcome=sign_welcome)


class PendingHandshake:
    """The server's end of a connection in the handshake, on a socket that does not block."""

    def __init__(self, sock: socket.socket, name: str, token: str, deadline: float):
        self.sock, self.name, self.deadline = sock, name, deadline
        self._steps = server_side(token, name)
        self._wanted, self._got = self._steps.send(None), b""  # type: ignore[arg-type]

    def read(self) -> Accepted | None:
        """Read available bytes; return ``Accepted`` once the peer has proved that it has the token.

        Until then return None. Raise ``LinkRefused`` for a wrong proof, ``OSError`` if it is lost.
        """
        while True:
            if isinstance(self._wanted, bytes):
                self.write(self._wanted)
                self._wanted = next(self._steps)
                continue
            try:
                some = self.sock.recv(self._wanted - len(self._got))
            except (BlockingIOError, InterruptedError):
                return None
            if not some:
                raise ConnectionResetError("it closed the connection")
            self._got += some
            if len(self._got) == self._wanted:
                whole, self._got = self._got, b""
                try:
                    self._wanted = self._steps.send(whole)
                except StopIteration as done:
                    return done.value

    def write(self, data: bytes) -> None:
        """Send a few bytes; raise ``ConnectionResetError`` if the socket does not accept all."""
        if self.sock.send(data) != len(data):
            raise ConnectionResetError("it does not read")


# ----------------------------------------------------------------------------
# Addresses of the form ``overlord://host:port/key``, and the sockets that listen there.
#
# ``key`` names a unix socket on the same machine. ``host`` and ``port`` reach the server from
# other machines.
#
# The unix socket is abstract: it has no file, so a crash leaves nothing that blocks a restart.
# Without abstract sockets or shared memory (not Linux), connections use TCP only.

HAS_SHARED_MEMORY = (
    sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(os, "eventfd")
)
_KEY = re.compile(r"[A-Za-z0-9_.-]{1,80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of one server."""

    host: str
    port: int  # 0: no TCP
    key: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"overlord://{host}:{self.port}/{self.key}"

    @property
    def local_name(self) -> str:
        """The name of the abstract unix socket, with its leading zero byte."""
        return f"\0overlord-{self.key}"

    @staticmethod
    def parse(text: str) -> Address:
        """Parse the text of an address; raise ``OverlordError`` if it is malformed."""
        wrong = f"address: expected overlord://host:port/key, as a server prints it, got {text!r}"
        try:
            parts = urlsplit(text)
            host, port, key = parts.hostname, parts.port, parts.path[1:]
        except ValueError as e:
            raise OverlordError(f"{wrong}; {e}") from e
        if parts.scheme != "overlord" or not host or port is None or not _KEY.fullmatch(key):
            raise OverlordError(wrong)
        return Address(host=host, port=port, key=key)


def address_text(address: str) -> str:
    """Return an address as text for errors and logs.

    An address without TCP is written as its unix socket, as ``ss -x`` lists it. A malformed
    address is returned unchanged.
    """
    try:
        found = Address.parse(address)
    except OverlordError:
        return address
    return address if found.port else f"local socket @{found.local_name[1:]}"


def reachable(host: str) -> str:
    """Return ``host``, or the address of this machine if ``host`` means all interfaces.

    Without a default route, return the host name of this machine.
    """
    if host not in ("", "0.0.0.0", "::"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: the kernel selects the interface of the default route.
            probe.connect(("192.0.2.1", 9))
            found: str = probe.getsockname()[0]
        except OSError:
            return socket.gethostname()
    return found


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def new_key() -> str:
    """Return a random key for the address of a server."""
    return secrets.token_hex(8)


def check_key(key: str) -> str:
    """Return ``key``; raise ``OverlordError`` if it is malformed."""
    if not _KEY.fullmatch(key):
        raise OverlordError(
            "server key: expected 1 to 80 letters, digits, dots, dashes and underscores, got "
            f"{key!r}"
        )
    return key


def listen_local(address: Address) -> socket.socket:
    """Return a socket that listens on the unix socket of ``address``.

    Raise ``OverlordError`` if another server has this key.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    return _listening(
        sock,
        address.local_name,
        f"the local socket of {address}",
        "another server has this key: end that server, or choose another key",
    )


def listen_tcp(host: str, port: int | range) -> socket.socket:
    """Return a socket that listens on a TCP port (0: any), or on the first free port of a range.

    Raise ``OverlordError`` if no port is free, or ``host`` is not an address of this machine.
    """
    if isinstance(port, range):
        return _first_free(host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    # Connections of a killed server must not block its successor.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    remedy = "choose another port, or 0 for any; the host must be an address of this machine"
    if host == os.environ.get("OVERLORD_INTERFACE"):
        remedy += ", and OVERLORD_INTERFACE in the environment names this one"
    return _listening(sock, (host, port), f"{host}:{port}", remedy)


def _first_free(host: str, ports: range) -> socket.socket:
    for port in ports:
        try:
            return listen_tcp(host, port)
        except OverlordError as taken:
            if getattr(taken.__cause__, "errno", 0) != errno.EADDRINUSE:
                raise
    raise OverlordError(
        f"cannot serve at {host}: the ports {ports[0]} to {ports[-1]} are all in use; allow "
        "more ports (launch: ports)"
    )


def _listening(
    sock: socket.socket, where: str | tuple[str, int], name: str, remedy: str
) -> socket.socket:
    try:
        sock.bind(where)
        sock.listen(512)
    except OSError as e:
        sock.close()
        raise OverlordError(f"cannot serve at {name}: {e.strerror or e}; {remedy}") from e
    return sock


def tune(sock: socket.socket) -> None:
    """Configure a socket: send small messages at once, and detect a peer whose machine vanished."""
    sock.setblocking(False)
    if sock.family != getattr(socket, "AF_UNIX", None):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), TIMEOUTS.keepalive_s)
        if hasattr(socket, "TCP_KEEPCNT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
