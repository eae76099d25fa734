"""The client of a rank if the plan broadcasts: one rank of each group fetches for the whole group.

The fetcher has a client for every step queue of its group: one per bucket, and several if DP is
broadcast. It packs their steps into one frame and broadcasts it. Each rank of the group slices its
own view out of the step of its queue, as a constructor would have done. Steps, state and reports
are the same as without a broadcast; fewer ranks have a connection.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from overlord.buffer_pool import BufferPool
from overlord.client.client import Client, State, Step, StepQueue
from overlord.client.connect import SessionConnection
from overlord.constructor.build import BucketBatch
from overlord.constructor.compact import for_view
from overlord.constructor.pack import BatchArrays
from overlord.constructor.rank_views import narrow
from overlord.errors import ActorLost, DataStall, OverlordError, PlanError, StateMismatch
from overlord.hashing import digest
from overlord.messages.control import EncodedState, Report, SentReport
from overlord.messages.data import StepInfo
from overlord.plan.view import View
from overlord.serving.step_publisher import MOVED
from overlord.torch.broadcast_frames import FrameBroadcast, portable_error
from overlord.torch.departures import Departures
from overlord.torch.process_groups import Service
from overlord.transport.codec import encode_state

log = logging.getLogger("overlord")

END_S = 300.0  # seconds for other ranks to finish their last step and request one more
OTHERS_S = 10.0  # seconds for other ranks to receive the error or the departure of this rank
# seconds for other ranks to read the departure note, if the store ends with this process
NOTE_S = 3.0
# Most frames to read before the result of the fetcher's load: a few are in flight, and one is at
# each rank that forwards frames.
SEARCHED_FRAMES = 16


@dataclass(slots=True)
class BroadcastQueue:
    """The step queue of a rank without a connection: it only holds the session's generation."""

    generation: int = 0

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None:
        """Return None: steps come by broadcast."""
        return None

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        """Do nothing: only the queue of the fetcher ends."""

    def ack(self, step: int) -> None:
        """Do nothing: the rank that fetches the step acks it."""

    def report(self, report: Report, in_time: bool) -> None:
        """Do nothing: reports of this rank go to the session."""

    def reports(self) -> tuple[SentReport, ...]:
        """Return nothing: the connection to the session keeps the reports."""
        return ()

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastSetup:
    """The arguments of a ``BroadcastClient``, which ``overlord.torch.join`` computes.

    ``clients``: the clients of the queues that this rank reads, by rank, its own first. A served
    rank has its own client if it encodes images, else none. ``connect_control`` opens a connection
    to the session. A rank without a client exports its state and sends its reports through it.
    """

    service: Service
    view: View
    frames: FrameBroadcast
    clients: Mapping[int, Client]
    split: tuple[str, tuple[str, ...]]  # the axis that the plan splits, the axes of its broadcasts
    start: State
    connect_control: Callable[[], SessionConnection]
    leave: Callable[[Mapping[int, Client], bool], None]  # (clients, whether this rank failed)
    departures: Departures
    microbatches: int | None = None
    world_size: int | None = None
    evaluation: bool = False


class BroadcastClient(Client):
    """A ``Client`` that receives its steps by broadcast, or broadcasts them.

    ``overlord.torch.join`` creates it.
    """

    def __init__(self, setup: BroadcastSetup):
        self.service, self._view, self._frames = setup.service, setup.view, setup.frames
        self._clients, self._split = dict(setup.clients), setup.split
        self._own = self._clients.get(self.service.rank)
        self._pool = BufferPool()  # for arrays that the trainer expands
        self._connect_control = setup.connect_control
        self._control: SessionConnection | None = None
        self._leave, self._departures = setup.leave, setup.departures
        self._over: BaseException | None = None  # the reason why no more frames come
        # Frames that arrived in a call that did not expect them.
        self._early: deque[dict[str, Any]] = deque()
        self._images: Step | None = None  # this rank's own images, for the step of the next frame
        self._gone = False
        self._last: dict[str, Any] | None = None  # the state after the last step of the stream
        self.bytes_fetched = 0
        super().__init__(
            self.service.rank,
            BroadcastQueue(),
            begin=lambda: None,
            consumed=lambda queue, step: None,
            waiting_for=lambda: "",
            export=self._state_of,
            rewind=self._load,
            report=self._send_report,
            start=setup.start,
            close=self._end,
            stall_warn_s=0.0,
            stall_limit_s=0.0,
            microbatches=setup.microbatches,
            world_size=setup.world_size,
            evaluation=setup.evaluation,
        )
        self.session = None if self._own is None else self._own.session
        atexit.register(self._at_exit)

    # steps

    def _wait(self, inbox: StepQueue) -> tuple[StepInfo, BucketBatch]:
        if self._over is not None:
            raise self._over
        start, own = time.monotonic(), cast("Step | None", None)
        try:
            if self.service.fetches:
                own, queues = self._fetch()
            else:
                if self._own is not None and self._images is None:
                    # If this stream has ended, that of the fetcher has ended too.
                    self._images = next(self._own, None)
                queues = self._receive_step()["queues"]
                own, self._images = self._images, None
        except StopIteration as over:
            self._over = over
            raise
        finally:
            self.waited_s += time.monotonic() - start
        content = next(q for q in queues if q["rank"] == self.service.queue_rank)
        assert own is None or own.step == content["info"].step, (
            "images and text are of different steps"
        )
        return content["info"], self._view_of(content, own)

    def _fetch(self) -> tuple[Step, list[dict[str, Any]]]:
        """Take and broadcast the next step of every queue; return the own step and all contents."""
        try:
            steps = {rank: next(client) for rank, client in self._clients.items()}
            self._check_split(next(iter(steps.values())))
            queues = [_content(rank, step, rank != self.rank) for rank, step in steps.items()]
            self.bytes_fetched += sum(step.nbytes for step in steps.values())
            self._frames.send({"kind": "step", "generation": self._generation, "queues": queues})
            return steps[self.rank], queues
        except StopIteration:
            self._finish()
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _check_split(self, step: Step) -> None:
        """Raise ``PlanError`` if the plan of a step has other axes than the first plan."""
        info = step.info
        split = (info.axis, tuple(info.broadcast))
        if split != self._split:
            raise PlanError(
                f"expected a split along {self._split[0]} and a broadcast at "
                f"{', '.join(self._split[1]) or 'no axis'}, as in the first plan, got "
                f"{split[0]} and {', '.join(split[1]) or 'no axis'}; process groups are created "
                "once",
                step.step,
                "let the strategy name the same axes in every step, or pass broadcast=False",
            )

    def _receive(self, what: str, *, loading: bool = False) -> dict[str, Any]:
        """Return the next frame, or raise its error.

        ``loading``: ignore the error of a fetcher that prefetched while the session was rewound,
        because this rank rewinds too.
        """
        try:
            frame = self._early.popleft() if self._early else self._frames.receive(what)
        except BaseException as error:
            self._over = error if isinstance(error, Exception) else self._over
            raise
        if frame["kind"] == "error" and not (loading and MOVED in str(frame["error"])):
            self._over = frame["error"]
            raise frame["error"]
        return frame

    def _receive_step(self) -> dict[str, Any]:
        frame = self._receive(f"step {self._state.step}")
        if frame["kind"] in ("loaded", "refused"):
            # Keep it for the next load_state_dict: a prefetching thread may get here first.
            self._early.appendleft(frame)
            raise self._out_of_step("loaded a state", "requested a step")
        self._queue.generation = frame["generation"]  # type: ignore[attr-defined]
        if frame["kind"] == "end":
            self._last = frame["state"]
            raise StopIteration
        return frame

    def _receive_loaded(self) -> dict[str, Any]:
        """Return the frame of the fetcher's load; raise its error if the fetcher refused the state.

        Steps that the fetcher sent earlier are dropped, or kept if it refused the state.
        """
        steps: list[dict[str, Any]] = []
        for _ in range(SEARCHED_FRAMES):
            frame = self._receive("that it loaded the state", loading=True)
            if frame["kind"] == "loaded":
                self._early.clear()
                return frame
            if frame["kind"] == "refused":
                self._early.extendleft(reversed(steps))
                raise frame["error"]
            steps.append(frame)
        self._early.extendleft(reversed(steps))
        raise self._out_of_step("keeps taking steps", "loads a state")

    def _out_of_step(self, fetcher: str, mine: str) -> OverlordError:
        return OverlordError(
            f"rank {self.service.fetcher} {fetcher} while rank {self.rank} {mine}; all "
            "ranks of a broadcast must call the same: "
            "next(client), or load_state_dict"
        )

    def _view_of(self, content: Mapping[str, Any], own: Step | None) -> BucketBatch:
        """Return this rank's view of the microbatches of its queue.

        It includes the images that this rank encodes, which no other rank receives.
        """
        wide = BatchArrays.of_part(content["wide"], content["rows"]) if content["wide"] else None
        bucket = BucketBatch(
            np.arange(int(content["bounds"][-1])),
            content["bounds"],
            wide,
            form=content["form"],
            allocate=self._pool,
        )
        if wide is not None and bucket.form is not None and not self._view.sliced:
            wide, form = for_view(wide, bucket.form, self._view)
            bucket = replace(bucket, wide=wide, form=form)
        else:
            whole = content["microbatches"] if wide is None else bucket.microbatches
            bucket = replace(
                bucket,
                wide=None,
                form=None,
                built=tuple(narrow(arrays, self._view) for arrays in whole),
            )
        if own is not None:
            return replace(bucket, encoder=own.bucket.encoder, per=own.bucket.per)
        if content["encoder"] and self.service.queue_rank == self.rank:
            return replace(
                bucket,
                encoder=BatchArrays.of_part(content["encoder"], content["encoder_rows"]),
                per=content["per"],
            )
        return bucket

    # state

    @property
    def _own_client(self) -> Client:
        assert self._own is not None
        return self._own

    @property
    def _generation(self) -> int:
        inbox, session = self._own_client.queue, self._own_client.session
        return int(
            getattr(inbox, "generation", 0)
            if session is None
            else session.internals.generation.number
        )

    def _state_of(self, queue: StepQueue, state: State) -> dict[str, Any]:
        """Return ``state`` as plain values, exported by the own client or by the session."""
        if self._own is not None:
            mine = self._own
            # If this is false, the state is an earlier one: of a mark, or before a refused step.
            now = state is self._state and self._refused_step is None
            return mine.state_dict() if now else mine.state_dict((mine.queue, state))
        if self._last is not None and state.step == self._state.step:  # not `is`: marks are copies
            return dict(self._last)
        saved: dict[str, Any] = self._session_control().export(queue, state)
        return saved

    def _send_report(self, queue: StepQueue, step: Any, metrics: Any, next_step: int) -> None:
        if self._own is not None:
            self._own.report(step, metrics)
        else:
            self._session_control().report(queue, step, metrics, next_step)

    def _session_control(self) -> SessionConnection:
        """Return the connection to the session's control server, opened by the first call."""
        if self._control is None:
            self._control = self._connect_control()
        return self._control

    def _load(self, state: Mapping[str, Any], allow: tuple[str, ...]) -> tuple[StepQueue, State]:
        """Load a state; all ranks of the group must call this, since they take steps together."""
        state_digest = _state_digest(state)
        if not self.service.fetches:
            return self._queue, self._load_served(state, allow, state_digest)
        try:
            for client in self._clients.values():
                client.load_state_dict(state, allow)
        except BaseException as error:
            with contextlib.suppress(OverlordError):
                self._frames.send(
                    {
                        "kind": "refused",
                        "generation": self._generation,
                        "error": portable_error(error, self.rank),
                    }
                )
            raise
        self._over = None
        after = encoded_state(self._own_client.position)
        self._frames.send(
            {"kind": "loaded", "generation": self._generation, "after": after, "mark": state_digest}
        )
        return self._queue, after

    def _load_served(
        self, state: Mapping[str, Any], allow: tuple[str, ...], state_digest: str
    ) -> State:
        """Load a state on a served rank, and compare it with the state that the fetcher loaded.

        The fetcher's frame is received in any case, since the next call expects a step.
        """
        refused: OverlordError | None = None
        try:
            if self._own is not None:
                self._own.load_state_dict(state, allow)
        except OverlordError as error:
            refused = error
        frame = self._receive_loaded()
        if refused is not None:
            raise refused
        if frame["mark"] != state_digest:
            differs = {"state": ("another than this one", "this one")}
            problem = f"rank {self.service.fetcher} loaded another state than this rank"
            raise StateMismatch(differs, "load the same state on every rank", problem)
        self._queue.generation = frame["generation"]  # type: ignore[attr-defined]
        self._over = self._last = self._images = None
        after: State = frame["after"]
        return after

    # the end

    def _finish(self) -> None:
        """Broadcast the end of the stream and wait until the other ranks have received it.

        This process must not exit before that. A rank that stopped earlier never receives it.
        """
        try:
            state = self._own_client.state_dict()
        except OverlordError:
            state = None
        try:
            self._frames.send({"kind": "end", "generation": self._generation, "state": state})
            self._frames.flush(limit_s=END_S)
        except (ActorLost, DataStall) as why:
            log.warning(
                "end of the stream from rank %d not received by all ranks: %s", self.rank, why
            )

    def _fail(self, error: BaseException) -> None:
        self._over = (
            error
            if isinstance(error, Exception)
            else OverlordError(f"rank {self.rank} was stopped by {type(error).__name__}")
        )
        with contextlib.suppress(OverlordError):  # the other ranks may have failed too
            self._frames.send(
                {"kind": "error", "generation": 0, "error": portable_error(error, self.rank)}
            )
            self._frames.flush(limit_s=OTHERS_S)

    def _end(self) -> None:
        if self._gone:  # a prefetcher may have closed it before its own ``with`` does
            return
        self._gone = True
        atexit.unregister(self._at_exit)
        self._departures.leave(self._frames.frames, self._state.step, self._fault)
        with contextlib.suppress(OverlordError):
            if self._over is None and self.service.fetches:
                self._frames.flush(limit_s=OTHERS_S)
        self._frames.close()
        if self._over is None and self._fault is not None and self.rank == 0:
            self._departures.wait_for_others(NOTE_S)
        if self._control is not None:
            self._control.disconnect()
        self._leave(self._clients, self._failed)

    def _at_exit(self) -> None:
        self._fault = self._fault or getattr(sys, "last_value", None)
        self._failed = self._failed or self._fault is not None
        self.close()

    # metrics

    def figures(self) -> dict[str, Any]:
        """Return metrics of the broadcast: fetching ranks, bytes fetched and broadcast, memory."""
        s = self.service
        return {
            "rank": s.rank,
            "fetches": s.fetches,
            "fetcher": s.fetcher,
            "group": list(s.members),
            "connections": len(self._clients),
            "fetching_ranks": s.fetchers,
            "steps": self.steps,
            "bytes_fetched": self.bytes_fetched,
            "bytes_broadcast": self._frames.nbytes,
            "held_bytes": self._frames.held_bytes,
            "waited_s": self.waited_s,
        }

    def __repr__(self) -> str:
        f = self.figures()
        moved = f"{f['bytes_fetched']} bytes fetched, " if self.service.fetches else ""
        fetching = (
            "1 rank fetches"
            if self.service.fetchers == 1
            else f"{self.service.fetchers} ranks fetch"
        )
        return (
            f"BroadcastClient({self.service}; {fetching}; next step {self._state.step}, "
            f"{moved}{f['bytes_broadcast']} broadcast)"
        )


def _content(rank: int, step: Step, images: bool) -> dict[str, Any]:
    """Return the step of a queue as the content of a frame.

    ``images``: include the images that the rank of the queue encodes, because it has no client.
    """
    bucket = step.bucket
    bounds = np.asarray(bucket.bounds)
    first, stop = (int(bounds[0]), int(bounds[-1])) if len(bounds) else (0, 0)
    info = step.info.of_rows(bucket.samples[first:stop])
    none: tuple[Mapping[str, np.ndarray], np.ndarray] = ({}, np.zeros((0, len(bucket)), np.int64))
    wide, rows = bucket.part() if bucket.wide is not None else none
    encoder, encoder_rows = (
        bucket.encoder.part(0, bucket.encoder.n) if images and bucket.encoder is not None else none
    )
    return {
        "rank": rank,
        "info": replace(info, after=encoded_state(info.after)),
        "bounds": bounds - first,
        "wide": wide,
        "rows": rows,
        "microbatches": []
        if bucket.wide is not None
        else [dict(arrays) for arrays in bucket.microbatches],
        "encoder": encoder,
        "encoder_rows": encoder_rows,
        "per": bucket.per,
        "form": bucket.form,
    }


def encoded_state(state: State) -> EncodedState:
    """Return a state in its encoded form; an encoded state is returned unchanged."""
    return state if isinstance(state, EncodedState) else encode_state(state)


def _state_digest(state: Mapping[str, Any]) -> str:
    """Return the digest of a state without its reports.

    Reports do not count: those of the last steps are not yet in the states of all ranks.
    """
    return digest(json.dumps({k: v for k, v in state.items() if k != "reports"}, sort_keys=True))
