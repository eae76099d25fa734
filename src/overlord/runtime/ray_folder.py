"""Where a Ray cluster of ours keeps its files. Nothing of Ray is imported in this file."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

FOLDER = "ov-ray-"
MAX_ROOT = 18  # letters: a socket's path has 107, and Ray puts 65 of its own behind the folder


def new_folder() -> Path:
    """A folder of its own for a cluster: nothing that another one left behind is found there. Those of programs that were killed go."""
    root = Path(tempfile.gettempdir())
    if len(str(root)) > MAX_ROOT:
        root = Path("/tmp")
    for old in root.glob(f"{FOLDER}*"):
        pid = old.name.removeprefix(FOLDER).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and old.stat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-", dir=root))
