"""Check that a Ray cluster is the requested one and accepts only clients with its token.

This module does not import Ray.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from overlord.errors import JobError
from overlord.import_path import as_setting
from overlord.ray.private_folder import exposure_of
from overlord.ray.timeouts import TIMEOUTS

log = logging.getLogger("overlord")

MODE = "RAY_AUTH_MODE"
TOKENS = (
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
)  # variables of the environment; the third source is a file
TOKEN_SOURCES = "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
REFUSE = f"only {MODE}=disabled in the environment of this program turns authentication off"


class ClusterRefused(Exception):
    """A cluster that is refused; the message has the reason and the remedy, for the user."""


def split(address: str) -> tuple[str, int]:
    """Return host and port of an address, without the brackets of an IPv6 address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def reach(address: str) -> None:
    """Raise ``OSError`` unless the address accepts connections.

    Ray itself would wait for as long as for a lost head.
    """
    socket.create_connection(split(address), TIMEOUTS.reach_s).close()


def same_head(one: str, other: str) -> bool:
    """Return whether two addresses lead to the same head.

    All names and addresses of one machine count as equal.
    """
    (one_host, one_port), (other_host, other_port) = split(one), split(other)
    if one_port != other_port:
        return False
    one_at, other_at = _addresses(one_host), _addresses(other_host)
    return bool(one_at & other_at) or (
        any(map(_of_this_machine, one_at)) and any(map(_of_this_machine, other_at))
    )


def _addresses(host: str) -> set[str]:
    with suppress(OSError):
        return {
            str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        }
    return {host}  # a name that cannot be resolved here


def _of_this_machine(address: str) -> bool:
    """Return whether this machine has the address: only own addresses can be bound."""
    try:
        family = (
            socket.AF_INET6
            if ipaddress.ip_address(address.partition("%")[0]).version == 6
            else socket.AF_INET
        )
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except (OSError, ValueError):
        return False
    return True


def check_joined(nodes: Collection[tuple[str, str]], address: str) -> None:
    """Raise ``ClusterRefused`` unless a node of the cluster runs on this machine.

    A program connects to a cluster by such a node. ``nodes`` holds address and local socket of each
    node. An empty one is accepted.
    """
    if nodes and not any(_of_this_machine(at) or Path(local).exists() for at, local in nodes):
        there = ", ".join(sorted({at for at, _ in nodes})[:8])
        raise ClusterRefused(
            f"none of its nodes runs on this machine (its nodes: {there}): join it first, "
            f"ray start --address={address}"
        )


_warned: set[str] = set()  # folders; one warning for each per process


def check_folder(socket_path: str) -> None:
    """Warn once per folder if every account of this machine can replace the socket of a raylet.

    ``ray start`` opens its folders to all accounts. An empty path is ignored.
    """
    folder = str(Path(socket_path).parent)
    if socket_path and folder not in _warned and (why := exposure_of(Path(folder), owners=False)):
        _warned.add(folder)
        remedy = (
            "start Ray with --temp-dir=DIR/ray, where DIR has mode 0700 (documentation: 'Ray', "
            "Security)"
        )
        log.warning(
            "every account of this machine can replace the sockets and logs of its Ray, "
            "since %s; %s",
            why,
            remedy,
        )


# authentication


def authentication_disabled() -> bool:
    """Return whether the environment disables token authentication explicitly.

    Raise ``ClusterRefused`` for a mode other than "token" and "disabled".
    """
    mode = os.environ.get(MODE, "token")
    if mode.lower() not in ("token", "disabled"):
        raise ClusterRefused(f"{MODE}: expected token or disabled, got {mode!r}; set one")
    return mode.lower() == "disabled"


def is_open_by_choice(where: str) -> bool:
    """Return ``authentication_disabled()``, for a cluster to which the program connected itself.

    Raise ``JobError`` for another mode; ``where`` is the function that the user called.
    """
    try:
        return authentication_disabled()
    except ClusterRefused as fault:
        raise JobError([str(fault)], where) from fault


def token_named() -> bool:
    """Return whether a variable of the environment has a token or the path of one."""
    return any(os.environ.get(key) for key in TOKENS)


def check_token(has_token: Callable[[], bool], accepts: Callable[[bool], bool]) -> None:
    """Check the authentication of a cluster that was not started here.

    ``accepts(with_token)`` returns whether it accepts a client with the token found here, or
    without a token. Raise ``ClusterRefused`` if the cluster may not be used.
    """
    if authentication_disabled():
        if not accepts(False):
            raise ClusterRefused(
                f"it requires a token: expected {MODE}=token, got {MODE}=disabled; unset {MODE}, "
                f"and set the token in {TOKEN_SOURCES}"
            )
        warn_unauthenticated("the cluster", "everyone who reaches its ports")
        return
    if not has_token():
        raise ClusterRefused(
            f"expected the token of the cluster in {TOKEN_SOURCES}, got none; set it there "
            f"({REFUSE})"
        )
    if accepts(
        False
    ):  # checked before the token is sent, which an intruder in the cluster would receive
        raise ClusterRefused(
            "it requires no token, so everyone who reaches its ports can run code there: start "
            f"it with {MODE}=token ({REFUSE})"
        )
    if not accepts(True):
        raise ClusterRefused(
            f"it rejects the token in {TOKEN_SOURCES}; set the token of this cluster"
        )


def asks_for_token(address: str) -> bool:
    """Return whether the head of the connected cluster accepts only clients with a token.

    Another process queries the head, because the token mode is one setting for all requests of a
    process. If the query fails, assume that the head requires a token, and log a warning.
    """
    settings = {key: value for key, value in os.environ.items() if key not in TOKENS} | {
        MODE: "disabled"
    }
    settings["PYTHONPATH"] = as_setting()
    code = (
        "import sys; from overlord.ray.connection import head_accepts; "
        "print('open' if head_accepts(sys.argv[1], False) else 'closed')"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, address],
            env=settings,
            capture_output=True,
            text=True,
            timeout=TIMEOUTS.probe_s,
        )
        answer, why = done.stdout.strip(), done.stderr.strip().rpartition("\n")[2]
    except (OSError, subprocess.SubprocessError) as fault:
        answer, why = "", str(fault)
    if answer not in ("open", "closed"):
        log.warning(
            "assumed that the cluster at %s requires a token, since the query failed: %s",
            address,
            why,
        )
    return answer != "open"


def check_open_cluster() -> None:
    """Raise ``JobError`` unless authentication is disabled; if it is, log a warning.

    It is called for a cluster without tokens to which the program connected itself.
    """
    if not is_open_by_choice("launch"):
        remedy = f"start it with {MODE}=token, and set that before ray.init, too ({REFUSE})"
        problem = "it requires no token, so everyone who reaches its ports can run code there"
        raise JobError(
            [f"the cluster that the program connected to is not used: {problem}: {remedy}"],
            "launch",
        )
    warn_unauthenticated(
        "the cluster that the program connected to", "everyone who reaches its ports"
    )


def warn_unauthenticated(what: str, who: str) -> None:
    """Log a warning that a cluster is used without authentication; ``who`` can misuse it."""
    log.warning(
        "%s is used without token authentication: %s can run code in it, read its data and end "
        "its jobs (documentation: 'Ray', Security)",
        what,
        who,
    )
