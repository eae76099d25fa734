"""The bare loop: one process and one thread, without a framework, written for this job only."""

from __future__ import annotations

from collections.abc import Iterator

from corpus import Corpus
from peers.kernel import Microbatch, mixed_microbatches
from peers.work import Work


def prepare(work: Work) -> None:
    """Do nothing: the kernel has all imports."""


def microbatches(corpus: Corpus, work: Work) -> Iterator[Microbatch]:
    return mixed_microbatches(corpus, work)
