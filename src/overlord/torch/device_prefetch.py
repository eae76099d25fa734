"""Steps on the device before the trainer asks for them: a thread takes them from the client, and
copies beside the computation.
"""

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
from overlord.client.step import Step, check_count
from overlord.errors import ActorLost, DataStall, JobError, OverlordError, PlanError
from overlord.job.job import Job
from overlord.torch.microbatch_info import MicrobatchInfo
from overlord.torch.pinned_memory import PinnedBuffers, Placing
from overlord.torch.saved_state import State, state_behind
from overlord.torch.tensor_step import (
    HOST_KEYS,
    TensorMicrobatch,
    TensorStep,
    about,
    detached_samples,
    slots_of,
    tensor_of,
    why_missing,
)

LOOK_S = 1.0  # between looks whether the thread still lives
HOLD_BACK_S = (
    0.02  # the thread lets a trainer that just got a step go first, while another is ready
)
HOLD_BACK = 0.1  # but no longer than this share of the time between two steps
PAUSE_S = 60.0  # for the thread to come back from the client, before a state is loaded
LEAVE_S = 10.0  # for it to end, once the client is closed


class _Ready(NamedTuple):
    step: TensorStep
    behind: Callable[[], State]  # the state of the stream behind it
    copied: Placing | None  # the copy it must wait for


class DevicePrefetcher:
    """Iterates a client's steps as ``TensorStep`` on a device, up to ``depth`` of them copied
    ahead. Stands where the client stood.

    On CUDA a step is packed into one pinned buffer and copied by one call on a stream of its own;
    the trainer's stream waits for the copy, the trainer does not. On the CPU nothing is copied:
    tensors share the step's memory. Other devices get plain copies. ``waited_s``: how long the
    trainer has waited here. ``close`` closes the client too.
    """

    def __init__(
        self, client: Any, device: torch.device | str = "cuda", depth: int = 2, pin: bool = True
    ):
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise JobError(
                [f"depth: expected a whole number of at least 1, got {depth!r}"], "DevicePrefetcher"
            )
        if not hasattr(client, "__next__"):
            words = (
                "; open one: overlord.torch.join(job), or session.client(rank)"
                if isinstance(client, Job)
                else ""
            )
            raise JobError(
                [f"expected a client, got {type(client).__name__}{words}"], "DevicePrefetcher"
            )
        self.client, self.device, self.depth = client, torch.device(device), depth
        if (
            self.device.type == "cuda" and self.device.index is None
        ):  # the thread's own current device is 0, whatever the trainer's is
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.waited_s, self.steps = 0.0, 0
        self._staging = PinnedBuffers(self.device, pin) if self.device.type == "cuda" else None
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._ready: deque[_Ready] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = self._closed = False
        self._end: BaseException | None = None  # what came in place of a step
        self._asked_at = self._pause_s = 0.0
        self._behind: Callable[[], State] | None = None  # the state behind the step the trainer has

    @property
    def rank(self) -> int:
        rank: int = self.client.rank
        return rank

    @property
    def microbatches_per_step(self) -> int | None:
        """The job's ``Batch.microbatches``; None where the client has no such number."""
        found: int | None = getattr(self.client, "microbatches_per_step", None)
        return found

    @property
    def world_size(self) -> int | None:
        """The ranks of the mesh; None where the client has no such number."""
        found: int | None = getattr(self.client, "world_size", None)
        return found

    @property
    def ready(self) -> int:
        """Steps that wait here for the trainer."""
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
        self._pause_s, self._asked_at = (
            min(HOLD_BACK_S, HOLD_BACK * (start - self._asked_at)),
            start,
        )
        with self._changed:
            while not self._ready and self._end is None:
                self._changed.wait(LOOK_S)
                if (
                    not self._ready
                    and self._end is None
                    and self._thread is not None
                    and not self._thread.is_alive()
                ):
                    raise ActorLost(
                        f"the prefetching thread of rank {self.rank}", "it ended without a word"
                    )
            if not self._ready:
                self.waited_s += time.monotonic() - start
                assert self._end is not None
                raise self._end
            got = self._ready.popleft()
        if got.copied is not None:
            got.copied.hand_over()
        self._behind, self.steps = got.behind, self.steps + 1
        self.waited_s += time.monotonic() - start
        # last of all: whoever is woken wants the interpreter, and a call above that lets go of it
        # would wait for it
        with self._changed:
            self._changed.notify_all()
        return got.step

    def microbatches(self) -> Iterator[TensorMicrobatch]:
        """Yield all microbatches in a row, as the client's.

        A step with another number of microbatches than ``Batch.microbatches`` raises ``PlanError``
        and stays the next step.
        """
        before = self.mark()
        for step in self:
            try:
                check_count(step, self.microbatches_per_step)
            except PlanError:
                self._take_back(step, before)
                raise
            yield from step
            before = self.mark()

    def _take_back(self, step: TensorStep, before: Callable[[], State]) -> None:
        """Stand before the step that was handed out last. Its copy is done or waited for by the
        trainer's stream.
        """
        with self._changed:
            self._ready.appendleft(_Ready(step, self.mark(), None))
            self._behind, self.steps = before, self.steps - 1

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """As the client's. Steps were taken ahead, so ``Job.feedback_lag`` must be larger by
        ``depth`` + 1 for reports to be in time.
        """
        self.client.report(step, metrics)

    def state_dict(self, at: Callable[[], State] | None = None) -> State:
        """Behind the step the trainer has got, however many were taken ahead; or behind that of a
        mark.
        """
        behind = at or self._behind or self.client.state_dict
        state: State = behind()
        return state

    def mark(self) -> Callable[[], State]:
        """The place behind the step the trainer has got, for a ``state_dict`` later."""
        return self._behind or state_behind(self.client)

    def load_state_dict(self, state: Mapping[str, Any], allow: tuple[str, ...] = ()) -> None:
        """Go on from a saved state; steps taken ahead are dropped."""
        self._refuse_fork()
        if self._closed:
            raise self._end or OverlordError(f"the prefetcher of rank {self.rank} is closed")
        self._stop(PAUSE_S)
        self._end = None  # where it still holds, the client says it again
        self.client.load_state_dict(state, allow)
        self._ready.clear()
        self._behind = None

    def close(self) -> None:
        """Leave: the thread ends, and the client is closed."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        with self._changed:
            self._stopping = True
            self._end = OverlordError(f"the prefetcher of rank {self.rank} is closed")
            self._ready.clear()
            self._changed.notify_all()
        self.client.close()  # wakes the thread where it waits for a step
        self._stop(LEAVE_S)

    def __enter__(self) -> DevicePrefetcher:
        return self

    def __exit__(self, kind: object, value: object, *_: object) -> None:
        if (
            kind is not None
            and not (isinstance(value, SystemExit) and not value.code)
            and hasattr(self.client, "_failed")
        ):
            self.client._failed, self.client._fault = (
                True,
                value,
            )  # as its own ``with`` would say: other ranks need not be waited for
        self.close()

    def __repr__(self) -> str:
        return (
            f"DevicePrefetcher({self.client!r} on {self.device}, {self.ready} of {self.depth} "
            f"steps ready, waited {self.waited_s:.2f} s)"
        )

    # the thread

    def _start(self) -> None:
        self._stopping = False
        self._behind = self._behind or state_behind(
            self.client
        )  # a state that was refused leaves steps here, and the trainer behind them
        self._thread = threading.Thread(
            target=self._run, name=f"overlord-prefetch-{self.rank}", daemon=True
        )
        self._thread.start()

    def _stop(self, seconds: float) -> None:
        """The thread is gone when this returns, so that the client is ours alone."""
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
                "the prefetching thread, which waits for its client", seconds, rank=self.rank
            )

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            while self._has_room():
                ready = self._staged(next(self.client))
                with self._changed:
                    if (
                        not self._closed
                    ):  # also when it is to stop: a state may be refused, and the stream goes on
                        self._ready.append(ready)
                    self._changed.notify_all()
                del ready
        except (
            BaseException
        ) as fault:  # StopIteration too: told to the trainer behind the steps that came before it
            end = fault
        with self._changed:
            if end is not None and not self._stopping:
                self._end = end
            self._changed.notify_all()

    def _has_room(self) -> bool:
        with self._changed:
            while len(self._ready) >= self.depth and not self._stopping:
                self._changed.wait(LOOK_S)
            # Work in the background wants the interpreter. A trainer that just got a step starts
            # its first kernels, the device idle, and
            # would wait 5 ms at every call that lets go of the interpreter. A few milliseconds
            # later the device has enough to do.
            self._changed.wait_for(lambda: self._stopping or not self._ready, self._pause_s)
            return not self._stopping

    def _staged(self, step: Step | TensorStep) -> _Ready:
        behind = state_behind(self.client)
        if self._staging is None or isinstance(step, TensorStep):
            return _Ready(
                TensorStep.of(step, None if self.device.type == "cpu" else self.device),
                behind,
                None,
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
            facts = MicrobatchInfo.of(
                {key: moved.get(key, kept.get(key)) for key in mb}
            )  # not of mb, which would widen its arrays once more
            made.append(TensorMicrobatch(all_keys, detached_samples(mb), facts, why_missing(mb)))
        n = len(microbatches)
        return _Ready(TensorStep(about(step), made[:n], made[n:]), behind, copied)

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:
            raise OverlordError(
                f"the prefetcher was made in process {self._pid} and this is process "
                f"{os.getpid()}; its thread did not come along: make it "
                "in the process that iterates"
            )
