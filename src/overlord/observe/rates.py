"""Rates over the last seconds, which follow changes that a mean over the whole run hides."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0


class RateWindow:
    """The rate of a growing count over a window of ``seconds``; the caller supplies the time."""

    def __init__(self, seconds: float = WINDOW_S) -> None:
        self._seconds = seconds
        self._counts: deque[tuple[float, float]] = deque()  # (time, count), oldest first

    def add(self, now: float, count: float) -> None:
        """Record the count at a time, which must not decrease."""
        self._counts.append((now, count))
        # One entry before the window stays: the rate is measured from there.
        while len(self._counts) > 2 and self._counts[1][0] <= now - self._seconds:
            self._counts.popleft()

    def rate(self, now: float) -> float:
        """Return the count per second since the window began; 0 without two entries.

        The time since the last entry counts, so a stalled count approaches 0.
        """
        if len(self._counts) < 2:
            return 0.0
        (start, first), (_, last) = self._counts[0], self._counts[-1]
        return (last - first) / max(1e-9, now - start)
