"""Job and Source: everything that determines the stream, frozen and validated.

Jobs in Python and in YAML pass the same checks (``docs/decisions/0008``). ``problems()`` of each
class lists all problems of its fields, and one ``JobError`` shows them together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from os import PathLike
from typing import Any

from overlord import late_binding
from overlord.batch_by_step import BatchByStep
from overlord.checks import (
    did_you_mean,
    is_int,
    is_real,
    names_arguments,
    one_of,
    shown_name,
    signature_problem,
)
from overlord.errors import JobError
from overlord.job import (
    budgets,
    document_limit,
    even_counts,
    one_pass,
    packing,
    several_documents,
    source_uri,
    stages,
)
from overlord.job.consumption import consume_problems
from overlord.job.hooks import Hook, hook_problems
from overlord.job.mixture_weights import mixture_problems, schedule_problems
from overlord.job.model import Model
from overlord.job.stages import Stage
from overlord.mesh import Batch, Mesh
from overlord.uris import uri_problems

UNIT = 2**40  # sum of the integers that weights become, so that mixing is exact on every machine
ON_LONG = ("split", "truncate", "quarantine", "drop")
DRAWS = ("exact", "random")
MIX_EVERY = ("step", "microbatch", "epoch")
OVERFLOWS = ("grow", "defer")
SYNCS = ("microbatch", "step")
WORKERS = ("threads", "processes")
ON_LOST = ("fail", "leave")
# the names of ``planning.strategies``, a package above this one; a test compares both
STRATEGIES = (
    "vanilla",
    "packed",
    "even",
    "llm_balance",
    "backbone_balance",
    "encoder_balance",
    "vlm_hybrid",
    "look_ahead_balance",
    "hdp_balance",
)
HYBRID = ("hdp_balance",)  # those that split samples over ranks


@names_arguments
@dataclass(frozen=True, slots=True)
class Source:
    """One source of samples, and the transforms of its rows.

    Arguments
    ---------
    name: name without "/"; it is in the id of every sample and determines the order of rows.
        Required.
    uri: a glob, a directory, a file, a list of these, a store's URI, a map-style dataset (an object
        with ``__len__`` and ``__getitem__``), or an ``ov.Factory``. Required.
    format: name of the file format. Default None: the file names determine it.
    transforms: transforms of rows, in order; the last one must leave a column ``tokens``. Default
        (): the rows have that column.
    deferred: ``[ov.Images(...)]``, decoded by constructors after planning; the same as in
        ``transforms`` with ``place="constructor"``. Default (): nothing is deferred.
    weight: share in the mixture, at least 0; weights need not sum to 1. Default 1.0.
    shuffle: whether chunks and rows are shuffled; False keeps files in listing order and rows in
        file order. Default True.
    epochs: passes over the source; 2.5 ends in the middle of the third. Default None: no limit, so
        the job needs ``until``, or a trainer that stops by itself.
    max_tokens: most tokens that the job draws from the source. Default None: no limit.
    max_bad: number of consecutive failed rows, in stream order, that ends the job. Default 100.
    workers: "threads", or "processes": a process for each loader runs the transforms. Not in the
        fingerprint. Default "threads".
    max_sample_bytes: size in bytes above which a row is quarantined instead of read. Default
        67108864.
    on_lost: reaction to storage that fails permanently: "fail" ends the job where the draw reaches
        the source, "leave" removes the source from the mixture. Default "fail".
    """

    name: str
    uri: Any
    format: str | None = field(default=None, kw_only=True)
    transforms: Sequence[Any] = field(default=(), kw_only=True)
    deferred: Sequence[Any] = field(default=(), kw_only=True)
    weight: float = field(default=1.0, kw_only=True)
    shuffle: bool = field(default=True, kw_only=True)
    epochs: float | None = field(default=None, kw_only=True)
    max_bad: int = field(default=100, kw_only=True)
    workers: str = field(default="threads", kw_only=True)
    max_sample_bytes: int = field(default=2**26, kw_only=True)
    on_lost: str = field(default="fail", kw_only=True)
    max_tokens: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("epochs", "max_tokens"):
            object.__setattr__(self, name, budgets.normal(getattr(self, name)))
        for name in ("transforms", "deferred"):
            if isinstance(given := getattr(self, name), list):
                object.__setattr__(self, name, tuple(given))
        # a deferred transform equals one with place="constructor"
        if self.deferred and isinstance(self.transforms, tuple) and not self._deferred_problems(""):
            late = tuple(replace(t, place="constructor") for t in self.deferred)
            object.__setattr__(self, "transforms", (*self.transforms, *late))
            object.__setattr__(self, "deferred", ())
        if isinstance(self.uri, (list, tuple)):  # equal for str and Path
            object.__setattr__(
                self, "uri", tuple(str(p) if isinstance(p, PathLike) else p for p in self.uri)
            )
        elif isinstance(self.uri, PathLike):
            object.__setattr__(self, "uri", str(self.uri))
        if problems := self.problems():
            raise JobError(problems, f"source {self.name!r}")

    @classmethod
    def from_dataset(cls, name: str, dataset: Any, **fields: Any) -> Source:
        """Return a source whose rows are a map-style sequence of dicts, such as a list.

        ``fields``: the other fields of ``Source``.
        """
        from overlord.sources.python_objects import as_dataset  # imports Arrow

        return cls(name, as_dataset(name, dataset), **fields)

    @classmethod
    def from_factory(
        cls,
        name: str,
        fn: Callable[..., Iterable[Mapping[str, Any]]],
        *,
        shards: int = 1,
        fingerprint: str | None = None,
        **fields: Any,
    ) -> Source:
        """Return a source whose rows are those of ``fn(shard)``, or of ``fn()`` with one shard.

        The function must return a fresh iterator over the same rows at every call. ``fingerprint``:
        text that identifies the rows. ``fields``: the other fields of ``Source``.
        """
        from overlord.sources.python_objects import Factory  # imports Arrow

        return cls(name, Factory(fn, shards, fingerprint), **fields)

    def problems(self) -> list[str]:
        """Return every problem of the fields, each as one text."""
        at, found = f"source {self.name!r}", []
        if (
            not isinstance(self.name, str)
            or not self.name
            or "\x1f" in self.name
            or "/" in self.name
        ):
            found.append(f"{at}: expected a name without '/', got {self.name!r}")
        found += source_uri.problems(at, self.uri)
        if self.format is not None and (not isinstance(self.format, str) or not self.format):
            found.append(f"{at}.format: expected the name of a format, got {self.format!r}")
        if not is_real(self.weight) or not math.isfinite(self.weight) or self.weight < 0:
            found.append(
                f"{at}.weight: expected a finite number of at least 0, got {self.weight!r}"
            )
        found += budgets.problems(at, self.epochs, self.max_tokens)
        if not isinstance(self.shuffle, bool):
            found.append(f"{at}.shuffle: expected true or false, got {self.shuffle!r}")
        for name in ("max_bad", "max_sample_bytes"):
            if not is_int(getattr(self, name)) or getattr(self, name) < 1:
                found.append(
                    f"{at}.{name}: expected a whole number of at least 1, got "
                    f"{getattr(self, name)!r}"
                )
        if not isinstance(self.transforms, tuple):
            found.append(f"{at}.transforms: expected a list, got {type(self.transforms).__name__}")
        else:
            wrong = [
                (i, t)
                for i, t in enumerate(self.transforms)
                if not hasattr(t, "fingerprint") or isinstance(t, type)
            ]
            found += [
                f"{at}.transforms[{i}]: expected a transform, got {t!r}"
                + ("; use ov.Map(fn, rows=True) for a function of a row" * _is_function(t))
                for i, t in wrong
            ]
        found += self._deferred_problems(at)
        return (
            found
            + one_of(f"{at}.workers", self.workers, WORKERS)
            + one_of(f"{at}.on_lost", self.on_lost, ON_LOST)
        )

    def _deferred_problems(self, at: str) -> list[str]:
        if not isinstance(self.deferred, tuple):
            return [f"{at}.deferred: expected a list, got {type(self.deferred).__name__}"]
        wrong = [
            (i, t)
            for i, t in enumerate(self.deferred)
            if getattr(t, "kind", None) != "images" or isinstance(t, type)
        ]
        return [
            f"{at}.deferred[{i}]: expected ov.Images(...), got {t!r}; list it in transforms"
            for i, t in wrong
        ]


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


@names_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that determines the stream of steps.

    A saved state has a fingerprint of its job, and resumes only with a job of the same fingerprint.
    ``name``, ``place``, ``sync``, ``model`` and ``journal`` are not in the fingerprint.

    Arguments
    ---------
    name: name for display, without effect on the stream. Required.
    sources: list of ``ov.Source``; their order breaks ties in the draw. Required.
    place: mesh of the trainer's ranks, an ``ov.Mesh``. Default: one rank.
    batch: size and form of one global step, an ``ov.Batch``. Required.
    mixture: a mapping of source name to weight (a source that is not named has weight 0), or a
        schedule ``fn(step, feedback) -> weights``. Default None: the weights of the sources.
    strategy: a name of ``ov.strategy``, or a function ``(buffer, place) -> LoadingPlan``. Default
        "llm_balance".
    sync: when ranks wait for each other: after every "microbatch" or once a "step"; strategies
        balance for it. Default "microbatch".
    model: layer shapes of the trained model, an ``ov.Model``; strategies balance by its FLOPs.
        Default None: a 12B Llama is assumed.
    seed: seed of every order and every random choice in the job. Default 0.
    journal: a directory or a store's URI; every plan and event is written there before it takes
        effect. Default None: only the states that you save outlive the process.
    until: the end of the job: "all" (no source has samples left), "first" (one source has none
        left), or a number of steps counted from step 0. Default "all".
    draw: "exact" (each source within one sample of its share at every step) or "random" (seeded
        multinomial draws). Default "exact".
    mix_every: "step"; "microbatch": a step is ``microbatches`` draws, each with the full mixture;
        "epoch": weights change only between epochs. Default "step".
    look_ahead: a step may choose each source's n samples among its first ``look_ahead * n``.
        Default 1: no choice.
    max_age: number of steps that may pass over a sample before it is taken first. Default 8.
    overflow: treatment of samples that do not fit a step: "grow" adds microbatches, "defer" leaves
        them for a later step. Default "grow".
    shuffle_chunks: number of chunks of a source that are open and shuffled together; more chunks
        shuffle better and need more memory. Default 8.
    slice_rows: number of rows read from a chunk at a time; user code gets one slice at a time.
        Default 256.
    chunk_bytes: size in bytes of the chunks of a plain JSONL file. Default 8388608.
    feedback_lag: plan t uses the reports of step ``t - feedback_lag``; at least ``prefetch + 2``
        if the mixture learns. Default 8.
    on_long: treatment of a document longer than ``max_document``: "split", "truncate", "drop" or
        "quarantine". Default "split".
    max_document: tokens of the longest sample. Default None: ``batch.context``; with "hdp_balance"
        the context of all dp x cp ranks together, which share a document.
    evaluation: whether the job evaluates: one pass over its sources without shuffling, whose
        ``epochs`` and ``shuffle`` it replaces. Default False. See ``ov.evaluation``.
    stages: list of ``ov.Stage``, with a batch or mixture of their own. Default (): none.
    hooks: ``ov.loader_do_plan(...)`` and ``ov.constructor_do_plan(fn)``, executed in this order.
        Default (): none.
    """

    name: str
    sources: Sequence[Source]
    place: Mesh = field(default_factory=Mesh)
    batch: Batch
    mixture: Any = None
    strategy: str | Callable[..., Any] = "llm_balance"
    sync: str = "microbatch"
    model: Model | None = None
    seed: int = 0
    journal: str | None = None
    until: str | int = "all"
    draw: str = "exact"
    mix_every: str = "step"
    look_ahead: int = 1
    max_age: int = 8
    overflow: str = "grow"
    shuffle_chunks: int = 8
    slice_rows: int = 256
    chunk_bytes: int = 2**23
    feedback_lag: int = 8
    on_long: str = "split"
    max_document: int | None = None
    evaluation: bool = False
    stages: Sequence[Stage] = ()
    hooks: Sequence[Hook] = ()

    def __post_init__(self) -> None:
        if isinstance(self.sources, (list, tuple)):
            object.__setattr__(self, "sources", tuple(self.sources))
        if self.evaluation is True:
            object.__setattr__(self, "sources", one_pass.one_pass(self.sources))
        for name in ("stages", "hooks"):
            if isinstance(given := getattr(self, name), list):
                object.__setattr__(self, name, tuple(given))
        if isinstance(self.journal, PathLike):
            object.__setattr__(self, "journal", str(self.journal))
        if problems := self.problems():
            raise JobError(problems, f"job {self.name!r}")

    def __repr__(self) -> str:
        how = f"{shown_name(self.strategy)}, sync {self.sync}"
        what = f"{len(self.sources)} sources, {stages.shown_size(self)}, {self.place}"
        once = "one pass, " if self.evaluation else ""
        return f"Job({self.name!r}, {what}, {once}{how}, seed {self.seed})"

    @staticmethod
    def from_yaml(path: str | PathLike[str]) -> Job:
        """Return the job of a YAML file, whose keys are the names of the fields.

        Relative paths are relative to the file. Raise ``JobError`` with all problems of the file.
        """
        job: Job = late_binding.call("read_job", path)
        return job

    def to_yaml(self) -> str:
        """Return the job as YAML text, without fields that have their default.

        Raise ``JobError`` if a file cannot hold a field, such as a function without a name.
        """
        text: str = late_binding.call("write_job", self)
        return text

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    @property
    def batches(self) -> BatchByStep:  # the batch of every step: of its stage, without ramps
        return stages.batches(self)

    @property
    def end_step(self) -> int | None:  # the step before which ``until`` or stages end the job
        return stages.end(self)

    @property
    def document_multiple(self) -> int:
        """Number of tokens to a multiple of which every document is padded."""
        return self.batch.document_multiple(self.place)

    @property
    def hybrid(self) -> bool:
        """Whether the strategy is known to split samples over ranks.

        A function is if it has a true attribute ``hybrid``. Others may do so too; their jobs give
        ``max_document``.
        """
        if isinstance(self.strategy, str):
            return self.strategy in HYBRID
        return bool(getattr(self.strategy, "hybrid", False))

    @property
    def document_limit(self) -> int:
        """The tokens of the longest sample: ``max_document`` or its default."""
        if self.max_document is not None:
            return self.max_document
        if self.hybrid:
            return document_limit.of_ring(self)
        return max(stages.contexts(self)) if self.stages else self.batch.context

    def hooks_of(self, kind: str) -> tuple[Hook, ...]:
        """Return the hooks of one kind, in their order."""
        return tuple(hook for hook in self.hooks if hook.kind == kind)

    def problems(self) -> list[str]:
        """Return every problem of the fields and of their combinations, each as one text."""
        found: list[str] = []
        if not isinstance(self.name, str) or not self.name:
            found.append(f"name: expected a name, got {self.name!r}")
        found += self._source_problems()
        if not isinstance(self.batch, Batch):
            found.append(f"batch: expected a Batch, got {self.batch!r}")
        if not isinstance(self.place, Mesh):
            found.append(f"place: expected an ov.Mesh, got {self.place!r}")
        elif self.place.first_rank:
            found.append(
                "place.first_rank: expected 0, since the job's mesh has all ranks, got "
                f"{self.place.first_rank}; give other meshes to distribute(on=)"
            )
        elif (
            isinstance(self.batch, Batch)
            and not self.hybrid  # the ring of each document decides its padding
            and self.batch.context % (multiple := self.batch.context_multiple(self.place))
        ):
            what = "pad_multiple, cp" + (
                ", tp for sequence_parallel" if self.batch.sequence_parallel else ""
            )
            found.append(
                f"batch.context: expected a multiple of {multiple} ({what}), "
                f"got {self.batch.context}"
            )
        multiple = self.place.count_multiple if isinstance(self.place, Mesh) else 1
        if multiple > 1 and isinstance(self.batch, Batch) and self.batch.microbatches % multiple:
            found.append(
                f"batch.microbatches: expected a multiple of place.pp={multiple}, since "
                f"place.vpp={self.place.vpp} interleaves stages, got {self.batch.microbatches}"
            )
        for name in (
            "seed",
            "look_ahead",
            "max_age",
            "shuffle_chunks",
            "slice_rows",
            "chunk_bytes",
            "feedback_lag",
        ):
            least = 0 if name == "seed" else 1
            if not is_int(getattr(self, name)) or getattr(self, name) < least:
                found.append(
                    f"{name}: expected a whole number of at least {least}, got "
                    f"{getattr(self, name)!r}"
                )
        for name, known in (
            ("draw", DRAWS),
            ("mix_every", MIX_EVERY),
            ("overflow", OVERFLOWS),
            ("on_long", ON_LONG),
            ("sync", SYNCS),
        ):
            found += one_of(name, getattr(self, name), known)
        if self.model is not None and not isinstance(self.model, Model):
            found.append(f"model: expected an ov.Model or None, got {self.model!r:.80}")
        if not (self.until in ("all", "first") or (is_int(self.until) and int(self.until) >= 1)):
            found.append(f'until: expected "all", "first" or a number of steps, got {self.until!r}')
        if (
            self.draw == "random"
            and isinstance(self.batch, Batch)
            and self.batch.tokens is not None
        ):
            found.append(
                'draw: expected "exact" for a batch in tokens, got "random"; set batch.samples'
            )
        if not callable(self.strategy) and not isinstance(self.strategy, str):
            found.append(f"strategy: expected a name or a function, got {self.strategy!r}")
        elif callable(self.strategy):
            found += [
                f"strategy: {p}"
                for p in [signature_problem(self.strategy, ("buffer", "place"))]
                if p
            ]
        elif self.strategy not in STRATEGIES:
            found.append(
                "strategy: expected a known strategy, got "
                f"{self.strategy!r}{did_you_mean(self.strategy, STRATEGIES)}"
            )
        if not isinstance(self.evaluation, bool):
            found.append(f"evaluation: expected true or false, got {self.evaluation!r}")
        if self.evaluation and not found:
            found += one_pass.problems(self)
        return (
            found
            + self._hook_problems()
            + self._look_ahead_problems()
            + self._limit_problems()
            + self._packing_problems()
            + ([] if found else self._stage_problems())
            + self._document_problems()
            + (even_counts.problems(self) if self.strategy == even_counts.EVEN else [])
            + self._image_problems()
            + self._journal_problems()
        )

    def _source_problems(self) -> list[str]:
        if not isinstance(self.sources, tuple) or not self.sources:
            return [f"sources: expected at least one Source, got {self.sources!r}"]
        wrong = [
            f"sources[{i}]: expected a Source, got {s!r}"
            for i, s in enumerate(self.sources)
            if not isinstance(s, Source)
        ]
        if wrong:
            return wrong
        found = [
            f"sources: expected different names, got {n!r} twice"
            for n in sorted(n for n, count in Counter(self.names).items() if count > 1)
        ]
        if self.until == "first" and (
            leaves := [s.name for s in self.sources if s.on_lost == "leave"]
        ):
            found.append(
                'sources: expected on_lost="fail" with until="first", which ends the job with the '
                f'first source, got on_lost="leave" for {", ".join(map(repr, leaves[:8]))}'
                + (f" and {len(leaves) - 8} more" if len(leaves) > 8 else "")
            )
        if self.mixture is None:
            if all(s.weight == 0 for s in self.sources):
                found.append("sources: expected a weight above 0, got only zeros")
        elif isinstance(self.mixture, Mapping):
            found += mixture_problems(self.mixture, self.names)
        elif not callable(self.mixture) or isinstance(self.mixture, type):
            found.append(
                f"mixture: expected a mapping of weights or a schedule, got {self.mixture!r}"
            )
        elif problem := signature_problem(self.mixture, ("step", "feedback")):
            found.append(f"mixture: {problem}")
        else:
            found += schedule_problems(self.mixture, self.names)
        return found

    def _look_ahead_problems(self) -> list[str]:
        """Return the problems of look-ahead and overflow with the schedule and the batch.

        Both work with a number of samples, so they exclude batches in tokens.
        """
        found, in_tokens = [], isinstance(self.batch, Batch) and self.batch.tokens is not None
        if self.overflow == "defer" and in_tokens:
            found.append(
                'overflow: expected "grow" for a batch in tokens, got "defer"; '
                "set batch.samples, or fewer tokens"
            )
        if self.overflow == "defer" and self.look_ahead != 1:
            found.append(
                'overflow: expected "grow" with look_ahead above 1, got "defer"; set look_ahead=1'
            )
        if hasattr(self.mixture, "prefer") and self.look_ahead == 1:
            what = getattr(self.mixture, "kind", None) or shown_name(self.mixture)
            found.append(
                f"look_ahead: expected more than 1 for {what}, which chooses among candidates, "
                "got 1; set it, for example, to 4"
            )
        if is_int(self.look_ahead) and self.look_ahead > 1 and in_tokens:
            found.append(
                f"look_ahead: expected 1 for a batch in tokens, got {self.look_ahead}; set "
                "batch.samples, or look_ahead=1"
            )
        return found

    def _hook_problems(self) -> list[str]:
        if isinstance(self.hooks, tuple) and not self.hooks:
            return []
        return hook_problems(self.hooks) or consume_problems(self.hooks, self.look_ahead)

    def _limit_problems(self) -> list[str]:
        if self.max_document is None and not self.hybrid:
            return []
        return document_limit.problems(self)

    def _document_problems(self) -> list[str]:
        sources = self.sources if isinstance(self.sources, tuple) else ()
        kinds = {getattr(t, "kind", "") for s in sources for t in getattr(s, "transforms", ())}
        return several_documents.problems(self) if kinds & {"pair", "group"} else []

    def _stage_problems(self) -> list[str]:
        return [] if self.stages == () and not self.evaluation else stages.problems(self)

    def _packing_problems(self) -> list[str]:
        return packing.problems(self) if isinstance(self.batch, Batch) and self.batch.pads else []

    def _image_problems(self) -> list[str]:
        """Return the problems of images: sources whose images have different forms."""
        sources = (
            [s for s in self.sources if isinstance(s, Source)]
            if isinstance(self.sources, tuple)
            else []
        )
        specs = [
            (s.name, t) for s in sources for t in s.transforms if getattr(t, "kind", "") == "images"
        ]
        found = []
        for name in ("patch", "merge", "dtype"):
            values = {getattr(spec, name): source for source, spec in reversed(specs)}
            if len(values) > 1:
                listed = ", ".join(
                    f"{value!r} in {source!r}" for value, source in reversed(values.items())
                )
                found.append(
                    f"sources: expected the same {name} for the images of all sources, since "
                    f"one encoder processes them, got {listed}"
                )
        return found

    def _journal_problems(self) -> list[str]:
        if self.journal is not None and (not isinstance(self.journal, str) or not self.journal):
            return [f"journal: expected a directory or a store's URI, got {self.journal!r}"]
        return [f"journal: {problem}" for problem in uri_problems(self.journal or "")]


def defaults(cls: type) -> dict[str, Any]:
    """Return the default of each field of a dataclass by name; MISSING for fields without one."""
    return {f.name: f.default if f.default is not MISSING else MISSING for f in fields(cls)}
