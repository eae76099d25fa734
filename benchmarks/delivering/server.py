"""The process that launches and serves a job: ``python -m delivering.server``."""

from __future__ import annotations

import json
import sys

from delivering.case import Case


def main() -> None:
    import overlord as ov  # here: hosts import this file again
    from delivering.job import make_job

    case = Case(**json.loads(sys.argv[1]))
    job = make_job(case)
    for name in ("launch", "Client"):
        getattr(ov, name)  # names are loaded when first used
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    with ov.launch(job, runtime="process", broadcast=case.way == "overlord-broadcast") as session:
        served = session.serve()
        print(json.dumps([served.address, served.token]), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
