"""Run the transports: each does a small block in turn, so that noise affects all equally.

Their processes live through the whole benchmark.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from hops.job import Pieces, Reader
from hops.ways import AHEAD, WAIT_S, OneProcess, Way, way_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The messages of one size of one transport, once."""

    way: str
    mode: str
    nbytes: int
    messages: int
    cpu_s: float
    wall_s: float

    @property
    def gb_per_cpu_s(self) -> float:
        return self.nbytes * self.messages / self.cpu_s / 1e9


def serve(conn: Connection, name: str, role: str, shared: Any, address: Any) -> None:
    """Run a producer or a consumer: execute blocks, and answer each with its CPU time.

    The CPU time includes threads and the kernel.
    """
    way = way_of(name)(shared, address)
    conn.send(way.address)
    while (order := conn.recv()) is not None:
        nbytes, mode, n = order
        try:
            work = _work_of(way, role, nbytes, mode)
            work(2 * AHEAD)  # every page touched, every slot passed
            start, wall = way.cpu_s(), time.perf_counter()
            work(n)
            conn.send((way.cpu_s() - start, time.perf_counter() - wall))
        except Exception as e:
            conn.send(f"{name}, {role}: {type(e).__name__}: {e}")
    way.close()


def _work_of(way: Way, role: str, nbytes: int, mode: str) -> Any:
    if isinstance(way, OneProcess):
        pieces, reader = Pieces(nbytes), Reader(nbytes, mode)
        return lambda n: way.both(pieces, reader, n // len(way.roles))
    if role == "producer":
        pieces = Pieces(nbytes)
        return lambda n: way.produce(pieces, n)
    reader = Reader(nbytes, mode)
    return lambda n: way.consume(reader, nbytes, n)


class Crew:
    """The processes of one transport."""

    def __init__(self, name: str):
        self.name = name
        context = multiprocessing.get_context("spawn")
        shared = way_of(name).shared()
        self._processes: list[Any] = []
        self._conns: list[Connection] = []
        address = None
        for role in way_of(name).roles:
            near, far = context.Pipe()
            process = context.Process(
                target=serve, args=(far, name, role, shared, address), daemon=name != "Ray objects"
            )
            process.start()
            far.close()
            self._processes.append(process)
            self._conns.append(near)
            address = self._answer(near)

    def block(self, nbytes: int, mode: str, n: int) -> Block:
        for conn in reversed(self._conns):  # the consumer first
            conn.send((nbytes, mode, n))
        answers = [self._answer(conn) for conn in self._conns]
        return Block(
            way=self.name,
            mode=mode,
            nbytes=nbytes,
            messages=n,
            cpu_s=sum(a[0] for a in answers),
            wall_s=max(a[1] for a in answers),
        )

    def _answer(self, conn: Connection) -> Any:
        if not conn.poll(WAIT_S):
            raise RuntimeError(f"{self.name}: no answer in {WAIT_S:g} s")
        try:
            answer = conn.recv()
        except EOFError as e:
            raise RuntimeError(f"{self.name}: its process has ended") from e
        if isinstance(answer, str) and answer.startswith(self.name):
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        for conn in reversed(self._conns):
            with suppress(OSError):
                conn.send(None)
        for process in reversed(self._processes):
            process.join(10)
            if process.is_alive():
                process.terminate()
                process.join(10)


@contextmanager
def crews(names: list[str]) -> Iterator[list[Crew]]:
    made: list[Crew] = []
    try:
        for name in names:
            made.append(Crew(name))
        yield made
    finally:
        for crew in made:
            crew.close()


def blocks(
    made: list[Crew], sizes: list[int], modes: tuple[str, ...], rounds: int, block_bytes: int
) -> Iterator[Block]:
    """Yield all blocks, round by round, in a rotating order of transports.

    So no transport always follows the same other one.
    """
    for turn in range(rounds):
        for nbytes in sizes:
            for mode in modes:
                k = turn % len(made)
                for crew in made[k:] + made[:k]:
                    yield crew.block(nbytes, mode, max(4, block_bytes // nbytes // 2 * 2))
