"""Whether a Ray cluster is the one that was asked for, and lets in only who has its token. Nothing
of Ray is imported in this file.
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
from overlord.ray.private_folder import exposed

log = logging.getLogger("overlord")

MODE = "RAY_AUTH_MODE"
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # the environment's; the third place is a file
WHERE = "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
REFUSE = (
    f"{MODE}=disabled in the environment of this program refuses authentication, by that name only"
)
REACH_S = 10.0
PROBE_S = 60.0  # for another process to import Ray and ask


class Unwelcome(Exception):
    """Why a cluster is not used, in words for who asked for it."""


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def reach(address: str) -> None:
    """Whether anyone is there: Ray would wait for as long as it waits for a head that was lost."""
    socket.create_connection(split(address), REACH_S).close()


def same_head(one: str, other: str) -> bool:
    """Whether two addresses lead to one head: names and addresses of the same machine count as
    equal.
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
    return {host}  # a name that nobody knows here


def _of_this_machine(address: str) -> bool:
    """Only an address of one's own can be listened at."""
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
    """A program reaches a cluster by a node of its own machine. Of each node its address, and the
    socket that it has on its machine.
    """
    if nodes and not any(_of_this_machine(at) or Path(local).exists() for at, local in nodes):
        there = ", ".join(sorted({at for at, _ in nodes})[:8])
        raise Unwelcome(
            f"none of its nodes is on this machine (there are {there}): join it first, "
            f"ray start --address={address}"
        )


_warned: set[str] = set()  # once for each in a process


def check_folder(socket_path: str) -> None:
    """Warn where every account of this machine can replace the socket of a node's Ray; ``ray
    start`` opens its folders to all.
    """
    folder = str(Path(socket_path).parent)
    if socket_path and folder not in _warned and (why := exposed(Path(folder), owners=False)):
        _warned.add(folder)
        remedy = (
            "start Ray with --temp-dir=DIR/ray, where DIR has mode 0700 (Security in docs/ray.md)"
        )
        log.warning(
            "every account of this machine can replace the sockets and logs of its Ray, "
            "since %s: %s",
            why,
            remedy,
        )


# authentication


def is_refused() -> bool:
    """Whether the environment says, by name, that there is to be none."""
    mode = os.environ.get(MODE, "token")
    if mode.lower() not in ("token", "disabled"):
        raise Unwelcome(f"{MODE}: expected token or disabled, got {mode!r}")
    return mode.lower() == "disabled"


def token_named() -> bool:
    return any(os.environ.get(key) for key in TOKENS)


def check_token(has_token: Callable[[], bool], lets_in: Callable[[bool], bool]) -> None:
    """Of a cluster that was not started here. ``lets_in(with_token)``: whether it answers who shows
    what is found here, or nothing.
    """
    if is_refused():
        if not lets_in(False):
            raise Unwelcome(
                f"it wants a token, but {MODE}=disabled here; unset that, and say its "
                f"token by {WHERE}"
            )
        warn("the cluster", "whoever reaches its ports")
        return
    if not has_token():
        raise Unwelcome(f"no token was found: expected that of the cluster in {WHERE}. {REFUSE}")
    if lets_in(False):  # before the token is shown: whoever is in there would have it
        raise Unwelcome(
            "it asks for no token, so whoever reaches its ports runs code there: start "
            f"it with {MODE}=token. {REFUSE}"
        )
    if not lets_in(True):
        raise Unwelcome(f"its token is another one than that in {WHERE}")


def asks_for_token(address: str) -> bool:
    """Whether a head that this program is connected to lets in only who shows one. Asked by another
    process: what a process shows is one setting for all it says, also to who is asked at the same
    time. Where that fails it is taken for one that asks, with a warning.
    """
    settings = {key: value for key, value in os.environ.items() if key not in TOKENS} | {
        MODE: "disabled"
    }
    settings["PYTHONPATH"] = as_setting()
    code = (
        "import sys; from overlord.ray.cluster import _lets_in; print('open' if "
        "_lets_in(sys.argv[1], False) else 'closed')"
    )
    try:
        said = subprocess.run(
            [sys.executable, "-P", "-c", code, address],
            env=settings,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
        )
        answer, why = said.stdout.strip(), said.stderr.strip().rpartition("\n")[2]
    except (OSError, subprocess.SubprocessError) as fault:
        answer, why = "", str(fault)
    if answer not in ("open", "closed"):
        log.warning(
            "whether the cluster at %s asks for a token could not be found out: %s", address, why
        )
    return answer != "open"


def check_own_refused() -> None:
    """Of a cluster without tokens that the program connected to by itself."""
    if not is_refused():
        remedy = f"start it with {MODE}=token, and set that before ray.init, too. {REFUSE}"
        words = f"it asks for no token, so whoever reaches its ports runs code there: {remedy}"
        raise JobError(
            [f"the cluster that the program connected to is not used: {words}"], "launch"
        )
    warn("the cluster that the program connected to", "whoever reaches its ports")


def warn(what: str, who: str) -> None:
    words = (
        "%s is used without token authentication: %s can run code in it, read what it reads "
        "and end its jobs (Security in docs/ray.md)"
    )
    log.warning(words, what, who)
