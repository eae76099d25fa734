"""Launch a job for trainers in other processes, and show their progress, for ``overlord serve``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import overlord as ov
from overlord.cli.common import check_writable
from overlord.cli.run_job import PLAIN_EVERY_S, print_resumed, save_state
from overlord.errors import JobError, OverlordError
from overlord.observe.progress_bars import progress_bar
from overlord.observe.rates import RateWindow
from overlord.observe.tables import placement_facts, scaling_facts
from overlord.transport.address import is_loopback

if TYPE_CHECKING:
    from rich.console import Console

    from overlord.job.job import Job
    from overlord.serving.session_server import ServedAddress
    from overlord.session.session import Session

POLL_S = 0.25  # seconds between two progress lines on a terminal
Announce = Callable[[str, str | None], None]  # receives the address, and the token if any
LINGER_S = 10.0  # seconds for trainers to disconnect by themselves after the last step


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """The arguments of ``overlord serve``."""

    job: Job
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    resume: dict[str, Any] | str | None = None
    save: Path | None = None
    allow: tuple[str, ...] = ()
    runtime: str = "local"
    cluster: str | None = None  # host:port of a Ray cluster's head
    start_s: float | None = None  # seconds for a detached job to start
    options: Mapping[str, Any] = field(default_factory=dict)  # further options of ``launch``


def serve_job(wanted: ServeRequest, output: Announce, err: Console) -> int | None:
    """Serve a job; pass the address to ``output`` and print progress to ``err``.

    Return when the job has ended and every client has taken every step, or when all clients have
    disconnected. The value is the number of steps of a job that has ended, else None. Raise the
    error that ended the job. The state is saved in any case if wanted.
    """
    if wanted.save is not None:
        check_writable(wanted.save)
    settings = {"address": wanted.cluster, **wanted.options}
    with progress_bar(err, "indexed files") as indexed:
        launched = ov.launch(
            wanted.job,
            runtime=wanted.runtime,
            resume=wanted.resume,
            allow=wanted.allow,
            progress=indexed,
            **settings,
        )
    with launched as session:
        print_resumed(session, err)
        try:
            served = session.serve(host=wanted.host, port=wanted.port, token=wanted.token)
            _announce(served, wanted, output)
            with _progress(err) as show:
                wait_for_clients(session, show)
            finish = session.internals.runtime.planner.finished
            err.print(
                "all clients have disconnected"
                if finish is None
                else f"the job has ended: {finish.step} steps in all",
                soft_wrap=True,
            )
            with suppress(OverlordError):  # the planner may have exited
                metrics = session.metrics()
                for what, text in scaling_facts(metrics["scaling"]) + placement_facts(
                    metrics["placement"]
                ):
                    err.print(f"{what}: {text}", soft_wrap=True, markup=False)
            return None if finish is None else int(finish.step)
        finally:
            if wanted.save is not None:
                save_state(wanted.save, session)
                err.print(f"state saved: {wanted.save}", soft_wrap=True)


def _announce(served: ServedAddress, wanted: ServeRequest, output: Announce) -> None:
    """Pass address and token to ``output``; a token of the caller is left out.

    The output may be a log.
    """
    output(served.address, served.token if wanted.token is None else None)


def submit_job(wanted: ServeRequest, output: Announce, err: Console) -> None:
    """Submit a job, which keeps running, to a Ray cluster; return when trainers can connect."""
    from overlord.cli.detached_jobs import START_S, submit

    # Ray may place the job on any node, and trainers run on others: loopback cannot serve them.
    host = "" if is_loopback(wanted.host) else wanted.host
    served = submit(
        wanted.job,
        address=wanted.cluster,
        host=host,
        port=wanted.port,
        token=wanted.token,
        resume=wanted.resume,
        allow=wanted.allow,
        start_s=START_S if wanted.start_s is None else wanted.start_s,
        **wanted.options,
    )
    if served.resumed:
        err.print(served.resumed, soft_wrap=True, markup=False)
    _announce(served, wanted, output)


def read_token(path: Path | None) -> str | None:
    """Return the token from a file, or without a file from ``OVERLORD_TOKEN``; None if not set.

    The token is not an argument: the arguments of a process are visible in the list of processes.
    """
    if path is None:
        return os.environ.get("OVERLORD_TOKEN") or None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise JobError(
            [f"token file: expected a readable text file, got {fault}"], str(path)
        ) from fault
    if not token:
        raise JobError(["expected a token, got an empty file; write the token into it"], str(path))
    return token


def wait_for_clients(
    session: Session, show: Callable[[str], None], taken: RateWindow | None = None
) -> None:
    """Wait until every client has taken every step, or all have disconnected, or the job failed.

    ``show`` receives a progress line every ``POLL_S`` seconds. ``taken`` counts the steps that all
    ranks took. Raise the error that ended the job.
    """
    serving = session.internals.remote_ranks
    assert serving is not None
    total, taken = len(serving.ranks), taken or RateWindow()
    while serving.remote_clients and not serving.finished and session.internals.loop.broken is None:
        now = time.monotonic()
        taken.add(now, session.taken)
        show(progress_line(session, total, taken.rate(now)))
        time.sleep(POLL_S)
    finish = session.internals.runtime.planner.finished
    if finish is not None:
        serving.wait_until_left(LINGER_S)
    if finish is not None and finish.error is not None:
        raise finish.error
    if session.internals.loop.broken is not None:
        raise OverlordError(
            f"the event loop of the session stopped: {session.internals.loop.broken}"
        )


def progress_line(session: Session, total: int, steps_per_s: float = 0.0) -> str:
    """Return a line of progress: taken steps, connected clients, and the slowest rank.

    ``total``: number of ranks. ``steps_per_s``: steps that all ranks took, over the last seconds.
    """
    serving = session.internals.remote_ranks
    assert serving is not None
    clients = serving.remote_clients
    connected = sum(client.there for client in clients)
    took = [client.steps for client in clients]
    steps = (
        f"{min(took)} to {max(took)}"
        if took and min(took) != max(took)
        else f"{max(took, default=0)}"
    )
    closed = f", {total - len(clients)} closed" if len(clients) < total else ""
    slowest = min(clients, key=lambda client: (client.position.step, client.rank), default=None)
    waits = ""
    if slowest is not None and slowest.absent:
        waits = f"  waiting for rank {slowest.rank}, {slowest.absent}"
    elif slowest is not None and connected == len(clients):
        waits = (
            f"  next step {slowest.position.step}, longest wait of a trainer "
            f"{max((client.waited_s for client in clients), default=0.0):.1f} s"
        )
    rate = f"  {steps_per_s:.2f} steps/s" if steps_per_s else ""
    return f"steps taken {steps}{rate}  clients {connected}/{len(clients)}{closed}{waits}"


@contextmanager
def _progress(err: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a progress line.

    On a terminal the line is live; elsewhere changed lines are printed at most every 2 s.
    """
    if err.is_terminal:
        with err.status("waiting for clients") as status:
            yield status.update
        return
    last = (0.0, "")

    def show(text: str) -> None:
        nonlocal last
        if text != last[1] and time.monotonic() - last[0] >= PLAIN_EVERY_S:
            last = (time.monotonic(), text)
            err.print(text, soft_wrap=True, markup=False)

    yield show
