"""Stand-in jobs, each in its own process: ``python -m overlord.dryrun.stand_in_job``.

They measure the memory of a worker of a colocated loader, and of a client, with real files and a
real client. A job reads a request as JSON from stdin and writes results as JSON to stdout.
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
HELD_BYTES = 2**20  # bytes read at once from a file that is not Parquet


def open_sources(
    files: list[list[str]], columns: list[list[str] | None], counts: list[int]
) -> None:
    """Print the bytes that a forked worker adds, without sources and with ``counts`` of them open.

    The worker opens a source by reading a batch from its first file. It is forked as in torch's
    DataLoader. ``files`` and ``columns`` are by source; columns None: all.
    """
    import pyarrow.parquet as pq  # before the fork, as in a trainer

    from overlord.process.resources import own_bytes

    gc.collect()
    gc.freeze()
    alone = own_bytes()
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - the parent measures its memory
        held: list[Any] = []
        for names, wanted in zip(files, columns, strict=True):
            os.write(writable, b".")
            signal.sigwait({signal.SIGUSR1})
            held.append(_open(pq, names[0], wanted))
        os.write(writable, b".")
        signal.pause()
    found = []
    for n in range(len(files) + 1):
        os.read(readable, 1)
        if n in (0, *counts):
            found.append(own_bytes() + own_bytes(child) - alone)
        os.kill(child, signal.SIGUSR1 if n < len(files) else signal.SIGKILL)
    os.waitpid(child, 0)
    _print_result({"bytes": found})


def _open(pq: Any, path: str, columns: list[str] | None) -> Any:
    if not path.endswith(".parquet"):
        file = open(path, "rb")  # noqa: SIM115 - held open, as a worker holds it
        return file, file.read(HELD_BYTES)
    file = pq.ParquetFile(path)
    batches = file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False)
    return file, batches, next(batches, None)


def connect_client(address: str, token: str, steps: int) -> None:
    """Connect a client, and print the bytes of memory that it adds to its process without steps.

    After the next line of input, take ``steps`` steps and print their tokens and bytes. After one
    more line, end.
    """
    from overlord.client.connect import connect
    from overlord.process.resources import own_bytes

    gc.collect()
    before = own_bytes()
    client = connect(address, 0, token)
    added = own_bytes() - before
    next(client)  # workers have started
    _print_result({"bytes": added})
    sys.stdin.readline()
    tokens = nbytes = 0
    for _ in range(steps):
        step = next(client)
        nbytes += step.nbytes
        tokens += sum(sample.length for microbatch in step for sample in microbatch.samples)
    _print_result({"tokens": tokens, "bytes": nbytes})
    sys.stdin.readline()  # stay connected while the parent measures the workers


def _print_result(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


JOBS: dict[str, Callable[..., None]] = {
    "open_sources": open_sources,
    "connect_client": connect_client,
}


def main() -> None:
    """Run the job that the first line of the input requests."""
    # The forked worker inherits the mask and waits for the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    request = json.loads(sys.stdin.readline())
    JOBS[request.pop("job")](**request)


if __name__ == "__main__":
    main()
