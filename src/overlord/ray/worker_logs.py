"""What a process of Ray's said last: its output is in files of its node, and nobody who waits for
the job sees them.

Nothing of Ray is imported in this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlord.errors import SAID

LINES, BYTES = 20, 4096  # of each file, at most
MARKS = (
    ":job_id:",
    ":actor_name:",
    ":task_name:",
)  # lines that Ray puts into these files for itself


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """Where the output of an actor is: its node's address, and files with their lengths when it
    began, since a process may have had others before.
    """

    node: str = ""
    files: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def into(node: str, files: Sequence[str]) -> dict[str, Any]:
        """Said by the actor, of itself."""
        return {
            "node": node,
            "files": {
                path: Path(path).stat().st_size for path in files if path and Path(path).exists()
            },
        }

    @staticmethod
    def of(said: Any) -> WorkerOutput:
        match said:
            case {"node": str(node), "files": dict(files)}:
                return WorkerOutput(
                    node,
                    {str(path): int(begun) for path, begun in files.items() if type(begun) is int},
                )
            case _:
                return WorkerOutput()

    def last(self) -> list[str]:
        """Lines at its end, on its own machine; none where nothing was said, or nothing is left."""
        return [line for path, begun in self.files.items() for line in _last_of(Path(path), begun)]

    @property
    def where(self) -> str:
        """For people on any machine; empty where it is not known. It goes into the reason of a
        death, where ``worn_out`` looks.
        """
        return f"{SAID} is in {' and '.join(self.files)} on node {self.node}" if self.files else ""


def _last_of(path: Path, begun: int) -> list[str]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = max(size - BYTES, begun if begun <= size else 0)
            file.seek(start)
            found = file.read(BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in found if line.strip() and not line.startswith(MARKS)][-LINES:]
