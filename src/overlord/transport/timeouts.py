"""Deadlines and intervals of this package, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    keepalive_s: int = 10  # a machine that vanished silently is detected after three times this
    handshake_s: float = 5.0  # for a peer to finish the handshake, before it is disconnected
    retry_s: float = 0.1  # between attempts to connect, while a server refuses temporarily
    linger_s: float = 2.0  # for a closed connection to send its queue
    lost_wake_s: float = 1.0  # the most that a lost wake-up of a memory pool costs


TIMEOUTS = Timeouts()
