"""Timeouts of the journal, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Limits on waiting for the journal's disk or store."""

    # one append, with all retries of a store; a slower one counts as failed
    append_s: float = 600.0
    close_s: float = 1.0  # closing waits this long for an append in progress


TIMEOUTS = Timeouts()
