"""The compared transports, each with a producer and a consumer.

Both are in processes of their own unless a class says otherwise. A producer sends ``n`` messages
gathered from its pieces; a consumer passes each to the reader. Memory is reused wherever the
transport allows it. At most two messages are in flight: while one is read, the next is made.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hops.job import Pieces, Reader
from overlord.transport.connection import TIMEOUT, open_connection
from overlord.transport.local_connection import pair
from overlord.transport.server import Server
from overlord.transport.shared_memory import SharedMemoryPool

AHEAD = 2
WAIT_S = 120.0
TOKEN = "benchmark"
BARE, BARE_IN_TURN, BARE_AT_ONCE = BARES = (
    "bare memcpy",
    f"bare memcpy, {AHEAD} buffers",
    "bare memcpy, two at once",
)


class Way:
    """One side of a transport; the producer passes ``address`` to the consumer."""

    address: Any = None
    roles: tuple[str, ...] = ("producer", "consumer")

    def __init__(self, shared: Any, address: Any):
        """Open this side of the transport.

        Both processes inherit ``shared``; ``address`` is None in the producer.
        """

    @staticmethod
    def shared() -> Any:
        """Return the value that both processes inherit when they start."""
        return None

    def produce(self, pieces: Pieces, n: int) -> None:
        raise NotImplementedError

    def consume(self, reader: Reader, nbytes: int, n: int) -> None:
        raise NotImplementedError

    def cpu_s(self) -> float:
        """Return the CPU time of this side so far."""
        return time.process_time()

    def close(self) -> None:
        """Close threads and sockets, if there are any."""


class OneProcess(Way):
    """Both sides in one process.

    With several roles there are as many processes, and each does its share of the messages alone.
    """

    roles = ("producer",)

    def both(self, pieces: Pieces, reader: Reader, n: int) -> None:
        raise NotImplementedError


class Bare(OneProcess):
    """The same copies of the same bytes in a loop, into reused buffers.

    There is one buffer for the array, and another if the job copies it.
    """

    buffers = 1

    def __init__(self, shared: Any, address: Any):
        self._made = [np.zeros(0, np.uint8)]

    def both(self, pieces: Pieces, reader: Reader, n: int) -> None:
        if len(self._made[0]) != pieces.nbytes:
            self._made = [np.zeros(pieces.nbytes, np.uint8) for _ in range(self.buffers)]
        for k in range(n):
            pieces.stamp(k)
            array = self._made[k % self.buffers]
            pieces.gather(array)
            reader.read(array, k)


class BareInTurn(Bare):
    """The same copies into as many buffers as the transports have, in turn.

    A single buffer would stay in the cache, which two processes could not achieve.
    """

    buffers = AHEAD


class BareAtOnce(Bare):
    """Two processes that copy concurrently without communication.

    It shows how much two CPU cores slow each other down.
    """

    roles = ("one", "other")
    address = "nobody"


class Pair(OneProcess):
    """Two threads and a pair of connections.

    The array is in a shared-memory pool, as it would be for another process.
    """

    def __init__(self, shared: Any, address: Any):
        self._ring = SharedMemoryPool(max_segments=AHEAD, name="pair")

    def both(self, pieces: Pieces, reader: Reader, n: int) -> None:
        left, right = pair()

        def produce() -> None:
            for k in range(n):
                array = self._ring(pieces.nbytes)
                pieces.stamp(k)
                pieces.gather(array)
                left.send(array)

        thread = threading.Thread(target=produce)
        thread.start()
        for k in range(n):
            array = right.recv(WAIT_S)
            reader.read(array, k)
            del array
        thread.join()


class Linked(Way):
    """A connection of our transport: the producer serves, the consumer connects."""

    transport = "unix"

    def __init__(self, shared: Any, address: Any):
        self._server = self._link = None
        if address is None:
            self._ring = SharedMemoryPool(max_segments=AHEAD, name="benchmark")
            self._links: list[Any] = []
            self._server = Server(
                token=TOKEN,
                on_message=lambda link, value: None,
                on_open=self._on_open,
                pool=self._ring,
            )
            self.address = self._server.address
        else:
            self._link, _ = open_connection(
                address, TOKEN, {}, timeout_s=WAIT_S, transport=self.transport
            )

    def _on_open(self, link: Any, hello: dict[str, Any]) -> dict[str, Any]:
        link.max_queued_bytes = 0  # one message waits, no more
        self._links.append(link)
        return {}

    def memory(self, nbytes: int) -> Callable[[], np.ndarray]:
        return lambda: self._ring(nbytes)

    def produce(self, pieces: Pieces, n: int) -> None:
        memory = self.memory(pieces.nbytes)
        for k in range(n):
            array = memory()
            pieces.stamp(k)
            pieces.gather(array)
            self._links[0].send(array)
            del array

    def consume(self, reader: Reader, nbytes: int, n: int) -> None:
        assert self._link is not None
        for k in range(n):
            array = self._link.recv(WAIT_S)
            if array is TIMEOUT:
                raise RuntimeError("nothing came")
            reader.read(array, k)
            del array

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._link is not None:
            self._link.close()


class Tcp(Linked):
    """Our transport over TCP, which sends queued arrays by reference.

    So messages are gathered into arrays that nothing else views.
    """

    transport = "tcp"

    def memory(self, nbytes: int) -> Callable[[], np.ndarray]:
        from overlord.buffer_pool import BufferPool

        slabs = BufferPool()
        return lambda: slabs(nbytes)[:nbytes]


class TorchQueue(Way):
    """torch.multiprocessing with file descriptors, as its DataLoader uses it.

    Every tensor has fresh shared memory.
    """

    def __init__(self, shared: Any, address: Any):
        import torch
        import torch.multiprocessing

        torch.set_num_threads(1)
        torch.multiprocessing.set_sharing_strategy("file_descriptor")
        self._torch, (self._queue, self._acks) = torch, shared
        self.address = "queue"

    @staticmethod
    def shared() -> Any:
        import torch.multiprocessing

        torch.multiprocessing.set_sharing_strategy("file_descriptor")
        context = torch.multiprocessing.get_context("spawn")
        return context.Queue(AHEAD), context.Semaphore(0)

    def produce(self, pieces: Pieces, n: int) -> None:
        torch = self._torch
        parts = [torch.from_numpy(part) for part in pieces.parts]
        for k in range(n):
            pieces.stamp(k)
            out = torch.empty(0, dtype=torch.uint8).set_(
                torch.UntypedStorage._new_shared(pieces.nbytes)
            )
            out.resize_(pieces.nbytes)
            torch.cat(parts, out=out)
            self._queue.put(out)
        for _ in range(
            n
        ):  # its descriptors are fetched from this process: it must not go on before they are
            self._acks.acquire()

    def consume(self, reader: Reader, nbytes: int, n: int) -> None:
        for k in range(n):
            reader.read(self._queue.get(timeout=WAIT_S).numpy(), k)
            self._acks.release()


class PipePickle(Way):
    """multiprocessing.Pipe: the array is pickled, and written through a socket."""

    def __init__(self, shared: Any, address: Any):
        self._to, self._from = shared
        self._buffer = np.zeros(0, np.uint8)
        self.address = "pipe"

    @staticmethod
    def shared() -> Any:
        import multiprocessing

        near, far = multiprocessing.get_context("spawn").Pipe()
        return near, far

    def produce(self, pieces: Pieces, n: int) -> None:
        if len(self._buffer) != pieces.nbytes:
            self._buffer = np.zeros(pieces.nbytes, np.uint8)
        for k in range(n):
            pieces.stamp(k)
            pieces.gather(self._buffer)
            self._to.send(self._buffer)

    def consume(self, reader: Reader, nbytes: int, n: int) -> None:
        for k in range(n):
            reader.read(self._from.recv(), k)


class Flight(Way):
    """Arrow Flight over TCP: one stream with a record batch per message.

    The consumer reads a view of the data that gRPC received.
    """

    def __init__(self, shared: Any, address: Any):
        import pyarrow as pa
        import pyarrow.flight as flight

        self._pa, self._flight = pa, flight
        self._server = self._client = None
        if address is None:
            self._made: Callable[[], Any] | None = None
            outer = self

            class Serving(flight.FlightServerBase):
                def do_get(self, context: Any, ticket: Any) -> Any:
                    return outer.stream()

            self._server = Serving("grpc://127.0.0.1:0")
            self.address = f"grpc://127.0.0.1:{self._server.port}"
            self._ready, self._done = threading.Event(), threading.Event()
        else:
            self._client = flight.connect(
                address, generic_options=[("grpc.max_receive_message_length", -1)]
            )

    def stream(self) -> Any:
        self._ready.wait(WAIT_S)
        self._ready.clear()
        pa, (pieces, n) = self._pa, self._work
        schema = pa.schema([("data", pa.large_binary())])
        buffers = [
            np.zeros(pieces.nbytes, np.uint8) for _ in range(AHEAD)
        ]  # gRPC may still hold the last ones
        ends = pa.py_buffer(np.array([0, pieces.nbytes]))

        def batches() -> Any:
            for k in range(n):
                out = buffers[k % AHEAD]
                pieces.stamp(k)
                pieces.gather(out)
                column = pa.LargeBinaryArray.from_buffers(
                    pa.large_binary(), 1, [None, ends, pa.py_buffer(out)]
                )
                yield pa.record_batch([column], schema=schema)
            self._done.set()

        return self._flight.GeneratorStream(schema, batches())

    def produce(self, pieces: Pieces, n: int) -> None:
        self._work = (pieces, n)
        self._done.clear()
        self._ready.set()
        self._done.wait(WAIT_S)

    def consume(self, reader: Reader, nbytes: int, n: int) -> None:
        assert self._client is not None
        stream = self._client.do_get(self._flight.Ticket(b""))
        for k in range(n):
            column = stream.read_chunk().data.column(0)
            reader.read(np.frombuffer(column.buffers()[2], np.uint8)[:nbytes], k)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.shutdown()


WAYS: dict[str, type[Way]] = {
    BARE: Bare,
    BARE_IN_TURN: BareInTurn,
    BARE_AT_ONCE: BareAtOnce,
    "pair": Pair,
    "ring": Linked,
    "tcp": Tcp,
    "torch queue": TorchQueue,
    "Arrow Flight": Flight,
    "pipe + pickle": PipePickle,
}
NEEDS = {"torch queue": "torch", "Arrow Flight": "pyarrow.flight", "Ray objects": "ray"}
MEANING = {
    BARE: "the same copies in one process and one thread, into reused buffers: one for the "
    "message, one for its copy",
    BARE_IN_TURN: f"the same, but messages are gathered into {AHEAD} buffers in turn, as many as the "
    "ring has slots",
    BARE_AT_ONCE: "two processes that do the first at the same time, each for itself: two cores share "
    "a cache and the memory's bandwidth",
    "pair": "two threads of one process, `overlord.transport.local_connection.pair`",
    "ring": "two processes, a link over a unix socket: `ring(nbytes)`, gather, `send`; `recv` "
    "gives a view",
    "tcp": "two processes, a link over TCP on loopback, into reused buffers",
    "torch queue": "`torch.multiprocessing.Queue`, strategy `file_descriptor`; shared memory is fresh "
    "for every message",
    "Arrow Flight": "`do_get` over TCP on loopback, one stream, a record batch a message",
    "pipe + pickle": "`multiprocessing.Pipe`",
    "Ray objects": "an actor returns the array, another takes it; CPU of the whole local cluster",
}


def way_of(name: str) -> type[Way]:
    if name == "Ray objects":
        from hops.ray_objects import RayObjects

        return RayObjects
    return WAYS[name]


def available() -> list[str]:
    """Return the transports whose libraries are installed, in order."""

    def is_here(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            return False

    return [name for name in (*WAYS, "Ray objects") if name not in NEEDS or is_here(NEEDS[name])]
