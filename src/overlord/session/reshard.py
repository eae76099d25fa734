"""Resharding: a running job continues on another mesh, with the same samples in every step."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping

from overlord.client.client import Client
from overlord.errors import DataStall, JobError, OverlordError, PlanError
from overlord.mesh import ClientPlaceTree
from overlord.messages.control import StreamState
from overlord.serving.control_server import RemoteClient
from overlord.session.generation import decoded, mark_of
from overlord.session.rewind import begin_generation
from overlord.session.running_job import RunningJob

POLL_S = 0.01  # seconds between polls of the positions of ranks
WARN_S, WARN_AGAIN_S = 2.0, 10.0  # seconds until the first warning of a wait, and between others
REMEDY = (
    "all ranks must be at the same step: let the slower ones take their steps, "
    "in other threads or processes"
)

log = logging.getLogger("overlord")


def reshard(running: RunningJob, place: ClientPlaceTree, at: int | None, timeout_s: float) -> int:
    """Begin a generation on mesh ``place`` at the first step that no rank took; return the step."""
    if not isinstance(place, ClientPlaceTree):
        raise JobError([f"place: expected a ClientPlaceTree, got {place!r:.80}"], "reshard")
    running.generation.prepared.placed(place)  # raises for a wrong mesh, before any wait
    if at is None and any(isinstance(c, RemoteClient) for c in list(running.clients.values())):
        problem = (
            "at: expected the first step of the new mesh, got None; pass it: ranks in other "
            "processes may have taken steps that are not recorded here yet"
        )
        raise JobError([problem], "reshard")
    with running.switching, paused_at_one_step(running, at, timeout_s) as state:
        # Read the current job again: a source may have been added meanwhile. Earlier jobs change
        # too, so that a state that is loaded later continues on this mesh.
        prepared = running.generation.prepared.placed(place)
        every = [p.placed(place) for p in running.prepared_jobs]
        running.begun = False  # new ranks may open clients until a step is requested
        begin_generation(running, prepared, state, mark_of(prepared, state), together=True)
        running.prepared_jobs = every
        for client in running.clients.values():
            if isinstance(client, Client):
                client.begin_with(running.begin)
        if running.remote_ranks is not None:
            running.remote_ranks.expect(range(place.world_size))
            running.begin()
            running.remote_ranks.rewound()
    return state.step


@contextlib.contextmanager
def paused_at_one_step(
    running: RunningJob, at: int | None, timeout_s: float
) -> Iterator[StreamState]:
    """Wait until all ranks are at one step; yield the state there.

    ``at``: that step; None: the step of the fastest rank. Clients of this process take no further
    step inside the context. Raise ``DataStall`` after ``timeout_s``.
    """
    start, warn_at = time.monotonic(), WARN_S
    while True:
        running.refuse_closed()
        with contextlib.ExitStack() as held:
            clients = dict(running.clients)
            for client in clients.values():
                if isinstance(client, Client):
                    held.enter_context(client.paused())
            steps = {rank: client.position.step for rank, client in clients.items()}
            if not (awaited := _awaited(steps, at)):
                yield _common_state(running, clients)
                return
        if (waited := time.monotonic() - start) >= timeout_s:
            raise DataStall(f"{awaited} before the mesh is changed; {REMEDY}", waited)
        if waited >= warn_at:
            warn_at = waited + WARN_AGAIN_S
            log.warning(
                "reshard has waited %.0f s for %s; %s, or it fails after %.0f s",
                waited,
                awaited,
                REMEDY,
                timeout_s,
            )
        time.sleep(POLL_S)


def _common_state(running: RunningJob, clients: Mapping[int, Client | RemoteClient]) -> StreamState:
    if not clients:
        raise OverlordError(
            "reshard: expected an open client, whose step would be the first one on the new mesh, "
            "got none; launch the job with the new place"
        )
    state = decoded(next(iter(clients.values())).position)
    generation = running.generation
    names = generation.prepared.job.names
    return generation.events.completed(state, names, reports=running.reports())


def _awaited(steps: Mapping[int, int], at: int | None) -> str:
    """Describe the ranks that have not reached the wanted step; empty when all ranks are there.

    The wanted step is ``at``, or that of the fastest rank. Raise ``PlanError`` for a rank beyond.
    """
    if not steps:
        return ""
    wanted = max(steps.values()) if at is None else at
    if past := [rank for rank, step in steps.items() if step > wanted]:
        raise PlanError(
            f"expected all ranks before step {wanted}, got rank {past[0]} after step "
            f"{steps[past[0]] - 1}",
            wanted,
            "pass a step that no rank has taken as at=",
        )
    slower = [rank for rank, step in steps.items() if step < wanted]
    if not slower:
        return ""
    return (
        f"rank{'s' * (len(slower) > 1)} "
        f"{', '.join(map(str, slower[:8]))}{', ...' * (len(slower) > 8)} to take step "
        f"{wanted - 1}"
    )
