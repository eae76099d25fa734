"""The planner's half of a job that runs in several processes: the same face as ``Host``, the loaders and constructors elsewhere.

The planner core lives here, in the session's pump. Loader hosts and constructor hosts are actors of a control plane; they get one
message list per turn and answer with what happened. Which process does what is never seen in the stream.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from overlord.channel.seal import seal
from overlord.constructor.assembler import BUILD_AHEAD
from overlord.errors import ActorLost, JobError, OverlordError
from overlord.hooks import CONSTRUCTOR, LOADER, of_kind
from overlord.messages import (
    Announce,
    Attach,
    Consumed,
    Cursor,
    Detach,
    Finish,
    Forget,
    Open,
    Opening,
    Refill,
    Reopen,
    Spoiled,
    Stage,
    StreamState,
)  # fmt: skip
from overlord.planner.cut import Cuts, Cutter, Imaging
from overlord.planner.spec import NewSource
from overlord.runtime.asked import Asked, Remote
from overlord.runtime.bootstrap import READ_AHEAD as ALONE
from overlord.runtime.bootstrap import Blueprint, SourceKit
from overlord.runtime.constructorhost import ConstructorHost
from overlord.runtime.control import Control
from overlord.runtime.host import KeptPlans
from overlord.runtime.hostactor import Settings
from overlord.runtime.hosting import Hosting, load_of, plan_hosts
from overlord.runtime.inside import InsideBox
from overlord.runtime.loaderhost import LoaderHost
from overlord.runtime.local import Pump
from overlord.runtime.options import n_cores, ring_bytes
from overlord.runtime.sendable import sendable

log = logging.getLogger("overlord")

READ_AHEAD = 8  # steps, where hosts work side by side: they are not equally fast at every step
START_S = 120.0  # for a host to be there: it opens its sources first, and a store may be slow
CORES_PER_CONSTRUCTOR = 16  # one builds a hundred million tokens a second; with several, loaders must sort payload by host


def hosting_of(blueprint: Blueprint) -> Hosting:
    """Loaders and loader hosts of a job, from what its index says."""
    job, options = blueprint.job, blueprint.options
    weights = [float(s.weight) for s in job.sources]
    if isinstance(job.mixture, Mapping):
        weights = [float(job.mixture.get(s.name, 0.0)) for s in job.sources]
    total = sum(weights) or 1.0
    loads = [
        load_of(s, p, i, w / total, shuffle_chunks=job.shuffle_chunks, slice_rows=job.slice_rows)
        for s, p, i, w in zip(job.sources, blueprint.pipelines, blueprint.indexes, weights, strict=True)
    ]
    return plan_hosts(
        loads, cores=options.hosts or n_cores(), sources_per_host=options.sources_per_host, loaders=options.loaders,
        together=bool(of_kind(job.hooks, LOADER)),
    )  # fmt: skip


class ProcessHost(Asked):
    """A planner, and remote loaders and constructors."""

    def __init__(self, blueprint: Blueprint, state: StreamState | None, control: Control, pump: Pump, generation: int = 0):
        super().__init__(check=blueprint.options.check)
        self.hosting = hosting_of(blueprint)
        blueprint = self.blueprint = blueprint.with_loaders(self.hosting.loaders, READ_AHEAD if self.hosting.n_hosts > 1 else ALONE)
        self.planner = blueprint.planner(state)
        self._control, self._pump, self._number = control, pump, generation
        self._token = secrets.token_urlsafe(24)
        self.plans = KeptPlans()
        self.on_stage: list[Callable[[Stage], None]] = []
        self.on_taken: Callable[[int, int], None] = lambda rank, step: None
        self._settings = Settings(
            name=blueprint.job.name, token=self._token, generation=generation,
            workers=max(1, (blueprint.options.workers or n_cores()) // self.hosting.n_hosts),
            open_files=max(1, blueprint.options.open_files // self.hosting.n_hosts), check=blueprint.options.check,
            open_bytes=max(1, blueprint.options.open_bytes // self.hosting.n_hosts), ring_bytes=ring_bytes(blueprint.options),
            build_ahead=blueprint.options.build_ahead or BUILD_AHEAD, broadcast=blueprint.options.broadcast,
            narrow=not of_kind(blueprint.job.hooks, CONSTRUCTOR),
        )  # fmt: skip
        self._ranks = list(blueprint.job.place.buckets("DP"))
        self._constructor_of = np.arange(len(self._ranks)) % self._n_constructors()
        self._bucket_of = {rank: b for b, ranks in enumerate(self._ranks) for rank in ranks}
        hooks = blueprint.job.hooks
        self._cutter = Cutter(
            self.hosting.host_of, self._constructor_of.tolist(), whole_plans=bool(of_kind(hooks, CONSTRUCTOR)),
            loader_hooks=bool(of_kind(hooks, LOADER)), images=self._imaging(),
        )  # fmt: skip
        self._served = np.zeros(len(self._ranks), np.int64)  # attached ranks of every bucket
        self._attached: set[int] = set()
        self._moves: dict[int, int] = {}  # loader -> the host it is to be opened on
        self._closed = False
        self._loaders: dict[int, Remote] = {}
        self._constructors: dict[int, Remote] = {}
        self._addresses: dict[int, str] = {}
        self._outside: dict[int, str] = {}  # of constructor hosts, for clients in other processes
        self._kits: dict[int, frozenset[int]] = {}  # sources that a loader host can open
        try:
            self._spawn()
        except BaseException:
            self.close()
            raise

    # starting

    def _n_constructors(self) -> int:
        return self.blueprint.options.constructor_hosts or min(len(self._ranks), max(1, n_cores() // CORES_PER_CONSTRUCTOR))

    def _imaging(self) -> Imaging | None:
        job = self.blueprint.job
        return None if self.blueprint.images is None else Imaging(job.batch, job.document_multiple, self._ranks)

    def _start_constructors(self) -> None:
        job, hooks = self.blueprint.job, of_kind(self.blueprint.job.hooks, CONSTRUCTOR)
        for c in range(int(self._constructor_of.max()) + 1):
            buckets = {b: tuple(self._ranks[b]) for b in np.flatnonzero(self._constructor_of == c).tolist()}
            self._constructors[c] = self._start(
                ConstructorHost, c, self._settings, buckets, job.batch, job.document_multiple, hooks, self.blueprint.images,
                name=f"constructor-host/{c}",
            )  # fmt: skip

    def _spawn(self) -> None:
        """Constructor hosts first, since loader hosts connect to them; each kind together."""
        job = self.blueprint.job
        sendable(job.hooks, "hooks")
        self._start_constructors()
        kits = {i: self._kit(i) for i in range(len(job.sources))}
        asked = {c: self._control.call(remote.handle, "address") for c, remote in self._constructors.items()}
        self._addresses = {c: self._control.get(future, START_S) for c, future in asked.items()}
        openings = self._openings(self.planner.state())
        for h in range(self.hosting.n_hosts):
            self._start_loader_host(h, kits, [o for o in openings if self.hosting.host_of[o.loader] == h])
        ready = [self._control.call(remote.handle, "do", []) for remote in self._loaders.values()]
        for future in ready:  # what is wrong with a source is said by launch, not by the first step
            self._control.get(future, START_S)

    def _openings(self, state: StreamState) -> list[Opening]:
        cursors = [Cursor(*c) for c in state.cursors.tolist()]
        return [o for i, cursor in enumerate(cursors) for o in self.blueprint.openings(i, cursor)]

    def _start_loader_host(self, h: int, kits: Mapping[int, SourceKit], openings: Sequence[Opening], *, joined: bool = True) -> None:
        job = self.blueprint.job
        self._kits[h] = frozenset(kits)
        self._loaders[h] = self._start(
            LoaderHost, h, self._settings, kits, openings, self._addresses, of_kind(job.hooks, LOADER), job.seed, name=f"loader-host/{h}",
            joined=joined,
        )  # fmt: skip

    def _start(self, factory: Callable[..., Any], *args: Any, name: str, joined: bool = True) -> Remote:
        remote = Remote(self._control.spawn(factory, *args, name=name), joined=joined)
        self._control.on_death(remote.handle, lambda handle, reason: self._pump.post(lambda: self._lost(remote, reason)))
        self._listen(remote, "events")
        return remote

    def _listen(self, remote: Remote, method: str, *args: Any) -> None:
        def told(future: Future[Any]) -> None:
            if (error := future.exception()) is None:
                self._pump.post(lambda: self._happened(remote, future.result()))
            elif not isinstance(error, ActorLost):
                self._pump.post(lambda: self._lost(remote, f"{type(error).__name__}: {error}"))

        remote.call(self._control, method, *args).add_done_callback(told)

    # what comes in

    def _happened(self, remote: Remote, events: Sequence[Any]) -> None:
        if self._closed:
            return
        remote.asks = True
        self._hear(events)

    def _hear(self, events: Sequence[Any]) -> None:
        for event in events:
            match event:
                case Announce():
                    self._queue.append(event)
                case ("taken", list(ranks), list(steps)):
                    for rank, step in zip(ranks, steps, strict=True):
                        self._took(rank, step)
                case Finish(error=ActorLost(name=name)) if (lost := self._named(name)) is not None:
                    self._ask_how(lost, event)
                case Finish() | Spoiled():
                    self._queue.append(event)
                case _:
                    raise TypeError(f"a host tells of {event!r}")
        self.run()

    def _took(self, rank: int, step: int) -> None:
        if rank in self._attached:
            self.on_taken(rank, step)
            self._queue.append(Consumed(rank, step))

    def _named(self, name: str) -> Remote | None:
        return next((remote for remote in self._processes() if remote.handle.name == name), None)

    def _ask_how(self, lost: Remote, finish: Finish) -> None:
        """A host that died is missed by its peers, who see but the end of a link; how it ended is known to who started it."""

        def heard(future: Future[Any]) -> None:
            error = future.exception()
            told = Finish(finish.step, error) if isinstance(error, ActorLost) else finish
            self._pump.post(lambda: None if self._closed else self.run([told]))

        self._control.call(lost.handle, "do", []).add_done_callback(heard)

    def _lost(self, remote: Remote, reason: str) -> None:
        """A host is gone, and with it what it held: the job ends behind the steps that are complete."""
        if self._closed or remote.lost:
            return
        remote.lost = reason
        if not remote.joined:
            return  # whoever prepares it hears of it
        log.error("%s is lost: %s", remote.handle.name, reason)
        self.run(self.planner.handle(Finish(self.planner.next_step, ActorLost(remote.handle.name, reason))))

    def attach(self, mailboxes: Mapping[int, Any]) -> None:
        """Clients of these ranks exist; their steps reach them from their constructor host."""
        for rank in mailboxes:
            self._attached.add(rank)
            self._served[self._bucket_of[rank]] += 1
            self._constructor(rank).out.append(Attach(rank))
        self.run([command for rank in mailboxes for command in self.planner.handle(Attach(rank))])

    def detach(self, rank: int) -> None:
        if rank in self._attached:
            self._attached.discard(rank)
            self._served[self._bucket_of[rank]] -= 1
            self._constructor(rank).out.append(Detach(rank))
            self.run(self.planner.handle(Detach(rank)))

    def stop(self) -> None:
        for rank in list(self._attached):
            self.detach(rank)

    def consumed(self, ranks: Sequence[int], step: int) -> None:
        """Constructor hosts tell it themselves."""

    def event(self, event: Any) -> None:
        self.run(self.planner.handle(event))

    def _constructor(self, rank: int) -> Remote:
        return self._constructors[int(self._constructor_of[self._bucket_of[rank]])]

    def address_for(self, rank: int) -> tuple[str, str]:
        """Where a rank's steps come from, and the token it takes; a constructor that is lost is said to be."""
        remote = self._constructor(rank)
        if remote.lost:
            raise ActorLost(remote.handle.name, remote.lost)
        c = int(self._constructor_of[self._bucket_of[rank]])
        return self._addresses[c], self._token

    def listen(self, host: str, token: str) -> None:
        """Clients in other processes are expected at this interface, and show the token they were given."""
        asked = {c: self._control.call(remote.handle, "listen", host, token) for c, remote in self._constructors.items()}
        self._outside = {c: self._control.get(future, START_S) for c, future in asked.items()}

    def outside(self, rank: int) -> tuple[str, str]:
        """The same for a client that came by the front door; it knows the token already."""
        self.address_for(rank)
        return self._outside[int(self._constructor_of[self._bucket_of[rank]])], ""

    def inbox(self, rank: int, next_step: int) -> InsideBox:
        """Where a client in this process gets its steps: from the constructor host, as any other."""
        prefetch = self.blueprint.options.prefetch
        return InsideBox(rank, lambda: self.address_for(rank), next_step=next_step, generation=self._number, prefetch=prefetch)

    # sources that join, loaders that move

    def _kit(self, i: int) -> SourceKit:
        return sendable(self.blueprint.kit(i), f"source {self.blueprint.job.sources[i].name!r}")

    def prepare_source(self, blueprint: Blueprint) -> int:
        """A host of its own for a source that joins: code crosses only when a process starts. Returns its number."""
        i, h = len(blueprint.job.sources) - 1, max(self._kits) + 1  # a number is used once: one that was dropped counts as lost
        before, self.blueprint = self.blueprint, blueprint.with_loaders((*self.hosting.loaders, blueprint.loaders_of(i)), READ_AHEAD)
        try:
            self._start_loader_host(h, {i: self._kit(i)}, self.blueprint.openings(i, Cursor()), joined=False)
            self._control.get(self._control.call(self._loaders[h].handle, "do", []), START_S)
        except BaseException:
            self.blueprint = before
            self.drop_prepared(h)
            raise
        return h

    def drop_prepared(self, h: int) -> None:
        if (remote := self._loaders.pop(h, None)) is not None:
            remote.lost = "not needed"
            self._control.kill(remote.handle)

    def add_source(self, new: NewSource, prepared: int, budget_bytes: int, joined: Callable[[], None] = lambda: None) -> None:
        if (host := self._loaders[prepared]).lost:
            raise ActorLost(host.handle.name, host.lost)
        commands = self.planner.handle(new)
        host.joined = True
        n = new.source.loaders
        self._cutter.add_loaders([prepared] * n)
        self.hosting = replace(
            self.hosting, loaders=(*self.hosting.loaders, n), host_of=(*self.hosting.host_of, *[prepared] * n), n_hosts=len(self._loaders)
        )
        for remote in list(self._loaders.values()):
            remote.out.append(("budget", budget_bytes))
        joined()
        self.run(commands)

    def move(self, source: int, hosts: Sequence[str]) -> None:
        """Read a source elsewhere: its k-th loader on ``hosts[k % len(hosts)]``. The stream stays what it is."""
        known = {remote.handle.name: h for h, remote in list(self._loaders.items()) if not remote.lost}
        if unknown := [name for name in hosts if name not in known]:
            raise JobError([f"no loader host is called {name!r}; there are {', '.join(known)}" for name in unknown], "move")
        name = self.blueprint.job.names[source]
        if strangers := [host for host in hosts if source not in self._kits.get(known[host], ())]:
            problem = f"{name!r} joined after {strangers[0]} was started, and code crosses only when a process starts"
            raise JobError([problem], "move")
        if of_kind(self.blueprint.job.hooks, LOADER) and len(set(hosts)) > 1:
            raise JobError([f"a loader hook is shown all that a step takes from {name!r}: its loaders stay on one host"], "move")
        first = sum(self.hosting.loaders[:source])
        self._moves = {first + k: known[hosts[k % len(hosts)]] for k in range(self.hosting.loaders[source])}
        self.run(self.planner.handle(Reopen(source)))

    # carrying out

    def run(self, commands: Sequence[Any] = ()) -> None:
        super().run(commands)
        if not self._running:
            for remote in (*self._constructors.values(), *self._loaders.values()):
                if remote.out or remote.asks:
                    self._say(remote)

    def _say(self, remote: Remote) -> None:
        """All that a turn had for a host in one message; where its next news are to be asked for, in that one too."""
        messages, remote.out = remote.out, []
        asks, remote.asks = remote.asks, False
        if remote.lost:
            return
        if asks:
            self._listen(remote, "turn", messages)
        else:
            remote.tell(self._control, messages)

    def _carry_out(self, command: Any) -> None:
        match command:
            case Refill(loader=loader):
                self._host_of(loader).out.append(command)
            case Announce() | Consumed() | Spoiled():
                self._queue.extend(self.planner.handle(command))
            case Stage():
                self._stage(command)
            case Finish():
                self._finish(command)
            case Forget(loaders=loaders):
                self._cutter.forget(loaders)
                for remote in list(self._loaders.values()):  # a source may be joining, in another thread
                    remote.out.append(command)
            case Open():
                self._open(command)
            case _:
                raise TypeError(f"no one carries out {type(command).__name__}")

    def _host_of(self, loader: int) -> Remote:
        return self._loaders[self._cutter.host(loader)]

    def _stage(self, stage: Stage) -> None:
        assert isinstance(stage.after, StreamState)
        self.plans.keep(stage)
        for watcher in self.on_stage:
            watcher(stage)
        self._send_cuts(self._cutter.cut(stage, seal(stage.after), self._served > 0))

    def _send_cuts(self, cuts: Cuts) -> None:
        for c, placed in cuts.placed.items():
            self._constructors[c].out.append(placed)
        for h, part in cuts.parts.items():
            self._loaders[h].out.append(part)

    def _finish(self, finish: Finish) -> None:
        """Of the planner, or of a host that cannot go on: then the planner hears of it first, and says it again."""
        if self.planner.finished is not finish:
            self._queue.extend(self.planner.handle(finish))
            return
        for remote in self._constructors.values():
            remote.out.append(finish)

    def _open(self, command: Open) -> None:
        loader, host = command.loader, self._moves.pop(command.loader, self._cutter.host(command.loader))
        if host != self._cutter.host(loader):
            self._host_of(loader).out.append(("drop", loader))
            self._cutter.move(loader, host)
        source = int(np.searchsorted(np.cumsum(self.hosting.loaders), loader, side="right"))
        opening = self.blueprint.openings(source, command.cursor)[loader - sum(self.hosting.loaders[:source])]
        self._loaders[host].out.append(replace(opening, generation=command.generation))

    def broke(self, error: Exception) -> None:
        """The pump has stopped for good: constructor hosts tell their clients, who would else wait until they give up."""
        for remote in list(self._constructors.values()):
            if not remote.lost and not self._closed:
                with contextlib.suppress(OverlordError):
                    remote.tell(self._control, [Finish(self.planner.next_step, error)])

    def close(self) -> None:
        self._closed = True
        self._control.shutdown(1.0)

    def check(self) -> None:
        self.planner.check()
