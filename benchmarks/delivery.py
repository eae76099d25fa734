"""Cost of delivery: a shared constructor against a loader per rank, and image-text jobs.

    python benchmarks/delivery.py                              # both parts: some minutes
    python benchmarks/delivery.py --parts images --pairs 5     # one of them
    python benchmarks/delivery.py --quick                      # a smoke test, no measurement
    python benchmarks/delivery.py --save                       # writes a page in benchmarks/results

*Groups*: 1, 2, 4 and 8 ranks along TP or CP need the same samples. It measures bytes read, bytes
assembled, CPU and memory, with one constructor for the group and with a loader in every rank.
*Images*: JPEGs and captions; CPU per sample relative to a loop that does the same work with the
same functions. benchmarks/README.md explains the method.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
from rich.console import Console

from corpus import Corpus, default_folder
from delivering.assembled import assembled_bytes
from delivering.case import OURS, Case, Found
from delivering.cell import CellFailed, run
from delivering.job import TOKENIZER
from delivering.pictures import Pictures, make_pictures
from page import (
    Numbers,
    command_line,
    machine,
    markdown_table,
    progress,
    save,
    shown_table,
    wide_console,
)
from peers.data import corpora

PARTS = ("groups", "images")
GROUP_WAYS = ("overlord", "overlord-broadcast", "bare", "torch")
IMAGE_WAYS = ("overlord-one", "overlord-local", "overlord", "torch")
STEPS = {"null": 160, "tokenized": 24}  # that are counted, of the groups
N_SOURCES = 5
QUICK = 8
TARGET = 1.15  # CPU of a sample over the bare loop's
PEERS = "best peer measured elsewhere 1.31, torch's DataLoader 1.6"
MIB = 2**20

Group = tuple[Found, int]  # and the bytes its step was assembled in, all processes together


def group_cases(
    jobs: Sequence[str],
    ranks: Sequence[int],
    axes: Sequence[str],
    ways: Sequence[str],
    folder: Path,
    share: int,
) -> list[Case]:
    """Return the combinations: a single rank is the same along every axis; broadcasts are TP's."""
    found = []
    for job in jobs:
        for n, axis in [(n, axis) for axis in axes for n in ranks if n > 1 or axis == axes[0]]:
            mine = [way for way in ways if way != "overlord-broadcast" or (axis == "tp" and n > 1)]
            steps = max(8, STEPS[job] // share)
            found += [
                Case(
                    way=w,
                    job=job,
                    folder=str(folder),
                    n_sources=N_SOURCES,
                    axis=axis,
                    ranks=n,
                    steps=steps,
                )
                for w in mine
            ]
    return found


def image_cases(ways: Sequence[str], folder: Path, ranks: int, steps: int) -> list[Case]:
    base = Case(
        way="bare",
        job="pictures",
        folder=str(folder),
        n_sources=N_SOURCES,
        axis="dp",
        ranks=ranks,
        context=4096,
        microbatches=2,
        samples=24 * ranks,
        warm=12,
        steps=steps,
    )
    return [replace(base, way=way) for way in ways]


def measure(cases: Sequence[Case], limit_s: float, console: Console) -> list[Found]:
    found = []
    with progress(console) as bars:
        bar = bars.add_task("", total=len(cases))
        for case in cases:
            bars.update(
                bar, description=f"{case.job}: {case.way}, {case.ranks} rank(s) along {case.axis}"
            )
            found.append(run(case, limit_s))
            bars.advance(bar)
    return found


def between_bare(cases: Sequence[Case], pairs: int) -> list[Case]:
    """Run every cell between two runs of the bare loop; the order rotates from round to round."""
    bare, order = replace(cases[0], way="bare"), []
    for k in range(pairs):
        turned = [*cases[k % len(cases) :], *cases[: k % len(cases)]]
        order += [c for case in turned for c in (bare, case)]
    return [*order, bare]


def ratios(found: Sequence[Found]) -> dict[str, list[float]]:
    """Return CPU per sample over the mean of the bare runs before and after it, by loader."""
    out: dict[str, list[float]] = {}
    for before, mine, behind in zip(found[::2], found[1::2], found[2::2], strict=False):
        out.setdefault(mine.case.way, []).append(
            2 * mine.sample_us / (before.sample_us + behind.sample_us)
        )
    return out


def assembled(found: Sequence[Found]) -> list[Group]:
    """Return the assembled bytes.

    Ranks with a loader of their own each assemble their steps. Ranks of a constructor share memory,
    which counts once.
    """
    return [
        (f, f.delivered if f.case.way not in OURS else round(f.delivered * assembled_bytes(f.case)))
        for f in found
    ]


GROUP_HEAD = (
    "job",
    "axis",
    "ranks",
    "loader",
    "read MB/Mtok",
    "x",
    "assembled MB/Mtok",
    "x",
    "CPU s/Mtok",
    "x",
    "PSS over idle MB",
    "x",
    "delivered MB/Mtok",
)


def group_rows(found: Sequence[Group]) -> list[list[str]]:
    """Return rows by job, axis and ranks.

    ``x``: the number of a DataLoader in every rank over this one, or of the bare loop if the
    DataLoader was not run.
    """
    rows = []
    for key in dict.fromkeys((f.case.job, f.case.axis, f.case.ranks) for f, _ in found):
        mine = [
            (f, _figures(f, n)) for f, n in found if (f.case.job, f.case.axis, f.case.ranks) == key
        ]
        theirs = next((x for way in ("torch", "bare") for f, x in mine if f.case.way == way), None)
        for f, figures in mine:
            cells = [key[0], key[1] if key[2] > 1 else "", str(key[2]), f.case.way]
            for i, figure in enumerate(figures):
                over = f"{theirs[i] / figure:.2f}" if theirs is not None and figure > 0 else ""
                cells += [f"{figure:.2f}" if figure < 100 else f"{figure:.0f}", over]
            rows.append([*cells, f"{f.per_million(f.delivered) / MIB:.0f}"])
    return rows


def _figures(f: Found, nbytes: int) -> tuple[float, ...]:
    return (
        f.per_million(f.read) / MIB,
        f.per_million(nbytes) / MIB,
        f.per_million(f.cpu_s),
        f.over_idle_mb,
    )


IMAGE_HEAD = (
    "loader",
    "runs",
    "CPU us a sample",
    "x bare",
    f"at most {TARGET}",
    "samples/s",
    "PSS over idle MB",
    "MB a sample",
)


def image_rows(found: Sequence[Found]) -> list[list[str]]:
    rows, against = [], ratios(found)
    for way in dict.fromkeys(f.case.way for f in found):
        mine = [f for f in found if f.case.way == way]
        x = against.get(way, [])
        middle = statistics.median(x) if x else 1.0
        spread = f"{middle:.3f}" + (f" ({min(x):.3f} to {max(x):.3f})" if len(x) > 1 else "")
        held = "" if way in ("bare", "torch") else "met" if middle <= TARGET else "**missed**"
        rows.append(
            [
                way,
                str(len(mine)),
                _median(mine, lambda f: f.sample_us, ".0f"),
                spread,
                held,
                _median(mine, lambda f: f.samples / f.wall_s, ".0f"),
                _median(mine, lambda f: f.over_idle_mb, ".0f"),
                _median(mine, lambda f: f.delivered / f.samples / 1e6, ".2f"),
            ]
        )
    return rows


def _median(found: Sequence[Found], pick: Callable[[Found], float], form: str) -> str:
    return format(statistics.median(map(pick, found)), form)


def page(
    groups: Sequence[Group],
    images: Sequence[Found],
    pictures: Pictures | None,
    today: str,
    command: str,
) -> str:
    parts = [
        f"# Delivery, {today}",
        machine(),
        f"    {command}",
        "How to read it: `benchmarks/README.md`.",
    ]
    if groups:
        parts += [
            "## Ranks that share a constructor",
            markdown_table(GROUP_HEAD, group_rows(groups)),
        ]
    if images and pictures:
        case = images[0].case
        about = (
            f"{pictures.rows} JPEGs of {pictures.pixels / pictures.rows / 1e3:.0f} "
            "thousand pixels and "
            f"{pictures.image_bytes / pictures.rows / 1e3:.0f} kB on average, captions "
            f"tokenized; {case.ranks} data-parallel ranks, "
            f"{case.samples} samples a step, {case.steps} steps counted. Target: at most "
            f"{TARGET} x the bare loop ({PEERS})."
        )
        parts += ["## Images and captions", about, markdown_table(IMAGE_HEAD, image_rows(images))]
    return "\n\n".join(parts) + "\n"


def data(console: Console, folder: Path) -> tuple[Corpus, Pictures]:
    """Write texts, images and the tokenizer."""
    corpus = corpora(console, folder, [N_SOURCES], 1)[N_SOURCES]
    with progress(console) as bars:
        bar = bars.add_task("data: pictures", total=None)
        pictures = make_pictures(
            folder, N_SOURCES, 1, lambda at, of: bars.update(bar, completed=at, total=of)
        )
    if not (pictures.folder / TOKENIZER).exists():
        part = pictures.folder / "tokenizer.part"
        shutil.copy(corpus.tokenizer, part)
        os.replace(part, pictures.folder / TOKENIZER)
    return corpus, pictures


@click.command(help=__doc__.split("\n")[0] if __doc__ else None)
@click.option("--parts", default=",".join(PARTS), show_default=True)
@click.option("--jobs", default="null,tokenized", show_default=True, help="Of the groups.")
@click.option("--ranks", type=Numbers(), default="1,2,4,8", show_default=True, help="Of a group.")
@click.option("--axes", default="tp,cp", show_default=True)
@click.option("--group-ways", default=",".join(GROUP_WAYS), show_default=True)
@click.option("--image-ways", default=",".join(IMAGE_WAYS), show_default=True)
@click.option(
    "--image-ranks", default=2, show_default=True, help="Data-parallel ranks of the image-text job."
)
@click.option(
    "--image-steps",
    default=40,
    show_default=True,
    help="Steps that are counted, of the image-text job.",
)
@click.option(
    "--pairs",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Runs with images, each between two bare runs.",
)
@click.option(
    "--quick", is_flag=True, help=f"{QUICK} times fewer steps: a look, not a measurement."
)
@click.option(
    "--data",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=default_folder,
    help="Where the data is kept.",
)
@click.option(
    "--limit",
    "limit_s",
    type=float,
    default=300.0,
    show_default=True,
    help="Seconds after which a cell is given up.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Writes every run's figures there.",
)
@click.option(
    "--save", "saving", is_flag=True, help="Writes the page, dated, to benchmarks/results."
)
def main(
    parts: str,
    jobs: str,
    ranks: list[int],
    axes: str,
    group_ways: str,
    image_ways: str,
    image_ranks: int,
    image_steps: int,
    pairs: int,
    quick: bool,
    folder: Path,
    limit_s: float,
    json_path: Path | None,
    saving: bool,
) -> None:
    console, today, share = wide_console(), datetime.date.today().isoformat(), QUICK if quick else 1
    corpus, pictures = data(console, folder)
    groups: list[Group] = []
    images: list[Found] = []
    try:
        if "groups" in parts.split(","):
            cases = group_cases(
                jobs.split(","), ranks, axes.split(","), group_ways.split(","), corpus.folder, share
            )
            groups = assembled(measure(cases, limit_s, console))
            console.print(
                shown_table("ranks that share a constructor", GROUP_HEAD, group_rows(groups))
            )
        if "images" in parts.split(","):
            mine = image_cases(
                image_ways.split(","), pictures.folder, image_ranks, max(6, image_steps // share)
            )
            images = measure(between_bare(mine, pairs), limit_s, console)
            console.print(shown_table("images and captions", IMAGE_HEAD, image_rows(images)))
    except CellFailed as failure:
        raise click.ClickException(str(failure)) from failure
    if json_path:
        runs = [{**asdict(f), "assembled": n} for f, n in groups] + [asdict(f) for f in images]
        json_path.write_text(
            json.dumps({"date": today, "machine": machine(), "runs": runs}, indent=1)
        )
    if saving:
        text = page(groups, images, pictures, today, command_line("benchmarks/delivery.py"))
        console.print(f"saved {save(f'{today}-delivery', text, {})}")


if __name__ == "__main__":
    main()
