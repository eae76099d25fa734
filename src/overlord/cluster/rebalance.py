"""Migration of loaders: a source is read in more workers, in fewer, or on another node.

New workers start in threads. They follow the loaders that they are to read until they hold enough
samples, and take over between two steps. A worker without loaders ends once every rank acknowledged
its last step.

No sample is dropped: a worker that takes over continues with the samples that it holds
(``LoaderService.promote``). The stream does not change.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from overlord.cluster.current_job import CurrentJob, JobWorkers, LoaderStarts
from overlord.cluster.plan_router import PlanHistory
from overlord.cluster.worker_pool import ProcessContext, WorkerHandle
from overlord.concurrency.event_loop import CommandLoop
from overlord.errors import DataStall, JobError, OverlordError
from overlord.job.hooks import LOADER
from overlord.messages.control import (
    DropLoader,
    FollowLoader,
    RestartLoader,
    RestartSource,
    Rollback,
    TakeOverLoader,
)
from overlord.scaling.loader_placement import assign_shards, workers_to_keep

log = logging.getLogger("overlord")

# the first number of workers that scaling starts; those of the launch have lower numbers
FIRST_SCALED = 10_000
# worker numbers for each coordinator: a job that runs for months scales often
NUMBERS_PER_COORDINATOR = 1_000_000
FOLLOW_S = 5.0  # for a worker to buffer samples before it takes loaders over


@dataclass(slots=True, eq=False)
class Migration:
    """A source that moves to other workers, or workers whose loaders move to new workers."""

    what: str  # the moved sources, for logs
    workers: list[int]  # the workers that are to read
    starting: int  # number of these workers that have not started yet
    source: int | None = None
    replaced: dict[int, int] = field(default_factory=dict)  # old worker -> new worker
    moves: dict[int, int] = field(default_factory=dict)  # loader -> the worker that takes it over


class Rebalancer:
    """The moves of loaders between workers, one migration at a time. Runs on: event loop.

    ``first`` is the number of the first worker that a migration starts.
    """

    def __init__(
        self,
        workers: JobWorkers,
        current: CurrentJob,
        context: ProcessContext,
        *,
        history: PlanHistory,
        starts: LoaderStarts,
        commands: CommandLoop,
        first: int = FIRST_SCALED,
    ):
        self._pool, self._placement = workers.pool, workers.placement
        self._standby, self._recovery = workers.standby, workers.recovery
        self._current, self._history, self._starts = current, history, starts
        self._commands, self._event_loop = commands, context.event_loop
        self._platform = context.platform
        self._migration: Migration | None = None
        self._next_number = first
        # worker without loaders -> the last step for which it may have sent samples
        self.retiring: dict[int, int] = {}

    @property
    def changing(self) -> bool:
        return self._migration is not None

    # requests

    def scale(self, source: int, n: int, on: Sequence[int] = ()) -> bool:
        """Read a source in ``n`` workers: its own, those of ``on``, idle ones, then new ones.

        Return False if ``n`` workers read it already, or if one of them is lost. Return False too
        while another migration is in progress, and after the end of the job. Raise ``JobError``
        for an impossible ``n``.
        """
        name, most = self._current.prepared.job.names[source], self._placement.loaders[source]
        if not 1 <= n <= most:
            raise JobError(
                [
                    f"expected 1 to {most} loader workers for {name!r}, which has {most} "
                    f"loader{'s' * (most > 1)}, got {n}; launch with a higher number in loaders= "
                    "for more"
                ],
                "scale",
            )
        if n > 1:
            self._refuse_hooks(name, "scale")
        now, living = self._placement.workers_of(source), self._pool.living()
        if (
            self._migration is not None
            or n == len(now)
            or not living.issuperset(now)
            or self._current.planner.finished is not None
        ):
            return False
        if n < len(now):
            stay = workers_to_keep(now, n, self._others(source), lambda h: h < FIRST_SCALED)
            self._hand_over(Migration(name, stay, 0, source))
            return True
        idle = self._idle_for(source)
        workers = list(dict.fromkeys([*now, *(h for h in on if h in living), *idle]))[:n]
        new = self._new_numbers(n - len(workers))
        migration = self._migration = Migration(name, workers + new, len(new), source)
        for h in new:
            self._placement.sources_of[h] = frozenset([source])
            self._start(migration, h)
        if not new:
            self._hand_over(migration)
        return True

    def relocate(self, workers: Iterable[int]) -> bool:
        """Replace loader workers by new ones, which are placed again on the nodes of a cluster.

        Return False if another migration is in progress, if none of the workers is alive and reads
        a loader, or if the job has ended.
        """
        living = self._pool.living()
        old = [h for h in workers if h in living and self._placement.loaders_on(h)]
        if self._migration is not None or not old or self._current.planner.finished is not None:
            return False
        replaced = dict(zip(old, self._new_numbers(len(old)), strict=True))
        what = f"the sources of {', '.join(f'loader-worker/{h}' for h in old)}"
        migration = self._migration = Migration(
            what, list(replaced.values()), len(old), replaced=replaced
        )
        for was, h in replaced.items():
            self._placement.sources_of[h] = self._placement.sources_of[was]
            self._start(migration, h, was)
        return True

    def move(self, source: int, workers: Sequence[str]) -> None:
        """Move the k-th loader of a source to ``workers[k % len(workers)]``, given by name.

        Raise ``JobError`` for an unknown or lost worker, or one without the code of the source.
        """
        known = {w.name: h for h, w in list(self._pool.loaders.items()) if not w.lost}
        if unknown := [name for name in workers if name not in known]:
            listed = ", ".join(list(known)[:8])
            listed += f" and {len(known) - 8} more" if len(known) > 8 else ""
            raise JobError(
                [
                    f"expected the name of a loader worker, got {name!r}; there are {listed}"
                    for name in unknown
                ],
                "move",
            )
        name = self._current.prepared.job.names[source]
        if unfit := [w for w in workers if not self._placement.can_open(known[w], source)]:
            problem = (
                f"expected a worker with the code of {name!r}, got {unfit[0]}, which started "
                "without it; name a worker that reads the source"
            )
            raise JobError([problem], "move")
        if len(set(workers)) > 1:
            self._refuse_hooks(name, "move")
        self._placement.pending |= {
            loader: known[workers[k % len(workers)]]
            for k, loader in enumerate(self._placement.loaders_of(source))
        }
        self._commands.run(self._current.planner.handle(RestartSource(source)))

    def _refuse_hooks(self, name: str, where: str) -> None:
        if self._current.prepared.job.hooks_of(LOADER):
            problem = (
                f"expected one loader worker for {name!r}, since a loader hook receives all "
                "samples that a step takes from it, got several; remove the hook, or use one worker"
            )
            raise JobError([problem], where)

    def _new_numbers(self, n: int) -> list[int]:
        first, self._next_number = self._next_number, self._next_number + n
        return list(range(first, first + n))

    def _others(self, source: int) -> Counter[int]:
        """Return the number of loaders of other sources by worker."""
        mine, every = self._placement.loaders_of(source), range(self._placement.n_loaders)
        return Counter(self._placement.worker(k) for k in every if k not in mine)

    def _idle_for(self, source: int) -> list[int]:
        """Return the workers that can open a source and neither read nor are to read a loader."""
        idle = self._pool.living() - self._placement.busy()
        return sorted(h for h in idle if self._placement.can_open(h, source))

    # new workers

    def _start(self, migration: Migration, h: int, instead_of: int | None = None) -> None:
        self._pool.start_scaled(
            h,
            lambda worker: self._started(migration, h, worker),
            lambda worker, reason: self._not_started(migration, h, reason, worker),
            instead_of,
        )

    def _not_started(
        self, migration: Migration, h: int, reason: str, worker: WorkerHandle | None
    ) -> None:
        """End a worker whose start failed: a later coordinator must not wait for it."""
        if self._pool.closed:
            return
        if worker is not None:
            worker.lost = worker.lost or reason
            self._pool.retire(h, worker)
        log.warning(
            "loader-worker/%d not started: %s; migration of %s continues without it",
            h,
            reason,
            migration.what,
        )
        self._placement.sources_of.pop(h, None)
        migration.workers.remove(h)
        self._start_done(migration)

    def _started(self, migration: Migration, h: int, worker: WorkerHandle) -> None:
        if self._pool.closed or worker.lost:
            self._not_started(migration, h, worker.lost or "the job has ended", worker)
            return
        self._pool.loaders[h], worker.joined = worker, True
        self._recovery.joined(worker)
        self._pool.link(worker)  # a constructor worker may have been restarted since
        worker.out.append(Rollback(self._recovery.generation, self._current.planner.next_step - 1))
        self._start_done(migration)

    def _start_done(self, migration: Migration) -> None:
        migration.starting -= 1
        if not migration.starting and not self._pool.closed:
            self._hand_over(migration)

    # taking over

    def _hand_over(self, migration: Migration) -> None:
        """Attach followers to the loaders that move, once all new workers have started.

        Loaders move at once if none needs a follower, as those that have a standby.
        """
        self._migration, living, planner = migration, self._pool.living(), self._current.planner
        workers = [h for h in migration.workers if h in living]
        loaders = self._loaders_in(migration)
        where = [self._placement.worker(loader) for loader in loaders]
        if not workers or not living.issuperset(where) or planner.finished is not None:
            self._finish()
            return
        if migration.source is None:
            new_of = migration.replaced
            to: Sequence[int] = [new_of[h] if new_of[h] in workers else h for h in where]
        else:
            to = assign_shards(where, workers, self._others(migration.source))
        migration.moves = {
            loader: h for loader, was, h in zip(loaders, where, to, strict=True) if h != was
        }
        standbys = self._standby.worker_of
        follow = {loader: h for loader, h in migration.moves.items() if loader not in standbys}
        if not follow or not self._recovery.fails_over or planner.holds_over:
            self._switch(migration)
            return
        self._placement.follow(standbys | follow)
        for loader, h in follow.items():
            self._pool.send(h, *self._starts.follow(loader, planner))
        self._commands.run()
        self._platform.thread(
            lambda: self._wait_for_followers(migration, follow), f"overlord scale {migration.what}"
        )

    def _loaders_in(self, migration: Migration) -> list[int]:
        if migration.source is not None:
            return list(self._placement.loaders_of(migration.source))
        return [k for h in migration.replaced for k in self._placement.loaders_on(h)]

    def _wait_for_followers(self, migration: Migration, follow: Mapping[int, int]) -> None:
        """Wait until the new workers hold the requested samples, at most FOLLOW_S; then switch.

        Runs on: a thread of its own.
        """
        deadline = self._platform.now() + FOLLOW_S
        loaders = {
            h: [k for k, to in follow.items() if to == h] for h in sorted(set(follow.values()))
        }
        workers = {h: self._pool.loaders.get(h) for h in loaders}
        asked = {
            h: self._pool.call(worker, "caught_up", loaders[h])
            for h, worker in workers.items()
            if worker is not None
        }
        unable, late = set[int](), set[int]()
        for h, future in asked.items():
            try:
                if not self._pool.get(future, max(0.0, deadline - self._platform.now())):
                    unable.add(h)
            except DataStall:  # it takes its loaders over as it is
                late.add(h)
            except OverlordError:  # the loaders of a lost worker stay
                continue
        self._event_loop.post(lambda: self._switch(migration, unable, late))

    def _switch(
        self, migration: Migration, unable: Set[int] = frozenset(), late: Set[int] = frozenset()
    ) -> None:
        """Move the loaders between two steps: the next step pops samples from the new workers.

        ``unable`` are workers that cannot read their loaders; ``late`` ones have not caught up.
        """
        if self._pool.closed or self._migration is not migration:
            return  # a rollback has completed or cancelled it
        if unable:
            log.warning(
                "%s cannot read %s, which other workers read: loaders not moved there",
                ", ".join(f"loader-worker/{h}" for h in sorted(unable)),
                migration.what,
            )
        every = self._pool.living()
        living, worker = every - unable, self._placement.worker
        self._placement.follow(self._standby.worker_of)
        moves = {
            loader: h
            for loader, h in migration.moves.items()
            if h in living and worker(loader) in living
        }
        if early := late & set(moves.values()):
            log.warning(
                "loaders of %s moved before %s caught up: no answer within %g s",
                migration.what,
                ", ".join(f"loader-worker/{h}" for h in sorted(early)),
                FOLLOW_S,
            )
        for loader, h in migration.moves.items():
            if loader not in moves and h in every:
                self._pool.send(h, DropLoader(loader))
        # kept until the planner restarts the loaders, which may wait for the journal
        self._placement.pending |= moves
        self._finish([worker(loader) for loader in moves])
        for source in sorted({self._placement.source_of(loader) for loader in moves}):
            self._commands.run(self._current.planner.handle(RestartSource(source)))
        self._commands.run()

    def restart(self, command: RestartLoader) -> None:
        """Open a loader on the worker that it moves to, or again on its current worker."""
        loader, was = command.loader, self._placement.worker(command.loader)
        worker = self._placement.pending.pop(loader, was)
        if worker != was:
            self._pool.send(was, DropLoader(loader))
            self._placement.move(loader, worker)
        start = self._starts.of(loader, command.cursor, command.generation)
        # A worker keeps its samples, unless look-ahead passed some over: then held samples were
        # dropped, and the loader reads again.
        afresh = self._current.planner.holds_over or not self._recovery.fails_over
        self._pool.send(worker, start if afresh else TakeOverLoader(command.step, start))
        if self._standby.worker_of.get(loader) == worker:  # it moved to the worker of its standby
            self._standby.drop(loader)
            made = self._standby.fill(self._pool.living(), self._pool.nodes())
            self.follow_from_here([other for other in made if other != loader])
        if loader in self._standby.worker_of:
            self._pool.send(self._standby.worker_of[loader], FollowLoader(start))

    def follow_from_here(self, loaders: Iterable[int]) -> None:
        """Let standbys follow these loaders from the next planned step on."""
        for loader in loaders:
            messages = self._starts.follow(loader, self._current.planner)
            self._pool.send(self._standby.worker_of[loader], *messages)

    def use_as_standby(self, name: str) -> None:
        """Use a restarted worker for new standbys, if its own standbys have replaced it.

        Otherwise do nothing: the worker waits for the rollback, or the rollback has adopted it.
        """
        h = int(name.partition("/")[2])
        reads = self._placement.loaders_on(h) or h in self._standby.workers()
        if name not in self._pool.restarted or reads:
            return
        worker = self._pool.restarted.pop(name)
        self._recovery.adopted(worker)
        self._pool.adopt(worker)
        self._pool.link(worker)
        worker.out.append(Rollback(self._recovery.generation, self._current.planner.next_step - 1))
        made = self._standby.fill(self._pool.living() & {h}, self._pool.nodes())
        self.follow_from_here(made)
        log.warning("%s restarted; standby for %d loaders", name, len(made))
        self._commands.run()

    def settle(self, dead: Sequence[int]) -> None:
        """Complete or cancel moves at a rollback, before loaders are opened again.

        Living workers that follow a loader take it over now; other moves are cancelled.
        """
        migration, pending = self._migration, self._placement.pending
        under_way = migration is not None and not migration.starting
        moves = pending | (migration.moves if migration is not None and under_way else {})
        living, had = self._pool.living() - set(dead), set(moves.values())
        for loader, h in moves.items():
            was = self._placement.worker(loader)
            had.add(was)
            if h in living and was != h:
                self._placement.move(loader, h)
                if was in self._pool.loaders:
                    self._pool.send(was, DropLoader(loader))
                if self._standby.worker_of.get(loader) == h:
                    self._standby.drop(loader)
        self._placement.follow(self._standby.worker_of)
        self._placement.pending = {}
        if migration is None or under_way:
            self._finish(had)

    def _finish(self, workers: Iterable[int] = ()) -> None:
        """End the migration; retire its workers, and those of ``workers``, that read no loader."""
        migration, self._migration = self._migration, None
        self.retire_idle({*workers, *(migration.workers if migration is not None else ())})

    # workers that are not needed

    def retire_idle(self, workers: Iterable[int]) -> None:
        """End those workers that read no loader, once all ranks took the steps planned so far."""
        busy, step = self._placement.busy(), self._current.planner.next_step - 1
        self.retiring |= {h: step for h in workers if h not in busy and h in self._pool.loaders}

    def acked(self) -> None:
        """End retiring workers whose steps every rank has acknowledged."""
        if self._migration is not None:
            return
        living, busy = self._pool.living(), self._placement.busy()
        for h, step in list(self.retiring.items()):
            if h in busy or h not in self._pool.loaders:
                del self.retiring[h]
            elif h in living and self._history.acked >= step and not self._placement.loaders_on(h):
                self._retire(h)

    def _retire(self, h: int) -> None:
        worker = self._pool.loaders.pop(h)
        worker.lost = "not needed"
        self._placement.sources_of.pop(h, None)
        del self.retiring[h]
        self._recovery.retired(worker)
        log.info("%s retired: it reads no source", worker.name)
        if h in self._standby.workers():
            living = self._pool.living()
            self._standby.forget(living)
            self.follow_from_here(self._standby.fill(living, self._pool.nodes()))
            self._commands.run()
        self._pool.retire(h, worker)
