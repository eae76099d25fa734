"""What a process really costs in memory: PSS counts shared pages once, by share."""

from __future__ import annotations

from pathlib import Path


def pss_bytes(pid: int | str = "self") -> int:
    """Proportional set size; resident size where the system does not tell PSS; 0 where it tells
    nothing.
    """
    return _told(pid, "Pss:")


def own_bytes(pid: int | str = "self") -> int:
    """What the process itself has written: PSS without the pages of files. A share of those comes
    and goes with every other process that maps the same libraries, so a difference of two PSS is
    not what happened in between; of these it is.
    """
    return _told(pid, "Pss_Anon:")


def _told(pid: int | str, name: str) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # another system, or a process that is gone: fall through to the coarser figure
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0
