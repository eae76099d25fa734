"""The processes of a cell of benchmarks/cluster.py.

They run as ``python -m peers.cluster_sides server|rank|all`` and begin on request. ``all``: the
bare loop or Overlord in one process, which takes the steps of all ranks. ``server``: launches
Overlord with processes or on Ray, and serves. ``rank``: connects to the server and only receives.
Their imports do not count.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from peers.line import Line, take_steps
from peers.work import Work

PER_HOST = {"overlord-ray": 25, "overlord-ray-one": 1}  # sources; others: as it chooses


def serve(work: Work, line: Line) -> None:
    import overlord as ov  # here: hosts import this file again
    import overlord_side
    from corpus import open_corpus

    on_ray = work.peer.startswith("overlord-ray")
    overlord_side.prepare(work)
    with contextlib.ExitStack() as stack:
        if on_ray:
            from overlord.ray.cluster import cluster
        line.say(ready=True)
        line.hear()
        if on_ray:
            stack.enter_context(cluster())
        line.say(cluster=time.monotonic())
        job = overlord_side.make_job(open_corpus(Path(work.folder), work.n_sources), work)
        options = {"sources_per_host": PER_HOST[work.peer]} if work.peer in PER_HOST else {}
        session = stack.enter_context(
            ov.launch(job, runtime="ray" if on_ray else "process", **options)
        )
        served = session.serve()
        hosts = [
            part["pid"]
            for part in session.metrics()["actors"]
            if part["role"] in ("host", "constructor") and part["pid"]
        ]
        line.say(serving=[served.address, served.token], hosts=sorted(set(hosts)))
        while line.hear() != "end":
            found = session.metrics()
            line.say(
                ahead=found["planned_steps"]
                - min(client["steps"] for client in found["clients"].values())
            )


def receive(work: Work, line: Line) -> None:
    import overlord as ov

    connect = ov.connect  # names are loaded when first used
    line.say(ready=True)
    address, token = line.hear()
    take_steps(iter(connect(address, work.rank, token)), work, line)


def take_all(work: Work, line: Line) -> None:
    import overlord_side
    from corpus import open_corpus
    from peers import bare

    side: Any = bare if work.peer == "bare" else overlord_side
    side.prepare(work)
    line.say(ready=True)
    line.hear()
    microbatches: Iterator[Any] = side.microbatches(
        open_corpus(Path(work.folder), work.n_sources), work
    )
    take_steps(iter(lambda: list(islice(microbatches, work.step)), []), work, line)


def main() -> None:
    what, path, work = sys.argv[1], sys.argv[2], Work(**json.loads(sys.argv[3]))
    line = Line(path, what if what != "rank" else f"rank/{work.rank}")
    {"server": serve, "rank": receive, "all": take_all}[what](work, line)


if __name__ == "__main__":
    main()
