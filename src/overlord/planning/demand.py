"""Requests to loaders: samples that a blocked draw lacks, and samples for the next steps. Pure.

Loaders of all sources are numbered consecutively; those of source i are ``first[i]`` to ``first[i +
1] - 1``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from overlord.messages.control import GROUPS_AHEAD, Refill

HORIZON_STRIDE = 4  # groups by which the horizon advances


class LoaderRequests:
    """Counts the samples that every loader holds and should hold, and returns Refills."""

    def __init__(
        self, loaders: Sequence[int], read_ahead: int, of_source: Mapping[int, int] | None = None
    ):
        """Start with no requests.

        ``of_source``: steps to read ahead for sources that differ from ``read_ahead``.
        """
        self._loaders, self._read_ahead, self._of_source = (
            list(loaders),
            read_ahead,
            dict(of_source or {}),
        )
        # samples that each source's loaders were last requested to hold
        self._level = [0] * len(self._loaders)
        # the last group that loaders of each source may open
        self._horizon = [-1] * len(self._loaders)
        self._number()
        # number of samples last requested of each loader
        self._must = np.zeros(self.n_loaders, np.int64)
        # samples of each loader that are announced and not popped
        self._held = np.zeros(self.n_loaders, np.int64)

    def _number(self) -> None:
        self.first = np.concatenate([[0], np.cumsum(self._loaders)]).astype(np.int64)
        self.source_of = np.repeat(np.arange(len(self._loaders)), self._loaders).tolist()

    @property
    def n_loaders(self) -> int:
        return int(self.first[-1])

    def grow(self, loaders: int) -> None:
        """Add a source after all others."""
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
        """Reset the loaders of a source: they hold nothing, and have received no request."""
        self._held[self.of(i)] = self._must[self.of(i)] = 0
        self._horizon[i] = -1
        return (
            [Refill(loader, 0, self._share(i)) for loader in self.of(i)] if self._level[i] else []
        )

    def announced(self, loader: int, samples: int) -> None:
        self._held[loader] += samples

    def popped(self, pops: np.ndarray) -> None:
        """Remove the samples of a planned step, and the requests for it."""
        self._held -= pops
        self._must = np.zeros_like(self._must)

    def request_more(self, i: int, lacking: int, behind: Sequence[int]) -> list[Refill]:
        """Send a request to the loaders that delay the source, unless one is still unfulfilled."""
        # about equal shares; a loader that still delays the source gets another request
        commands, lacking = ([], -(-lacking // self._loaders[i]))
        for loader in (int(self.first[i]) + k for k in behind):
            if self._held[loader] >= self._must[loader]:
                self._must[loader] = self._held[loader] + lacking
                commands.append(Refill(loader, int(self._must[loader]), self._share(i)))
        return commands

    def move_horizon(self, i: int, group: int) -> list[Refill]:
        """Let loaders open later groups: the stream has reached another group.

        The horizon advances by several groups at once, since each message wakes a process.
        """
        if group + GROUPS_AHEAD <= self._horizon[i]:
            return []
        self._horizon[i] = group + GROUPS_AHEAD + HORIZON_STRIDE
        return [Refill(loader, 0, self._share(i), self._horizon[i]) for loader in self.of(i)]

    def keep_ahead(self, counts: np.ndarray) -> list[Refill]:
        """Keep loaders a few steps ahead.

        They refill by themselves; they get a Refill only for a level that changed.
        """
        commands: list[Refill] = []
        for i in np.flatnonzero(counts).tolist():
            level = int(counts[i]) * self._of_source.get(i, self._read_ahead) + 1
            if level > self._level[i] or 4 * level < self._level[i]:
                self._level[i] = level
                commands += [Refill(loader, 0, self._share(i)) for loader in self.of(i)]
        return commands

    def set_read_ahead(self, i: int, steps: int) -> None:
        """Read a source ``steps`` steps ahead from the next step on.

        A lower level is sent only if it is much lower.
        """
        self._of_source[i] = steps

    def last_refill(self, loader: int) -> Refill:
        """Return the request that is in force for a loader, for its standby."""
        source = self.source_of[loader]
        return Refill(loader, 0, self._share(source), self._horizon[source])

    def of(self, i: int) -> range:
        return range(int(self.first[i]), int(self.first[i + 1]))

    def _share(self, i: int) -> int:
        return -(-self._level[i] // self._loaders[i])
