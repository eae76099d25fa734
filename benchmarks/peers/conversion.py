"""Write the corpus once in the format that a loader reads: ``python -m peers.conversion``.

Converted sources lie next to those of the corpus and are used by later runs. The time that it takes
is not measured.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from corpus import Corpus, SourceFiles, open_corpus
from peers.table import PEERS
from peers.work import Work

VERSION = 1  # raise it when a writer below changes what is written


def converted(corpus: Corpus, format: str, column: str, source: SourceFiles) -> Path:
    """Return the folder of one converted source."""
    return corpus.folder / f"{format}-{column}-v{VERSION}" / source.name


def folders(corpus: Corpus, format: str, column: str) -> list[Path]:
    return [converted(corpus, format, column, source) for source in corpus.sources]


def convert(corpus: Corpus, side: Any, column: str) -> None:
    """Convert the sources that are not there yet; an interrupted conversion leaves none."""
    for number, source in enumerate(corpus.sources):
        folder = converted(corpus, side.FORMAT, column, source)
        if folder.exists():
            continue
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        side.write_source(part, source, number, column)
        part.rename(folder)


def main() -> None:
    work = Work(**json.loads(sys.argv[1]))
    # Most loaders read the corpus itself: theirs are not imported.
    if not PEERS[work.peer].converts:
        return
    side = importlib.import_module(PEERS[work.peer].module)
    convert(open_corpus(Path(work.folder), work.n_sources), side, work.column)


if __name__ == "__main__":
    main()
