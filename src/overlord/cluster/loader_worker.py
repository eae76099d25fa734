"""The process of some logical loaders: it reads, announces metadata to the planner, and sends
payload to constructor hosts.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from overlord.cluster.worker import Worker, WorkerConfig
from overlord.constructor.compact import narrowest
from overlord.errors import ActorLost, DataStall, LinkRefused, PlanError
from overlord.job.hooks import Hook, popped_by
from overlord.loader.service import LoaderService
from overlord.messages.control import (
    DropHeldSamples,
    EndOfJob,
    LoaderPlan,
    LoaderStart,
    Refill,
    Rollback,
)
from overlord.messages.loader import Announce, Evaluate, Read, StepPayload
from overlord.process.memory import pss_bytes
from overlord.sample import Content, Ragged, Scattered
from overlord.setup.prepared_job import ReaderSpec, open_loader
from overlord.sources.chunk_reader import OpenChunkCache
from overlord.transforms.transform_process import TransformWorker
from overlord.transport.connection import TIMEOUT, Connection

log = logging.getLogger("overlord")

DIAL_S = 30.0  # for a constructor host to answer a loader host
# for a constructor host to take payload: far above what a step takes, below what a trainer waits
SEND_S = 120.0
# The same where one that is lost is started anew: the pump must not wait so long that this host is
# taken for dead too.
REACH_S = 5.0
JOIN_BELOW = 4096  # values a piece: to look at each takes longer than to copy all once more


class LoaderWorker(Worker):
    """Some logical loaders of a job. ``kits`` are of all sources it may ever have to read: code
    comes with the process, or not at all.
    """

    BACKGROUND = True

    def __init__(
        self,
        number: int,
        settings: WorkerConfig,
        kits: Mapping[int, ReaderSpec],
        openings: Sequence[LoaderStart],
        constructors: Mapping[int, str],
        hooks: Sequence[Hook],
        seed: int,
    ):
        super().__init__(f"loader-host/{number}", settings, links=len(constructors))
        self._number, self._kits, self._hooks, self._seed = number, dict(kits), tuple(hooks), seed
        self._born = settings.born or int(self._machine.now() * 1000)
        self._narrow = settings.narrow
        self._handles = OpenChunkCache(max_open=settings.open_files, max_bytes=settings.open_bytes)
        self._one_worker = settings.one_worker
        self._workers: dict[
            int, TransformWorker
        ] = {}  # by source where its loaders share one, else by loader, as a number below 0
        self._worker_of: dict[int, int] = {}  # which of them every loader has, if any
        self._opens, self._beats = (
            False,
            deque[Future[bool]](),
        )  # a source is being opened; who wants to know whether the pump runs
        self._awaited: list[
            tuple[list[int], Future[bool]]
        ] = []  # shadows that are to take over once they hold enough
        self._failover = settings.failover
        self._loading = LoaderService(self._executor, self.run, keeps=self._failover)
        self._done = -1  # the last step whose part was carried out, since the last Back
        self._ring = self._machine.ring(self.name, settings.ring_bytes)
        self._links: dict[int, Connection] = {}  # by constructor worker
        self._where: dict[int, str] = {}  # and where it is
        self._sent_bytes = 0
        for opening in openings:
            self._open(opening)
        for c, address in constructors.items():
            if self._failover:
                self._reach(c, address, settings.token)
            else:
                self._connect(c, address, settings.token)
        self._start()

    def _connect(self, constructor: int, address: str, token: str) -> None:
        hello = {"role": "loader", "host": self._number, "incarnation": self._born}
        link, _ = self._machine.dial(
            address, token, hello, timeout_s=REACH_S if self._failover else DIAL_S, ring=self._ring
        )
        self._links[constructor] = link
        self._machine.thread(
            lambda: self._listen(constructor, link), f"overlord-link-{constructor}"
        )

    def _reach(self, constructor: int, address: str, token: str) -> None:
        """Connect to a constructor worker, which may be a restarted one. This call may block: no
        step is planned before all workers are connected.
        """
        self._leave(constructor)
        self._where[constructor] = address
        try:
            self._connect(constructor, address, token)
        except (
            ActorLost,
            DataStall,
            LinkRefused,
        ) as fault:  # if it is gone the planner hears of it; if not, the first step for it says so
            name = f"constructor-host/{constructor}"
            log.warning("%s: %s: %s", self.name, name, fault)
            if self._failover:
                self._events.put(("cut", name, str(fault), address))

    def _leave(self, constructor: int) -> None:
        if (link := self._links.pop(constructor, None)) is not None:
            link.close()

    def _listen(self, constructor: int, link: Connection) -> None:
        """Constructors say nothing but which slots are free again."""
        try:
            while link.recv(60.0) is TIMEOUT:
                pass
        except ActorLost as lost:
            log.debug("%s: %s", self.name, lost)
            if self._failover:
                reason = str(lost)
                self._pump.post(lambda: self._cut(constructor, link, reason))

    def _cut(self, constructor: int, link: Connection, reason: str) -> None:
        """What was sent may not have come: the planner is told, which may know more, and goes back
        or links us again.
        """
        if self._links.get(constructor) is link:
            self._leave(constructor)
            self._events.put(
                ("cut", f"constructor-host/{constructor}", reason, self._where.get(constructor, ""))
            )

    def _open(self, opening: LoaderStart) -> None:
        key = opening.source if self._one_worker else -1 - opening.loader
        self._worker_of[opening.loader], shared = key, self._workers.get(key)
        if shared is not None and (not self._one_worker or shared.pid is None):
            self._workers.pop(key).close()
            shared = None
        self._opens = True
        self._answer_beats()
        try:
            loader, reader, worker = open_loader(
                self._kits[opening.source], opening, self._handles, shared
            )
        finally:
            self._opens = False
        if worker is not None:
            self._workers[key] = worker
        self._loading.open(loader, reader)

    def beat(self) -> Future[bool]:
        """While a source is opened the pump stands: processes for its transforms are started there,
        and import what they need. One that does not come to an end is given up by who starts it, so
        this host is not to be missed for it.
        """
        answer = Future[bool]()
        self._beats.append(answer)
        self._pump.post(self._answer_beats)
        if self._opens:
            self._answer_beats()
        return answer

    def _answer_beats(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._beats.popleft().set_result(True)

    def _drop(self, number: int) -> None:
        self._loading.close(number)
        key = self._worker_of.pop(number, None)
        if (
            key is not None
            and key not in self._worker_of.values()
            and (worker := self._workers.pop(key, None)) is not None
        ):
            worker.close()

    def _take(self, message: Any) -> None:
        match message:
            case LoaderPlan():
                self._part(message)
            case Rollback():
                self._back(message)
            case LoaderStart():
                self._open(message)
            case ("follow", LoaderStart() as opening):
                self._queue.extend(self._loading.follow(opening, self._open))
            case ("stand", int(step), LoaderStart() as opening):
                self._queue.extend(self._loading.stand(opening, self._open, step))
            case DropHeldSamples(loaders=loaders):
                self._loading.forget(loaders)
            case Refill(must=must):
                if must:  # the draw waits: perhaps for what is ready, and was not told yet
                    self._events.hurry()
                self._queue.append(message)
            case ("drop", int(number)):
                self._drop(number)
            case ("constructor", int(constructor), str(address), str(token)):
                self._reach(constructor, address, token)
            case ("budget", int(nbytes)):
                for hosted in self._loading.hosted.values():
                    hosted.loader.set_budget(nbytes)
            case _:
                raise TypeError(f"a loader host does not know {type(message).__name__}")

    def _carry_out(self, command: Any) -> None:
        match command:
            case Refill() | Read() | Evaluate():
                self._queue.extend(self._loading.carry_out(command))
            case Announce(loader=loader, found=found):
                hosted = self._loading.hosted.get(loader)
                if hosted is not None and hosted.shadow:
                    return  # it remembers: when it takes the other's place it says it
                self._events.put(
                    command,
                    hurry=found is None or hosted is None or hosted.loader.was_short(len(found)),
                )
            case _:
                raise TypeError(f"a loader host does not carry out {type(command).__name__}")

    def _back(self, back: Rollback) -> None:
        if back.generation > self._loading.generation:
            self._done = back.step
        self._events.hurry()  # everybody waits for what is said again
        self._queue.extend(self._loading.back(back, self._open))

    def _part(self, part: LoaderPlan) -> None:
        """A part planned before the last Back leads to nothing, nor does one that comes twice."""
        self._loading.acked(part.acked)
        if part.generation < self._loading.generation:
            return
        pops = dict(zip(part.loaders.tolist(), part.pops.tolist(), strict=True))
        pops, commands = self._loading.pop_shadows(part.step, pops)
        self._queue.extend(commands)
        if part.step <= self._done or not (pops or part.to or part.kept is not None):
            return
        self._done = part.step
        pieces, commands = self._loading.pop(part.step, pops, part.kept)
        self._queue.extend(commands)
        if part.to:
            size = max(1, sum(p.nbytes for p in pieces))
            self._executor.submit(
                "send",
                lambda: self._send(part, pieces),
                self._sent(part.step),
                size=size,
                urgent=True,
            )

    def caught_up(self, loaders: list[int]) -> Future[bool]:
        """Answered when these loaders hold as much as they were told to: then one of them that
        follows can take over. False: one of them cannot read.
        """
        answer = Future[bool]()
        self._pump.post(lambda: self._awaited.append((loaders, answer)))
        return answer

    def gauge(self) -> Future[list[tuple[int, bool, float, float, int, float, float]]]:
        """For scaling: of every loader what it took, of cores and of time, the samples it made, a
        usual and a slow read.
        """
        answer = Future[list[tuple[int, bool, float, float, int, float, float]]]()
        self._pump.post(lambda: answer.set_result(self._loading.gauge()))
        return answer

    def weighs(self) -> int:
        """Bytes that this process holds, for scaling within a bound. Not in the pump: the system
        counts pages for it.
        """
        return pss_bytes()

    def _after_turn(self) -> float | None:
        if self._awaited:
            over = [
                (waits, found)
                for waits in self._awaited
                if (found := self._loading.caught_up(waits[0])) is not None
            ]
            self._awaited = [
                waits for waits in self._awaited if not any(waits is one for one, _ in over)
            ]
            for (_, answer), found in over:
                answer.set_result(found)
        return super()._after_turn()

    def _send(self, part: LoaderPlan, popped: list[Content]) -> int:
        """Payload into shared memory, one message for each constructor host. Returns the bytes
        sent, counted for each.
        """
        n = 0
        pieces = [p.tokens for p in popped]
        takes: Sequence[np.ndarray | None] = part.take or [None] * len(part.to)
        images = self._images(part, popped)
        if part.plan is not None and part.doc is not None:
            number, tokens = popped_by(
                self._hooks, part.plan, part.doc, Ragged.concat(pieces), self._seed
            )
            takes, pieces = [number[rows] for rows in part.take], [tokens]
        for i, (c, take) in enumerate(zip(part.to, takes, strict=True)):
            tokens = self._in_ring(pieces if take is None else [Ragged.concat(pieces).take(take)])
            items = None if (wanted := images[i]) is None else self._in_ring(wanted)
            n += self._hand(c, StepPayload(part.step, self._number, tokens, part.generation, items))
        return n

    def _images(self, part: LoaderPlan, popped: list[Content]) -> list[Sequence[Ragged] | None]:
        """The bytes of images for each constructor host; None: it gets none from here."""
        found = Scattered.of(popped)
        if not part.items:
            return [None if part.take or found is None else found.parts or None] * len(part.to)
        if found is None or any(
            (number >= found.counts[document]).any() for document, number in part.items
        ):
            raise PlanError(
                "more images are planned than documents have",
                part.step,
                "this is a fault of the package: report it",
            )
        rows = [(found.first[document] + number).tolist() for document, number in part.items]
        return [[_row(found[i]) for i in wanted] or None for wanted in rows]

    def _hand(self, constructor: int, payload: StepPayload) -> int:
        """Send a payload and return its bytes. A lost constructor worker is an error, unless it can
        be restarted: then this payload is dropped, and the rollback that follows sends it again.
        """
        try:
            if (link := self._links.get(constructor)) is None:
                raise ActorLost("", f"{self.name} could not reach it")
            link.send(payload, timeout_s=REACH_S if self._failover else SEND_S)
            return payload.tokens.nbytes + (0 if payload.items is None else payload.items.nbytes)
        except DataStall as stall:
            if not self._failover or link is None:
                raise
            slow, reason = link, str(stall)
            self._pump.post(lambda: self._cut(constructor, slow, reason))
            return 0
        except ActorLost as lost:
            if self._failover:
                return 0
            raise ActorLost(f"constructor-host/{constructor}", lost.reason) from lost

    def _in_ring(self, pieces: Sequence[Ragged]) -> Ragged:
        """Pieces as one, their values in a slot of the ring: the one copy on the way to the
        constructor. Where there is no room they lie in this process and are copied once more: to
        wait for a slot would be to wait for the trainer, or for what stands behind us.
        """
        spans = [p.values[p.offsets.item(0) : p.offsets.item(-1)] for p in pieces]
        if sum(map(len, spans)) < JOIN_BELOW * len(spans):
            spans = [np.concatenate(spans)]
        dtype = (
            narrowest(spans) if self._narrow else np.result_type(*(span.dtype for span in spans))
        )
        total = sum(map(len, spans))
        room = self._ring.take(max(1, total * dtype.itemsize))
        values = (
            np.empty(total, dtype) if room is None else room[: total * dtype.itemsize].view(dtype)
        )
        np.concatenate(spans, out=values, casting="unsafe")  # that they fit was seen
        ends = np.concatenate([p.offsets for p in pieces])
        # between pieces there is none
        lengths = np.delete(
            ends[1:] - ends[:-1], np.cumsum([len(p) + 1 for p in pieces[:-1]], dtype=np.int64) - 1
        )
        return Ragged(values, np.concatenate([[0], np.cumsum(lengths)]))

    def _sent(self, step: int) -> Any:
        def done(outcome: Any, error: BaseException | None) -> None:
            self._sent_bytes += outcome or 0
            if isinstance(error, Exception):
                self._events.put(EndOfJob(step, error))

        return done

    def figures(self) -> dict[str, Any]:
        """What it does and holds, as plain values."""
        return self._pump.ask(
            lambda: {
                "pid": os.getpid(),
                "node": self._machine.node(),
                "loaders": self._loading.figures(),
                "busy": self._loading.busy(),
                "memory": self._loading.held_bytes()
                | {"sending": self._ring.nbytes},  # of shared memory, in use and free
                "files": self._handles.metrics(),
                "pss": pss_bytes(),
                "links": len(self._links),
                "sent_bytes": self._sent_bytes,
            },
            "the loader host's pump",
            5.0,
        )

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


def _row(values: np.ndarray) -> Ragged:
    return Ragged(values, np.array([0, len(values)], np.int64))
