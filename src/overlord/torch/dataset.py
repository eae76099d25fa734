"""Steps where torch expects a data set or a loader: ``Dataset`` for a DataLoader, ``StatefulLoader`` in place of one."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from overlord.errors import JobError, StateMismatch
from overlord.job import Job
from overlord.torch.marks import State, state_behind
from overlord.torch.steps import TensorMicrobatch, TensorStep

NOT_BEGUN: State = {"stream": None, "microbatches": 0}


def _refuse_collating(batch: Any, **_: Any) -> Any:
    raise JobError(
        ["batch_size: wanted None in the DataLoader, found a number; an item of a Dataset is a whole step, or microbatch, which is a batch "
         "already: DataLoader(dataset, batch_size=None)"], "Dataset",
    )  # fmt: skip


default_collate_fn_map.update({TensorStep: _refuse_collating, TensorMicrobatch: _refuse_collating})


class Dataset(IterableDataset):  # type: ignore[misc]  # torch is not looked into
    """One item is one step (a ``TensorStep``), or with ``microbatches=True`` one microbatch. For ``DataLoader(batch_size=None)``.

    ``source``: a Job, launched in the process that iterates, or a client of this process. ``transform`` changes every item: an adapter,
    say. Reading, tokenizing and packing run in parallel already, so ``num_workers`` is 0, or with a Job 1. The state is exact
    between steps and, on the same mesh, between microbatches.
    """

    def __init__(
        self, source: Any, *, microbatches: bool = False, transform: Callable[[Any], Any] | None = None, rank: int | None = None,
        wrap: Callable[[Any], Any] | None = None, **launch_options: Any,
    ):  # fmt: skip
        self.job = source if isinstance(source, Job) else None
        if self.job is None and not (hasattr(source, "__next__") and hasattr(source, "state_dict")):
            raise JobError([f"wanted a Job, or a client of one, found {type(source).__name__}"], "Dataset")
        if self.job is None and (launch_options or rank is not None):
            raise JobError(
                [f"{', '.join([*launch_options] or ['rank'])}: for a Job; the client that was given is launched already"], "Dataset"
            )
        self.microbatches, self.transform = microbatches, transform
        self._rank, self._options, self._wrap = rank, launch_options, wrap
        self._client: Any = None if self.job is not None else (wrap(source) if wrap else source)
        self._pending: State | None = None  # loaded before there was a client to load it
        self._first: State | None = None  # where a Job begins, for a state of before it was launched
        self._allow: tuple[str, ...] = ()
        self._behind: Callable[[], State] | None = None  # the stream behind the last whole step, while one is handed out in parts
        self._skip = self._out = 0  # microbatches to leave out of the next step; handed out of this one
        self._rest: deque[Any] = deque()  # those still to come of it
        self._before: Callable[[], State] | None = None  # the stream before it
        self._plan: str | None = None  # the plan that the microbatches to leave out, or handed out, are of

    @property
    def client(self) -> Any:
        """The client whose steps these are; None for a Job that nobody iterates yet."""
        return self._client

    def __iter__(self) -> Iterator[Any]:
        self._refuse_workers()
        self._open()
        return self._items()

    def _items(self) -> Iterator[Any]:
        """Where it stands is kept in this object and not here: another iterator goes on from there, and so does a loaded state."""
        while (item := self._microbatch() if self.microbatches else self._step()) is not None:
            yield item if self.transform is None else self.transform(item)

    def _step(self) -> TensorStep | None:
        step = next(self._client, None)
        return step if step is None or isinstance(step, TensorStep) else TensorStep.of(step)

    def _microbatch(self) -> Any:
        while not self._rest:
            self._before = state_behind(self._client)
            if (step := self._step()) is None:
                return None
            self._same_plan(step)
            self._rest, self._out, self._skip, self._plan = deque(list(step)[self._skip :]), self._skip, 0, step.plan_digest
        found, self._out = self._rest.popleft(), self._out + 1
        self._behind, self._out = (self._before, self._out) if self._rest else (None, 0)
        return found

    def _same_plan(self, step: TensorStep) -> None:
        """Microbatches that were handed out are those of one plan; under another mesh they hold other samples."""
        if self._skip and self._plan not in (None, step.plan_digest):
            raise StateMismatch(
                {f"the plan of step {step.step}": (f"{self._plan}, with {self._skip} microbatches handed out", step.plan_digest)},
                "a state of the middle of a step is good for the same mesh and strategy only; save at the end of a step, or load its "
                "'stream', which begins this step anew",
            )  # fmt: skip

    def __len__(self) -> int:
        """Steps of the whole job, where its ``until`` says how many."""
        if self.job is None or self.microbatches or not isinstance(self.job.until, int):
            raise TypeError("the number of items is known for the steps of a Job whose until is a number, and of no other stream")
        return self.job.until

    # state

    def state_dict(self) -> State:
        if self._pending is not None or self._client is None:
            return dict(self._pending or NOT_BEGUN)
        if self._behind is not None:
            return {"stream": self._behind(), "microbatches": self._out, "plan": self._plan}
        whole: State = {"stream": self._client.state_dict(), "microbatches": self._skip}
        return whole | {"plan": self._plan} if self._skip else whole

    def load_state_dict(self, state: Mapping[str, Any], allow: tuple[str, ...] = ()) -> None:
        """Go on from a saved state: one of this object, or a client's."""
        if "stream" not in state:
            state = {"stream": dict(state), "microbatches": 0} if state else NOT_BEGUN
        handed = int(state.get("microbatches", 0))
        if handed and not self.microbatches:
            raise StateMismatch({"microbatches": (f"{handed} of a step handed out", "whole steps")}, "iterate with microbatches=True")
        self._pending, self._allow = dict(state), allow
        if self._client is not None:
            self._load()

    def _load(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        if (stream := pending["stream"] or self._first) is not None:
            self._client.load_state_dict(stream, self._allow)
        self._rest.clear()
        self._behind, self._out, self._skip, self._plan = None, 0, int(pending["microbatches"]), pending.get("plan")

    # the client

    def _open(self) -> None:
        if self._client is None:
            assert self.job is not None
            client = _joined(self.job, self._rank, self._options)
            self._client = self._wrap(client) if self._wrap else client
            self._first = self._client.state_dict()
        if self._pending is not None:
            self._load()

    def close(self) -> None:
        """Close the client, and with it a session that was launched here."""
        if self._client is not None:
            self._client.close()

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are spawned. What a pickler would say of a session is no help."""
        if self._client is not None:
            raise JobError(
                ["num_workers: wanted 0 with a client, or with a Job that is iterated already; a session does not travel to another "
                 "process. Give the Job, which is then launched in the worker"], "Dataset",
            )  # fmt: skip
        return self.__dict__

    def _refuse_workers(self) -> None:
        info = get_worker_info()
        if info is None:
            return
        if info.num_workers > 1:
            raise JobError(
                [f"num_workers: wanted 0 or 1, found {info.num_workers}; each worker would launch the whole job and give every step again. "
                 "Loaders and constructors of a session work in parallel: see launch(loaders=, workers=, runtime=)"], "Dataset",
            )  # fmt: skip
        if self.job is not None and os.environ.get("WORLD_SIZE", "1") != "1":
            raise JobError(
                [f"num_workers: wanted 0 where ranks share a session (WORLD_SIZE={os.environ['WORLD_SIZE']}), found 1; rank 0's worker "
                 "would end, and the session with it, while others still take steps. Steps are prefetched without workers too"], "Dataset",
            )  # fmt: skip
        if self.job is None:
            raise JobError(
                ["num_workers: wanted 0 with a client, found 1; a session does not survive a fork. Give the Job, which is then launched in "
                 "the worker, or use num_workers=0: steps are prefetched either way"], "Dataset",
            )  # fmt: skip


def _joined(job: Job, rank: int | None, options: Mapping[str, Any]) -> Any:
    """The client of this process's rank; one that knows the plan's broadcasts where there are process groups to broadcast in."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        from overlord.torch.joining import join as join_groups

        return join_groups(job, **options)
    from overlord.runtime.join import join

    return join(job, rank=rank, **options)


class StatefulLoader:
    """Stands where a torchdata ``StatefulDataLoader`` is expected: iterate it, save ``state_dict()``, load it before iterating again.

    ``source``: a Job or a client. With ``device`` steps are copied there ahead (``DevicePrefetcher``, ``depth``). A second ``iter`` goes on
    where the first stood: a stream has no epochs of its own, those of its sources are in it.
    """

    batch_size = None  # as of a DataLoader that is given whole batches
    num_workers = 0

    def __init__(
        self, source: Any, *, device: Any = None, depth: int = 2, pin: bool = True, microbatches: bool = False,
        transform: Callable[[Any], Any] | None = None, rank: int | None = None, **launch_options: Any,
    ):  # fmt: skip
        def on_device(client: Any) -> Any:
            from overlord.torch.device import DevicePrefetcher

            return DevicePrefetcher(client, device, depth, pin)

        wrap = None if device is None else on_device
        self.dataset = Dataset(source, microbatches=microbatches, transform=transform, rank=rank, wrap=wrap, **launch_options)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def state_dict(self) -> State:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], allow: tuple[str, ...] = ()) -> None:
        self.dataset.load_state_dict(state, allow)

    @property
    def client(self) -> Any:
        return self.dataset.client

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """As the client's: what was measured in a step, for a mixture that learns."""
        self.dataset._open()
        self.dataset.client.report(step, metrics)

    def close(self) -> None:
        self.dataset.close()

    def __enter__(self) -> StatefulLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
