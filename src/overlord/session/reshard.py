"""Another mesh for a running job: from the first step that no rank was handed, the same samples are
placed on the new ranks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from overlord.client.client import Client
from overlord.errors import DataStall, JobError, OverlordError, PlanError
from overlord.mesh import ClientPlaceTree
from overlord.messages.control import StreamState
from overlord.serving.control_server import RemoteClient

if TYPE_CHECKING:
    from overlord.job.job import Job
    from overlord.planning.events import EventLog
    from overlord.serving.session_server import SessionServer
    from overlord.setup.options import Options
    from overlord.setup.prepared_job import PreparedJob

LOOK_S = 0.01
WARN_S, WARN_AGAIN_S = 2.0, 10.0  # a change of the mesh is waited for by people
REMEDY = (
    "all ranks must stand behind the same step: let those that are behind take their steps, "
    "in other threads or processes"
)

log = logging.getLogger("overlord")


class Resharding:
    """The part of ``Session`` that changes its mesh."""

    job: Job
    _begun: bool
    _blueprint: PreparedJob
    _blueprints: list[PreparedJob]
    _clients: dict[int, Client]
    _closed: bool
    _lock: threading.RLock
    _log: EventLog
    _moving: threading.Lock
    _options: Options
    _serving: SessionServer | None

    def _begin(self) -> None:
        raise NotImplementedError

    def _restart(
        self, blueprint: PreparedJob, state: StreamState, mark: str, *, together: bool = False
    ) -> None:
        raise NotImplementedError

    def reshard(
        self, place: ClientPlaceTree, at: int | None = None, *, timeout_s: float = 60.0
    ) -> int:
        """Go on with another mesh from the first step that no rank was handed; returns that step.
        Its samples, and those of all steps behind it, are what they were going to be: they are
        placed anew, never drawn anew.

        All ranks must stand behind the same step, as trainers do at a barrier: one that is behind
        is waited for (``timeout_s``), and must take its steps meanwhile, in another thread or
        process. ``at`` names the step; it must be given where clients are connected from other
        processes, since what they were handed a moment ago is not known here yet. Clients of ranks
        that the new mesh has too go on as they are; those of others are told so by an error; those
        of new ranks are opened before the next step is asked for.
        """
        if not isinstance(place, ClientPlaceTree):
            raise JobError([f"place: expected a ClientPlaceTree, got {place!r:.80}"], "reshard")
        from overlord.session.session import mark_of

        self._blueprint.placed(place)  # what is wrong with it is told before anyone is waited for
        if at is None and any(
            isinstance(client, RemoteClient) for client in list(self._clients.values())
        ):
            problem = (
                "at: ranks in other processes may have been handed more than is known here: "
                "name the first step of the new mesh"
            )
            raise JobError([problem], "reshard")
        with self._moving, self._standing(at, timeout_s) as state:
            # Of now: a source may have joined meanwhile. All of them: a state that is loaded later
            # is gone on from under this mesh.
            blueprint, every = (
                self._blueprint.placed(place),
                [b.placed(place) for b in self._blueprints],
            )
            self._begun = False  # new ranks may come until a step is asked for
            self._restart(blueprint, state, mark_of(blueprint, state), together=True)
            self._blueprints = every
            for client in self._clients.values():
                client._begin = self._begin
            if self._serving is not None:
                self._serving.expect(range(place.world_size))
                self._begin()
                self._serving.carry()
        return state.step

    @contextlib.contextmanager
    def _standing(self, at: int | None, timeout_s: float) -> Iterator[StreamState]:
        """All ranks behind one step, and none of those in this process takes another while this
        lasts; with the state behind it.
        """
        start, warn_at = time.monotonic(), WARN_S
        while True:
            if self._closed:
                raise OverlordError("the session is closed")
            with contextlib.ExitStack() as held:
                clients = dict(self._clients)
                for client in clients.values():
                    if not isinstance(client, RemoteClient):
                        held.enter_context(client._gate)
                behind = _apart({rank: client._state.step for rank, client in clients.items()}, at)
                if not behind:
                    yield self._stands_at(clients)
                    return
            if (waited := time.monotonic() - start) >= timeout_s:
                raise DataStall(f"{behind} before the mesh is changed; {REMEDY}", waited)
            if waited >= warn_at:
                warn_at = waited + WARN_AGAIN_S
                log.warning(
                    "reshard has waited %.0f s for %s; %s, or it is given up after %.0f s",
                    waited,
                    behind,
                    REMEDY,
                    timeout_s,
                )
            time.sleep(LOOK_S)

    def _stands_at(self, clients: dict[int, Any]) -> StreamState:
        from overlord.session.session import opened

        if not clients:
            raise OverlordError(
                "reshard: no client is open, so there is nothing to go on from; launch "
                "the job with the new place"
            )
        state = opened(next(iter(clients.values()))._state)
        return self._log.completed(state, self._blueprint.job.names)


def not_in_the_mesh(rank: int, place: ClientPlaceTree) -> str:
    """An error and no end: a trainer must not take it for the end of the data."""
    return (
        f"rank {rank} is no part of the mesh any more: the session was resharded to "
        f"{place.world_size} ranks ({place!r})"
    )


def _apart(steps: dict[int, int], at: int | None) -> str:
    """Whom one waits for, in words; empty when all stand behind one step, the one that was asked
    for.
    """
    if not steps:
        return ""
    wanted = max(steps.values()) if at is None else at
    if past := [rank for rank, step in steps.items() if step > wanted]:
        raise PlanError(
            f"rank {past[0]} was handed step {steps[past[0]] - 1} already",
            wanted,
            "all ranks must stop before the step",
        )
    behind = [rank for rank, step in steps.items() if step < wanted]
    if not behind:
        return ""
    return (
        f"rank{'s' * (len(behind) > 1)} "
        f"{', '.join(map(str, behind[:8]))}{', ...' * (len(behind) > 8)} to take step "
        f"{wanted - 1}"
    )
