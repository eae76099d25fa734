"""What a process has written, told apart from pages of files that it shares with others."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

from overlord.observe.memory import own_bytes, pss_bytes

MB = 2**20
MAPS = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    sum(held[::4096])
    print(flush=True)
    sys.stdin.readline()
"""


def test_what_was_written_does_not_move_with_who_else_maps_a_file(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(bytes(64 * MB))
    written, all_of_it = own_bytes(), pss_bytes()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as held:
        sum(held[::4096])
        assert pss_bytes() - all_of_it > 48 * MB
        with subprocess.Popen([sys.executable, "-c", MAPS, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            assert 16 * MB < pss_bytes() - all_of_it < 48 * MB, "half of it is the other's now"
            other.communicate(b"\n")
        assert own_bytes() - written < 8 * MB
    some = bytearray(64 * MB)
    some[::4096] = b"x" * len(some[::4096])
    assert own_bytes() - written > 48 * MB
