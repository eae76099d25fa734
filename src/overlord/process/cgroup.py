"""Cores and memory that this process may use: those of the machine, or of its control group.

A container sees the whole machine in ``/proc``. Its limits are in the files of its control group
(cgroup), version 1 or 2. The kernel throttles or kills a process that exceeds them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")  # root of the system files; tests replace it


def cores(root: Path | None = None) -> int:
    """Return the number of cores that this process may use; a fraction of a core counts as one."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([here, *(math.ceil(quota) for quota in _quotas(root or ROOT))]))


def memory_bytes(root: Path | None = None) -> int:
    """Return the bytes that all processes of this process's group may use together."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        _read(f / name)
        for f in _folders(root or ROOT, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    return min(
        [
            machine,
            *(
                int(words[0])
                for words in limits
                if words and words[0].isdecimal() and int(words[0]) > 0
            ),
        ]
    )


def _quotas(root: Path) -> Iterator[float]:
    """Yield the cores of each group with a limit, from its CPU time per period."""
    for folder in _folders(root, "cpu"):
        words = _read(folder / "cpu.max") or _read(folder / "cpu.cfs_quota_us") + _read(
            folder / "cpu.cfs_period_us"
        )
        if (
            len(words) == 2
            and all(word.isdecimal() for word in words)
            and int(words[0])
            and int(words[1])
        ):
            yield int(words[0]) / int(words[1])


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the cgroup folders of this process: its group and all groups above it.

    The limits of all of them apply. If a container sees only its own group, the path in ``/proc``
    does not exist, and the top folder is its group.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        named, _, path = rest.partition(":")
        if named and controller not in named.split(","):
            continue
        for top in (mounts / controller, mounts / named) if named else (mounts, mounts / "unified"):
            group = Path(path.strip("/"))
            yield from (top / part for part in (group, *group.parents))


def _read(path: Path) -> list[str]:
    """Return the first line of a file, split at white space."""
    return next((line.split() for line in _lines(path)), [])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except (OSError, ValueError):  # another version or system, or no permission
        return []
