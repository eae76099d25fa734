"""The commented job file of a draft."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from overlord.discovery.job_draft import JobDraft
from overlord.discovery.source_draft import SourceDraft
from overlord.observe.documents import lengths_document
from overlord.observe.terminal_text import one_line
from overlord.transforms.tokenizer_content import is_name
from overlord.uris import is_uri, scrub


def job_yaml(draft: JobDraft) -> str:
    """Return the commented job file. It holds the same job on every reading."""
    lines = [
        "# Written by `overlord init`. Documentation of all fields: 'Job file and options'.",
        f"# Look at the data:  overlord preview {draft.request.out.name}",
        f"# Run five steps:    overlord run {draft.request.out.name} --steps 5",
        f"name: {_scalar(draft.name)}",
        "",
        "# A weight is the share of a source in the tokens of a step. These are proportional to",
        "# the estimated tokens, so that all sources end together; weights need not sum to 1.",
        "sources:",
    ]
    for source in draft.sources:
        lines += _source_lines(source, draft)
    lines += _left_out_lines(draft)
    lines += [
        "",
        "# One step of one rank: about this number of tokens, in microbatches of at most `context`",
        "# tokens. Multiply `tokens` by the number of data-parallel ranks.",
        "batch:",
        f"  tokens: {draft.batch.tokens}",
        f"  microbatches: {draft.batch.microbatches}",
        f"  context: {draft.context}  # {_context_comment(draft)}",
        "",
        "# The mesh of the trainer: data, context, pipeline and tensor parallel degrees.",
        "place: {dp: 1}",
        "seed: 0",
    ]
    if draft.has_images:
        lines += ["", "# Balances images and text over the ranks.", "strategy: vlm_hybrid"]
    lines += [
        "",
        "# journal: runs/journal  # keeps the position of the job, so that it can be resumed",
    ]
    return "\n".join(lines) + "\n"


def _source_lines(source: SourceDraft, draft: JobDraft) -> list[str]:
    lines = [f"  {_scalar(source.name)}:", f"    # {_facts(source)}"]
    lines += [f"    # {one_line(note)}" for note in source.notes]
    if source.group.held_out:
        why = "its name says that the data are for evaluation (documentation: 'Evaluation')"
        lines.append(f"    # weight {source.weight:g}: {why}")
    lines += _uri_lines(source.uri, draft.request.out.parent)
    if source.needs_format:
        lines.append(f"    format: {source.format}")
    lines += [f"    weight: {source.weight:g}", "    transforms:"]
    folder = draft.request.out.parent
    lines += [f"      - {_flow(_relative_tokenizer(t, folder))}" for t in source.transforms]
    return lines


def _facts(source: SourceDraft) -> str:
    report, lengths = source.report, lengths_document(source.report.tokens)
    assert lengths is not None
    rows = f"{report.rows:,}" if report.rows is not None else f"about {source.rows:,.0f}"
    files = f"{report.files:,} file{'s' * (report.files != 1)}"
    bad = f"; {report.bad_rows} of {report.sampled_rows} sampled rows are bad"
    return one_line(
        f"{source.format}, {files}, {rows} rows, about {source.total_tokens:,.0f} tokens; lengths "
        f"{lengths['min']:,} / {lengths['median']:,.0f} / {lengths['max']:,} (min / median / max)"
        + bad
        * bool(report.bad_rows)
    )


def _uri_lines(uri: str | list[str], folder: Path) -> list[str]:
    if isinstance(uri, str):
        return [f"    uri: {_scalar(_relative(uri, folder))}"]
    return ["    uri:", *(f"      - {_scalar(_relative(path, folder))}" for path in uri)]


def _left_out_lines(draft: JobDraft) -> list[str]:
    reasons = [(source.name, source.problem) for source in draft.left_out]
    reasons += list(draft.listing.problems.items())
    if not reasons:
        return []
    lines = ["", "# Left out:"]
    return lines + [f"#   {one_line(name)}: {one_line(reason)}" for name, reason in reasons]


def _context_comment(draft: JobDraft) -> str:
    every = np.concatenate([source.report.tokens for source in draft.sources])
    whole = float((every <= draft.context).mean())
    return f"holds {whole:.1%} of the sampled documents whole; longer ones are split"


def _relative(uri: str, folder: Path) -> str:
    """Return a path relative to the folder of the job file if it is below it, else absolute."""
    if is_uri(uri):
        return scrub(uri)
    inside = os.path.relpath(uri, os.path.abspath(folder))
    return uri if inside.startswith("..") else inside


def _relative_tokenizer(transform: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    [(kind, fields)] = transform.items()
    name = fields.get("tokenizer")
    if name is None or not os.path.isabs(name):
        return {kind: dict(fields)}
    inside = _relative(name, folder)
    # A folder next to the job file that reads like a name of the Hub keeps its path.
    return {kind: {**fields, "tokenizer": f"./{inside}" if is_name(inside) else inside}}


def _scalar(value: Any) -> str:
    """Return a value as a YAML scalar on one line."""
    text: str = yaml.safe_dump(
        value, default_flow_style=True, allow_unicode=True, width=2**30, sort_keys=False
    )
    return text.removesuffix("\n...\n").rstrip("\n")


def _flow(transform: Mapping[str, Any]) -> str:
    """Return a mapping of one key in the form ``key: {fields}``."""
    return _scalar(dict(transform)).removeprefix("{").removesuffix("}")
