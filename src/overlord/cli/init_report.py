"""The text and the JSON document of ``overlord init``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from overlord.cli.preview import preview_document
from overlord.observe.documents import lengths_document
from overlord.observe.tables import grid
from overlord.observe.terminal_text import one_line
from overlord.preview.text import preview_view

if TYPE_CHECKING:
    from rich.console import RenderableType

    from overlord.discovery.job_draft import JobDraft
    from overlord.discovery.source_draft import SourceDraft
    from overlord.planning.predicted_gain import PredictedGain
    from overlord.preview.preview import Preview

HEAD = ("source", "format", "content", "files", "rows", "tokens", "median", "longest", "weight")


def init_view(draft: JobDraft, previews: Sequence[Preview]) -> RenderableType:
    """Return tables of the sources and of the gain, the previews, and the next commands."""
    out = shlex.quote(str(draft.request.out))
    found = draft.tokenizer
    used = any("tokens" not in transform for s in draft.sources for transform in s.transforms)
    views: list[RenderableType] = [grid(HEAD, [_row(s) for s in draft.sources], 3), Text("")]
    if found is not None and used:
        views.append(Text(one_line(f"tokenizer: {found.name} (from {found.place})")))
    if ignored := len(draft.listing.ignored):
        [path, reason] = next(iter(draft.listing.ignored.items()))
        what = f"ignored {ignored} files, as {path}" if ignored > 1 else f"ignored {path}"
        views.append(Text(one_line(f"{what}: {reason}"), "dim"))
    views.append(Text(""))
    views += [preview_view(preview, legend=k == 0) for k, preview in enumerate(previews)]
    views += [Text(""), *_gain_views(draft)]
    views += [
        Text(""),
        Text(f"wrote {out}", "bold"),
        Text(f"next: overlord preview {out}; overlord run {out} --steps 5"),
    ]
    return Group(*views)


def _row(source: SourceDraft) -> tuple[str, ...]:
    lengths = lengths_document(source.report.tokens)
    assert lengths is not None
    about = "" if source.report.rows is not None else "~"
    return (
        source.name,
        source.format,
        content(source),
        f"{source.report.files:,}",
        f"{about}{source.rows:,.0f}",
        f"~{source.total_tokens:,.0f}",
        f"{lengths['median']:,.0f}",
        f"{lengths['max']:,}",
        f"{source.weight:.1%}",
    )


def content(source: SourceDraft) -> str:
    """Return the columns that the transforms read, with their roles."""
    roles = source.roles
    if roles.pair is not None:
        return f"pairs ({roles.pair})"
    named = {
        "tokens": roles.tokens,
        "loss": roles.loss,
        "messages": roles.messages,
        "text": roles.text,
        "images": roles.images,
    }
    return ", ".join(
        role if role == column else f"{role} ({column})" for role, column in named.items() if column
    )


def _gain_views(draft: JobDraft) -> list[RenderableType]:
    rows = [
        (
            f"{gain.gpus}",
            f"{gain.samples:,}",
            f"{gain.unplanned:.3f}",
            f"{gain.planned:.3f}",
            f"{gain.gain:.1%}",
        )
        for gain in draft.gains
    ]
    head = ("GPUs", "samples", "stream order", "planned", "shorter step")
    return [
        Text("predicted gain of planning", "bold"),
        grid(head, rows, 0),
        Text(
            "Time of a step over that of the mean rank, for data-parallel ranks that compute a "
            "12B Llama and wait for each other at every microbatch. Both columns are plans of "
            "documents with the sampled lengths.",
            "dim",
        ),
    ]


def init_document(draft: JobDraft, previews: Sequence[Preview]) -> dict[str, Any]:
    """Return the result as a JSON document."""
    found = draft.tokenizer
    return {
        "job": draft.request.out,
        "name": draft.name,
        "tokenizer": None if found is None else {"name": found.name, "place": found.place},
        "context": draft.context,
        "batch_tokens": draft.batch.tokens,
        "sources": [_source_document(source) for source in draft.sources],
        "left_out": [{"name": s.name, "reason": s.problem} for s in draft.left_out]
        + [{"name": p, "reason": why} for p, why in draft.listing.problems.items()],
        "ignored": draft.listing.ignored,
        "gain": [_gain_document(gain) for gain in draft.gains],
        "previews": [preview_document(preview) for preview in previews],
    }


def _source_document(source: SourceDraft) -> dict[str, Any]:
    return {
        "name": source.name,
        "uri": source.uri,
        "format": source.format,
        "files": source.report.files,
        "rows": source.rows,
        "rows_counted": source.report.rows is not None,
        "tokens": source.total_tokens,
        "lengths": lengths_document(source.report.tokens),
        "weight": source.weight,
        "transforms": source.transforms,
        "notes": source.notes,
        "warnings": source.report.warnings(),
    }


def _gain_document(gain: PredictedGain) -> dict[str, Any]:
    return {**asdict(gain), "gain": gain.gain}
