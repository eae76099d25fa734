"""Lines of JSON between the measuring program and the processes of a cell, through one socket.

Ranks may be children of any process.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

from peers.contract import check_microbatch, read_pages, real_tokens, touch
from peers.work import Work

# of the tokens: not counted as steady, so that opening sources and filling read-ahead lie before it
WARM_SHARE = 0.25
RUN, REST, PACE = "run", "rest", "pace"


class Line:
    """The end of the socket in one process."""

    def __init__(self, path: str, name: str):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._rest = b""
        self.say(hello=name, pid=os.getpid())

    def say(self, **fields: Any) -> None:
        self._socket.sendall(json.dumps(fields).encode() + b"\n")

    def hear(self) -> Any:
        """Wait for the next line; exit if the other end is closed."""
        while b"\n" not in self._rest:
            if not (data := self._socket.recv(65536)):
                raise SystemExit(0)
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def heard(self, within_s: float = 0.0) -> Any:
        """Return the next line, if there is one."""
        if b"\n" not in self._rest and not select.select([self._socket], [], [], within_s)[0]:
            return None
        return self.hear()


def take_steps(steps: Iterator[list[Any]], work: Work, line: Line) -> None:
    """Run a trainer without a model.

    It takes steps at full speed, or one at a fixed interval, or none, as requested. Until the
    steady part it reads a byte of every received page, since otherwise shared memory would never be
    mapped.
    """
    doing, every_s, tokens, nbytes, count = RUN, 0.0, 0, 0, 0
    warm = WARM_SHARE * work.tokens / work.processes
    while True:
        while (told := line.heard()) is not None or doing == REST:
            doing, every_s = told or line.hear()
        start = time.monotonic()
        step = next(steps, None)
        if step is None:
            line.say(ended=True)
            return
        waited = time.monotonic() - start
        step = list(step)  # microbatches may be built by who takes them
        tokens += sum(map(real_tokens, step))
        nbytes += sum(map(read_pages if tokens < warm else touch, step))
        count += 1
        line.say(steps=count, tokens=tokens, nbytes=nbytes, waited=waited, doing=doing)
        if count == 1:
            for microbatch in step:
                check_microbatch(microbatch, work.context, work.n_sources)
        del step
        if doing == PACE:
            told = line.heard(max(0.0, start + every_s - time.monotonic()))
            doing, every_s = told or (doing, every_s)
