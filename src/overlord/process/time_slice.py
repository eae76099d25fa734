"""CPU time slices: worker threads run longer at a time and preempt no other process.

With more workers than cores, the system switches between them every 3 ms. Each then finds the
caches filled by the others: twelve that tokenize on two cores take 1.5 times the CPU of two. Slices
of 20 ms win back half of that. Other processes do not wait longer: those with the common, shorter
slice run first. Background work does not preempt a running process when it wakes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct

SLICE_S = 0.02
# system call numbers by machine: the C library has no function for it
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
ATTRIBUTES = "IIQiIQQQ"


def in_background(slice_s: float = SLICE_S) -> bool:
    """Give this thread, and threads that it starts, long time slices as background work.

    The share of the cores does not change. Return False if the system does not support it (Linux
    before 6.12), or if another policy was chosen for this process.
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
