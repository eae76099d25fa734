"""The part of ``ProcessHost`` that changes how many hosts read a source, or replaces hosts by
others on another node.

New hosts start in threads, follow the loaders they are to have until they hold what those hold, and
take over between two steps. A host without loaders is ended once nobody needs what it sent.

Nothing is thrown away by it: loaders that stay, and those that were followed, go on from what they
hold (``Loading.stand``).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from overlord.cluster.source_moves import SCALED, Joining
from overlord.cluster.status import WorkerHandle
from overlord.cluster.supervisor import Retired, WorkerReady
from overlord.errors import JobError, OverlordError
from overlord.job.hooks import LOADER, of_kind
from overlord.messages.control import RestartSource, Rollback
from overlord.scaling.shards import kept, spread

log = logging.getLogger("overlord")

PER_PLANNER = (
    1_000_000  # such numbers that one planner may use up: a job that runs for months scales often
)
FOLLOW_S = 5.0  # for a host to hold what it is to take over; then it takes over as it is
KEPT_CHANGES = 100


@dataclass(slots=True, eq=False)
class Migration:
    """A source on its way to other hosts, or hosts whose loaders go to new ones."""

    what: str  # for people
    hosts: list[int]  # that are to read
    starting: int  # of them, not there yet
    source: int | None = None
    instead: dict[int, int] = field(default_factory=dict)  # hosts that are replaced -> the new ones
    moves: dict[int, int] = field(
        default_factory=dict
    )  # loader -> the host that follows it, and will have it


class Spreading(Joining):
    """In the pump, but for the starting of hosts and the waiting for them. One change at a time:
    the next follows from it.
    """

    def _plan_spreading(self, first: int = SCALED) -> None:
        self._change: Migration | None = None
        self._next_scaled = first
        self._leaving: dict[
            int, int
        ] = {}  # hosts that have no loader any more -> the step behind which nobody needs them

    @property
    def changing(self) -> bool:
        return self._change is not None

    def hosts_of(self, source: int) -> list[int]:
        """Those that read a source."""
        return sorted({self._cutter.host(loader) for loader in self._numbers(source)})

    def _numbers(self, source: int) -> range:
        first = sum(self.hosting.loaders[:source])
        return range(first, first + self.hosting.loaders[source])

    def spread(self, source: int, n: int, on: Sequence[int] = ()) -> bool:
        """Read a source in ``n`` hosts from here on: its own, those of ``on``, idle ones, and new
        ones for the rest. The stream stays.

        Return False where another change is under way, or where it is read so already.
        """
        name, most = self.blueprint.job.names[source], self.hosting.loaders[source]
        if not 1 <= n <= most:
            raise JobError(
                [
                    f"expected 1 to {most} hosts for {name!r}, which has {most} "
                    f"loader{'s' * (most > 1)}, got {n}"
                ],
                "scale",
            )
        if n > 1 and of_kind(self.blueprint.job.hooks, LOADER):
            raise JobError(
                [
                    f"a loader hook is shown all that a step takes from {name!r}: its "
                    "loaders stay on one host"
                ],
                "scale",
            )
        now = self.hosts_of(source)
        if (
            self._change is not None
            or n == len(now)
            or not self._living().issuperset(now)
            or self.planner.finished is not None
        ):
            return False
        if n < len(now):
            self._hand_over(
                Migration(name, kept(now, n, self._others(source), lambda h: h < SCALED), 0, source)
            )
            return True
        hosts = list(
            dict.fromkeys([*now, *(h for h in on if h in self._living()), *self._idle_for(source)])
        )[:n]
        new = [self._next_scaled + k for k in range(n - len(hosts))]
        self._next_scaled += len(new)
        change = self._change = Migration(name, hosts + new, len(new), source)
        for h in new:
            self._kits[h] = frozenset([source])
            self._machine.thread(
                lambda h=h: self._start_scaled(change, h),  # type: ignore[misc]
                f"overlord start loader-host/{h}",
            )
        if not new:
            self._hand_over(change)
        return True

    def relocate(self, hosts: Iterable[int]) -> bool:
        """Replace loader hosts by new ones, which are placed anew, and follow their loaders before
        they take over.

        Returns False where another change is under way, or none of the hosts is there. The stream
        stays.
        """
        old = [h for h in hosts if h in self._living() and self._loaders_on(h)]
        if self._change is not None or not old or self.planner.finished is not None:
            return False
        instead = {h: self._next_scaled + k for k, h in enumerate(old)}
        self._next_scaled += len(old)
        what = f"what {', '.join(f'loader-host/{h}' for h in old)} had"
        change = self._change = Migration(what, list(instead.values()), len(old), instead=instead)
        for was, h in instead.items():
            self._kits[h] = self._kits[was]
            self._machine.thread(
                lambda h=h, was=was: self._start_scaled(change, h, was),  # type: ignore[misc]
                f"overlord start loader-host/{h}",
            )
        return True

    def _others(self, source: int) -> Counter[int]:
        """Loaders of other sources, by host."""
        return Counter(
            self._cutter.host(k)
            for k in range(sum(self.hosting.loaders))
            if k not in self._numbers(source)
        )

    def _idle_for(self, source: int) -> list[int]:
        """Hosts that have nothing to do and can open it."""
        return sorted(
            h for h in self._living() - self._busy_hosts() if source in self._kits.get(h, ())
        )

    # new hosts

    def _start_scaled(self, change: Migration, h: int, instead_of: int | None = None) -> None:
        """Beside the pump."""
        remote: WorkerHandle | None = None
        try:
            linked = dict(self._addresses)
            remote = self._watched(
                self._starter.loader_host(h, self._kits[h], (), linked, instead_of), joined=False
            )
            remote.linked = linked
            remote.node = self._answer(remote, "at")
        except Exception as fault:
            words = f"{type(fault).__name__}: {fault}"
            self._pump.post(lambda: self._not_started(change, h, words, remote))
        else:
            self._pump.post(lambda: self._started(change, h, remote))

    def _not_started(
        self, change: Migration, h: int, reason: str, remote: WorkerHandle | None
    ) -> None:
        """What there is of it ends; a planner that comes later is not to wait for it."""
        if self._closed:
            return
        if remote is not None:
            remote.lost = remote.lost or reason
            self._machine.thread(
                lambda: self._end_remote(h, remote), f"overlord end {remote.handle.name}"
            )
        log.warning(
            "loader-host/%d could not be started: %s; %s is read as before", h, reason, change.what
        )
        self._kits.pop(h, None)
        change.hosts.remove(h)
        self._one_less(change)

    def _started(self, change: Migration, h: int, remote: WorkerHandle) -> None:
        if self._closed or remote.lost:
            self._not_started(change, h, remote.lost or "the job is over", remote)
            return
        self._loaders[h], remote.joined = remote, True
        self._supervisor.handle(WorkerReady(remote.handle.name), self._machine.now())
        self._link_again(remote)  # a constructor host may have been started again since
        remote.out.append(Rollback(self._base, self.planner.next_step - 1))
        self._one_less(change)

    def _one_less(self, change: Migration) -> None:
        change.starting -= 1
        if not change.starting and not self._closed:
            self._hand_over(change)

    # taking over

    def _hand_over(self, change: Migration) -> None:
        """All hosts are there: those that are to have other loaders follow them. A loader that has
        a stand-by anyway is moved as it is.
        """
        self._change, living = change, self._living()
        hosts, loaders = [h for h in change.hosts if h in living], self._loaders_in(change)
        where = [self._cutter.host(loader) for loader in loaders]
        if not hosts or not living.issuperset(where) or self.planner.finished is not None:
            self._over()
            return
        if change.source is None:
            to: Sequence[int] = [new if (new := change.instead[h]) in hosts else h for h in where]
        else:
            to = spread(where, hosts, self._others(change.source))
        change.moves = {
            loader: h for loader, was, h in zip(loaders, where, to, strict=True) if h != was
        }
        follow = {
            loader: h for loader, h in change.moves.items() if loader not in self._shadows.where
        }
        if not follow or not self.fails_over or self.planner.holds_over:
            self._switch(change)
            return
        self._cutter.follow(self._shadows.where | follow)
        for loader, h in follow.items():
            self._loaders[h].out += self._following(loader)
        self.run()
        self._machine.thread(lambda: self._await(change, follow), f"overlord scale {change.what}")

    def _loaders_in(self, change: Migration) -> list[int]:
        if change.source is not None:
            return list(self._numbers(change.source))
        return [loader for h in change.instead for loader in self._loaders_on(h)]

    def _await(self, change: Migration, follow: Mapping[int, int]) -> None:
        """Beside the pump: until who follows holds enough, or long enough."""
        deadline = self._machine.now() + FOLLOW_S
        loaders = {
            h: [k for k, to in follow.items() if to == h] for h in sorted(set(follow.values()))
        }
        remotes = {h: self._loaders.get(h) for h in loaders}
        asked = {
            h: r.call(self._control, "caught_up", loaders[h])
            for h, r in remotes.items()
            if r is not None
        }
        blind = set[int]()
        for h, future in asked.items():
            try:
                if not self._control.get(future, max(0.0, deadline - self._machine.now())):
                    blind.add(h)
            except OverlordError:
                # it is late, or lost: then its loaders stay where they are, or are opened again
                continue
        self._pump.post(lambda: self._switch(change, blind))

    def _switch(self, change: Migration, blind: Set[int] = frozenset()) -> None:
        """Between two steps: all that the next one takes comes from where the loaders are then.
        ``blind``: hosts that cannot read it.
        """
        if self._closed or self._change is not change:
            return  # planning went back meanwhile, and took them along
        if blind:
            hosts = ", ".join(f"loader-host/{h}" for h in sorted(blind))
            log.warning(
                "%s cannot read %s, though others can; what was to go there stays where it is",
                hosts,
                change.what,
            )
        living = self._living() - blind
        self._cutter.follow(self._shadows.where)
        moves = {
            loader: h
            for loader, h in change.moves.items()
            if h in living and self._cutter.host(loader) in living
        }
        for loader, h in change.moves.items():
            if loader not in moves and h in self._living():
                self._loaders[h].out.append(("drop", loader))
        self._moves |= (
            moves  # until the planner's word goes its way, which may wait for the journal
        )
        self._over([self._cutter.host(loader) for loader in moves])
        for source in sorted({self._source(loader) for loader in moves}):
            self.run(self.planner.handle(RestartSource(source)))
        self.run()

    def _settle_change(self, dead: Sequence[int]) -> None:
        """Planning goes back, and every loader is told where it stands: those who follow take over
        now, or never.
        """
        change = self._change
        moves = self._moves | (change.moves if change is not None and not change.starting else {})
        living, had = self._living() - set(dead), set(moves.values())
        for loader, h in moves.items():
            was = self._cutter.host(loader)
            had.add(was)
            if h in living and was != h:
                self._cutter.move(loader, h)
                if was in self._loaders:
                    self._loaders[was].out.append(("drop", loader))
                if self._shadows.where.get(loader) == h:
                    self._shadows.drop(loader)
        self._cutter.follow(self._shadows.where)
        self._moves = {}
        if change is None or not change.starting:
            self._over(had)

    def _over(self, hosts: Iterable[int] = ()) -> None:
        """``hosts``: those that had some of its loaders, or were to have some."""
        change, self._change = self._change, None
        self._leave_idle({*hosts, *(change.hosts if change is not None else ())})

    # hosts that are not needed

    def _leave_idle(self, hosts: Iterable[int]) -> None:
        """Those of them that are left without a loader are ended, once all ranks have the steps
        that they sent payload for.
        """
        busy = self._busy_hosts()
        self._leaving |= {
            h: self.planner.next_step - 1 for h in hosts if h not in busy and h in self._loaders
        }

    def _busy_hosts(self) -> set[int]:
        """Those that have a loader, or are about to."""
        return {self._moves.get(k, self._cutter.host(k)) for k in range(sum(self.hosting.loaders))}

    def _end_idle(self) -> None:
        """When a step was taken."""
        if not self._leaving or self._change is not None:
            return
        living, busy = self._living(), self._busy_hosts()
        for h, step in list(self._leaving.items()):
            if h in busy or h not in self._loaders:
                del self._leaving[h]
            elif h in living and self.past.acked >= step and not self._loaders_on(h):
                self._end_host(h)

    def _end_host(self, h: int) -> None:
        remote = self._loaders.pop(h)
        remote.lost = "not needed"
        self._kits.pop(h, None)
        del self._leaving[h]
        self._supervisor.handle(Retired(remote.handle.name), self._machine.now())
        log.info("%s has nothing to read any more, and ends", remote.handle.name)
        if h in self._shadows.where.values():
            self._shadows.forget(self._living())
            self._follow_from_here(self._fill_shadows())
            self.run()
        self._machine.thread(
            lambda: self._end_remote(h, remote), f"overlord end {remote.handle.name}"
        )

    def _end_remote(self, h: int, remote: WorkerHandle) -> None:
        """Beside the pump."""
        try:
            self._starter.end(h, remote.handle)
        except OverlordError as fault:  # it waits for a disk, perhaps
            log.warning("%s: %s", remote.handle.name, fault)
