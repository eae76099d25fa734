"""Prefetch steps to a device: a thread takes them from the client and copies them in advance."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from overlord.client.caller_check import refuse_ahead
from overlord.client.client import Step
from overlord.client.microbatch_count import check_count
from overlord.errors import ActorLost, DataStall, JobError, OverlordError, PlanError
from overlord.job.job import Job
from overlord.torch.microbatch_info import MicrobatchInfo
from overlord.torch.pinned_memory import DeviceCopy, PinnedBuffers
from overlord.torch.saved_state import State, state_after
from overlord.torch.tensor_step import (
    HOST_KEYS,
    TensorMicrobatch,
    TensorStep,
    about,
    detached_contents,
    slots_of,
    tensor_of,
    why_missing,
)

POLL_S = 1.0  # seconds between two checks that the thread is alive
# Longest pause of the thread after the trainer took a step, if another step is ready.
HOLD_BACK_S = 0.02
HOLD_BACK = 0.1  # longest pause as a fraction of the time between two steps of the trainer
PAUSE_S = 60.0  # seconds for the thread to return from the client, before a state is loaded
CLOSE_S = 10.0  # seconds for the thread to end, once the client is closed


class _Ready(NamedTuple):
    step: TensorStep
    after: Callable[[], State]  # the state of the stream after it
    copied: DeviceCopy | None  # the copy that the trainer's stream must wait for


class DevicePrefetcher:
    """An iterator of a client's steps as ``TensorStep`` on a device; it prefetches ``depth`` steps.

    It has the interface of the client. On CUDA a step is packed into one buffer, pinned unless
    ``pin`` is false, and copied by one call on a separate stream. The trainer's stream waits for
    the copy; the trainer does not. On the CPU nothing is copied: tensors share the memory of the
    step. Other devices receive plain copies. ``waited_s``: seconds that the trainer has waited for
    steps. ``close`` closes the client too.
    """

    def __init__(
        self, client: Any, device: torch.device | str = "cuda", depth: int = 2, pin: bool = True
    ):
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise JobError(
                [f"depth: expected a whole number of at least 1, got {depth!r}"], "DevicePrefetcher"
            )
        if not hasattr(client, "__next__"):
            remedy = (
                "; open one: overlord.torch.join(job), or session.client(rank)"
                if isinstance(client, Job)
                else ""
            )
            raise JobError(
                [f"client: expected a client, got {type(client).__name__}{remedy}"],
                "DevicePrefetcher",
            )
        self.client, self.device, self.depth = client, torch.device(device), depth
        if self.device.type == "cuda" and self.device.index is None:
            # The current device of the thread is 0, whatever that of the trainer is.
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.waited_s, self.steps = 0.0, 0
        self._staging = PinnedBuffers(self.device, pin) if self.device.type == "cuda" else None
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._ready: deque[_Ready] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = self._closed = False
        self._end: BaseException | None = None  # the exception that ended the steps
        self._requested_at = self._pause_s = 0.0
        self._after: Callable[[], State] | None = None  # the state after the trainer's step

    @property
    def rank(self) -> int:
        """The rank of the client."""
        rank: int = self.client.rank
        return rank

    @property
    def microbatches_per_step(self) -> int | None:
        """The job's ``Batch.microbatches``; None if the client does not have it."""
        found: int | None = getattr(self.client, "microbatches_per_step", None)
        return found

    @property
    def world_size(self) -> int | None:
        """The number of ranks of the mesh; None if the client does not have it."""
        found: int | None = getattr(self.client, "world_size", None)
        return found

    @property
    def evaluation(self) -> bool:
        """Whether the job evaluates, as far as the client has it."""
        return bool(getattr(self.client, "evaluation", False))

    @property
    def ready(self) -> int:
        """The number of prefetched steps."""
        return len(self._ready)

    # the trainer's side

    def __iter__(self) -> DevicePrefetcher:
        refuse_ahead("DevicePrefetcher")
        return self

    def __next__(self) -> TensorStep:
        self._refuse_fork()
        if self._thread is None and self._end is None:
            self._start()
        start = time.monotonic()
        self._pause_s = min(HOLD_BACK_S, HOLD_BACK * (start - self._requested_at))
        self._requested_at = start
        with self._changed:
            while not self._ready and self._end is None:
                self._changed.wait(POLL_S)
                if (
                    not self._ready
                    and self._end is None
                    and self._thread is not None
                    and not self._thread.is_alive()
                ):
                    raise ActorLost(
                        f"the prefetching thread of rank {self.rank}", "it ended without an error"
                    )
            if not self._ready:
                self.waited_s += time.monotonic() - start
                assert self._end is not None
                raise self._end
            ready = self._ready.popleft()
        if ready.copied is not None:
            ready.copied.wait_on_stream()
        self._after, self.steps = ready.after, self.steps + 1
        self.waited_s += time.monotonic() - start
        # This comes last: the thread that it wakes takes the interpreter lock. Calls above that
        # release the lock would wait to get it back.
        with self._changed:
            self._changed.notify_all()
        return ready.step

    def microbatches(self) -> Iterator[TensorMicrobatch]:
        """Yield the microbatches of all steps, as ``client.microbatches``.

        A step with another number of microbatches than ``Batch.microbatches`` raises ``PlanError``
        and stays the next step.
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

    def _put_back(self, step: TensorStep, before: Callable[[], State]) -> None:
        """Put the last step back to the front of the queue.

        Its copy is complete, or the trainer's stream waits for it.
        """
        with self._changed:
            self._ready.appendleft(_Ready(step, self.mark(), None))
            self._after, self.steps = before, self.steps - 1

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report metrics of a step, as ``client.report``.

        Steps are prefetched. For reports to be in time, ``Job.feedback_lag`` must be ``depth`` + 1
        larger than without a prefetcher.
        """
        self.client.report(step, metrics)

    def state_dict(self, at: Callable[[], State] | None = None) -> State:
        """Return the state after the trainer's last step, or at ``at``, a result of ``mark``.

        Prefetched steps do not count.
        """
        after = at or self._after or self.client.state_dict
        state: State = after()
        return state

    def mark(self) -> Callable[[], State]:
        """Return a mark of the position after the trainer's last step, for ``state_dict``."""
        return self._after or state_after(self.client)

    def load_state_dict(self, state: Mapping[str, Any], allow: tuple[str, ...] = ()) -> None:
        """Continue from a saved state, and drop prefetched steps; a refused state keeps them."""
        self._refuse_fork()
        if self._closed:
            raise self._end or self._closed_error()
        self._stop(PAUSE_S)
        self._end = None  # if the reason persists, the client raises it again
        self.client.load_state_dict(state, allow)
        self._ready.clear()
        self._after = None

    def close(self) -> None:
        """End the thread and close the client."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        with self._changed:
            self._stopping = True
            self._end = self._closed_error()
            self._ready.clear()
            self._changed.notify_all()
        self.client.close()  # wakes the thread if it waits for a step
        self._stop(CLOSE_S)

    def _closed_error(self) -> OverlordError:
        return OverlordError(
            f"DevicePrefetcher of rank {self.rank}: expected an open one, got a closed one; create "
            "another"
        )

    def __enter__(self) -> DevicePrefetcher:
        return self

    def __exit__(self, kind: object, value: BaseException | None, *_: object) -> None:
        failed = kind is not None and not (isinstance(value, SystemExit) and not value.code)
        if failed and hasattr(self.client, "mark_failed"):
            # The ``with`` of the client itself does the same.
            self.client.mark_failed(value)
        self.close()

    def __repr__(self) -> str:
        return (
            f"DevicePrefetcher({self.client!r} on {self.device}, {self.ready} of {self.depth} "
            f"steps ready, waited {self.waited_s:.2f} s)"
        )

    # the thread

    def _start(self) -> None:
        self._stopping = False
        # A refused state leaves prefetched steps here, which the trainer has not taken.
        self._after = self._after or state_after(self.client)
        self._thread = threading.Thread(
            target=self._run, name=f"overlord-prefetch-{self.rank}", daemon=True
        )
        self._thread.start()

    def _stop(self, seconds: float) -> None:
        """Stop the thread and wait for its end; afterwards no other thread uses the client."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        thread.join(seconds)
        if thread.is_alive():
            self._thread = thread
            raise DataStall(
                "the prefetching thread, which waits for its client, to end",
                seconds,
                rank=self.rank,
            )

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            while self._has_room():
                ready = self._to_device(next(self.client))
                with self._changed:
                    # Also when stopping: a state may be refused, and then the stream continues.
                    if not self._closed:
                        self._ready.append(ready)
                    self._changed.notify_all()
                del ready
        except BaseException as fault:  # also StopIteration: raised after the steps before it
            end = fault
        with self._changed:
            if end is not None and not self._stopping:
                self._end = end
            self._changed.notify_all()

    def _has_room(self) -> bool:
        with self._changed:
            while len(self._ready) >= self.depth and not self._stopping:
                self._changed.wait(POLL_S)
            # This thread takes the interpreter lock. A trainer that has just received a step starts
            # its first kernels while the device is idle. It would wait 5 ms at every call that
            # releases the lock. A few milliseconds later the device has enough work queued.
            self._changed.wait_for(lambda: self._stopping or not self._ready, self._pause_s)
            return not self._stopping

    def _to_device(self, step: Step | TensorStep) -> _Ready:
        after = state_after(self.client)
        if self._staging is None or isinstance(step, TensorStep):
            return _Ready(
                TensorStep.of(step, None if self.device.type == "cpu" else self.device), after, None
            )
        microbatches, slots = list(step), list(slots_of(step))
        arrays = [
            {k: np.asarray(v) for k, v in mb.items() if k not in HOST_KEYS}
            for mb in (*microbatches, *slots)
        ]
        copied, found = self._staging.copy([a for mb in arrays for a in mb.values()])
        made = []
        for mb, moved in zip((*microbatches, *slots), arrays, strict=True):
            on_device = {key: found.popleft() for key in moved}
            kept = {key: tensor_of(np.array(mb[key])) for key in mb if key in HOST_KEYS}
            all_keys = {key: on_device[key] if key in on_device else kept[key] for key in mb}
            # Use these arrays: reading mb would expand its arrays once more.
            facts = MicrobatchInfo.of({key: moved.get(key, kept.get(key)) for key in mb})
            made.append(TensorMicrobatch(all_keys, detached_contents(mb), facts, why_missing(mb)))
        n = len(microbatches)
        return _Ready(TensorStep(about(step), made[:n], made[n:]), after, copied)

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:
            raise OverlordError(
                f"DevicePrefetcher: expected process {self._pid}, which created it, got process "
                f"{os.getpid()}; a fork does not copy its thread: create it "
                "in the process that iterates"
            )
