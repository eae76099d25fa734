"""Run one case in fresh processes, and measure these from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from delivering.case import OURS, Case, Found
from peers.measure import cpu_seconds, pss_bytes, read_bytes

HERE = Path(__file__).resolve().parents[1]


class CellFailed(RuntimeError):
    """A process of the case ended early; the message has the end of its stderr."""


class Child:
    """A process of the case, which exchanges lines of JSON with this one.

    It leads a process session of its own, so that ending it ends all its descendants.
    """

    def __init__(self, module: str, case: Case, cache: str, errors: Any, *more: str):
        single = {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONWARNINGS": "ignore",
            "OVERLORD_CACHE": cache,
        }
        paths = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
        self.errors = errors
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(asdict(case)), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **single, "PYTHONPATH": paths},
            cwd=HERE,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def say(self, value: Any = None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            raise CellFailed(
                "a process of the case ended early, with "
                f"{self.process.returncode}\n{self.errors.read()[-3000:]}"
            )
        return json.loads(line)

    def end(self) -> None:
        """Kill the process and its descendants: the closing of loaders is not measured."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()


def run(case: Case, limit_s: float = 300.0) -> Found:
    # An empty cache each time: Overlord keeps its index of the files there, and the others have
    # none to start from.
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as errors:
        children: list[Child] = []
        deadline = threading.Timer(limit_s, lambda: [child.process.kill() for child in children])
        deadline.start()
        try:
            if case.way in OURS:
                children.append(Child("delivering.server", case, cache, errors))
            children += [
                Child("delivering.rank", case, cache, errors, str(rank))
                for rank in range(case.processes)
            ]
            return observe(case, children)
        finally:
            deadline.cancel()
            for child in children:
                child.end()


def observe(case: Case, children: Sequence[Child]) -> Found:
    server, ranks = (children[0], children[1:]) if case.way in OURS else (None, children)
    for child in children:
        child.hear()
    idle, served = pss_bytes(child.pid for child in children), None
    if server is not None:
        server.say()
        served = server.hear()
    for rank in ranks:
        rank.say(served)
    warm = [rank.hear() for rank in ranks]
    before = serving(server)
    end = [rank.hear() for rank in ranks]
    after = serving(server)
    pss = pss_bytes(child.pid for child in children)
    cpu, read = (
        sum(e[k] - w[k] for e, w in zip(end, warm, strict=True)) + after[i] - before[i]
        for i, k in enumerate(("cpu", "read"))
    )
    told = {key: sum(e[key] for e in end) for key in ("tokens", "samples", "delivered")}
    wall = max(e["wall"] for e in end) - min(w["wall"] for w in warm)
    return Found(
        case=case,
        **told,
        read=int(read),
        cpu_s=cpu,
        wall_s=wall,
        pss_mb=pss / 2**20,
        idle_mb=idle / 2**20,
    )


def serving(server: Child | None) -> tuple[float, float]:
    """Return CPU seconds and bytes read by the server and its workers."""
    return (
        (0.0, 0.0) if server is None else (cpu_seconds(server.pid), float(read_bytes(server.pid)))
    )
