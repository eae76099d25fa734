"""One memory budget for a machine, divided among the buffers of loading. Pure.

Some memory is needed whatever the budget: processes, the open window of every loader, the samples
of the draw. It is set aside first, by estimate. The rest bounds what is held *ahead*. A budget
bounds reading ahead, never the draw: a small one makes a job slower, never wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

# a loader worker with its libraries, nothing opened: 86 to 130 MB as measured
HOST_BYTES = 110 * 2**20
BUILDER_BYTES = 60 * 2**20  # a constructor worker
# of a loader: files and the open window. 3 to 5 MB if rows are text; images hold more
WINDOW_BYTES = 8 * 2**20
# shares of the rest: samples held ready, files being read, payload and assembled steps
READY, OPEN, BUILT = (0.4, 0.2, 0.4)
LEAST = 16 * 2**20  # least rest: with less, loaders would wait for each other at every step


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes of one machine."""

    total: int
    processes: int  # set aside: workers with nothing open
    windows: int  # set aside: the open windows of all loaders
    buffer_bytes: int  # samples ready beyond the draw, over all sources
    open_bytes: int  # files being read
    shared_bytes: int  # payload in transit and assembled steps, over all workers
    hosts: int  # workers that share ``shared_bytes``; 0: everything is in one process

    @property
    def ring_bytes(self) -> int:
        """Shared memory of one worker."""
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
    """Return the bytes of ``"64GB"``, ``"512 MiB"`` or ``2**30``. Units are powers of 1024, with or
    without an i.
    """
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
    """Return the divided budget. Raise a ``ValueError`` that names the least budget if it is too
    small.
    """
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
    """Return human-readable bytes, rounded up so that the named amount is enough."""
    for unit, size in (("GB", 2**30), ("MB", 2**20)):
        if nbytes >= size:
            return f"{math.ceil(10 * nbytes / size) / 10:g} {unit}"
    return f"{nbytes:.0f} bytes"
