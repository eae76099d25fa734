"""The driver of Ray Data in a cell of benchmarks/throughput.py: ``python -m peers.ray_cell``.

The cluster and the ranks, which have the imports of a trainer, are there before the clock starts.
The driver adopts Ray's processes, so that their CPU time and memory count as its own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers import ray_data
from peers.ledger import adopt_orphans
from peers.marks import WARM_SHARE, mark, say
from peers.work import Work


class Lines:
    """The messages of all ranks, which connect to a socket in the folder of the cell."""

    def __init__(self, path: str):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(64)
        self.said: dict[int, dict[str, Any]] = {}  # by connection: the newest values

    def follow(self) -> None:
        """Accept ranks; read what each says in a thread of its own."""
        while True:
            connection, _ = self.listener.accept()
            number = len(self.said)
            self.said[number] = {}
            threading.Thread(target=self._read, args=(number, connection), daemon=True).start()

    def _read(self, number: int, connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            for line in lines:
                self.said[number] = self.said[number] | json.loads(line)

    def totals(self) -> dict[str, int]:
        return {
            name: sum(said.get(name, 0) for said in list(self.said.values()))
            for name in ("tokens", "nbytes", "steps")
        }

    def all_have_a_step(self, ranks: int) -> bool:
        return sum("steps" in said for said in list(self.said.values())) == ranks

    def failure(self) -> str | None:
        """Return the message of a rank whose data ended."""
        ended = [said["hello"] for said in list(self.said.values()) if "ended" in said]
        return f"{ended[0]}: ran out of data" if ended else None


def marks(lines: Lines, work: Work) -> Iterator[tuple[str, bool]]:
    """Yield the marks in their order, each with whether it is reached."""
    while not lines.all_have_a_step(work.ranks):
        yield "first", False
    yield "first", True
    for name, share in (("warm", WARM_SHARE), ("end", 1.0)):
        while lines.totals()["tokens"] < share * work.tokens:
            yield name, False
        yield name, True


def main() -> None:
    work, folder = Work(**json.loads(sys.argv[1])), Path(os.environ["CELL_FOLDER"])
    os.environ.update(ray_data.SETTINGS)
    import ray

    adopt_orphans()
    lines = Lines(str(folder / "line"))
    threading.Thread(target=lines.follow, daemon=True).start()
    cores = len(os.sched_getaffinity(0))
    ranks = ray_data.start_ranks(str(folder / "line"), work, folder, cores)
    say(ready=True, ranks=ray.get([rank.there.remote(work.trainer) for rank in ranks]))
    sys.stdin.readline()
    mark("start", work, 0, 0, 0)
    taking = ray_data.take_splits(ranks, work, folder, max(1, min(work.workers, cores - 1)))
    for name, reached in marks(lines, work):
        if reached:
            found = lines.totals()
            count = found["steps"] * work.microbatches
            mark(name, work, found["tokens"], found["nbytes"], count)
            continue
        if failed := lines.failure():
            raise RuntimeError(failed)
        done, _ = ray.wait(taking, num_returns=1, timeout=0)
        ray.get(done)  # raises what a rank raised
        time.sleep(0.01)
    sys.stdin.read()


if __name__ == "__main__":
    main()
