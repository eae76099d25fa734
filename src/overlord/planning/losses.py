"""Warnings of sources whose data a step leaves out: lost tokens, and quarantined rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from overlord.job.job import Job
from overlord.job.several_documents import grouped

SHARE = 0.01  # share of a source's tokens that may be lost without a warning
SHOWN = 3  # sources that a warning names


class DataLosses:
    """Detector of sources that lose data for the first time.

    A source loses data if more than ``SHARE`` of its tokens are lost to ``Job.on_long``, or if a
    row is quarantined. Each source is reported once for either, even if steps are planned again
    after a fault. Sources of a job with hundreds of them are reported in groups.
    """

    def __init__(self) -> None:
        self._tokens, self._rows = _Reported(), _Reported()

    def newly_exceeding(self, counts: Mapping[str, np.ndarray]) -> list[int]:
        """Return the numbers of the sources that lose data now and did not before.

        ``counts``: ``StreamState.counts``.
        """
        return sorted({*self._tokens.new(_losing(counts)), *self._rows.new(_quarantined(counts))})

    def warnings(self, counts: Mapping[str, np.ndarray], job: Job) -> list[str]:
        """Return the warnings after a step: one for each source, or one for all if they are many.

        Sources wait until they are a quarter of those reported before, so the number of warnings
        grows with the logarithm of the number of sources.
        """
        losing = self._tokens.due(_losing(counts))
        return [
            *_loss_warnings(job, losing, counts),
            *_row_warnings(job, self._rows.due(_quarantined(counts)), counts),
        ]


class _Reported:
    """The sources that were found so far, and those among them that no warning named yet."""

    def __init__(self) -> None:
        self._found: set[int] = set()
        self._waiting: list[int] = []

    def new(self, sources: Iterable[int]) -> list[int]:
        """Return the sources that were not found before."""
        new = [i for i in sources if i not in self._found]
        self._found.update(new)
        self._waiting += new
        return new

    def due(self, sources: Iterable[int]) -> list[int]:
        """Return the sources to report now, ``sources`` among them; each is returned once."""
        self.new(sources)
        if 4 * len(self._waiting) < len(self._found) - len(self._waiting):
            return []
        due, self._waiting = self._waiting, []
        return due


def _losing(counts: Mapping[str, np.ndarray]) -> list[int]:
    if (lost := counts.get("lost_tokens")) is None or not lost.any():
        return []
    return np.flatnonzero(lost > SHARE * (counts["tokens"] + lost)).tolist()


def _quarantined(counts: Mapping[str, np.ndarray]) -> list[int]:
    bad = counts.get("quarantined")
    return [] if bad is None else np.flatnonzero(bad).tolist()


def _loss_warnings(job: Job, sources: list[int], counts: Mapping[str, np.ndarray]) -> list[str]:
    tokens = {i: int(counts["tokens"][i]) for i in sources}
    lost = {i: int(counts["lost_tokens"][i]) for i in sources}
    if len(sources) <= SHOWN:
        return [_loss_warning(job, i, tokens[i], lost[i]) for i in sources]
    worst = sorted(sources, key=lambda i: -share(tokens[i], lost[i]))[:SHOWN]
    names = job.names
    shown = ", ".join(f"{names[i]!r} {share(tokens[i], lost[i]):.1%}" for i in worst)
    return [
        f"on_long={job.on_long!r} has {_verb(job)} tokens of {len(sources)} sources, largest "
        f"shares: {shown}: documents longer than {job.document_limit:,} tokens; "
        "on_long='split' keeps all tokens, and metrics()['sources'] has the counts"
    ]


def _loss_warning(job: Job, source: int, tokens: int, lost: int) -> str:
    found = (
        f"source {job.names[source]!r}: on_long={job.on_long!r} has {_verb(job)} {lost:,} of "
        f"{tokens + lost:,} tokens so far ({share(tokens, lost):.1%}): "
    )
    if any(name == job.names[source] for name, _ in grouped(job.sources)):
        return (
            f"{found}documents longer than {job.document_limit:,} tokens, or samples with more "
            f"than {job.batch.context:,}, which are never split; raise batch.context"
        )
    return (
        f"{found}documents longer than {job.document_limit:,} tokens; on_long='split' keeps all "
        "tokens"
    )


def _row_warnings(job: Job, sources: list[int], counts: Mapping[str, np.ndarray]) -> list[str]:
    rows, names = {i: int(counts["quarantined"][i]) for i in sources}, job.names
    if not sources:
        return []
    worst = sorted(sources, key=lambda i: -rows[i])[:SHOWN]
    shown = ", ".join(f"{names[i]!r} {rows[i]:,}" for i in worst)
    more = f" and {len(sources) - SHOWN} more sources" if len(sources) > SHOWN else ""
    return [
        f"rows are quarantined and skipped: {shown}{more}, so far; session.quarantine() lists them "
        "with their reasons"
    ]


def _verb(job: Job) -> str:
    return "dropped" if job.on_long == "drop" else "cut"


def share(tokens: int, lost: int) -> float:
    """Return the share of lost tokens: ``lost / (tokens + lost)``, where ``tokens`` were drawn."""
    return lost / (tokens + lost) if lost else 0.0
