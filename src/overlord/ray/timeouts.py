"""Deadlines and intervals of this package, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    reach_s: float = 10.0  # for the head of a cluster to accept a TCP connection
    probe_s: float = 60.0  # for another process to import Ray and query the head
    ping_s: float = 2.0  # for the head to answer
    head_s: float = 60.0  # for a lost head to return: as long as Ray's own nodes wait for it
    head_poll_s: float = 0.5  # between two pings of a lost head
    # for requests of other sessions to complete: a start may have to wait for the head
    hold_s: float = 120.0
    release_s: float = 15.0  # for requests in progress, when the last user releases the cluster
    disconnect_s: float = 8.0  # for the raylet of this node to acknowledge a disconnect
    stop_s: float = 120.0  # for the processes of a cluster that was started here to exit
    killed_s: float = 8.0  # for Ray to report that a killed actor has exited
    # the same, after which it counts as exited: without a head Ray may report nothing
    killed_silent_s: float = 6.0
    room_s: float = 10.0  # for a node with room; then a warning names the missing resources
    # for a process on a node that had room: far above the start from a slow disk, far below the
    # deadline of a launch
    process_s: float = 40.0


TIMEOUTS = Timeouts()
