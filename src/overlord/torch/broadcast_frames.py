"""What a fetching rank says to the ranks it serves: a frame of bytes, broadcast inside their
process group. No pickle.

step      the step of each seat: what is told of it, and its arrays in full; receivers view them, nothing is copied
end       there is no step any more; with the state behind the last one
error     the fetcher failed, and with it the step
loaded    the fetcher loaded a state, as every rank of the group must
refused   it could not load it; the stream goes on as before
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
from overlord.torch.departures import Departures, in_short, shortened
from overlord.torch.process_groups import Service
from overlord.transport.codec import decode, encode
from overlord.transport.frame import pack, size_of, unpack

log = logging.getLogger("overlord")

WAIT_S = 0.5  # torch cannot be interrupted in a wait: Ctrl-C is heard between two, and who has left
POLL_S = 0.001  # between looks at a device's collective, which has no wait of its own
AHEAD = 2  # frames that the fetcher may be ahead of the slowest rank it serves
SOURCE_LINE = re.compile(
    r"^\[[^\]]*:\d+\]\s*"
)  # where in its own source a library was when it failed


class FrameBroadcast:
    """A process group as a one-way channel: one rank says, the others hear. The one who says does
    not wait for them to listen.
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
        farewells: Departures | None = None,
    ):
        if (
            device.type == "cuda" and device.index is None
        ):  # a thread that prefetches would take the first one, whatever the rank's is
            device = torch.device("cuda", torch.cuda.current_device())
        self._service, self._group, self._device, self._limit_s = service, group, device, limit_s
        self._warn_s, self._on_stall, self._farewells = stall_warn_s, on_stall, farewells
        self._memory = BufferPool()
        self._said: deque[tuple[list[Any], list[torch.Tensor], int]] = deque()
        self._lock = (
            threading.Lock()
        )  # of ``_said``: who closes waits beside a thread that prefetches
        self._closed = False
        self._broken: Exception | None = None  # why frames cannot be told apart any more
        self.frames = self.nbytes = 0

    # the rank that says

    def say(self, value: Mapping[str, Any]) -> None:
        """To all. Returns before they have it; whoever is slow holds it up when ``AHEAD`` frames
        are under way.
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
            self._said.append((works, tensors, self.frames))
        self.frames, self.nbytes = self.frames + 1, self.nbytes + len(room)
        self.flush(AHEAD)

    def flush(self, left: int = 0, limit_s: float | None = None) -> None:
        """Wait until no more than so many frames are under way."""
        while True:
            with self._lock:
                if len(self._said) <= left:
                    return
                first = self._said[0]
            for work in first[0]:
                self._wait(
                    work,
                    f"{ranks(_others(self._service))} to take what rank "
                    f"{self._service.rank} broadcasts",
                    limit_s,
                    first[2],
                )
            with self._lock:
                if self._said and self._said[0] is first:
                    self._said.popleft()

    # the ranks that hear

    def hear(self, what: str) -> dict[str, Any]:
        """The next frame; arrays in it are views of the memory it came into. Whoever stops in the
        middle of one has lost its place.
        """
        if self._broken is not None:
            raise self._broken
        try:
            return self._heard(what)
        except BaseException as fault:
            stopped = (
                f"rank {self._service.rank} stopped ({type(fault).__name__}) while it waited "
                f"for rank {self._service.fetcher}, and "
            )
            lost = OverlordError(
                f"{stopped}cannot tell any more where what that broadcasts begins: join again"
            )
            self._broken = fault if isinstance(fault, Exception) else lost
            raise

    def _heard(self, what: str) -> dict[str, Any]:
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
        """Whoever waits here, in another thread, need not wait any more."""
        self._closed = True

    @property
    def held_bytes(self) -> int:
        return self._memory.nbytes

    def _broadcast(self, tensor: torch.Tensor) -> Any:
        try:
            return dist.broadcast(tensor, self._service.fetcher, group=self._group, async_op=True)
        except (RuntimeError, ValueError) as fault:  # the group is gone, or one of it
            raise self._lost(fault, self.frames) from fault

    def _wait(self, work: Any, who: str, limit_s: float | None = None, frame: int = 0) -> None:
        look_at, start, limit_s, warn_at = (
            WAIT_S,
            time.monotonic(),
            self._limit_s if limit_s is None else limit_s,
            self._warn_s,
        )
        while not work.is_completed():
            if self._closed:
                raise OverlordError(f"the client of rank {self._service.rank} is closed")
            if (waited := time.monotonic() - start) >= limit_s:
                raise DataStall(who, waited, rank=self._service.rank)
            if waited >= look_at:
                look_at = waited + WAIT_S
                if (left := self._left(frame)) is not None:
                    raise left
            if waited >= warn_at:
                warn_at = waited + max(1.0, self._warn_s)
                self._stalls(who, waited)
            if self._device.type != "cpu":
                time.sleep(POLL_S)
                continue
            try:
                work.wait(
                    timedelta(seconds=max(0.01, min(WAIT_S, limit_s - waited)))
                )  # 0 would mean for ever
                return
            except RuntimeError as fault:  # it lasts, or it failed
                if work.is_completed():
                    raise self._lost(fault, frame) from fault
        try:
            work.wait()
        except RuntimeError as fault:
            raise self._lost(fault, frame) from fault

    def _left(self, frame: int) -> ActorLost | None:
        return None if self._farewells is None else self._farewells.before(frame)

    def _stalls(self, who: str, seconds: float) -> None:
        if self._on_stall is not None:
            self._on_stall(who, seconds)
        else:
            log.warning("rank %d has waited %.0f s for %s", self._service.rank, seconds, who)

    def _lost(self, fault: BaseException, frame: int) -> ActorLost:
        """Who went without a word is known by the broken connection alone, and among several not
        even who it was.
        """
        if (left := self._left(frame)) is not None:
            return left
        others = _others(self._service)
        whom = f"rank {self._service.fetcher}, which fetches for this one,"
        if self._service.fetches:
            whom = ranks(others) if len(others) == 1 else f"one of {ranks(others)}"
        text = shortened(
            SOURCE_LINE.sub("", next(iter(str(fault).splitlines()), "")).partition(". ")[0]
        )  # then it gives advice
        return ActorLost(
            whom, f"its process has ended, or the network between has failed; torch says: {text}"
        )


def _others(service: Service) -> list[int]:
    return [rank for rank in service.members if rank != service.rank]


def as_said(error: BaseException, rank: int) -> Exception:
    """An error in a form that travels, and that ends a loop nowhere in silence."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return ActorLost(
        f"rank {rank}, which fetches for this one,", f"it was stopped by {in_short(error)}"
    )
