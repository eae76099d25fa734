"""The folder of a cluster stays as long as its owner lives, whatever its pid, and is removed if the
owner was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from overlord.ray.folder import LOCK, MAKING_S, Folder, SigtermHandler, remove_leftovers
from tests.processes import ROOT

OWNER = """
import os, sys
from pathlib import Path
from overlord.ray.folder import Folder
os.getpid = lambda: 999_999_999  # as in another container: nobody has this number here
print(Folder(Path(sys.argv[1])).path, flush=True)
input()
"""


def owner(root: Path) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", OWNER, str(root)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )


def test_a_folder_is_its_owners_until_that_is_killed(tmp_path: Path) -> None:
    with owner(tmp_path) as process:
        try:
            assert process.stdout is not None
            path = Path(process.stdout.readline().strip())
            assert path.name.startswith("ov-ray-999999999-"), "for readers"
            mine = Folder(tmp_path)
            assert path.is_dir(), (
                "its owner lives, though no process of this machine has its number"
            )
            mine.remove()
            assert not mine.path.exists()
        finally:
            process.kill()
    Folder(tmp_path).remove()
    assert list(tmp_path.iterdir()) == [], "the kernel has let go of its lock"


def test_what_nobody_holds_goes_though_somebody_has_the_number(tmp_path: Path) -> None:
    for name in (
        unheld := f"ov-ray-{os.getpid()}-unheld",
        f"ov-ray-{os.getpid()}-old",
        "ov-ray-999999999-old",
    ):
        (tmp_path / name / "session").mkdir(parents=True)
    (tmp_path / unheld / LOCK).touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ov-ray-1-link").symlink_to(tmp_path / "elsewhere")
    remove_leftovers(tmp_path)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["elsewhere", "ov-ray-1-link", f"ov-ray-{os.getpid()}-old"], (
        "one without a lock may be of an older version that runs"
    )


def test_one_that_is_being_made_is_not_taken_for_one_that_was_left(tmp_path: Path) -> None:
    for name in ("ov-new-now", "ov-new-then"):
        (tmp_path / name).mkdir()
    then = (tmp_path / "ov-new-then").stat().st_mtime - MAKING_S - 60
    os.utime(tmp_path / "ov-new-then", (then, then))
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["ov-new-now"]


def test_what_a_program_does_when_it_is_asked_to_end_is_its_own_affair() -> None:
    def saves(number: int, frame: Any) -> None: ...

    def leaves(number: int, frame: Any) -> None: ...

    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, saves)
        kept = SigtermHandler()
        signal.signal(signal.SIGTERM, leaves)  # as Ray does
        kept.keep()
        assert signal.getsignal(signal.SIGTERM) is saves
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        kept = SigtermHandler()
        signal.signal(signal.SIGTERM, leaves)
        kept.keep()
        assert signal.getsignal(signal.SIGTERM) is leaves, (
            "where there is none, Ray's ends what it has started"
        )
        kept.restore()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, saves)
        kept.restore()
        assert signal.getsignal(signal.SIGTERM) is saves, "one that was set since stays"
    finally:
        signal.signal(signal.SIGTERM, before)
