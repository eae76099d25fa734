"""What is to go wrong in a drill, and when: one short text for a fault. No process is touched
here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from overlord.checks import did_you_mean
from overlord.errors import JobError

KILL, STOP = "kill", "stop"
ROLES = ("planner", "loader-host", "constructor-host", "all")
SEVERAL = ("loader-host", "constructor-host")  # roles that several parts may have
_FORM = re.compile(
    r"(?P<how>[a-z]+):(?P<whom>[a-z-]+(?:/\d+)?)(?:\*(?P<many>\d+))?@(?P<step>\d+)(?:%(?P<every>\d+))?"
)
WANTED = (
    "expected HOW:WHOM@STEP, as kill:loader-host/0@10, kill:loader-host*5@35, stop:planner@20 "
    "or kill:planner@15%15 (every 15 steps)"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """``whom``: a part by name, or a role. Of a role ``many`` parts are hit, the first ones by name
    that were not hit before.
    """

    how: str  # kill: SIGKILL; stop: SIGSTOP, until it was replaced
    whom: str
    step: int  # it strikes when so many steps were taken
    many: int = 1
    every: int = 0  # and again every so many steps; 0: once

    def strikes_at(self, taken: int) -> bool:
        return taken == self.step or bool(
            self.every and taken > self.step and (taken - self.step) % self.every == 0
        )

    def choose(self, names: Sequence[str]) -> list[str]:
        """Whom of those there are it hits."""
        if self.whom == "all":
            return list(names)
        if "/" in self.whom or self.whom == "planner":
            return [self.whom] if self.whom in names else []
        mine = sorted((name for name in names if name.partition("/")[0] == self.whom), key=_number)
        return mine[: self.many]

    def __str__(self) -> str:
        many, every = (
            f"*{self.many}" if self.many > 1 else "",
            f"%{self.every}" if self.every else "",
        )
        return f"{self.how}:{self.whom}{many}@{self.step}{every}"


def _number(name: str) -> int:
    tail = name.partition("/")[2]
    return int(tail) if tail.isdecimal() else 0


def parse_faults(text: str) -> list[Fault]:
    """``kill:loader-host@10,stop:planner@20``; every mistake is told at once."""
    found, problems = list[Fault](), list[str]()
    for word in filter(None, (w.strip() for w in text.split(","))):
        match = _FORM.fullmatch(word)
        if match is None:
            problems.append(f"{word!r}: {WANTED}")
            continue
        role = match["whom"].partition("/")[0]
        if match["how"] not in (KILL, STOP):
            problems.append(
                f"{word!r}: unknown {match['how']!r}{did_you_mean(match['how'], (KILL, STOP))}"
            )
        if role not in ROLES:
            problems.append(f"{word!r}: unknown part {role!r}{did_you_mean(role, ROLES)}")
        many, every = int(match["many"] or 1), int(match["every"] or 0)
        if many < 1:
            problems.append(f"{word!r}: expected at least one part, got {many}")
        elif match["many"] and match["whom"] not in SEVERAL:
            problems.append(
                f"{word!r}: *{many} is for {' or '.join(SEVERAL)}; {match['whom']!r} says "
                "already whom: leave it out"
            )
        if match["every"] and not every:
            problems.append(
                f"{word!r}: expected at least one step between two strikes, got %0; leave "
                "it out to strike once"
            )
        found.append(Fault(match["how"], match["whom"], int(match["step"]), many, every))
    if not found and not problems:
        problems.append(f"{text!r}: {WANTED}")
    if problems:
        raise JobError(problems, "faults")
    return found


def usual_faults(steps: int, planner: bool) -> list[Fault]:
    """One of each kind, well apart: what a drill does when nobody says what."""
    kinds = [
        (KILL, "loader-host"),
        *([(KILL, "planner")] if planner else []),
        (KILL, "constructor-host"),
        (STOP, "loader-host"),
    ]
    return [
        Fault(how, whom, (k + 1) * steps // (len(kinds) + 1)) for k, (how, whom) in enumerate(kinds)
    ]
