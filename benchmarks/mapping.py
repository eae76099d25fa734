"""Cost of the ids of a pretokenized file by reads, as Overlord has them, and by a mapping.

    python benchmarks/mapping.py                     # about a minute
    python benchmarks/mapping.py --save

Each cell is a process that visits all slices of one file in random order, and copies each into an
int64 array, as a batch does. A slice is 600 kB: 512 documents of 600 ids in 2 bytes.

- reads: one ``read_buffer`` of pyarrow for each slice, into new memory.
- reads, one buffer: the same into memory that is used again.
- mapping: the copy is made from the mapped pages.
- mapping, dropped: the same; afterwards the process gives the pages of the slice back.
- mapping, by the kernel: ``process_vm_readv`` copies the mapped pages into memory that is used
  again. A lost page is an error of that call (EFAULT), where any other access ends the process.

Every slice is visited once, as in an epoch. "Warm" is after a read of the whole file from front to
back, "cold" after the kernel was asked to drop it. PSS is that of
the process after the last slice, with the pages that it maps.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import click
import numpy as np
import pyarrow as pa

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

SLICE = 512 * 600 * 2  # bytes
HEAD = ("way", "page cache", "CPU us/ktok", "MB of PSS", "CPU of each cell")
Slice = Callable[[int], np.ndarray]  # (first byte) -> the ids of a slice
Done = Callable[[int], None]  # called with the first byte when the ids are copied


def reads(path: str) -> tuple[Slice, Done]:
    handle = pa.OSFile(path)

    def read(at: int) -> np.ndarray:
        handle.seek(at)
        return np.frombuffer(handle.read_buffer(SLICE), np.uint16)

    return read, lambda at: None


def mapping(path: str, drop: bool = False) -> tuple[Slice, Done]:
    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    ids = np.frombuffer(pages, np.uint16)

    def dropped(at: int) -> None:
        page = at // mmap.PAGESIZE * mmap.PAGESIZE
        pages.madvise(mmap.MADV_DONTNEED, page, at + SLICE - page)

    return lambda at: ids[at // 2 : (at + SLICE) // 2], dropped if drop else lambda at: None


def reused(path: str) -> tuple[Slice, Done]:
    file, memory = open(path, "rb", buffering=0), bytearray(SLICE)  # noqa: SIM115

    def read(at: int) -> np.ndarray:
        os.preadv(file.fileno(), [memory], at)
        return np.frombuffer(memory, np.uint16)

    return read, lambda at: None


class Range(ctypes.Structure):
    """``struct iovec``: bytes of memory."""

    _fields_: ClassVar = [("first", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


def guarded(path: str) -> tuple[Slice, Done]:
    ids, dropped = mapping(path, drop=True)
    libc, memory = ctypes.CDLL(None, use_errno=True), np.empty(SLICE // 2, np.uint16)
    to, first = Range(memory.ctypes.data, SLICE), ids(0).ctypes.data

    def read(at: int) -> np.ndarray:
        here = Range(first + at, SLICE)
        n = libc.process_vm_readv(os.getpid(), ctypes.byref(to), 1, ctypes.byref(here), 1, 0)
        if n != SLICE:
            raise OSError(ctypes.get_errno(), f"expected {SLICE} bytes, got {n}")
        return memory

    return read, dropped


WAYS = {
    "reads": reads,
    "reads, one buffer": reused,
    "mapping": mapping,
    "mapping, dropped": lambda path: mapping(path, drop=True),
    "mapping, by the kernel": guarded,
}


def pss_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def cell(way: str, path: str, cold: bool) -> None:
    """Print the CPU in microseconds per thousand tokens, and the PSS, of visits in this process."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while not cold and file.read(2**22):
            pass
    order = np.random.default_rng(0).permutation(os.path.getsize(path) // SLICE).tolist()
    batch = np.empty(SLICE // 2, np.int64)
    ids_at, done = WAYS[way](path)
    start = time.process_time()
    for k in order:
        batch[:] = ids_at(k * SLICE)
        done(k * SLICE)
    cpu = time.process_time() - start
    print(json.dumps((cpu / len(order) / len(batch) * 1e9, pss_mb())))


@click.command()
@click.option("--megabytes", default=600, show_default=True, help="Size of the file.")
@click.option("--rounds", default=5, show_default=True, help="Cells of each way, in turns.")
@click.option("--save", "saves", is_flag=True, help="Write a page into benchmarks/results.")
@click.option("--cell", "one", nargs=3, hidden=True)
def main(megabytes: int, rounds: int, saves: bool, one: tuple[str, str, str] | None) -> None:
    """Measure the CPU and the memory of reads, and of a mapping of the same file."""
    if one:
        cell(one[0], one[1], one[2] == "cold")
        return
    from page import command_line, machine, markdown_table, save, shown_table, wide_console

    found: dict[tuple[str, str], list[list[float]]] = {
        (way, cache): [] for cache in ("warm", "cold") for way in WAYS
    }
    with tempfile.TemporaryDirectory(dir=".") as folder:  # /tmp may be memory, never cold
        path = Path(folder) / "ids.bin"
        path.write_bytes(os.urandom(megabytes * 10**6 // SLICE * SLICE))
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        for _ in range(rounds):
            for (way, cache), cells in found.items():
                words = [sys.executable, __file__, "--cell", way, str(path), cache]
                done = subprocess.run(words, capture_output=True, text=True, check=True)
                cells.append(json.loads(done.stdout))
    rows = [
        [
            way,
            cache,
            f"{statistics.median(cpu for cpu, _ in cells):.3f}",
            f"{statistics.median(size for _, size in cells):.0f}",
            ", ".join(f"{cpu:.3f}" for cpu, _ in cells),
        ]
        for (way, cache), cells in found.items()
    ]
    wide_console().print(shown_table("mapping", HEAD, rows))
    if saves:
        day = datetime.date.today()
        text = (
            f"# Reads and a mapping of a file of ids, {day}\n\n"
            f"`{command_line('benchmarks/mapping.py')}` on {machine()}\n\n"
            f"{markdown_table(HEAD, rows)}\n"
        )
        click.echo(f"wrote {save(f'{day}-mapping', text, {})}")


if __name__ == "__main__":
    main()
