"""The job of the benchmarks through Overlord in one process that plans, reads, packs and serves.

``overlord`` reads in file order, as the peers do. ``overlord-shuffled`` leaves shuffling on, which
is Overlord's default. ``overlord-one`` has one worker thread, as the bare loop: threads that
tokenize concurrently slow each other down.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import overlord as ov
from corpus import Corpus
from peers.work import Work

# Share of the context that next-fit fills on this data: equal microbatches, equal tokens in each.
FILL = 0.85
MEAN_TOKENS = {"null": 424.0, "tokenized": 593.0}  # of a sample of this data, truncated at 8192


def prepare(work: Work) -> None:
    """Use the names of the package, which are imported lazily: imports are not measured."""
    for name in (
        "Job",
        "Source",
        "Batch",
        "ClientPlaceTree",
        "Tokens",
        "Tokenize",
        "launch",
        "Client",
    ):
        getattr(ov, name)


def make_job(corpus: Corpus, work: Work) -> ov.Job:
    transform: Any = (
        ov.Tokens("tokens")
        if work.job == "null"
        else ov.Tokenize(str(corpus.tokenizer), text="text")
    )
    sources = [
        ov.Source(
            s.name,
            s.glob,
            transforms=[transform],
            weight=s.weight,
            shuffle=work.peer.endswith("shuffled"),
        )
        for s in corpus.sources
    ]
    return ov.Job(
        name=f"throughput-{work.job}-{work.n_sources}",
        sources=sources,
        place=ov.ClientPlaceTree(dp=work.ranks),
        batch=ov.Batch(
            samples=samples_per_step(work), microbatches=work.microbatches, context=work.context
        ),
        strategy="llm_balance",
        seed=work.seed,
        on_long="truncate",  # as the peers do
    )


def samples_per_step(work: Work) -> int:
    """Return the samples that fill the fewest microbatches about as full as next-fit does."""
    return round(work.ranks * work.microbatches * work.context * FILL / MEAN_TOKENS[work.job])


def microbatches(corpus: Corpus, work: Work) -> Iterator[Any]:
    """Yield the microbatches of all ranks, step by step, as the ranks of a training take them."""
    with ov.launch(
        make_job(corpus, work), runtime="local", workers=1 if work.peer == "overlord-one" else None
    ) as session:
        clients = [session.client(rank=rank) for rank in range(work.ranks)]
        for steps in zip(*clients, strict=True):
            for step in steps:
                yield from step
