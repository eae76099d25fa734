"""Timeouts and intervals of job setup, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Limits on measuring sources at launch and while a job runs."""

    probe_s: float = 0.4  # measuring all sources at launch: short, so that a launch is not delayed
    refresh_first_s: float = 15.0  # before the first refresh of the profile; then it doubles
    refresh_most_s: float = 600.0  # between two refreshes, at most
    close_s: float = 0.2  # closing waits this long for a refresh in progress


TIMEOUTS = Timeouts()
