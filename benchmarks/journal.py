"""What an append to the journal costs, beside a bare loop of write and fdatasync on the same disk in the same run.

    python benchmarks/journal.py [--appends 400] [--dir PATH] [--save]

Appends of both ways take turns, so that both see the same disk. ``CPU`` is the processor time of an append, records made included.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from overlord.journal.log import Log, read_all
from overlord.journal.record import Record
from overlord.journal.segment import Header
from page import command_line, machine, markdown_table, save, shown_table, wide_console

SIZES = {"1 kB": 1_000, "10 kB": 10_000, "100 kB": 100_000}
HEAD = ["bytes", "way", "appends/s", "p50 ms", "p99 ms", "CPU us", "file bytes an append"]


class Bare:
    """What the journal cannot do without: bytes at the end of a file, and a sync."""

    def __init__(self, folder: Path):
        self.path = folder / "bare"
        self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, number: int, body: bytes) -> None:
        os.write(self.fd, body)
        os.fdatasync(self.fd)

    def nbytes(self) -> int:
        return self.path.stat().st_size


class Journal:
    def __init__(self, folder: Path, values: bool):
        self.folder, self.values = folder, values
        self.log = Log.create(folder, Header(job="benchmark", fingerprint={"all": "0" * 32}))

    def append(self, number: int, body: bytes) -> None:
        value = {"step": number, "ids": np.frombuffer(body, np.uint8)} if self.values else body
        self.log.append([Record.of("plan", number, value)])

    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("*.ovj"))


def timed(append: Callable[[int, bytes], None], number: int, body: bytes) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    append(number, body)
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(folder: Path, nbytes: int, appends: int) -> dict[str, list[str]]:
    """All ways in turn: each append of one is between appends of the others."""
    for name in ("bytes", "values"):
        (folder / name).mkdir(parents=True)
    ways = {"write + fdatasync": Bare(folder), "journal, bytes": Journal(folder / "bytes", False)}
    ways["journal, values with arrays"] = Journal(folder / "values", True)
    body, warm_up = os.urandom(nbytes), 20
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(appends + warm_up):
        for way, place in ways.items():
            times[way].append(timed(place.append, number, body))
    out = {}
    for way, place in ways.items():
        wall, cpu = np.array(times[way][warm_up:]).T
        p50, p99 = np.percentile(wall, [50, 99]) * 1e3
        figures = (
            f"{1 / wall.mean():.0f}",
            f"{p50:.2f}",
            f"{p99:.2f}",
            f"{cpu.mean() * 1e6:.0f}",
            f"{place.nbytes() / len(times[way]):,.0f}",
        )
        out[way] = list(figures)
    assert len(read_all(folder / "bytes")) == appends + warm_up
    return out


def together(folder: Path, appends: int, records: int = 16) -> list[str]:
    """Sixteen records of 1 kB and one sync."""
    log, body, times = Log.create(folder, Header(job="benchmark")), os.urandom(1000), []
    for number in range(appends):
        batch = [Record.of("plan", number, body) for _ in range(records)]
        began = time.perf_counter()
        log.append(batch)
        times.append(time.perf_counter() - began)
    log.close()
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    return [f"{1 / np.mean(times):.0f}", f"{p50:.2f}", f"{p99:.2f}", f"{records / np.mean(times):,.0f} records/s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--appends", type=int, default=400)
    parser.add_argument("--dir", type=Path, help="where to write; the temporary directory unless said otherwise")
    parser.add_argument("--save", action="store_true", help="also write the dated page in benchmarks/results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as made:
        rows = []
        for name, nbytes in SIZES.items():
            rows += [[name, way, *figures] for way, figures in measure(Path(made) / str(nbytes), nbytes, args.appends).items()]
        rate, p50, p99, per_record = together(Path(made) / "together", args.appends)
        rows.append(["16 x 1 kB", "journal, one append", rate, p50, p99, per_record, ""])
    wide_console().print(shown_table("appends to a journal in a directory", HEAD, rows))
    if args.save:
        head = f"# Appends to the journal\n\n    {command_line('benchmarks/journal.py')}\n\n{machine()} Local disk."
        text = f"{head}\n\n{markdown_table(HEAD, rows)}\n"
        print(f"saved as {save(time.strftime('%Y-%m-%d-journal'), text, {})}")


if __name__ == "__main__":
    main()
