"""Steps of a job as a torch ``Dataset``, which a ``Loader`` iterates."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from overlord.client.caller_check import (
    Ahead,
    nothing_ahead,
    refuse_collating,
    refuse_sharing,
    refuse_skipping,
    taken_ahead,
)
from overlord.client.microbatch_count import check_count
from overlord.client.world import process_groups, refuse_partial_mesh
from overlord.errors import JobError, OverlordError, StateMismatch
from overlord.job.budgets import is_endless
from overlord.job.job import Job
from overlord.session.pass_length import PassLength, pass_length
from overlord.torch.dataloader_worker import InWorker, refuse_workers, world_size
from overlord.torch.position import NOT_BEGUN, Position, Trail, position_of
from overlord.torch.rewind_barrier import refuse_without_group, wait_for_all
from overlord.torch.saved_state import State, state_after
from overlord.torch.tensor_step import TensorMicrobatch, TensorStep

log = logging.getLogger("overlord")


def _refuse_collating(batch: Any, **_: Any) -> Any:
    raise JobError(
        [
            "batch_size: expected None in the DataLoader, got a number; an item of a "
            "Dataset is a whole step, or microbatch, which is a batch "
            "already: iterate overlord.torch.Loader(job), or DataLoader(dataset, batch_size=None)"
        ],
        "Dataset",
    )


default_collate_fn_map.update({TensorStep: _refuse_collating, TensorMicrobatch: _refuse_collating})


class Dataset(IterableDataset):  # type: ignore[misc]  # mypy does not follow torch
    """A data set whose items are steps (``TensorStep``), or microbatches.

    A ``Loader`` holds one and is what trainers take. Where a framework insists on a data set, use
    it with ``DataLoader(batch_size=None)``. ``source``: a Job, launched in the process that
    iterates, or a client of this process. ``microbatches``: an item is one microbatch; a step with
    another number of them than ``Batch.microbatches`` raises ``PlanError``, except in an
    evaluation. ``transform``: a function of each item, e.g. an adapter. ``rewind``: every
    ``iter()`` starts at the first step; otherwise it continues where the last one stopped. None:
    True for an evaluation. ``wrap``: a function of the client, e.g. ``DevicePrefetcher``. ``rank``
    and launch options: as in ``join``, only with a Job.

    Reading, tokenizing and packing run in parallel already. So ``num_workers`` must be 0, or at
    most 1 with a Job. The state is exact between steps and, on the same mesh, between microbatches.
    """

    def __init__(
        self,
        source: Any,
        *,
        microbatches: bool = False,
        transform: Callable[[Any], Any] | None = None,
        rank: int | None = None,
        rewind: bool | None = None,
        wrap: Callable[[Any], Any] | None = None,
        **launch_options: Any,
    ):
        self.job = source if isinstance(source, Job) else None
        if self.job is None and not (hasattr(source, "__next__") and hasattr(source, "state_dict")):
            raise JobError(
                [f"source: expected a Job, or a client of one, got {type(source).__name__}"],
                "Dataset",
            )
        if self.job is None and (launch_options or rank is not None):
            raise JobError(
                [
                    f"{', '.join([*launch_options] or ['rank'])}: expected only with a Job, got it "
                    "with a client, which is already launched; leave it out"
                ],
                "Dataset",
            )
        self.microbatches, self.transform = microbatches, transform
        evaluates = bool(getattr(self.job or source, "evaluation", False))
        self.rewind = evaluates if rewind is None else rewind
        self._must_rewind = bool(rewind)  # it was asked for, so the first pass checks it already
        self._rank, self._options, self._wrap = rank, launch_options, wrap
        self._client: Any = None if self.job is not None else (wrap(source) if wrap else source)
        self._session: Any = None if self.job is not None else getattr(source, "session", None)
        # The state at which every pass starts, with ``rewind``.
        self._first: State | None = (
            self._client.state_dict() if self.rewind and self._client is not None else None
        )
        self._no_start: OverlordError | None = None  # why the start has no state
        self._pending: Position | None = None  # a state that was loaded before there was a client
        self._allow: tuple[str, ...] = ()
        self._loaded = False  # a state was loaded, from which the next pass continues
        self._trail = Trail(nothing_ahead)  # positions of this pass
        self._passes = 0  # passes that have begun
        self._empty = 0  # consecutive passes without an item
        self._taken: TensorStep | None = None  # a step taken from the client and not accepted yet
        self._before: Callable[[], State] = dict  # the stream before that step
        self._rest: deque[Any] = deque()  # microbatches of the current step still to come
        self._skip = self._out = 0  # microbatches to skip in the next step; delivered of this one
        self._plan: str | None = None  # digest of the plan of the skipped or delivered ones
        self._ranks = 1  # world size where a worker was started
        self._length: PassLength | None = None  # of an evaluation, once it is planned

    @property
    def client(self) -> Any:
        """The client that delivers the steps; None for a Job before the first ``iter()``."""
        return self._client

    @property
    def session(self) -> Any:
        """The session on the rank that launched it, for calls such as ``set_mixture``; else None.

        Raise ``JobError`` before the first ``iter()``, which launches a Job.
        """
        if self._client is None:
            problem = (
                "session: expected a Job that is launched, got one before the first iter(); read "
                "it in the loop over steps, or in a callback of the trainer"
            )
            raise JobError([problem], "Loader")
        return self._session

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            return InWorker(self._in_worker())
        refuse_sharing("Dataset")
        refuse_collating("Dataset")
        refuse_skipping("Dataset", self._loaded)
        if self.job is None:
            refuse_partial_mesh(self._client, "Dataset")
        self._begin_pass(taken_ahead())
        return self._items()

    def __getitem__(self, index: Any) -> Any:
        """Refuse access by index, which samplers (``DistributedSampler``) use."""
        raise JobError(
            [
                f"sampler: expected none, got index {index!r}: the job has placed its samples on "
                "ranks and steps already; remove the sampler and pass "
                "overlord.torch.Loader(job) itself to the trainer"
            ],
            "Dataset",
        )

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the job determines the order of samples. Trainers call it before a pass."""
        refuse_sharing("Dataset")

    def _in_worker(self) -> Iterator[Any]:
        refuse_workers(self.job is not None, self._ranks)
        self._begin_pass(nothing_ahead)
        yield from self._items()

    def _begin_pass(self, ahead: Ahead) -> None:
        """Start a pass: at the first step with ``rewind``, else after the last trained item.

        The first pass after ``load_state_dict`` starts at the loaded state, also with ``rewind``.
        Items that a trainer prefetched in the last pass and did not train on are delivered again.
        """
        if self.rewind and (self._must_rewind or self._passes):
            refuse_without_group(self._mesh_size())
        if self.rewind and self._passes and not self._loaded:
            wait_for_all(self._mesh_size(), self._options)
            self._go_to(NOT_BEGUN)
        elif (unread := self._trail.consumed()) is not None:
            self._go_to(unread)
        self.open()
        self._trail, self._passes, self._loaded = Trail(ahead), self._passes + 1, False

    def _mesh_size(self) -> int:
        """Return the number of ranks that share the session; 1 if it is unknown."""
        known = (
            self.job.place.world_size
            if self.job is not None
            else getattr(self._client, "world_size", None)
        )
        return known or 1

    def _items(self) -> Iterator[Any]:
        """Yield the items of one pass.

        The position is kept in this object, so that a later iterator continues from there.
        """
        some = False
        while (item := self._next()) is not None:
            some, self._empty = True, 0
            yield item if self.transform is None else self.transform(item)
        if not some:
            self._warn_empty()

    def _next(self) -> Any:
        self._trail.count_request(self._current_position)
        item = self._microbatch() if self.microbatches else self._step()
        if item is not None:
            self._trail.count_delivery(self._current_position)
        return item

    def _warn_empty(self) -> None:
        """Warn at the first pass without an item; raise ``JobError`` at the second in a row.

        Some trainers stop at an empty pass, others loop forever.
        """
        self._empty += 1
        problem = (
            "expected another step, got the end of the stream; give rewind=True to start "
            "every pass at the first step (evaluation), "
            "a larger Job.until, or let the trainer stop there"
        )
        if self._empty > 1:
            raise JobError([problem], "Dataset")
        log.warning("Dataset: %s", problem)

    def _step(self) -> TensorStep | None:
        step = next(self._client, None)
        return step if step is None or isinstance(step, TensorStep) else TensorStep.of(step)

    def _microbatch(self) -> Any:
        if not self._rest and not self._begin_step():
            return None
        found, self._out = self._rest.popleft(), self._out + 1
        return found

    def _begin_step(self) -> bool:
        """Take the next step and check it; return False at the end of the stream.

        A refused step is kept, with the state before it, and refused again.
        """
        while not self._rest:
            if self._taken is None:
                self._before = state_after(self._client)
                self._taken = self._step()
            if (step := self._taken) is None:
                return False
            check_count(step, self._per_step(step))
            self._same_plan(step)
            self._rest, self._out, self._skip, self._plan = (
                deque(list(step)[self._skip :]),
                self._skip,
                0,
                step.plan_digest,
            )
            self._taken = None
        return True

    def _per_step(self, step: TensorStep) -> int | None:
        """Return the microbatches of a step; None if any number is accepted, as in evaluation."""
        if self.job is not None and self.job.evaluation:
            return None
        known: int | None = getattr(self._client, "microbatches_per_step", None)
        known = known if self.job is None else self.job.batch.microbatches
        return step.expected_microbatches or known

    def _same_plan(self, step: TensorStep) -> None:
        """Raise ``StateMismatch`` if the delivered microbatches belong to another plan.

        Under another mesh, microbatches hold other samples.
        """
        if self._skip and self._plan not in (None, step.plan_digest):
            raise StateMismatch(
                {
                    f"the plan of step {step.step}": (
                        f"{self._plan}, with {self._skip} microbatches delivered",
                        step.plan_digest,
                    )
                },
                "a state inside a step is valid only for the same mesh and strategy; save at the "
                "end of a step, or load the state's 'stream', which starts this step again",
                "Dataset: the state is inside a step with another plan",
            )

    def __len__(self) -> int:
        """Return the number of items of the whole job; raise ``TypeError`` if it is unknown.

        The number is known if ``until`` or the stages are a number of steps, and the stream of
        samples has no end. That of an evaluation is known if the indexes of its sources have all
        lengths: it is planned once.
        """
        if self.job is not None and self.job.evaluation:
            return self._pass_length(self.job)
        end = None if self.job is None else self.job.end_step
        if self.job is None or end is None or not _endless(self.job):
            raise TypeError(
                "len(): expected a Job whose until or stages are a number of steps and which has a "
                "source without epochs and max_tokens (with mixture=, only such sources), got a "
                "Job whose number "
                "of items is unknown; iterate without len()"
            )
        if not self.microbatches:
            return end
        parts = (*self.job.batches.parts, None)
        ends = [end if part is None else min(part.first, end) for part in parts[1:]]
        return sum(
            (stop - min(part.first, end)) * part.batch.microbatches
            for part, stop in zip(self.job.batches.parts, ends, strict=True)
        )

    def _pass_length(self, job: Job) -> int:
        """Return the number of items of an evaluation."""
        self._length = self._length or pass_length(job)
        found = self._length.microbatches if self.microbatches else self._length.steps
        if found is None:
            raise TypeError(
                "len(): expected ranks with equal numbers of microbatches, got a strategy that "
                "splits samples; iterate over steps, or without len()"
            )
        return found

    # state

    def state_dict(self) -> State:
        """Return the state after the last item that the trainer has trained on.

        Items that the trainer only prefetched do not count.
        """
        if self._pending is not None or self._client is None:
            return (self._pending or NOT_BEGUN).state()
        return (self._trail.consumed() or self._position(self._client.state_dict)).state()

    def _current_position(self) -> Position:
        """Return the current position, whose state is exported only when it is requested."""
        return self._position(state_after(self._client))

    def _position(self, after: Callable[[], State]) -> Position:
        """Return the current position. ``after``: the stream after the client's last step."""
        if self._rest:
            return Position(self._before, self._out, self._plan)
        return Position(
            after if self._taken is None else self._before,
            self._skip,
            self._plan if self._skip else None,
        )

    def load_state_dict(self, state: Mapping[str, Any], allow: tuple[str, ...] = ()) -> None:
        """Continue from a saved state, of this object or of a client.

        A state inside a step needs ``microbatches=True`` and raises ``StateMismatch`` without it.
        ``allow``: differences to accept, as in ``client.load_state_dict``.
        """
        at = position_of(state)
        if at.microbatches and not self.microbatches:
            differs = {"microbatches": (f"{at.microbatches} of a step delivered", "whole steps")}
            problem = "Dataset: expected a state between two steps, got one inside a step"
            raise StateMismatch(differs, "iterate with microbatches=True", problem)
        self._go_to(at, allow)
        self._loaded = True

    def _go_to(self, at: Position, allow: tuple[str, ...] = ()) -> None:
        self._pending, self._allow = at, allow
        if self._client is not None:
            self._load()

    def _load(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        stream = pending.stream() or self._first
        if stream is None and self._no_start is not None:
            raise self._no_start
        if stream is not None:
            self._client.load_state_dict(stream, self._allow)
        self._rest.clear()
        self._taken, self._out, self._skip, self._plan = None, 0, pending.microbatches, pending.plan
        self._trail, self._empty = self._trail.empty_copy(), 0

    # the client

    def open(self) -> None:
        """Launch the job, or join its session, unless there is a client already."""
        if self._client is None:
            assert self.job is not None
            client = _join(self.job, self._rank, self._options)
            self._session = client.session
            self._client = self._wrap(client) if self._wrap else client
            self._note_start()
        if self._pending is not None:
            self._load()

    def _note_start(self) -> None:
        """Export the state of the start, for a later pass or a state of the start.

        A rank that loads a state rewinds the session, and others cannot export the start any more.
        Passes need it, so ranks wait for each other. Without passes a rank can do without.
        """
        try:
            self._first = self._client.state_dict()
        except OverlordError as fault:
            if self.rewind or self._pending is None:
                raise
            self._no_start = fault
        if self.rewind and self._pending is not None:
            wait_for_all(self._mesh_size(), self._options)

    def close(self) -> None:
        """Close the client, and with it a session that was launched here."""
        if self._client is not None:
            self._client.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for spawned workers; raise ``JobError`` if there is a client."""
        if self._client is not None:
            raise JobError(
                [
                    "num_workers: expected 0 with a client or a Job that is already iterated, "
                    "got a worker; a session cannot move to another "
                    "process. Give the Job, which is then launched in the worker"
                ],
                "Dataset",
            )
        return {**self.__dict__, "_ranks": world_size()}


def _endless(job: Job) -> bool:
    """Return whether the stream of a job has no end, because a source repeats forever.

    With a mixture all sources must repeat, since the mixture may give some of them weight 0.
    """
    mixed = job.mixture is not None or any(stage.mixture is not None for stage in job.stages)
    repeats = [is_endless(source) for source in job.sources if mixed or source.weight > 0]
    return all(repeats) if mixed else any(repeats)


def _join(job: Job, rank: int | None, options: Mapping[str, Any]) -> Any:
    """Join the session of a job and return the client of this process's rank.

    If torch process groups of several ranks exist, the client supports plans that broadcast.
    """
    if (groups := process_groups()) is not None and groups.get_world_size() > 1:
        from overlord.torch.rendezvous import join as join_groups

        return join_groups(job, rank=rank, **options)
    from overlord.session.rendezvous import join

    return join(job, rank=rank, **options)
