"""Ranks of a session whose clients are in other processes."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from overlord.client.client import State, StepQueue
from overlord.errors import ActorLost, DataStall, JobError, OverlordError
from overlord.messages.control import EncodedState, PlannedStep, SentReport
from overlord.serving.control_server import RemoteClient, WorkerServedQueue
from overlord.serving.session_api import position
from overlord.serving.session_server import ServedAddress, SessionServer
from overlord.serving.step_publisher import MOVED, PublishedQueue
from overlord.session.local_runtime import LocalStepQueue
from overlord.session.rewind import not_in_mesh, rewind_rank
from overlord.session.running_job import RunningJob
from overlord.session.runtime import Runtime

log = logging.getLogger("overlord")

PLANNED_S = 2.0  # seconds for the state after a step to arrive from the coordinator

POLL_S = 0.05  # seconds between checks for clients that have closed


def serve(
    running: RunningJob, host: str, port: int, token: str | None, ranks: Iterable[int] | None
) -> ServedAddress:
    """Start the server of a session, unless it runs already; return its address."""
    running.refuse_closed()
    with running.switching:  # one call at a time; the lock is held for moments only
        with running.lock:
            if running.remote_ranks is not None:
                return running.remote_ranks.server.existing_address(host, port, token, ranks)
            wanted = _ranks_to_serve(running, ranks)
            token = secrets.token_urlsafe(24) if token is None else token
            if not isinstance(token, str) or not token:
                raise JobError(
                    [f"token: expected a text that is not empty, or None, got {token!r:.20}"],
                    "serve",
                )
        running.runtime.listen(host, token)
        with running.lock:
            generation, wanted = running.generation, _ranks_to_serve(running, wanted)
            served = ServedRanks(running, host=host, port=port, token=token, ranks=wanted)
            running.remote_ranks = served
            served.follow(generation.runtime, listen=False)
            for rank in wanted:
                queue = running.new_queue(rank, generation)
                generation.add_queue(rank, queue)
                running.clients[rank] = RemoteClient(rank, queue, generation.start)
            return served.server.served


def _ranks_to_serve(running: RunningJob, ranks: Iterable[int] | None) -> list[int]:
    """Return those of ``ranks`` (None: all) without a client in this process, in order.

    Raise after the first step, and for an invalid rank. The caller holds the lock.
    """
    if running.begun:
        raise OverlordError(
            "serve: expected a call before the first step, got it after; call serve() before "
            "iterating a client"
        )
    place = running.job.place
    wanted = list(range(place.world_size) if ranks is None else ranks)
    if problems := [problem for rank in wanted if (problem := place.rank_problem(rank))]:
        raise JobError(problems, "serve")
    return sorted(set(wanted) - set(running.clients))


class ServedRanks:
    """The ``SessionApi`` of a running job, for clients in other processes."""

    def __init__(
        self, running: RunningJob, *, host: str, port: int, token: str, ranks: Iterable[int]
    ):
        self._running = running
        self._added: set[int] = set()  # ranks that a reshard added
        self._closed: set[int] = set()  # ranks whose clients were closed
        self._states: dict[int, State] = {}  # states after steps that some client has not taken
        self._last = -1  # last planned step that is not skipped
        # guards the fields above; no other lock is taken under it. It is notified of each new state
        self._lock = threading.Condition(threading.Lock())
        self.server = SessionServer(
            self,
            name=running.job.name,
            publishes=running.kind == "local",
            prefetch=running.options.prefetch,
            host=host,
            port=port,
            token=token,
            ranks=ranks,
        )

    @property
    def generation(self) -> int:
        return self._running.generation.number

    @property
    def report_settings(self) -> dict[str, Any]:
        running = self._running
        return {
            "feedback_lag": running.job.feedback_lag,
            "learns": running.learns,
            "uses_reports": running.uses_reports,
        }

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that the first ``serve`` call accepted; a reshard does not change them."""
        return self.server.ranks

    # generations

    def follow(self, runtime: Runtime, *, listen: bool = True) -> None:
        """Receive plans and acks of a new runtime, before its first step.

        ``listen``: let its constructor workers accept clients.
        """
        with self._lock:
            self._states, self._last = {}, -1
        runtime.on_stage.append(self._planned)
        if (buffers := self.server.buffers()) is not None:
            runtime.use_buffers(buffers)
        runtime.on_taken = self.acked
        if listen:
            runtime.listen(self.server.host, self.server.served.token)

    def new_queue(self, rank: int, generation: int) -> StepQueue:
        return self.server.queue(rank, generation)

    def expect(self, ranks: Iterable[int]) -> None:
        """Accept the ranks of a new mesh; planning waits for all of them."""
        running, expected = self._running, set(ranks)
        for rank in {*self.ranks, *self._added} - expected:
            self.server.forget(rank, not_in_mesh(rank, running.job.place))
        self._added |= expected
        with running.lock:
            generation = running.generation
            for rank in expected - set(running.clients):
                self._closed.discard(rank)
                queue = self.new_queue(rank, generation.number)
                generation.add_queue(rank, queue)
                running.clients[rank] = RemoteClient(rank, queue, generation.start)

    def rewound(self) -> None:
        """Continue connected clients in the new generation, to which all ranks were moved."""
        ranks = [client.rank for client in self.remote_clients]
        self.server.rewound(ranks, self._running.generation.start)

    def close(self) -> None:
        self.server.close()

    # clients

    @property
    def remote_clients(self) -> list[RemoteClient]:
        clients = list(self._running.clients.values())
        return [client for client in clients if isinstance(client, RemoteClient)]

    def _client_or_none(self, rank: int) -> RemoteClient | None:
        client = self._running.clients.get(rank)
        return client if isinstance(client, RemoteClient) else None

    def _client(self, rank: int) -> RemoteClient:
        if (client := self._client_or_none(rank)) is None:
            place = self._running.job.place
            removed = rank >= place.world_size
            raise OverlordError(
                not_in_mesh(rank, place)
                if removed
                else f"the client of rank {rank} is closed; load a state on every rank"
            )
        return client

    def admit(self, rank: int) -> None:
        running = self._running
        running.refuse_closed()
        if problem := running.job.place.rank_problem(rank):
            raise JobError([problem], "connect")
        with running.lock:
            if self._client_or_none(rank) is not None:
                return
        if rank in self._closed:
            raise OverlordError(
                f"rank {rank}: expected a rank with an open client, got one whose client was "
                "closed; load a state on every rank"
            )
        raise OverlordError(
            f"rank {rank}: expected a rank that is served to other processes "
            f"({_few(sorted(self.ranks))}), got one of the session's own process; open its client "
            "there"
        )

    def admit_broadcast(self, rank: int) -> None:
        self._running.refuse_closed()
        if rank not in self._running.broadcast_ranks:
            raise OverlordError(
                f"rank {rank}: expected a rank whose steps are broadcast, got another; connect as "
                "a client"
            )

    def serve_by_broadcast(self, ranks: Iterable[int], idle: Iterable[int]) -> None:
        """Let other ranks fetch the steps of ``ranks``, which may still send reports and requests.

        No step is kept for ``idle`` ranks, and no rank waits for them. The ranks that fetch for the
        others empty their queues.
        """
        self._running.broadcast_ranks = frozenset(ranks)
        for rank in idle:
            self._running.detach(rank)
            self.server.forget(rank)

    def connected(self, rank: int, peer: str) -> None:
        if (client := self._client_or_none(rank)) is not None:
            client.set_connected(connected=True, peer=peer)

    def disconnected(self, rank: int) -> None:
        if (client := self._client_or_none(rank)) is not None:
            client.set_connected(connected=False)

    def take_over(self, rank: int) -> StepQueue | None:
        """Move a rank without a connected client to a client of this process.

        Return its queue with all kept steps. None: the rank is not served. The caller holds the
        lock of the running job.
        """
        if (client := self._client_or_none(rank)) is None:
            return None
        if client.peer:
            raise OverlordError(
                f"rank {rank}: expected a rank without a connected client, got one of "
                f"{client.peer}; open the clients of this process before serve()"
            )
        queue: StepQueue = self._running.runtime.inbox(rank, client.position.step)
        if isinstance(client.queue, PublishedQueue) and isinstance(queue, LocalStepQueue):
            client.queue.hand_over(queue)
        del self._running.clients[rank]
        return queue

    # progress

    def _planned(self, stage: PlannedStep) -> None:
        """Keep the state after a planned step. Runs on: any thread.

        A restarted coordinator may send a step that ranks have taken already, if its predecessor
        died before it sent the step.
        """
        running, step, after = self._running, stage.plan.step, stage.after
        if isinstance(after, EncodedState):  # its bytes are part of a larger message
            after = EncodedState(after.step, after.data.copy())
        with running.lock, self._lock:
            self._states[step] = after
            self._lock.notify_all()
            if not stage.skipped:
                self._last = max(step, self._last)
            acked = running.generation.acked
            if step > max(acked.values(), default=-1):
                return
            for client in self.remote_clients:
                if acked.get(client.rank) == step:
                    client.position = after

    def acked(self, rank: int, step: int, queue: PublishedQueue | None = None) -> None:
        running = self._running
        with running.lock:
            generation, client = running.generation, self._client_or_none(rank)
            if client is None:
                return
            current, acked = generation.queues[rank], generation.acked
            before = acked.get(rank, -1)
            if (queue is not None and current is not queue) or step < max(
                before, generation.start.step
            ):
                # after a loss constructors count all steps up to the rollback as taken: not new
                return
            generation.joined.add(rank)  # a rank that takes a step of a generation is in it
            with self._lock:
                client.position = self._states.get(step, client.position)
                all_acked = len(acked) == len(running.clients)
                slowest = min([step, *acked.values()]) if all_acked else -1
                for old in [s for s in self._states if s < slowest]:
                    del self._states[old]
            client.count_step(
                new=step > before,
                waited_s=current.waited_s if isinstance(current, PublishedQueue) else 0.0,
            )
        running.acked(rank, current, step)

    def explain_wait(self, words: str) -> str:
        """Name the slowest ranks that are not connected, if ``words`` name a rank."""
        if not words.startswith("rank "):
            return words
        running = self._running
        with running.lock:
            acked = running.generation.acked
            slowest = min(acked.values()) if len(acked) == len(running.clients) else -1
            absent = [
                c for c in self.remote_clients if c.absent and acked.get(c.rank, -1) <= slowest
            ]
        if not absent:
            return words
        named = "; ".join(f"rank {c.rank}, {c.absent}" for c in absent[:8]) + (
            f"; and {len(absent) - 8} more" if len(absent) > 8 else ""
        )
        prefetch = running.options.prefetch
        return f"{named} ({prefetch} steps are kept, and none is planned beyond them)"

    @property
    def finished(self) -> bool:
        """Whether the job has ended and every expected rank took its last step."""
        running = self._running
        end = running.runtime.planner.finished
        if end is None:
            return False
        with running.lock:
            acked, last = running.generation.acked, min(self._last, end.step - 1)
            return all(acked.get(rank, -1) >= last for rank in running.clients)

    def wait_until_left(self, timeout_s: float, since: float | None = None) -> bool:
        """Wait until all clients in other processes have closed or disconnected.

        Clients that have not connected yet are waited for too. Return False after ``timeout_s``,
        counted from the monotonic time ``since`` (None: now).
        """
        deadline = (time.monotonic() if since is None else since) + timeout_s
        while waiting := [c for c in self.remote_clients if c.there or not c.peer]:
            if time.monotonic() >= deadline:
                ranks = [c.rank for c in waiting]
                log.warning(
                    "session closed before rank%s %s, which did not close within %.0f s",
                    "" if len(ranks) == 1 else "s",
                    _few(ranks),
                    timeout_s,
                )
                return False
            time.sleep(POLL_S)
        return True

    # requests; run on threads that may block

    def start(self, rank: int) -> dict[str, Any]:
        running = self._running
        self._client(rank)
        running.begin()
        self._catch_up(rank)
        with running.lock:
            client, generation = self._client(rank), running.generation
            state: State = client.position if rank in generation.joined else generation.start
        job, options = running.job, running.options
        return position(state, generation.number, self._address_or_none(rank)) | {
            "job": job.name,
            "world_size": job.place.world_size,
            "evaluation": job.evaluation,
            "prefetch": options.prefetch,
            "microbatches": job.batch.microbatches,
            "stall_warn_s": float(options.stall_warn_s),
            "stall_limit_s": float(options.stall_limit_s),
        }

    def _catch_up(self, rank: int) -> None:
        """Move a rank that reconnects to the step after the last one it took.

        Its constructor worker sends acks only when its slowest rank takes a step. The call waits
        for a worker that is alive: a client that began at an older step would be refused.
        """
        with self._running.lock:
            generation = self._running.generation
            before = generation.acked.get(rank, -1)
        step = generation.runtime.taken_by(rank)
        if step is not None and step > before and generation is self._running.generation:
            self.acked(rank, step)

    def constructor_address(self, rank: int) -> tuple[str, str]:
        """Return the address of the constructor of a rank, and its token.

        An empty token stands for the one that the client connected with.
        """
        return self._running.runtime.outside(rank) or (self.server.served.address, "")

    def _address_or_none(self, rank: int) -> tuple[str, str]:
        """Return address and token of a rank's constructor; empty texts while it is restarted.

        The client then asks again.
        """
        try:
            return self.constructor_address(rank)
        except DataStall:
            return "", ""

    def _queue_of(self, rank: int, generation: Any) -> StepQueue:
        """Return the queue of a rank; an unused one for a client of an older generation."""
        with self._running.lock:
            now = self._running.generation
            queue = now.queues.get(rank)
            return (
                queue
                if queue is not None and generation == now.number
                else WorkerServedQueue(rank, -1)
            )

    def where(self, rank: int, generation: Any) -> dict[str, Any]:
        running = self._running
        with running.lock:
            client, now = self._client(rank), running.generation
            if now.number != generation and rank not in now.joined:
                raise OverlordError(f"rank {rank}: {MOVED}")
            state = client.position
        # a client of an older generation gets its position even while its constructor is restarted
        rewound = now.number != generation
        address = self._address_or_none(rank) if rewound else self.constructor_address(rank)
        return position(state, now.number, address)

    def why(self, rank: int) -> str:
        return self._running.waiting_for(rank)

    def export(
        self, rank: int, generation: Any, state: State, reports: Sequence[SentReport]
    ) -> dict[str, Any]:
        running = self._running
        queue = self._queue_of(rank, generation)
        with running.lock:
            client, now = self._client_or_none(rank), running.generation
            current = now.queues.get(rank, queue)
            # the whole session was rewound, with this rank
            if client is not None and queue is not current and rank in now.joined:
                state, queue = client.position, current
        return running.export(rank, queue, state, reports)

    def rewind(
        self, rank: int, state: Mapping[str, Any], allow: tuple[str, ...], took: tuple[int, int]
    ) -> dict[str, Any]:
        running, (generation, step) = self._running, took
        with running.lock:
            now = running.generation
            # it may be a retry: the first answer may have been lost with its connection
            retry = generation != now.number and rank not in now.acked
            if step >= 0 and rank in now.queues and generation == now.number:
                now.acked.setdefault(rank, step)
        queue, start, own = rewind_rank(running, rank, state, allow, retry=retry)
        with running.lock:
            self._client(rank).move_to(queue, start)
            number = running.generation.number
        return position(start, number, self._address_or_none(rank)) | {"reports": own}

    def report(
        self, rank: int, reports: Sequence[SentReport], queue: PublishedQueue | None = None
    ) -> None:
        running = self._running
        with running.lock:
            generation = running.generation
            if queue is not None and generation.queues.get(rank) is not queue:
                return  # of an older generation
        if queue is not None:
            running.post_reports(generation.runtime, reports)
            return
        with contextlib.suppress(ActorLost, DataStall):  # the next request has these reports too
            running.loop.call(lambda: generation.runtime.report(reports), "the planner")

    def refused(self) -> None:
        self._running.events.count_refused()

    def _post_reports(self, generation: int, reports: Sequence[SentReport]) -> None:
        """Send the reports of a closed client, unless they are of an older generation."""
        now = self._running.generation
        if generation == now.number:
            self._running.post_reports(now.runtime, reports)

    def crashed(self, rank: int, took: tuple[int, int], reports: Sequence[SentReport]) -> None:
        generation, step = took
        self._post_reports(generation, reports)
        with self._running.lock:
            now = self._running.generation
            is_new = generation == now.number and step > now.acked.get(rank, -1)
        if is_new:
            self.acked(rank, step)

    def detach(self, rank: int, took: tuple[int, int], reports: Sequence[SentReport]) -> None:
        self._closed.add(rank)
        generation, step = took
        self._post_reports(generation, reports)
        self._wait_for_state(rank, generation, step)
        with self._running.lock, self._lock:  # its last ack may arrive later
            client = self._client_or_none(rank)
            if client is not None and generation == self._running.generation.number:
                client.position = self._states.get(step, client.position)
        self._running.detach(rank)
        self.server.forget(rank)

    def _wait_for_state(self, rank: int, generation: int, step: int) -> None:
        """Wait for the state after a step that a rank took, for at most PLANNED_S.

        The coordinator sends it when it plans the step, and a worker may deliver the step sooner.
        """
        client = self._client_or_none(rank)
        if client is None or generation != self._running.generation.number:
            return
        with self._lock:
            known = client.position.step > step
            self._lock.wait_for(lambda: known or step in self._states, PLANNED_S)


def _few(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return listed if ranks else "none"


__all__ = ["ServedRanks", "serve"]
