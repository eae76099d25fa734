"""Hooks: user functions that replace a stage of the planner, the loaders or the constructors.

They are the hooks of the Overlord paper, section 4.2.

    Job(strategy=ov.plan_raw(fn))             planner: assigns samples, from raw arrays
    session.summary_buffer()                  planner: the samples it has, for experiments
    Job(hooks=[ov.loader_do_plan(fn)])        loaders: tokens of one source in a step
    Job(hooks=[ov.loader_do_plan(consume=fn)])     which samples loaders give (consumption.py)
    Job(hooks=[ov.constructor_do_plan(fn)])   constructors: microbatches of one bucket

The functions determine the arrays of every rank. So the text of each function is part of the
job's fingerprint. Their results are checked. An error in a function ends the job at its step and
names the function. The functions must be pure: equal input gives equal output, whatever the thread,
the machine and the steps before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.checks import checked_function, describe_error, name_of, shown_name
from overlord.errors import JobError, PlanError
from overlord.hashing import key64, keyed_hash
from overlord.plan.plan import LoadingPlan
from overlord.sample import IDS, Ragged, SampleId

if TYPE_CHECKING:
    from overlord.job.consumption import Candidates
    from overlord.mesh import Batch

LOADER, CONSTRUCTOR, CONSUME = "loader_do_plan", "constructor_do_plan", "loader_do_plan consume"
CONTRACT = {  # keys of every microbatch, with their types
    "tokens": np.int64,
    "position_ids": np.int64,
    "labels": np.int64,
    "loss_mask": np.float32,
    "cu_seqlens": np.int32,
    "cu_seqlens_padded": np.int32,
    "max_seqlen": np.int32,
    "source_ids": np.int32,
}
PER_TOKEN = ("tokens", "position_ids", "labels", "loss_mask", "attention_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """An entry of ``Job(hooks=...)``, made by ``loader_do_plan`` or ``constructor_do_plan``."""

    kind: str
    fn: Callable[[Any], Any]

    @property
    def __name__(self) -> str:
        if self.kind == CONSUME:
            return f"{LOADER}(consume={name_of(self.fn)})"
        return f"{self.kind}({name_of(self.fn)})"

    def __call__(self, given: Any, step: int) -> Any:
        try:
            return self.fn(given)
        except PlanError:
            raise
        # user code: every error ends the job at this step and names the hook
        except (Exception, SystemExit, GeneratorExit) as e:
            raise PlanError(
                f"{self.__name__} raised {describe_error(e)}", step, "correct the hook"
            ) from e


def loader_do_plan(
    fn: Callable[[Popped], Ragged] | None = None,
    *,
    consume: Callable[[Candidates], np.ndarray] | None = None,
) -> Hook:
    """Return a hook that replaces the tokens that loaders send, by ``fn(samples) -> Ragged``.

    With ``consume(candidates) -> numbers`` instead, the hook chooses the samples that the loaders
    of a source give to a step, among ``Job.look_ahead`` times as many ``Candidates``. It returns
    their numbers, the preferred ones first. The draw still decides how many samples a source gives.
    Samples that are due come first; those that are not chosen stay for later steps.

    ``samples`` is a ``Popped``. The rows of the result must have the lengths of ``samples.tokens``,
    since lengths are planned before.

    The function is called once per step and source. It gets all samples of the source in the step,
    in the plan's order, whichever loaders read them. So the stream does not depend on the number of
    loaders. Loader hooks run in the order of ``Job.hooks``, before all constructor hooks, in a
    worker thread.

        def hide_digits(samples):
            if samples.source != "web":
                return samples.tokens
            values = samples.tokens.values
            return ov.Ragged(np.where(values < 10, 0, values), samples.tokens.offsets)
    """
    if (fn is None) == (consume is None):
        given = "neither" if fn is None else "both"
        raise JobError([f"expected fn or consume=, got {given}; make a hook of each"], LOADER)
    if consume is not None:
        return Hook(kind=CONSUME, fn=checked_function(consume, LOADER, ("candidates",)))
    return Hook(kind=LOADER, fn=checked_function(fn, LOADER, ("samples",)))


def constructor_do_plan(fn: Callable[[Assembly], list[dict[str, np.ndarray]]]) -> Hook:
    """Return a hook that builds the microbatches of a bucket, by ``fn(assembly) -> list of dicts``.

    ``assembly`` is an ``Assembly``. The list must have one dict per planned microbatch.

    The function is called once per step and bucket (with buckets along PP or TP, once for each
    data-parallel group). Its result is sliced for ranks like the arrays of the default. Additional
    keys go to every pipeline stage; those with an entry for every token are sliced along cp.

    Every dict must have the keys of the batch contract, with their types. ``cu_seqlens`` and
    ``cu_seqlens_padded`` must divide its tokens into one document for each of ``source_ids``.
    Additional keys hold numpy arrays and arrive in the trainer's ``Microbatch``.
    ``assembly.default()`` returns the microbatches without hooks, or the result of the hook before
    this one. Its arrays are read-only: copy them before you change them.

    A microbatch may be without documents; in the default it has one document of padding.
    ``Step.global_valid_tokens`` and ``Microbatch.samples`` follow the plan. A hook that masks more
    of the loss must count the remaining tokens itself.

        def with_lengths(assembly):
            return [mb | {"lengths": np.diff(mb["cu_seqlens"])} for mb in assembly.default()]
    """
    return Hook(kind=CONSTRUCTOR, fn=checked_function(fn, CONSTRUCTOR, ("assembly",)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Popped:
    """The samples of one source in one step: ids and tokens, row by row, in the plan's order.

    The plan's order is that of the stream, unless look-ahead chooses samples.
    """

    step: int
    source: str
    epoch: np.ndarray
    file: np.ndarray
    row: np.ndarray
    part: np.ndarray
    tokens: Ragged  # read-only; row i is sample i
    seed: int = 0

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, i: int) -> SampleId:
        return SampleId(
            self.source, int(self.epoch[i]), int(self.file[i]), int(self.row[i]), int(self.part[i])
        )

    def chance(self, purpose: str = "") -> np.ndarray:
        """Return a random number in [0, 1) for every token of ``tokens.values``.

        It depends on the job's seed, the sample's id, the token's position and ``purpose`` alone,
        so it is the same in every run.
        """
        lengths = self.tokens.lengths
        each = keyed_hash(
            key64("hook", self.seed, self.source, purpose),
            self.epoch,
            self.file,
            self.row,
            self.part,
        )
        place = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        mixed = keyed_hash(0, np.repeat(each, lengths).view(np.int64), place)
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assembly:
    """The input of a constructor hook: the documents and the plan of one bucket in a step."""

    step: int
    bucket: int
    batch: Batch
    plan: LoadingPlan
    rows: tuple[np.ndarray, ...]  # by microbatch: its samples as rows of the plan, in slot order
    gather: Callable[[np.ndarray], Ragged]
    build: Callable[[], list[dict[str, np.ndarray]]]

    @property
    def documents(self) -> list[Ragged]:
        """Tokens by microbatch: ``documents[m][k]`` is document k of microbatch m."""
        return [self.gather(rows) for rows in self.rows]

    def ids(self, microbatch: int) -> list[SampleId]:
        """Return the sample of each document of a microbatch."""
        rows, documents = self.rows[microbatch], self.plan.documents
        if documents is not None:
            rows = np.repeat(rows, documents.counts[rows])
        return [self.plan.sample_id(i) for i in rows.tolist()]

    def default(self) -> list[dict[str, np.ndarray]]:
        """Return the microbatches without this hook, as dicts of read-only arrays.

        They are the result of the hook before this one, if there is one.
        """
        return [dict(microbatch) for microbatch in self.build()]


# Execution of hooks.


def hook_problems(hooks: Any) -> list[str]:
    """Return a problem for each value of ``Job.hooks`` that is not a hook, as text."""
    if not isinstance(hooks, tuple):
        return [f"hooks: expected a list, got {hooks!r}"]
    wrong = [(i, hook) for i, hook in enumerate(hooks) if not isinstance(hook, Hook)]
    known = "ov.loader_do_plan(fn) or ov.constructor_do_plan(fn)"
    raw = " (pass it as strategy=)"
    return [
        f"hooks[{i}]: expected {known}, got "
        f"{shown_name(h)}{raw if getattr(h, 'kind', '') == 'strategy' else ''}"
        for i, h in wrong
    ]


def popped_by(
    hooks: Sequence[Hook], plan: LoadingPlan, doc: np.ndarray, tokens: Ragged, seed: int
) -> tuple[np.ndarray, Ragged]:
    """Apply the loader hooks to the payload of a plan's samples.

    ``doc``: row of ``tokens`` of each sample. Return the new rows of all samples and new tokens.
    """
    order = np.argsort(plan.source, kind="stable")
    bounds = np.searchsorted(plan.source[order], np.arange(len(plan.names) + 1))
    pieces = []
    for i in np.flatnonzero(np.diff(bounds)).tolist():
        rows = order[bounds[i] : bounds[i + 1]]
        piece, ids = tokens.take(doc[rows]), {n: getattr(plan, n)[rows] for n in IDS[1:]}
        for hook in hooks:
            piece.values.flags.writeable = piece.offsets.flags.writeable = False
            samples = Popped(step=plan.step, source=plan.names[i], tokens=piece, seed=seed, **ids)
            piece = _same_lengths(hook, hook(samples, plan.step), piece, plan.step)
        pieces.append(piece)
    found = np.empty(len(order), np.int64)
    found[order] = np.arange(len(order))
    return found, Ragged.concat(pieces)


def ordered_weights(plan: LoadingPlan, doc: np.ndarray, weights: Ragged | None) -> Ragged | None:
    """Return the loss weights of a plan's samples in the order of the result of ``popped_by``.

    ``doc``: row of ``weights`` of each sample, before the hooks.
    """
    return None if weights is None else weights.take(doc[np.argsort(plan.source, kind="stable")])


def _same_lengths(hook: Hook, result: Any, before: Ragged, step: int) -> Ragged:
    """Return a compact copy of a loader hook's result; raise ``PlanError`` if it is invalid."""
    problem = ""
    if not isinstance(result, Ragged) or not all(
        _is_flat_and_whole(array) for array in (result.values, result.offsets)
    ):
        shown = np.asarray(result.values) if isinstance(result, Ragged) else None
        kind = (
            type(result).__name__
            if shown is None
            else f"Ragged of {shown.dtype}{'' if shown.ndim == 1 else f' {shown.shape}'}"
        )
        problem = f"expected a Ragged of token ids, got {kind}"
    elif not np.array_equal(result.lengths, before.lengths) or not 0 <= result.offsets[
        0
    ] <= result.offsets[-1] <= len(result.values):
        problem = (
            f"expected {len(before)} rows with the lengths of samples.tokens, "
            f"{int(before.lengths.sum())} tokens in all, got {len(result)} rows of "
            f"{int(result.lengths.sum())} tokens"
        )
    else:
        result = Ragged(result.compact().values, before.offsets)
        if len(result.values) and not 0 <= result.values.min() <= result.values.max() < 2**31:
            problem = (
                "expected token ids from 0 to 2^31 - 1, got "
                f"{int(result.values.min())} to {int(result.values.max())}"
            )
    if problem:
        raise PlanError(
            f"{hook.__name__}: {problem}",
            step,
            "return the same number of token ids for each sample, since lengths are planned before",
        )
    return result


def _is_flat_and_whole(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "iu"


def assembled_by(hooks: Sequence[Hook], assembly: Assembly) -> list[dict[str, np.ndarray]]:
    """Return a bucket's microbatches after the constructor hooks, each applied to the previous."""
    build = assembly.build
    for hook in hooks:
        build = _apply_hook(hook, replace(assembly, build=build))
    return build()


def _apply_hook(hook: Hook, assembly: Assembly) -> Callable[[], list[dict[str, np.ndarray]]]:
    return lambda: _checked_microbatches(hook, hook(assembly, assembly.step), assembly)


def _checked_microbatches(
    hook: Hook, result: Any, assembly: Assembly
) -> list[dict[str, np.ndarray]]:
    """Return a constructor hook's result, read-only; raise ``PlanError`` if it is invalid."""
    wanted: dict[str, Any] = CONTRACT | (
        {"attention_mask": np.bool_} if assembly.batch.layout == "padded" else {}
    )
    if assembly.plan.documents is not None:
        wanted |= dict.fromkeys(("group_ids", "roles"), np.int32)
    if not isinstance(result, (list, tuple)) or len(result) != len(assembly.rows):
        found = (
            f"{len(result)} of them" if isinstance(result, (list, tuple)) else type(result).__name__
        )
        problem = f"expected a list of {len(assembly.rows)} microbatches, got {found}"
    else:
        problems = ((m, _problem(microbatch, wanted)) for m, microbatch in enumerate(result))
        problem = next((f"microbatch {m}: {text}" for m, text in problems if text), "")
    if problem:
        raise PlanError(
            f"{hook.__name__}, bucket {assembly.bucket}: {problem}",
            assembly.step,
            "start from assembly.default()",
        )
    return [{key: _read_only(array) for key, array in microbatch.items()} for microbatch in result]


def _problem(microbatch: Any, wanted: Mapping[str, Any]) -> str:
    """Return the first problem of one microbatch, as text; an empty text if it has none."""
    if not isinstance(microbatch, Mapping):
        return f"expected a mapping, got {type(microbatch).__name__}"
    if missing := [key for key in wanted if key not in microbatch]:
        return f"expected the keys {', '.join(missing)}, got none of them"
    for key, array in microbatch.items():
        if (
            not isinstance(key, str)
            or not isinstance(array, (np.ndarray, np.generic))
            or array.dtype.kind not in "biufS"
        ):
            return (
                f"expected a numpy array of numbers for {key!r}, got "
                f"{getattr(array, 'dtype', type(array).__name__)}"
            )
        if key in wanted and array.dtype != wanted[key]:
            return f"expected {np.dtype(wanted[key])} for {key!r}, got {array.dtype}"
    shapes = {key: microbatch[key].shape for key in PER_TOKEN if key in wanted}
    if len(set(shapes.values())) > 1:
        return f"expected per-token arrays of one shape, got {shapes}"
    return _problem_of_documents(microbatch)


def _problem_of_documents(microbatch: Mapping[str, Any]) -> str:
    """Return the first problem of the document bounds, as text; an empty text if there is none.

    Kernels and slices access memory by these bounds, so every document must end within the tokens.
    """
    tokens, n = microbatch["tokens"].size, microbatch["source_ids"].size
    for key in ("cu_seqlens", "cu_seqlens_padded"):
        ends = microbatch[key]
        if (
            ends.shape != (n + 1,)
            or ends[0] != 0
            or (ends[1:] < ends[:-1]).any()
            or ends[-1] > tokens
        ):
            return (
                f"{key}: expected bounds of {n} documents, one for each of source_ids, within "
                f"{tokens} tokens, got {ends.tolist()!s:.80}"
            )
    if microbatch["cu_seqlens_padded"][-1] != tokens:
        return (
            f"cu_seqlens_padded: expected {tokens} at its end, the number of tokens, got "
            f"{microbatch['cu_seqlens_padded'][-1]}"
        )
    if (np.diff(microbatch["cu_seqlens"]) > np.diff(microbatch["cu_seqlens_padded"])).any():
        return (
            "cu_seqlens: expected documents no longer than in cu_seqlens_padded, got a longer one"
        )
    return (
        ""
        if microbatch["max_seqlen"].shape == ()
        else f"expected one number for 'max_seqlen', got shape {microbatch['max_seqlen'].shape}"
    )


def _read_only(array: Any) -> np.ndarray:
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view
