"""A rank that only receives (``python -m peers.connected``): torch and the client and nothing else,
as a trainer has them.

Imports come first and count for nobody; then a line on its input is the start of the clock, and a
second one, when the server is there, has its address. Until the steady part it reads a byte of
every page it gets, or shared memory would never be mapped, which no trainer is spared; from then on
it does with microbatches what all consumers here do. At its last mark it goes on taking steps, so
that ranks behind it are not held up.
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
