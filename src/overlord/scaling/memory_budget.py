"""One budget for a machine, split over what loading may hold there. Pure.

Some of it is needed whatever the budget: processes, the open window of every loader, what the draw
takes. That is set aside first, by estimate; the rest bounds what is held *ahead*. A budget bounds
reading ahead, never the draw: a small one makes a job slower, never wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

# a loader host with its libraries, nothing opened: 86 to 130 MB where it was measured
HOST_BYTES = 110 * 2**20
BUILDER_BYTES = 60 * 2**20  # a constructor host
# of a loader: files and the open window. 3 to 5 MB where rows are text; images hold more
WINDOW_BYTES = 8 * 2**20
# of the rest: samples held ready, files in the middle of a read, payload and assembled steps
READY, OPEN, BUILT = (0.4, 0.2, 0.4)
LEAST = 16 * 2**20  # of the rest: less would have loaders wait for each other at every step


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes of one machine."""

    total: int
    processes: int  # set aside: hosts with nothing open
    windows: int  # set aside: what every loader has open
    buffer_bytes: int  # samples ready beyond the draw, over all sources
    open_bytes: int  # files in the middle of a read
    shared_bytes: int  # payload on its way and assembled steps, over all hosts
    hosts: int  # that share ``shared_bytes``; 0: everything is in one process

    @property
    def ring_bytes(self) -> int:
        """Of one host."""
        return self.shared_bytes // max(1, self.hosts)

    def __str__(self) -> str:
        parts = {
            "processes": self.processes,
            "windows": self.windows,
            "samples ready": self.buffer_bytes,
            "open files": self.open_bytes,
            "steps": self.shared_bytes,
        }
        return f"{shown(self.total)}: " + ", ".join(
            f"{name} {shown(n)}" for name, n in parts.items() if n
        )


def parse_bytes(value: int | str) -> int:
    """``"64GB"``, ``"512 MiB"``, ``2**30``. Units are powers of 1024, with or without an i."""
    if isinstance(value, int) and not isinstance(value, bool):
        found = value
    else:
        number = (
            value.upper().strip().removesuffix("B").removesuffix("I")
            if isinstance(value, str)
            else ""
        )
        unit = UNITS.get(number[-1:], 1)
        number = (number[:-1] if unit > 1 else number).rstrip()
        found = int(float(number) * unit) if number.replace(".", "", 1).isdecimal() else 0
    if found < 1:
        raise ValueError(
            f"expected bytes, as in '64GB', '512MB' or a whole number above 0, got {value!r}"
        )
    return found


def split(total: int, *, loaders: int, loader_hosts: int = 0, constructor_hosts: int = 0) -> Budget:
    """``ValueError`` with what is needed where the budget is too small."""
    processes = loader_hosts * HOST_BYTES + constructor_hosts * BUILDER_BYTES
    windows = loaders * WINDOW_BYTES
    rest = total - processes - windows
    if rest < LEAST:
        hosts = (
            f"{loader_hosts + constructor_hosts} processes take {shown(processes)}, "
            if processes
            else ""
        )
        raise ValueError(
            f"expected at least {shown(processes + windows + LEAST)}, got {shown(total)}: "
            f"{hosts}{loaders} loaders with a window each "
            f"{shown(windows)}, and {shown(LEAST)} is the least to read ahead with"
        )
    return Budget(
        total=total,
        processes=processes,
        windows=windows,
        buffer_bytes=int(READY * rest),
        open_bytes=int(OPEN * rest),
        shared_bytes=int(BUILT * rest),
        hosts=loader_hosts + constructor_hosts,
    )


def shown(nbytes: float) -> str:
    """For people; rounded up, so that what is asked for is enough."""
    for unit, size in (("GB", 2**30), ("MB", 2**20)):
        if nbytes >= size:
            return f"{math.ceil(10 * nbytes / size) / 10:g} {unit}"
    return f"{nbytes:.0f} bytes"
