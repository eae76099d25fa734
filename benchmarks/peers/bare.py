"""No framework: one process, one thread, the loop that a good engineer writes for this one job and
no other.
"""

from __future__ import annotations

from collections.abc import Iterator

from corpus import Corpus
from peers.kernel import Microbatch, mixed_microbatches
from peers.work import Work


def prepare(work: Work) -> None:
    """Nothing to import beyond the kernel."""


def microbatches(corpus: Corpus, work: Work) -> Iterator[Microbatch]:
    return mixed_microbatches(corpus, work)
