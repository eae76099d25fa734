"""Timeouts of transform processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Durations in seconds. Tests replace the instance in the module that reads it."""

    batch_s: float = 300.0  # one batch of user code, and the start of the process
    # A child that exits later is killed: Ctrl-C must end a program within a second.
    close_s: float = 0.5


TIMEOUTS = Timeouts()
