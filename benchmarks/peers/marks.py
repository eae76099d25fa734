"""Consume a loader as a trainer does, and write a line of JSON at every mark."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from peers.contract import check_microbatch, real_tokens, touch
from peers.measure import cpu_seconds
from peers.work import Work

# of the tokens: not counted as steady, so that opening sources and filling read-ahead lie before it
WARM_SHARE = 0.25


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def mark(name: str, work: Work, tokens: int, nbytes: int, count: int) -> None:
    """Write a mark with the CPU time of this process and its descendants.

    Processes that only receive count equal shares of the CPU time of their server. Their sum is the
    whole CPU time of the server, each share read at the mark of its process.
    """
    cpu = cpu_seconds(os.getpid()) + (
        cpu_seconds(work.server) / work.processes if work.server else 0.0
    )
    say(at=name, wall=time.monotonic(), cpu=cpu, tokens=tokens, nbytes=nbytes, microbatches=count)


def consume(stream: Iterator[Any], work: Work, take_first: Callable[[Any], int] = touch) -> None:
    """Take microbatches until this process has its share of the tokens.

    ``take_first`` receives those before the steady part.
    """
    share, tokens, nbytes, count = work.tokens / work.processes, 0, 0, 0
    first_step = [next(stream) for _ in range(work.step)]
    tokens, nbytes, count = (
        sum(map(real_tokens, first_step)),
        sum(map(take_first, first_step)),
        len(first_step),
    )
    mark("first", work, tokens, nbytes, count)
    for microbatch in first_step:
        check_microbatch(microbatch, work.context, work.n_sources)
    del first_step, microbatch
    for name, until, take in (
        ("warm", max(tokens + 1, WARM_SHARE * share), take_first),
        ("end", share, touch),
    ):
        while tokens < until:
            microbatch = next(stream)
            tokens += real_tokens(microbatch)
            nbytes += take(microbatch)
            count += 1
        mark(name, work, tokens, nbytes, count)
