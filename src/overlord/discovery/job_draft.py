"""The draft of a whole job: context, batch and weights, proposed from measured sources."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from overlord.discovery.data_files import list_data
from overlord.discovery.data_groups import Listing, unique_names
from overlord.discovery.source_draft import SourceDraft, add_transforms, draft_source, measure
from overlord.discovery.tokenizer_search import (
    FoundTokenizer,
    SearchResult,
    find_tokenizer,
    missing_tokenizer,
)
from overlord.errors import JobError
from overlord.mesh import Batch
from overlord.planning.predicted_gain import PredictedGain, predict_gain
from overlord.uris import is_uri

GPUS = (8, 64, 512)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)  # proposed, the smallest that splits few documents
WHOLE = 0.99  # share of documents that the proposed context holds whole
MICROBATCHES = 4
FILL = 0.875  # share of the microbatches that the proposed batch fills

Progress = Callable[[str, float, float | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """The arguments of ``overlord init``."""

    paths: tuple[str, ...]
    out: Path
    tokenizer: str | None = None
    image_token: str | int | None = None
    context: int | None = None
    name: str | None = None


@dataclass(slots=True, kw_only=True)
class JobDraft:
    """A proposed job, with all that was left out of it."""

    request: DraftRequest
    name: str
    listing: Listing
    sources: list[SourceDraft]
    left_out: list[SourceDraft]
    tokenizer: FoundTokenizer | None
    context: int = 0
    gains: list[PredictedGain] = field(default_factory=list)

    @property
    def batch(self) -> Batch:
        tokens = int(self.context * MICROBATCHES * FILL)
        return Batch(tokens=tokens, microbatches=MICROBATCHES, context=self.context)

    @property
    def has_images(self) -> bool:
        return any(source.has_images for source in self.sources)


def draft_job(request: DraftRequest, progress: Progress = lambda what, done, of: None) -> JobDraft:
    """List, open and measure the data, and propose a job.

    Raises JobError if there is nothing to train on, or no tokenizer for text.
    """
    listing = list_data(request.paths)
    names = unique_names(listing.groups)
    drafts = []
    for n, (group, name) in enumerate(zip(listing.groups, names, strict=True)):
        progress("opened sources", n, len(names))
        drafts.append(draft_source(group, name))
    search = find_tokenizer(request.tokenizer, request.paths)
    _refuse_without_tokenizer(drafts, search)
    for n, draft in enumerate(drafts):
        if not draft.problem:
            add_transforms(draft, search.tokenizer, request.image_token)
        if not draft.problem:
            measure(draft, progress=partial(_measured, progress, n, len(names)))
    sources = [draft for draft in drafts if not draft.problem]
    if not sources:
        raise JobError(_reasons(listing, drafts), "init")
    made = JobDraft(
        request=request,
        name=request.name or _job_name(request.paths, sources),
        listing=listing,
        sources=sources,
        left_out=[draft for draft in drafts if draft.problem],
        tokenizer=search.tokenizer,
    )
    _propose(made)
    return made


def _measured(progress: Progress, before: int, total: int, fraction: float) -> None:
    progress("measured sources", before + fraction, total)


def _refuse_without_tokenizer(drafts: Sequence[SourceDraft], search: SearchResult) -> None:
    texts = [d.name for d in drafts if not d.problem and d.roles.needs_tokenizer]
    if texts and search.tokenizer is None:
        raise missing_tokenizer(search, texts)


def _reasons(listing: Listing, drafts: Sequence[SourceDraft]) -> list[str]:
    found = [f"{path}: {reason}" for path, reason in listing.problems.items()]
    found += [f"{draft.name}: {draft.problem}" for draft in drafts]
    return found or ["expected data, got none; name a folder, a file or a URI with data"]


def _job_name(paths: Sequence[str], sources: Sequence[SourceDraft]) -> str:
    if len(paths) == 1 and not is_uri(paths[0]) and os.path.isdir(paths[0]):
        return os.path.basename(os.path.abspath(paths[0])) or "job"
    return sources[0].name if len(sources) == 1 else "job"


def _propose(draft: JobDraft) -> None:
    """Set context, weights and predicted gains from the measured lengths."""
    lengths = {source.name: source.report.tokens for source in draft.sources}
    draft.context = draft.request.context or proposed_context(list(lengths.values()))
    trained = [s for s in draft.sources if not s.group.held_out] or draft.sources
    total = sum(source.total_tokens for source in trained)
    for source in draft.sources:
        share = source.total_tokens / total if source in trained and total else 0.0
        source.weight = max(0.001, round(share, 3)) if share else 0.0
    weights = {source.name: source.weight for source in draft.sources}
    draft.gains = predict_gain(lengths, weights, draft.batch, GPUS)


def proposed_context(lengths: Sequence[np.ndarray]) -> int:
    """Return the smallest of ``CONTEXTS`` that holds most documents whole, or the largest."""
    long = float(np.quantile(np.concatenate(list(lengths)), WHOLE))
    return next((context for context in CONTEXTS if context >= long), CONTEXTS[-1])
