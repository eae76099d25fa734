"""What Ray would leave behind: files of its clusters, settings in the environment. Nothing of Ray is imported in this file."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
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


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """What is put into the environment meanwhile is taken out again: with Ray's, a trainer's ``breakpoint()`` opens a debugger of Ray."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for key in os.environ.keys() - before.keys():
            del os.environ[key]
        os.environ.update({key: value for key, value in before.items() if os.environ.get(key) != value})
