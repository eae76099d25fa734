"""The faults of a drill as values, and their short text form: ``kill:planner@20``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from overlord.checks import did_you_mean
from overlord.errors import JobError

KILL, STOP = "kill", "stop"
ROLES = ("planner", "loader-worker", "constructor-worker", "all")
SEVERAL = ("loader-worker", "constructor-worker")  # roles that several workers may have
_FORM = re.compile(
    r"(?P<action>[a-z]+):(?P<target>[a-z-]+(?:/\d+)?)(?:\*(?P<count>\d+))?"
    r"@(?P<step>\d+)(?:%(?P<every>\d+))?"
)
WANTED = (
    "expected SIGNAL:WORKER@STEP, as in kill:loader-worker/0@10, kill:loader-worker*5@35, "
    "stop:planner@20 or kill:planner@15%15 (every 15 steps)"
)


@dataclass(frozen=True, slots=True)
class DrillFault:
    """One fault of a drill.

    ``target``: the name of a worker, a role, or ``all``. A fault of a role hits the ``count``
    workers with the lowest numbers; ``all`` hits every worker.
    """

    action: str  # kill: SIGKILL; stop: SIGSTOP, until the worker is replaced
    target: str
    step: int  # number of taken steps after which the fault strikes
    count: int = 1  # number of workers of a role
    every: int = 0  # number of steps between two strikes; 0: a single strike

    def strikes_at(self, taken: int) -> bool:
        """Return whether the fault strikes after ``taken`` steps."""
        return taken == self.step or bool(
            self.every and taken > self.step and (taken - self.step) % self.every == 0
        )

    def choose(self, names: Sequence[str]) -> list[str]:
        """Return the workers among ``names`` that the fault hits; empty if none matches."""
        if self.target == "all":
            return list(names)
        if "/" in self.target or self.target == "planner":
            return [self.target] if self.target in names else []
        of_role = (name for name in names if name.partition("/")[0] == self.target)
        return sorted(of_role, key=_number)[: self.count]

    def __str__(self) -> str:
        count, every = (
            f"*{self.count}" if self.count > 1 else "",
            f"%{self.every}" if self.every else "",
        )
        return f"{self.action}:{self.target}{count}@{self.step}{every}"


def _number(name: str) -> int:
    tail = name.partition("/")[2]
    return int(tail) if tail.isdecimal() else 0


def parse_faults(text: str) -> list[DrillFault]:
    """Return the faults of a text such as ``kill:loader-worker@10,stop:planner@20``.

    Raise one ``JobError`` that lists every mistake.
    """
    found, problems = list[DrillFault](), list[str]()
    for word in filter(None, (w.strip() for w in text.split(","))):
        match = _FORM.fullmatch(word)
        if match is None:
            problems.append(f"{word!r}: {WANTED}")
            continue
        action, target = match["action"], match["target"]
        role = target.partition("/")[0]
        if action not in (KILL, STOP):
            problems.append(
                f"{word!r}: expected the signal {KILL} or {STOP}, got {action!r}"
                f"{did_you_mean(action, (KILL, STOP))}"
            )
        if role not in ROLES:
            problems.append(
                f"{word!r}: expected a worker or a role, got {role!r}{did_you_mean(role, ROLES)}"
            )
        count, every = int(match["count"] or 1), int(match["every"] or 0)
        if count < 1:
            problems.append(f"{word!r}: expected at least one worker, got {count}")
        elif match["count"] and target not in SEVERAL:
            problems.append(
                f"{word!r}: expected {' or '.join(SEVERAL)} with *{count}, got {target!r}; "
                f"leave *{count} out"
            )
        if match["every"] and not every:
            problems.append(
                f"{word!r}: expected at least one step between two strikes, got %0; leave "
                "it out to strike once"
            )
        found.append(DrillFault(action, target, int(match["step"]), count, every))
    if not found and not problems:
        problems.append(f"{text!r}: {WANTED}")
    if problems:
        raise JobError(problems, "faults")
    return found


def default_faults(steps: int, planner: bool) -> list[DrillFault]:
    """Return the default faults of a drill of ``steps`` steps, evenly spaced.

    They kill a loader worker and a constructor worker, and stop a loader worker. ``planner``: also
    kill the planner.
    """
    kinds = [
        (KILL, "loader-worker"),
        *([(KILL, "planner")] if planner else []),
        (KILL, "constructor-worker"),
        (STOP, "loader-worker"),
    ]
    return [
        DrillFault(action, target, (k + 1) * steps // (len(kinds) + 1))
        for k, (action, target) in enumerate(kinds)
    ]
