"""Where several processes spend their CPU time on the null job: by role, with their wake-ups.

    python benchmarks/profile_processes.py                            # 5, 100 and 300 sources
    python benchmarks/profile_processes.py --sources 5 --tokens 40M   # a quick check
    python benchmarks/profile_processes.py --save                     # the dated page

This process launches and serves the null job of ``throughput.py``; each of 8 ranks is a process.
The counters of the kernel are read when the last rank has a quarter of its tokens, and at the end.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
from rich.console import Console

from corpus import Corpus, default_folder
from page import Numbers, command_line, machine, markdown_table, save, shown_table, wide_console
from peers.data import corpora
from peers.work import Work

HERE, RANKS = Path(__file__).resolve().parent, 8
HEAD = ("sources", "role", "processes", "ns/token", "wake-ups/step")
ROLES = {"host": "loader workers", "constructor": "constructor workers", "planner": "coordinator"}
CLIENTS, LAUNCHER = "trainers", "launching process"


@dataclass(frozen=True, slots=True)
class Counters:
    """CPU seconds and voluntary context switches of the threads of a process."""

    cpu_s: float = 0.0
    wakes: int = 0

    @staticmethod
    def of(pid: int) -> Counters:
        cpu_s, wakes = 0.0, 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                cpu_s += int((task / "schedstat").read_text().split()[0]) / 1e9
                found = re.search(
                    r"\nvoluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text()
                )
                wakes += int(found[1]) if found else 0
        return Counters(cpu_s, wakes)


class Rank:
    """A process that only receives (``peers/connected.py``), and the marks that it wrote."""

    def __init__(self, work: Work):
        paths = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "peers.connected", json.dumps(asdict(work))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            cwd=HERE,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"{") and wanted(said := json.loads(line)):
                return dict(said)
        raise click.ClickException(f"rank: expected a mark, got exit code {self.process.wait()}")

    def mark(self, name: str) -> dict[str, Any]:
        return self.wait_for(lambda said: said.get("at") == name)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def roles_of(session: Any, ranks: Iterable[Rank]) -> dict[int, str]:
    """Return the role of every process of the job, by process id."""
    roles = {rank.process.pid: CLIENTS for rank in ranks} | {os.getpid(): LAUNCHER}
    actors = [a for a in session.metrics()["actors"] if a["pid"] and a["role"] in ROLES]
    return {a["pid"]: ROLES[a["role"]] for a in actors} | roles


def profile(corpus: Corpus, n_sources: int, tokens: int) -> list[tuple[str, int, float, float]]:
    """Return role, processes, CPU nanoseconds per token and wake-ups per step, of one run."""
    import overlord as ov  # after the arguments were read
    import overlord_side

    peer = "overlord-process"
    work = Work(peer, "null", str(corpus.folder), n_sources, tokens, ranks=RANKS, processes=RANKS)
    with contextlib.ExitStack() as stack:
        ranks = [Rank(replace(work, rank=rank)) for rank in range(RANKS)]
        for rank in ranks:
            stack.callback(rank.end)
        job = overlord_side.make_job(corpus, work)
        session = stack.enter_context(ov.launch(job, runtime="process"))
        served = session.serve()
        for rank in ranks:
            rank.wait_for(lambda said: "ready" in said)
            rank.tell("go")
            rank.tell(json.dumps([served.address, served.token]))
        warm = [rank.mark("warm") for rank in ranks]
        roles = roles_of(session, ranks)
        before = {pid: Counters.of(pid) for pid in roles}
        last = [rank.mark("end") for rank in ranks]
        after = {pid: Counters.of(pid) for pid in roles}
        for rank in ranks:  # before the session ends
            rank.end()
    n = sum(b["tokens"] - a["tokens"] for a, b in zip(warm, last, strict=True))
    steps = sum(b["microbatches"] - a["microbatches"] for a, b in zip(warm, last, strict=True))
    by_role = defaultdict[str, list[int]](list)
    for pid, role in roles.items():
        by_role[role].append(pid)
    return [
        (
            role,
            len(pids),
            sum(after[pid].cpu_s - before[pid].cpu_s for pid in pids) / n * 1e9,
            sum(after[pid].wakes - before[pid].wakes for pid in pids)
            / (steps / work.ranks / work.microbatches),
        )
        for role, pids in by_role.items()
    ]


def rows_of(n_sources: int, found: list[tuple[str, int, float, float]]) -> list[list[str]]:
    """Return the rows of the table, the most expensive role first, and their sum."""
    ordered = sorted(found, key=lambda row: -row[2])
    rows = [
        [str(n_sources), role, str(n), f"{cost:.2f}", f"{wakes:.1f}"]
        for role, n, cost, wakes in ordered
    ]
    n, cost, wakes = (sum(row[k] for row in found) for k in (1, 2, 3))
    return [*rows, [str(n_sources), "**all**", str(n), f"{cost:.2f}", f"{wakes:.1f}"]]


@click.command(help=__doc__.split("\n")[0])
@click.option("--sources", type=Numbers(), default="5,100,300", show_default=True)
@click.option("--tokens", default="200M", show_default=True, help="Tokens of all ranks.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=default_folder,
    help="Where the data is made and kept.",
)
@click.option("--save", "saving", is_flag=True, help="Writes a dated page to benchmarks/results.")
def main(sources: list[int], tokens: str, data: Path, saving: bool) -> None:
    console: Console = wide_console()
    wanted = int(float(tokens.upper().removesuffix("M")) * 1e6)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["OVERLORD_CACHE"] = cache  # no run finds an index of another one
        for n, corpus in corpora(console, data, sources, 1).items():
            rows += rows_of(n, profile(corpus, n, wanted))
    console.print(shown_table("null job, 8 ranks in processes of their own", HEAD, rows))
    if saving:
        today = datetime.date.today().isoformat()
        text = f"# CPU by process, {today}\n\n`{command_line('benchmarks/profile_processes.py')}` "
        text += f"on {machine()}\n\n{markdown_table(HEAD, rows)}\n"
        console.print(f"saved {save(f'{today}-profile-processes', text, {})}")


if __name__ == "__main__":
    main()
