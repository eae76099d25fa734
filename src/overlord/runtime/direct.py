"""A job without constructors (``constructors=False``): loader hosts send to every client, and each
builds its own microbatches.

The baseline of the Overlord paper's appendix B, for measurement. Every rank is a constructor here:
all ranks of a data-parallel group are sent the group's payload, and all build the same. Their
clients come to a *registry* in the launching process, which tells loader hosts where to find them.
Nobody keeps steps for a client that is not there, so planning begins when all are.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from overlord.client.direct import LEFT, DirectInbox
from overlord.cluster.coordinator import ProcessHost
from overlord.cluster.plan_router import RoutedPlan, spread
from overlord.cluster.status import WorkerHandle
from overlord.errors import ActorLost, DataStall, JobError, OverlordError
from overlord.messages.client import StepAck, StepInfo
from overlord.messages.control import Attach, Detach, EndOfJob
from overlord.plan.rank_view import served_ranks
from overlord.rpc.actors import ActorHandle, ActorRecord, ActorSystem
from overlord.serving.step_publisher import MOVED, UNBOUNDED
from overlord.transport.address import HAS_SHARED_MEMORY
from overlord.transport.connection import Connection
from overlord.transport.server import Server
from overlord.transport.server_connection import ServerConnection

GONE = (
    "the steps that were sent to this rank are gone with the client they were sent to; load "
    "a saved state on every rank"
)


class Linked(WorkerHandle):
    """A client that builds, and its link."""

    def __init__(self, rank: int, link: Connection, address: str, pid: int):
        super().__init__(ActorHandle(f"client/{rank}", pid, ActorRecord(f"client/{rank}")))
        self.rank, self.link, self.address, self.left = rank, link, address, False
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Any]] = {}

    def call(self, control: ActorSystem, method: str, *args: Any) -> Future[Any]:
        answer = Future[Any]()
        try:
            number = next(self._numbers)
            self._asked[number] = answer
            self.link.send((method, number, *args), timeout_s=0.0)
        except (ActorLost, DataStall) as fault:  # the registry hears of it
            answer.set_exception(fault)
        return answer

    def tell(self, control: ActorSystem, messages: list[Any]) -> None:
        with contextlib.suppress(ActorLost, DataStall):  # the same
            self.link.send(("do", messages), timeout_s=0.0)

    def answered(self, number: int, value: Any) -> None:
        if (asked := self._asked.pop(number, None)) is not None:
            asked.set_result(value)


class Registry:
    """Where clients say that they are there. In the server's thread; what it leads to is posted to
    the pump.
    """

    def __init__(
        self,
        token: str,
        welcome: Callable[[int], dict[str, Any]],
        *,
        generation: int,
        prefetch: int,
        came: Callable[[Linked], None],
        went: Callable[[Linked, str], None],
        heard: Callable[[Linked, Any], None],
    ):
        self._welcome, self._generation = welcome, generation
        self._came, self._went, self._heard = came, went, heard
        self._lock = threading.Lock()
        self._clients: dict[int, Linked] = {}
        self._of_link: dict[Connection, Linked] = {}
        self._open = True
        self._server = Server(
            token=token,
            on_open=self._opened,
            on_message=self._message,
            on_close=self._closed,
            hold=prefetch,
            tcp=not HAS_SHARED_MEMORY,
        )
        self.address = self._server.address

    def close_for(self, ranks: set[int]) -> bool:
        """Whether all these are there; from then on no one else is let in."""
        with self._lock:
            self._open = self._open and not ranks <= set(self._clients)
            return not self._open

    def absent(self, ranks: set[int]) -> list[int]:
        with self._lock:
            return sorted(ranks - set(self._clients))

    def _opened(self, link: ServerConnection, hello: Mapping[str, Any]) -> dict[str, Any]:
        rank, address, pid = (hello.get(name) for name in ("rank", "address", "pid"))
        if (
            hello.get("role") != "constructor"
            or type(rank) is not int
            or not isinstance(address, str)
            or type(pid) is not int
        ):
            raise OverlordError(f"expected a client that builds its steps, got {hello!r:.100}")
        if hello.get("generation") != self._generation:
            raise OverlordError(f"rank {rank}: {MOVED}")
        welcome = self._welcome(rank)
        client = Linked(rank, link, address, pid)
        with self._lock:
            if not self._open:
                raise OverlordError(f"rank {rank}: {GONE}")
            former, self._clients[rank] = self._clients.get(rank), client
            self._of_link[link] = client
        link.max_queued_bytes = (
            UNBOUNDED  # the prefetch window bounds it, and the pump must not wait for a slow client
        )
        if former is not None:
            dismiss(
                former,
                f"rank {rank}: another client of this rank has connected and takes this "
                "one's place",
            )
        self._came(client)
        return welcome

    def _message(self, link: Connection, value: Any) -> None:
        client = self._of_link[link]
        match value:
            case StepAck() | EndOfJob():
                self._heard(client, value)
            case str() if value == LEFT:
                client.left = True
            case (int(number), answer):
                client.answered(number, answer)
            case _:
                raise OverlordError(
                    f"expected Took, Finish or an answer from a client, got {type(value).__name__}"
                )

    def _closed(self, link: Connection, reason: str) -> None:
        with self._lock:
            client = self._of_link.pop(link)
            if here := self._clients.get(client.rank) is client:
                del self._clients[client.rank]
        if here:
            self._went(client, reason)

    def close(self) -> None:
        self._server.close()


def dismiss(client: Linked, words: str) -> None:
    with contextlib.suppress(ActorLost, DataStall):
        client.link.send(("end", OverlordError(words)), timeout_s=0.0)
    client.link.close(words)


class DirectHost(ProcessHost):
    """A planner and remote loaders. What constructor hosts do is done in the clients' processes."""

    _registry: Registry

    def _start_constructors(self) -> None:
        """None are; the clients will come. Every bucket is one for the cutter, whose cuts are
        spread over its ranks.
        """
        self._begun = False

        def post(act: Callable[..., None]) -> Callable[..., None]:
            return lambda *args: self._pump.post(lambda: None if self._closed else act(*args))

        self._registry = Registry(
            self._token,
            self._welcome,
            generation=self._number,
            prefetch=self.blueprint.options.prefetch,
            came=post(self._came),
            went=post(self._went),
            heard=post(self._heard),
        )

    def _n_constructors(self) -> int:
        return len(self._ranks)

    def _welcome(self, rank: int) -> dict[str, Any]:
        job = self.blueprint.job
        if rank not in self._bucket_of:
            raise OverlordError(f"rank {rank}: expected 0 to {len(self._bucket_of) - 1}")
        options = self.blueprint.options
        settings = {
            "batch": asdict(job.batch),
            "multiple": job.document_multiple,
            "check": options.check,
            "broadcast": options.broadcast,
        }
        return {"bucket": self._bucket_of[rank], **settings}

    # clients that come and go, in the pump

    def _came(self, client: Linked) -> None:
        self._constructors[client.rank] = client
        for remote in list(self._loaders.values()):  # a source may be joining, in another thread
            remote.out.append(("constructor", client.rank, client.address, self._token))
        if self.planner.finished is not None:
            client.out.append(self.planner.finished)
        self.run()
        self._begin()

    def _went(self, client: Linked, reason: str) -> None:
        """Before the first step another may come in its place. After it, what was sent to one that
        died is lost, and so is the job; one that ended in order was closed, or its session is
        moving, and others tell.
        """
        for remote in list(self._loaders.values()):
            remote.out.append(("leave", client.rank))
        if (
            self._begun
            and client.rank in self._attached
            and not client.left
            and self.planner.finished is None
        ):
            self._lost(client, reason)
        client.lost = client.lost or reason
        self.run()

    def _heard(self, client: Linked, value: StepAck | EndOfJob) -> None:
        if isinstance(value, EndOfJob):
            self._hear([value])
        else:
            self._hear([("taken", [client.rank], [value.step])])

    def _begin(self) -> None:
        if not self._begun and self._attached and self._registry.close_for(self._attached):
            self._begun = True
            self.run(
                [
                    command
                    for rank in sorted(self._attached)
                    for command in self.planner.handle(Attach(rank))
                ]
            )

    def attach(self, mailboxes: Mapping[int, Any]) -> None:
        """Clients of these ranks are expected; planning begins when they are there."""
        for rank in mailboxes:
            self._attached.add(rank)
            self._served[self._bucket_of[rank]] += 1
        self._begin()

    def detach(self, rank: int) -> None:
        if rank in self._attached:
            self._attached.discard(rank)
            self._served[self._bucket_of[rank]] -= 1
            for remote in list(self._loaders.values()):
                remote.out.append(("leave", rank))
            self.run(self.planner.handle(Detach(rank)))
            self._begin()

    def _constructor(self, rank: int) -> WorkerHandle:
        return self._constructors[rank]

    def listen(self, host: str, token: str) -> None:
        """Clients build themselves, on this machine: they are told a token of ours, over a socket
        of this machine.
        """

    def outside(self, rank: int) -> tuple[str, str]:
        return self.address_for(rank)

    def address_for(self, rank: int) -> tuple[str, str]:
        return self._registry.address, self._token

    def taken_by(self, rank: int) -> int:
        """Clients tell of every step, and nothing is kept for one that comes again."""
        return -1

    def inbox(self, rank: int, next_step: int) -> DirectInbox:  # type: ignore[override]
        """A client of this process builds as any other; when these cores are closed the session
        says why.
        """
        where = lambda generation: None if self._closed else self.address_for(rank)  # noqa: E731
        address, token = self.address_for(rank)
        return DirectInbox(
            rank=rank, address=address, token=token, where=where, generation=self._number
        )

    # steps

    def _send_cuts(self, cuts: RoutedPlan) -> None:
        attached = [[r for r in ranks if r in self._attached] for ranks in self._ranks]
        super()._send_cuts(spread(cuts, attached, self._served_by_others(cuts)))

    def _served_by_others(self, cuts: RoutedPlan) -> frozenset[int]:
        """Ranks to which the trainer broadcasts."""
        told = (
            StepInfo.of(next(iter(cuts.placed.values())).stage)
            if cuts.placed and self.blueprint.options.broadcast
            else None
        )
        return (
            frozenset()
            if told is None or told.place is None
            else served_ranks(told.place, told.axis, told.broadcast)
        )

    def add_source(
        self, new: Any, prepared: int, budget_bytes: int, joined: Callable[[], None] = lambda: None
    ) -> None:
        links = [
            ("constructor", c.rank, c.address, self._token) for c in self._clients() if not c.lost
        ]
        self._loaders[prepared].out += links
        super().add_source(new, prepared, budget_bytes, joined)

    def _clients(self) -> list[Linked]:
        return [c for c in self._constructors.values() if isinstance(c, Linked)]

    # what people ask

    def waiting_for(self, rank: int) -> str:
        if absent := self._registry.absent(self._attached) if not self._begun else []:
            few = ", ".join(map(str, absent[:16])) + (", ..." if len(absent) > 16 else "")
            words = (
                "without constructors no step is planned before all have come, and loaded "
                "the state that one of them loaded"
            )
            return f"the clients of ranks {few}: {words}"
        if (
            rank not in self._constructors
        ):  # it has left, or never came: those that are waited for are attached
            return f"client/{rank}, which is not there"
        return super().waiting_for(rank)

    def kill(self, name: str) -> None:
        if name.startswith("client/"):
            raise JobError(
                [
                    f"{name}: a client lives in its trainer's process, which is not the "
                    "session's to kill"
                ],
                "kill",
            )
        super().kill(name)

    def _processes(self) -> list[WorkerHandle]:
        return list(self._loaders.values())

    def close(self) -> None:
        super().close()
        if hasattr(self, "_registry"):
            self._registry.close()
