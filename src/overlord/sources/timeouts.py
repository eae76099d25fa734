"""Timeouts and pauses of storage access."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Durations in seconds. Tests replace the instance in the module that reads it."""

    # Limit of one read or listing with all its retries: long enough for a short outage of a store,
    # shorter than the timeout of a collective operation.
    deadline_s: float = 120.0
    first_pause_s: float = 0.1  # pause after the first failure; doubled after each further one
    longest_pause_s: float = 10.0  # bound of the pause, so that a recovered store is soon noticed
    slow_s: float = 1.0  # a slower read counts as waiting for storage, even if it did not fail
    slack_s: float = 1.0  # wait after the deadline before giving up: a last attempt may be running
    launch_pauses_s: tuple[float, ...] = (0.1, 0.5)  # pauses at launch, where a user is waiting
    store_read_s: float = 20.0  # a store request fails after this time without a received byte
    store_connect_s: float = 5.0  # connecting to a store fails after this time
    warn_after_s: float = 10.0  # time without progress before a warning; doubled after each warning


TIMEOUTS = Timeouts()
