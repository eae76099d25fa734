"""One process of one cell: started afresh (``python -m peers.cell``) for every measurement, it consumes a loader as a trainer would.

It speaks JSON lines. ``{"ready": pid}`` after imports; then it waits for a line on its input, so that importing (a trainer has
torch anyway) counts for nobody. ``{"at": ..., ...}`` for every mark it passes. After the last mark it waits
for its input, with the loader alive, so that memory can be read while nothing has been let go; the runner then kills it and
all below it: how loaders close is not measured.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corpus import open_corpus
from peers.contract import check_microbatch, real_tokens, touch
from peers.kernel import Work
from peers.measure import cpu_seconds

MODULES = {
    "bare": "peers.bare",
    "nodes": "peers.nodes",
    "torch": "peers.torch_loader",
    "torch-numpy": "peers.torch_loader",
    "overlord": "overlord_side",
    "overlord-shuffled": "overlord_side",
    "overlord-one": "overlord_side",
}
WARM_SHARE = 0.25  # of the tokens: not counted as steady, so that opening sources and filling read-ahead lie before it


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def mark(name: str, tokens: int, nbytes: int, count: int) -> None:
    say(at=name, wall=time.monotonic(), cpu=cpu_seconds(os.getpid()), tokens=tokens, nbytes=nbytes, microbatches=count)


def consume(stream: Iterator[Any], work: Work) -> None:
    """Takes microbatches until this process has its share of the tokens."""
    share, tokens, nbytes, count = work.tokens / work.processes, 0, 0, 0
    first_step = [next(stream) for _ in range(work.step)]
    tokens, nbytes, count = sum(map(real_tokens, first_step)), sum(map(touch, first_step)), len(first_step)
    mark("first", tokens, nbytes, count)
    for microbatch in first_step:
        check_microbatch(microbatch, work.context, work.n_sources)
    del first_step, microbatch
    for name, until in (("warm", max(tokens + 1, WARM_SHARE * share)), ("end", share)):
        while tokens < until:
            microbatch = next(stream)
            tokens += real_tokens(microbatch)
            nbytes += touch(microbatch)
            count += 1
        mark(name, tokens, nbytes, count)


def main() -> None:
    work = Work(**json.loads(sys.argv[1]))
    warnings.simplefilter("ignore")
    side = importlib.import_module(MODULES[work.peer])
    side.prepare(work)
    say(ready=os.getpid())
    sys.stdin.readline()
    mark("start", 0, 0, 0)
    stream = side.microbatches(open_corpus(Path(work.folder), work.n_sources), work)
    consume(stream, work)
    sys.stdin.read()


if __name__ == "__main__":
    main()
