"""The last output of a process of Ray.

The output is in log files on the node of the process, which the user of the job does not see. This
module does not import Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlord.errors import LAST_OUTPUT

LINES, BYTES = 20, 4096  # of each file, at most
MARKS = (":job_id:", ":actor_name:", ":task_name:")  # prefixes of lines that Ray itself writes


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """Log files of an actor: the address of its node, and each file with its length at the start.

    The length excludes output of other actors that the process ran before.
    """

    node: str = ""
    files: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def to_hello(node: str, files: Sequence[str]) -> dict[str, Any]:
        """Return node and log files as a plain value, for the hello of the actor."""
        return {
            "node": node,
            "files": {
                path: Path(path).stat().st_size for path in files if path and Path(path).exists()
            },
        }

    @staticmethod
    def from_hello(value: Any) -> WorkerOutput:
        """Parse the plain value of a hello; return an empty output if it is malformed."""
        match value:
            case {"node": str(node), "files": dict(files)}:
                return WorkerOutput(
                    node,
                    {str(path): int(begun) for path, begun in files.items() if type(begun) is int},
                )
            case _:
                return WorkerOutput()

    def last_lines(self) -> list[str]:
        """Return the last lines of all files, at most ``LINES`` and ``BYTES`` of each.

        Call it on the machine of the actor. A file that cannot be read gives none.
        """
        return [
            line for path, begun in self.files.items() for line in _last_lines(Path(path), begun)
        ]

    @property
    def where(self) -> str:
        """The location of the files, as text for users; empty if unknown.

        It becomes part of the reason of a death. ``cluster.supervisor`` searches there for
        ``LAST_OUTPUT``.
        """
        return (
            f"{LAST_OUTPUT} is in {' and '.join(self.files)} on node {self.node}"
            if self.files
            else ""
        )


def _last_lines(path: Path, begun: int) -> list[str]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = max(size - BYTES, begun if begun <= size else 0)
            file.seek(start)
            found = file.read(BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in found if line.strip() and not line.startswith(MARKS)][-LINES:]
