"""What loaders are asked to hold: as much as a blocked draw lacks, and beyond that a few steps'
worth. Pure.

Loaders of all sources are numbered through; source i's are ``first[i]`` to ``first[i + 1] - 1``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from overlord.messages.control import GROUPS_AHEAD, Refill

STRIDE = 4  # groups by which the horizon moves on


class Demand:
    """Counts what every loader holds and was told to hold; answers with Refills."""

    def __init__(
        self, loaders: Sequence[int], read_ahead: int, of_source: Mapping[int, int] | None = None
    ):
        """``of_source``: steps that sources are read ahead which are not read as far ahead as the
        others.
        """
        self._loaders, self._read_ahead, self._of_source = (
            list(loaders),
            read_ahead,
            dict(of_source or {}),
        )
        # samples each source's loaders were last asked to hold
        self._level = [0] * len(self._loaders)
        self._horizon = [-1] * len(self._loaders)  # the last group that they were told to open
        self._number()
        self._must = np.zeros(self.n_loaders, np.int64)  # what each loader was last told to reach
        self._held = np.zeros(self.n_loaders, np.int64)  # announced and not yet popped

    def _number(self) -> None:
        self.first = np.concatenate([[0], np.cumsum(self._loaders)]).astype(np.int64)
        self.source_of = np.repeat(np.arange(len(self._loaders)), self._loaders).tolist()

    @property
    def n_loaders(self) -> int:
        return int(self.first[-1])

    def grow(self, loaders: int) -> None:
        """One more source, behind all others."""
        self._loaders.append(loaders)
        self._level.append(0)
        self._horizon.append(-1)
        self._number()
        more = np.zeros(loaders, np.int64)
        self._must, self._held = (
            np.concatenate([self._must, more]),
            np.concatenate([self._held, more]),
        )

    def restarted(self, i: int) -> list[Refill]:
        """The loaders of a source begin again: they hold nothing, and have heard nothing."""
        self._held[self.of(i)] = self._must[self.of(i)] = 0
        self._horizon[i] = -1
        return (
            [Refill(loader, 0, self._share(i)) for loader in self.of(i)] if self._level[i] else []
        )

    def announced(self, loader: int, samples: int) -> None:
        self._held[loader] += samples

    def popped(self, pops: np.ndarray) -> None:
        """A step was staged: what was asked for it is asked no more."""
        self._held -= pops
        self._must = np.zeros_like(self._must)

    def nudge(self, i: int, lacking: int, behind: Sequence[int]) -> list[Refill]:
        """Ask the loaders that hold the source up, if they have done what they were asked
        before.
        """
        # they share it about equally; who still holds the source up is asked again
        commands, lacking = ([], -(-lacking // self._loaders[i]))
        for loader in (int(self.first[i]) + k for k in behind):
            if self._held[loader] >= self._must[loader]:
                self._must[loader] = self._held[loader] + lacking
                commands.append(Refill(loader, int(self._must[loader]), self._share(i)))
        return commands

    def move_horizon(self, i: int, group: int) -> list[Refill]:
        """The stream has come to another group: its loaders may open groups further on. They are
        told of some at once, since each word wakes a process.
        """
        if group + GROUPS_AHEAD <= self._horizon[i]:
            return []
        self._horizon[i] = group + GROUPS_AHEAD + STRIDE
        return [Refill(loader, 0, self._share(i), self._horizon[i]) for loader in self.of(i)]

    def keep_ahead(self, counts: np.ndarray) -> list[Refill]:
        """Keep loaders a few steps ahead. They refill by themselves; they hear only of a level that
        changed.
        """
        commands: list[Refill] = []
        for i in np.flatnonzero(counts).tolist():
            level = int(counts[i]) * self._of_source.get(i, self._read_ahead) + 1
            if level > self._level[i] or 4 * level < self._level[i]:
                self._level[i] = level
                commands += [Refill(loader, 0, self._share(i)) for loader in self.of(i)]
        return commands

    def hold(self, i: int, steps: int) -> None:
        """From the next step on; a level that is less is told when it is much less."""
        self._of_source[i] = steps

    def last_refill(self, loader: int) -> Refill:
        """What a loader was told, for one that is to follow it."""
        source = self.source_of[loader]
        return Refill(loader, 0, self._share(source), self._horizon[source])

    def of(self, i: int) -> range:
        return range(int(self.first[i]), int(self.first[i + 1]))

    def _share(self, i: int) -> int:
        return -(-self._level[i] // self._loaders[i])
