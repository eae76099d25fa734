"""Addresses of servers: ``overlord://host:port/key``.

``key`` names a unix socket on the same machine. ``host`` and ``port`` reach the server from other
machines.

The unix socket is abstract: it has no file, so a crash leaves nothing that blocks a restart.
Without abstract sockets or shared memory (not Linux), connections use TCP only.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import sys
from dataclasses import dataclass
from urllib.parse import urlsplit

from overlord.errors import OverlordError
from overlord.transport.timeouts import TIMEOUTS

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
        """Return the name of the abstract unix socket."""
        return f"\0overlord-{self.key}"

    @staticmethod
    def parse(text: str) -> Address:
        """Parse the text of an address; raise ``OverlordError`` if it is malformed."""
        wrong = f"address {text!r}: expected overlord://host:port/key, as a server prints it"
        try:
            parts = urlsplit(text)
            host, port, key = parts.hostname, parts.port, parts.path[1:]
        except ValueError as e:
            raise OverlordError(f"{wrong}; {e}") from e
        if parts.scheme != "overlord" or not host or port is None or not _KEY.fullmatch(key):
            raise OverlordError(wrong)
        return Address(host=host, port=port, key=key)


def shown(address: str) -> str:
    """Return an address as text for people.

    An address without TCP is shown as its unix socket, as ``ss -x`` lists it.
    """
    try:
        found = Address.parse(address)
    except OverlordError:
        return address
    return address if found.port else f"local socket @{found.local_name[1:]}"


def reachable(host: str) -> str:
    """Return ``host``, or the address of this machine if ``host`` means all interfaces."""
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
    """Return a random key."""
    return secrets.token_hex(8)


def check_key(key: str) -> str:
    """Return ``key``; raise ``OverlordError`` if it is malformed."""
    if not _KEY.fullmatch(key):
        raise OverlordError(
            f"key {key!r}: expected 1 to 80 letters, digits, dots, dashes and underscores"
        )
    return key


def listen_local(address: Address) -> socket.socket:
    """Listen on the unix socket of ``address``."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    return _listening(
        sock, address.local_name, f"the local socket of {address}", "another server has this key"
    )


def listen_tcp(host: str, port: int | range) -> socket.socket:
    """Listen on a TCP port, or on the first free port of a range."""
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
        "more ports"
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
