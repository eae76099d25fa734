"""Measure how much memory the delivered arrays use: ranks with the same arrays share it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import numpy as np

import overlord as ov
from delivering.case import Case
from delivering.job import make_job
from delivering.rank import of_step


def assembled_bytes(case: Case, steps: int = 2) -> float:
    """Return bytes of memory over bytes delivered, for some steps of all ranks in this process."""
    job = make_job(replace(case, job="null" if case.job == "tokenized" else case.job))
    with ov.launch(job, runtime="local", broadcast=case.way == "overlord-broadcast") as session:
        clients = [session.client(rank=rank) for rank in range(case.ranks)]
        own = given = 0
        for taken in islice(zip(*clients, strict=True), steps):
            arrays = [
                array for step in taken for array in of_step(list(step), [], counts=False).arrays
            ]
            own, given = own + distinct_bytes(arrays), given + sum(a.nbytes for a in arrays)
    return own / given


def distinct_bytes(arrays: Iterable[np.ndarray]) -> int:
    """Return the bytes of the memory that arrays use; shared memory counts once."""
    spans = sorted((a.__array_interface__["data"][0], a.nbytes) for a in arrays)
    total, end = 0, 0
    for start, nbytes in spans:
        total += max(0, start + nbytes - max(start, end))
        end = max(end, start + nbytes)
    return total
