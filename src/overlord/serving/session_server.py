"""The server of a session: clients in other processes connect to it."""

from __future__ import annotations

from collections.abc import Iterable

from overlord.client.client import StepQueue
from overlord.errors import JobError, OverlordError
from overlord.messages.control import StreamState
from overlord.serving.control_server import ControlServer, WorkerServedQueue
from overlord.serving.session_api import SessionApi
from overlord.serving.step_publisher import SharedBufferPool, StepPublisher
from overlord.transport.address import Address
from overlord.transport.shared_memory import SharedMemoryPool


class ServedAddress(str):
    """An address with its token.

    As text it is the address. ``print`` shows two lines for the environment of the trainers.
    """

    token: str
    resumed: str  # of a job that was submitted to a cluster: the step it resumes at, and why

    def __new__(cls, address: str, token: str, resumed: str = "") -> ServedAddress:
        made = super().__new__(cls, address)
        made.token, made.resumed = token, resumed
        return made

    @property
    def address(self) -> str:
        return str.__str__(self)

    def __str__(self) -> str:
        return f"OVERLORD_ADDRESS={self.address}\nOVERLORD_TOKEN={self.token}"

    def __repr__(self) -> str:
        """Return a text without the token: a repr may be logged."""
        return f"Served({self.address!r})"

    def __format__(self, spec: str) -> str:
        return format(self.address, spec)


class SessionServer:
    """The server for clients in other processes; it publishes steps that are built here.

    ``publishes``: constructors run in this process. Else clients connect to constructor workers.
    """

    def __init__(
        self,
        api: SessionApi,
        *,
        name: str,
        publishes: bool,
        prefetch: int,
        host: str,
        port: int,
        token: str,
        ranks: Iterable[int],
    ):
        self.ranks = frozenset(ranks)
        self.host = host
        self._pool = SharedMemoryPool(name=name) if publishes else None
        self.publisher = (
            StepPublisher(
                on_taken=api.acked,
                on_reports=lambda queue, sent: api.report(queue.rank, sent, queue),
            )
            if publishes
            else None
        )
        if self.publisher is not None:
            self.publisher.on_ack = lambda queue, step: api.acked(queue.rank, step, queue)
        self._control = ControlServer(
            api,
            self.publisher,
            prefetch=prefetch,
            token=token,
            host=host,
            port=port,
            pool=self._pool,
        )
        self.served = ServedAddress(self._control.address, token)

    def buffers(self) -> SharedBufferPool | None:
        """Return memory that clients map, for steps that are built in this process.

        None: steps are built in constructor workers.
        """
        return None if self._pool is None else SharedBufferPool(self._pool)

    def existing_address(
        self, host: str, port: int, token: str | None, ranks: Iterable[int] | None
    ) -> ServedAddress:
        """Return the address for a later ``serve()``; raise ``JobError`` if its arguments differ.

        Default values are accepted, whatever the first call had.
        """
        asked = {
            "host": host,
            "port": port,
            "token": token,
            "ranks": None if ranks is None else sorted(set(ranks)),
        }
        here = {
            "host": self.host,
            "port": Address.parse(self.served.address).port,
            "token": self.served.token,
            "ranks": sorted(self.ranks),
        }
        defaults = {"host": "127.0.0.1", "port": 0, "token": None, "ranks": None}
        if wrong := [name for name in asked if asked[name] not in (defaults[name], here[name])]:
            problem = (
                f"{', '.join(wrong)}: expected the values of the first serve(), at "
                f"{self.served.address}, got others; call serve() without arguments for its address"
            )
            raise JobError([problem], "serve")
        return self.served

    def queue(self, rank: int, generation: int) -> StepQueue:
        """Return the queue of a rank whose client is in another process."""
        if self.publisher is None:
            return WorkerServedQueue(rank, generation)
        return self.publisher.queue(rank, generation)

    def forget(self, rank: int, why: str = "") -> None:
        """Close the data connection of a rank that takes no more steps."""
        if self.publisher is not None:
            self.publisher.forget(rank, why)

    def rewound(self, ranks: Iterable[int], start: StreamState) -> None:
        """Continue the open data connections of these ranks at ``start``."""
        if self.publisher is not None:
            for rank in ranks:
                self.publisher.move_connection(rank, start)

    def close(self) -> None:
        self._control.close(
            OverlordError("the session is closed; launch the job again to continue")
        )
        if self._pool is not None:
            self._pool.close()
