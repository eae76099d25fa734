"""A rank, a trainer without a model: ``python -m holding.rank``.

It takes steps as fast as possible until memory is stable. Then it takes one step at a time at the
required pace, and reports its waits. In the local runtime one process has all ranks.
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

from holding.case import COLOCATED, LOCAL, Case
from peers.contract import check_microbatch, read_pages
from peers.imports import as_a_trainer

CHECKED = 2  # steps


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def steps_of(case: Case, rank: int) -> Iterator[list[Any]]:
    from corpus import open_corpus
    from peers import torch_loader

    stream = torch_loader.microbatches(
        open_corpus(Path(case.folder), case.n_sources, equal=True), case.work(rank)
    )
    while True:
        yield list(islice(stream, case.microbatches))


def take(steps: Iterator[Any], case: Case) -> list[float]:
    for k, step in enumerate(islice(steps, case.warm)):
        for microbatch in step:
            read_pages(microbatch)
            if k < CHECKED:
                check_microbatch(microbatch, case.context, case.n_sources)
    say("warm")
    sys.stdin.readline()
    waited, due = [], time.monotonic()
    for _ in range(case.steps):
        time.sleep(max(0.0, due - time.monotonic()))
        start = time.monotonic()
        for microbatch in next(steps):
            read_pages(microbatch)
        waited.append(time.monotonic() - start)
        due = max(due + case.every_s, start)
    return waited


def served(case: Case, rank: int) -> Iterator[list[Any]]:
    import overlord as ov

    address, token = json.loads(sys.stdin.readline())
    return map(list, ov.connect(address, rank * case.tp, token))


def together(case: Case) -> Iterator[list[Any]]:
    """Run all ranks of the local runtime in one process."""
    import overlord as ov
    from holding.server import job_of, options_of

    session = ov.launch(job_of(case), runtime="local", **options_of(case))
    clients = [session.client(rank * case.tp) for rank in range(case.ranks)]
    return (
        [microbatch for step in steps for microbatch in step]
        for steps in zip(*clients, strict=True)
    )


def main() -> None:
    case, rank = Case(**json.loads(sys.argv[1])), int(sys.argv[2])
    as_a_trainer()
    if case.kind != COLOCATED:
        import overlord as ov

        _ = (
            ov.connect,
            ov.launch if case.kind == LOCAL else None,
        )  # names are loaded when first used
    say("ready")
    sys.stdin.readline()
    steps = (
        steps_of(case, rank)
        if case.kind == COLOCATED
        else together(case)
        if case.kind == LOCAL
        else served(case, rank)
    )
    say(take(steps, case))
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.readline()  # alive, while memory is looked at


if __name__ == "__main__":
    main()
