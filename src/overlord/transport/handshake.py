"""Mutual authentication: both sides prove that they have the token, which is never sent.

    client: nonce
    server: nonce
    client: HMAC over roles, nonces and its hello
    server: HMAC over the same and its welcome, or a refusal

Each message is a prefix (magic, version, kind, length) and a short body. Both sides are generators.
They yield a number of bytes to receive, or the bytes to send. So blocking sockets and the server's
thread share the code.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import msgspec

from overlord.errors import LinkRefused

VERSION = 1
MAGIC = b"overlord"
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
            f"handshake: expected a hello or a welcome of at most {MAX_BODY} bytes, got {len(body)}"
        )
    return PREFIX.pack(MAGIC, VERSION, kind, len(body)) + body


class TryLater(LinkRefused):
    """A temporary refusal, because of load or a slow handshake.

    The peer may connect again.
    """


def refusal(text: str, *, later: bool = False) -> bytes:
    """Return the message that refuses a peer.

    ``later``: the peer may connect again.
    """
    return _packet(LATER if later else REFUSED, text.encode()[:1024])


def _proof(token: str, role: bytes, nonces: bytes, body: bytes) -> bytes:
    return hmac.new(
        token.encode(), MAGIC + bytes([VERSION]) + role + nonces + body, hashlib.sha256
    ).digest()


def _read(
    wanted: int, peer: str, body_bytes: int | None = None
) -> Generator[int | bytes, bytes, bytes]:
    """Return the body of the next message, which must be of kind ``wanted``."""
    magic, version, kind, size = PREFIX.unpack((yield PREFIX.size))
    if magic != MAGIC:
        raise LinkRefused(
            peer, f"expected Overlord's handshake, got {magic!r}: this is another kind of service"
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
            peer, f"expected a handshake message of at most {limit} bytes, got {size}"
        )
    body = (yield size) if size else b""
    if kind in (REFUSED, LATER):
        raise (LinkRefused if kind == REFUSED else TryLater)(
            peer, body.decode(errors="replace")[:1024]
        )
    if kind != wanted or (body_bytes is not None and size != body_bytes):
        raise LinkRefused(peer, f"expected handshake message {wanted}, got {kind} of {size} bytes")
    return body


def _decoded(body: bytes, peer: str) -> dict[str, Any]:
    try:
        return msgspec.msgpack.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise LinkRefused(peer, f"expected a map in its handshake, got invalid bytes: {e}") from e


def client_side(token: str, hello: dict[str, Any], peer: str) -> Steps:
    """Run the client's handshake; return the server's welcome."""
    mine = secrets.token_bytes(NONCE_BYTES)
    yield _packet(HELLO, mine)
    theirs = yield from _read(CHALLENGE, peer, NONCE_BYTES)
    body = msgspec.msgpack.encode(hello)
    yield _packet(PROOF, _proof(token, b"client", mine + theirs, body) + body)
    answer = yield from _read(WELCOME, peer)
    if not hmac.compare_digest(answer[:32], _proof(token, b"server", mine + theirs, answer[32:])):
        raise LinkRefused(
            peer, "the server does not have the token; check that the address belongs to this job"
        )
    return _decoded(answer[32:], peer)


def server_side(token: str, peer: str) -> Steps:
    """Run the server's handshake; return ``Accepted``.

    A peer without the token receives only the reason of its refusal.
    """
    theirs = yield from _read(HELLO, peer, NONCE_BYTES)
    mine = secrets.token_bytes(NONCE_BYTES)
    yield _packet(CHALLENGE, mine)
    answer = yield from _read(PROOF, peer)
    if not hmac.compare_digest(answer[:32], _proof(token, b"client", theirs + mine, answer[32:])):
        raise LinkRefused(peer, "wrong token")

    def sign_welcome(welcome: dict[str, Any]) -> bytes:
        body = msgspec.msgpack.encode(welcome)
        return _packet(WELCOME, _proof(token, b"server", theirs + mine, body) + body)

    return Accepted(hello=_decoded(answer[32:], peer), sign_welcome=sign_welcome)
