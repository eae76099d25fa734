"""A process that consumes (``python -m delivering.rank``): it takes steps as a trainer would, and
tells what it was given and used.

Imports come first; then a line on its input starts it (the address of the server, where there is
one). It speaks JSON lines: ready, a mark before the counted steps and one behind them; then it
stays, with its loader alive, while memory is looked at.
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
    """A step as one process got it."""

    tokens: int
    samples: int
    arrays: list[Any]


Stream = Iterator[Taken]


def of_step(
    microbatches: list[Mapping[str, Any]], encoder: list[Mapping[str, Any]], counts: bool = True
) -> Taken:
    """``counts``: its samples and tokens are not another rank's."""
    arrays = [value for part in (*microbatches, *encoder) for value in part.values()]
    if not counts:
        return Taken(0, 0, arrays)
    bounds = [mb["cu_seqlens"] for mb in microbatches]
    return Taken(sum(int(b[-1]) for b in bounds), sum(len(b) - 1 for b in bounds), arrays)


def received(case: Case, rank: int, address: str, token: str) -> Stream:
    """From the server."""
    import overlord as ov

    counts = case.axis == "dp" or rank == 0  # ranks of one group have the same samples
    for step in ov.connect(address, rank, token):
        yield of_step(list(step), list(getattr(step, "encoder", ())), counts)


def inside(case: Case) -> Stream:
    """All ranks in this process."""
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
    """Every rank of a group reads and builds all that the group needs."""
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
    """The bare loop; with images one for all ranks, since each has its own samples."""
    if case.pictures:
        for microbatches, encoder in picture_parts(case, 0, 1):
            yield of_step(microbatches, [encoder])
    stream = text_microbatches(case)
    while True:
        yield of_step(list(islice(stream, case.microbatches)), [], rank == 0)


def dataloader(case: Case, rank: int) -> Stream:
    """torch's DataLoader with one worker, which runs the bare loop."""
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
    """Imports what the way needs; returns what opens it."""
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
    """Bytes given; ``pages``: and one of each page is read, since memory of another process is
    mapped by the first look.
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
    """Of this process and all below it. What a DataLoader's rank reads is its worker's pipe: only
    the worker reads files.
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
