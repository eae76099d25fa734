"""Dummy loading jobs, each a process of its own (``python -m overlord.dryrun.stand_in_job``): what
a colocated loader's worker holds, and what a client holds. They are told what to do by JSON on
their input, and answer with JSON; memory is that of the real thing.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

BATCH_ROWS = 64  # rows that a worker decodes at a time
HELD_BYTES = 2**20  # of a file that is no Parquet: what is read of it at once


def opened(files: list[list[str]], columns: list[list[str] | None], counts: list[int]) -> None:
    """A worker forked as torch's DataLoader forks its own, that opens source after source and takes
    a batch of each. Tells what it added with nothing opened, and with so many sources open.
    """
    import pyarrow.parquet as pq  # before the fork, as in a trainer

    from overlord.process.memory import own_bytes

    gc.collect()
    gc.freeze()
    alone = own_bytes()
    answers, ask = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - its memory is looked at from outside
        held: list[Any] = []
        for names, wanted in zip(files, columns, strict=True):
            os.write(ask, b".")
            signal.sigwait({signal.SIGUSR1})
            held.append(_open(pq, names[0], wanted))
        os.write(ask, b".")
        signal.pause()
    found = []
    for n in range(len(files) + 1):
        os.read(answers, 1)
        if n in (0, *counts):
            found.append(own_bytes() + own_bytes(child) - alone)
        os.kill(child, signal.SIGUSR1 if n < len(files) else signal.SIGKILL)
    os.waitpid(child, 0)
    _say({"bytes": found})


def _open(pq: Any, path: str, columns: list[str] | None) -> Any:
    if not path.endswith(".parquet"):
        file = open(path, "rb")  # noqa: SIM115 - held open, as a worker holds it
        return file, file.read(HELD_BYTES)
    file = pq.ParquetFile(path)
    batches = file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False)
    return file, batches, next(batches, None)


def connected(address: str, token: str, steps: int) -> None:
    """A client: what it adds to its process, without steps; then, when told to go on, tokens and
    bytes of so many steps.
    """
    from overlord.client.connect import connect
    from overlord.process.memory import own_bytes

    gc.collect()
    before = own_bytes()
    client = connect(address, 0, token)
    added = own_bytes() - before
    next(client)  # hosts have begun
    _say({"bytes": added})
    sys.stdin.readline()
    tokens = nbytes = 0
    for _ in range(steps):
        step = next(client)
        nbytes += step._bucket.nbytes
        tokens += sum(sample.length for microbatch in step for sample in microbatch.samples)
    _say({"tokens": tokens, "bytes": nbytes})
    sys.stdin.readline()  # alive, while hosts are looked at


def _say(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


JOBS: dict[str, Callable[..., None]] = {"opened": opened, "connected": connected}


def main() -> None:
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGUSR1}
    )  # for the worker's waits; inherited over the fork
    told = json.loads(sys.stdin.readline())
    JOBS[told.pop("job")](**told)


if __name__ == "__main__":
    main()
