"""The connection of this process to a Ray cluster: connect, authenticate, disconnect.

A disconnect leaves no process, file or setting behind. ``docs/ray.md`` lists the settings and the
reason for each of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from overlord.errors import DataStall, JobError, OverlordError
from overlord.import_path import FirstEntryPath
from overlord.process.resources import system_pool
from overlord.ray.auth import (
    MODE,
    ClusterRefused,
    asks_for_token,
    authentication_disabled,
    check_folder,
    check_joined,
    check_open_cluster,
    check_token,
    reach,
    same_head,
    token_named,
    warn_unauthenticated,
)
from overlord.ray.folder import Folder, SigtermHandler, environment_kept
from overlord.ray.ray_import import exceptions, ray, ray_constants, ray_worker, raylet
from overlord.ray.timeouts import TIMEOUTS
from overlord.setup.options import n_cores

log = logging.getLogger("overlord")

STORE_BYTES = 80 * 2**20  # near Ray's minimum: no payload passes through its object store
ALIVE = 0  # state of a node in the tables of the head
UNKNOWN_CLUSTER = "00" * 27 + "01"  # a cluster id that no cluster has
# Ray's own settings, unless the environment has others. At Ray's niceness of 15, workers starve
# next to a busy trainer. A driver that lost the head of its cluster ends the whole program after a
# minute, which must not happen to a trainer. Up to version 2.55 Ray hides GPUs from actors that ask
# for none, and warns at every start that later versions do not. The last setting makes all versions
# behave alike.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_print_to_stdstream = ray_worker.print_to_stdstream


class RayConnection:
    """A connection to a Ray cluster that this process opened itself."""

    def __init__(self) -> None:
        self._address: str | None = None
        self._terminated = SigtermHandler()
        self._folder: Folder | None = None  # of a cluster that was started here
        self._environment: list[str] = []  # names of variables that were set here
        self._disconnecting: threading.Thread | None = None

    @property
    def folder(self) -> Folder | None:
        """The folder of a cluster that was started here; None for another cluster."""
        return self._folder

    def open(self, address: str | None) -> None:
        """Connect to the cluster at ``address``; if it is None, start a cluster on this machine.

        Raise ``JobError`` if that fails, after restoring all settings.
        """
        self._address = address
        self._set(SETTINGS)
        settings: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "namespace": "overlord",
        }
        settings["job_config"] = config = ray.job_config.JobConfig()
        config._py_driver_sys_path = FirstEntryPath()
        try:
            disabled = authentication_disabled()
            self._set({MODE: "token"})
            settings |= self._own_cluster(disabled) if address is None else _check_cluster(address)
            reread_environment()
            # The memory pool is for workers: Ray loads Arrow in them before Overlord's code.
            with (
                environment_kept(),
                system_pool(),
                _loopback() if address is None else contextlib.nullcontext(),
            ):
                self._terminated = SigtermHandler()
                try:
                    ray.init(address or "local", **settings)
                finally:
                    self._terminated.keep()
        except BaseException as fault:
            self.close()
            if isinstance(fault, Exception):
                raise JobError([_problem(address, fault)], "launch") from fault
            raise
        ray_worker.print_to_stdstream = _log_output  # Ray prints a paragraph per killed process

    def _own_cluster(self, disabled: bool) -> dict[str, Any]:
        """Create folder and token of a cluster on this machine; return arguments of ``ray.init``.

        ``disabled``: token authentication is disabled.
        """
        if disabled:
            warn_unauthenticated(
                "the cluster that is started on this machine", "every user of this machine"
            )
        self._folder = Folder()
        self._set({} if token_named() else {"RAY_AUTH_TOKEN": secrets.token_hex(32)})
        return {
            "num_cpus": n_cores(),
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
            "_temp_dir": str(self._folder.for_ray),
        }

    def await_disconnect(self) -> None:
        """Wait for an earlier disconnect that exceeded its deadline, if any.

        Until it ends, Ray counts as connected. Raise ``DataStall`` after ``Timeouts.hold_s``.
        """
        if (thread := self._disconnecting) is not None:
            thread.join(TIMEOUTS.hold_s)
            if thread.is_alive():
                raise DataStall(
                    "the raylet of this node to acknowledge an earlier disconnect", TIMEOUTS.hold_s
                )
            self._disconnecting = None

    def close(self) -> None:
        """Disconnect, and restore environment, signal handler and files."""
        try:
            if self._address is None:
                _resume_own_processes()
            self._disconnect()
        finally:
            self._terminated.restore()
            ray_worker.print_to_stdstream = _print_to_stdstream
            while self._environment:
                os.environ.pop(self._environment.pop(), None)
            # Otherwise a ray.init of the program has the mode of this cluster without its token.
            reread_environment()
            if self._folder is not None:
                self._folder.remove()
                self._folder = None

    def _disconnect(self) -> None:
        """Run ``ray.shutdown`` in a thread, and wait for it up to a deadline.

        It waits for the raylet without one. Raise its error, if any.
        """
        timeout_s = TIMEOUTS.stop_s if self._address is None else TIMEOUTS.disconnect_s
        faults: list[BaseException] = []
        thread = threading.Thread(
            target=_shut_down, args=(faults,), name="overlord-ray-shutdown", daemon=True
        )
        thread.start()
        try:
            thread.join(timeout_s)
        except BaseException:  # Ctrl-C: without this wait a part of the cluster would keep running
            thread.join(timeout_s)
            raise
        if thread.is_alive():
            self._disconnecting = thread
            log.warning(
                "raylet did not acknowledge the disconnect within %g s; continuing without it",
                timeout_s,
            )
        if faults:
            raise faults[0]

    def _set(self, settings: Mapping[str, str]) -> None:
        for key, value in settings.items():
            if key not in os.environ:
                self._environment.append(key)
                os.environ[key] = value


def _shut_down(faults: list[BaseException]) -> None:
    try:
        ray.shutdown()
    except BaseException as fault:  # a part of the cluster still runs: try once more
        faults.append(fault)
        ray.shutdown()


def _check_cluster(address: str) -> dict[str, Any]:
    """Raise if the cluster at ``address`` cannot be used; return no arguments of ``ray.init``.

    ``OSError``: it does not answer. ``ClusterRefused``: its token is wrong or missing, or none of
    its nodes is on this machine.
    """
    reach(address)
    reread_environment()
    check_token(_has_token, lambda with_token: head_accepts(address, with_token))
    reread_environment()
    check_joined(_nodes_at(address), address)
    return {}


def check_program_connection(trusted: bool) -> None:
    """Raise ``JobError`` if the connection that the program opened itself has no authentication.

    If the environment disables authentication, log a warning instead. ``trusted``: another process
    has checked that the cluster requires a token.
    """
    shows_token = raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN
    if not shows_token or not (trusted or asks_for_token(head_now())):
        check_open_cluster()


def _own_node() -> Any:
    """Return Ray's record of the node that this process started; None if it started none."""
    return ray_worker._global_node


def _resume_own_processes() -> None:
    """Send SIGCONT to the processes of the Ray cluster that this process started.

    A suspended process does not end its children at shutdown; they would run for another minute.
    """
    node = _own_node()
    for started in node.all_processes.values() if node else ():
        for one in started:
            with contextlib.suppress(OSError):
                os.kill(one.process.pid, signal.SIGCONT)


def warn_if_exposed() -> None:
    """Warn if other accounts of this machine can replace the sockets of the Ray of this process."""
    node = _own_node()
    check_folder(str(node.raylet_socket_name) if node else "")


def _log_output(data: Mapping[str, Any], *_: Any, **__: Any) -> None:
    log.debug("output of Ray: %s", " ".join(map(str, data.get("lines", ()))))


def reread_environment() -> None:
    """Make Ray read its settings again: it may have read the environment long ago."""
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Start a cluster that listens on loopback only, by Ray's switch for single-machine systems.

    Otherwise its processes listen on all interfaces, and Ray replaces the address 127.0.0.1 by that
    of the default route.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _has_token() -> bool:
    try:
        return bool(raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))
    except exceptions.AuthenticationError as fault:  # the environment names a file that is missing
        raise ClusterRefused(str(fault).partition(". ")[0]) from fault


def head_accepts(address: str, with_token: bool) -> bool:
    """Return whether the head accepts a client with the token found here, or without a token.

    The head checks tokens before the cluster id. So it reports an unknown cluster id only to
    clients that it accepts. Ray itself would try for twenty seconds.
    """
    with environment_kept():
        if not with_token:
            os.environ[MODE] = "disabled"
        reread_environment()
        try:
            raylet.GcsClient(address=address, cluster_id=UNKNOWN_CLUSTER).internal_kv_keys(
                b"overlord", None, timeout=TIMEOUTS.ping_s
            )
        except exceptions.AuthenticationError as fault:
            return "InvalidAuthToken" not in str(fault)
    return True


def _nodes_at(address: str) -> list[tuple[str, str]]:
    """Return addresses and sockets of the living nodes of a cluster.

    Ray itself would search for a node of this machine for a minute.
    """
    found = raylet.GcsClient(address=address).get_all_node_info(timeout=TIMEOUTS.ping_s)
    return [
        (node.node_manager_address, node.raylet_socket_name)
        for node in found.values()
        if node.state == ALIVE
    ]


def head_now() -> str:
    """Return the address of the head of the connected cluster."""
    return str(ray.get_runtime_context().gcs_address)


def ping_head() -> None:
    """Query the head of the connected cluster; raise unless it answers in ``Timeouts.ping_s``."""
    client = ray_worker.global_worker.gcs_client
    host, _, port = client.address.rpartition(":")
    # A closed port is detected at once.
    socket.create_connection((host, int(port)), TIMEOUTS.ping_s).close()
    client.internal_kv_keys(b"overlord", None, timeout=TIMEOUTS.ping_s)


def _is_connected_to(address: str) -> bool:
    """Return whether the cluster at ``address`` is the connected one, by its cluster id.

    One head may have several addresses, such as that of a service.
    """
    try:
        reach(address)
        there, here = (
            raylet.GcsClient(address=address).cluster_id,
            ray_worker.global_worker.gcs_client.cluster_id,
        )
    except Exception:  # it does not answer, or refuses us
        return False
    return bool(there == here)


def refuse_another(address: str | None, now: str, why: str) -> None:
    """Raise ``JobError`` if another cluster than the connected one, at ``now``, is requested.

    A process is connected to one cluster at a time. ``address``: the requested one; None: any.
    ``why``: the opener of the connection, as text.
    """
    if address is not None and not same_head(address, now) and not _is_connected_to(address):
        problem = (
            f"address: {address!r} was requested, but this process is connected to the "
            f"cluster at {now!r}, {why}"
        )
        raise JobError([f"{problem}; close that connection first, or leave address out"], "launch")


def _problem(address: str | None, fault: Exception) -> str:
    text = (
        str(fault)
        if isinstance(fault, (ClusterRefused, OverlordError))
        else f"{type(fault).__name__}: {str(fault)[:500]}"
    )
    if address is None:
        return f"runtime: 'ray' could not start a cluster on this machine: {text}"
    if isinstance(fault, ClusterRefused):
        return f"address: the cluster at {address!r} is not used: {text}"
    return (
        f"address: {address!r} could not be reached as a Ray cluster; expected host:port of its "
        f"head: {text}"
    )
