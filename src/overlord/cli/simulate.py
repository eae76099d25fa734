"""``overlord simulate``: estimate a job on a large cluster, as the dry run of the paper does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from overlord.cli.common import (
    debug_option,
    import_option,
    job_argument,
    json_option,
    make_console,
    note,
    print_json,
    read_job,
    run_guarded,
)

COUNT = click.IntRange(min=1)


class Sizes(click.ParamType):
    """A parameter type: numbers of GPUs or nodes, separated by commas."""

    name = "N,N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        try:
            found = [int(word) for word in str(value).split(",")]
        except ValueError:
            found = []
        if not found or min(found) < 1:
            self.fail(
                "expected whole numbers above 0, separated by commas, as in 512,4096, "
                f"got {value!r}",
                param,
                ctx,
            )
        return found


@click.command(short_help="Estimate memory and latency on a large cluster.")
@job_argument
@click.option(
    "--gpus",
    type=Sizes(),
    help="Number of GPUs; several numbers with commas give a row each. Default "
    "512,1024,2048,4096,8192,16384.",
)
@click.option("--nodes", type=Sizes(), help="Number of nodes, instead of --gpus.")
@click.option("--gpus-per-node", type=COUNT, default=8, show_default=True, help="GPUs of a node.")
@click.option("--tp", type=COUNT, default=1, show_default=True, help="Tensor-parallel degree.")
@click.option("--cp", type=COUNT, default=1, show_default=True, help="Context-parallel degree.")
@click.option("--pp", type=COUNT, default=1, show_default=True, help="Pipeline-parallel degree.")
@click.option(
    "--batch",
    type=COUNT,
    help="Samples per step over all ranks. Default: the job's number per data-parallel group.",
)
@click.option(
    "--workers",
    type=COUNT,
    default=4,
    show_default=True,
    help="Workers per rank of the colocated loader that serves as comparison.",
)
@click.option(
    "--hosts",
    type=COUNT,
    help="Loader workers, at least. Default: as many as reading needs at the trainers' speed.",
)
@click.option(
    "--sources-per-host",
    type=COUNT,
    default=25,
    show_default=True,
    help="Sources that share a loader worker. 1: one worker per source, as in the paper.",
)
@click.option(
    "--step-seconds",
    "pace_s",
    type=float,
    default=1.0,
    show_default=True,
    help="Seconds that trainers compute per step.",
)
@click.option(
    "--constructors/--no-constructors",
    "constructors",
    default=None,
    help="Simulate only with constructors, or only without. Default: both.",
)
@click.option(
    "--broadcast/--no-broadcast",
    default=True,
    help="Whether one rank of a tensor-parallel group fetches for the others. Default: yes.",
)
@click.option(
    "--measure",
    "again",
    is_flag=True,
    help="Measure the constants again, even if an earlier run has stored some.",
)
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT.JSON",
    help="Also write all numbers to this file, as --json prints them.",
)
@import_option
@json_option
@debug_option
def simulate(
    job_yaml: Path,
    gpus: list[int] | None,
    nodes: list[int] | None,
    gpus_per_node: int,
    tp: int,
    cp: int,
    pp: int,
    batch: int | None,
    workers: int,
    hosts: int | None,
    sources_per_host: int,
    pace_s: float,
    constructors: bool | None,
    broadcast: bool,
    again: bool,
    save: Path | None,
    modules: tuple[str, ...],
    as_json: bool,
    debug: bool,
) -> None:
    """Estimate memory, planning time, connections and fetch latency of a job on a large cluster.

    The real planner runs at full size and is timed. Times of reading, sending and building are
    measured with small stand-in jobs on this machine.
    """
    if gpus and nodes:
        raise click.UsageError("expected --gpus or --nodes, got both; leave one out")
    if not 0 < pace_s < 1e6:
        raise click.UsageError(
            f"--step-seconds: expected a number above 0 and below 1e6, got {pace_s:g}"
        )
    sizes = [n * gpus_per_node for n in nodes] if nodes else gpus or [512 * 2**k for k in range(6)]

    def act() -> None:
        from overlord.cli.simulate_report import constants_view, memory_view, time_view, waits_of
        from overlord.dryrun.estimate import DryRunRequest, estimate_sizes
        from overlord.observe.json_text import json_document
        from overlord.observe.progress_bars import progress_bars
        from overlord.observe.stage_text import stage_lines

        job = read_job(job_yaml, modules)
        if job.stages:
            note(f"estimated is {stage_lines(job)[job.batches.largest_number]}")
        request = DryRunRequest(
            gpus=sizes,
            tp=tp,
            cp=cp,
            pp=pp,
            gpus_per_node=gpus_per_node,
            batch=batch,
            workers=workers,
            hosts=hosts,
            sources_per_host=sources_per_host,
            pace_s=pace_s,
            constructors=(True, False) if constructors is None else (constructors,),
            broadcast=broadcast,
        )
        with progress_bars(make_console(stderr=True)) as progress:
            found, stored, cells = estimate_sizes(job, request, again=again, progress=progress)
        values = {
            "constants": found.to_dict()["constants"],
            "cells": [cell.to_dict() for cell in cells],
        }
        if save is not None:
            save.write_text(json_document(values), encoding="utf-8")
        if as_json:
            print_json(values)
            return
        console = make_console()
        console.print(constants_view(found.constants, stored))
        for view in (memory_view(cells), time_view(cells, pace_s)):
            console.print(view)
        for sentence in waits_of(cells):
            console.print(sentence, markup=False)
        console.print(
            "Planning is measured: CPU seconds of the real planner on that mesh. "
            "Everything else is computed from the constants. "
            "Memory is that of data loading, without the memory of the trainers.",
            markup=False,
        )

    run_guarded(act, debug)
