"""Frames of bytes that a fetching rank broadcasts to the ranks it serves, without pickle.

step      the info and the arrays of each queue's step; receivers view them without a copy
end       the stream has ended; the frame has the state after the last step
error     the fetcher failed; the frame has its error
loaded    the fetcher loaded a state, as every rank of the group must do
refused   the fetcher could not load a state; the stream continues as before
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from overlord.buffer_pool import BufferPool
from overlord.errors import ActorLost, DataStall, OverlordError
from overlord.session.rendezvous import WARN_S, ranks
from overlord.torch.departures import Departures, error_text, shortened
from overlord.torch.process_groups import Service
from overlord.transport.codec import decode, encode
from overlord.transport.frame import pack, size_of, unpack

log = logging.getLogger("overlord")

WAIT_S = 0.5  # seconds of one wait; Ctrl-C and departures are handled only between waits
POLL_S = 0.001  # seconds between polls of a device's collective, which has no wait with a timeout
AHEAD = 2  # frames that the fetcher may be ahead of the slowest rank it serves
SOURCE_LINE = re.compile(r"^\[[^\]]*:\d+\]\s*")  # a source position that starts a library's error


class FrameBroadcast:
    """A process group as a one-way channel: one rank sends, the others receive.

    The sender may be up to ``AHEAD`` frames ahead of the receivers.
    """

    def __init__(
        self,
        service: Service,
        group: Any,
        device: torch.device,
        limit_s: float,
        *,
        stall_warn_s: float = WARN_S,
        on_stall: Callable[[str, float], None] | None = None,
        departures: Departures | None = None,
    ):
        if device.type == "cuda" and device.index is None:
            # The current device of a prefetching thread is 0, whatever that of the rank is.
            device = torch.device("cuda", torch.cuda.current_device())
        self._service, self._group, self._device, self._limit_s = service, group, device, limit_s
        self._warn_s, self._on_stall, self._departures = stall_warn_s, on_stall, departures
        self._memory = BufferPool()
        self._sent: deque[tuple[list[Any], list[torch.Tensor], int]] = deque()
        # Guards ``_sent``: close() may run while another thread prefetches.
        self._lock = threading.Lock()
        self._closed = False
        self._broken: Exception | None = (
            None  # the error after which the boundaries of frames are unknown
        )
        self.frames = self.nbytes = 0

    # the sending rank

    def send(self, value: Mapping[str, Any]) -> None:
        """Send a frame to all ranks; return before they have it.

        It blocks while more than ``AHEAD`` frames are in flight.
        """
        header, columns = encode(dict(value))
        room = self._memory(max(1, size_of(header, columns)))[: size_of(header, columns)]
        at = 0
        for piece in pack(header, columns):
            room[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        tensors = [
            torch.tensor([len(room)], device=self._device),
            torch.from_numpy(room).to(self._device),
        ]
        works = [self._broadcast(tensor) for tensor in tensors]
        with self._lock:
            self._sent.append((works, tensors, self.frames))
        self.frames, self.nbytes = self.frames + 1, self.nbytes + len(room)
        self.flush(AHEAD)

    def flush(self, left: int = 0, limit_s: float | None = None) -> None:
        """Wait until at most ``left`` frames are in flight.

        ``limit_s``: longest wait for a frame, after which ``DataStall`` is raised; None: the limit
        given to ``__init__``.
        """
        while True:
            with self._lock:
                if len(self._sent) <= left:
                    return
                first = self._sent[0]
            for work in first[0]:
                self._wait(
                    work,
                    f"{ranks(_others(self._service))} to receive the broadcast of rank "
                    f"{self._service.rank}",
                    limit_s,
                    first[2],
                )
            with self._lock:
                if self._sent and self._sent[0] is first:
                    self._sent.popleft()

    # the receiving ranks

    def receive(self, what: str) -> dict[str, Any]:
        """Return the next frame; its arrays are read-only views of the receive buffer.

        After an exception every call raises: the boundaries of later frames are unknown.
        """
        if self._broken is not None:
            raise self._broken
        try:
            return self._received(what)
        except BaseException as fault:
            stopped = (
                f"rank {self._service.rank} stopped ({type(fault).__name__}) while it waited "
                f"for rank {self._service.fetcher}, and "
            )
            lost = OverlordError(f"{stopped}cannot find its next frame; join again")
            self._broken = fault if isinstance(fault, Exception) else lost
            raise

    def _received(self, what: str) -> dict[str, Any]:
        who = f"rank {self._service.fetcher}, which fetches for this one, to broadcast {what}"
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._wait(self._broadcast(size), who, frame=self.frames)
        n = int(size)
        room = self._memory(n)[:n]
        tensor = (
            torch.from_numpy(room)
            if self._device.type == "cpu"
            else torch.empty(n, dtype=torch.uint8, device=self._device)
        )
        self._wait(self._broadcast(tensor), who, frame=self.frames)
        if self._device.type != "cpu":
            torch.from_numpy(room).copy_(tensor)
        room.flags.writeable = False
        self.frames, self.nbytes = self.frames + 1, self.nbytes + n
        frame = unpack(room)
        value: dict[str, Any] = decode(frame.header, frame.columns)
        return value

    # both

    def close(self) -> None:
        """Make the current and later waits of all threads raise ``OverlordError``."""
        self._closed = True

    @property
    def held_bytes(self) -> int:
        """Bytes of the frame buffers."""
        return self._memory.nbytes

    def _broadcast(self, tensor: torch.Tensor) -> Any:
        try:
            return dist.broadcast(tensor, self._service.fetcher, group=self._group, async_op=True)
        except (RuntimeError, ValueError) as fault:  # the group, or one of its ranks, is lost
            raise self._lost(fault, self.frames) from fault

    def _wait(self, work: Any, who: str, limit_s: float | None = None, frame: int = 0) -> None:
        check_at, start, limit_s, warn_at = (
            WAIT_S,
            time.monotonic(),
            self._limit_s if limit_s is None else limit_s,
            self._warn_s,
        )
        while not work.is_completed():
            if self._closed:
                raise OverlordError(
                    f"client of rank {self._service.rank}: expected an open one, got a closed one; "
                    "join again"
                )
            if (waited := time.monotonic() - start) >= limit_s:
                raise DataStall(who, waited, rank=self._service.rank)
            if waited >= check_at:
                check_at = waited + WAIT_S
                if (departed := self._departed(frame)) is not None:
                    raise departed
            if waited >= warn_at:
                warn_at = waited + max(1.0, self._warn_s)
                self._warn(who, waited)
            if self._device.type != "cpu":
                time.sleep(POLL_S)
                continue
            try:
                # A timeout of 0 would mean no limit.
                work.wait(timedelta(seconds=max(0.01, min(WAIT_S, limit_s - waited))))
                return
            except RuntimeError as fault:  # a timeout, or a failure
                if work.is_completed():
                    raise self._lost(fault, frame) from fault
        try:
            work.wait()
        except RuntimeError as fault:
            raise self._lost(fault, frame) from fault

    def _departed(self, frame: int) -> ActorLost | None:
        return None if self._departures is None else self._departures.before(frame)

    def _warn(self, who: str, seconds: float) -> None:
        if self._on_stall is not None:
            self._on_stall(who, seconds)
        else:
            log.warning("rank %d has waited %.0f s for %s", self._service.rank, seconds, who)

    def _lost(self, fault: BaseException, frame: int) -> ActorLost:
        """Return the error for a lost rank.

        Without a departure note only the broken connection is known. If there are several other
        ranks, it is unknown which one was lost.
        """
        if (departed := self._departed(frame)) is not None:
            return departed
        others = _others(self._service)
        whom = f"rank {self._service.fetcher}, which fetches for this one,"
        if self._service.fetches:
            whom = ranks(others) if len(others) == 1 else f"one of {ranks(others)}"
        # The first sentence is the error; advice follows it.
        text = shortened(
            SOURCE_LINE.sub("", next(iter(str(fault).splitlines()), "")).partition(". ")[0]
        )
        return ActorLost(
            whom, f"its process has exited, or the network to it has failed; torch reports: {text}"
        )


def _others(service: Service) -> list[int]:
    return [rank for rank in service.members if rank != service.rank]


def portable_error(error: BaseException, rank: int) -> Exception:
    """Return an error that other ranks can raise.

    ``ActorLost`` replaces ``StopIteration``, which would silently end a loop, and exceptions such
    as ``KeyboardInterrupt``, which are not an ``Exception``.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return ActorLost(
        f"rank {rank}, which fetches for this one,", f"it was stopped by {error_text(error)}"
    )
