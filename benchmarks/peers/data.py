"""The corpora of a run, with a progress bar while they are written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from corpus import Corpus, make_corpus
from page import progress


def corpora(console: Console, root: Path, sources: Iterable[int], seed: int) -> dict[int, Corpus]:
    """Return the corpora by number of sources."""
    with progress(console) as shown:
        bars = {
            name: shown.add_task(f"data: {name}", total=None) for name in ("sources", "tokenizer")
        }
        return {
            n: make_corpus(
                root, n, seed, lambda name, at, of: shown.update(bars[name], completed=at, total=of)
            )
            for n in sources
        }
