"""Run one case in fresh processes, and measure all of them from outside."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from typing import Any

from holding.case import COLOCATED, LOCAL, Case, Found
from holding.child import Child
from peers.ledger import RANKS, Ledger, end_all, living
from peers.measure import pss_of

LOOK_S = 0.3
END_S = 15.0


class Watch:
    """Records the peak memory of all descendants of this process while a case runs."""

    def __init__(self) -> None:
        self.ledger, self._stop = Ledger(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._stop.wait(LOOK_S):
            self.ledger.look_at_memory()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def run(case: Case, limit_s: float = 240.0) -> Found:
    with tempfile.TemporaryDirectory() as cache:
        apart = case.kind not in (COLOCATED, LOCAL)
        server = [Child("holding.server", case, cache)] if apart else []  # type: ignore[arg-type]
        ranks = [
            Child("holding.rank", case, cache, str(rank))
            for rank in range(1 if case.kind == LOCAL else case.ranks)
        ]  # type: ignore[arg-type]
        deadline = threading.Timer(
            limit_s, lambda: [child.process.kill() for child in (*server, *ranks)]
        )
        deadline.start()
        try:
            return _observed(case, server, ranks)
        finally:
            deadline.cancel()
            for child in (*ranks, *server):
                with contextlib.suppress(Exception):
                    child.end()
            end_all(END_S)


def _observed(case: Case, server: list[Child], ranks: list[Child]) -> Found:
    for child in (*server, *ranks):
        child.hear()  # imports are done
    time.sleep(LOOK_S)
    idle = sum(pss_of(child.process.pid) for child in ranks) / 2**20  # what a trainer has anyway
    with Watch() as watch:
        watch.ledger.named |= {child.process.pid: RANKS for child in ranks}
        for child in (*server, *ranks):
            child.say()
        if server:
            served = server[0].hear()
            for rank in ranks:
                rank.say(served)
        for rank in ranks:
            assert rank.hear() == "warm"
        for rank in ranks:
            rank.say()
        waits = [wait for rank in ranks for wait in rank.hear()]
        watch.ledger.look_at_memory()
        processes = len(living())
        told: dict[str, Any] = {}
        if server:
            server[0].say()
            told = server[0].hear()
    peak = watch.ledger.peak
    return Found(
        case=case,
        over_mb=peak["all"] - idle,
        whole_mb=peak["all"],
        parts_mb=dict(peak),
        shadows_mb=told.get("shadows", 0) / 2**20,
        processes=processes,
        waits=tuple(waits),
        late=sum(wait > case.every_s for wait in waits),
    )
