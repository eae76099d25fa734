"""Memory that a process has written, without file pages that it shares with others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from overlord.process.resources import own_bytes, pss_bytes

pytestmark = pytest.mark.timeout(200)
MB = 2**20
# Bare interpreters: other processes that share libraries change this one's PSS by tens of MB.
DOES = """
import mmap, sys
held = []
for what in sys.stdin:
    if what == "map\\n":
        with open(sys.argv[1], "rb") as file:
            held.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        sum(held[-1][::4096])
    elif what == "write\\n":
        held.append(bytearray(64 * 2**20))
        held[-1][::4096] = b"x" * len(held[-1][::4096])
    print(flush=True)
"""


@contextmanager
def bare(path: Path) -> Iterator[Any]:
    """Return a process, and a function that makes it run code."""
    program = [sys.executable, "-S", "-c", DOES, path]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def does(what: str) -> None:
            process.stdin.write(f"{what}\n")
            assert process.stdout.readline(), "it ended"

        does("begin")
        yield process.pid, does
        process.stdin.close()


def test_what_was_written_does_not_move_with_who_else_maps_a_file(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(bytes(64 * MB))
    with bare(path) as (pid, does):
        written, all_of_it = own_bytes(pid), pss_bytes(pid)
        does("map")
        assert pss_bytes(pid) - all_of_it > 48 * MB
        with bare(path) as (_, other_does):
            other_does("map")
            assert 16 * MB < pss_bytes(pid) - all_of_it < 48 * MB, "half of it is the other's now"
        assert own_bytes(pid) - written < 8 * MB
        does("write")
        assert own_bytes(pid) - written > 48 * MB
    assert 0 < own_bytes() < pss_bytes(), "of this process, where none is named"
