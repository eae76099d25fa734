"""The process that runs some of a job's loaders.

It reads samples, announces their metadata to the planner, and sends payload to constructor workers.
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
from overlord.constructor.compact import smallest_id_type
from overlord.content import Content, Scattered
from overlord.errors import ActorLost, DataStall, LinkRefused, PlanError
from overlord.job.hooks import Hook, ordered_weights, popped_by
from overlord.loader.service import LoaderService
from overlord.messages.batches import Refills
from overlord.messages.control import (
    ConnectConstructor,
    ConnectionLost,
    DropHeldSamples,
    DropLoader,
    EndOfJob,
    FollowLoader,
    LoaderPlan,
    LoaderStart,
    Refill,
    Rollback,
    SetBufferBudget,
    TakeOverLoader,
)
from overlord.messages.data import Announce, Evaluate, LoaderWork, Read, StepPayload
from overlord.sample import Ragged
from overlord.setup.prepared_job import ReaderSpec, open_loader
from overlord.sources.chunk_reader import OpenChunkCache
from overlord.transforms.transform_process import TransformWorker
from overlord.transport.connection import TIMEOUT, Connection

log = logging.getLogger("overlord")

DIAL_S = 30.0  # for a constructor worker to accept a connection
# for a constructor worker to receive payload: far above the time of a step, below stall_limit_s
SEND_S = 120.0
# Both limits with failover. A longer wait blocks the event loop, and the coordinator kills a
# worker whose loop is blocked.
REACH_S = 5.0
JOIN_BELOW = 4096  # values per piece: smaller pieces are joined first, which costs less


class LoaderWorker(Worker):
    """The process of some loaders of a job.

    ``reader_specs`` has all sources that this worker may ever read: a process receives code only
    at its start.
    """

    BACKGROUND = True

    def __init__(
        self,
        number: int,
        settings: WorkerConfig,
        reader_specs: Mapping[int, ReaderSpec],
        openings: Sequence[LoaderStart],
        constructors: Mapping[int, str],
        hooks: Sequence[Hook],
        seed: int,
    ):
        super().__init__(f"loader-worker/{number}", settings, links=len(constructors))
        self._number, self._reader_specs, self._hooks, self._seed = (
            number,
            dict(reader_specs),
            tuple(hooks),
            seed,
        )
        self._incarnation = settings.incarnation or int(self._platform.now() * 1000)
        self._narrow = settings.narrow
        self._handles = OpenChunkCache(max_open=settings.open_files, max_bytes=settings.open_bytes)
        self._one_worker = settings.one_worker
        # transform workers, by source if its loaders share one, otherwise by -1 - loader
        self._workers: dict[int, TransformWorker] = {}
        self._worker_of: dict[int, int] = {}  # the key of every loader's transform worker
        self._opens = False  # a source is being opened, which blocks the event loop
        self._beats = deque[Future[bool]]()  # heartbeats to answer
        # pending calls of ``caught_up``: their loaders, and their answer
        self._awaited: list[tuple[list[int], Future[bool]]] = []
        self._failover = settings.failover
        self._loading = LoaderService(self._executor, self.run, keeps=self._failover)
        self._done = -1  # the last step whose plan was executed since the last rollback
        self._pool = self._platform.memory_pool(self.name, settings.ring_bytes)
        self._links: dict[int, Connection] = {}  # by constructor worker
        self._addresses: dict[int, str] = {}  # of constructor workers
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
        hello = {"role": "loader", "host": self._number, "incarnation": self._incarnation}
        link, _ = self._platform.open_connection(
            address, token, hello, timeout_s=REACH_S if self._failover else DIAL_S, pool=self._pool
        )
        self._links[constructor] = link
        self._platform.thread(
            lambda: self._listen(constructor, link), f"overlord-link-{constructor}"
        )

    def _reach(self, constructor: int, address: str, token: str) -> None:
        """Connect to a constructor worker. With failover, report a failure to the coordinator.

        This call may block: no step is planned before all workers are connected.
        """
        self._leave(constructor)
        self._addresses[constructor] = address
        try:
            self._connect(constructor, address, token)
        except (ActorLost, DataStall, LinkRefused) as fault:
            # without failover, the first payload for it ends the job
            name = f"constructor-worker/{constructor}"
            log.warning("%s could not connect to %s: %s", self.name, name, fault)
            if self._failover:
                self._events.put(ConnectionLost(name, str(fault), address))

    def _leave(self, constructor: int) -> None:
        if (link := self._links.pop(constructor, None)) is not None:
            link.close()

    def _listen(self, constructor: int, link: Connection) -> None:
        """Receive releases of shared memory from a constructor worker until its connection ends.

        Runs on: a thread of its own.
        """
        try:
            while link.recv(60.0) is TIMEOUT:
                pass
        except ActorLost as lost:
            log.debug(
                "connection of %s to constructor-worker/%d lost: %s", self.name, constructor, lost
            )
            if self._failover:
                reason = str(lost)
                self._event_loop.post(lambda: self._disconnect(constructor, link, reason))

    def _disconnect(self, constructor: int, link: Connection, reason: str) -> None:
        """Close a lost connection and report it: payload may be lost with it."""
        if self._links.get(constructor) is link:
            self._leave(constructor)
            self._events.put(
                ConnectionLost(
                    f"constructor-worker/{constructor}",
                    reason,
                    self._addresses.get(constructor, ""),
                )
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
                self._reader_specs[opening.source], opening, self._handles, shared
            )
        finally:
            self._opens = False
        if worker is not None:
            self._workers[key] = worker
        self._loading.open(loader, reader)

    def beat(self) -> Future[bool]:
        """Return a future that the event loop sets; while a source is opened, it is set at once.

        Opening blocks the loop: transform processes start and import their modules. A start has its
        own deadline, so heartbeats must not fail during it.
        """
        answer = Future[bool]()
        self._beats.append(answer)
        self._event_loop.post(self._answer_beats)
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
                self._execute_plan(message)
            case Rollback():
                self._roll_back(message)
            case LoaderStart():
                self._open(message)
            case FollowLoader(start=opening):
                self.commands.queue.extend(self._loading.attach_standby(opening, self._open))
            case TakeOverLoader(step=step, start=opening):
                self.commands.queue.extend(self._loading.promote(opening, self._open, step))
            case DropHeldSamples(loaders=loaders):
                self._loading.forget(loaders)
            case Refill(must=must):
                if must:  # the draw waits, perhaps for samples that are ready and not announced yet
                    self._events.hurry()
                self.commands.queue.append(message)
            case Refills():
                for refill in message.split():
                    self._take(refill)
            case DropLoader(loader=number):
                self._drop(number)
            case ConnectConstructor(constructor=constructor, address=address, token=token):
                self._reach(constructor, address, token)
            case SetBufferBudget(nbytes=nbytes):
                for hosted in self._loading.slots.values():
                    hosted.loader.set_budget(nbytes)
            case _:
                raise TypeError(
                    f"{self.name}: expected a message to a loader worker, got "
                    f"{type(message).__name__}; this is a bug in Overlord: report it"
                )

    def _execute(self, command: Any) -> None:
        match command:
            case Refill() | Read() | Evaluate():
                self.commands.queue.extend(self._loading.execute(command))
            case Announce(loader=loader, found=found):
                hosted = self._loading.slots.get(loader)
                if hosted is not None and hosted.standby:
                    return  # a standby announces its samples when it is promoted
                self._events.put(
                    command,
                    hurry=found is None or hosted is None or hosted.loader.was_short(len(found)),
                )
            case _:
                raise TypeError(
                    f"{self.name}: expected a loader command, got {type(command).__name__}; "
                    "this is a bug in Overlord: report it"
                )

    def _roll_back(self, rollback: Rollback) -> None:
        if rollback.generation > self._loading.generation:
            self._done = rollback.step
        self._events.hurry()  # the next plan waits for the announcements
        self.commands.queue.extend(self._loading.rollback(rollback, self._open))

    def _execute_plan(self, routed: LoaderPlan) -> None:
        """Pop and send the samples of a plan; ignore repeated plans and earlier generations."""
        self._loading.acked(routed.acked)
        if routed.generation < self._loading.generation:
            return
        pops = dict(zip(routed.loaders.tolist(), routed.pops.tolist(), strict=True))
        pops, commands = self._loading.pop_standbys(routed.step, pops)
        self.commands.queue.extend(commands)
        if routed.step <= self._done or not (pops or routed.to or routed.kept is not None):
            return
        self._done = routed.step
        pieces, commands = self._loading.pop(routed.step, pops, routed.kept)
        self.commands.queue.extend(commands)
        if routed.to:
            size = max(1, sum(p.nbytes for p in pieces))
            self._executor.submit(
                "send",
                lambda: self._send(routed, pieces),
                self._sent(routed.step),
                size=size,
                urgent=True,
            )

    def caught_up(self, loaders: list[int]) -> Future[bool]:
        """Return a future: True once these loaders hold the requested samples, False if one failed.

        True means that standbys among them can take over. Loaders that this worker does not have
        are ignored.
        """
        answer = Future[bool]()
        self._event_loop.post(lambda: self._awaited.append((loaders, answer)))
        return answer

    def work(self) -> Future[list[LoaderWork]]:
        """Return a future of the statistics of every loader, for the autoscaler."""
        answer = Future[list[LoaderWork]]()
        self._event_loop.post(lambda: answer.set_result(self._loading.work()))
        return answer

    def pss_bytes(self) -> int:
        """Return the memory of this process in bytes, for the memory bound of the autoscaler.

        Runs on: RPC thread, since the kernel counts pages for this, which takes time.
        """
        return self._platform.pss_bytes()

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

    def _send(self, routed: LoaderPlan, popped: list[Content]) -> int:
        """Copy payload into shared memory, send it to constructors, and return the bytes sent."""
        n = 0
        pieces, weights = [p.tokens for p in popped], Content.weights_of(popped)
        takes: Sequence[np.ndarray | None] = routed.take or [None] * len(routed.to)
        images = self._images(routed, popped)
        if routed.plan is not None and routed.doc is not None:
            number, tokens = popped_by(
                self._hooks, routed.plan, routed.doc, Ragged.concat(pieces), self._seed
            )
            takes, pieces = [number[rows] for rows in routed.take], [tokens]
            weights = ordered_weights(routed.plan, routed.doc, weights)
        for i, (c, take) in enumerate(zip(routed.to, takes, strict=True)):
            spans = routed.spans[i] if routed.spans else None
            tokens = self._into_pool(
                pieces if take is None else [_taken(Ragged.concat(pieces), take, spans)]
            )
            own = None
            if weights is not None:
                own = self._into_pool([weights if take is None else _taken(weights, take, spans)])
            items = None if (wanted := images[i]) is None else self._into_pool(wanted)
            n += self._send_payload(
                c, StepPayload(routed.step, self._number, tokens, routed.generation, items, own)
            )
        return n

    def _images(self, routed: LoaderPlan, popped: list[Content]) -> list[Sequence[Ragged] | None]:
        """Return the image bytes for each constructor worker, None where it gets none."""
        found = Scattered.of(popped)
        if not routed.items:
            return [None if routed.take or found is None else found.parts or None] * len(routed.to)
        if found is None or any(
            (number >= found.counts[document]).any() for document, number in routed.items
        ):
            raise PlanError(
                f"{self.name}: expected every image of the plan in a popped document, got an image "
                "that none of them has",
                routed.step,
                "this is a bug in Overlord: report it",
            )
        rows = [(found.first[document] + number).tolist() for document, number in routed.items]
        return [[_row(found[i]) for i in wanted] or None for wanted in rows]

    def _send_payload(self, constructor: int, payload: StepPayload) -> int:
        """Send a payload and return its bytes; with failover, 0 if it could not be sent.

        Then the payload is dropped, and the rollback that follows sends it again. Without failover
        a lost or blocked constructor worker is an error.
        """
        try:
            if (link := self._links.get(constructor)) is None:
                raise ActorLost("", f"{self.name} has no connection to it")
            link.send(payload, timeout_s=REACH_S if self._failover else SEND_S)
            more = (part.nbytes for part in (payload.items, payload.weights) if part is not None)
            return payload.tokens.nbytes + sum(more)
        except DataStall as stall:
            if not self._failover or link is None:
                raise
            slow, reason = link, str(stall)
            self._event_loop.post(lambda: self._disconnect(constructor, slow, reason))
            return 0
        except ActorLost as lost:
            if self._failover:
                return 0
            raise ActorLost(f"constructor-worker/{constructor}", lost.reason) from lost

    def _into_pool(self, pieces: Sequence[Ragged]) -> Ragged:
        """Join pieces in a segment of shared memory: the only copy before the constructor.

        If no segment is free, private memory is used, which is copied once more. The call must not
        wait for a segment: trainers, or work that is queued after this, release them.
        """
        spans = [p.values[p.offsets.item(0) : p.offsets.item(-1)] for p in pieces]
        if sum(map(len, spans)) < JOIN_BELOW * len(spans):
            spans = [np.concatenate(spans)]
        dtype = (
            smallest_id_type(spans)
            if self._narrow
            else np.result_type(*(span.dtype for span in spans))
        )
        total = sum(map(len, spans))
        room = self._pool.take(max(1, total * dtype.itemsize))
        values = (
            np.empty(total, dtype) if room is None else room[: total * dtype.itemsize].view(dtype)
        )
        np.concatenate(
            spans, out=values, casting="unsafe"
        )  # ``smallest_id_type`` has checked the range
        ends = np.concatenate([p.offsets for p in pieces])
        # drop the differences between the end of one piece and the start of the next
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

    def metrics(self) -> dict[str, Any]:
        """Return the process, loaders, memory and connections of this worker as plain values."""
        return self._event_loop.call(
            lambda: {
                "pid": os.getpid(),
                "node": self._platform.node(),
                "loaders": self._loading.figures(),
                "busy": self._loading.busy(),
                "memory": self._loading.held_bytes()
                | {"sending": self._pool.nbytes},  # of shared memory, in use and free
                "files": self._handles.metrics(),
                "pss": self._platform.pss_bytes(),
                "links": len(self._links),
                "sent_bytes": self._sent_bytes,
            },
            "the loader worker's event loop",
            5.0,
        )

    def close(self) -> None:
        super().close()
        for link in self._links.values():
            link.close()
        for worker in self._workers.values():
            worker.close()
        self._handles.close()
        self._pool.close()

    def check(self) -> None:
        self._loading.check()


def _row(values: np.ndarray) -> Ragged:
    return Ragged(values, np.array([0, len(values)], np.int64))


def _taken(rows: Ragged, take: np.ndarray, spans: np.ndarray | None) -> Ragged:
    """Return the chosen rows, or a span of each: its first value and its number of values."""
    return rows.take(take) if spans is None else rows.take_spans(take, *spans)
