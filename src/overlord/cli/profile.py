"""The commands about what sources cost and how many loaders they need: ``overlord profile`` and
``overlord partition``.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import click

from overlord.cli.common import FAILED, debug, error, guarded, imports, job_file, read_job, screen


class Bytes(click.ParamType):
    """A number of bytes as in ``launch(memory=)``: 1000000, 512MB, 256GB; units are powers of
    1024.
    """

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        from overlord.scaling.memory_budget import parse_bytes

        try:
            return parse_bytes(value if isinstance(value, int) else str(value))
        except ValueError as problem:
            self.fail(str(problem), param, ctx)


@click.command()
@job_file
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    help="Rows of a source that are read, at most.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.01),
    default=2.0,
    show_default=True,
    help="Seconds for a source, at most.",
)
@click.option(
    "--save",
    is_flag=True,
    help="Keep the profile for the next launch, in the job's journal or in the cache.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PROFILE.HTML",
    help="Also write a page with a plot.",
)
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PROFILE.SVG",
    help="Also write the plot alone.",
)
@imports
@debug
def profile(
    job_yaml: Path,
    rows: int,
    seconds: float,
    save: bool,
    html: Path | None,
    svg: Path | None,
    modules: tuple[str, ...],
    debug: bool,
) -> None:
    """Measure what each source costs: seconds, hand-over, memory."""

    def act() -> None:
        from overlord.cli.profile_report import profile_job, profile_page, profile_svg, profile_view
        from overlord.observe.tables import waiting
        from overlord.setup.measure import Bounds
        from overlord.setup.options import Options
        from overlord.setup.prepared_job import PreparedJob
        from overlord.setup.profile_store import load, path_of, shown
        from overlord.setup.profile_store import save as keep

        job, console = read_job(job_yaml, modules), screen()
        with (
            closing(PreparedJob(job, Options())) as blueprint,
            waiting(screen(stderr=True), "measured", len(job.sources)) as advance,
        ):
            found = profile_job(blueprint, Bounds(rows=rows, seconds=seconds), advance)
        console.print(profile_view(found.profile))
        for path, text in (
            (html, profile_page(found.profile, job.name)),
            (svg, profile_svg(found.profile)),
        ):
            if path is not None:
                path.write_text(text, encoding="utf-8")
                console.print(f"the plot is {path}", markup=False)
        if save and keep(where := path_of(job, None), load(where).merge(found.profile, weight=1.0)):
            console.print(f"the profile is {shown(where)}", markup=False, soft_wrap=True)
        if found.failures:
            error(
                f"{len(found.failures)} of {len(job.sources)} sources could not be measured",
                "\n".join(f"  - {f}" for f in found.failures),
            )
            sys.exit(FAILED)

    guarded(act, debug)


@click.command()
@job_file
@click.option(
    "--cpus",
    type=click.IntRange(min=1),
    help="Cores for loading, constructors and planner; without it, those of this machine.",
)
@click.option(
    "--memory",
    type=Bytes(),
    metavar="SIZE",
    help="Memory for loader hosts, as in 256GB; without it, as much as it takes.",
)
@click.option(
    "--demand",
    type=click.FloatRange(min=0, min_open=True),
    metavar="TOKENS/S",
    help="What trainers take in all.",
)
@click.option("--per-source", type=click.IntRange(min=1), help="Loaders of one source, at most.")
@click.option(
    "--per-actor", type=click.IntRange(min=1), help="Loaders of one source on one host, at most."
)
@click.option(
    "--cluster",
    type=click.IntRange(min=1),
    help="Sources of about the same cost that are levelled together, at most; 4.",
)
@click.option(
    "--sources-per-host",
    type=click.IntRange(min=1),
    help="Sources that share a host; 1: none does, as in the paper.",
)
@imports
@debug
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
    debug: bool,
) -> None:
    """Show how many loaders each source would get, and why."""

    def act() -> None:
        from overlord.cli.profile_report import partition_view
        from overlord.scaling.levels import CLUSTER
        from overlord.setup.options import Options, n_cores
        from overlord.setup.partition import loads_of, partition_of, sample_tokens
        from overlord.setup.prepared_job import PreparedJob
        from overlord.setup.profile_store import known, quick

        job, console = read_job(job_yaml, modules), screen()
        with closing(PreparedJob(job, Options(sources_per_host=sources_per_host))) as blueprint:
            blueprint.profile = known(blueprint)
            blueprint.profile = quick(blueprint, loads_of(blueprint), blueprint.profile)
            made = partition_of(
                blueprint,
                cores=cpus or n_cores(),
                memory_bytes=memory,
                per_source=per_source,
                per_actor=per_actor,
                cluster=cluster or CLUSTER,
            )
            tokens = sample_tokens(blueprint)
            console.print(partition_view(made, tokens, len(blueprint.profile.sources)))
        if said := made.shortfall((demand or 0.0) / tokens):
            error(said)
            sys.exit(FAILED)
        if demand is not None:
            console.print(f"a demand of {demand:,.0f} tokens/s is met", markup=False)

    guarded(act, debug)
