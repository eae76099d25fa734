"""Previews: the first samples of a source, or a planned step, as ranks receive them.

The real loaders, planner and constructors produce them; nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.checks import did_you_mean
from overlord.errors import JobError, PlanError
from overlord.job.hooks import CONSUME
from overlord.job.job import Job, Source
from overlord.mesh import Mesh
from overlord.observe.progress import interruptible
from overlord.preview.decoder import Segment, segments_of
from overlord.preview.documents import Document, DocumentBatch, batches_of, ranks_to_open
from overlord.preview.pictures import Picture, pictures_of
from overlord.session.launch import launch
from overlord.transforms.chat import Chat
from overlord.transforms.chat_content import read_chat_tokenizer
from overlord.transforms.document_groups import Pair
from overlord.transforms.tokenize import Tokenize
from overlord.transforms.tokenizer_content import read_content
from overlord.transforms.tokenizer_engines import Engine, load_engine

if TYPE_CHECKING:
    from overlord.client.client import Step
    from overlord.plan.plan import LoadingPlan

SMALL_WORLD = 64  # ranks of a mesh whose steps are all received
Advance = Callable[[str, float, float | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewRequest:
    """The extent of a preview."""

    samples: int = 3  # shown of each microbatch, or of the source
    tokens: int = 512  # shown of each sample
    rank: int | None = None  # only microbatches of this rank; None: of the first replicas
    replicas: int = 4  # shown without a rank
    tokenizer: str | None = None  # decodes ids of sources without a tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewSample:
    """One sample, or its piece in a chunk: its runs of tokens, and its images."""

    sample: str
    source: str
    begin: int  # tokens of the sample before this piece
    role: str  # chosen, rejected, response N; empty: the sample is one document
    tokens: int
    loss_tokens: int
    segments: tuple[Segment, ...]
    hidden_tokens: int  # after the shown ones
    images: tuple[Picture, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewMicrobatch:
    """The samples of one microbatch, in their order."""

    ranks: tuple[int, ...]
    microbatch: int
    tokens: int
    padding: int
    samples: tuple[PreviewSample, ...]
    hidden_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A preview of a source (``step`` is None) or of a step (``source`` is None)."""

    job: str
    source: str | None
    step: int | None
    microbatches: tuple[PreviewMicrobatch, ...]
    hidden_microbatches: int
    notes: tuple[str, ...]

    @property
    def samples(self) -> list[PreviewSample]:
        """The samples of all microbatches."""
        return [sample for batch in self.microbatches for sample in batch.samples]


def source_named(job: Job, name: str) -> Source:
    """Return a source of the job; raise ``JobError`` for an unknown name."""
    found = next((source for source in job.sources if source.name == name), None)
    if found is None:
        raise JobError([f"unknown source {name!r}{did_you_mean(name, job.names)}"], "--source")
    return found


def preview_source(job: Job, name: str, request: PreviewRequest, progress: Advance) -> Preview:
    """Return the first samples of the stream of one source."""
    alone = _source_alone(job, source_named(job, name), request.samples)
    engines = Engines(alone, request.tokenizer)
    plan, steps = _first_step(alone, None, 0, 0, [0], progress)
    pictures = pictures_of(plan, steps, alone)
    batches = batches_of(plan, steps, alone.place, alone.batch)
    samples = [
        _sample(document, engines, pictures, request)
        for document in _of_first(
            [document for batch in batches for document in batch.documents], request.samples
        )
    ]
    whole = PreviewMicrobatch(
        ranks=(0,),
        microbatch=0,
        tokens=sum(batch.tokens for batch in batches),
        padding=sum(batch.padding for batch in batches),
        samples=tuple(samples),
        hidden_samples=0,
    )
    return Preview(
        job=job.name,
        source=name,
        step=None,
        microbatches=(whole,),
        hidden_microbatches=0,
        notes=tuple(engines.notes),
    )


def _source_alone(job: Job, source: Source, samples: int) -> Job:
    """Return a job whose first step holds the first samples of the source, in stream order."""
    place = Mesh()
    batch = replace(
        job.batch,
        samples=samples,
        tokens=None,
        microbatches=1,
        sequence_parallel=False,
        context=job.document_limit,
        packing="documents",
        shape="free",
        max_documents=None,
    )
    multiple = batch.document_multiple(place)
    batch = replace(batch, context=-(-job.document_limit // multiple) * multiple)
    return replace(
        job,
        sources=(source if job.evaluation else _one_pass(source),),
        place=place,
        batch=batch,
        mixture=None,
        strategy="vanilla",
        until=1,
        max_document=job.document_limit,
        look_ahead=1,
        overflow="grow",
        stages=(),
        hooks=tuple(hook for hook in job.hooks if hook.kind != CONSUME),
        journal=None,
    )


def _one_pass(source: Source) -> Source:
    return replace(source, weight=1.0, epochs=1, max_tokens=None)


def preview_step(
    job: Job,
    step: int,
    request: PreviewRequest,
    progress: Advance,
    state: Mapping[str, Any] | None = None,
    first: int = 0,
) -> Preview:
    """Return the microbatches of a planned step.

    ``state``: a state of the job after step ``first`` - 1, from which planning begins. Raise
    ``PlanError`` if the job ends before the step.
    """
    if request.rank is not None and (problem := job.place.rank_problem(request.rank)):
        raise JobError([problem], "--rank")
    quiet = replace(job, journal=None)
    engines = Engines(quiet, request.tokenizer)
    ranks = _ranks(quiet, request)
    plan, steps = _first_step(quiet, state, first, step, ranks, progress)
    batches = batches_of(plan, steps, quiet.place, quiet.batch)
    shown = [batch for batch in batches if _is_shown(batch, request, quiet.place)]
    pictures = pictures_of(plan, steps, quiet)
    return Preview(
        job=job.name,
        source=None,
        step=step,
        microbatches=tuple(_microbatch(b, engines, pictures, request) for b in shown),
        hidden_microbatches=len(batches) - len(shown),
        notes=tuple(engines.notes),
    )


def _ranks(job: Job, request: PreviewRequest) -> list[int]:
    """Return the ranks whose steps are received: all of a small mesh, or of rings."""
    whole = job.place.world_size <= SMALL_WORLD or job.hybrid
    replicas = request.replicas
    if request.rank is not None:
        replicas = max(replicas, job.place.coords(request.rank)["dp"] + 1)
    return ranks_to_open(job.place, whole, replicas)


def _is_shown(batch: DocumentBatch, request: PreviewRequest, place: Mesh) -> bool:
    if request.rank is not None:
        return request.rank in batch.ranks
    return place.coords(batch.ranks[0])["dp"] < request.replicas


def _first_step(
    job: Job,
    state: Mapping[str, Any] | None,
    first: int,
    step: int,
    ranks: Sequence[int],
    progress: Advance,
) -> tuple[LoadingPlan, dict[int, Step]]:
    """Return the plan of a step and what these ranks receive; steps before it are skipped."""
    with launch(
        job,
        resume=state,
        prefetch=1,
        partition="off",
        watch_s=0.0,
        broadcast=False,
        progress=lambda done, of: progress("indexed files", done, of),
    ) as session:
        clients = {rank: session.client(rank) for rank in ranks}
        if step > first:
            session.skip(range(first, step))

        def planned() -> None:
            done = min(step + 1, int(session.metrics()["planned_steps"])) - first
            progress("planned steps", done, step + 1 - first)

        try:
            # In a thread, so that Ctrl-C ends a long search at once.
            steps = interruptible(
                lambda: {rank: next(client) for rank, client in clients.items()}, planned
            )
        except StopIteration:
            ends = int(session.metrics()["planned_steps"])
            raise PlanError(
                f"expected a step below {ends}, where the job ends, got {step}",
                step,
                "give an earlier step",
            ) from None
        return session.plan(step), steps


class Engines:
    """The tokenizers that decode the samples of each source, loaded on first use."""

    def __init__(self, job: Job, given: str | None) -> None:
        self._sources = {source.name: source for source in job.sources}
        self._loaded: dict[str, Engine | None] = {}
        self._given = None if given is None else load_engine(read_content(given), given, "preview")
        self.notes: list[str] = []

    def of(self, name: str) -> Engine | None:
        """Return the engine of a source; None if its ids come from a column."""
        if name not in self._loaded:
            self._loaded[name] = self._load(self._sources[name])
        return self._loaded[name]

    def role(self, document: Document) -> str:
        """Return the role of a document in its sample; empty for a sample of one document."""
        if document.role < 0:
            return ""
        transforms = self._sources[document.sample.source].transforms
        if any(isinstance(t, Pair) for t in transforms):
            return ("chosen", "rejected")[document.role]
        return f"response {document.role}"

    def _load(self, source: Source) -> Engine | None:
        for t in source.transforms:
            if isinstance(t, Tokenize):
                return load_engine(
                    read_content(t.tokenizer, source.name), str(t.tokenizer), source.name
                )
            if isinstance(t, Chat):
                content = read_chat_tokenizer(t.tokenizer, source.name).tokenizer
                return load_engine(content, str(t.tokenizer), source.name)
        if self._given is None:
            self.notes.append(
                f"source {source.name!r} has token ids and no tokenizer; --tokenizer decodes them"
            )
        return self._given


def _microbatch(
    batch: DocumentBatch,
    engines: Engines,
    pictures: Mapping[Any, list[Picture]],
    request: PreviewRequest,
) -> PreviewMicrobatch:
    shown = _of_first(batch.documents, request.samples)
    return PreviewMicrobatch(
        ranks=batch.ranks,
        microbatch=batch.microbatch,
        tokens=batch.tokens,
        padding=batch.padding,
        samples=tuple(_sample(document, engines, pictures, request) for document in shown),
        hidden_samples=len({d.sample for d in batch.documents} - {d.sample for d in shown}),
    )


def _of_first(documents: Sequence[Document], samples: int) -> list[Document]:
    """Return the documents of the first samples: a sample may have several."""
    first = list(dict.fromkeys(document.sample for document in documents))[:samples]
    return [document for document in documents if document.sample in first]


def _sample(
    document: Document,
    engines: Engines,
    pictures: Mapping[Any, list[Picture]],
    request: PreviewRequest,
) -> PreviewSample:
    n, shown = len(document.tokens), min(request.tokens, len(document.tokens))
    engine = engines.of(document.sample.source)
    segments = segments_of(document.tokens[:shown], document.loss[:shown], engine)
    return PreviewSample(
        sample=str(document.sample),
        source=document.sample.source,
        begin=document.begin,
        role=engines.role(document),
        tokens=n,
        loss_tokens=int(np.count_nonzero(document.loss > 0)),
        segments=tuple(segments),
        hidden_tokens=n - shown,
        images=tuple(pictures.get(document.sample, ())),
    )
