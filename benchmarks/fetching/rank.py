"""A rank that trains without a model (``python -m fetching.rank``): it takes a step, reads it, and
rests. How long each step let it wait is its result; a line before and behind the steps that are
counted.
"""

from __future__ import annotations

import json
import sys
import time

import overlord as ov
from fetching.case import Case
from peers.contract import read_pages


def take(client: ov.Client, n: int, pause_s: float) -> list[float]:
    waited = []
    for _ in range(n):
        start = time.perf_counter()
        step = next(client)
        waited.append(time.perf_counter() - start)
        for microbatch in step:
            read_pages(microbatch)
        time.sleep(pause_s)
    return waited


def main() -> None:
    case, rank = Case(**json.loads(sys.argv[1])), int(sys.argv[2])
    address, token = json.loads(sys.stdin.readline())
    client = ov.connect(address, rank, token)
    take(client, case.warm, case.pause_ms / 1000)
    print(json.dumps({"cpu": time.process_time()}), flush=True)
    waited = take(client, case.steps, case.pause_ms / 1000)
    print(json.dumps({"cpu": time.process_time(), "waited": waited}), flush=True)
    sys.stdin.readline()  # alive, while memory is looked at
    client.close()


if __name__ == "__main__":
    main()
