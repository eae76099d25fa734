"""A rank that takes its steps and looks at a byte of every page (``python -m gpu.takes``): the
other ranks of a node.
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
