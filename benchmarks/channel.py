"""Cost of a message between two processes: our transport, a bare memcpy, and other libraries.

    python benchmarks/channel.py --quick      # about ten seconds
    python benchmarks/channel.py --save       # a few minutes; writes a page in benchmarks/results

The job is the same for all. A producer has a message of 1, 16 or 64 MiB as 16 pieces in its memory.
It must arrive in the consumer as one contiguous array, which the consumer

- ``copied``: copies into a fixed buffer of its own, which it reuses. At least two copies of the
  bytes are necessary. The bare memcpy makes the same two: piece by piece into one buffer, then into
  another, in one thread;
- ``viewed``: only views, reading four bytes of every piece. At least one copy is necessary, and the
  bare memcpy makes that one.

There are three bare memcpys: one process into one buffer; one process in turn into as many buffers
as the shared-memory pool has segments; and two processes that do the first concurrently. The second
touches the memory that any transport must touch that writes one message while another is read. The
third shows how much two copying cores slow each other down, without any communication.

GB per CPU second: bytes of the messages, each counted once, over user and system time of all
processes and their threads.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
from rich.console import Console

from hops.job import COPIED, MIB, VIEWED
from hops.run import Block, blocks, crews
from hops.ways import AHEAD, BARES, MEANING, available
from page import Numbers, command_line, machine, markdown_table, progress, save, shown_table

MODES = (COPIED, VIEWED)
TARGET = 0.7  # share of the speed of a bare memcpy, from 16 MiB up
HEADS = {
    COPIED: "and copied into the consumer's buffer (two copies at least)",
    VIEWED: "and viewed where it lies (one copy at least)",
}


def rates(found: list[Block], mode: str, nbytes: int) -> dict[str, list[float]]:
    """Return GB per CPU second of every transport, round by round."""
    out: dict[str, list[float]] = defaultdict(list)
    for block in found:
        if (block.mode, block.nbytes) == (mode, nbytes):
            out[block.way].append(block.gb_per_cpu_s)
    return dict(out)


def share(own: list[float], bare: list[float]) -> float:
    """Return the speed relative to a bare memcpy of the same round.

    A disturbance of a round affects both.
    """
    return statistics.median(a / b for a, b in zip(own, bare, strict=True))


def table(found: list[Block], mode: str) -> tuple[list[str], list[list[str]]]:
    sizes = sorted({block.nbytes for block in found})
    by_size = {nbytes: rates(found, mode, nbytes) for nbytes in sizes}
    rows = []
    for way in dict.fromkeys(block.way for block in found):
        row = [way]
        for nbytes in sizes:
            own, shares = (
                by_size[nbytes][way],
                [share(by_size[nbytes][way], by_size[nbytes][bare]) for bare in BARES],
            )
            row += [
                f"{statistics.median(own):.2f} ({min(own):.2f}-{max(own):.2f})",
                " / ".join(f"{100 * s:.0f} %" for s in shares),
            ]
        rows.append(row)
    return [
        "way",
        *(head for nbytes in sizes for head in (f"{nbytes // MIB} MiB, GB/CPU s", "of bare")),
    ], rows


def verdict(found: list[Block]) -> list[str]:
    """Return whether the target is met, for every definition of it."""
    lines = []
    for mode in MODES:
        for nbytes in sorted({block.nbytes for block in found if block.nbytes >= 16 * MIB}):
            by_way = rates(found, mode, nbytes)
            for bare in BARES if "ring" in by_way else ():
                reached = share(by_way["ring"], by_way[bare])
                said = f"{100 * TARGET:.0f} % is {'met' if reached >= TARGET else 'missed'}"
                lines.append(
                    f"{nbytes // MIB} MiB, {mode}: the ring moves {100 * reached:.0f} % "
                    f"of *{bare}*; {said}."
                )
    return lines


def libraries(ways: Iterable[str]) -> str:
    """Return the versions of the other measured libraries."""
    names = {"torch queue": "torch", "Arrow Flight": "pyarrow", "Ray objects": "ray"}
    return ", ".join(f"{names[way]} {metadata.version(names[way])}" for way in ways if way in names)


def page(found: list[Block], date: str, command: str, rounds: int) -> str:
    ways = dict.fromkeys(block.way for block in found)
    parts = [
        f"# One hop between two processes, {date}",
        f"`{command}`: {rounds} rounds. {machine()} {libraries(ways)}".rstrip(),
    ]
    parts.append(
        "16 pieces in the producer become one contiguous array in the consumer. GB per "
        "CPU second (all processes, user and system): "
        "median (lowest-highest). *Of bare*: against the bare memcpys of the same round, "
        "which make the least number of copies the job "
        f"allows: into one buffer / into {AHEAD} in turn / in two processes at once; "
        "median over the rounds."
    )
    for mode in MODES:
        parts += [f"## Received {HEADS[mode]}", markdown_table(*table(found, mode))]
    parts += ["\n".join(f"- {line}" for line in verdict(found))]
    parts += ["## The ways", "\n".join(f"- *{way}*: {MEANING[way]}" for way in ways)]
    return "\n\n".join(parts) + "\n"


@click.command()
@click.option(
    "--sizes", type=Numbers(), default="1,16,64", show_default=True, help="Message sizes in MiB."
)
@click.option("--rounds", default=9, show_default=True)
@click.option(
    "--block-mib",
    default=512,
    show_default=True,
    help="Bytes that a way moves in a round, at each size.",
)
@click.option(
    "--ways",
    default="",
    help="Names with commas between them; all that can run unless said. The bare memcpy is "
    "always among them.",
)
@click.option("--quick", is_flag=True, help="Two short rounds.")
@click.option("--save", "keep", is_flag=True, help="Write the dated page to benchmarks/results.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write every block there.",
)
def main(
    sizes: list[int],
    rounds: int,
    block_mib: int,
    ways: str,
    quick: bool,
    keep: bool,
    json_path: Path | None,
) -> None:
    rounds, block_mib = (2, 64) if quick else (rounds, block_mib)
    known = available()
    names = [w.strip() for w in ways.split(",")] if ways else known
    if unknown := sorted(set(names) - set(known)):
        raise click.BadParameter(
            f"{', '.join(unknown)}: cannot run here; known are {', '.join(known)}",
            param_hint="--ways",
        )
    names = list(dict.fromkeys([*BARES, *names]))
    console = Console()
    found: list[Block] = []
    with crews(names) as made, progress(console) as bar:
        task = bar.add_task("hops", total=rounds * len(sizes) * len(MODES) * len(names))
        for block in blocks(made, [size * MIB for size in sizes], MODES, rounds, block_mib * MIB):
            found.append(block)
            bar.update(task, advance=1, description=f"{block.way}, {block.nbytes // MIB} MiB")
    for mode in MODES:
        console.print(shown_table(f"received {HEADS[mode]}", *table(found, mode)))
    for line in verdict(found):
        console.print(line)
    if json_path:
        json_path.write_text(json.dumps([asdict(block) for block in found]), encoding="utf-8")
    if keep:
        date = datetime.date.today().isoformat()
        text = page(found, date, command_line("benchmarks/channel.py"), rounds)
        console.print(f"written: {save(f'{date}-channel', text, {})}")


if __name__ == "__main__":
    main()
