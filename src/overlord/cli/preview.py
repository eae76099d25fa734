"""``overlord preview``: print decoded samples of a source or a planned step, with loss masks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from overlord.cli.common import (
    check_writable,
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

if TYPE_CHECKING:
    from overlord.job.job import Job
    from overlord.preview.preview import Advance, Preview, PreviewRequest

COUNT = click.IntRange(min=1)


@click.command(short_help="Print decoded samples with their loss masks.")
@job_argument
@click.option(
    "--source", metavar="NAME", help="The first samples of this source. Default: the first source."
)
@click.option("--step", type=click.IntRange(min=0), help="The microbatches of this step, by rank.")
@click.option("--rank", type=click.IntRange(min=0), help="With --step: only those of this rank.")
@click.option(
    "--replicas",
    type=COUNT,
    default=4,
    show_default=True,
    help="With --step: data-parallel replicas to show, the first ones.",
)
@click.option(
    "--samples",
    type=COUNT,
    default=3,
    show_default=True,
    help="Samples to show, of the source or of each microbatch.",
)
@click.option(
    "--tokens", type=COUNT, default=512, show_default=True, help="Tokens to show of each sample."
)
@click.option(
    "--tokenizer",
    metavar="PATH|NAME",
    help="Decode sources of token ids by this tokenizer. Others are decoded by their own.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PAGE.HTML",
    help="Also write a page, with images as thumbnails.",
)
@import_option
@json_option
@debug_option
def preview(
    job_yaml: Path,
    source: str | None,
    step: int | None,
    rank: int | None,
    replicas: int,
    samples: int,
    tokens: int,
    tokenizer: str | None,
    html: Path | None,
    modules: tuple[str, ...],
    as_json: bool,
    debug: bool,
) -> None:
    """Print decoded samples with loss masks, special tokens and document boundaries."""
    if source is not None and step is not None:
        raise click.UsageError("give either --source NAME or --step N")
    if rank is not None and step is None:
        raise click.UsageError("--rank needs --step N: the samples of a source have no rank yet")

    def act() -> None:
        from overlord.observe.progress_bars import progress_bars
        from overlord.preview.page import preview_page
        from overlord.preview.preview import PreviewRequest
        from overlord.preview.text import preview_view

        if html is not None:
            check_writable(html, "--html", "give the path of a page")
        job = read_job(job_yaml, modules)
        request = PreviewRequest(
            samples=samples, tokens=tokens, rank=rank, replicas=replicas, tokenizer=tokenizer
        )
        with progress_bars(make_console(stderr=True)) as advance:
            found = _preview(job, source, step, request, advance)
        for remark in found.notes:
            note(remark)
        if html is not None:
            html.write_text(preview_page(found), encoding="utf-8")
        if as_json:
            print_json(preview_document(found))
            return
        console = make_console()
        console.print(preview_view(found))
        if html is not None:
            console.print(f"wrote {html}", markup=False)

    run_guarded(act, debug)


def _preview(
    job: Job, source: str | None, step: int | None, request: PreviewRequest, progress: Advance
) -> Preview:
    from overlord.cli.job_position import RecordedSteps
    from overlord.preview.preview import preview_source, preview_step

    if step is None:
        return preview_source(job, source or job.sources[0].name, request, progress)
    begin = RecordedSteps.of(job).position_before(step)
    if begin.note:
        note(begin.note)
    return preview_step(job, step, request, progress, begin.state, begin.first)


def preview_document(found: Preview) -> dict[str, object]:
    """Return a preview as a JSON document; thumbnails are left out."""
    from overlord.observe.json_text import plain

    document: dict[str, object] = plain(found)
    for batch in document["microbatches"]:  # type: ignore[attr-defined]
        for sample in batch["samples"]:
            for image in sample["images"]:
                del image["png"]
    return document
