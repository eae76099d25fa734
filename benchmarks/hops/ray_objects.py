"""Ray's objects as a transport, if Ray is installed: one actor returns the array to another."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

from hops.job import Pieces, Reader
from hops.ways import AHEAD, OneProcess

HERE = Path(__file__).resolve().parents[1]
STORE_BYTES = 2**30


class RayObjects(OneProcess):
    """The driver passes references only.

    CPU time is that of every process that it started: raylet, store, actors and services.
    """

    def __init__(self, shared: Any, address: Any):
        self._folder = tempfile.TemporaryDirectory(prefix="hops-ray-")
        token = Path(self._folder.name) / "token"  # Ray would write one to the user's home
        token.write_text(secrets.token_hex(32))
        os.environ.update(
            RAY_USAGE_STATS_ENABLED="0",
            RAY_AUTH_TOKEN_PATH=str(token),
            RAY_DEDUP_LOGS="0",
            PYTHONPATH=os.pathsep.join(
                [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
            ),
        )
        import ray

        self._ray = ray
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=STORE_BYTES,
            # Ray opens its folder to all: the one above stays ours
            _temp_dir=f"{self._folder.name}/r",
        )
        self._producer, self._consumer = (
            ray.remote(Producer).remote(),
            ray.remote(Consumer).remote(),
        )

    def both(self, pieces: Pieces, reader: Reader, n: int) -> None:
        ray, waiting = self._ray, []
        ray.get(
            [
                self._producer.prepare.remote(pieces.nbytes),
                self._consumer.prepare.remote(pieces.nbytes, reader.mode),
            ]
        )
        for k in range(n):
            if len(waiting) == AHEAD:
                ray.get(waiting.pop(0))
            waiting.append(self._consumer.take.remote(self._producer.make.remote(k), k))
        ray.get(waiting)

    def cpu_s(self) -> float:
        return time.process_time() + sum(cpu_of(pid) for pid in descendants(os.getpid()))

    def close(self) -> None:
        self._ray.shutdown()
        self._folder.cleanup()


class Producer:
    """Gathers into one buffer; Ray copies it into its store."""

    def prepare(self, nbytes: int) -> None:
        import numpy as np

        self._pieces, self._buffer = Pieces(nbytes), np.zeros(nbytes, np.uint8)

    def make(self, k: int) -> Any:
        self._pieces.stamp(k)
        self._pieces.gather(self._buffer)
        return self._buffer


class Consumer:
    def prepare(self, nbytes: int, mode: str) -> None:
        self._reader = Reader(nbytes, mode)

    def take(self, array: Any, k: int) -> None:
        self._reader.read(array, k)


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            parents.setdefault(int(fields[1]), []).append(int(name))
    found, level = [], [pid]
    while level:
        level = [child for parent in level for child in parents.get(parent, [])]
        found += level
    return found


def cpu_of(pid: int) -> float:
    fields = _stat(pid)
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc after the name (state, parent, ...); empty after an exit."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
