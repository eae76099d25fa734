"""``overlord.torch.join``: ``overlord.join`` for plans that broadcast.

Rank 0 launches the job, waits for the first plan (it determines the fetching ranks) and publishes
both. All ranks create the process groups, and fetchers connect to the step queues of their groups.
Served ranks do not connect, except for images that they encode themselves. The session does not
wait for the queues that no rank reads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from overlord.client.client import Client, State
from overlord.client.connect import SessionConnection, connect
from overlord.client.control_client import ControlClient
from overlord.errors import DataStall, PlanError
from overlord.job.job import Job
from overlord.messages.control import EncodedState
from overlord.plan.view import view_of
from overlord.session.launch import launch
from overlord.session.rendezvous import (
    POLL_S,
    READ_ERROR_S,
    STALLS,
    _Board,
    _owning,
    checked_world,
    serving_host,
)
from overlord.session.rendezvous import join as plain_join
from overlord.setup.job_agreement import difference, parts_of
from overlord.torch.broadcast_client import BroadcastClient, BroadcastSetup, encoded_state
from overlord.torch.broadcast_frames import FrameBroadcast
from overlord.torch.departures import Departures
from overlord.torch.process_groups import Service, make_group, service_of

if TYPE_CHECKING:
    from overlord.plan.plan import LoadingPlan
    from overlord.session.session import Session

CALL_S = 30.0  # seconds for one call of the session's control server
# seconds from our own deadline, whose error names the missing rank, to the deadline of torch
AFTER_S = 60.0


def join(
    job: Job,
    *,
    rank: int | None = None,
    timeout_s: float = 600.0,
    leave_s: float = 60.0,
    device: str | torch.device | None = None,
    wait_s: float = 1800.0,
    **launch_options: Any,
) -> Client:
    """Return the client of this process's rank, after ``init_process_group``.

    Every rank of the world calls it with the same job. If the plan broadcasts (``broadcast_at``),
    one rank of each group fetches. The others receive their steps from it, in a process group of
    their own: a ``BroadcastClient``. Ranks of a group take steps and load states together.

    ``device``: broadcast through the memory of this device (NCCL) instead of the CPU's (gloo).
    ``wait_s``: the longest wait of a rank for another of its group. ``timeout_s``: for rank 0 to
    launch and, if the plan broadcasts, for every rank to call this. Everything else is as in
    ``overlord.join``; with ``broadcast=False`` every rank fetches its own steps.
    """
    here = checked_world(job) if isinstance(job, Job) else None
    if here is None or here.size == 1:
        return plain_join(job, rank=rank, timeout_s=timeout_s, leave_s=leave_s, **launch_options)
    rank = here.rank if rank is None else rank
    board = _Board(
        rank,
        here.size,
        timeout_s,
        {name: launch_options[name] for name in STALLS if name in launch_options},
    )
    launched = _launch(job, board, timeout_s, launch_options) if rank == 0 else None
    published = board.read() if launched is None else launched.published
    if isinstance(published.get("error"), BaseException):
        raise published["error"]
    try:
        _wait_for_all(job, rank, published, board)
        return _ClientFactory(
            job, rank, published, board, launched, leave_s, launch_options
        ).client(torch.device(device or "cpu"), wait_s)
    except BaseException:
        if launched is not None:
            launched.session.close()
        raise


def _wait_for_all(job: Job, rank: int, published: dict[str, Any], board: _Board) -> None:
    """Wait for all ranks before process groups are created; raise if this rank's job differs.

    Without a broadcast there are no groups, and each rank only compares its job with rank 0's.
    """
    differs = difference(job, rank, published["job"])
    if published["broadcast"]:
        board.wait_for_all("" if differs is None else "; ".join(differs.problems))
    if differs is not None:
        raise differs


class _Launched:
    """The session that rank 0 launched, its own client, and the settings it published."""

    def __init__(self, session: Session, client: Client, published: dict[str, Any]):
        self.session, self.client, self.published = session, client, published


def _launch(job: Job, board: _Board, timeout_s: float, options: dict[str, Any]) -> _Launched:
    session: Session | None = None
    try:
        host, parts = serving_host(board), parts_of(job)
        session = launch(job, **options)
        client = session.client(0)
        served = session.serve(host=host)
        plan = _first_plan(session, timeout_s) if options.get("broadcast", True) else None
        axis, broadcast = ("DP", ()) if plan is None else (plan.main.axis, _serving_axes(job, plan))
        if plan is not None and plan.main.on is not None and broadcast:
            problem = (
                f"join: expected a backbone on {job.place} for a broadcast at "
                f"{', '.join(broadcast)}, got one on {plan.main.on}"
            )
            raise PlanError(problem, plan.step, "pass broadcast=False: every rank then fetches")
        encodes = plan is not None and "encoder" in plan.modules
        published = {
            "address": served.address,
            "token": served.token,
            "axis": axis,
            "broadcast": broadcast,
            "encodes": encodes,
        }
        published["job"] = parts
        published["start"] = encoded_state(session.internals.generation.start)
        _register_served(session, axis, broadcast, encodes)
    except BaseException as error:
        if session is not None:
            session.close()
        board.write({"error": error})
        board.wait_until_all_read(READ_ERROR_S)
        raise
    board.write(published)
    return _Launched(session, client, published)


def _serving_axes(job: Job, plan: LoadingPlan) -> tuple[str, ...]:
    """Return the axes at which the plan broadcasts, without axes of a single rank."""
    mesh = plan.main.on or job.place
    return tuple(dim for dim in plan.main.broadcast if getattr(mesh, dim.lower()) > 1)


def _first_plan(session: Session, timeout_s: float) -> LoadingPlan | None:
    """Wait for the plan of the first step, which determines the fetching ranks of all steps.

    Return None if the job ends without a step; each rank then receives the reason. Raise
    ``DataStall`` after ``timeout_s``.
    """
    assert session.internals.remote_ranks is not None
    session.internals.begin()
    deadline = time.monotonic() + timeout_s
    while True:
        plans, over = session.internals.loop.call(
            lambda: (
                [s.plan for s in session.internals.runtime.plans],
                session.internals.runtime.planner.finished,
            ),
            "the planner",
        )
        if plans or over is not None:
            return plans[0] if plans else None
        if time.monotonic() >= deadline:
            raise DataStall(session.internals.waiting_for(0), timeout_s, rank=0)
        time.sleep(POLL_S / 5)


def _register_served(
    session: Session, axis: str, broadcast: tuple[str, ...], encodes: bool
) -> None:
    """Register at the session the ranks whose steps other ranks fetch.

    No rank reads the queue of a served rank, unless the rank itself fetches images or its fetcher
    reads the queue.
    """
    assert session.internals.remote_ranks is not None
    place = session.job.place
    queues, fetchers = place.seats(axis, broadcast).tolist(), place.served_by(broadcast).tolist()
    served = [
        rank
        for rank, by in enumerate(fetchers)
        if rank != by and (not encodes or queues[rank] == rank)
    ]
    session.internals.remote_ranks.serve_by_broadcast(
        served, [rank for rank in served if queues[rank] != rank]
    )


class _ClientFactory:
    """The factory of this rank's client, from the settings that rank 0 published."""

    def __init__(
        self,
        job: Job,
        rank: int,
        published: dict[str, Any],
        board: _Board,
        launched: _Launched | None,
        leave_s: float,
        options: dict[str, Any],
    ):
        self._job, self._rank, self._published, self._board, self._leave_s = (
            job,
            rank,
            published,
            board,
            leave_s,
        )
        self._session = None if launched is None else launched.session
        self._axis, self._broadcast = published["axis"], tuple(published["broadcast"])
        self._stalls = {name: options[name] for name in STALLS if name in options}
        self._service = service_of(job.place, rank, self._axis, self._broadcast)
        self._served = [
            r for r, by in enumerate(job.place.served_by(self._broadcast).tolist()) if r != by
        ]

    def client(self, device: torch.device, wait_s: float) -> Client:
        """Return a plain client, or a ``BroadcastClient`` if the plan broadcasts."""
        s = self._service
        backend = "gloo" if device.type == "cpu" else None
        group = make_group(
            self._job.place,
            self._rank,
            self._broadcast,
            backend=backend,
            timeout_s=wait_s + AFTER_S,
        )
        if group is None:
            only = self._open(self._rank)
            return self._owned(only) if self._session is not None else only
        view = view_of(self._job.place, self._axis, (), self._rank, self._job.batch.cp_split)
        departures = Departures(self._board, s)
        clients = self._clients(s)
        frames = FrameBroadcast(
            s, group, device, wait_s, departures=departures, **self._stall_options()
        )
        if self._session is not None:
            self._owned(clients[0])
        return BroadcastClient(
            BroadcastSetup(
                service=s,
                view=view,
                frames=frames,
                clients=clients,
                split=(self._axis, self._broadcast),
                start=self._start(clients),
                connect_control=self._connect_control,
                leave=self._leave,
                departures=departures,
                microbatches=self._job.batch.microbatches,
                world_size=self._job.place.world_size,
                evaluation=self._job.evaluation,
            )
        )

    def _stall_options(self) -> dict[str, Any]:
        """Return the options of stall warnings; ``wait_s`` replaces ``stall_limit_s`` here."""
        return {name: value for name, value in self._stalls.items() if name != "stall_limit_s"}

    def _clients(self, s: Service) -> dict[int, Client]:
        if s.fetches:
            own_first = sorted(s.queue_ranks, key=lambda rank: rank != s.rank)
            return {rank: self._open(rank) for rank in own_first}
        encodes = self._published["encodes"] and s.queue_rank != s.rank
        return {s.rank: self._open(s.rank)} if encodes else {}

    def _open(self, rank: int) -> Client:
        if self._session is not None:
            return self._session.client(rank)
        return connect(self._published["address"], rank, self._published["token"], **self._stalls)

    def _owned(self, client: Client) -> Client:
        """Make ``close()`` of a client close the session after the other ranks have closed.

        It waits at most ``leave_s`` in all: for served ranks, then for the others. A client that is
        marked as failed does not wait.
        """
        assert self._session is not None
        client.session = self._session

        def leave(close: Callable[[], None]) -> None:
            if not client.failed:
                self._board.wait_until_left(len(self._served), self._leave_s)
            close()

        client.close_with(leave)
        return _owning(self._session, client, self._leave_s, self._board)

    def _start(self, clients: dict[int, Client]) -> State:
        start: EncodedState = self._published["start"]
        return clients[self._rank].position if self._rank in clients else start

    def _connect_control(self) -> SessionConnection:
        return SessionConnection(
            ControlClient(
                self._published["address"],
                self._published["token"],
                self._rank,
                timeout_s=CALL_S,
                role="served",
            ),
            {},
            CALL_S,
            0.0,
        )

    def _leave(self, clients: Mapping[int, Client], failed: bool) -> None:
        if not self._service.fetches:
            self._board.left()
        for rank in sorted(clients, reverse=True):  # the client that owns the session comes last
            inner = clients[rank]
            if failed:
                inner.mark_failed()
            with contextlib.suppress(Exception):
                inner.close()
