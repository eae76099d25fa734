"""``overlord partition``: print the number of loaders of each source, and the reason."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path

import click

from overlord.cli.common import (
    FAILED,
    debug_option,
    error,
    import_option,
    job_argument,
    json_option,
    make_console,
    print_json,
    read_job,
    run_guarded,
)


class Bytes(click.ParamType):
    """A parameter type: bytes as in ``launch(memory=)``: 1000000, 512MB; 1 kB is 1024 bytes."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        from overlord.scaling.profile import parse_bytes

        try:
            return parse_bytes(value if isinstance(value, int) else str(value))
        except ValueError as problem:
            self.fail(str(problem), param, ctx)


@click.command()
@job_argument
@click.option(
    "--cpus",
    type=click.IntRange(min=1),
    help="Cores for loading, constructors and planner; without it, those of this machine.",
)
@click.option(
    "--memory",
    type=Bytes(),
    metavar="SIZE",
    help="Memory for loader workers, as in 256GB; without it, no limit.",
)
@click.option(
    "--demand",
    type=click.FloatRange(min=0, min_open=True),
    metavar="TOKENS/S",
    help="Tokens per second that all trainers take together.",
)
@click.option("--per-source", type=click.IntRange(min=1), help="Loaders per source, at most.")
@click.option(
    "--per-actor", type=click.IntRange(min=1), help="Loaders of one source in one worker, at most."
)
@click.option(
    "--cluster",
    type=click.IntRange(min=1),
    help="Sources of similar cost that share a level, at most. Default: 4.",
)
@click.option(
    "--sources-per-host",
    type=click.IntRange(min=1),
    help="Sources that share a worker. 1: one worker per source, as in the paper.",
)
@import_option
@json_option
@debug_option
def partition(
    job_yaml: Path,
    cpus: int | None,
    memory: int | None,
    demand: float | None,
    per_source: int | None,
    per_actor: int | None,
    cluster: int | None,
    sources_per_host: int | None,
    modules: tuple[str, ...],
    as_json: bool,
    debug: bool,
) -> None:
    """Print how many loaders each source would get, and why."""

    def act() -> None:
        from overlord.cli.partition_report import partition_document, partition_view
        from overlord.observe.progress_bars import progress_bars
        from overlord.scaling.partition import CLUSTER
        from overlord.setup.options import Options, n_cores
        from overlord.setup.partition import loads_of, partition_of, sample_tokens
        from overlord.setup.prepared_job import PreparedJob
        from overlord.setup.profile_store import known, quick

        job, console = read_job(job_yaml, modules), make_console()
        with ExitStack() as stack:
            advance = stack.enter_context(progress_bars(make_console(stderr=True)))
            options = Options(
                sources_per_host=sources_per_host,
                progress=lambda done, of: advance("indexed files", done, of),
            )
            prepared = stack.enter_context(closing(PreparedJob(job, options)))
            prepared.profile = known(prepared)
            prepared.profile = quick(
                prepared,
                loads_of(prepared),
                prepared.profile,
                progress=lambda done, of: advance("measured sources", done, of),
            )
            made = partition_of(
                prepared,
                cores=cpus or n_cores(),
                memory_bytes=memory,
                per_source=per_source,
                per_actor=per_actor,
                cluster=cluster or CLUSTER,
            )
            tokens = sample_tokens(prepared)
        measured = len(prepared.profile.sources)
        shortfall = made.shortfall((demand or 0.0) / tokens)
        if as_json:
            print_json(partition_document(made, tokens, measured, demand, shortfall))
        else:
            console.print(partition_view(made, tokens, measured))
        if shortfall:
            error(shortfall)
            sys.exit(FAILED)
        if demand is not None and not as_json:
            console.print(f"a demand of {demand:,.0f} tokens/s is met", markup=False)

    run_guarded(act, debug)
