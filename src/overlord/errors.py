"""The named exceptions.

Each carries its facts as fields and survives pickling: ``args`` equals the constructor's signature,
so the default ``__reduce__`` rebuilds it in another process. Each text says where, what was wanted,
what was found and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


class OverlordError(Exception):
    """Base of everything this package raises on purpose."""


class JobError(OverlordError):
    """A job that cannot run. Lists every problem at once, so that a job file is mended in one
    go.
    """

    def __init__(self, problems: Sequence[str], where: str = "job"):
        listed = (
            [problems] if isinstance(problems, str) else list(problems)
        )  # torch makes errors of workers anew, from one text
        super().__init__(listed, where)
        self.problems, self.where = listed, where

    def __str__(self) -> str:
        if len(self.problems) == 1:
            said = self.problems[0]
            return said if said.startswith(self.where) else f"{self.where}: {said}"
        return f"{self.where}: {len(self.problems)} problems\n" + "\n".join(
            f"  - {p}" for p in self.problems
        )


class SourceError(OverlordError):
    """A source that cannot be opened, read or trusted."""

    def __init__(self, source: str, problem: str, path: str = "", remedy: str = ""):
        super().__init__(source, problem, path, remedy)
        self.source, self.problem, self.path, self.remedy = source, problem, path, remedy

    def __str__(self) -> str:
        where = f"source {self.source!r}" + (f", {self.path}" if self.path else "")
        between = (
            "\n  to do: " if "\n" in self.problem else "; "
        )  # behind a list of files the remedy has a line of its own
        return f"{where}: {self.problem}" + (f"{between}{self.remedy}" if self.remedy else "")


class StorageError(SourceError):
    """Bytes of a source that storage did not give in time, or not as they were indexed. It says
    nothing about the data.
    """


class TransformError(OverlordError):
    """A transform that cannot work on this source at all (one bad row is quarantined instead)."""

    def __init__(self, source: str, transform: str, problem: str, remedy: str = ""):
        super().__init__(source, transform, problem, remedy)
        self.source, self.transform, self.problem, self.remedy = source, transform, problem, remedy

    def __str__(self) -> str:
        where = f"source {self.source!r}, {self.transform}" if self.source else self.transform
        return f"{where}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")


class PlanError(OverlordError):
    """A strategy or a plan that breaks a rule of the plan."""

    def __init__(self, problem: str, step: int = -1, remedy: str = ""):
        super().__init__(problem, step, remedy)
        self.problem, self.step, self.remedy = problem, step, remedy

    def __str__(self) -> str:
        where = f"plan of step {self.step}: " if self.step >= 0 else "plan: "
        return where + self.problem + (f"; {self.remedy}" if self.remedy else "")


MOST = 8  # differences that are listed one by one
NAMED = 5  # of sources and of parts, where there are more


def _rows(differences: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return human-readable rows. Many differences are summed up by source: missing, new or
    changed.
    """
    if len(differences) <= MOST:
        return [f"{part}: saved {a}, got {b}" for part, (a, b) in sorted(differences.items())]
    own, rest = dict[str, dict[str, tuple[str, str]]](), dict[str, tuple[str, str]]()
    for part, values in sorted(differences.items()):
        name, colon, what = part.removeprefix("source ").rpartition(": ")
        (own.setdefault(name, {}) if colon and part.startswith("source ") else rest)[
            what or part
        ] = values
    missing = [
        name
        for name, parts in own.items()
        if all(found == "nothing" for _, found in parts.values())
    ]
    new = [
        name
        for name, parts in own.items()
        if all(saved == "nothing" for saved, _ in parts.values())
    ]
    changed = [
        f"{name} ({', '.join(parts)})"
        for name, parts in own.items()
        if name not in missing and name not in new
    ]
    if missing or new:
        rest = {
            part: values for part, values in rest.items() if part != "sources"
        }  # the digest of their names
    told = {
        "sources of the state that the job lacks": missing,
        "sources of the job that the state lacks": new,
        "sources that changed": changed,
    }
    rows = [f"{what}: {_few(names)}" for what, names in told.items() if names]
    rows += [f"{part}: saved {a}, got {b}" for part, (a, b) in list(rest.items())[:NAMED]]
    return rows + (
        [f"and {len(rest) - NAMED} more: {', '.join(list(rest)[NAMED:])}"]
        if len(rest) > NAMED
        else []
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (
        f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    )


class StateMismatch(OverlordError):
    """A saved state that does not fit. ``differences`` maps each part to (saved, found),
    ``problem`` says what is wrong with it.
    """

    def __init__(
        self,
        differences: Mapping[str, tuple[str, str]],
        remedy: str = "",
        problem: str = "the state belongs to another job",
    ):
        super().__init__(dict(differences), remedy, problem)
        self.differences, self.remedy, self.problem = dict(differences), remedy, problem

    def __str__(self) -> str:
        if not self.differences:
            return self.problem + (f"; {self.remedy}" if self.remedy else "")
        rows = "\n".join(f"  - {row}" for row in _rows(self.differences))
        return f"{self.problem}; {len(self.differences)} part(s) differ\n{rows}" + (
            f"\n{self.remedy}" if self.remedy else ""
        )


class DataStall(OverlordError):
    """A wait that passed its deadline. Names what was waited for."""

    def __init__(self, waiting_for: str, seconds: float, step: int = -1, rank: int = -1):
        super().__init__(waiting_for, seconds, step, rank)
        self.waiting_for, self.seconds, self.step, self.rank = waiting_for, seconds, step, rank

    def __str__(self) -> str:
        who = f"rank {self.rank} waited" if self.rank >= 0 else "waited"
        what = f"step {self.step}: " if self.step >= 0 else ""
        return f"{who} {self.seconds:.1f} s for {what}{self.waiting_for}"


class ActorLost(OverlordError):
    """A part of the system that died and could not be replaced."""

    def __init__(self, name: str, reason: str):
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        who = (
            " (by someone, or by the kernel for want of memory: its log tells)"
            if self.reason == "killed by signal 9"
            else ""
        )
        return f"{self.name} is lost: {self.reason}{who}"


class LinkRefused(OverlordError):
    """A peer that would not talk to us, or with whom we would not talk: wrong token, other version,
    not ours.
    """

    def __init__(self, peer: str, reason: str):
        super().__init__(peer, reason)
        self.peer, self.reason = peer, reason

    def __str__(self) -> str:
        return f"{self.peer} refused: {self.reason}"


class JournalError(OverlordError):
    """A journal that cannot be written, or that cannot be trusted."""

    def __init__(self, path: str, problem: str, remedy: str = ""):
        super().__init__(path, problem, remedy)
        self.path, self.problem, self.remedy = path, problem, remedy

    def __str__(self) -> str:
        return f"journal {self.path}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")


class JournalTaken(JournalError):
    """A journal that another writer has gone on with: nothing that this one does counts any more,
    however often it is tried.
    """


class FrameError(OverlordError):
    """Bytes of the channel that cannot be trusted, or a value that cannot travel in them."""

    def __init__(self, problem: str, where: str = "", remedy: str = ""):
        super().__init__(problem, where, remedy)
        self.problem, self.where, self.remedy = problem, where, remedy

    def __str__(self) -> str:
        where = f"frame, {self.where}" if self.where else "frame"
        return f"{where}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")


class WouldBlock(Exception):
    """Instead of a wait, where the thread must not: what was asked for is to be asked for again by
    another.
    """


NO_FUNCTION = (
    "strategies, schedules and transforms must be functions of what they are given: no "
    "clock, no chance of their own, no memory"
)


SAID = "what it said last"  # a runtime whose parts say it elsewhere says where, in the reason
