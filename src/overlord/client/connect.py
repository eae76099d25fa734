"""``connect``: create a client in any process, for a session that serves.

The client costs the trainer two sockets and the memory that it maps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, cast
from weakref import WeakSet

from overlord.client.client import Client, State, StepQueue
from overlord.client.control_client import CONTROL_SERVER, ControlClient
from overlord.client.remote_queue import WORKER_PREFIX, RemoteStepQueue
from overlord.client.sent_reports import REPORTS_UNUSED, ReportSender, warn_of_lost_values
from overlord.client.world import process_groups
from overlord.errors import (
    ActorLost,
    DataStall,
    FrameError,
    JobError,
    LinkRefused,
    OverlordError,
    StateMismatch,
)
from overlord.messages.control import EncodedState, Report, SentReport
from overlord.messages.data import checked_report, surely_in_time
from overlord.transport.connection import RETRY_S

log = logging.getLogger("overlord")

REASON_S = 1.0  # timeout of short requests, e.g. for the reason of a stall
DETACH_S = 2.0  # timeout of the request that detaches the rank
REWIND_S = 300.0  # least timeout of a rewind, which starts all workers and opens files

# queues of this process, by the address of their session
_QUEUES: dict[str, WeakSet[RemoteStepQueue]] = {}
_LOCK = threading.Lock()  # guards _QUEUES


def connect(
    address: str | None = None,
    rank: int | None = None,
    token: str | None = None,
    *,
    timeout_s: float = 30.0,
    stall_warn_s: float | None = None,
    stall_limit_s: float | None = None,
    reconnect_s: float = 60.0,
    on_stall: Callable[[str, float], None] | None = None,
) -> Client:
    """Return the client of one rank of a session in another process.

    Defaults: ``OVERLORD_ADDRESS``, ``OVERLORD_TOKEN``, and the rank in the process group, or
    ``RANK``. ``timeout_s``: the longest wait for the session to answer. ``stall_warn_s``,
    ``stall_limit_s``: as in ``launch``; None: the session's values. ``on_stall(reason, seconds)``
    is called instead of the logged warning. ``reconnect_s``: seconds of attempts to reconnect to a
    lost constructor.
    """
    address, rank, token = _arguments(address, rank, token)
    control = ControlClient(address, token, rank, timeout_s=timeout_s)
    try:
        started = _started(control, timeout_s)
        return SessionConnection(control, started, timeout_s, reconnect_s).client(
            stall_warn_s, stall_limit_s, on_stall
        )
    except BaseException:
        control.close()
        raise


def _started(control: ControlClient, timeout_s: float) -> Mapping[str, Any]:
    """Return the session's settings and the rank's start position.

    Retry while the session waits for a worker; raise the first ``DataStall`` at the deadline.
    """
    deadline, fault = time.monotonic() + timeout_s, None
    while True:
        try:
            found: Mapping[str, Any] = control.ask(
                "start", timeout_s=max(0.01, deadline - time.monotonic())
            )
            return found
        except DataStall as stall:
            if time.monotonic() >= deadline:
                raise fault or stall from None
            fault = stall
        time.sleep(RETRY_S)


def _arguments(address: Any, rank: Any, token: Any) -> tuple[str, int, str]:
    """Return the arguments, or their values in the environment.

    Raise ``JobError`` for missing and invalid ones.
    """
    address = os.environ.get("OVERLORD_ADDRESS") if address is None else address
    token = os.environ.get("OVERLORD_TOKEN") if token is None else token
    given = _rank() if rank is None else rank
    problems = []
    if not isinstance(address, str) or not address:
        problems.append(
            "address: expected overlord://host:port/key, as the session printed it, or "
            f"OVERLORD_ADDRESS, got {address!r}"
        )
    if not isinstance(token, str) or not token:
        problems.append(
            "token: expected the token that the session printed, or OVERLORD_TOKEN, got "
            f"{'nothing' if not token else type(token)}"
        )
    try:
        number = int(given) if isinstance(given, str) else given.__index__()
    except (TypeError, ValueError, AttributeError):
        problems.append(f"rank: expected a whole number, a process group, or RANK, got {given!r}")
    if problems:
        raise JobError(problems, "connect")
    # `ov.serve()` gives address and token in one value; a subclass of str must not be sent.
    return str.__str__(address), number, str.__str__(token)


def _rank() -> Any:
    """Return the rank in the process group if there is one, else ``RANK``, else None."""
    groups = process_groups()
    return os.environ.get("RANK") if groups is None else groups.get_rank()


class SessionConnection:
    """The connection of a client to its session: callbacks of the client that send requests."""

    def __init__(
        self,
        control: ControlClient,
        started: Mapping[str, Any],
        timeout_s: float,
        reconnect_s: float,
    ):
        self._control, self._started, self._timeout_s, self._reconnect_s = (
            control,
            started,
            timeout_s,
            reconnect_s,
        )
        self._client: Client | None = None
        self._lag, self._learns = control.welcome["feedback_lag"], control.welcome["learns"]
        self._sender = ReportSender(self._lag, control.welcome["client"])
        # False: the first report causes a warning
        self._warned = control.welcome["uses_reports"]
        self._warned_of_values = False
        self._generation = 0  # of the last report of a rank without a step queue

    def client(
        self,
        warn_s: float | None,
        limit_s: float | None,
        on_stall: Callable[[str, float], None] | None,
    ) -> Client:
        s = self._started
        self._client = Client(
            self._control.rank,
            self._connect_queue(s),
            begin=lambda: None,
            consumed=lambda queue, step: queue.ack(step),
            waiting_for=self._waiting_for,
            export=self.export,
            rewind=self._rewind,
            report=self.report,
            start=s["state"],
            close=self._close,
            stall_warn_s=s["stall_warn_s"] if warn_s is None else warn_s,
            stall_limit_s=s["stall_limit_s"] if limit_s is None else limit_s,
            on_stall=on_stall,
            microbatches=s["microbatches"],
            world_size=s["world_size"],
            evaluation=bool(s.get("evaluation", False)),
        )
        return self._client

    def _connect_queue(self, at: Mapping[str, Any]) -> RemoteStepQueue:
        try:
            return self._remote(at, at["constructor"])
        except (ActorLost, DataStall, LinkRefused):
            # The constructor died and is restarted, another rank rewinds the session, or the step
            # is no longer kept. The first ``get`` connects again and raises the error, since the
            # trainer may load a state before it.
            return self._remote(at, "")

    def _remote(self, at: Mapping[str, Any], address: str) -> RemoteStepQueue:
        queue = RemoteStepQueue(
            rank=self._control.rank,
            address=address,
            token=self._token(at),
            where=self._where,
            next_step=at["state"].step,
            generation=at["generation"],
            prefetch=self._started["prefetch"],
            sender=self._sender,
            reconnect_s=self._reconnect_s,
            on_moved=self._moved,
            siblings=self._siblings,
        )
        with _LOCK:
            _QUEUES.setdefault(self._control.address, WeakSet()).add(queue)
        return queue

    def _siblings(self, queue: RemoteStepQueue) -> list[RemoteStepQueue]:
        """Return the queues of this session that the same thread reads, ``queue`` included.

        Queues of other threads are left out: their clients may be loading a state.
        """
        with _LOCK:
            queues = _QUEUES.get(self._control.address, ())
            if len(queues) < 2:  # as in the process of one rank
                return [queue]
            return [other for other in queues if other.caller == queue.caller]

    def _token(self, at: Mapping[str, Any]) -> str:
        """Return the token for the constructor.

        An empty token in the session's answer stands for the token that this client connected with.
        """
        return at["token"] or self._control.token

    def _where(self, generation: int) -> tuple[str, str]:
        at = self._control.ask("where", timeout_s=REASON_S, generation=generation)
        queue = self._client.queue if self._client is not None else None
        # the whole session was rewound, with this client
        if at["generation"] != generation and isinstance(queue, RemoteStepQueue):
            queue.move(at["generation"], at["state"])
        if not at["constructor"]:
            raise DataStall(
                f"{WORKER_PREFIX}* of rank {self._control.rank} to be started again", 0.0
            )
        return at["constructor"], self._token(at)

    def _moved(self, state: EncodedState) -> None:
        if self._client is not None:
            self._client.move_to(self._client.queue, state)

    def _waiting_for(self) -> str:
        """Describe the wait of the client; a fault of the connection is part of the text."""
        assert self._client is not None
        queue = self._client.queue
        connection_problem = queue.connection_problem if isinstance(queue, RemoteStepQueue) else ""
        try:
            reason = str(self._control.ask("why", timeout_s=REASON_S))
        except OverlordError as fault:
            reason = f"{CONTROL_SERVER} at {self._control.address} returned no reason: {fault}"
        return f"{connection_problem}; {reason}" if connection_problem else reason

    def export(self, queue: StepQueue, state: State) -> dict[str, Any]:
        generation = cast(RemoteStepQueue, queue).generation
        saved: dict[str, Any] = self._control.ask(
            "export",
            timeout_s=self._timeout_s,
            generation=generation,
            state=state,
            reports=self._sender.kept(),
        )
        return saved

    def _rewind(self, state: Mapping[str, Any], allow: tuple[str, ...]) -> tuple[StepQueue, State]:
        assert self._client is not None
        old = cast(RemoteStepQueue, self._client.queue)
        took = (old.generation, old.taken)  # the session may not have received the last ack
        try:
            at = self._control.ask(
                "rewind",
                timeout_s=max(self._timeout_s, REWIND_S),
                state=state,
                allow=tuple(allow),
                took=took,
            )
        except FrameError as fault:  # the encoding fails only for a damaged state
            remedy = "load the state that state_dict() returned, unchanged"
            raise StateMismatch({}, remedy, f"the state is damaged: {fault}") from fault
        self._sender.clear()
        for report in at["reports"]:  # of this rank in its state; no step is planned yet
            self._sender.add(report, in_time=True)  # sent with the first acknowledgement
        new = self._connect_queue(at)
        old.end(
            OverlordError(
                f"rank {self._control.rank}: the queue is closed: the client loaded a state"
            ),
            drop=True,
        )
        log.info(
            "rank %d: state loaded; continuing with step %d", self._control.rank, at["state"].step
        )
        return new, at["state"]

    def report(self, queue: StepQueue, step: Any, metrics: Any, next_step: int) -> None:
        """Check a report and send it; raise ``JobError`` if it is invalid.

        Scalars of any library become numbers. A rank whose steps another rank fetches sends all
        reports that it keeps to the session: the last ones may have been lost.
        """
        try:
            report = checked_report(self._control.rank, step, metrics, next_step)
        except JobError:
            self._count_refused()
            raise
        self._warn(report, len(metrics) - len(report.metrics))
        if isinstance(queue, RemoteStepQueue):
            queue.report(report, self._is_in_time(report, next_step))
            return
        generation = cast(RemoteStepQueue, queue).generation
        if generation != self._generation:  # the session was rewound
            self._generation = generation
            self._sender.clear()
        self._sender.add(report, in_time=False)  # another rank takes steps ahead of this one
        self._sender.drop_passed(next_step - 1)
        self._control.ask(
            "report", timeout_s=self._timeout_s, generation=generation, reports=self._sender.kept()
        )

    def _is_in_time(self, report: Report, next_step: int) -> bool:
        prefetch = self._started["prefetch"]
        return self._learns and surely_in_time(report, next_step, self._lag, prefetch)

    def _count_refused(self) -> None:
        with contextlib.suppress(OverlordError):
            self._control.ask("refused", timeout_s=REASON_S)

    def _warn(self, report: Report, lost: int) -> None:
        """Warn once of values that are not used, and once of reports that are not."""
        if lost:
            self._count_refused()
            if not self._warned_of_values:
                warn_of_lost_values(report, lost)
            self._warned_of_values = True
        if not self._warned:
            log.warning(REPORTS_UNUSED)
        self._warned = True

    def disconnect(self) -> None:
        """Close the control connection without a detach: the session keeps the rank attached."""
        self._control.close()

    def _close(self) -> None:
        client, took = self._client, (-1, -1)
        reports: tuple[SentReport, ...] = ()
        if client is not None:
            queue = cast(RemoteStepQueue, client.queue)
            took = (queue.generation, queue.taken)
            # its constructor worker may be lost, and these reports with it
            reports = queue.reports() if self._learns else ()
        crashed = client is not None and client.failed  # a restarted trainer may connect again
        with contextlib.suppress(OverlordError):  # if the session is gone, no rank waits for this
            what = "crashed" if crashed else "detach"
            self._control.ask(what, timeout_s=DETACH_S, took=took, reports=reports)
        self._control.close()
