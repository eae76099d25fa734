"""The process that launches and serves (``python -m fetching.server``). A line on its input is
answered with what went through links.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fetching.case import Case


def make_job(case: Case) -> Any:
    import overlord as ov

    sources = [
        ov.Source(path.stem, str(path), transforms=[ov.Tokens("tokens")], shuffle=False)
        for path in sorted(Path(case.folder).iterdir())
    ]
    batch = ov.Batch(
        tokens=case.dp * case.microbatches * case.context * 9 // 10,
        context=case.context,
        microbatches=case.microbatches,
    )
    place = ov.ClientPlaceTree(dp=case.dp, tp=case.tp)
    return ov.Job(
        name="fetching", sources=sources, batch=batch, place=place, seed=1, on_long="truncate"
    )


def main() -> None:
    import overlord as ov  # here: hosts import this file again

    case = Case(**json.loads(sys.argv[1]))
    job = make_job(case)
    hosts = {
        "hosts": case.hosts,
        "workers": case.hosts,
        "sources_per_host": -(-len(job.sources) // case.hosts),
    }
    more = {"constructor_hosts": case.dp} if case.constructors else {"constructors": False}
    with ov.launch(
        job, runtime="process", broadcast=False, **hosts, **more
    ) as session:  # every rank fetches
        served = session.serve()
        print(json.dumps([served.address, served.token]), flush=True)
        for _ in sys.stdin:
            metrics = session.metrics()
            print(
                json.dumps({"transfer": metrics["transfer"], "steps": metrics["planned_steps"]}),
                flush=True,
            )


if __name__ == "__main__":
    main()
