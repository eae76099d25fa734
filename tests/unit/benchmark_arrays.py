"""Write the first microbatches of a loader of the benchmarks, in the interpreter that has it.

    python tests/unit/benchmark_arrays.py WORK COUNT FILE

``WORK`` is the work as JSON, ``FILE`` the archive of numpy that is written. ``PYTHONPATH`` has the
folder of the benchmarks.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from itertools import islice
from pathlib import Path

import numpy as np

from corpus import open_corpus
from peers.contract import DTYPES, as_numpy
from peers.conversion import convert
from peers.table import PEERS
from peers.work import Work


def main() -> None:
    work, count, file = Work(**json.loads(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    peer = PEERS[work.peer]
    side = importlib.import_module(peer.module)
    corpus = open_corpus(Path(work.folder), work.n_sources)
    if peer.converts:
        convert(corpus, side, work.column)
    side.prepare(work)
    found = {}
    for i, microbatch in enumerate(islice(side.microbatches(corpus, work), count)):
        found |= {f"{i}/{name}": as_numpy(microbatch[name]) for name in DTYPES}
    np.savez(file, **found)
    sys.stdout.flush()
    os._exit(0)  # loaders have threads and processes that the test does not close


if __name__ == "__main__":
    main()
