"""A job with a journal whose process dies where it is told to: for tests that kill it at every
write, and look at what is left.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import overlord as ov
from overlord.cluster import launcher
from overlord.journal import job_journal
from overlord.journal.checkpoint import Interval
from overlord.journal.directory import DirectoryStorage
from overlord.journal.job_journal import entries
from overlord.journal.log import read_all
from overlord.journal.replay import Recovered
from tests.corpus import write_rows
from tests.processes import WAIT_S, until

STEPS = 9
SAY, AT = (
    2,
    6,
)  # when so many steps were taken, the mixture is changed from that step on; and one is skipped
SKIPPED = 7
MOMENTS = (
    "before",
    "torn",
    "after",
)  # what was written and not synced outlives a process as what was


class Learner:
    """A schedule with a memory: what was reported must reach it, once."""

    def __init__(self) -> None:
        self.seen = {"a": 1.0, "b": 1.0}

    def __call__(self, step: int, feedback: Any) -> dict[str, float]:
        for name in self.seen:
            self.seen[name] = self.seen[name] / 2 + feedback.get(f"loss/{name}", 0.5)
        return dict(self.seen)

    def __repr__(self) -> str:
        return "Learner()"

    def state_dict(self) -> dict[str, Any]:
        return {"seen": dict(self.seen)}

    def load_state_dict(self, state: Any) -> None:
        self.seen = dict(state["seen"])


def job(directory: Path, journal: str | None, **changes: Any) -> ov.Job:
    sources = []
    for i, name in enumerate("ab"):
        if not (directory / name).exists():
            rows = [{"tokens": [(7 * k + i) % 97] * (1 + (k * (3 + i)) % 20)} for k in range(150)]
            write_rows(directory / name, "parquet", rows, row_group_size=20)
        sources.append(
            ov.Source(
                name,
                str(directory / name / "*.parquet"),
                transforms=[ov.Tokens("tokens")],
                weight=1.0 + i,
            )
        )
    given = {
        "sources": sources,
        "mixture": Learner(),
        "feedback_lag": 4,
        "batch": ov.Batch(samples=8, context=64),
        "seed": 3,
    }
    return ov.Job(
        name="journaled", journal=journal, until=STEPS, slice_rows=16, **{**given, **changes}
    )


def told(rank: int, step: int) -> dict[str, float]:
    """What a trainer reports of a step: the same every time it is asked."""
    x = (step * 2654435761 + rank) % 1000
    return {"loss/a": x / 500, "loss/b": (999 - x) / 400}


def digest(step: ov.Step) -> str:
    found = hashlib.sha256(step.plan_digest.encode())
    for mb in step:
        for key in sorted(mb):
            found.update(mb[key].tobytes())
    return found.hexdigest()


def train(made: ov.Job, note: Callable[[list[Any]], Any], **options: Any) -> None:
    """All steps that come; ``note`` is told of each when the trainer has it, and of what was said
    and acknowledged. ``then``: done before the session is left.
    """
    said, then = options.pop("said", False), options.pop("then", lambda session: None)
    with ov.launch(made, prefetch=2, stall_limit_s=WAIT_S, **options) as session:
        client = session.client(0)
        first = session.internals.generation.start.step
        for step in range(
            max(0, first - 2), first
        ):  # what the journal may not have: a report is written with the next plan
            client.report(step, told(0, step))
        note(["begins", first, session.resumed and session.resumed.why])
        for step in client:
            note(["step", step.step, digest(step)])
            client.report(step.step, told(0, step.step))
            if step.step + 1 == SAY or (not said and SAY < step.step + 1 <= SAY + 2):
                session.set_mixture({"a": 5.0, "b": 1.0}, at=AT)
                session.skip([SKIPPED])
                said = True
                note(["said"])
        then(session)
    note(["ends"])


# dying


def die_at(number: int, moment: str) -> None:
    """In this process: at that write of the journal, counted from 0, or where it removes
    segments.
    """
    left = [number]

    def how() -> str:
        left[0] -= 1
        return moment if left[0] < 0 else "whole"

    _die_by(how)


def _die_by(how: Callable[[], str]) -> None:
    """At every write or removal of this process that is not to be "whole"."""
    write, remove = DirectoryStorage._write, DirectoryStorage.remove

    def dying_write(self: DirectoryStorage, name: str, data: bytes, at: int) -> None:
        if (moment := how()) == "whole":
            return write(self, name, data, at)
        if moment == "torn":
            os.write(self._file, data[: len(data) * 2 // 3])
        elif moment == "after":
            write(self, name, data, at)
        return _die()

    def dying_remove(self: DirectoryStorage, names: Sequence[str]) -> None:
        if not names or (moment := how()) == "whole":
            return remove(self, names)
        if moment != "before":
            remove(self, names if moment == "after" else names[:1])
        return _die()

    DirectoryStorage._write, DirectoryStorage.remove = dying_write, dying_remove  # type: ignore[method-assign]


# What is done at a write, one try after the other, and at those behind it: the last try gets
# through, so that some planners come to
# their second and third write (a snapshot, a segment's end) before they die.
TRIES = (("before", "torn", "whole"), ("torn", "whole"), ("after",))


class Dying(Learner):
    """The same schedule, which brings death to the process of the planner it is sent to: at every
    write that a run comes to.
    """

    def __init__(self, ledger: Path, launcher: int = 0):
        super().__init__()
        self.ledger, self.launcher = ledger, launcher or os.getpid()

    def __reduce__(self) -> Any:
        return _sent, (self.ledger, self.launcher, self.seen)

    def tried(self) -> list[tuple[int, str]]:
        """Writes by number, and what was done at them, by all planners of the run."""
        lines = self.ledger.read_text().split("\n")[:-1] if self.ledger.exists() else []
        return [(int(number), how) for number, how in (line.split() for line in lines)]


_to_die: list[int] = []  # schedules are also copied within a process, which dies once


def _sent(ledger: Path, launcher: int, seen: dict[str, float]) -> Dying:
    found = Dying(ledger, launcher)
    found.seen = dict(seen)
    if os.getpid() not in (launcher, *_to_die):
        _to_die.append(os.getpid())
        small_segments()
        _die_at_all(found)
    return found


def _die_at_all(dying: Dying) -> None:
    def how() -> str:
        tried = dying.tried()
        number, last = tried[-1] if tried else (-1, "whole")
        ways = TRIES[number % len(TRIES)]
        at = ways.index(last) + 1 if number >= 0 else len(ways)
        number, way = (
            (number, ways[at])
            if at < len(ways)
            else (number + 1, TRIES[(number + 1) % len(TRIES)][0])
        )
        with dying.ledger.open("a") as file:
            file.write(f"{number} {way}\n")
        return way

    _die_by(how)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def small_segments() -> None:
    """Snapshots every few plans, and a segment for each: pruning is part of what may be cut."""
    job_journal.SEGMENT_BYTES = 400
    job_journal.Interval = lambda: Interval(ratio=2, most_plans=3)  # type: ignore[assignment,misc]


def child(order: dict[str, Any]) -> None:
    small_segments()
    launcher.LEAVE_S = job_journal.CLOSE_S = (
        WAIT_S  # what was taken is perhaps written when the session is left, and looked for then
    )
    if order["number"] >= 0:
        die_at(order["number"], order["moment"])
    out = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    made = job(Path(order["corpus"]), order["journal"])

    def note(what: list[Any]) -> None:
        os.write(out, json.dumps(what).encode() + b"\n")
        if what[:2] == ["step", order["last"]]:
            _die()

    def heard(session: ov.Session) -> None:
        """A planner in another process hears a moment later what was taken; what it has not heard
        it does not write.
        """
        if order["runtime"] != "local":
            until(lambda: session.internals.runtime._parts.acked == STEPS - 1)  # type: ignore[attr-defined]

    train(
        made, note, resume=order["resume"], runtime=order["runtime"], said=order["said"], then=heard
    )


def main() -> None:
    """Orders come by lines; each is carried out by a child of its own, which may die. Nothing here
    has a thread, so it may fork.
    """
    for name in ("overlord.session.runtime", "overlord.session.session", "tests.preloaded"):
        importlib.import_module(name)  # not in each of them again
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(json.loads(line))
                code = 0
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def notes(path: Path) -> list[list[Any]]:
    """What a child noted; the last line may be cut."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def steps(found: Sequence[Sequence[Any]]) -> list[tuple[int, str]]:
    return [(n[1], n[2]) for n in found if n[0] == "step"]


def recovered(where: str | Path) -> Recovered:
    return Recovered.of(entries(read_all(where)), checking=True)
