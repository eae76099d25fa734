"""The process that launches and serves a job: ``python -m holding.server``.

It answers each line of input with the memory of standbys.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from holding.case import LOCAL, Case


def job_of(case: Case) -> Any:
    import overlord as ov
    import overlord_side
    from corpus import open_corpus

    job = overlord_side.make_job(
        open_corpus(Path(case.folder), case.n_sources, equal=True), case.work()
    )
    batch = replace(job.batch, samples=case.samples) if case.samples else job.batch
    return replace(job, place=ov.ClientPlaceTree(dp=case.ranks, tp=case.tp), batch=batch)


def options_of(case: Case) -> dict[str, Any]:
    """Return the options of ``launch``."""
    found: dict[str, Any] = {"workers": case.loading, "partition": case.partition or "off"}
    if case.kind != LOCAL and case.hosts:
        found |= {"hosts": case.hosts, "sources_per_host": -(-case.n_sources // case.hosts)}
    if case.shadows:
        found["shadows"] = "all"
    return found


def main() -> None:
    import overlord as ov  # here: hosts import this file again

    case = Case(**json.loads(sys.argv[1]))
    job = job_of(case)
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    with ov.launch(job, runtime=case.kind, **options_of(case)) as session:
        served = session.serve(ranks=[rank * case.tp for rank in range(case.ranks)])
        print(json.dumps([served.address, served.token]), flush=True)
        for _ in sys.stdin:
            memory = session.metrics()["memory"]
            print(
                json.dumps({"shadows": memory.get("shadows", 0), "roles": memory["roles"]}),
                flush=True,
            )


if __name__ == "__main__":
    main()
