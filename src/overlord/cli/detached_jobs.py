"""Jobs of a cluster that need no launching process: an actor that Ray keeps has the session, and
others find it by name.

``submit`` returns when trainers can connect; whoever submitted may go. ``jobs`` and ``stop`` are
for whoever comes later, from any machine that reaches the cluster.
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
from overlord.ray import cluster
from overlord.ray.auth import MODE, is_refused
from overlord.serving.session_server import ServedAddress
from overlord.setup.options import address_problems

if TYPE_CHECKING:
    from overlord.session.session import Session

# for a session to be there: files are indexed, hosts open their sources; start_s= says otherwise
START_S = 180.0
ASK_S = 20.0
STOP_S = 30.0
SUBMITTED, STARTING, RUNNING = (
    "submitted",
    "starting",
    "running",
)  # the first: nobody has said yet what is to be started
OVER = ("ended", "failed", "stopped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a job says of itself."""

    name: str
    state: str  # running, ended, or why it failed
    address: str  # for trainers
    steps: int  # planned
    taken: int  # the last step that all ranks took; -1 before the first
    clients: int
    parts: tuple[
        dict[str, Any], ...
    ]  # name, node, what was asked of Ray (cores, memory, kinds of the cluster's own), pid, state
    scaling: tuple[str, ...] = ()  # what was decided lately, and who cannot keep up
    placement: tuple[str, ...] = ()  # nodes with ranks that run more hosts than sidecar allows


class Keeper:
    """Has the session of one job, in a process that Ray keeps whoever goes. Ray calls it from
    several threads.
    """

    def __init__(self, name: str) -> None:
        self._session: Session | None = None
        self._served: ServedAddress | None = None
        self._state, self._name = SUBMITTED, name
        self._last: dict[str, int] = {}  # how far it came, once it is over

    def begin(
        self,
        name: str,
        path: tuple[str, ...],
        code: bytes,
        host: str,
        port: int,
        token: str | None,
        refused: bool,
    ) -> tuple[str, str]:
        """Launch and serve: where trainers connect, and what they show. Who submitted may be gone
        before that is there: what became of it is kept. ``refused``: it was said there, by name,
        that this cluster asks for no token; else it was seen that it does.
        """
        self._state, self._name = STARTING, name
        cluster.CLUSTER.trusted = True
        if refused:
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
            target=self._attend, args=(session,), name="overlord-attend", daemon=True
        ).start()
        return self.served()

    def _launch(
        self, path: tuple[str, ...], code: bytes, host: str, port: int, token: str | None
    ) -> tuple[Session, ServedAddress]:
        sys.path.extend(p for p in path if p not in sys.path)
        import overlord as ov

        job, options = cluster.opened(code)
        here = {
            "address": cluster.head_now()
        }  # who submitted may call the head by a name that is not known on this node
        self._session = session = ov.launch(job, runtime="ray", **options | here)
        return session, session.serve(
            host=host or os.environ.get(INTERFACE) or cluster.here(), port=port, token=token
        )

    def resumed(self) -> str:
        """Where it goes on, and why there; empty for a new job."""
        found = self._session.resumed if self._session is not None else None
        return "" if found is None else str(found)

    def served(self) -> tuple[str, str]:
        """Once more: for who did not hear it."""
        if self._served is None or self._state != RUNNING:
            raise OverlordError(
                f"job {self._name!r} is {self._state}: trainers cannot connect to it"
            )
        return self._served.address, self._served.token

    def _attend(self, session: Session) -> None:
        """Until nobody needs the job; what it ended with is kept for who asks."""
        from overlord.cli.serve import attend

        try:
            attend(session, lambda line: None)
            state = "ended"
        except Exception as fault:
            state = f"failed: {type(fault).__name__}: {fault}"
        with contextlib.suppress(OverlordError):
            steps = session.metrics()["planned_steps"]
            self._last = {"steps": steps, "taken": steps - 1 if state == "ended" else session.taken}
        self._state = state
        session.close()

    def status(self) -> dict[str, Any]:
        session, address = self._session, self._served.address if self._served else ""
        told: dict[str, Any] = {
            "name": self._name,
            "state": self._state,
            "address": address,
            "steps": 0,
            "taken": -1,
            "clients": 0,
            "parts": (),
        }
        if session is None or self._state != RUNNING:
            return told | self._last
        from overlord.observe.tables import placement_facts, scaling_facts

        figures = session.metrics()
        host: Any = session.internals.runtime
        asked = host.actor_system.asked()
        here = {
            "planner": cluster.node_here()
        }  # where it has no process of its own; of a host that is lost nobody knows
        parts = tuple(
            {
                "name": a["name"],
                "node": a.get("node") or here.get(a["role"], ""),
                "pid": a["pid"],
                "state": a["state"],
            }
            | {"asked": asked.get(a["name"], {})}
            for a in figures["actors"]
            if a["role"] in ("host", "planner")
        )
        serving = session.internals.remote_ranks
        seats = serving.remote_clients if serving is not None else []
        return told | {
            "steps": figures["planned_steps"],
            "taken": session.taken,
            "clients": sum(seat.there for seat in seats),
            "parts": parts,
            "scaling": tuple(
                f"{what}: {words}" for what, words in scaling_facts(figures.get("scaling", {}))
            ),
            "placement": tuple(
                f"{what}: {words}" for what, words in placement_facts(figures.get("placement", {}))
            ),
        }

    def stop(self) -> None:
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
    """Start a job that lives on when this process goes. ``host``: the interface to serve at; empty:
    that of the node it comes to. ``start_s``: for trainers to be able to connect; a job that takes
    longer is ended.
    """
    if (
        isinstance(start_s, bool)
        or not isinstance(start_s, (int, float))
        or not 0 < start_s < math.inf
    ):
        raise JobError(
            [f"start_s: expected a number of seconds above 0, got {start_s!r}"], "submit"
        )
    with cluster.cluster(_wanted(address, "submit")):
        _make_way(job.name)
        code = cluster.pickled(job.name, (job, options))
        keeper = cluster.keep(Keeper, job.name)
        try:
            given = (
                job.name,
                tuple(p for p in sys.path if p),
                code,
                host,
                port,
                token,
                is_refused(),
            )
            what = f"job {job.name!r} to begin (start_s says for how long)"
            address_there, token_there = cluster.ask(
                keeper, "begin", *given, timeout_s=start_s, what=what
            )
            resumed = cluster.ask(
                keeper, "resumed", timeout_s=ASK_S, what=f"job {job.name!r} to say where it goes on"
            )
            return ServedAddress(address_there, token_there, resumed)
        except BaseException:
            cluster.kill(keeper)
            raise


def _make_way(name: str) -> None:
    """For a job of this name: one that is over goes, all others stay."""
    if name not in cluster.kept() or (keeper := cluster.kept_by(name)) is None:
        return
    before = _status(name, keeper, {})
    if before.state.partition(":")[0] not in OVER:
        raise JobError(
            [
                f"a job called {name!r} is {before.state} on this cluster; stop it first, "
                "or give this one another name"
            ],
            "submit",
        )
    cluster.kill(keeper)  # and not who has its name by now
    _until_gone(name, f"the job called {name!r} to go, which is over ({before.state})")


def _until_gone(name: str, what: str) -> None:
    """One who was killed."""
    deadline = time.monotonic() + STOP_S
    while name in cluster.kept():
        if time.monotonic() > deadline:
            raise DataStall(what, STOP_S)
        time.sleep(0.05)


def jobs(address: str | None) -> list[Status]:
    """All that were submitted to a cluster and not stopped."""
    with cluster.cluster(_wanted(address, "status")):
        names = {node.id: node.name or node.address for node in cluster.CLUSTER.nodes()}
        found = {name: cluster.kept_by(name) for name in cluster.kept()}
        return [
            _status(name, keeper, names) for name, keeper in found.items() if keeper is not None
        ]


def served(name: str, address: str | None) -> ServedAddress:
    """Where trainers of a job connect, and what they show, as ``submit`` returned it: for when that
    was lost with who submitted.
    """
    with cluster.cluster(_wanted(address, "status")):
        return ServedAddress(
            *cluster.ask(
                _keeper(name, "status"),
                "served",
                timeout_s=ASK_S,
                what=f"job {name!r} to say where it is served",
            )
        )


def stop(name: str, address: str | None) -> str:
    """End a job and all its parts; its journal, if it has one, says where it stood. Returns why it
    was killed, if it had to be: one that does not answer ends all the same.
    """
    with cluster.cluster(_wanted(address, "stop")):
        keeper, why = _keeper(name, "stop"), ""
        try:
            cluster.ask(keeper, "stop", timeout_s=STOP_S, what=f"job {name!r} to stop")
        except DataStall:
            why = f"it did not stop in {STOP_S:g} s when it was asked"
        except ActorLost as lost:  # it stands still; or somebody else stops it too
            why = lost.reason if cluster.kept_by(name) is not None else ""
        except OverlordError as fault:
            why = f"it did not close well: {fault}"
        finally:
            cluster.kill(keeper)
        _until_gone(name, f"the job called {name!r} to end, which was killed")
        return why


def _keeper(name: str, what: str) -> Any:
    known = cluster.kept()
    keeper = cluster.kept_by(name) if name in known else None
    if keeper is None:
        known = [other for other in known if other != name]
        raise JobError(
            [
                "no job called "
                f"{name!r}{did_you_mean(name, known) if known else '; there is none at all'}"
            ],
            what,
        )
    return keeper


def _status(name: str, keeper: Any, nodes: Mapping[str, str]) -> Status:
    try:
        told = cluster.ask(keeper, "status", timeout_s=ASK_S, what=f"job {name!r} to say how it is")
        parts = tuple(
            part | {"node": nodes.get(part["node"], part["node"])} for part in told["parts"]
        )
        return Status(**told | {"name": name, "parts": parts})
    except OverlordError as fault:
        return Status(
            name=name, state=f"unknown: {fault}", address="", steps=0, taken=-1, clients=0, parts=()
        )


def _wanted(address: str | None, what: str) -> str:
    """A cluster of this machine alone would end with this process."""
    if address is None:
        said = "host:port of a Ray cluster's head (--address, or OVERLORD_CLUSTER)"
        raise JobError(
            [f"address: expected {said}; jobs live by themselves only on a cluster that does"], what
        )
    if problems := address_problems(address):
        raise JobError(problems, what)
    return address
