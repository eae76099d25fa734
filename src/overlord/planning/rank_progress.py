"""The progress of every rank, and the slowest rank without a search. Pure.

Each of ten thousand ranks asks for the slowest one at every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


class RankProgress(dict[int, int]):
    """A mapping of rank to the last step it took.

    Ranks are at few different steps at a time, so the ranks at each step are counted.
    """

    def __init__(self, taken: Mapping[int, int] | Iterable[tuple[int, int]] = ()):
        super().__init__(taken)
        self._at = Counter(self.values())

    @property
    def slowest(self) -> int:
        """The last step that all ranks have taken. At least one rank must exist."""
        return min(self._at)

    def __setitem__(self, rank: int, step: int) -> None:
        self._leave(rank)
        super().__setitem__(rank, step)
        self._at[step] += 1

    def setdefault(self, rank: int, step: int) -> int:
        if rank not in self:
            self[rank] = step
        return self[rank]

    def pop(self, rank: int, default: int | None = None) -> int | None:  # type: ignore[override]
        self._leave(rank)
        return super().pop(rank, default)

    def _leave(self, rank: int) -> None:
        if (step := self.get(rank)) is not None:
            self._at[step] -= 1
            if not self._at[step]:
                del self._at[step]
