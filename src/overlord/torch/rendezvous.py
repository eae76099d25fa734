"""``overlord.torch.join``: as ``overlord.join``, for plans that broadcast. Ranks that are served
have no connection to the session.

Rank 0 launches, waits for the first plan (it says who fetches for whom) and tells all. Groups are
made, fetchers connect at the seats of their groups, and nobody waits any more for the mailboxes of
the others.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch

from overlord.client.client import Client
from overlord.client.connect import _Connected, connect
from overlord.client.control_client import ControlClient
from overlord.client.step_queue import State
from overlord.errors import DataStall
from overlord.job.job import Job
from overlord.messages.control import EncodedState
from overlord.plan.rank_view import view_of
from overlord.session.launch import launch
from overlord.session.rendezvous import (
    HEARD_S,
    LOOK_S,
    STALLS,
    _Board,
    _owning,
    checked_world,
    serving_host,
)
from overlord.session.rendezvous import join as plain_join
from overlord.setup.job_agreement import difference, parts_of
from overlord.torch.broadcast_client import BroadcastClient, sealed
from overlord.torch.broadcast_frames import FrameBroadcast
from overlord.torch.departures import Departures
from overlord.torch.process_groups import Service, make_group, service_of

if TYPE_CHECKING:
    from overlord.plan.plan import LoadingPlan
    from overlord.session.session import Session

ASK_S = 30.0  # for an answer of the session's front door
AFTER_S = 60.0  # behind our own deadline, which says who is waited for; torch's does not


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
    """Return the client of this process's rank, after ``init_process_group``; every rank of the
    world calls it.

    Where the plan broadcasts (``broadcast_at``) one rank of each group fetches and the others get
    their part from it, in a process group of their own: a ``BroadcastClient``. Ranks of a group
    take steps and load states together. ``device``: broadcast through this device's memory (NCCL)
    and not through the host's (gloo). ``wait_s``: how far ranks of a group may be apart.
    ``timeout_s``: for rank 0 to launch and, where the plan broadcasts, for every rank to come. All
    ranks make the same job. Everything else is as in ``overlord.join``; ``broadcast=False`` lets
    every rank fetch its own.
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
    session = _launched(job, board, timeout_s, launch_options) if rank == 0 else None
    said = board.read() if session is None else session.said
    if isinstance(said.get("error"), BaseException):
        raise said["error"]
    try:
        _meet(job, rank, said, board)
        return _Joining(job, rank, said, board, session, leave_s, launch_options).client(
            torch.device(device or "cpu"), wait_s
        )
    except BaseException:
        if session is not None:
            session.session.close()
        raise


def _meet(job: Job, rank: int, said: dict[str, Any], board: _Board) -> None:
    """Before groups are made all must be here, and with one job; where there are none, a rank
    speaks for itself.
    """
    differs = difference(job, rank, said["job"])
    if said["broadcast"]:
        board.meet("" if differs is None else "; ".join(differs.problems))
    if differs is not None:
        raise differs


class _Launched:
    """Rank 0's side: the session, its own client, and what all ranks are told."""

    def __init__(self, session: Session, client: Client, said: dict[str, Any]):
        self.session, self.client, self.said = session, client, said


def _launched(job: Job, board: _Board, timeout_s: float, options: dict[str, Any]) -> _Launched:
    session: Session | None = None
    try:
        host, parts = serving_host(board), parts_of(job)
        session = launch(job, **options)
        client = session.client(0)
        served = session.serve(host=host)
        plan = _first_plan(session, timeout_s) if options.get("broadcast", True) else None
        axis, broadcast = ("DP", ()) if plan is None else (plan.main.axis, _serving_axes(job, plan))
        encodes = plan is not None and "encoder" in plan.modules
        said = {
            "address": served.address,
            "token": served.token,
            "axis": axis,
            "broadcast": broadcast,
            "encodes": encodes,
        }
        said["job"] = parts
        said["start"] = sealed(session.internals.generation.start)
        _excuse(session, axis, broadcast, encodes)
    except BaseException as error:
        if session is not None:
            session.close()
        board.write({"error": error})
        board.wait_until_all_read(HEARD_S)
        raise
    board.write(said)
    return _Launched(session, client, said)


def _serving_axes(job: Job, plan: LoadingPlan) -> tuple[str, ...]:
    """The plan's broadcasts that serve anyone."""
    return tuple(dim for dim in plan.main.broadcast if getattr(job.place, dim.lower()) > 1)


def _first_plan(session: Session, timeout_s: float) -> LoadingPlan | None:
    """The plan of the first step, which says what all others will: who fetches. None where there is
    no step: each rank hears why.
    """
    assert session.internals.remote_ranks is not None
    session.internals.begin()
    deadline = time.monotonic() + timeout_s
    while True:
        plans, over = session.internals.loop.ask(
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
        time.sleep(LOOK_S / 5)


def _excuse(session: Session, axis: str, broadcast: tuple[str, ...], encodes: bool) -> None:
    """Nobody empties the mailbox of a rank that is served, unless it has images of its own to
    fetch, or its fetcher does so for it.
    """
    assert session.internals.remote_ranks is not None
    place = session.job.place
    seats, fetchers = place.seats(axis, broadcast).tolist(), place.served_by(broadcast).tolist()
    served = [
        rank
        for rank, by in enumerate(fetchers)
        if rank != by and (not encodes or seats[rank] == rank)
    ]
    session.internals.remote_ranks.serve_by_broadcast(
        served, [rank for rank in served if seats[rank] != rank]
    )


class _Joining:
    """From what rank 0 said to the client of this rank."""

    def __init__(
        self,
        job: Job,
        rank: int,
        said: dict[str, Any],
        board: _Board,
        launched: _Launched | None,
        leave_s: float,
        options: dict[str, Any],
    ):
        self._job, self._rank, self._said, self._board, self._leave_s = (
            job,
            rank,
            said,
            board,
            leave_s,
        )
        self._session = None if launched is None else launched.session
        self._axis, self._broadcast = said["axis"], tuple(said["broadcast"])
        self._stalls = {name: options[name] for name in STALLS if name in options}
        self._service = service_of(job.place, rank, self._axis, self._broadcast)
        self._served = [
            r for r, by in enumerate(job.place.served_by(self._broadcast).tolist()) if r != by
        ]

    def client(self, device: torch.device, wait_s: float) -> Client:
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
        farewells = Departures(self._board, s)
        clients, wire = (
            self._clients(s),
            FrameBroadcast(s, group, device, wait_s, farewells=farewells, **self._warning()),
        )
        if self._session is not None:
            self._owned(clients[0])
        return BroadcastClient(
            s,
            view,
            wire,
            clients,
            split=(self._axis, self._broadcast),
            start=self._start(clients),
            asking=self._asking,
            leave=self._leave,
            farewells=farewells,
            microbatches=self._job.batch.microbatches,
            world_size=self._job.place.world_size,
        )

    def _warning(self) -> dict[str, Any]:
        return {
            name: value for name, value in self._stalls.items() if name != "stall_limit_s"
        }  # ``wait_s`` is what ends this wait

    def _clients(self, s: Service) -> dict[int, Client]:
        if s.fetches:
            return {
                seat: self._open(seat) for seat in sorted(s.seats, key=lambda seat: seat != s.rank)
            }
        return {s.rank: self._open(s.rank)} if self._said["encodes"] and s.seat != s.rank else {}

    def _open(self, seat: int) -> Client:
        if self._session is not None:
            return self._session.client(seat)
        return connect(self._said["address"], seat, self._said["token"], **self._stalls)

    def _owned(self, client: Client) -> Client:
        """Closing it ends the session, once all ranks have left it."""
        assert self._session is not None
        client.session, left = self._session, client._close

        def leave() -> None:
            if not client._failed:
                self._board.wait_until_left(len(self._served), self._leave_s)
            left()

        client._close = leave
        return _owning(self._session, client, self._leave_s, self._board)

    def _start(self, clients: dict[int, Client]) -> State:
        start: EncodedState = self._said["start"]
        return clients[self._rank]._state if self._rank in clients else start

    def _asking(self) -> _Connected:
        return _Connected(
            ControlClient(
                self._said["address"],
                self._said["token"],
                self._rank,
                timeout_s=ASK_S,
                role="served",
            ),
            {},
            ASK_S,
            0.0,
        )

    def _leave(self, client: BroadcastClient) -> None:
        if not self._service.fetches:
            self._board.left()
        for seat in sorted(client._clients, reverse=True):  # the one that owns the session last
            inner = client._clients[seat]
            inner._failed = client._failed
            with contextlib.suppress(Exception):
                inner.close()
