"""A rank that only receives, with torch and the client alone: ``python -m peers.connected``.

Imports come first and do not count. A line of input starts the clock, and a second one has the
address of the server. Until the steady part the rank reads a byte of every received page, since
otherwise shared memory would never be mapped. From then on it treats microbatches like all other
consumers. After its last mark it keeps taking steps, so that slower ranks are not delayed.
"""

from __future__ import annotations

import itertools
import json
import select
import sys
from collections.abc import Iterator
from typing import Any

import overlord as ov
from peers.contract import read_pages, touch
from peers.imports import as_a_trainer
from peers.marks import consume, mark, say
from peers.work import Work


def microbatches(client: ov.Client) -> Iterator[Any]:
    for step in client:
        yield from step


def main() -> None:
    work = Work(**json.loads(sys.argv[1]))
    connect = ov.connect  # names are loaded when first used
    if work.trainer:
        as_a_trainer()
    say(ready=True)
    sys.stdin.readline()
    mark("start", work, 0, 0, 0)
    address, token = json.loads(sys.stdin.readline())
    stream = microbatches(connect(address, work.rank, token))
    consume(stream, work, read_pages)
    while not select.select([sys.stdin], [], [], 0)[0]:  # until the runner is gone, or kills this
        for microbatch in itertools.islice(stream, work.microbatches):
            touch(microbatch)


if __name__ == "__main__":
    main()
