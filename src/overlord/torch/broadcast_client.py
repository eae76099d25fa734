"""BroadcastClient: the client of a rank whose plan broadcasts. One rank of a group fetches, all of
them get their step.

The fetcher has a client at every seat of its group (one a bucket: several where DP is broadcast),
packs what they were handed into one frame and broadcasts it. Each rank of the group takes its
seat's part and cuts its own view out of it, as a constructor would have. Steps, state and reports
are what they are without a broadcast; fewer ranks have a connection.
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
from overlord.client.client import Client
from overlord.client.step import Step
from overlord.client.step_queue import State, StepQueue
from overlord.constructor.batch_arrays import BatchArrays
from overlord.constructor.build import BucketBatch
from overlord.constructor.compact import seen
from overlord.constructor.rank_views import narrow
from overlord.errors import ActorLost, DataStall, OverlordError, PlanError, StateMismatch
from overlord.hashing import digest
from overlord.messages.client import StepInfo
from overlord.messages.control import EncodedState
from overlord.plan.rank_view import View
from overlord.serving.step_publisher import MOVED
from overlord.torch.broadcast_frames import FrameBroadcast, as_said
from overlord.torch.departures import Departures
from overlord.torch.process_groups import Service
from overlord.transport.state_codec import seal

log = logging.getLogger("overlord")

END_S = 300.0  # for the others to finish their last step and ask for one more
OTHERS_S = 10.0  # for the others to hear that this rank failed, or is leaving
NOTE_S = 3.0  # for them to read that this rank failed, where the store ends with it
# frames to look through for one that all ranks expect: a few are under way, and one at each rank
# that passes them on
LOOK = 16


@dataclass(slots=True)
class BroadcastQueue:
    """Stands for the mailbox of a rank that has none: which generation of the session its steps are
    of.
    """

    generation: int = 0

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None:
        return None

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        """Its fetcher's mailbox is what ends."""

    def ack(self, step: int) -> None:
        """Do nothing: the rank that fetches the step acks it."""

    def __len__(self) -> int:
        return 0


class BroadcastClient(Client):
    """A ``Client`` whose steps come by a broadcast, or are broadcast by it. Made by
    ``overlord.torch.join``.

    ``clients``: of the seats that this rank fetches from, its own first; of a rank that is served
    only its own, if it encodes images. ``asking``: how a rank without a client asks for its state
    and reports.
    """

    def __init__(
        self,
        service: Service,
        view: View,
        wire: FrameBroadcast,
        clients: Mapping[int, Client],
        *,
        split: tuple[str, tuple[str, ...]],
        start: State,
        asking: Callable[[], Any],
        leave: Callable[[BroadcastClient], None],
        farewells: Departures,
        microbatches: int | None = None,
        world_size: int | None = None,
    ):
        self.service, self._view, self._wire, self._clients, self._split = (
            service,
            view,
            wire,
            dict(clients),
            split,
        )
        self._own = self._clients.get(service.rank)
        self._slabs = BufferPool()  # for what the trainer widens
        self._asking, self._leave, self._farewells, self._asked = asking, leave, farewells, None
        self._over: BaseException | None = None  # why no frame comes any more
        self._early: deque[dict[str, Any]] = (
            deque()
        )  # frames that came to a call they were not meant for
        self._images: Step | None = None  # of this rank's own, for the step whose frame is to come
        self._gone = False
        self._last: dict[str, Any] | None = (
            None  # the state behind the last step, once there is no other
        )
        self.bytes_fetched = 0
        super().__init__(
            service.rank,
            BroadcastQueue(),
            begin=lambda: None,
            consumed=lambda box, step: None,
            waiting_for=lambda: "",
            export=self._state_of,
            rewind=self._load,
            report=self._say,
            start=start,
            close=self._end,
            stall_warn_s=0.0,
            stall_limit_s=0.0,
            microbatches=microbatches,
            world_size=world_size,
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
                own, parts = self._fetch()
            else:
                if self._own is not None and self._images is None:
                    self._images = next(self._own, None)  # where it has ended, so has the fetcher's
                parts = self._hear_step()["parts"]
                own, self._images = self._images, None
        except StopIteration as over:
            self._over = over
            raise
        finally:
            self.waited_s += time.monotonic() - start
        part = next(p for p in parts if p["seat"] == self.service.seat)
        assert own is None or own.step == part["told"].step, (
            "images of one step and text of another"
        )
        return part["told"], self._mine(part, own)

    def _fetch(self) -> tuple[Step, list[dict[str, Any]]]:
        """The step of every seat, told to all ranks of the group before this one uses it."""
        try:
            steps = {seat: next(client) for seat, client in self._clients.items()}
            self._check(next(iter(steps.values())))
            parts = [_part(seat, step, seat != self.rank) for seat, step in steps.items()]
            self.bytes_fetched += sum(step._bucket.nbytes for step in steps.values())
            self._wire.say({"kind": "step", "generation": self._generation, "parts": parts})
            return steps[self.rank], parts
        except StopIteration:
            self._finish()
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _check(self, step: Step) -> None:
        told = (step._told.axis, tuple(step._told.broadcast))
        if told != self._split:
            raise PlanError(
                f"the first plan split along {self._split[0]} and broadcast at "
                f"{', '.join(self._split[1]) or 'nothing'}, this one along "
                f"{told[0]} and at {', '.join(told[1]) or 'nothing'}; process groups are made once",
                step.step,
                "let the strategy name the same axes in every step, or pass broadcast=False",
            )

    def _hear(self, what: str, *, loading: bool = False) -> dict[str, Any]:
        """The next frame. ``loading``: that the session moved while the fetcher took a step ahead
        is no error to who follows it there.
        """
        try:
            frame = self._early.popleft() if self._early else self._wire.hear(what)
        except BaseException as error:
            self._over = error if isinstance(error, Exception) else self._over
            raise
        if frame["kind"] == "error" and not (loading and MOVED in str(frame["error"])):
            self._over = frame["error"]
            raise frame["error"]
        return frame

    def _hear_step(self) -> dict[str, Any]:
        frame = self._hear(f"step {self._state.step}")
        if frame["kind"] in ("loaded", "refused"):
            self._early.appendleft(
                frame
            )  # for the call that is to come: a thread that prefetches may be here before it
            raise self._apart("loaded a state", "asked for a step")
        self._inbox.generation = frame["generation"]  # type: ignore[attr-defined]
        if frame["kind"] == "end":
            self._last = frame["state"]
            raise StopIteration
        return frame

    def _hear_loaded(self) -> dict[str, Any]:
        """What became of the fetcher's own attempt. It may have been some steps ahead: they are
        over, or to come if it was refused.
        """
        steps: list[dict[str, Any]] = []
        for _ in range(LOOK):
            frame = self._hear("that it loaded the state", loading=True)
            if frame["kind"] == "loaded":
                self._early.clear()
                return frame
            if frame["kind"] == "refused":
                self._early.extendleft(reversed(steps))
                raise frame["error"]
            steps.append(frame)
        self._early.extendleft(reversed(steps))
        raise self._apart("goes on taking steps", "loads a state")

    def _apart(self, fetcher: str, mine: str) -> OverlordError:
        return OverlordError(
            f"rank {self.service.fetcher} {fetcher} while rank {self.rank} {mine}; all "
            "ranks of a broadcast must call the same: "
            "next(client), or load_state_dict"
        )

    def _mine(self, part: Mapping[str, Any], own: Step | None) -> BucketBatch:
        """This rank's view of its seat's microbatches; with the images it encodes, which no other
        rank gets.
        """
        wide = BatchArrays.of_part(part["wide"], part["rows"]) if part["wide"] else None
        bucket = BucketBatch(
            np.arange(int(part["bounds"][-1])),
            part["bounds"],
            wide,
            form=part["form"],
            slab=self._slabs,
        )
        if wide is not None and bucket.form is not None and not self._view.sliced:
            wide, form = seen(wide, bucket.form, self._view)
            bucket = replace(bucket, wide=wide, form=form)
        else:
            whole = part["microbatches"] if wide is None else bucket.microbatches
            bucket = replace(
                bucket,
                wide=None,
                form=None,
                built=tuple(narrow(arrays, self._view) for arrays in whole),
            )
        if own is not None:
            return replace(bucket, encoder=own._bucket.encoder, per=own._bucket.per)
        if part["encoder"] and self.service.seat == self.rank:
            return replace(
                bucket,
                encoder=BatchArrays.of_part(part["encoder"], part["encoder_rows"]),
                per=part["per"],
            )
        return bucket

    # state

    @property
    def _own_client(self) -> Client:
        assert self._own is not None
        return self._own

    @property
    def _generation(self) -> int:
        inbox, session = self._own_client._inbox, self._own_client.session
        return int(
            getattr(inbox, "generation", 0)
            if session is None
            else session.internals.generation.number
        )

    def _state_of(self, box: StepQueue, state: State) -> dict[str, Any]:
        if self._own is not None:
            mine = self._own
            now = (
                state is self._state and self._back is None
            )  # else it is one of before, by a mark or by a step that was refused
            return mine.state_dict() if now else mine.state_dict((mine._inbox, state))
        if self._last is not None and state.step == self._state.step:  # a mark is a copy
            return dict(self._last)
        saved: dict[str, Any] = self._link()._export(box, state)
        return saved

    def _say(self, box: StepQueue, step: Any, metrics: Any, next_step: int) -> None:
        if self._own is not None:
            self._own.report(step, metrics)
        else:
            self._link()._report(box, step, metrics, next_step)

    def _link(self) -> Any:
        """To the session's front door, opened by the first question."""
        if self._asked is None:
            self._asked = self._asking()
        return self._asked

    def _load(self, state: Mapping[str, Any], allow: tuple[str, ...]) -> tuple[StepQueue, State]:
        """All ranks of the group do this together, as they take steps together."""
        mark = _mark(state)
        if not self.service.fetches:
            return self._inbox, self._load_too(state, allow, mark)
        try:
            for client in self._clients.values():
                client.load_state_dict(state, allow)
        except BaseException as error:
            with contextlib.suppress(OverlordError):
                self._wire.say(
                    {
                        "kind": "refused",
                        "generation": self._generation,
                        "error": as_said(error, self.rank),
                    }
                )
            raise
        self._over = None
        after = sealed(self._own_client._state)
        self._wire.say(
            {"kind": "loaded", "generation": self._generation, "after": after, "mark": mark}
        )
        return self._inbox, after

    def _load_too(self, state: Mapping[str, Any], allow: tuple[str, ...], mark: str) -> State:
        """A rank that is served: after its fetcher, whose word is heard in any case, or it would be
        taken for a step's.
        """
        refused: OverlordError | None = None
        try:
            if self._own is not None:
                self._own.load_state_dict(state, allow)
        except OverlordError as error:
            refused = error
        frame = self._hear_loaded()
        if refused is not None:
            raise refused
        if frame["mark"] != mark:
            words = {"state": ("another than this one", "this one")}
            problem = f"rank {self.service.fetcher} loaded another state than this rank"
            raise StateMismatch(words, "load the same one on every rank", problem)
        self._inbox.generation = frame["generation"]  # type: ignore[attr-defined]
        self._over = self._last = self._images = None
        after: State = frame["after"]
        return after

    # the end

    def _finish(self) -> None:
        """A last word. Whoever waits for a step must have it before this process may go; one who
        stopped before it never will.
        """
        try:
            state = self._own_client.state_dict()
        except OverlordError:
            state = None
        try:
            self._wire.say({"kind": "end", "generation": self._generation, "state": state})
            self._wire.flush(limit_s=END_S)
        except (ActorLost, DataStall) as why:
            log.warning("rank %d: the end of the stream was not heard by all: %s", self.rank, why)

    def _fail(self, error: BaseException) -> None:
        self._over = (
            error
            if isinstance(error, Exception)
            else OverlordError(f"rank {self.rank} was stopped by {type(error).__name__}")
        )
        with contextlib.suppress(OverlordError):  # they are gone too
            self._wire.say({"kind": "error", "generation": 0, "error": as_said(error, self.rank)})
            self._wire.flush(limit_s=OTHERS_S)

    def _end(self) -> None:
        if (
            self._gone
        ):  # a prefetcher has closed it, say, and now its own ``with`` does: it leaves once
            return
        self._gone = True
        atexit.unregister(self._at_exit)
        self._farewells.leave(self._wire.frames, self._state.step, self._fault)
        with contextlib.suppress(OverlordError):
            if self._over is None and self.service.fetches:
                self._wire.flush(limit_s=OTHERS_S)
        self._wire.close()
        if self._over is None and self._fault is not None and self.rank == 0:
            self._farewells.wait_for_others(NOTE_S)
        if self._asked is not None:
            self._asked._asking.close()
        self._leave(self)

    def _at_exit(self) -> None:
        self._fault = self._fault or getattr(sys, "last_value", None)
        self._failed = self._failed or self._fault is not None
        self.close()

    # for people

    def figures(self) -> dict[str, Any]:
        """What the broadcast saves and costs: ranks that fetch, bytes that came from constructors
        and by broadcast, memory of frames.
        """
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
            "bytes_broadcast": self._wire.nbytes,
            "held_bytes": self._wire.held_bytes,
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


def _part(seat: int, step: Step, images: bool) -> dict[str, Any]:
    """What a seat was handed, as it is sent. ``images``: with those that the seat's rank encodes,
    since it has no client of its own.
    """
    bucket = step._bucket
    bounds = np.asarray(bucket.bounds)
    first, stop = (int(bounds[0]), int(bounds[-1])) if len(bounds) else (0, 0)
    told = step._told.of_rows(bucket.samples[first:stop])
    none: tuple[Mapping[str, np.ndarray], np.ndarray] = ({}, np.zeros((0, len(bucket)), np.int64))
    wide, rows = bucket.part() if bucket.wide is not None else none
    encoder, encoder_rows = (
        bucket.encoder.part(0, bucket.encoder.n) if images and bucket.encoder is not None else none
    )
    return {
        "seat": seat,
        "told": replace(told, after=sealed(told.after)),
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


def sealed(state: State) -> EncodedState:
    return state if isinstance(state, EncodedState) else seal(state)


def _mark(state: Mapping[str, Any]) -> str:
    """Equal states, equal marks; reports of the last steps are in the states of some ranks and not
    yet in those of others.
    """
    return digest(json.dumps({k: v for k, v in state.items() if k != "reports"}, sort_keys=True))
