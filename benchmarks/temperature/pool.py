"""Processes that execute runs one after another: libraries load and the GPU is opened once.

A worker reads a run as a line of JSON and answers with one. It ends after a run that failed, since an
error of the GPU may have spoiled its process; another takes its place.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

READY = {"ready": True}
START_S = 150.0  # until a worker is ready
Cell = dict[str, Any]
Said = tuple["Worker", "Cell | None"]


class Worker:
    """A process; its answers go to a queue, and None after the last."""

    def __init__(self, command: Sequence[str], log: Path, inbox: queue.Queue[Said], threads: int):
        self.cell: Cell | None = None
        self.ready, self.began, self.log = False, time.monotonic(), log
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                env=environ,
            )
        threading.Thread(target=self._listen, args=(inbox,), daemon=True).start()

    def _listen(self, inbox: queue.Queue[Said]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            inbox.put((self, json.loads(line)))
        inbox.put((self, None))

    def give(self, cell: Cell) -> None:
        assert self.process.stdin is not None
        self.cell, self.began = cell, time.monotonic()
        try:
            self.process.stdin.write(json.dumps(cell) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it ended: the queue says so

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def seconds(self) -> float:
        """Since the process or its run began."""
        return time.monotonic() - self.began

    def last_words(self) -> str:
        return self.log.read_text(errors="replace").strip()[-300:]


class Pool:
    """A fixed number of workers, of which dead ones are replaced."""

    def __init__(self, command: Sequence[str], folder: Path, count: int, limit_s: float):
        self._command, self._folder, self._limit = command, folder, limit_s
        self._inbox: queue.Queue[Said] = queue.Queue()
        cores = len(os.sched_getaffinity(0))
        self._threads = max(1, cores // count) if "cuda" in command else 1
        self._made = 0
        self.workers = [self._new() for _ in range(count)]

    def _new(self) -> Worker:
        self._made += 1
        log = self._folder / f"worker-{self._made}.log"
        return Worker(self._command, log, self._inbox, self._threads)

    @property
    def busy(self) -> list[Worker]:
        return [w for w in self.workers if w.cell is not None]

    @property
    def idle(self) -> list[Worker]:
        return [w for w in self.workers if w.ready and w.cell is None]

    def answer(self, wait_s: float) -> Cell | None:
        """Return the record of a run that ended, failed or took too long; None if there is none."""
        for worker in self.workers:
            limit = self._limit if worker.ready else START_S
            if (worker.cell is not None or not worker.ready) and worker.seconds > limit:
                return self._lost(worker, f"longer than {limit:g} s")
        try:
            worker, said = self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return None
        if worker not in self.workers:
            return None  # the last words of one that was replaced
        if said is None:
            return self._lost(worker, worker.last_words() or "the process ended")
        if said == READY:
            worker.ready = True
            return None
        cell, seconds = worker.cell or {}, round(worker.seconds, 2)
        worker.cell = None
        if "failed" in said:
            self._lost(worker, "")
            return cell | said
        return cell | said | {"seconds": seconds}

    def _lost(self, worker: Worker, reason: str) -> Cell | None:
        cell, ready = worker.cell, worker.ready
        worker.stop()
        if not ready:
            raise SystemExit(f"a worker did not start: {reason}")
        self.workers[self.workers.index(worker)] = self._new()
        return None if cell is None else cell | {"failed": reason}

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()


def serve(execute: Callable[[Cell], Cell]) -> None:
    """Execute runs from the standard input until one fails or there are no more."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    out.write(json.dumps(READY) + "\n")
    for line in sys.stdin:
        try:
            found = execute(json.loads(line))
        except Exception as error:  # any: it is the record of the run
            out.write(json.dumps({"failed": f"{type(error).__name__}: {error}"[:300]}) + "\n")
            raise
        out.write(json.dumps(found) + "\n")
