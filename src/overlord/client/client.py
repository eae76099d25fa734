"""``Client``: the iterator of a trainer, and the ``Step`` it yields."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from overlord.client.caller_check import refuse_ahead
from overlord.client.microbatch_count import check_count
from overlord.constructor.build import BucketBatch
from overlord.constructor.compact import ExpandedMicrobatch
from overlord.constructor.sample_documents import rows_of_documents
from overlord.errors import DataStall, OverlordError, PlanError
from overlord.line_numbers import add_line_number
from overlord.messages.control import EncodedState, Report, SentReport, StreamState
from overlord.messages.data import StepInfo
from overlord.plan.module_ranks import OUTSIDE, fetcher_by_rank
from overlord.plan.view import FIRST, LAST
from overlord.sample import SampleId

if TYPE_CHECKING:
    from overlord.mesh import Mesh

log = logging.getLogger("overlord")

# ----------------------------------------------------------------------------
# Queues of steps. A client takes its steps from a ``StepQueue``, whatever process fills it.

State = StreamState | EncodedState


class StepQueue(Protocol):
    """The queue of one client's steps, filled in this process or over a connection."""

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None: ...
    def end(self, error: BaseException | None, *, drop: bool = False) -> None: ...
    def ack(self, step: int) -> None:
        """Acknowledge to the constructor that the trainer took the step."""

    def report(self, report: Report, in_time: bool) -> None:
        """Send a report, before any later acknowledgement.

        ``in_time``: no plan that uses it can exist yet.
        """

    def reports(self) -> Sequence[SentReport]:
        """Return the reports of this client that plans and states may still need."""

    def __len__(self) -> int: ...


QueuePosition = tuple[StepQueue, State]


# ----------------------------------------------------------------------------
# A ``Step`` of ``Microbatch`` objects: read-only arrays, and the samples that they contain.


class Piece(NamedTuple):
    """The position of one sample in a microbatch, or of one of its documents if it has several.

    It is ``tokens[offset:offset + length]`` (packed), or the first ``length`` tokens of row
    ``offset`` (padded), before a split for context parallelism; -1: this rank has no arrays.
    """

    sample: SampleId
    offset: int
    length: int


class Microbatch(Mapping[str, np.ndarray]):
    """The arrays of one microbatch: a mapping from name to read-only array, with ``.samples``."""

    __slots__ = ("_arrays", "_info", "_rows", "_served_by", "is_last")

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        info: StepInfo,
        rows: np.ndarray,
        served_by: int | None = None,
        is_last: bool = False,
    ):
        self._arrays, self._info, self._rows = arrays, info, rows
        self.is_last = is_last  # whether it is the last microbatch of its step
        # the rank that fetches this microbatch, this one or another; None: this rank
        self._served_by = served_by

    def __getitem__(self, key: str) -> np.ndarray:
        try:
            return self._arrays[key]
        except KeyError:
            raise KeyError(self._missing_key_text(key)) from None

    def _missing_key_text(self, key: str) -> str:
        # cu_seqlens: every rank that receives a microbatch has it
        if "cu_seqlens" in self._arrays or self._served_by is None:
            stage = {**dict.fromkeys(FIRST, "first"), **dict.fromkeys(LAST, "last")}.get(key)
            why = (
                f" ({key} is for the {stage} pipeline stage)"
                if stage and self._arrays and self._info.place is not None
                else ""
            )
            return f"expected one of {', '.join(self._arrays)}, got {key!r}{why}"
        if self._served_by == OUTSIDE:
            return f"{key!r} is not on this rank: the backbone is on {self._info.on}, without it"
        along = ", ".join(self._info.broadcast)
        return (
            f"{key!r} is not on this rank: rank {self._served_by} fetches this microbatch and the "
            f"trainer broadcasts it (broadcast_at {along}); "
            "join with overlord.torch.join, launch with broadcast=False, or use a "
            "strategy without broadcast_at"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def step(self) -> int:
        """The number of the step of this microbatch."""
        return self._info.step

    @property
    def global_valid_tokens(self) -> int | float:
        """That of the step: divide summed losses by it."""
        return self._info.valid_tokens

    @property
    def global_samples(self) -> int:
        """Samples of the whole step: divide summed losses of samples, such as pairs, by it."""
        return self._info.samples

    @property
    def info(self) -> StepInfo:
        """The description of the step, restricted to the samples of this microbatch."""
        return self._info.of_rows(self._rows)

    @property
    def samples(self) -> list[Piece]:
        """The samples in order, created on each access; an entry for each of several documents."""
        info, rows = self._info, rows_of_documents(self._rows, self._arrays)
        lengths = info.tokens[rows].tolist()
        if len(rows) > len(self._rows):
            lengths = np.diff(self._arrays["cu_seqlens"]).tolist()
        starts: Sequence[int] = [-1] * len(rows)
        if "attention_mask" in self._arrays:  # only in the padded layout
            starts = range(len(rows))
        elif "cu_seqlens_padded" in self._arrays:
            starts = self._arrays["cu_seqlens_padded"].tolist()
        ids = [info.sample_id(i) for i in rows.tolist()]
        return [Piece(*piece) for piece in zip(ids, starts, lengths, strict=False)]

    @property
    def begins(self) -> np.ndarray:
        """The tokens of each sample before its piece here: int64, 0 for whole samples."""
        return self._info.offset[rows_of_documents(self._rows, self._arrays)]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{k} {v.dtype}{list(v.shape)}" for k, v in self._arrays.items())
        if not shapes and self._served_by is not None:
            outside = self._served_by == OUTSIDE
            shapes = "no backbone" if outside else f"served by rank {self._served_by}"
        return f"Microbatch({len(self._rows)} samples: {shapes})"


class Step:
    """One step of one rank: a sequence of microbatches."""

    __slots__ = ("_bucket", "_cut", "_exchanges", "_info", "rank")

    def __init__(self, info: StepInfo, bucket: BucketBatch, rank: int):
        self._info, self._bucket, self.rank = info, bucket, rank
        self._cut: tuple[Microbatch, ...] | None = None
        self._exchanges: tuple[Microbatch, ...] | None = None

    @property
    def step(self) -> int:
        return self._info.step

    @property
    def plan_digest(self) -> str:
        return self._info.digest

    @property
    def stage(self) -> str | int | None:
        """The name of the step's stage, or its number; None if the job has no stages."""
        return self._info.stage

    @property
    def expected_microbatches(self) -> int | None:
        """``Batch.microbatches`` of the step's stage; None if the job has no stages."""
        return self._info.microbatches

    @property
    def global_valid_tokens(self) -> int | float:
        """The sum of the weights of all labels, over all ranks; divide summed losses by it.

        Without loss weights it is the number of labels. It is an int if it is whole.
        """
        return self._info.valid_tokens

    @property
    def global_samples(self) -> int:
        """The number of samples of the step, over all ranks; a pair or a group is one sample."""
        return self._info.samples

    @property
    def served_by(self) -> int:
        """The rank that fetches these microbatches: this rank, or one that broadcasts to it.

        It is -1 if this rank is outside of the backbone's mesh.
        """
        info = self._info
        return (
            self.rank
            if info.place is None
            else int(fetcher_by_rank(info.place, info.on, info.broadcast)[self.rank])
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of this step, as they were received."""
        return self._bucket.nbytes

    @property
    def info(self) -> StepInfo:
        """The description of this step, as it was received."""
        return self._info

    @property
    def bucket(self) -> BucketBatch:
        """The arrays of this step, as the constructor built them."""
        return self._bucket

    def __len__(self) -> int:
        return len(self._bucket)

    def _microbatches(self) -> tuple[Microbatch, ...]:
        """Return the microbatches; all calls return the same objects."""
        if self._cut is None:
            b, bounds, served_by = self._bucket, self._bucket.bounds.tolist(), self.served_by
            rows = [b.samples[start:end] for start, end in pairwise(bounds)]
            last = len(rows) - 1
            self._cut = tuple(
                Microbatch(arrays, self._info, rows[m], served_by, m == last)
                for m, arrays in enumerate(self._with_images(b))
            )
        return self._cut

    def _with_images(self, bucket: BucketBatch) -> Iterable[Mapping[str, np.ndarray]]:
        """Return the arrays of microbatches, each with those of its encoder exchange, if any."""
        if bucket.encoder is None or bucket.per != "microbatch":
            return bucket.microbatches
        both = zip(bucket.microbatches, self.encoder, strict=True)
        return (
            arrays.with_arrays(more)
            if isinstance(arrays, ExpandedMicrobatch)
            else {**arrays, **more}
            for arrays, more in both
        )

    @property
    def encoder(self) -> tuple[Microbatch, ...]:
        """The inputs of this rank's encoder and the routes of its outputs, by exchange.

        It is empty for a job without images.
        """
        if self._exchanges is None:
            wide = self._bucket.encoder
            cut = () if wide is None else wide.cut(0, wide.n)
            self._exchanges = tuple(
                Microbatch(arrays, self._info, np.zeros(0, np.int64)) for arrays in cut
            )
        return self._exchanges

    def __getitem__(self, m: int) -> Microbatch:
        return self._microbatches()[m]

    def __iter__(self) -> Iterator[Microbatch]:
        return iter(self._microbatches())

    def __repr__(self) -> str:
        return (
            f"Step({self.step}, rank {self.rank}, {len(self)} microbatches, "
            f"{self.global_valid_tokens} valid tokens in all)"
        )


# ----------------------------------------------------------------------------
# ``Client``: the iterator of a trainer. Its waits have a deadline, and the error has the reason.


class Client:
    """The iterator over the steps of one rank, from ``session.client(rank)`` or ``connect``."""

    def __init__(
        self,
        rank: int,
        queue: StepQueue,
        *,
        begin: Callable[[], None],
        consumed: Callable[[StepQueue, int], None],
        waiting_for: Callable[[], str],
        export: Callable[[StepQueue, State], dict[str, Any]],
        rewind: Callable[[Mapping[str, Any], tuple[str, ...]], tuple[StepQueue, State]],
        report: Callable[[StepQueue, Any, Any, int], None],
        start: State,
        close: Callable[[], None],
        stall_warn_s: float,
        stall_limit_s: float,
        on_stall: Callable[[str, float], None] | None = None,
        microbatches: int | None = None,
        world_size: int | None = None,
        evaluation: bool = False,
        missing_ranks: Callable[[], Sequence[int]] = tuple,
    ):
        self.rank, self._queue, self._state = rank, queue, start
        # called before the first wait, since the work starts on demand
        self._begin: Callable[[], None] | None = begin
        self._consumed, self._waiting_for, self._export, self._rewind, self._close = (
            consumed,
            waiting_for,
            export,
            rewind,
            close,
        )
        self._report, self._pid = report, os.getpid()
        self._warn_s, self._limit_s, self._on_stall = stall_warn_s, stall_limit_s, on_stall
        # held while a step is handed to the trainer, and while the session changes its mesh
        self._gate = threading.Lock()
        self.session: Any = None  # session that this client owns (``join``)
        self._failed = False  # an exception closed the client: do not wait for other ranks
        self._fault: BaseException | None = None  # the exception that closed the client
        self.waited_s = 0.0  # time that the trainer has waited for steps
        self.steps = 0
        self.bytes_fetched = 0  # bytes of received arrays, in the form in which they were sent
        # Batch.microbatches of the job, if known; an evaluation accepts any number
        self.microbatches_per_step = None if evaluation else microbatches
        self.world_size = world_size  # ranks of the mesh, if known
        self.missing_ranks = missing_ranks  # returns ranks of the mesh that no client takes
        self.evaluation = evaluation  # Job.evaluation: loaders begin anew at every pass
        self._shared: tuple[Mesh | None, Mesh | None, tuple[str, ...]] = (None, None, ())
        # a step put back: the position before it, the state after it, and the step
        self._refused_step: tuple[QueuePosition, State, Step] | None = None

    @property
    def queue(self) -> StepQueue:
        """The queue from which the next step is taken."""
        return self._queue

    @property
    def position(self) -> State:
        """The state of the stream after the last step that was taken."""
        return self._state

    @property
    def failed(self) -> bool:
        """Whether an exception ended the trainer or closed the client."""
        return self._failed

    def mark_failed(self, fault: BaseException | None = None) -> None:
        """Mark the client as failed, so that closing it does not wait for other ranks.

        ``fault``: the exception; None keeps an earlier one.
        """
        self._failed, self._fault = True, fault or self._fault

    def close_with(self, close: Callable[[Callable[[], None]], None]) -> None:
        """Make ``close()`` call the function ``close`` with the previous callback."""
        before = self._close
        self._close = lambda: close(before)

    def paused(self) -> AbstractContextManager[object]:
        """Return a context in which the trainer takes no step; a session reshards inside it."""
        return self._gate

    def move_to(self, queue: StepQueue, position: State) -> None:
        """Continue with another queue and position, in a new generation of the session."""
        self._queue, self._state = queue, position

    def begin_with(self, begin: Callable[[], None]) -> None:
        """Call ``begin`` once, before the next wait for a step."""
        self._begin = begin

    def __iter__(self) -> Client:
        refuse_ahead(type(self).__name__)
        return self

    def __next__(self) -> Step:
        self._refuse_fork()
        if (refused := self._retake()) is not None:
            return refused
        while True:
            if (begin := self._begin) is not None:
                begin()
                self._begin = None
            queue = self._queue
            try:
                info, bucket = self._wait(queue)
            except (OverlordError, StopIteration) as ended:
                if queue is self._queue:
                    add_line_number(ended)
                    raise
                continue
            with self._gate:
                # a new queue: the session was rewound or resharded, and sends the step again
                if queue is self._queue:
                    self._state, self._shared = info.after, (info.place, info.on, info.broadcast)
                    break
        self.steps += 1
        self._consumed(queue, info.step)
        return Step(info, bucket, self.rank)

    def _retake(self) -> Step | None:
        """Take the step that was put back; return None if there is none, or after a rewind."""
        # Read without the gate: it is held during a rewind, and ready steps must not wait for it.
        if self._refused_step is None:
            return None
        with self._gate:
            back, self._refused_step = self._refused_step, None
            if back is None or back[0][0] is not self._queue or back[0][1] is not self._state:
                return None
            _, self._state, step = back
        self.steps += 1
        return step

    def _put_back(self, step: Step, before: QueuePosition) -> None:
        """Put a step back, so that it is the next one; do nothing if the session was rewound.

        ``before``: the position before the step.
        """
        with self._gate:
            if before[0] is self._queue:
                self._refused_step, self._state = (before, self._state, step), before[1]
                self.steps -= 1

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:  # a fork does not copy the threads that fill the queue
            raise OverlordError(
                f"rank {self.rank}: expected process {self._pid}, which opened the client, got "
                f"process {os.getpid()}; a session does not survive a fork: launch it in the "
                "process that iterates"
            )

    def _wait(self, queue: StepQueue) -> tuple[StepInfo, BucketBatch]:
        """Wait for a step, and warn every ``stall_warn_s``; raise ``DataStall`` at the limit."""
        start = time.monotonic()
        warn_at = self._warn_s
        while True:
            waited = time.monotonic() - start
            got = queue.get(max(0.0, min(warn_at, self._limit_s) - waited))
            waited = time.monotonic() - start
            if got is not None:
                self.waited_s += waited
                self.bytes_fetched += got[1].nbytes
                return got
            if waited >= self._limit_s:
                self.waited_s += waited
                raise DataStall(self._waiting_for(), waited, self._state.step, self.rank)
            if waited >= warn_at:
                warn_at = waited + max(1.0, self._warn_s)
                self._report_stall(self._waiting_for(), waited)

    def _report_stall(self, reason: str, seconds: float) -> None:
        if self._on_stall is not None:
            self._on_stall(reason, seconds)
        else:
            log.warning(
                "rank %d has waited %.0f s for step %d: %s",
                self.rank,
                seconds,
                self._state.step,
                reason,
            )

    def microbatches(self) -> Iterator[Microbatch]:
        """Yield the microbatches of all steps, for trainers that count them per optimizer step.

        Such a trainer takes ``Batch.microbatches`` of them for each step. A step with another
        number of microbatches raises ``PlanError``: the trainer would mix later steps. The position
        stays before that step, so a resume from a state saved there begins with it.
        """
        before = self.mark()
        for step in self:
            try:
                check_count(step, step.expected_microbatches or self.microbatches_per_step)
            except PlanError:
                self._put_back(step, before)
                raise
            yield from step
            before = self.mark()

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send measurements of a step that this rank took, for an adaptive mixture.

        An example is ``{"loss/web": 2.31, "tokens/web": 8192}``. The plan of step
        ``step + feedback_lag`` uses the report. It is in time if it is sent before step
        ``step + 2`` is requested. Values of several ranks are averaged, weighted by
        ``tokens/<source>`` if given. Only the last report of a rank for a step is used.
        """
        self._refuse_fork()
        self._report(self._queue, step, metrics, self._state.step)

    def state_dict(self, at: QueuePosition | None = None) -> dict[str, Any]:
        """Return the state of the stream after the last step, or at a mark ``at``, as JSON values.

        The state is the same on every rank, and valid on any mesh.
        """
        return self._export(*((self._queue, self._state) if at is None else at))

    def mark(self) -> QueuePosition:
        """Return the position after the last step, for a later ``state_dict``.

        Callers that take steps ahead of the trainer need it.
        """
        state = self._state
        # Its bytes may share the memory of the step's arrays, which a mark must not keep alive.
        if isinstance(state, EncodedState):
            state = EncodedState(state.step, state.data.copy())
        return self._queue, state

    def load_state_dict(self, state: Mapping[str, Any], allow: tuple[str, ...] = ()) -> None:
        """Continue from a saved state.

        The first rank that calls this rewinds the session; the other ranks must load the same
        state. ``allow``: parts of the job that may differ from the saved job, by the names in the
        error. Raise ``StateMismatch`` for a state that does not fit the job.
        """
        self._queue, self._state = self._rewind(state, allow)
        self._refused_step = None

    def close(self) -> None:
        """Close the client, so that other ranks no longer wait for this rank.

        In a forked process this does nothing.
        """
        if os.getpid() != self._pid:  # a copy after a fork; the original stays open
            return
        self._close()
        self._queue.end(OverlordError(f"the client of rank {self.rank} is closed"), drop=True)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        value = exc[0] if exc else None
        # sys.exit(0) is not a failure
        self._failed = kind is not None and not (isinstance(value, SystemExit) and not value.code)
        self._fault = value if self._failed and isinstance(value, BaseException) else None
        self.close()

    def figures(self) -> dict[str, Any]:
        """Return metrics with the keys of ``BroadcastClient.figures``, without a broadcast here."""
        place, on, broadcast = self._shared
        by = np.arange(self.rank + 1) if place is None else fetcher_by_rank(place, on, broadcast)
        fetchers = self.world_size if place is None else len((on or place).fetchers(broadcast))
        return {
            "rank": self.rank,
            "fetches": int(by[self.rank]) == self.rank,
            "fetcher": int(by[self.rank]),
            "group": np.flatnonzero(by == by[self.rank]).tolist(),
            "connections": 1,
            "fetching_ranks": fetchers,
            "steps": self.steps,
            "bytes_fetched": self.bytes_fetched,
            "bytes_broadcast": 0,
            "held_bytes": 0,
            "waited_s": self.waited_s,
        }

    def __repr__(self) -> str:
        return (
            f"Client(rank {self.rank}, next step {self._state.step}, {len(self._queue)} steps "
            f"ready, waited {self.waited_s:.2f} s)"
        )
