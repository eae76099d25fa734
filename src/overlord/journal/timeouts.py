"""Timeouts of the journal, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Limits on waiting for the journal's disk or store."""

    append_s: float = 600.0  # one append: a store is retried for long; a slower disk is lost
    close_s: float = 1.0  # closing waits this long for an append in progress


TIMEOUTS = Timeouts()
