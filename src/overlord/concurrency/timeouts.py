"""Deadlines and intervals of this package, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    # Work below this runs on the event loop. Passing work to a thread and back costs 0.1 to 0.3 ms,
    # and data that crosses CPU cores costs more. Below this, one thread uses a third less CPU and
    # is hardly slower (benchmarks/throughput.py, null job). Tokenizing blocks are sized above it.
    inline_s: float = 0.005
    # The same for reads. Most of a read is decoding, which releases the interpreter lock: from here
    # on a thread costs a few percent more CPU time, and the event loop does other work meanwhile.
    inline_read_s: float = 0.0005
    turn_s: float = 0.02  # that a chain of short work may run before other calls
    slow_s: float = 0.020  # work on the loop that took this long soon runs in a thread again
    stuck_s: float = 1.0  # a read that takes longer waits for storage: another thread replaces it
    watch_s: float = 0.25  # between two checks for reads that exceeded their deadline
    close_s: float = 0.5  # for calls in progress when a thread queue closes


TIMEOUTS = Timeouts()
