"""Timeouts of transform processes and of tokenizers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Durations in seconds. Tests replace the instance in the module that reads it."""

    batch_s: float = 300.0  # limit of one batch of transforms, and of the start of the process
    download_s: float = 60.0  # limit of the download of a tokenizer by its name
    # A child that has not exited by then is killed: Ctrl-C must end a program within a second.
    close_s: float = 0.5


TIMEOUTS = Timeouts()
