"""``overlord init``: propose a job for data, and preview it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from overlord.cli.common import (
    check_writable,
    debug_option,
    json_option,
    make_console,
    print_json,
    run_guarded,
    warning,
)
from overlord.errors import JobError

if TYPE_CHECKING:
    from overlord.discovery.job_draft import JobDraft
    from overlord.job.job import Job
    from overlord.preview.preview import Advance, Preview

SAMPLES = 3  # decoded samples that are shown
TOKENS = 96  # of each


class TokenOrId(click.ParamType):
    """A parameter type: a token, or its id."""

    name = "TOKEN|ID"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | int:
        text = str(value)
        return int(text) if text.isdigit() else text


@click.command(short_help="Detect formats, columns and lengths; write a job file.")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("job.yaml"),
    show_default=True,
    help="The job file to write.",
)
@click.option("--force", is_flag=True, help="Replace an existing job file.")
@click.option(
    "--tokenizer",
    metavar="PATH|NAME",
    help="A tokenizer.json, a sentencepiece model, a folder with one, a model of the Hugging Face "
    "Hub, or tiktoken:NAME. Default: the only one in the paths, next to them, in the working "
    "directory or in the local cache of the Hub.",
)
@click.option(
    "--image-token",
    type=TokenOrId(),
    help="The token that images replace. Default: a usual one of the tokenizer.",
)
@click.option(
    "--context",
    type=click.IntRange(min=2),
    help="Tokens of a microbatch. Default: a power of two that holds 99 % of the documents whole.",
)
@click.option("--name", help="The name of the job. Default: that of the folder.")
@json_option
@debug_option
def init(
    paths: tuple[str, ...],
    out: Path,
    force: bool,
    tokenizer: str | None,
    image_token: str | int | None,
    context: int | None,
    name: str | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Detect the format, columns and lengths of data, and write a commented job file.

    PATH is a file, a folder, a pattern or a URI. Each subfolder of a folder becomes a source. Three
    decoded samples, and the predicted gain of planning on 8, 64 and 512 GPUs, are printed.
    """

    def act() -> None:
        from overlord.cli.init_report import init_document, init_view
        from overlord.discovery.job_draft import DraftRequest, draft_job
        from overlord.observe.progress_bars import progress_bars

        _check_out(out, force)
        request = DraftRequest(
            paths=paths,
            out=out,
            tokenizer=tokenizer,
            image_token=image_token,
            context=context,
            name=name,
        )
        with progress_bars(make_console(stderr=True)) as advance:
            draft = draft_job(request, advance)
            job = _write(draft)
            previews = _previews(job, draft, advance)
        _warn(draft)
        if as_json:
            print_json(init_document(draft, previews))
        else:
            make_console().print(init_view(draft, previews))

    run_guarded(act, debug)


def _check_out(out: Path, force: bool) -> None:
    check_writable(out, "--out", "give the path of a job file")
    if out.exists() and not force:
        raise JobError(
            ["expected no file, got one; --force replaces it, --out writes another"], str(out)
        )


def _write(draft: JobDraft) -> Job:
    """Write the job file, complete or not at all, and return the job that it holds."""
    from overlord.discovery.job_file import job_yaml
    from overlord.jobfile.yaml_file import read_job

    out = draft.request.out
    new = out.with_name(f".{out.stem}.new.yaml")
    try:
        new.write_text(job_yaml(draft), encoding="utf-8")
        job = read_job(new)
        os.replace(new, out)
    except OSError as fault:
        raise JobError(
            [f"expected a writable file, got: {fault.strerror or fault}"], str(out)
        ) from fault
    finally:
        new.unlink(missing_ok=True)
    return job


def _previews(job: Job, draft: JobDraft, progress: Advance) -> list[Preview]:
    """Return previews of ``SAMPLES`` samples, of as many sources as possible."""
    from overlord.preview.preview import PreviewRequest, preview_source

    names = [source.name for source in draft.sources[:SAMPLES]]
    shares = [SAMPLES // len(names) + (k < SAMPLES % len(names)) for k in range(len(names))]
    # Ids of a column are decoded only by a tokenizer that the user named.
    given = None if draft.request.tokenizer is None or draft.tokenizer is None else draft.tokenizer
    return [
        preview_source(
            job,
            name,
            PreviewRequest(
                samples=n, tokens=TOKENS, tokenizer=None if given is None else given.name
            ),
            progress,
        )
        for name, n in zip(names, shares, strict=True)
    ]


def _warn(draft: JobDraft) -> None:
    for source in draft.left_out:
        warning(f"left out {source.name}: {source.problem}")
    for path, reason in draft.listing.problems.items():
        warning(f"left out {path}: {reason}")
    for source in draft.sources:
        for text in (*source.notes, *source.report.warnings()):
            warning(text if text.startswith("source ") else f"source {source.name!r}: {text}")
