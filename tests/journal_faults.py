"""A job with a journal whose process dies at a given point, for tests that kill it at every write
and read what is left.
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
from overlord.journal.job_journal import entries
from overlord.journal.log import read_all
from overlord.journal.replay import Recovered
from overlord.journal.storage import DirectoryStorage
from overlord.journal.timeouts import Timeouts
from tests.corpus import write_rows
from tests.internals import JOURNAL_WRITES, generation_of, launcher_of
from tests.processes import WAIT_S, until

STEPS = 9
SAY, AT = 2, 6  # after SAY steps the mixture is changed from step AT on
SKIPPED = 7  # and this step is skipped
# Bytes that were written and not synced survive the process as synced ones do.
MOMENTS = ("before", "torn", "after")


class Learner:
    """A schedule with a memory: each report must reach it exactly once."""

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
    """Return the report of a trainer for a step, the same at every call."""
    x = (step * 2654435761 + rank) % 1000
    return {"loss/a": x / 500, "loss/b": (999 - x) / 400}


def digest(step: ov.Step) -> str:
    found = hashlib.sha256(step.plan_digest.encode())
    for mb in step:
        for key in sorted(mb):
            found.update(mb[key].tobytes())
    return found.hexdigest()


def train(made: ov.Job, note: Callable[[list[Any]], Any], **options: Any) -> None:
    """Train on all steps.

    ``note`` receives each step that the trainer has, and each event that was acknowledged. The
    option ``then`` is called before the session closes.
    """
    said, then = options.pop("said", False), options.pop("then", lambda session: None)
    with ov.launch(made, prefetch=2, stall_limit_s=WAIT_S, **options) as session:
        client = session.client(0)
        first = generation_of(session).start.step
        # The journal may lack these: a report is written with the next plan.
        for step in range(max(0, first - 2), first):
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
    """Let this process die at a write of the journal, counted from 0, or where it removes
    segments.
    """
    left = [number]

    def how() -> str:
        left[0] -= 1
        return moment if left[0] < 0 else "whole"

    _die_by(how)


def _die_by(how: Callable[[], str]) -> None:
    """Let this process die at every write or removal for which ``how`` does not return "whole"."""
    write, remove = JOURNAL_WRITES.real, DirectoryStorage.remove

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

    JOURNAL_WRITES.assign(dying_write)
    DirectoryStorage.remove = dying_remove  # type: ignore[method-assign]


# The actions at a write, one try after the other, and at later writes. The last try succeeds, so
# that some coordinators reach their second and third write (a snapshot, a segment's end) before
# they die.
TRIES = (("before", "torn", "whole"), ("torn", "whole"), ("after",))


class Dying(Learner):
    """A learning schedule that lets the coordinator process it is sent to die, at every write that
    a run reaches.
    """

    def __init__(self, ledger: Path, launcher: int = 0):
        super().__init__()
        self.ledger, self.launcher = ledger, launcher or os.getpid()

    def __reduce__(self) -> Any:
        return _sent, (self.ledger, self.launcher, self.seen)

    def tried(self) -> list[tuple[int, str]]:
        """Return the writes of all coordinators of the run by number, and what was done at them."""
        lines = self.ledger.read_text().split("\n")[:-1] if self.ledger.exists() else []
        return [(int(number), how) for number, how in (line.split() for line in lines)]


_to_die: list[int] = []  # a schedule is also copied within a process, which dies once


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
    """Write a snapshot every few plans, and a segment for each, so that pruning may be cut off
    too.
    """
    job_journal.SEGMENT_BYTES = 400
    job_journal.Interval = lambda: Interval(ratio=2, most_plans=3)  # type: ignore[assignment,misc]


def child(order: dict[str, Any]) -> None:
    small_segments()
    # An acknowledgement may be written only when the session closes, and the test reads it then.
    launcher.STOP_S, job_journal.TIMEOUTS = WAIT_S, Timeouts(close_s=WAIT_S)
    if order["number"] >= 0:
        die_at(order["number"], order["moment"])
    out = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    made = job(Path(order["corpus"]), order["journal"])

    def note(what: list[Any]) -> None:
        os.write(out, json.dumps(what).encode() + b"\n")
        if what[:2] == ["step", order["last"]]:
            _die()

    def heard(session: ov.Session) -> None:
        """Wait until the coordinator has received the last acknowledgement. It does not write one
        that it has not received.
        """
        if order["runtime"] != "local":
            until(lambda: launcher_of(session).acked == STEPS - 1)

    train(
        made, note, resume=order["resume"], runtime=order["runtime"], said=order["said"], then=heard
    )


def main() -> None:
    """Execute orders from standard input, one a line, each in a child of its own, which may die.
    This process has no threads, so it may fork.
    """
    for name in ("overlord.session.runtime", "overlord.session.session", "tests.preload"):
        importlib.import_module(name)  # imported once, not in every child
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
    """Return the notes of a child; the last line may be incomplete."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def steps(found: Sequence[Sequence[Any]]) -> list[tuple[int, str]]:
    return [(n[1], n[2]) for n in found if n[0] == "step"]


def recovered(where: str | Path) -> Recovered:
    return Recovered.of(entries(read_all(where)), checking=True)
