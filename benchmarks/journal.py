"""Cost of an append to the journal, compared with write and fdatasync on the same disk.

    python benchmarks/journal.py [--appends 400] [--seconds 5] [--dir PATH] [--save]

Both kinds of appends alternate, so that both see the same disk. ``CPU`` is the processor time of an
append, including the creation of records. In running jobs the processor time of the journal is
measured by thread clocks: on the event loop, which creates records, and in the thread that writes.
Its share is of the processor time of the whole process, which loads, tokenizes, plans and builds. A
null job does almost nothing with its data, so it shows the largest share.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from corpus import Corpus, default_folder, make_corpus
from overlord.journal import checkpoint, job_journal
from overlord.journal.log import JournalLog, read_all
from overlord.journal.record import Record
from overlord.journal.segments import Header
from overlord.journal.storage import storage_of
from overlord.journal.write_ahead import AppendThread, JournalStart
from overlord.messages.control import PlannedStep
from overlord.session.session import Session
from overlord.setup.options import Options
from overlord.setup.prepared_job import PreparedJob
from overlord_side import make_job
from page import command_line, machine, markdown_table, save, shown_table, wide_console
from peers.work import Work

SIZES = {"1 kB": 1_000, "10 kB": 10_000, "100 kB": 100_000}
HEAD = ["bytes", "way", "appends/s", "p50 ms", "p99 ms", "CPU us", "file bytes an append"]


class Bare:
    """Append bytes to a file and sync: the minimum work of a journal."""

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
        self.log = JournalLog.create(folder, Header(job="benchmark", fingerprint={"all": "0" * 32}))

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
    """Run all kinds in turn: each append of one kind is between appends of the others."""
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
    """Append sixteen records of 1 kB with one sync."""
    log, body, times = JournalLog.create(folder, Header(job="benchmark")), os.urandom(1000), []
    for number in range(appends):
        batch = [Record.of("plan", number, body) for _ in range(records)]
        began = time.perf_counter()
        log.append(batch)
        times.append(time.perf_counter() - began)
    log.close()
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    return [
        f"{1 / np.mean(times):.0f}",
        f"{p50:.2f}",
        f"{p99:.2f}",
        f"{records / np.mean(times):,.0f} records/s",
    ]


class Timed(job_journal.JobJournal):
    """A journal that measures its own processor seconds, by the clocks of its threads."""

    cpu = 0.0

    def write_plans(self, stages: Sequence[PlannedStep], taken: int | None) -> None:
        start = time.thread_time()
        super().write_plans(stages, taken)
        self.cpu += time.thread_time() - start

    def write_acked(self, step: int | None, last: bool) -> None:
        start = time.thread_time()
        super().write_acked(step, last)
        self.cpu += time.thread_time() - start


class TimedWriter(AppendThread):
    cpu = 0.0

    def _write(self, orders: Sequence[Any]) -> None:
        start = time.thread_time()
        super()._write(orders)
        TimedWriter.cpu += time.thread_time() - start


def running(corpus: Corpus, kind: str, folder: Path, seconds: float) -> list[str]:
    """Run a job on the local runtime that only delivers, for some seconds."""
    n = len(corpus.sources)
    job, TimedWriter.cpu = make_job(corpus, Work("overlord", kind, str(corpus.folder), n, 0)), 0.0
    place = storage_of(folder)
    place.hold()
    journal = Timed(place, job.name, None, make_writer=TimedWriter)
    with Session(job, PreparedJob(job, Options()), None, "local", JournalStart(journal)) as session:
        clients = [session.client(rank) for rank in range(job.place.world_size)]
        for client in clients:  # start-up belongs to no step
            next(client)
        before, spent, cpu, began = (
            journal.metrics(),
            journal.cpu + TimedWriter.cpu,
            time.process_time(),
            time.perf_counter(),
        )
        steps = 0
        while time.perf_counter() - began < seconds:
            for client in clients:
                next(client)
            steps += 1
        wall, cpu, now = time.perf_counter() - began, time.process_time() - cpu, journal.metrics()
        spent = journal.cpu + TimedWriter.cpu - spent
        state = len(json.dumps(session.state_dict()))
        whole = checkpoint.snapshot(session.internals.runtime.planner.state(), 0)
    snapshot = len(Record.of(whole.kind, whole.number, whole.body).data)
    plans = now["plans"] - before["plans"]
    nbytes, appends = now["bytes"] - before["bytes"], now["appends"] - before["appends"]
    return [
        kind,
        str(n),
        f"{steps / wall:.1f}",
        f"{spent / cpu:.2%}",
        f"{spent / plans * 1e6:.0f}",
        f"{nbytes / plans:,.0f}",
        f"{plans / appends:.1f}",
        f"{snapshot:,}",
        f"{state:,}",
    ]


RUNNING_HEAD = [
    "job",
    "sources",
    "steps/s",
    "CPU share",
    "CPU us a plan",
    "bytes a plan",
    "plans an append",
    "snapshot bytes",
    "state_dict bytes",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--appends", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each running job; 0: none")
    parser.add_argument(
        "--dir", type=Path, help="where to write; the temporary directory unless said otherwise"
    )
    parser.add_argument(
        "--save", action="store_true", help="also write the dated page in benchmarks/results"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as made:
        rows = []
        for name, nbytes in SIZES.items():
            rows += [
                [name, way, *figures]
                for way, figures in measure(Path(made) / str(nbytes), nbytes, args.appends).items()
            ]
        rate, p50, p99, per_record = together(Path(made) / "together", args.appends)
        rows.append(["16 x 1 kB", "journal, one append", rate, p50, p99, per_record, ""])
        jobs = []
        for n in (5, 300) if args.seconds else ():
            corpus = make_corpus(default_folder(), n, 1, lambda what, done, of: None)
            jobs += [
                running(corpus, kind, Path(made) / f"{kind}-{n}", args.seconds)
                for kind in ("tokenized", "null")
            ]
    wide_console().print(shown_table("appends to a journal in a directory", HEAD, rows))
    wide_console().print(shown_table("running jobs, local runtime", RUNNING_HEAD, jobs))
    if args.save:
        head = (
            "# Appends to the journal\n\n    "
            f"{command_line('benchmarks/journal.py')}\n\n{machine()} Local disk."
        )
        jobs_text = (
            f"## Running jobs\n\nLocal runtime, {args.seconds:g} s "
            f"each.\n\n{markdown_table(RUNNING_HEAD, jobs)}"
        )
        text = f"{head}\n\n{markdown_table(HEAD, rows)}\n\n{jobs_text}\n"
        print(f"saved as {save(time.strftime('%Y-%m-%d-journal'), text, {})}")


if __name__ == "__main__":
    main()
