"""The process that launches and serves (``python -m peers.server``): planner here, loaders and
constructors in hosts below it.

The clock starts with the line on its input; index, fork server and hosts are start-up.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from peers.marks import say
from peers.work import Work


def options(work: Work) -> dict[str, Any]:
    """Its own choice, or so many loader hosts with a thread each; the sources are shared out
    evenly.
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
