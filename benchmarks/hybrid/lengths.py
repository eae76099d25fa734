"""Lengths of documents: one measured mix of source code, and lognormal mixes.

``linux``: sizes of all 78,549 files of Debian's linux-source-6.1, at 3 bytes a token; only the
sizes are kept here (``linux-6.1-file-bytes.npz``). ``web``: chat- and web-like. ``github`` and
``byted``: lognormals through the percentages that ByteScale (arXiv 2502.21231) prints for its data.
Two percentages determine a lognormal; GitHub has one, so the other is that of ``linux``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

LINUX = Path(__file__).with_name("linux-6.1-file-bytes.npz")
BYTES_A_TOKEN = 3


@dataclass(frozen=True, slots=True)
class Lognormal:
    """``median`` tokens, and the standard deviation of the logarithm."""

    median: float
    sigma: float

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        return np.ceil(self.median * np.exp(self.sigma * rng.standard_normal(n))).astype(np.int64)


LOGNORMAL = {
    "web": Lognormal(700, 1.6),
    # 76 % of documents up to 4K (as linux), 16.2 % of tokens above 128K (ByteScale)
    "github": Lognormal(1211, 1.727),
    # 80 % of documents up to 4K, 44.3 % of tokens above 128K (ByteScale)
    "byted": Lognormal(620, 2.243),
}
MIXES = ("linux", *LOGNORMAL)


def linux_tokens(path: Path = LINUX) -> np.ndarray:
    """Return the tokens of every file: int64, sorted."""
    loaded = np.load(path)
    size = loaded if isinstance(loaded, np.ndarray) else np.cumsum(loaded["steps"], dtype=np.int64)
    return np.maximum(1, -(-size.astype(np.int64) // BYTES_A_TOKEN))


def draw(mix: str, tokens: int, context: int, seed: int, path: Path = LINUX) -> np.ndarray:
    """Return documents of a mix with this many tokens in all, cut at the context: int64."""
    rng = np.random.default_rng([MIXES.index(mix), seed])
    known = linux_tokens(path) if mix == "linux" else np.zeros(0, np.int64)
    parts, held = [], 0
    while held < tokens:
        n = 4096
        more = rng.choice(known, n) if mix == "linux" else LOGNORMAL[mix].draw(n, rng)
        parts.append(cut(more, context))
        held += int(parts[-1].sum())
    found = np.concatenate(parts)
    ends = np.cumsum(found)
    last = int(np.searchsorted(ends, tokens))
    found = found[: last + 1].copy()
    found[-1] -= int(ends[last]) - tokens
    return found


def cut(lengths: np.ndarray, context: int) -> np.ndarray:
    """Return documents cut into pieces of at most the context, in order."""
    pieces = -(-lengths // context)
    found = np.full(int(pieces.sum()), context, np.int64)
    ends = np.cumsum(pieces) - 1
    found[ends] = lengths - (pieces - 1) * context
    return found
