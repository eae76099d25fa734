"""Recovery time after a worker is killed or a node is removed, in processes and on Ray.

    python benchmarks/recovery.py [--times 5] [--runtimes process,ray,nodes] [--save]

It takes about two minutes on two idle cores. A trainer of two ranks takes a step every 20 ms from a
small job with a journal: two loader workers, a constructor worker and a planner process. A worker
of each kind is killed with SIGKILL, in turn, each after the one before has recovered. ``nodes``
runs the job on a cluster of two nodes and a head, by Ray's cluster utility with the health checks
of docs/ray.md. It removes the node of a worker and adds another. It needs Linux, and Ray except for
``process``.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import secrets
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import click

import overlord as ov
from page import command_line, machine, markdown_table, save, shown_table, wide_console

PARTS = ("loader-worker/0", "constructor-worker/0", "planner")
APART: dict[str, Any] = {"hosts": 2, "sources_per_host": 2, "constructor_hosts": 1}
PACE_S = 0.02
LIMIT_S = 60.0  # for a worker to recover
HEAD = ("where", "lost", "times", "told s", "worst", "back s", "worst", "longest wait s", "worst")
CHECKS = {  # of docs/ray.md
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(slots=True)
class Losses:
    """One worker that was killed several times.

    Seconds from the kill until the session detected it and until all steps were replanned, and the
    wait of a rank.
    """

    where: str
    part: str
    told: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    def row(self) -> list[str]:
        cells = [
            f(values)
            for values in (self.told, self.back, self.waited)
            for f in (statistics.median, max)
        ]
        return [
            self.where,
            self.part,
            str(len(self.back)),
            *(f"{seconds:.2f}" for seconds in cells),
        ]


def small_job(journal: str) -> ov.Job:
    def rows(n: int, base: int) -> list[dict[str, Any]]:
        return [{"tokens": [base + k] * (1 + (7 * k) % 97)} for k in range(n)]

    sources = [
        ov.Source.from_dataset(
            name, rows(400, 1000 * i), transforms=[ov.Tokens("tokens")], epochs=None
        )
        for i, name in enumerate("abcd")
    ]
    batch = ov.Batch(samples=32, context=256, microbatches=2)
    return ov.Job(
        name="recovery",
        sources=sources,
        batch=batch,
        place=ov.ClientPlaceTree(dp=2),
        seed=7,
        journal=journal,
    )


class Trainer:
    """Takes steps of all ranks at a fixed rate, in a thread, and records the longest wait."""

    def __init__(self, session: ov.Session):
        self._clients = [session.client(rank) for rank in range(2)]
        self._stop, self._longest, self.fault = threading.Event(), 0.0, ""
        self._since: float | None = None
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        try:
            while not self._stop.wait(PACE_S):
                for client in self._clients:
                    self._since = time.monotonic()
                    next(client)
                    self._longest, self._since = (
                        max(self._longest, time.monotonic() - self._since),
                        None,
                    )
        except Exception as fault:  # the thread that waits for a step raises it
            self.fault = str(fault)

    def longest(self) -> float:
        found, self._longest = self._longest, 0.0
        return found

    def close(self) -> None:
        self._stop.set()
        self._thread.join(LIMIT_S)


def until(what: str, found: Callable[[], Any], trainer: Trainer) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (answer := found()):
        if time.monotonic() > deadline or trainer.fault:
            raise SystemExit(f"{what}: not within {LIMIT_S:.0f} s. {trainer.fault}")
        time.sleep(0.005)
    return answer


def launcher_of(session: ov.Session) -> Any:
    """Return the launcher of a session whose coordinator has its own process."""
    return session.internals.runtime._parts  # type: ignore[union-attr]


def parts_of(session: ov.Session) -> dict[str, dict[str, Any]]:
    return {a["name"]: a for a in session.metrics()["actors"] if a["role"] in ("host", "planner")}


def lose(session: ov.Session, trainer: Trainer, found: Losses, strike: Callable[[], None]) -> None:
    """Kill a worker and wait until it has recovered and the metrics list the recovery."""
    known = len(session.metrics()["recoveries"])
    planner = found.part == "planner"
    trainer.longest()
    start = time.monotonic()
    strike()
    if planner:  # while there is none nobody is asked: its absence is what is told
        until("the planner to be missed", lambda: launcher_of(session).absent, trainer)
    else:
        handle = launcher_of(session).workers.handles[found.part]
        until(f"{found.part} to be missed", lambda: not handle.alive, trainer)
    found.told.append(time.monotonic() - start)
    until(
        f"{found.part} to be back",
        lambda: found.part in [r["part"] for r in session.metrics()["recoveries"][known:]],
        trainer,
    )
    found.back.append(time.monotonic() - start)
    time.sleep(5 * PACE_S)
    found.waited.append(trainer.longest())


def kill_parts(runtime: str, times: int) -> list[Losses]:
    found = [Losses(runtime, part) for part in PARTS]
    with (
        tempfile.TemporaryDirectory() as folder,
        ov.launch(small_job(f"{folder}/journal"), runtime=runtime, **APART) as session,
    ):
        trainer = Trainer(session)
        time.sleep(1.0)
        for _ in range(times):
            for losses in found:
                pid = parts_of(session)[losses.part]["pid"]
                lose(session, trainer, losses, lambda pid=pid: os.kill(pid, signal.SIGKILL))  # type: ignore[misc]
        trainer.close()
    return found


@contextlib.contextmanager
def nodes() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "object_store_memory": 80 * 2**20,
            "include_dashboard": False,
        },
    )
    try:
        yield cluster
    finally:
        cluster.shutdown()


def remove_nodes(times: int) -> list[Losses]:
    """Remove a node with a loader worker and without the planner; return the recovery times.

    Its workers restart on the other node.
    """
    from overlord.ray.cluster import CLUSTER

    found = Losses("ray, two nodes", "a node")
    with nodes() as cluster, tempfile.TemporaryDirectory() as folder:
        names = (f"node-{i}" for i in itertools.count())
        there = {
            name: cluster.add_node(node_name=name, num_cpus=4, object_store_memory=80 * 2**20)
            for name in itertools.islice(names, 2)
        }
        for k in range(times):  # one job each: restarted workers stay where they are
            with ov.launch(
                small_job(f"{folder}/journal{k}"), runtime="ray", address=cluster.address, **APART
            ) as session:
                trainer = Trainer(session)
                time.sleep(1.0)
                parts = parts_of(session)
                hit = next(
                    name
                    for name, a in parts.items()
                    if name != "planner" and a["node"] != parts["planner"].get("node")
                )
                node = there.pop(
                    next(n.name for n in CLUSTER.nodes() if n.id == parts[hit]["node"])
                )
                losses = Losses(found.where, hit, found.told, found.back, found.waited)
                lose(
                    session,
                    trainer,
                    losses,
                    lambda node=node: cluster.remove_node(node, allow_graceful=False),
                )  # type: ignore[misc]
                trainer.close()
            name = next(names)
            there[name] = cluster.add_node(
                node_name=name, num_cpus=4, object_store_memory=80 * 2**20
            )
    return [found]


def page(found: list[Losses], today: str, command: str) -> str:
    notes = (
        "*told*: from the kill until the session knew that the part is gone; *back*: "
        "until it was there again and all that had to be "
        "planned again was; *longest wait*: of a rank for a step, meanwhile. Medians and "
        "worst of so many times."
    )
    return (
        "\n\n".join(
            [
                f"# Back after a loss, {today}",
                machine(),
                f"    {command}",
                markdown_table(HEAD, [f.row() for f in found]),
                notes,
            ]
        )
        + "\n"
    )


@click.command(help=__doc__.split("\n")[0])
@click.option(
    "--times",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="How often each is lost; nodes: at most three times.",
)
@click.option("--runtimes", default="process,ray,nodes", show_default=True)
@click.option(
    "--save", "saving", is_flag=True, help="Writes the page, dated, to benchmarks/results."
)
def main(times: int, runtimes: str, saving: bool) -> None:
    import logging

    logging.getLogger("overlord").setLevel(
        logging.ERROR
    )  # each loss and each way back is a warning
    os.environ.update(
        CHECKS | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    )  # before Ray is imported: both clusters have one token
    found: list[Losses] = []
    for runtime in runtimes.split(","):
        found += remove_nodes(min(3, times)) if runtime == "nodes" else kill_parts(runtime, times)
    wide_console().print(shown_table("", HEAD, [f.row() for f in found]))
    if saving:
        today = datetime.date.today().isoformat()
        text = page(found, today, command_line("benchmarks/recovery.py"))
        wide_console().print(f"saved {save(f'{today}-recovery', text, {})}")


if __name__ == "__main__":
    main()
