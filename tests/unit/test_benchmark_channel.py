"""The benchmark of the channel cannot rot: its job is checked, its ratios agree with hand work, a
tiny run passes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import channel
from hops.job import COPIED, MIB, VIEWED, Pieces, Reader
from hops.run import Block, blocks, crews
from hops.ways import BARES, MEANING, NEEDS, WAYS


def block(way: str, cpu_s: float, mode: str = COPIED, nbytes: int = 16 * MIB) -> Block:
    return Block(way=way, mode=mode, nbytes=nbytes, messages=10, cpu_s=cpu_s, wall_s=1.0)


@pytest.mark.parametrize("mode", [COPIED, VIEWED])
def test_a_message_that_was_overwritten_before_it_was_read_is_found_out(mode: str) -> None:
    pieces, reader = Pieces(MIB), Reader(MIB, mode)
    array = np.zeros(MIB, np.uint8)
    pieces.stamp(3)
    pieces.gather(array)
    reader.read(array, 3)
    reader.check(array)
    with pytest.raises(RuntimeError, match="message 2 holds the stamp of message 3"):
        reader.read(array, 2)
    array[500_000] ^= 1
    with pytest.raises(RuntimeError, match="piece 7 did not arrive"):
        reader.check(array)


def test_shares_are_taken_round_by_round() -> None:
    """A round in which everything took twice as long changes no share."""
    found = [
        block(way, slow * (1.25 if way == "ring" else 1.0))
        for slow in (1.0, 2.0)
        for way in (*BARES, "ring")
    ]
    assert channel.verdict(found) == [
        f"16 MiB, copied: the ring moves 80 % of *{bare}*; 70 % is met." for bare in BARES
    ]
    assert (
        "missed" in channel.verdict([*(block(bare, 1.0) for bare in BARES), block("ring", 1.5)])[0]
    )


def test_every_way_says_what_it_is() -> None:
    assert {*WAYS, *NEEDS} == set(MEANING)


def test_a_tiny_run_gives_a_page() -> None:
    with crews([*BARES, "pair", "ring", "tcp", "pipe + pickle"]) as made:
        found = list(blocks(made, [MIB], channel.MODES, 1, 4 * MIB))
    assert all(b.cpu_s > 0 and b.messages == 4 for b in found)
    text = channel.page(found, "2026-01-01", "python benchmarks/channel.py", 1)
    assert "| ring |" in text
    assert "| tcp |" in text
