"""What constructors are worth: loader hosts that send to one constructor per data-parallel group,
or to every client (the Overlord paper's appendix B).

    python benchmarks/constructors.py             # 2, 4 and 8 ranks, about a minute
    python benchmarks/constructors.py --save      # the dated page in benchmarks/results

Two data-parallel groups whose ranks share the same data (tensor parallelism 1, 2, 4), each rank a
process that takes a step, reads a byte of every page of it, and rests. Without constructors every
rank has a link from every loader host, is sent its group's payload, and builds the group's
microbatches itself.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, fields
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent)
)  # its own modules, also when started from elsewhere

import click
import numpy as np
from rich.console import Console

from fetching.case import Case, Found
from fetching.cell import run, write_sources
from page import Numbers, command_line, machine, markdown_table, progress, save, shown_table

FIGURES = [f.name for f in fields(Found) if f.name not in ("case", "fetch_ms")]
LINKS = [
    "ranks (dp x tp)",
    "",
    "links a loader host",
    "links a client",
    "links in all",
    "sent a step, KiB",
]
COSTS = [
    "ranks (dp x tp)",
    "",
    "CPU a step, ms",
    "of it a client",
    "PSS, MB",
    "of it a client",
    "fetch, median ms",
    "p99 ms",
]


def rows(found: list[Found]) -> tuple[list[list[str]], list[list[str]]]:
    """Of both tables. Rounds of a case: the median of each figure, and the waits of all
    together.
    """
    links, costs = [], []
    for case in dict.fromkeys(f.case for f in found):
        mine = [f for f in found if f.case == case]
        waits = [ms for f in mine for ms in f.fetch_ms]
        name = [f"{case.ranks} ({case.dp} x {case.tp})", case.name]
        n = {figure: statistics.median(getattr(f, figure) for f in mine) for figure in FIGURES}
        links.append(
            [
                *name,
                *(f"{n[x]:.0f}" for x in ("links_per_loader_host", "links_per_client", "links")),
                f"{n['step_bytes'] / 1024:.0f}",
            ]
        )
        cost = [
            f"{n['step_cpu_ms']:.1f}",
            f"{n['client_cpu_ms']:.1f}",
            f"{n['pss_mb']:.0f}",
            f"{n['client_pss_mb']:.1f}",
        ]
        costs.append(
            [*name, *cost, f"{statistics.median(waits):.2f}", f"{np.percentile(waits, 99):.1f}"]
        )
    return links, costs


def page(found: list[Found], date: str, command: str, rounds: int) -> str:
    case = found[0].case
    about = (
        f"{case.hosts} loader hosts; steps of {case.microbatches} microbatches of "
        f"{case.context} tokens a group, {case.pause_ms:g} ms of "
        f"rest between them; {case.steps} steps are counted behind {case.warm}, {rounds} "
        "rounds. CPU and PSS of all processes. *Links*: "
        "those that payload and steps go through, and without constructors the planner's "
        "to each client. *Sent*: bytes of payload that "
        "loader hosts send, counted for each link; on one machine the ranks of a group "
        "read them from the same shared memory, between "
        "machines they would travel so often. *Fetch*: how long a rank waits for its next step."
    )
    parts = [f"# With and without constructors, {date}", f"`{command}`. {machine()}", about]
    parts += [
        markdown_table(head, table) for head, table in zip((LINKS, COSTS), rows(found), strict=True)
    ]
    return "\n\n".join(parts) + "\n"


@click.command()
@click.option(
    "--tp", type=Numbers(), default="1,2,4", show_default=True, help="Ranks of each group."
)
@click.option("--dp", default=2, show_default=True, help="Groups.")
@click.option("--sources", default=8, show_default=True)
@click.option("--hosts", default=4, show_default=True, help="Loader hosts.")
@click.option("--microbatches", default=8, show_default=True, help="Of a group in a step.")
@click.option("--context", default=8192, show_default=True)
@click.option("--steps", default=60, show_default=True)
@click.option(
    "--pause-ms", default=50.0, show_default=True, help="A rank's own work between two steps."
)
@click.option("--rounds", default=1, show_default=True)
@click.option("--save", "keep", is_flag=True, help="Write the dated page to benchmarks/results.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all figures there.",
)
def main(
    tp: list[int],
    dp: int,
    sources: int,
    hosts: int,
    microbatches: int,
    context: int,
    steps: int,
    pause_ms: float,
    rounds: int,
    keep: bool,
    json_path: Path | None,
) -> None:
    console = Console()
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as folder, progress(console) as bar:
        write_sources(Path(folder), sources)
        cases = [
            Case(
                constructors=constructors,
                folder=folder,
                dp=dp,
                tp=n,
                hosts=min(hosts, sources),
                context=context,
                steps=steps,
                microbatches=microbatches,
                pause_ms=pause_ms,
            )
            for n in tp
            for constructors in (True, False)
        ]
        task = bar.add_task("cases", total=rounds * len(cases))
        for _ in range(rounds):
            for case in cases:
                bar.update(task, description=f"{case.ranks} ranks, {case.name}")
                found.append(run(case))
                bar.update(task, advance=1)
    found.sort(key=lambda f: cases.index(f.case))
    for title, head, table in zip(
        ("what goes where", "what it costs"), (LINKS, COSTS), rows(found), strict=True
    ):
        console.print(shown_table(title, head, table))
    if json_path:
        json_path.write_text(json.dumps([asdict(f) for f in found]), encoding="utf-8")
    if keep:
        date = datetime.date.today().isoformat()
        console.print(
            "written: "
            f"{save(f'{date}-constructors', page(found, date, command_line('benchmarks/constructors.py'), rounds), {})}"
        )


if __name__ == "__main__":
    main()
