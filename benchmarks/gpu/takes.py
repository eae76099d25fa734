"""Another rank of a node, which takes its steps and reads a byte of every page.

It runs as ``python -m gpu.takes``.
"""

from __future__ import annotations

import json
import sys

import overlord as ov
from peers.contract import read_pages


def main() -> None:
    address, token, rank = json.loads(sys.argv[1])
    for step in ov.connect(address, rank, token):
        for microbatch in step:
            read_pages(microbatch)


if __name__ == "__main__":
    main()
