"""The jobs of benchmarks/delivery.py for Overlord."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import overlord as ov
from corpus import open_corpus
from delivering.case import Case
from delivering.pictures import open_pictures
from overlord_side import FILL, MEAN_TOKENS

TOKENIZER = "tokenizer.json"


def make_job(case: Case) -> ov.Job:
    strategy, sources = (
        ("vlm_hybrid", picture_sources(case))
        if case.pictures
        else ("llm_balance", text_sources(case))
    )
    place = ov.ClientPlaceTree(**{case.axis: case.ranks})
    batch = ov.Batch(
        samples=case.samples or filling(case), microbatches=case.microbatches, context=case.context
    )
    more = {
        "strategy": strategy,
        "seed": case.seed,
        "on_long": "truncate",
    }  # the bare loop cuts at the context too
    return ov.Job(name=f"delivery-{case.job}", sources=sources, place=place, batch=batch, **more)


def filling(case: Case) -> int:
    """Return the samples that fill the microbatches of all groups about as next-fit does."""
    groups = case.ranks if case.axis == "dp" else 1
    return round(groups * case.microbatches * case.context * FILL / MEAN_TOKENS[case.job])


def text_sources(case: Case) -> list[ov.Source]:
    corpus = open_corpus(Path(case.folder), case.n_sources)
    transform: Any = (
        ov.Tokens("tokens")
        if case.job == "null"
        else ov.Tokenize(str(corpus.tokenizer), text="text")
    )
    return [
        ov.Source(s.name, s.glob, transforms=[transform], weight=s.weight, shuffle=False)
        for s in corpus.sources
    ]


def picture_sources(case: Case) -> list[ov.Source]:
    from delivering.kernel import IMAGES

    folder = Path(case.folder)
    ids: Any = (
        ov.Tokens("tokens")
        if case.job == "null-pictures"
        else ov.Tokenize(str(folder / TOKENIZER), text="text")
    )
    files = open_pictures(folder, case.n_sources).files
    return [
        ov.Source(Path(f).stem, f, transforms=[ids, ov.Images(**IMAGES)], shuffle=False)
        for f in files
    ]
