"""The Ray cluster of this process.

All sessions of the process share one connection to it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from overlord.checks import did_you_mean
from overlord.errors import DataStall, JobError, OverlordError
from overlord.ray.actors import actor_of, has_process, kill
from overlord.ray.connection import (
    RayConnection,
    check_program_connection,
    head_now,
    ping_head,
    refuse_another,
)
from overlord.ray.detached_actors import ask, create_detached, detached_names, find_detached
from overlord.ray.head import Head
from overlord.ray.node_choice import Node
from overlord.ray.nodes import here, living_nodes
from overlord.ray.placement import RayPlace
from overlord.ray.ray_import import ray
from overlord.ray.timeouts import TIMEOUTS
from overlord.ray.worker import RayLaunchSpec

__all__ = [
    "CLUSTER",
    "Cluster",
    "ask",
    "cluster",
    "create_detached",
    "detached_names",
    "find_detached",
    "head_now",
    "here",
    "kill",
]

log = logging.getLogger("overlord")


class Cluster:
    """The shared connection to one Ray cluster, open while any user holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users = 0
        # One entry for each user that has left and is still counted in ``_users``. Leaving takes no
        # lock, since a call of Ray may hang with the lock held.
        self._left: deque[None] = deque()
        self.trusted = False  # another process has checked that the cluster requires a token
        self._connection = RayConnection()
        self._ours = False  # whether we opened the connection
        self._up = False  # whether there is anything to close
        self.address: str | None = None
        self._numbers = itertools.count(1)
        self._pid = 0  # a forked copy of this process does not own the connection
        self._run = ""  # distinguishes the names of this connection from those of others
        self._head = Head("", ping_head)
        self._nodes: list[Node] = []  # as of the last answer of the head

    def hold(self, address: str | None) -> None:
        """Connect to the cluster at ``address`` (None: start one on this machine); count one user.

        An existing connection of this process is used instead. Raise ``JobError`` if it is to
        another cluster than ``address``, or if the cluster cannot be used.
        """
        with self._held("the requests of another session to complete"):
            if self._users == 0:
                self._connection.await_disconnect()
                self._ours = not ray.is_initialized()
                self._up = True
                if self._ours:
                    self._connection.open(address)
                else:
                    refuse_another(address, head_now(), "by a ray.init of its own")
                    check_program_connection(self.trusted)
                self.address, self._run, self._pid = address, secrets.token_hex(4), os.getpid()
                self._head, self._nodes = Head(head_now(), ping_head), []
            else:
                refuse_another(address, self._head.address, "for another session")
            self._users += 1

    def release(self) -> None:
        self.leave()
        self.settle()

    def leave(self) -> None:
        """Record that one user no longer needs the cluster; never wait and never disconnect."""
        if os.getpid() == self._pid:
            self._left.append(None)

    def settle(self) -> None:
        """Disconnect if no user is left, and finish a disconnect that was interrupted."""
        if os.getpid() != self._pid:
            return
        # Ray may hang in a start: waiting for it would block the closing of a session.
        if not self._lock.acquire(timeout=TIMEOUTS.release_s):
            log.warning(
                "disconnect from the Ray cluster postponed to the next use: another request to Ray "
                "did not complete within %g s",
                TIMEOUTS.release_s,
            )
            return
        try:
            self._settle()
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _held(self, what: str) -> Iterator[None]:
        """Hold the lock during the block; remove users that have left before and after it.

        Raise ``DataStall`` about ``what`` if the lock is not free within ``Timeouts.hold_s``.
        """
        if not self._lock.acquire(timeout=TIMEOUTS.hold_s):
            raise DataStall(f"Ray: {what}", TIMEOUTS.hold_s)
        try:
            self._settle()
            try:
                yield
            finally:
                self._settle()
        finally:
            self._lock.release()

    def _settle(self) -> None:
        while self._left:
            self._left.pop()
            self._users -= 1
        if self._up and not self._users:
            if self._ours:
                self._connection.close()
            self._up = False

    @property
    def multi_machine(self) -> bool:
        """Whether the cluster may have other machines."""
        return not self._ours or self.address is not None

    def start(
        self,
        job: str,
        spec: RayLaunchSpec,
        place: RayPlace,
        code: bytes,
        wanted: Callable[[], bool],
    ) -> tuple[Any, Future[Any]] | None:
        """Start an actor; return it and a future that is done when it ends.

        Wait for the head; return None if ``wanted`` returns False meanwhile. The lock is held,
        since Ray starts a cluster for any call without a connection.
        """
        if not self._head.wait(wanted):
            return None
        with self._held(f"{spec.name} to be started, after other requests"):
            if not self._users:
                raise OverlordError(
                    f"{spec.name}: expected a connected cluster, got a released one; launch again"
                )
            # Every name is used once: Ray keeps the name of a killed actor as long as it is
            # referenced.
            named = {
                "name": f"{spec.name}#{next(self._numbers)}",
                "namespace": f"overlord-{job}-{self._run}",
            }
            actor = actor_of(place, **named).remote()
            life: Future[Any] = actor.begin.remote(spec, self.multi_machine, code).future()
        return actor, life

    def has_process(self, actor: Any) -> bool | None:
        """Return whether Ray has started a process for an actor; None if the head is lost."""
        return has_process(actor) if self._head.answers() else None

    def nodes(self) -> list[Node]:
        """Return the living nodes with their idle resources.

        While the head is lost, return the nodes known before.
        """
        if self._head.answers() or (not self._nodes and self._head.wait()):
            self._refresh_nodes()
        return self._nodes

    def _refresh_nodes(self) -> None:
        """Query Ray for its nodes with the lock held.

        Without a connection Ray would start a cluster for the query. If the lock is taken, keep the
        known nodes.
        """
        if self._lock.acquire(timeout=TIMEOUTS.ping_s if self._nodes else TIMEOUTS.hold_s):
            try:
                if self._users > len(self._left):
                    self._nodes = living_nodes()
            finally:
                self._lock.release()

    def node_id(self, node: str, actor: str) -> str:
        """Return the id of a node, given its name, address or id; raise ``JobError`` if unknown.

        ``actor`` is the location that the error names.
        """
        known = self.nodes()
        for found in known:
            if found.has_name(node):
                return found.id
        if not self.multi_machine:
            raise JobError(
                [
                    f"node: expected None, since this runtime has one machine, got {node!r}; "
                    "leave it out"
                ],
                f"actor {actor!r}",
            )
        raise JobError(
            [
                f"node: expected a node of the cluster, got {node!r}"
                f"{did_you_mean(node, [n.name for n in known])}"
            ],
            f"actor {actor!r}",
        )


CLUSTER = Cluster()


@contextlib.contextmanager
def cluster(address: str | None = None) -> Iterator[Cluster]:
    """Stay connected to a cluster during the block.

    Actor systems that are created in the block do not start a cluster of their own.
    """
    CLUSTER.hold(address)
    try:
        yield CLUSTER
    finally:
        CLUSTER.release()
