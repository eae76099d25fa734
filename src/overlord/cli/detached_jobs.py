"""Detached jobs: they run on a Ray cluster without the process that submitted them.

A detached Ray actor owns the session of such a job, and other processes find it by its name.
``submit`` returns when trainers can connect; the submitting process may then exit. ``jobs`` and
``stop`` work from any machine that reaches the cluster.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlord.checks import did_you_mean
from overlord.concurrency.platform import INTERFACE
from overlord.errors import ActorLost, DataStall, JobError, OverlordError
from overlord.job.job import Job
from overlord.observe.rates import RateWindow
from overlord.process.code import pack_code, unpack_code
from overlord.ray import cluster
from overlord.ray.auth import MODE, is_open_by_choice
from overlord.serving.session_server import ServedAddress
from overlord.setup.options import address_problems

if TYPE_CHECKING:
    from overlord.session.session import Session

# Default of `start_s`: seconds for a session to index its files and for workers to open sources.
START_S = 180.0
CALL_S = 20.0  # seconds for one call of the actor
STOP_S = 30.0  # seconds for an actor to stop its job, and then to exit
# SUBMITTED: the actor runs and has not received its job yet.
SUBMITTED, STARTING, RUNNING = "submitted", "starting", "running"
OVER = ("ended", "failed", "stopped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of one detached job, as its actor reports it."""

    name: str
    state: str  # submitted, starting, running, ended, stopped, or "failed: ..." with the error
    address: str  # address for trainers
    steps: int  # number of planned steps; 0 before the job runs
    taken: int  # the last step that all ranks took; -1 before the first
    clients: int  # number of connected clients
    # One dict per worker: name, node, pid, state, and under "asked" the resources that Ray
    # reserved (cores, memory, custom kinds of the cluster).
    workers: tuple[dict[str, Any], ...]
    scaling: tuple[str, ...] = ()  # latest decisions, and sources that cannot keep up
    stage: str | int | None = None  # of the last planned step; None: the job has no stages
    steps_per_s: float = 0.0  # taken by all ranks, over the last seconds
    placement: tuple[str, ...] = ()  # nodes with ranks that run more workers than sidecar allows


class JobActor:
    """A detached Ray actor that owns the session of one job.

    Ray calls it from several threads.
    """

    def __init__(self, name: str) -> None:
        self._session: Session | None = None
        self._served: ServedAddress | None = None
        self._state, self._name = SUBMITTED, name
        self._rate = RateWindow()
        self._last: dict[str, int] = {}  # final numbers of steps, after the job is over

    def begin(
        self,
        name: str,
        path: tuple[str, ...],
        code: bytes,
        host: str,
        port: int,
        token: str | None,
        unauthenticated: bool,
    ) -> tuple[str, str]:
        """Launch and serve the job; return the address for trainers and their token.

        The submitting process may exit before this returns, so the outcome is stored here.
        ``path``: additions to ``sys.path``. ``code``: the packed job and launch options.
        ``unauthenticated``: the submitting process disabled Ray's token authentication explicitly.
        Otherwise it has checked that the cluster requires a token.
        """
        self._state, self._name = STARTING, name
        cluster.CLUSTER.trusted = True
        if unauthenticated:
            os.environ[MODE] = "disabled"
        try:
            session, self._served = self._launch(path, code, host, port, token)
        except BaseException as fault:
            self._state = f"failed: {type(fault).__name__}: {fault}"
            if self._session is not None:
                self._session.close()
            raise
        self._state = RUNNING
        threading.Thread(
            target=self._run, args=(session,), name="overlord-detached-job", daemon=True
        ).start()
        return self.served()

    def _launch(
        self, path: tuple[str, ...], code: bytes, host: str, port: int, token: str | None
    ) -> tuple[Session, ServedAddress]:
        sys.path.extend(p for p in path if p not in sys.path)
        import overlord as ov

        job, options = unpack_code(code)
        # The submitting process may name the head by a name that this node cannot resolve.
        here = {"address": cluster.head_now()}
        self._session = session = ov.launch(job, runtime="ray", **options | here)
        return session, session.serve(
            host=host or os.environ.get(INTERFACE) or cluster.here(), port=port, token=token
        )

    def resumed(self) -> str:
        """Return a text about the step from which the job was resumed; empty for a new job."""
        found = self._session.resumed if self._session is not None else None
        return "" if found is None else str(found)

    def served(self) -> tuple[str, str]:
        """Return the address for trainers and their token.

        Raise ``OverlordError`` if the job is not running.
        """
        if self._served is None or self._state != RUNNING:
            raise OverlordError(
                f"job {self._name!r}: expected a running job, got one that is {self._state}; "
                "trainers can connect only to a running job"
            )
        return self._served.address, self._served.token

    def _run(self, session: Session) -> None:
        """Wait until the job is over, store its final state, and close the session."""
        from overlord.cli.serve_job import wait_for_clients

        try:
            wait_for_clients(session, lambda line: None, self._rate)
            state = "ended"
        except Exception as fault:
            state = f"failed: {type(fault).__name__}: {fault}"
        with contextlib.suppress(OverlordError):
            steps = session.metrics()["planned_steps"]
            self._last = {"steps": steps, "taken": steps - 1 if state == "ended" else session.taken}
        self._state = state
        session.close()

    def status(self) -> dict[str, Any]:
        """Return the fields of ``Status`` by name."""
        session, address = self._session, self._served.address if self._served else ""
        base: dict[str, Any] = {
            "name": self._name,
            "state": self._state,
            "address": address,
            "steps": 0,
            "taken": -1,
            "clients": 0,
            "workers": (),
        }
        if session is None or self._state != RUNNING:
            return base | self._last
        from overlord.observe.tables import placement_facts, scaling_facts

        metrics = session.metrics()
        runtime: Any = session.internals.runtime
        asked = runtime.actor_system.asked()
        workers = tuple(
            {
                "name": a["name"],
                "node": a.get("node") or "",  # a lost worker has none
                "pid": a["pid"],
                "state": a["state"],
            }
            | {"asked": asked.get(a["name"], {})}
            for a in metrics["actors"]
            if a["role"] in ("host", "planner")
        )
        serving = session.internals.remote_ranks
        clients = serving.remote_clients if serving is not None else []
        return base | {
            "steps": metrics["planned_steps"],
            "stage": metrics["stage"],
            "taken": session.taken,
            "steps_per_s": self._rate.rate(time.monotonic()),
            "clients": sum(client.there for client in clients),
            "workers": workers,
            "scaling": tuple(
                f"{what}: {text}" for what, text in scaling_facts(metrics.get("scaling", {}))
            ),
            "placement": tuple(
                f"{what}: {text}" for what, text in placement_facts(metrics.get("placement", {}))
            ),
        }

    def stop(self) -> None:
        """Close the session and all its workers."""
        if self._session is not None:
            self._session.close()
        self._state = "stopped"


def submit(
    job: Job,
    *,
    address: str | None,
    host: str = "",
    port: int = 0,
    token: str | None = None,
    start_s: float = START_S,
    **options: Any,
) -> ServedAddress:
    """Start a job that keeps running after this process exits; return its address and token.

    ``address``: host:port of the cluster's head; None raises ``JobError``. ``host``: the interface
    to serve at; empty: that of the node where the job is placed. ``start_s``: seconds until
    trainers can connect; a job that takes longer is killed. ``options``: options of ``launch``.
    """
    if (
        isinstance(start_s, bool)
        or not isinstance(start_s, (int, float))
        or not 0 < start_s < math.inf
    ):
        raise JobError(
            [f"start_s: expected a number of seconds above 0, got {start_s!r}"], "submit"
        )
    with cluster.cluster(_checked(address, "submit")):
        _remove_finished(job.name)
        code = pack_code((job, options), f"job {job.name!r}")
        actor = cluster.create_detached(JobActor, job.name)
        try:
            given = (
                job.name,
                tuple(p for p in sys.path if p),
                code,
                host,
                port,
                token,
                is_open_by_choice("submit"),
            )
            what = f"job {job.name!r} to start (start_s sets the limit)"
            address_there, token_there = cluster.ask(
                actor, "begin", *given, timeout_s=start_s, what=what
            )
            resumed = cluster.ask(
                actor, "resumed", timeout_s=CALL_S, what=f"where job {job.name!r} resumes"
            )
            return ServedAddress(address_there, token_there, resumed)
        except BaseException:
            cluster.kill(actor)
            raise


def _remove_finished(name: str) -> None:
    """Remove the actor of a finished job of this name; raise ``JobError`` if the job is active."""
    if name not in cluster.detached_names() or (actor := cluster.find_detached(name)) is None:
        return
    before = _status(name, actor, {})
    if before.state.partition(":")[0] not in OVER:
        raise JobError(
            [
                f"a job called {name!r} is {before.state} on this cluster; stop it first, "
                "or give this one another name"
            ],
            "submit",
        )
    cluster.kill(actor)  # by handle: another actor may have taken the name meanwhile
    _wait_until_gone(name, f"the actor of job {name!r} to exit; the job is over ({before.state})")


def _wait_until_gone(name: str, what: str) -> None:
    """Wait until Ray lists no job of this name; raise ``DataStall(what)`` after ``STOP_S``."""
    deadline = time.monotonic() + STOP_S
    while name in cluster.detached_names():
        if time.monotonic() > deadline:
            raise DataStall(what, STOP_S)
        time.sleep(0.05)


def jobs(address: str | None) -> list[Status]:
    """Return the status of all jobs that were submitted to a cluster and not stopped.

    Finished jobs are included. ``address``: as in ``submit``.
    """
    with cluster.cluster(_checked(address, "status")):
        names = {node.id: node.name or node.address for node in cluster.CLUSTER.nodes()}
        found = {name: cluster.find_detached(name) for name in cluster.detached_names()}
        return [_status(name, actor, names) for name, actor in found.items() if actor is not None]


def served(name: str, address: str | None) -> ServedAddress:
    """Return the address for trainers of a job and their token, as ``submit`` does.

    ``address``: host:port of the cluster's head. Raise for an unknown job or one that is not
    running.
    """
    with cluster.cluster(_checked(address, "status")):
        return ServedAddress(
            *cluster.ask(
                _actor(name, "status"),
                "served",
                timeout_s=CALL_S,
                what=f"the address of job {name!r}",
            )
        )


def stop(name: str, address: str | None) -> str:
    """End a job and all its workers; return the reason if it had to be killed, else an empty text.

    A job that does not answer is killed. The journal, if the job has one, holds its position.
    """
    with cluster.cluster(_checked(address, "stop")):
        actor, why = _actor(name, "stop"), ""
        try:
            cluster.ask(actor, "stop", timeout_s=STOP_S, what=f"job {name!r} to stop")
        except DataStall:
            why = f"it did not stop within {STOP_S:g} s"
        except ActorLost as lost:  # the actor blocks, or another process stops it meanwhile
            why = lost.reason if cluster.find_detached(name) is not None else ""
        except OverlordError as fault:
            why = f"it failed to close: {fault}"
        finally:
            cluster.kill(actor)
        _wait_until_gone(name, f"the actor of job {name!r} to exit after a kill")
        return why


def _actor(name: str, what: str) -> Any:
    known = cluster.detached_names()
    actor = cluster.find_detached(name) if name in known else None
    if actor is None:
        known = [other for other in known if other != name]
        raise JobError(
            [
                "name: expected a job of this cluster, got "
                f"{name!r}{did_you_mean(name, known) if known else '; this cluster has no jobs'}"
            ],
            what,
        )
    return actor


def _status(name: str, actor: Any, nodes: Mapping[str, str]) -> Status:
    try:
        found = cluster.ask(actor, "status", timeout_s=CALL_S, what=f"the status of job {name!r}")
        workers = tuple(
            worker | {"node": nodes.get(worker["node"], worker["node"])}
            for worker in found["workers"]
        )
        return Status(**found | {"name": name, "workers": workers})
    except OverlordError as fault:
        return Status(
            name=name,
            state=f"unknown: {fault}",
            address="",
            steps=0,
            taken=-1,
            clients=0,
            workers=(),
        )


def _checked(address: str | None, what: str) -> str:
    """Return the address of a cluster; raise ``JobError`` if it is missing or malformed.

    A cluster that this process starts would end with this process.
    """
    if address is None:
        wanted = "host:port of a Ray cluster's head (--address, or OVERLORD_CLUSTER)"
        raise JobError(
            [f"address: expected {wanted}, got none; a detached job needs a running cluster"], what
        )
    if problems := address_problems(address):
        raise JobError(problems, what)
    return address
