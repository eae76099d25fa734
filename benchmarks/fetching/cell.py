"""Runs one case: a server and a process for each rank, fresh ones, looked at from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fetching.case import Case, Found
from peers.measure import cpu_seconds, pss_bytes

HERE = Path(__file__).resolve().parents[1]


def write_sources(folder: Path, n: int, rows: int = 2000) -> None:
    """Token ids, lengths skewed around 250."""
    rng = np.random.default_rng(1)
    for i in range(n):
        lengths = np.clip(rng.lognormal(5.5, 1.0, rows), 1, 8000).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        values = rng.integers(0, 50_000, offsets[-1], dtype=np.int32)
        pq.write_table(
            pa.table({"tokens": pa.ListArray.from_arrays(offsets, values)}),
            folder / f"s{i:03d}.parquet",
            row_group_size=500,
        )


class Child:
    """A process of the case; speaks JSON lines."""

    def __init__(self, module: str, case: Case, cache: str, *more: str):
        single = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src")]),
            "OVERLORD_CACHE": cache,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(asdict(case)), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **single},
            cwd=HERE,
        )

    def say(self, value: Any = None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the case ended early, with {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """A server needs its input closed to close its hosts."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()


def run(case: Case, limit_s: float = 180.0) -> Found:
    with tempfile.TemporaryDirectory() as cache:
        server = Child("fetching.server", case, cache)
        ranks = [Child("fetching.rank", case, cache, str(rank)) for rank in range(case.ranks)]
        deadline = threading.Timer(
            limit_s, lambda: [child.process.kill() for child in (server, *ranks)]
        )
        deadline.start()
        try:
            return observe(case, server, ranks)
        finally:
            deadline.cancel()
            for child in (*ranks, server):
                child.end()


def observe(case: Case, server: Child, ranks: list[Child]) -> Found:
    served = server.hear()
    for rank in ranks:
        rank.say(served)
    warm = [rank.hear() for rank in ranks]
    before = cpu_seconds(server.process.pid)
    end = [rank.hear() for rank in ranks]
    serving = cpu_seconds(server.process.pid) - before
    clients = sum(e["cpu"] - w["cpu"] for e, w in zip(end, warm, strict=True))
    pss = pss_bytes([rank.process.pid for rank in ranks])
    whole = pss + pss_bytes([server.process.pid])
    server.say()
    told = server.hear()
    loaders = [row for name, row in told["transfer"].items() if name.startswith("loader-host/")]
    per_client = [
        row["links"] for name, row in told["transfer"].items() if name.startswith("client/")
    ] or [1] * case.ranks
    links = sum(row["links"] for row in loaders)
    return Found(
        case=case,
        links_per_loader_host=links / len(loaders),
        links_per_client=sum(per_client) / case.ranks,
        links=links + case.ranks,
        step_bytes=sum(row["sent_bytes"] for row in loaders) / told["steps"],
        step_cpu_ms=1000 * (serving + clients) / case.steps,
        client_cpu_ms=1000 * clients / case.ranks / case.steps,
        pss_mb=whole / 2**20,
        client_pss_mb=pss / 2**20 / case.ranks,
        fetch_ms=tuple(1000 * s for e in end for s in e["waited"]),
    )
