"""Rewinds: a running session continues at a saved state, as a new generation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from overlord.client.client import Client, StepQueue
from overlord.errors import ActorLost, OverlordError, StateMismatch
from overlord.journal.write_ahead import UNWRITTEN, JournalStart
from overlord.mesh import ClientPlaceTree
from overlord.messages.control import Report, StreamState
from overlord.process.shutdown import run_all
from overlord.serving.step_publisher import MOVED
from overlord.session.generation import Generation, differences, mark_of
from overlord.session.running_job import RunningJob
from overlord.session.runtime import Runtime, start_runtime
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")

# seconds for the start of a generation to be written to the journal: the coordinator and workers
# may be lost meanwhile
JOURNAL_S = 600.0


def restore(
    running: RunningJob, saved: Mapping[str, Any], allow: tuple[str, ...]
) -> tuple[PreparedJob, StreamState]:
    """Return the prepared job with the sources of a saved state, and the decoded state.

    Sources may have been added since the state was saved. Raise ``StateMismatch`` if no prepared
    job fits the state.
    """
    names = saved.get("cursors") if isinstance(saved, Mapping) else None
    known = set(names) if isinstance(names, Mapping) else set()
    fitting = [p for p in reversed(running.prepared_jobs) if set(p.job.names) == known]
    error: StateMismatch | None = None
    for one in fitting or [running.generation.prepared]:
        try:
            prepared = one.for_saved_state(saved)
            return prepared, prepared.restore(saved, allow)
        except StateMismatch as e:
            error = error or e
    assert error is not None
    raise error


def rewind_all(running: RunningJob, saved: Mapping[str, Any], allow: tuple[str, ...]) -> None:
    """Rewind the session with all its clients."""
    prepared, state = restore(running, saved, allow)
    with running.switching:
        begin_generation(running, prepared, state, mark_of(prepared, state), together=True)
        if running.remote_ranks is not None:
            running.remote_ranks.rewound()


def rewind_rank(
    running: RunningJob,
    rank: int,
    saved: Mapping[str, Any],
    allow: tuple[str, ...],
    *,
    retry: bool = False,
) -> tuple[StepQueue, StreamState, list[Report]]:
    """Rewind one rank; return its new queue, the state at which it starts, and more reports.

    The client sends these reports again: its own in the state that it loads.

    The first rank to rewind begins a generation; the others must load the same state. ``retry``:
    the request may have been answered before.
    """
    prepared, state = restore(running, saved, allow)
    mark = mark_of(prepared, state)
    with running.switching:
        now = running.generation
        if rank not in now.queues:
            raise OverlordError(
                f"load_state_dict: the client of rank {rank} is closed; load before close()"
            )
        if rank in now.joined:
            # otherwise the whole session is at this state already
            if mark != now.mark or (now.acked and not retry) or now.failed_for_good:
                begin_generation(running, prepared, state, mark)
        elif mark != now.mark:
            differ = differences(prepared.export(state), now.prepared.export(now.start))
            problem = (
                f"rank {rank}: expected the state to which another rank has rewound the session, "
                "got another state of this job"
            )
            raise StateMismatch(differ, "load the same state on every rank", problem)
        now = running.generation
        # A state that this rank saved holds its own reports; the state of the first rank to
        # rewind may be a moment older.
        own = [r for r in state.reports if r.rank == rank and r not in now.start.reports]
        with running.lock:
            now.joined.add(rank)
            return now.queues[rank], now.start, own


def rewind_client(
    running: RunningJob, rank: int, saved: Mapping[str, Any], allow: tuple[str, ...]
) -> tuple[StepQueue, StreamState]:
    """Rewind the client of one rank in this process; return its new queue and its start."""
    queue, start, own = rewind_rank(running, rank, saved, allow)
    for report in own:  # no step is planned yet, so the reports are in time
        queue.report(report, in_time=True)
    return queue, start


def begin_generation(
    running: RunningJob,
    prepared: PreparedJob,
    state: StreamState,
    mark: str,
    *,
    together: bool = False,
) -> None:
    """Replace the current generation by one that starts at ``state``.

    The old runtime is closed first. ``together``: all clients move to the new generation at once;
    else each one must load the state. The caller holds ``switching``.
    """
    running.refuse_closed()
    old = running.generation
    queues = dict(old.queues)
    old.runtime.close()
    old.prepared.close()
    if not together:
        for queue in queues.values():
            queue.end(OverlordError(MOVED))
    new = _started(running, prepared, state, mark)
    with running.lock:
        running.generation = new
        world = new.prepared.given.place.world_size
        for rank in queues:
            if rank < world:
                new.add_queue(rank, running.new_queue(rank, new), joined=together)
        removed = {
            rank: running.clients.pop(rank) for rank in list(running.clients) if rank >= world
        }
        if together:
            for rank, client in running.clients.items():
                client.move_to(new.queues[rank], new.start)
        begun = running.begun
    if together:
        _end_local(running, queues, removed)
    if running.closed:  # by another thread, which has closed only the old generation
        run_all(running.steps_to_close())
        raise OverlordError("the session is closed; launch the job again to continue")
    if begun:
        running.loop.call(lambda: running.attach(new), "clients to be attached")


def _started(
    running: RunningJob, prepared: PreparedJob, state: StreamState, mark: str
) -> Generation:
    """Return the next generation with a started runtime; on failure all clients get the error."""
    old, runtime = running.generation, None
    number = old.number + 1
    try:
        running.loop.call(lambda: old.runtime.stop(), "the old runtime to stop")
        old.runtime.journal = UNWRITTEN
        runtime = _new_runtime(running, prepared, state, number)
        running.observe(runtime)
        start = JournalStart(running.journal, anew=True)
        running.loop.call(lambda: start.write(runtime, prepared), "the journal", JOURNAL_S)
        if running.remote_ranks is not None:
            running.remote_ranks.follow(runtime)
        # outside the lock: the coordinator may answer late
        return Generation.of(number, prepared, runtime, runtime.planner.state(), mark)
    except BaseException as error:
        if runtime is not None:
            runtime.close()
        running.fail(error)
        raise


def _new_runtime(
    running: RunningJob, prepared: PreparedJob, state: StreamState, number: int
) -> Runtime:
    """Start a runtime; if a process is lost during the start, start all processes again."""
    options = prepared.options
    for left in reversed(range(1 + (options.max_restarts if options.failover else 0))):
        try:
            return start_runtime(running.kind, prepared, state, running.loop, number)
        except ActorLost as fault:
            if not left or running.closed:
                raise
            log.warning(
                "%s lost during a rewind: %s; restarting all processes", fault.name, fault.reason
            )
    raise AssertionError("the last attempt returns or raises")


def _end_local(
    running: RunningJob, old_queues: Mapping[int, StepQueue], removed: Mapping[int, Any]
) -> None:
    """End the old queues of clients in this process; other clients keep their connections."""
    for rank, queue in old_queues.items():
        client = running.clients.get(rank) or removed.get(rank)
        if isinstance(client, Client):
            words = not_in_mesh(rank, running.job.place) if rank in removed else MOVED
            queue.end(OverlordError(words), drop=True)


def not_in_mesh(rank: int, place: ClientPlaceTree) -> str:
    """Return the error text for a rank that a reshard has removed."""
    return (
        f"rank {rank} is not in the mesh any more: the session was resharded to "
        f"{place.world_size} ranks ({place!r})"
    )
