"""The actors of a job that runs in several processes: hosts of logical loaders, and hosts of constructors.

Each is a pump with some cores in it. What the planner says comes by ``do``; what it is to know goes by ``events``, a call that is
answered when there is something to tell. Payload goes from loader hosts to constructor hosts through links, never through here.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from overlord.channel.link import TIMEOUT, Link
from overlord.channel.ring import Ring
from overlord.channel.server import Server, dial
from overlord.constructor.assembler import Assembler
from overlord.errors import ActorLost, DataStall, OverlordError
from overlord.hooks import Hook, popped_by
from overlord.job import Batch
from overlord.messages import (
    Announce,
    Attach,
    Build,
    Consumed,
    Deliver,
    Detach,
    End,
    Evaluate,
    Finish,
    Forget,
    Opening,
    Part,
    Payload,
    Placed,
    Read,
    Refill,
    Release,
)  # fmt: skip
from overlord.observe.memory import pss_bytes
from overlord.runtime.bootstrap import SourceKit, open_loader
from overlord.runtime.building import Building
from overlord.runtime.carrier import Carrier
from overlord.runtime.delivery import Delivery, Slabs
from overlord.runtime.gathering import Gathering, check_payload
from overlord.runtime.loading import Loading
from overlord.runtime.local import Pump, ThreadExecutor
from overlord.sample import Ragged
from overlord.sources.handles import HandleCache
from overlord.transforms.worker import TransformWorker

log = logging.getLogger("overlord")

DIAL_S = 30.0  # for a constructor host to answer a loader host
MAX_SLOTS = 4096  # far above the steps of a prefetch window times the constructor hosts; bytes are what is bounded
SEND_S = 120.0  # for a constructor host to take payload: far above what a step takes, below what a trainer waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all hosts are told when they are started."""

    name: str  # of the job
    token: str = field(repr=False)
    generation: int = 0  # of the session: whoever comes for another one is refused
    workers: int = 1  # threads of this host
    open_files: int = 512
    open_bytes: int = 2**28
    ring_bytes: int = 2**30
    build_ahead: int = 2
    check: bool = False


class Events:
    """What happened and was not asked for yet. Filled in the pump, asked for by the actor's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._happened: list[Any] = []
        self._asked: Future[list[Any]] | None = None

    def put(self, event: Any) -> None:
        with self._lock:
            self._happened.append(event)

    def ask(self) -> Future[list[Any]]:
        with self._lock:
            self._asked = asked = Future[list[Any]]()
        self.answer()
        return asked

    def answer(self) -> None:
        """Called when the pump has done a piece of work: what it led to is told together."""
        with self._lock:
            if self._asked is None or not self._happened:
                return
            asked, happened, self._asked, self._happened = self._asked, self._happened, None, []
        asked.set_result(happened)


class HostActor(Carrier):
    """A pump, threads that work for it, and what happened in it."""

    def __init__(self, name: str, settings: Settings):
        super().__init__(check=settings.check)
        self.name, self._events = name, Events()
        self._pump = Pump(name)
        self._executor = ThreadExecutor(settings.workers, self._pump)

    def _start(self) -> None:
        self._pump.start(self._broke, self._after_turn)

    def _broke(self, error: BaseException) -> None:
        """A core is broken: nothing this process holds can be trusted. Its death is seen at once, its silence only by a deadline."""
        log.critical("%s ends itself: %s: %s", self.name, type(error).__name__, error)
        os._exit(70)

    def _after_turn(self) -> None:
        self._events.answer()

    def do(self, messages: Sequence[Any]) -> None:
        self._pump.post(lambda: self._do(messages))

    def _do(self, messages: Sequence[Any]) -> None:
        for message in messages:
            self._take(message)
        self.run()

    def _take(self, message: Any) -> None:
        raise NotImplementedError

    def events(self) -> Future[list[Any]]:
        return self._events.ask()

    def close(self) -> None:
        self._pump.stop()
        self._executor.close()


class LoaderHost(HostActor):
    """Some logical loaders of a job. ``kits`` are of all sources it may ever have to read: code comes with the process, or not at all."""

    def __init__(
        self, number: int, settings: Settings, kits: Mapping[int, SourceKit], openings: Sequence[Opening], constructors: Mapping[int, str],
        hooks: Sequence[Hook], seed: int,
    ):  # fmt: skip
        super().__init__(f"loader-host/{number}", settings)
        self._number, self._kits, self._hooks, self._seed = number, dict(kits), tuple(hooks), seed
        self._handles = HandleCache(max_open=settings.open_files, max_bytes=settings.open_bytes)
        self._workers: dict[int, TransformWorker] = {}
        self._loading = Loading(self._executor, self.run)
        self._ring = Ring(name=self.name, max_bytes=settings.ring_bytes, max_slots=MAX_SLOTS)
        self._links: dict[int, Link] = {}  # by constructor host; without constructors by rank
        self._clients: set[int] = set()  # ranks that were reached, where they build themselves
        self._kind = "constructor-host" if constructors else "client"
        self._sent_bytes = 0
        for opening in openings:
            self._open(opening)
        for c, address in constructors.items():
            self._connect(c, address, settings.token)
        self._start()

    def _connect(self, constructor: int, address: str, token: str) -> None:
        hello = {"role": "loader", "host": self._number}
        link, _ = dial(address, token, hello, timeout_s=DIAL_S, ring=self._ring)
        self._links[constructor] = link
        threading.Thread(target=self._listen, args=(link,), name=f"overlord-link-{constructor}", daemon=True).start()

    def _reach(self, rank: int, address: str, token: str) -> None:
        """Without constructors a client is one. No step is planned before all are linked, so this may wait."""
        self._leave(rank)
        try:
            self._connect(rank, address, token)
            self._clients.add(rank)
        except (ActorLost, DataStall) as fault:  # if it is gone the planner hears of it; if not, the first step for it says so
            log.warning("%s: client/%d: %s", self.name, rank, fault)

    def _leave(self, rank: int) -> None:
        if (link := self._links.pop(rank, None)) is not None:
            link.close()

    def _listen(self, link: Link) -> None:
        """Constructors say nothing but which slots are free again."""
        try:
            while link.recv(60.0) is TIMEOUT:
                pass
        except ActorLost as lost:
            log.debug("%s: %s", self.name, lost)

    def _open(self, opening: Opening) -> None:
        if (worker := self._workers.pop(opening.loader, None)) is not None:
            worker.close()
        loader, reader, worker = open_loader(self._kits[opening.source], opening, self._handles)
        if worker is not None:
            self._workers[opening.loader] = worker
        self._loading.open(loader, reader)

    def _take(self, message: Any) -> None:
        match message:
            case Part():
                self._part(message)
            case Opening():
                self._open(message)
            case Forget(loaders=loaders):
                self._loading.forget(loaders)
            case Refill():
                self._queue.append(message)
            case ("drop", int(number)):
                self._loading.close(number)
                if (worker := self._workers.pop(number, None)) is not None:
                    worker.close()
            case ("constructor", int(rank), str(address), str(token)):
                self._reach(rank, address, token)
            case ("leave", int(rank)):
                self._leave(rank)
            case ("budget", int(nbytes)):
                for hosted in self._loading.hosted.values():
                    hosted.loader.set_budget(nbytes)
            case _:
                raise TypeError(f"a loader host does not know {type(message).__name__}")

    def _carry_out(self, command: Any) -> None:
        match command:
            case Refill() | Read() | Evaluate():
                self._queue.extend(self._loading.carry_out(command))
            case Announce():
                self._events.put(command)
            case _:
                raise TypeError(f"a loader host does not carry out {type(command).__name__}")

    def _part(self, part: Part) -> None:
        pops = dict(zip(part.loaders.tolist(), part.pops.tolist(), strict=True))
        pieces, commands = self._loading.pop(part.step, pops, part.kept)
        self._queue.extend(commands)
        if part.to:
            size = max(1, sum(p.nbytes for p in pieces))
            self._executor.submit("send", lambda: self._send(part, pieces), self._sent(part.step), size=size, urgent=True)

    def _send(self, part: Part, pieces: list[Ragged]) -> int:
        """Payload into shared memory, one message for each constructor host. Returns the bytes sent, counted for each."""
        n = 0
        takes: Sequence[np.ndarray | None] = part.take or [None] * len(part.to)
        if part.plan is not None and part.doc is not None:
            number, tokens = popped_by(self._hooks, part.plan, part.doc, Ragged.concat(pieces), self._seed)
            takes, pieces = [number[rows] for rows in part.take], [tokens]
        for i, (c, take) in enumerate(zip(part.to, takes, strict=True)):
            if i == 0 or not np.array_equal(take, takes[i - 1]):  # type: ignore[arg-type]
                tokens = self._in_ring(pieces if take is None else [Ragged.concat(pieces).take(take)])
            # else: without constructors the ranks of a group get the same, which lies in shared memory once
            n += self._hand(c, Payload(part.step, self._number, tokens))
        return n

    def _hand(self, constructor: int, payload: Payload) -> int:
        """Bytes sent. Clients may leave, and of one that died the planner hears by itself; a constructor host must be there."""
        try:
            if (link := self._links.get(constructor)) is None:
                raise ActorLost("", f"{self.name} could not reach it")
            link.send(payload, timeout_s=SEND_S)
            return payload.tokens.nbytes
        except ActorLost as lost:
            if constructor in self._clients:
                return 0
            raise ActorLost(f"{self._kind}/{constructor}", lost.reason) from lost

    def _in_ring(self, pieces: Sequence[Ragged]) -> Ragged:
        """Pieces as one, their values in a slot of the ring: the one copy on the way to the constructor."""
        dtype = np.result_type(*(p.values.dtype for p in pieces))
        spans = [p.values[int(p.offsets[0]) : int(p.offsets[-1])] for p in pieces]
        total = sum(map(len, spans))
        values = self._ring(max(1, total * dtype.itemsize))[: total * dtype.itemsize].view(dtype)
        np.concatenate(spans, out=values)
        lengths = np.concatenate([p.lengths for p in pieces])
        return Ragged(values, np.concatenate([[0], np.cumsum(lengths)]))

    def _sent(self, step: int) -> Any:
        def done(outcome: Any, error: BaseException | None) -> None:
            self._sent_bytes += outcome or 0
            if isinstance(error, Exception):
                self._events.put(Finish(step, error))

        return done

    def figures(self) -> dict[str, Any]:
        """What it does and holds, as plain values."""
        return self._pump.ask(
            lambda: {
                "pid": os.getpid(), "loaders": self._loading.figures(), "busy": self._loading.busy(),
                "memory": self._loading.held_bytes() | {"sending": self._ring.nbytes},  # of shared memory, in use and free
                "files": self._handles.metrics(), "pss": pss_bytes(),
                "links": len(self._links), "sent_bytes": self._sent_bytes,
            }, "the loader host's pump", 5.0,
        )  # fmt: skip

    def close(self) -> None:
        super().close()
        for link in self._links.values():
            link.close()
        for worker in self._workers.values():
            worker.close()
        self._handles.close()
        self._ring.close()

    def check(self) -> None:
        self._loading.check()


class ConstructorHost(HostActor):
    """The constructors of some buckets, and the memory their clients read from."""

    def __init__(
        self, number: int, settings: Settings, buckets: Mapping[int, Sequence[int]], batch: Batch, multiple: int, hooks: Sequence[Hook]
    ):
        super().__init__(f"constructor-host/{number}", settings)
        self._ring = Ring(name=self.name, max_bytes=settings.ring_bytes, max_slots=MAX_SLOTS)
        self._session = settings.generation
        # Building never waits for a slot: short work is done in the pump, and without the pump no slot is let go.
        self._building = Building(
            [Assembler(b, ranks, settings.build_ahead) for b, ranks in buckets.items()], batch=batch, multiple=multiple,
            executor=self._executor, run=self.run,
            cannot=self._events.put, hooks=hooks, slabs=Slabs(self._ring),
        )  # fmt: skip
        self._delivery = Delivery(took=self._heard)
        self._news, self._news_lock = dict[int, int](), threading.Lock()  # what clients took and the pump has not seen yet
        for rank in self._building.bucket_of:  # clients may come before the planner has told of them
            self._delivery.box(rank, settings.generation)
        self._gathering = Gathering(self._building)
        self._loaders: dict[Link, int] = {}
        self._taken: dict[int, int] = {}
        self._told = -1  # the last step all took, as the planner knows
        self._said: dict[int, int] = {}  # and the last that each took
        self._servers = [self._serve(settings.token, tcp=False)]
        self._token = settings.token
        self._start()

    def _serve(self, token: str, **where: Any) -> Server:
        return Server(token=token, on_message=self._message, on_open=self._opened, on_close=self._closed, ring=self._ring, **where)

    def listen(self, host: str) -> str:
        """Take clients of other machines too, at this interface; where they find it."""
        self._servers.append(self._serve(self._token, host=host))
        return self._servers[-1].address

    def address(self) -> str:
        return self._servers[0].address

    # links, in the server's thread

    def _opened(self, link: Link, hello: Mapping[str, Any]) -> dict[str, Any]:
        if hello.get("role") == "loader":
            host = hello.get("host")
            if type(host) is not int or host < 0 or host in self._loaders.values():
                raise OverlordError(f"wanted the number of a loader host that is not linked yet, found {host!r:.60}")
            self._loaders[link] = host
            return {}
        return self._delivery.opened(link, dict(hello))

    def _message(self, link: Link, value: Any) -> None:
        if (host := self._loaders.get(link)) is not None:
            if not isinstance(value, Payload):
                raise OverlordError(f"wanted payload of loader-host/{host}, found {type(value).__name__}")
            check_payload(value, host)
            self._pump.post(lambda: self.run(self._gathering.payload(value)))
        else:
            self._delivery.message(link, value)

    def _closed(self, link: Link, reason: str) -> None:
        host = self._loaders.pop(link, None)
        if host is None:
            self._delivery.closed(link, reason)
        else:
            self._pump.post(lambda: self.run(self._gathering.lost(host, reason)))

    def _heard(self, rank: int, step: int) -> None:
        """All ranks of a host take a step at about the same time: the pump is woken once for them."""
        with self._news_lock:
            woken = bool(self._news)
            self._news[rank] = step
        if not woken:
            self._pump.post(self._took)

    # what comes in, in the pump

    def _take(self, message: Any) -> None:
        match message:
            case Placed():
                self._queue.extend(self._gathering.plan(message))
            case Attach(rank=rank):
                self._taken.setdefault(rank, -1)
                self._queue.extend(self._building.attach({rank: self._delivery.box(rank, self._session)}))
            case Detach(rank=rank):
                self._taken.pop(rank, None)
                self._queue.extend(self._building.detach(rank))
                self._tell()
            case Finish():
                self._queue.extend(self._gathering.finish(message))
            case _:
                raise TypeError(f"a constructor host does not know {type(message).__name__}")

    def _took(self) -> None:
        with self._news_lock:
            news, self._news = self._news, {}
        commands: list[Any] = []
        for rank, step in news.items():
            if step > self._taken.get(rank, step):
                self._taken[rank] = step
                commands += self._building.consumed([rank], step)
        self.run(commands)
        self._tell()

    def _tell(self) -> None:
        """The planner hears when the slowest has moved on: it plans for no one else."""
        slowest = min(self._taken.values(), default=-1)
        if slowest > self._told:
            self._told = slowest
            for rank, step in self._taken.items():
                if step > self._said.get(rank, -1):
                    self._said[rank] = step
                    self._events.put(Consumed(rank, step))

    def _carry_out(self, command: Any) -> None:
        match command:
            case Build() | Deliver() | End() | Release():
                self._building.carry_out(command, self._queue)
            case _:
                raise TypeError(f"a constructor host does not carry out {type(command).__name__}")

    def _after_turn(self) -> None:
        super()._after_turn()
        for link in list(self._loaders):  # slots whose payload has been built into microbatches
            link.flush()

    # what people ask

    def why(self, rank: int) -> str:
        """What the rank's next step waits for here, in words; empty when no step is planned."""
        return self._pump.ask(lambda: self._gathering.waiting() or self._building.waiting(rank), "the constructor host's pump", 1.0)

    def figures(self) -> dict[str, Any]:
        return self._pump.ask(
            lambda: {
                "pid": os.getpid(), "constructors": self._building.figures(), "memory": self._building.held_bytes(), "pss": pss_bytes(),
                "clients": self._delivery.figures(), "links": len([link for server in self._servers for link in server.links]),
            }, "the constructor host's pump", 5.0,
        )  # fmt: skip

    def close(self) -> None:
        super().close()
        for server in self._servers:
            server.close()
        self._ring.close()

    def check(self) -> None:
        self._building.check()
