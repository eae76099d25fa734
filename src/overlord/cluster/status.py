"""Status queries of a job in several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from overlord.cluster.placement import Placement
from overlord.cluster.recovery import RecoveryManager
from overlord.cluster.worker_pool import WorkerHandle, WorkerPool
from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, DataStall, OverlordError
from overlord.messages.control import Consumed
from overlord.messages.launcher import WorkerRecovered

# ----------------------------------------------------------------------------
# Status queries (metrics, ``waiting_for``) of a job in several processes.
#
# All workers are polled concurrently with one deadline.

ASK_S = 0.6  # for all workers to answer: a client waits one second for the reason of its wait

# metrics by worker; for a worker that did not answer, the reason under ``silent``
Answers = Mapping[str, Mapping[str, Any]]


def recovery_rows(recoveries: Iterable[WorkerRecovered]) -> list[dict[str, Any]]:
    """Return the rows of ``metrics()["recoveries"]``."""
    return [
        {
            "part": r.worker,
            "reason": r.reason,
            "seconds": r.seconds,
            "step": r.step,
            "stand_bys": r.by_standbys,
        }
        for r in recoveries
    ]


class StatusReporter:
    """The status of a job's workers, for metrics and for explanations of waits.

    ``names`` returns the names of the job's sources. Runs on: event loop.
    """

    def __init__(
        self,
        pool: WorkerPool,
        placement: Placement,
        recovery: RecoveryManager,
        platform: Platform,
        names: Callable[[], Sequence[str]],
    ):
        self._pool, self._placement, self._recovery = pool, placement, recovery
        self._platform, self._names = platform, names

    def poll(self) -> Answers:
        """Return the metrics of all workers that are not lost, by name, within ASK_S seconds.

        For a worker that does not answer, the key ``silent`` has the reason.
        """
        asked = {w.name: self._pool.ask(w, "metrics") for w in self._pool.workers() if not w.lost}
        deadline, found = self._platform.now() + ASK_S, dict[str, dict[str, Any]]()
        for name, future in asked.items():
            try:
                found[name] = self._pool.get(future, max(0.0, deadline - self._platform.now()))
            except OverlordError as silent:
                found[name] = {"silent": str(silent)}
        return found

    # what a step waits for

    def constructor_waits_for(self, worker: WorkerHandle, rank: int) -> str:
        """Describe what a rank's next step waits for in its constructor worker; empty: a plan.

        A worker that is lost or does not answer is described as such.
        """
        if worker.lost:
            return self._missing(worker)
        try:
            return str(self._pool.get(self._pool.ask(worker, "waiting_for", rank), ASK_S / 3))
        except (DataStall, ActorLost) as silent:
            silent_s = self._recovery.silent_s(worker)
            what = (
                f"has answered nothing for {silent_s:.0f} s"
                if silent_s >= 1
                else f"did not report its state ({silent})"
            )
            return f"{worker.name}, which {what}"

    def busy(self, answers: Answers) -> list[str]:
        """Describe the work of loader workers, and name those that are lost or do not answer."""
        return [
            words
            for h, worker in list(self._pool.loaders.items())
            for words in self._busy(h, worker, answers.get(worker.name, {}))
        ]

    def _busy(self, h: int, worker: WorkerHandle, answer: Mapping[str, Any]) -> list[str]:
        if worker.lost:
            return [self._missing(worker)]
        if "silent" not in answer:
            return [f"{words} in {worker.name}" for words in answer.get("busy", ())]
        sources = ", ".join(self.sources_on(h)[:5])
        return [f"{worker.name} does not answer; it reads {sources}"]

    def _missing(self, worker: WorkerHandle) -> str:
        restarts = "; it is being restarted" if self._recovery.fails_over else ""
        return f"{worker.name}, which was lost: {worker.lost}{restarts}"

    def sources_on(self, h: int) -> list[str]:
        """Return the names of the sources that a worker reads."""
        return list(dict.fromkeys(self.source_name(k) for k in self._placement.loaders_on(h)))

    def duty_of(self, name: str, acked: int) -> str:
        """Describe the sources of a loader worker, or for another worker the steps taken so far.

        ``acked`` is the last step that all ranks took. Empty for a loader worker without sources.
        """
        kind, _, number = name.partition("/")
        if kind != "loader-worker":
            if acked < 0:
                return "no step was taken by all ranks"
            return f"all ranks took the steps up to {acked}"
        sources = self.sources_on(int(number))
        more = f" and {len(sources) - 5} more" if len(sources) > 5 else ""
        return f"it reads {', '.join(sources[:5])}{more}" if sources else ""

    def acks(self, answers: Answers) -> list[Consumed]:
        """Return the last step that each rank took, from the answers of constructor workers."""
        return [
            Consumed(rank, client["took"])
            for answer in answers.values()
            for rank, client in answer.get("clients", {}).items()
        ]

    def source_name(self, loader: int) -> str:
        return self._names()[self._placement.source_of(loader)]

    # metrics

    def metrics(self, scaling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of loaders, constructors and their workers."""
        answers = self.poll()
        memory: dict[str, int] = {}
        for answer in answers.values():
            for what, n in answer.get("memory", {}).items():
                memory[what] = memory.get(what, 0) + n
        counted = ("links", "sent_bytes", "pss")
        rows = [row | {"pid": f["pid"]} for f in answers.values() for row in f.get("loaders", ())]
        known = {row["loader"]: row for row in rows if not row["shadow"]}
        return {
            "loaders": [
                known.get(loader) or self._unanswered(loader)
                for loader in range(self._placement.n_loaders)
            ],
            "shadows": [row for row in rows if row["shadow"]],
            "constructors": [
                row | {"pid": f["pid"]}
                for f in answers.values()
                for row in f.get("constructors", ())
            ],
            "memory": memory,
            "hosts": [
                self._worker_row(worker, answers.get(worker.name, {}))
                for worker in self._pool.workers()
            ],
            "files": [f["files"] for f in answers.values() if "files" in f],
            "clients": {
                rank: row for f in answers.values() for rank, row in f.get("clients", {}).items()
            },
            "recoveries": recovery_rows(self._recovery.recoveries),
            "scaling": dict(scaling),
            "transfer": {
                name: {what: f[what] for what in counted if what in f}
                for name, f in answers.items()
            },
        }

    def _worker_row(self, worker: WorkerHandle, answer: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "name": worker.name,
            "pid": worker.handle.pid,
            "state": worker.lost or answer.get("silent", "running"),
            "pss": answer.get("pss", 0),
            "node": answer.get("node", ""),
        }

    def _unanswered(self, loader: int) -> dict[str, Any]:
        """Return the row of a loader whose worker is lost or silent, with every column."""
        worker = self._pool.loaders[self._placement.worker(loader)]
        return {
            "loader": loader,
            "source": self.source_name(loader),
            "doing": f"unknown: {worker.name} {worker.lost or 'does not answer'}",
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
            "pid": worker.handle.pid,
        }
