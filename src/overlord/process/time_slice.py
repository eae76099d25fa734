"""How the system shares cores among processes: hosts that read and transform run longer at a time,
and interrupt nobody.

Where hosts are more than cores, the system changes between them every 3 ms, and each finds the
caches filled by the others: twelve that tokenize on two cores take 1.5 times the CPU of two. Slices
of 20 ms win back half of that; waits of others are not longer for it, since whoever has the common,
shorter slice comes first, and work in the background does not interrupt what runs when it wakes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct

SLICE_S = 0.02
SCHED_SETATTR = {
    "x86_64": 314,
    "aarch64": 274,
}  # system calls, by machine: the C library has no function for it
ATTRIBUTES = (
    "IIQiIQQQ"  # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
)


def in_background(slice_s: float = SLICE_S) -> bool:
    """This thread, and those that it starts: long slices (Linux 6.12 and later have them), as work
    that nobody waits for. Its share of the cores is what it was. False where the system does not
    have it, or somebody has chosen a policy for this process.
    """
    number = SCHED_SETATTR.get(platform.machine())
    if (
        number is None
        or not hasattr(os, "sched_getscheduler")
        or os.sched_getscheduler(0) != os.SCHED_OTHER
    ):
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = struct.pack(
        ATTRIBUTES,
        struct.calcsize(ATTRIBUTES),
        os.SCHED_BATCH,
        0,
        nice,
        0,
        round(slice_s * 1e9),
        0,
        0,
    )
    with contextlib.suppress(AttributeError, OSError):
        return ctypes.CDLL(None).syscall(number, 0, wanted, 0) == 0
    return False
