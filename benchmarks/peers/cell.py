"""One process of one cell, which consumes a loader as a trainer does: ``python -m peers.cell``.

A fresh process is started for every measurement. It writes lines of JSON. ``{"ready": ...}``
follows its imports. Then it waits for a line of input, so that imports do not count: a trainer has
torch anyway. ``{"at": ..., ...}`` follows for every mark. After the last mark it waits for input
with its loader alive, so that memory can be measured. The runner then kills it and its descendants:
the closing of loaders is not measured.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path

from corpus import open_corpus
from peers.imports import as_a_trainer, import_late
from peers.marks import consume, mark, say
from peers.table import PEERS
from peers.work import Work


def main() -> None:
    work = Work(**json.loads(sys.argv[1]))
    warnings.simplefilter("ignore")
    side = importlib.import_module(PEERS[work.peer].module)
    side.prepare(work)
    if work.trainer:
        as_a_trainer()
    import_late()
    say(ready=True)
    sys.stdin.readline()
    mark("start", work, 0, 0, 0)
    stream = side.microbatches(
        open_corpus(Path(work.folder), work.n_sources, equal=work.equal), work
    )
    consume(stream, work)
    sys.stdin.read()


if __name__ == "__main__":
    main()
