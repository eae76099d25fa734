"""The exceptions of this package.

Each has its details as fields and can be pickled: ``args`` equals the constructor's signature, so
the default ``__reduce__`` rebuilds it in another process. Each text names the location, the
expected and the given value, and a remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class OverlordError(Exception):
    """Base of all errors that this package raises on purpose."""


class JobError(OverlordError):
    """A job or an argument that is not valid; all problems are listed at once."""

    def __init__(self, problems: Sequence[str], where: str = "job"):
        # torch rebuilds an error of a DataLoader worker from a single text
        listed = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(listed, where)
        self.problems, self.where = listed, where

    def __str__(self) -> str:
        if len(self.problems) == 1:
            problem = self.problems[0]
            return problem if problem.startswith(self.where) else f"{self.where}: {problem}"
        return f"{self.where}: {len(self.problems)} problems\n" + "\n".join(
            f"  - {p}" for p in self.problems
        )


class SourceError(OverlordError):
    """A source that cannot be opened or read, or whose data are invalid.

    ``byte``: the offset in the text of ``path`` that ``problem`` names; -1: none.
    """

    def __init__(self, source: str, problem: str, path: str = "", remedy: str = "", byte: int = -1):
        super().__init__(source, problem, path, remedy, byte)
        self.source, self.problem, self.path, self.remedy = source, problem, path, remedy
        self.byte = byte

    def __str__(self) -> str:
        where = f"source {self.source!r}" + (f", {self.path}" if self.path else "")
        # a problem of several lines lists files: the remedy then has its own line
        between = "\n  to do: " if "\n" in self.problem else "; "
        return f"{where}: {self.problem}" + (f"{between}{self.remedy}" if self.remedy else "")


class StorageError(SourceError):
    """A read of a source that storage did not deliver in time, or that differs from the index.

    The stored data may still be correct, so the same state may be resumed.
    """


class TransformError(OverlordError):
    """A transform that fails for a whole source; a single bad row is quarantined instead."""

    def __init__(self, source: str, transform: str, problem: str, remedy: str = ""):
        super().__init__(source, transform, problem, remedy)
        self.source, self.transform, self.problem, self.remedy = source, transform, problem, remedy

    def __str__(self) -> str:
        where = f"source {self.source!r}, {self.transform}" if self.source else self.transform
        return f"{where}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")


class PlanError(OverlordError):
    """A strategy, a hook or a plan that breaks a rule of plans."""

    def __init__(self, problem: str, step: int = -1, remedy: str = ""):
        super().__init__(problem, step, remedy)
        self.problem, self.step, self.remedy = problem, step, remedy

    def __str__(self) -> str:
        where = f"plan of step {self.step}: " if self.step >= 0 else "plan: "
        return where + self.problem + (f"; {self.remedy}" if self.remedy else "")


MOST = 8  # differences that are listed individually
NAMED = 5  # sources and differences that are named if there are more


def _rows(differences: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return one line of text per difference; many differences are summarized by source."""
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
        # "sources" is a digest of all names, which the groups below list
        rest = {part: values for part, values in rest.items() if part != "sources"}
    groups = {
        "sources of the state that the job lacks": missing,
        "sources of the job that the state lacks": new,
        "sources that changed": changed,
    }
    rows = [f"{what}: {_shorten(names)}" for what, names in groups.items() if names]
    rows += [f"{part}: saved {a}, got {b}" for part, (a, b) in list(rest.items())[:NAMED]]
    return rows + (
        [f"and {len(rest) - NAMED} more: {_shorten(list(rest)[NAMED:])}"]
        if len(rest) > NAMED
        else []
    )


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (
        f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    )


class StateMismatch(OverlordError):
    """A saved state that does not fit the job.

    ``differences`` maps each component to its texts (saved, found). ``problem`` describes the
    mismatch.
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
    """A wait that exceeded its deadline; the text names the missing event."""

    def __init__(self, waiting_for: str, seconds: float, step: int = -1, rank: int = -1):
        super().__init__(waiting_for, seconds, step, rank)
        self.waiting_for, self.seconds, self.step, self.rank = waiting_for, seconds, step, rank

    def __str__(self) -> str:
        who = f"rank {self.rank} waited" if self.rank >= 0 else "waited"
        what = f"step {self.step}: " if self.step >= 0 else ""
        return f"{who} {self.seconds:.1f} s for {what}{self.waiting_for}"


class ActorLost(OverlordError):
    """The loss of a worker that is not replaced, of a connection's peer, or of the event loop."""

    def __init__(self, name: str, reason: str):
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        who = (
            " (by a user, or by the kernel because memory ran out; see its log)"
            if self.reason == "killed by signal 9"
            else ""
        )
        return f"{self.name} is lost: {self.reason}{who}"


class LinkRefused(OverlordError):
    """A refused connection: wrong token, other version, not Overlord, or the peer's own reason."""

    def __init__(self, peer: str, reason: str):
        super().__init__(peer, reason)
        self.peer, self.reason = peer, reason

    def __str__(self) -> str:
        return f"{self.peer} refused: {self.reason}"


class JournalError(OverlordError):
    """A journal that cannot be written, or whose content is not valid."""

    def __init__(self, path: str, problem: str, remedy: str = ""):
        super().__init__(path, problem, remedy)
        self.path, self.problem, self.remedy = path, problem, remedy

    def __str__(self) -> str:
        return f"journal {self.path}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")


class JournalTaken(JournalError):
    """A journal that another writer has continued, so that later records of this one are ignored.

    Retries cannot succeed.
    """


class FrameError(OverlordError):
    """Invalid bytes of a frame, or a value that cannot be encoded."""

    def __init__(self, problem: str, where: str = "", remedy: str = ""):
        super().__init__(problem, where, remedy)
        self.problem, self.where, self.remedy = problem, where, remedy

    def __str__(self) -> str:
        where = f"frame, {self.where}" if self.where else "frame"
        return f"{where}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")


class WouldBlock(Exception):
    """A wait that was refused, because the calling thread must not block.

    Another thread has to repeat the call.
    """


# remedy for a function that returned another result for the same input
NO_FUNCTION = (
    "strategies, schedules and transforms must be functions of their arguments: no clock, no "
    "random numbers of their own, no memory"
)
# Begins the text that locates the output of a lost worker. A runtime whose workers write to files
# of their own puts it into the reason; otherwise the supervisor appends it.
LAST_OUTPUT = "its last output"
