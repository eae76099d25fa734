"""The same job through Overlord, embedded: one process plans, reads, packs and serves all ranks.

``overlord`` reads in file order, as the peers do. ``overlord-shuffled`` leaves shuffling on, which
is Overlord's default. ``overlord-one`` has one worker thread, the bare loop's parallelism: threads
that tokenize side by side cost each other time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import overlord as ov
from corpus import Corpus
from peers.work import Work

# share of the context that next-fit reaches on this data: equal microbatches, equal tokens in each
FILL = 0.85
MEAN_TOKENS = {"null": 424.0, "tokenized": 593.0}  # of a sample of this data after the cut at 8192


def prepare(work: Work) -> None:
    """Its names are loaded when first used; importing counts for nobody, so they are used here."""
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
    """Samples that fill the least number of microbatches about as full as next-fit fills them."""
    return round(work.ranks * work.microbatches * work.context * FILL / MEAN_TOKENS[work.job])


def microbatches(corpus: Corpus, work: Work) -> Iterator[Any]:
    """Microbatches of all ranks, step by step in lockstep, as the ranks of one training would take
    them.
    """
    with ov.launch(
        make_job(corpus, work), runtime="local", workers=1 if work.peer == "overlord-one" else None
    ) as session:
        clients = [session.client(rank=rank) for rank in range(work.ranks)]
        for steps in zip(*clients, strict=True):
            for step in steps:
                yield from step
