"""Warn of sources that lose more than a small share of their tokens to ``Job.on_long``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

SHARE = 0.01  # of a source's tokens so far, delivered and lost


class TokenLosses:
    """Finds sources whose losses exceed ``SHARE``.

    Each source is found once, also when steps are planned again after a fault.
    """

    def __init__(self) -> None:
        self._found: set[int] = set()

    def found(self, counts: Mapping[str, np.ndarray]) -> list[int]:
        """Return the numbers of the sources that exceed ``SHARE`` now and did not before.

        ``counts``: of a ``StreamState``.
        """
        if (lost := counts.get("lost_tokens")) is None or not lost.any():
            return []
        over = np.flatnonzero(lost > SHARE * (counts["tokens"] + lost)).tolist()
        new = [i for i in over if i not in self._found]
        self._found.update(new)
        return new

    def warnings(
        self, counts: Mapping[str, np.ndarray], names: Sequence[str], on_long: str, context: int
    ) -> list[str]:
        """Return a sentence for each source that ``found`` returns."""
        return [
            _words(
                names[i], int(counts["tokens"][i]), int(counts["lost_tokens"][i]), on_long, context
            )
            for i in self.found(counts)
        ]


def share(tokens: int, lost: int) -> float:
    """Return the share of a source's tokens that were lost."""
    return lost / (tokens + lost) if lost else 0.0


def _words(name: str, tokens: int, lost: int, on_long: str, context: int) -> str:
    what = "cut" if on_long == "truncate" else "dropped"
    return (
        f"source {name!r}: on_long={on_long!r} has {what} {lost:,} of {tokens + lost:,} "
        f"tokens so far ({share(tokens, lost):.1%}): "
        f"documents longer than the context of {context:,}; on_long='split' keeps all tokens"
    )
