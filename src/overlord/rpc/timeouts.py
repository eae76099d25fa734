"""Deadlines and intervals of this package, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    shutdown_s: float = 5.0  # for actors to finish their calls and exit
    # the same after an exception or at the end of the program, so that Ctrl-C ends within a second
    interrupted_s: float = 0.5
    killed_s: float = 5.0  # for a killed child process to exit; one that waits for a disk is slow
    killed_elsewhere_s: float = 8.0  # the same, if another process kills it
    connect_s: float = 5.0  # for the caller of an endpoint to accept the connection
    reply_s: float = 30.0  # for the caller to accept a reply: far above its need while it runs
    # the same two for the launching process, which may be suspended while its actors start
    connect_back_s: float = 60.0
    launcher_reply_s: float = 60.0
    idle_s: float = 60.0  # between checks whether a silent connection is still wanted
    # between the end of a connection and the notice that the process died, in either order
    death_notice_s: float = 1.0


TIMEOUTS = Timeouts()
