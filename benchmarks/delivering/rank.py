"""A consuming process: ``python -m delivering.rank``.

It takes steps as a trainer does, and reports the bytes that it received and the resources that it
used. It imports everything first; a line of input then starts it, with the address of the server if
there is one. It writes lines of JSON: ready, and a mark before and after the counted steps. Then it
waits with its loader alive, while the parent measures memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from delivering.case import INSIDE, OURS, Case
from peers.contract import PAGE
from peers.measure import cpu_seconds, read_bytes
from peers.work import Work


@dataclass(frozen=True, slots=True)
class Taken:
    """One step as one process received it."""

    tokens: int
    samples: int
    arrays: list[Any]


Stream = Iterator[Taken]


def of_step(
    microbatches: list[Mapping[str, Any]], encoder: list[Mapping[str, Any]], counts: bool = True
) -> Taken:
    """Return the record of a step; ``counts``: no other rank has its samples and tokens."""
    arrays = [value for part in (*microbatches, *encoder) for value in part.values()]
    if not counts:
        return Taken(0, 0, arrays)
    bounds = [mb["cu_seqlens"] for mb in microbatches]
    return Taken(sum(int(b[-1]) for b in bounds), sum(len(b) - 1 for b in bounds), arrays)


def received(case: Case, rank: int, address: str, token: str) -> Stream:
    """Yield the steps that a server delivers."""
    import overlord as ov

    counts = case.axis == "dp" or rank == 0  # ranks of one group have the same samples
    for step in ov.connect(address, rank, token):
        yield of_step(list(step), list(getattr(step, "encoder", ())), counts)


def inside(case: Case) -> Stream:
    """Yield the steps of all ranks in this process."""
    import overlord as ov
    from delivering.job import make_job

    with ov.launch(
        make_job(case), runtime="local", workers=1 if case.way == "overlord-one" else None
    ) as session:
        clients = [session.client(rank=rank) for rank in range(case.ranks)]
        for steps in zip(*clients, strict=True):
            taken = [of_step(list(step), list(step.encoder)) for step in steps]
            yield Taken(
                sum(t.tokens for t in taken),
                sum(t.samples for t in taken),
                [a for t in taken for a in t.arrays],
            )


def text_microbatches(case: Case) -> Iterator[Any]:
    """Return microbatches; every rank of a group reads and builds all that the group needs."""
    from corpus import open_corpus
    from peers.kernel import mixed_microbatches

    work = Work(
        "bare",
        case.job,
        case.folder,
        case.n_sources,
        0,
        context=case.context,
        microbatches=case.microbatches,
        seed=case.seed,
    )
    return mixed_microbatches(open_corpus(Path(case.folder), case.n_sources), work)


def picture_parts(case: Case, reader: int, readers: int) -> Iterator[Any]:
    from delivering.job import TOKENIZER
    from delivering.kernel import picture_steps
    from delivering.pictures import open_pictures

    folder = Path(case.folder)
    tokenizer = None if case.job == "null-pictures" else folder / TOKENIZER
    return picture_steps(
        case,
        open_pictures(folder, case.n_sources),
        tokenizer,
        case.samples // readers,
        reader,
        readers,
    )


def alone(case: Case, rank: int) -> Stream:
    """Yield the steps of the bare loop; with images one loop serves all ranks.

    Each rank then has its own samples.
    """
    if case.pictures:
        for microbatches, encoder in picture_parts(case, 0, 1):
            yield of_step(microbatches, [encoder])
    stream = text_microbatches(case)
    while True:
        yield of_step(list(islice(stream, case.microbatches)), [], rank == 0)


def dataloader(case: Case, rank: int) -> Stream:
    """Yield the steps of torch's DataLoader with one worker, which runs the bare loop."""
    from torch.utils.data import DataLoader

    from delivering.torch_side import Parts, Texts

    if case.pictures:
        for microbatches, encoder in DataLoader(Parts(case, rank), batch_size=None, num_workers=1):
            yield of_step(microbatches, [encoder])
    stream = iter(
        DataLoader(Texts(case), batch_size=None, num_workers=1, prefetch_factor=case.microbatches)
    )
    while True:
        yield of_step(list(islice(stream, case.microbatches)), [], rank == 0)


def prepare(case: Case) -> Callable[[int, Any], Stream]:
    """Import the modules of a loader; return the function that opens it."""
    if case.way in OURS:
        import overlord as ov

        assert ov.connect  # names are loaded when first used
        return lambda rank, served: received(case, rank, *served)
    if case.way in INSIDE:
        import delivering.job

        return lambda rank, served: inside(case)
    if case.pictures:
        import delivering.kernel  # noqa: F401
    if case.way == "torch":
        import torch

        torch.set_num_threads(1)
        return lambda rank, served: dataloader(case, rank)
    return lambda rank, served: alone(case, rank)


def touch(taken: Taken, pages: bool) -> int:
    """Return the bytes of a step; ``pages``: also read one byte of each page.

    The first access maps the memory of another process.
    """
    if pages:
        for array in taken.arrays:
            if array.nbytes >= PAGE:
                np.asarray(array).reshape(-1).view(np.uint8)[::PAGE].max()
    return sum(array.nbytes for array in taken.arrays)


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def take(stream: Stream, steps: int, pages: bool) -> dict[str, int]:
    total = {"tokens": 0, "samples": 0, "delivered": 0}
    for taken in islice(stream, steps):
        total["tokens"] += taken.tokens
        total["samples"] += taken.samples
        total["delivered"] += touch(taken, pages)
    return total


def used(case: Case) -> dict[str, float]:
    """Return the resources used by this process and its descendants.

    A rank with a DataLoader reads the pipe of its worker; only the worker reads files.
    """
    pid = os.getpid()
    return {
        "cpu": cpu_seconds(pid),
        "read": read_bytes(pid, below=case.way == "torch"),
        "wall": time.monotonic(),
    }


def main() -> None:
    case, rank = Case(**json.loads(sys.argv[1])), int(sys.argv[2])
    opened = prepare(replace(case))
    say(ready=True)
    stream = opened(rank, json.loads(sys.stdin.readline()))
    take(stream, case.warm, pages=True)
    say(**used(case))
    found = take(stream, case.steps, pages=False)
    say(**used(case), **found)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
