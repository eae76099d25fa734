"""Where the embedded runtime spends its CPU time between Arrow's buffers and the batch.

    python benchmarks/profile_hot_path.py                                  # 5, 100, 300 sources
    python benchmarks/profile_hot_path.py --sources 5 --orders file --tokens 20M   # a quick check
    python benchmarks/profile_hot_path.py --save              # the dated page in benchmarks/results

The null job of ``throughput.py`` runs in a fresh process, once with clocks and once with counters.
Clocks measure the CPU time of the thread in each stage, without the stages that it calls. Counters
count Python calls of the package by stage, in the same steps. benchmarks/README.md has the method.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
from rich.console import Console

import overlord_side
from corpus import default_folder, open_corpus
from page import Numbers, command_line, machine, markdown_table, save, shown_table, wide_console
from peers import bare
from peers.contract import real_tokens, touch
from peers.data import corpora
from peers.work import Work

WARM_SHARE = 0.25  # of the tokens: not measured
PACKAGE = str(Path(__file__).resolve().parents[1] / "src" / "overlord")
HEAD = ("sources", "order", "stage", "ns/token", "runs/step", "us/run", "Python calls/run")

# Stage, functions ("module:name"). A function is patched where its callers look it up. Time in a
# stage does not count for the stages around it.
READER, PIPELINE = "overlord.loader.reader:SourceReader", "overlord.transforms.pipeline:Pipeline"
STAGES: dict[str, tuple[str, ...]] = {
    "open a row group": (
        "pyarrow.parquet:ParquetFile.__init__",
        "overlord.sources.files:Files.open",
        "overlord.sources.files:Files.check_unchanged",
    ),
    "decode (Arrow)": ("pyarrow.parquet:ParquetFile.read_row_group",),
    "slice": (
        "overlord.sources.chunk_reader:ChunkReader.slices",
        "overlord.sources.tables:without_invalid_rows",
    ),
    "window": (
        f"{READER}.read_on",
        f"{READER}._stage_slice",
        "overlord.loader.samples:SourceOrder.in_stream_order",
    ),
    "join slices (copy)": (f"{READER}._join_tables",),
    "validate ids": (f"{PIPELINE}.blocks_of",),
    "block": (f"{READER}.evaluate", f"{READER}._plain_block", f"{READER}._evaluated"),
    "copied rows (copy)": (f"{READER}._row_stage",),
    "loader": ("overlord.loader.loader:Loader.handle", "overlord.loader.service:LoaderService.pop"),
    "announce": ("overlord.planning.stream:SourceStream.add",),
    "draw and place": ("overlord.planning.planner:Planner.handle",),
    "payload of a step": ("overlord.session.local_runtime:LocalRuntime._stage",),
    "build": ("overlord.constructor.service:build_groups",),
    "expand (copy)": (
        "overlord.constructor.compact:PayloadViews.expand",
        "overlord.constructor.compact:expand",
    ),
    "client": (
        "overlord.client.client:Client.__next__",
        "overlord.client.client:Step._microbatches",
        "overlord.session.local_runtime:LocalRuntime.consumed",
    ),
    "event loop": (
        "overlord.concurrency.event_loop:CommandLoop.run",
        "overlord.concurrency.event_loop:ThreadExecutor.submit",
    ),
}


@dataclass(slots=True)
class Stage:
    """The totals of one stage over all threads."""

    ns: int = 0
    runs: int = 0
    calls: int = 0


@dataclass(slots=True)
class Stages:
    """Clocks or counters around the functions of ``STAGES``, once they are on."""

    counts: bool
    on: bool = False
    totals: dict[str, Stage] = field(default_factory=lambda: {name: Stage() for name in STAGES})
    local: threading.local = field(default_factory=threading.local)

    def install(self) -> None:
        for name, targets in STAGES.items():
            for target in targets:
                module, _, path = target.partition(":")
                holder: Any = importlib.import_module(module)
                *classes, function = path.split(".")
                for each in classes:
                    holder = getattr(holder, each)
                setattr(holder, function, self._around(name, getattr(holder, function)))
        if self.counts:
            threading.setprofile(self._count)  # threads start later
            sys.setprofile(self._count)

    def _around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        total, local = self.totals[name], self.local

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            stack: list[list[Any]] = local.__dict__.setdefault("stack", [])
            nested = bool(stack) and stack[-1][1] is total
            stack.append([0, total])
            start = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time_ns() - start
                inside = stack.pop()[0]
                if self.on:
                    total.ns += took - inside
                    total.runs += not nested
                if stack:
                    stack[-1][0] += took

        return measured

    def _count(self, frame: Any, event: str, arg: object) -> None:
        if event == "call" and self.on and frame.f_code.co_filename.startswith(PACKAGE):
            stack = self.local.__dict__.get("stack")
            if stack:
                stack[-1][1].calls += 1


def measure(work: Work, counts: bool) -> dict[str, Any]:
    """Run the job in this process; return totals by stage over the steady part."""
    stages = Stages(counts)
    side: Any = bare if work.peer == "bare" else overlord_side
    side.prepare(work)
    if work.peer != "bare":
        stages.install()
    tokens = microbatches = 0
    begun: tuple[int, int, float] | None = None
    for microbatch in side.microbatches(open_corpus(Path(work.folder), work.n_sources), work):
        touch(microbatch)
        tokens += real_tokens(microbatch)
        microbatches += 1
        if begun is None and tokens > WARM_SHARE * work.tokens:
            begun, stages.on = (tokens, microbatches, time.process_time()), True
        if tokens >= work.tokens:
            break
    assert begun is not None
    cpu_s, stages.on = time.process_time() - begun[2], False
    sys.setprofile(None)
    return {
        "tokens": tokens - begun[0],
        "steps": (microbatches - begun[1]) / (work.ranks * work.microbatches),
        "cpu_s": cpu_s,
        "stages": {name: [t.ns, t.runs, t.calls] for name, t in stages.totals.items()},
    }


def run_apart(work: Work, counts: bool) -> dict[str, Any]:
    """Run ``measure`` in a fresh process."""
    paths = [str(Path(__file__).resolve().parent), str(Path(PACKAGE).parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, __file__, "--run", json.dumps([asdict(work), counts])]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    if done.returncode:
        raise click.ClickException(f"{work.peer}: the run failed\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(
    n_sources: int, order: str, clocks: dict[str, Any], calls: dict[str, Any], bare_ns: float
) -> list[list[str]]:
    """Return the lines of one setting, the most expensive stage first."""
    rows, known = [], 0.0
    where = [str(n_sources), order]
    by_cost = sorted(clocks["stages"].items(), key=lambda item: -item[1][0])
    for name, (ns, runs, _) in by_cost:
        if not runs:
            continue
        counted = calls["stages"][name]
        known += ns
        rows.append(
            [
                *where,
                name,
                f"{ns / clocks['tokens']:.2f}",
                f"{runs / clocks['steps']:.1f}",
                f"{ns / runs / 1e3:.0f}",
                f"{counted[2] / max(1, counted[1]):.0f}",
            ]
        )
    total = clocks["cpu_s"] * 1e9
    for name, ns in (("everything else", total - known), ("**all**", total)):
        rows.append([*where, name, f"{ns / clocks['tokens']:.2f}", "", "", ""])
    rows.append([*where, "bare loop, same job", f"{bare_ns:.2f}", "", "", ""])
    return rows


class Millions(click.ParamType):
    name = "100M"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        try:
            return value if isinstance(value, int) else int(float(value.upper().rstrip("M")) * 1e6)
        except ValueError:
            self.fail(f"expected something like {self.name}, got {value!r}", param, ctx)


@click.command(help=(__doc__ or "").split("\n")[0])
@click.option("--sources", type=Numbers(), default="5,100,300", show_default=True)
@click.option("--orders", default="file,shuffled", show_default=True, help="Some of these.")
@click.option(
    "--tokens",
    type=Millions(),
    default="0",
    help="Tokens of a run.  [default: 100M, or 700,000 for each source]",
)
@click.option("--data", type=click.Path(path_type=Path), default=default_folder)
@click.option("--save", "saving", is_flag=True, help="Writes the dated page.")
@click.option("--run", "one_run", hidden=True)
def main(
    sources: list[int], orders: str, tokens: int, data: Path, saving: bool, one_run: str | None
) -> None:
    if one_run is not None:
        fields, counts = json.loads(one_run)
        print(json.dumps(measure(Work(**fields), counts)), flush=True)
        os._exit(0)  # without closing the session: that is not measured
    if unknown := set(orders.split(",")) - {"file", "shuffled"}:
        raise click.BadParameter(f"expected file or shuffled, got {min(unknown)!r}")
    console, rows = wide_console(), list[list[str]]()
    for n, corpus in corpora(Console(stderr=True), data, sources, 1).items():
        amount = tokens or max(100_000_000, 700_000 * n)
        for order in orders.split(","):
            peer = "overlord" if order == "file" else "overlord-shuffled"
            work = Work(peer, "null", str(corpus.folder), n, amount, ranks=8)
            plain = run_apart(replace(work, peer="bare"), False)
            clocks, calls = run_apart(work, False), run_apart(work, True)
            mine = rows_of(n, order, clocks, calls, plain["cpu_s"] * 1e9 / plain["tokens"])
            console.print(shown_table(f"{n} sources, {order}", HEAD, mine))
            rows += mine
    if saving:
        today = datetime.date.today().isoformat()
        text = f"# Hot path of the embedded runtime, {today}\n\n"
        text += f"`{command_line('benchmarks/profile_hot_path.py')}` on {machine()}\n\n"
        text += markdown_table(HEAD, rows) + "\n"
        console.print(f"saved {save(f'{today}-profile-hot-path', text, {})}")


if __name__ == "__main__":
    main()
