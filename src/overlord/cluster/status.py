"""What people ask of a job in several processes: its hosts are asked in turn, all at once, and none
is waited for long.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from overlord.cluster.plan_router import PlanRouter
from overlord.cluster.supervisor import Supervisor
from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, DataStall, JobError, OverlordError
from overlord.journal.write_ahead import WriteAhead
from overlord.messages.control import Consumed
from overlord.planning.planner import Planner
from overlord.rpc.actors import ActorHandle, ActorSystem
from overlord.scaling.loader_placement import LoaderPlacement
from overlord.setup.prepared_job import PreparedJob

ASK_S = 0.6  # for all hosts to say what they do: whoever asks why it waits gives the pump a second


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """A host in another process, and what it is to be told at the end of the turn."""

    handle: ActorHandle
    out: list[Any] = field(default_factory=list)
    lost: str = ""
    joined: bool = True  # else the job does not need it yet
    asks: bool = False  # its last news were heard; at the end of the turn it is asked for the next
    incarnation: int = 0  # how often it was started again
    beat: Future[Any] | None = None  # whether it lives, asked
    question: Future[Any] | None = None  # the last that people asked of it
    # of a constructor host that was started again, for loader hosts and clients of this process
    address: str = ""
    outside: str = ""  # and for those of others
    node: str = ""  # of a cluster, on which a loader host is: they may be lost together
    linked: dict[int, str] = field(
        default_factory=dict
    )  # loader hosts: where they find which constructor host

    def tell(self, control: ActorSystem, messages: list[Any]) -> None:
        control.tell(self.handle, "do", messages)

    def call(self, control: ActorSystem, method: str, *args: Any) -> Future[Any]:
        return control.call(self.handle, method, *args)

    def ask(self, control: ActorSystem, method: str, *args: Any) -> Future[Any]:
        """For people: one that has not answered yet is not asked again."""
        if self.question is None or self.question.done():
            self.question = self.call(control, method, *args)
            return self.question
        silent = Future[Any]()
        silent.set_exception(DataStall(f"{self.handle.name} to answer", 0.0))
        return silent


class Asked(WriteAhead):
    """The half of ``ProcessHost`` that only looks. In the pump."""

    planner: Planner
    blueprint: PreparedJob
    hosting: LoaderPlacement
    _cutter: PlanRouter
    _control: ActorSystem
    _machine: Platform
    _loaders: dict[int, WorkerHandle]
    _constructors: dict[int, WorkerHandle]
    _attached: set[int]
    fails_over: bool
    recoveries: list[dict[str, Any]]
    _supervisor: Supervisor

    def _constructor(self, rank: int) -> WorkerHandle:
        raise NotImplementedError

    def _count(self, taken: list[Consumed]) -> None:
        raise NotImplementedError

    def waiting_for(self, rank: int) -> str:
        remote = self._constructor(rank)
        if remote.lost:
            return self._missed(remote)
        try:
            words = self._control.get(remote.ask(self._control, "why", rank), ASK_S / 3)
        except (DataStall, ActorLost) as silent:
            return self._silent(remote, silent)
        if words or (words := self._writing()):
            return str(words)
        every = self._asked()
        busy = [
            words
            for h, r in list(self._loaders.items())
            for words in self._busy(h, r, every.get(r.handle.name, {}))
        ]
        # Constructors tell only when their slowest rank moves on; who that is must be known here.
        taken = [
            Consumed(rank, c["took"])
            for f in every.values()
            for rank, c in f.get("clients", {}).items()
            if rank in self._attached
        ]
        self._count(taken)
        self.run()
        return self.planner.waiting_for() + (f" ({'; '.join(busy[:3])})" if busy else "")

    def _silent(self, remote: WorkerHandle, silent: Exception) -> str:
        """Of a host that says nothing: for how long, where that is known by its heartbeats."""
        name = remote.handle.name
        for_s = self._supervisor.silent_s(name, self._machine.now()) if self.fails_over else 0.0
        what = (
            f"has answered nothing for {for_s:.0f} s"
            if for_s >= 1
            else f"does not say what it does ({silent})"
        )
        return f"{name}, which {what}"

    def _missed(self, remote: WorkerHandle) -> str:
        return f"{remote.handle.name}, which is lost: {remote.lost}" + (
            " and is being started again" if self.fails_over else ""
        )

    def _busy(self, h: int, remote: WorkerHandle, figures: Mapping[str, Any]) -> list[str]:
        """What a loader host does, in words; of one that does not answer, what it may be busy
        with.
        """
        if remote.lost:
            return [self._missed(remote)]
        if "silent" not in figures:
            return [f"{words} in {remote.handle.name}" for words in figures.get("busy", ())]
        sources = dict.fromkeys(
            self._source_of(k)
            for k in range(sum(self.hosting.loaders))
            if self._cutter.host(k) == h
        )
        return [f"{remote.handle.name} does not answer; it reads {', '.join(list(sources)[:5])}"]

    def _source_of(self, loader: int) -> str:
        return self.blueprint.job.names[
            int(np.searchsorted(np.cumsum(self.hosting.loaders), loader, side="right"))
        ]

    def _asked(self) -> dict[str, dict[str, Any]]:
        """Figures of all hosts by name; of a host that does not answer in time, why."""
        asked = {
            r.handle.name: r.ask(self._control, "figures") for r in self._remotes() if not r.lost
        }
        deadline, found = self._machine.now() + ASK_S, {}
        for name, future in asked.items():
            try:
                found[name] = self._control.get(future, max(0.0, deadline - self._machine.now()))
            except OverlordError as silent:
                found[name] = {"silent": str(silent)}
        return found

    def _remotes(self) -> list[WorkerHandle]:
        return [*list(self._loaders.values()), *self._constructors.values()]

    def figures(self) -> dict[str, Any]:
        """What loaders, constructors and their hosts do and hold."""
        every = self._asked()
        memory: dict[str, int] = {}
        for figures in every.values():
            for what, n in figures.get("memory", {}).items():
                memory[what] = memory.get(what, 0) + n
        hosts = [
            {
                "name": r.handle.name,
                "pid": r.handle.pid,
                "state": r.lost or every.get(r.handle.name, {}).get("silent", "running"),
                "pss": every.get(r.handle.name, {}).get("pss", 0),
                "node": every.get(r.handle.name, {}).get("node", ""),
            }
            for r in self._remotes()
        ]
        counted = ("links", "sent_bytes", "pss")
        rows = [row | {"pid": f["pid"]} for f in every.values() for row in f.get("loaders", ())]
        told = {row["loader"]: row for row in rows if not row["shadow"]}
        return {
            "loaders": [
                told.get(loader) or self._untold(loader)
                for loader in range(sum(self.hosting.loaders))
            ],
            "shadows": [row for row in rows if row["shadow"]],
            "constructors": [
                row | {"pid": f["pid"]} for f in every.values() for row in f.get("constructors", ())
            ],
            "memory": memory,
            "hosts": hosts,
            "files": [f["files"] for f in every.values() if "files" in f],
            "clients": {
                rank: row for f in every.values() for rank, row in f.get("clients", {}).items()
            },
            "recoveries": list(self.recoveries),
            "scaling": self._scaling_figures(),
            "transfer": {
                name: {what: f[what] for what in counted if what in f} for name, f in every.items()
            },
        }

    def _scaling_figures(self) -> dict[str, Any]:
        raise NotImplementedError

    def _untold(self, loader: int) -> dict[str, Any]:
        """The row of a loader whose host does not answer, or is lost: nothing may be missing in
        what people count through.
        """
        host = self._loaders[self._cutter.host(loader)]
        return {
            "loader": loader,
            "source": self._source_of(loader),
            "doing": f"unknown: {host.handle.name} {host.lost or 'does not answer'}",
            "ready": 0,
            "ready_bytes": 0,
            "kept_bytes": 0,
            "window_bytes": 0,
            "open_bytes": 0,
            "shadow": False,
            "read_s": 0.0,
            "transform_s": 0.0,
            "of_samples_s": (0.0, 0.0),
            "core_s": 0.0,
            "samples": 0,
            "tokens": 0,
            "store": None,
            "storage": None,
            "images": None,
            "worker_pss": 0,
            "worker": False,
            "worker_pid": None,
            "pid": host.handle.pid,
        }

    def kill(self, name: str) -> None:
        """For drills: the real thing."""
        every = {r.handle.name: r for r in self._remotes()}
        if name not in every:
            raise JobError(
                [f"no process of this job is called {name!r}; there are {', '.join(every)}"], "kill"
            )
        self._control.kill(every[name].handle)
