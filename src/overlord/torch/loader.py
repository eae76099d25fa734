"""``Loader``: the one object that trainers take, in the place of a DataLoader."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from overlord.errors import JobError
from overlord.torch.dataset import Dataset
from overlord.torch.saved_state import State

try:  # frameworks check for this class
    from torchdata.stateful_dataloader import StatefulDataLoader as _DataLoader
except ImportError:
    from torch.utils.data import DataLoader as _DataLoader

# Arguments of a DataLoader that a Loader replaces, each with what to write instead.
_REPLACED = {
    "batch_size": "an item is a batch already: set Batch(samples=...) in the job",
    "shuffle": "the job shuffles: set Source(shuffle=...)",
    "sampler": "the job places samples on ranks: leave it out",
    "batch_sampler": "the job forms batches: leave it out",
    "num_workers": "the session reads in parallel: leave it out, or give workers=",
    "collate_fn": "give transform=, a function of an item",
    "pin_memory": "give device=, which pins and copies ahead",
    "drop_last": "every rank has the same number of steps: leave it out",
    "prefetch_factor": "give prefetch=, a number of steps",
    "persistent_workers": "the session persists: leave it out",
}


def _unchanged(item: Any) -> Any:
    return item


class Loader(_DataLoader):  # type: ignore[misc]  # mypy does not follow torch
    """An iterable over the steps of a job, or its microbatches, for every trainer.

    ``job``: a Job, which the ranks of this world share, or a client of it. The rank and the world
    size are those of ``torch.distributed`` if it is initialised, else of the environment.
    ``microbatches``: an item is a microbatch, with ``step``, ``global_valid_tokens``,
    ``global_samples`` and ``is_last``. Each step then has exactly ``Batch.microbatches`` of them,
    except in an evaluation.
    ``transform``: a function of each item, such as an adapter. ``device``: copy ``depth`` steps
    ahead to it (``DevicePrefetcher``); ``pin``: through pinned memory.

    It is a ``StatefulDataLoader`` if torchdata is installed, else a ``DataLoader``. It needs
    neither workers nor a sampler. ``state_dict()`` is the state after the last item that the
    trainer has *consumed*. A second ``iter()`` continues where the first stopped, since a stream
    has no epochs. With ``rewind=True``, and with an evaluation by default, it starts at the first
    step. ``rank`` and ``launch_options``: as in ``join``, only with a Job.
    """

    # Accelerate leaves a prepared loader as it is, and saves the state of a stateful one.
    _is_accelerate_prepared = True
    use_stateful_dataloader = True

    def __init__(
        self,
        job: Any,
        microbatches: bool = False,
        transform: Callable[[Any], Any] | None = None,
        *,
        device: Any = None,
        depth: int = 2,
        pin: bool = True,
        rank: int | None = None,
        rewind: bool | None = None,
        **launch_options: Any,
    ):
        if wrong := [name for name in launch_options if name in _REPLACED]:
            raise JobError([f"{name}: {_REPLACED[name]}" for name in wrong], "Loader")

        def on_device(client: Any) -> Any:
            from overlord.torch.device_prefetch import DevicePrefetcher

            return DevicePrefetcher(client, device, depth, pin)

        dataset = Dataset(
            job,
            microbatches=microbatches,
            transform=transform,
            rank=rank,
            rewind=rewind,
            wrap=None if device is None else on_device,
            **launch_options,
        )
        with warnings.catch_warnings():  # torchdata calls a function that torch has deprecated
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            super().__init__(dataset, batch_size=None, collate_fn=_unchanged)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def __len__(self) -> int:
        """Return the number of items; raise ``TypeError`` with the reason if it is unknown."""
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        """Refuse access by index, as ``Dataset`` does: a DataLoader of a Loader needs none."""
        return self.dataset[index]

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the job determines the order of samples. Trainers call it before a pass."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> State:
        """Return the state after the last item that the trainer has consumed."""
        state: State = self.dataset.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], allow: tuple[str, ...] = ()) -> None:
        """Continue from a saved state, of a loader or a client, on any number of ranks.

        ``allow``: differences to accept, as in ``client.load_state_dict``.
        """
        self.dataset.load_state_dict(state, allow)

    @property
    def job(self) -> Any:
        """The job; None for a Loader of a client."""
        return self.dataset.job

    @property
    def microbatches(self) -> bool:
        """Whether an item is a microbatch."""
        found: bool = self.dataset.microbatches
        return found

    @property
    def client(self) -> Any:
        """The client that delivers the steps; None for a Job before the first ``iter()``."""
        return self.dataset.client

    @property
    def session(self) -> Any:
        """The session on the rank that launched it (rank 0), for ``set_mixture``, ``skip``, ...

        None on other ranks, and for a client of a session that was launched elsewhere. Raise
        ``JobError`` before the first ``iter()``, which launches a Job.
        """
        return self.dataset.session

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report metrics of a step, as ``client.report``; an adaptive mixture uses them."""
        self.dataset.open()
        self.dataset.client.report(step, metrics)

    def close(self) -> None:
        """Close the client, and with it a session that was launched here."""
        self.dataset.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        of = f"job {self.job.name!r}" if self.job is not None else repr(self.client)
        return f"Loader({of}, items: {'microbatches' if self.microbatches else 'steps'})"


StatefulLoader = Loader  # its name before
