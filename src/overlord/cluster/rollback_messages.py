"""The messages that roll the workers of a job back to a step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from overlord.cluster.attached_ranks import AttachedRanks
from overlord.cluster.current_job import JobWorkers
from overlord.cluster.worker_pool import WorkerHandle
from overlord.messages.control import Attach, FollowLoader, LoaderStart, Rollback


def rollback_messages(
    workers: JobWorkers,
    ranks: AttachedRanks,
    rollback: Rollback,
    starts: Sequence[LoaderStart],
    restarted: Collection[str],
) -> Iterator[tuple[WorkerHandle, Rollback | Attach | FollowLoader]]:
    """Yield the messages of a rollback with the worker of each.

    Loader workers open their loaders at ``starts``, restarted constructor workers attach their
    ranks, and standbys follow their loaders from there on.
    """
    pool, placement = workers.pool, workers.placement
    for c, worker in pool.constructors.items():
        yield worker, Rollback(rollback.generation, rollback.step)
        if worker.name in restarted:
            for rank in ranks.served_by(c):
                yield worker, Attach(rank)
    for h, worker in list(pool.loaders.items()):
        if worker.joined:
            mine = tuple(start for start in starts if placement.worker(start.loader) == h)
            yield worker, replace(rollback, openings=mine)
    for h, follow in workers.standby.follow(starts):
        yield pool.loaders[h], follow
