"""What ``overlord serve`` does: launches a job for trainers in other processes, and tells how they
get on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import overlord as ov
from overlord.cli.run import PLAIN_EVERY_S, of_this_machine, save_state, say_resumed
from overlord.errors import JobError, OverlordError
from overlord.observe.tables import placement_facts, scaling_facts
from overlord.transport.address import is_loopback

if TYPE_CHECKING:
    from rich.console import Console

    from overlord.job.job import Job
    from overlord.session.session import Session

LOOK_S = 0.25  # between looks
LINGER_S = 10.0  # for trainers to leave by themselves, once they have had everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """What was asked for on the command line."""

    job: Job
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    resume: dict[str, Any] | str | None = None
    save: Path | None = None
    allow: tuple[str, ...] = ()
    runtime: str = "local"
    cluster: str | None = None  # host:port of a Ray cluster's head
    start_s: float | None = None  # for a job that is to live by itself to begin
    options: Mapping[str, Any] = field(default_factory=dict)  # others of ``launch``


def serve_job(wanted: Serve, say: Callable[[str], None], err: Console) -> None:
    """The address goes to ``say``, what is going on to ``err``. Returns when the job has ended and
    everyone took everything, or when all have left; raises what the job ended with.
    """
    if wanted.save is not None:
        of_this_machine(wanted.save)
    if (
        wanted.save is not None and not wanted.save.absolute().parent.is_dir()
    ):  # before the run, not after it
        raise JobError(
            [f"cannot be written: {wanted.save.absolute().parent} is no folder"], str(wanted.save)
        )
    settings = {"address": wanted.cluster, **wanted.options}
    with ov.launch(
        wanted.job, runtime=wanted.runtime, resume=wanted.resume, allow=wanted.allow, **settings
    ) as session:
        say_resumed(session, err)
        try:
            served = session.serve(host=wanted.host, port=wanted.port, token=wanted.token)
            # One who gave the token has it; it need not stand in a log.
            say(str(served) if wanted.token is None else f"OVERLORD_ADDRESS={served.address}")
            with _showing(err) as show:
                attend(session, show)
            finish = session.internals.runtime.planner.finished
            err.print(
                "all clients have left"
                if finish is None
                else f"the job has ended: {finish.step} steps in all",
                soft_wrap=True,
            )
            with suppress(OverlordError):  # a planner that is gone says nothing any more
                metrics = session.metrics()
                for what, words in scaling_facts(metrics["scaling"]) + placement_facts(
                    metrics["placement"]
                ):
                    err.print(f"{what}: {words}", soft_wrap=True, markup=False)
        finally:
            if wanted.save is not None:
                save_state(wanted.save, session)
                err.print(f"state saved: {wanted.save}", soft_wrap=True)


def submit_job(wanted: Serve, say: Callable[[str], None], err: Console) -> None:
    """The same on a cluster, which has the job from here on."""
    from overlord.cli.detached_jobs import START_S, submit

    host = (
        "" if is_loopback(wanted.host) else wanted.host
    )  # it may come to any node, and trainers to others
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
    say(str(served) if wanted.token is None else f"OVERLORD_ADDRESS={served.address}")


def read_token(path: Path | None) -> str | None:
    """From a file, or from the environment: on the command line it would show in the list of
    processes.
    """
    if path is None:
        return os.environ.get("OVERLORD_TOKEN") or None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise JobError([f"cannot be read: {fault}"], str(path)) from fault
    if not token:
        raise JobError(["holds no token"], str(path))
    return token


def attend(session: Session, show: Callable[[str], None]) -> None:
    """Until nobody needs the session any more."""
    serving = session.internals.remote_ranks
    assert serving is not None
    total = len(serving.ranks)
    while serving.remote_clients and not serving.finished and session.internals.loop.broken is None:
        show(in_a_line(session, total))
        time.sleep(LOOK_S)
    finish = session.internals.runtime.planner.finished
    if finish is not None:
        serving.wait_until_left(LINGER_S)
    if finish is not None and finish.error is not None:
        raise finish.error
    if session.internals.loop.broken is not None:
        raise OverlordError(f"the session stopped: {session.internals.loop.broken}")


def in_a_line(session: Session, total: int) -> str:
    """Steps, who is there, and who is waited for."""
    serving = session.internals.remote_ranks
    assert serving is not None
    seats = serving.remote_clients
    there = sum(seat.there for seat in seats)
    took = [seat.steps for seat in seats]
    steps = (
        f"{min(took)} to {max(took)}"
        if took and min(took) != max(took)
        else f"{max(took, default=0)}"
    )
    left = f", {total - len(seats)} left" if len(seats) < total else ""
    slowest = min(seats, key=lambda seat: (seat.position.step, seat.rank), default=None)
    words = ""
    if slowest is not None and slowest.absent:
        words = f"  waiting for rank {slowest.rank}, {slowest.absent}"
    elif slowest is not None and there == len(seats):
        words = (
            f"  next step {slowest.position.step}, trainers waited "
            f"{max((s.waited_s for s in seats), default=0.0):.1f} s at most"
        )
    return f"steps taken {steps}  clients {there}/{len(seats)}{left}{words}"


@contextmanager
def _showing(err: Console) -> Iterator[Callable[[str], None]]:
    """A live line on a terminal, now and then a plain one elsewhere."""
    if err.is_terminal:
        with err.status("waiting for clients") as status:
            yield status.update
        return
    last = (0.0, "")

    def tell(words: str) -> None:
        nonlocal last
        if words != last[1] and time.monotonic() - last[0] >= PLAIN_EVERY_S:
            last = (time.monotonic(), words)
            err.print(words, soft_wrap=True, markup=False)

    yield tell
