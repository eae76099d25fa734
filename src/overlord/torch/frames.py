"""What a fetching rank says to the ranks it serves: a frame of bytes, broadcast inside their process group. No pickle.

step      the step of each seat: what is told of it, and its arrays in full; receivers view them, nothing is copied
end       there is no step any more; with the state behind the last one
error     the fetcher failed, and with it the step
loaded    the fetcher loaded a state, as every rank of the group must
refused   it could not load it; the stream goes on as before
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from overlord.channel.codec import decode, encode
from overlord.channel.frame import pack, size_of, unpack
from overlord.constructor.slabs import SlabPool
from overlord.errors import ActorLost, DataStall, OverlordError
from overlord.torch.groups import Service

log = logging.getLogger("overlord")

WARN_S = 30.0  # as a client's: it says what it waits for, again and again
WAIT_S = 0.5  # torch cannot be interrupted in a wait: Ctrl-C is heard between two
POLL_S = 0.001  # between looks at a device's collective, which has no wait of its own
AHEAD = 2  # frames that the fetcher may be ahead of the slowest rank it serves


class Wire:
    """A process group as a one-way channel: one rank says, the others hear. The one who says does not wait for them to listen."""

    def __init__(
        self, service: Service, group: Any, device: torch.device, limit_s: float, *, stall_warn_s: float = WARN_S,
        on_stall: Callable[[str, float], None] | None = None,
    ):  # fmt: skip
        if device.type == "cuda" and device.index is None:  # a thread that prefetches would take the first one, whatever the rank's is
            device = torch.device("cuda", torch.cuda.current_device())
        self._service, self._group, self._device, self._limit_s = service, group, device, limit_s
        self._warn_s, self._on_stall = stall_warn_s, on_stall
        self._memory = SlabPool()
        self._said: deque[tuple[list[Any], list[torch.Tensor]]] = deque()
        self._lock = threading.Lock()  # of ``_said``: who closes waits beside a thread that prefetches
        self._closed = False
        self._broken: Exception | None = None  # why frames cannot be told apart any more
        self.frames = self.nbytes = 0

    # the rank that says

    def say(self, value: Mapping[str, Any]) -> None:
        """To all. Returns before they have it; whoever is slow holds it up when ``AHEAD`` frames are under way."""
        header, columns = encode(dict(value))
        room = self._memory(max(1, size_of(header, columns)))[: size_of(header, columns)]
        at = 0
        for piece in pack(header, columns):
            room[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        tensors = [torch.tensor([len(room)], device=self._device), torch.from_numpy(room).to(self._device)]
        works = [self._broadcast(tensor) for tensor in tensors]
        with self._lock:
            self._said.append((works, tensors))
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
                self._wait(work, f"ranks {_others(self._service)} to take what rank {self._service.rank} broadcasts to them", limit_s)
            with self._lock:
                if self._said and self._said[0] is first:
                    self._said.popleft()

    # the ranks that hear

    def hear(self, what: str) -> dict[str, Any]:
        """The next frame; arrays in it are views of the memory it came into. Whoever stops in the middle of one has lost its place."""
        if self._broken is not None:
            raise self._broken
        try:
            return self._heard(what)
        except BaseException as fault:
            stopped = f"rank {self._service.rank} stopped ({type(fault).__name__}) while it waited for rank {self._service.fetcher}, and "
            lost = OverlordError(f"{stopped}cannot tell any more where what that broadcasts begins: join again")
            self._broken = fault if isinstance(fault, Exception) else lost
            raise

    def _heard(self, what: str) -> dict[str, Any]:
        who = f"rank {self._service.fetcher}, which fetches for this one, to broadcast {what}"
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._wait(self._broadcast(size), who)
        n = int(size)
        room = self._memory(n)[:n]
        tensor = torch.from_numpy(room) if self._device.type == "cpu" else torch.empty(n, dtype=torch.uint8, device=self._device)
        self._wait(self._broadcast(tensor), who)
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
            raise self._lost(fault) from fault

    def _wait(self, work: Any, who: str, limit_s: float | None = None) -> None:
        start, limit_s, warn_at = time.monotonic(), self._limit_s if limit_s is None else limit_s, self._warn_s
        while not work.is_completed():
            if self._closed:
                raise OverlordError(f"the client of rank {self._service.rank} is closed")
            if (waited := time.monotonic() - start) >= limit_s:
                raise DataStall(who, waited, rank=self._service.rank)
            if waited >= warn_at:
                warn_at = waited + max(1.0, self._warn_s)
                self._stalls(who, waited)
            if self._device.type != "cpu":
                time.sleep(POLL_S)
                continue
            try:
                work.wait(timedelta(seconds=max(0.01, min(WAIT_S, limit_s - waited))))  # 0 would mean for ever
                return
            except RuntimeError as fault:  # it lasts, or it failed
                if work.is_completed():
                    raise self._lost(fault) from fault
        try:
            work.wait()
        except RuntimeError as fault:
            raise self._lost(fault) from fault

    def _stalls(self, who: str, seconds: float) -> None:
        if self._on_stall is not None:
            self._on_stall(who, seconds)
        else:
            log.warning("rank %d has waited %.0f s for %s", self._service.rank, seconds, who)

    def _lost(self, fault: BaseException) -> ActorLost:
        whom = (
            f"one of ranks {_others(self._service)}"
            if self._service.fetches
            else f"rank {self._service.fetcher}, which fetches for this one,"
        )
        return ActorLost(whom, f"the broadcast failed: {str(fault).splitlines()[0][:200]}")


def _others(service: Service) -> str:
    return ", ".join(str(rank) for rank in service.members if rank != service.rank)


def as_said(error: BaseException, rank: int) -> Exception:
    """An error in a form that travels, and that ends a loop nowhere in silence."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return ActorLost(
        f"rank {rank}, which fetches for this one,", f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    )
