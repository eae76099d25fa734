"""``overlord demo``: write a corpus and a job file, run the job, write a report."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from overlord.cli.common import (
    debug_option,
    json_option,
    make_console,
    print_json,
    run_guarded,
    runtime_option,
)


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("overlord-demo"),
    show_default=True,
    help="The folder for corpus, job file and report.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=40, show_default=True, help="Steps to run."
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1, max=64),
    default=4,
    show_default=True,
    help="Data-parallel ranks.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=8),
    default=10_000,
    show_default=True,
    help="Rows per source, at most.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=7,
    show_default=True,
    help="Seed of corpus and job.",
)
@runtime_option
@json_option
@debug_option
def demo(
    out: Path,
    steps: int,
    ranks: int,
    rows: int,
    seed: int,
    runtime: str,
    as_json: bool,
    debug: bool,
) -> None:
    """Write a small corpus, run a job on it, and write a report."""

    def act() -> None:
        from overlord.demo.corpus import Shape
        from overlord.demo.result import demo_document
        from overlord.demo.run import run_demo

        given = (("ranks", ranks, 4), ("rows", rows, 10_000), ("seed", seed, 7))
        changed = [f"--{name} {value}" for name, value, usual in given if value != usual]
        command = " ".join(
            [
                "overlord demo",
                f"--out {shlex.quote(str(out))}",
                f"--steps {steps}",
                *changed,
                *([] if runtime == "local" else [f"--runtime {runtime}"]),
            ]
        )
        vocab = 8192 if rows >= 1000 else 1024
        shape = Shape(seed=seed, rows=rows, ranks=ranks, vocab=vocab, samples=min(512, 32 * ranks))
        # With --json stdout holds the document alone.
        result = run_demo(out, shape, steps, make_console(as_json), command, runtime=runtime)
        if as_json:
            print_json(demo_document(result, out))

    run_guarded(act, debug)
