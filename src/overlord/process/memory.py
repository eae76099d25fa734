"""The memory of a process as its proportional set size (PSS).

PSS divides shared pages among the processes that map them.
"""

from __future__ import annotations

from pathlib import Path


def pss_bytes(pid: int | str = "self") -> int:
    """Return the proportional set size of a process.

    Return the resident size if the system has no PSS, and 0 if it reports nothing.
    """
    return _read(pid, "Pss:")


def own_bytes(pid: int | str = "self") -> int:
    """Return the memory that the process itself has written: PSS without the pages of files.

    The shares of file pages change with every other process that maps the same libraries. So only
    differences of this number show the effect of the process itself.
    """
    return _read(pid, "Pss_Anon:")


def _read(pid: int | str, name: str) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # another system, or the process is gone: use the coarser figure
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0
