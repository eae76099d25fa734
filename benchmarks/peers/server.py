"""The process that launches and serves a job: ``python -m peers.server``.

The planner is in this process, loaders and constructors are in workers. The clock starts with a
line of input; index, fork server and workers are start-up.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from peers.marks import say
from peers.work import Work


def options(work: Work) -> dict[str, Any]:
    """Return the launch options: defaults, or loader workers with one thread each.

    Sources are then shared out evenly.
    """
    if not work.hosts:
        return {}
    return {
        "hosts": work.hosts,
        "workers": work.hosts,
        "sources_per_host": -(-work.n_sources // work.hosts),
    }


def main() -> None:
    # here: the hosts import this file again, and find what they need in the fork server
    import overlord as ov
    import overlord_side
    from corpus import open_corpus

    work = Work(**json.loads(sys.argv[1]))
    overlord_side.prepare(work)
    say(ready=True)
    sys.stdin.readline()
    job = overlord_side.make_job(
        open_corpus(Path(work.folder), work.n_sources, equal=work.equal), work
    )
    with ov.launch(job, runtime="process", **options(work)) as session:
        served = session.serve()
        say(serving=[served.address, served.token])
        sys.stdin.read()


if __name__ == "__main__":
    main()
