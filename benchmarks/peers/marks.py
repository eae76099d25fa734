"""Consuming a loader as a trainer would, with a line of JSON for every mark that is passed."""

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
    """CPU is that of this process and all below it. Processes that only receive take equal shares
    of what their server has used until then: the sum over all of them is the whole, each part of it
    seen when one of them passed its mark.
    """
    cpu = cpu_seconds(os.getpid()) + (
        cpu_seconds(work.server) / work.processes if work.server else 0.0
    )
    say(at=name, wall=time.monotonic(), cpu=cpu, tokens=tokens, nbytes=nbytes, microbatches=count)


def consume(stream: Iterator[Any], work: Work, take_first: Callable[[Any], int] = touch) -> None:
    """Takes microbatches until this process has its share of the tokens; ``take_first`` looks at
    those before the steady part.
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
