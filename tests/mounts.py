"""A file system that fails on command like a mount, for faults that a real disk cannot be made to
have.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from overlord.sources.files import Files

HANGS = "hangs"  # a pipe: opening it blocks until a process writes to it


class Mount(pafs.FileSystemHandler):
    """The files of this machine, with faults from a directory of switches.

    A file there that is named after an errno (or "short") makes reads fail that way, in this and in
    every other process. A number in it limits how often.
    """

    def __init__(self, switches: str):
        self.switches, self._fs = switches, pafs.LocalFileSystem()

    def __reduce__(self) -> Any:
        return Mount, (self.switches,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mount) and other.switches == self.switches

    def get_type_name(self) -> str:
        return "mount"

    def get_file_info(self, paths: list[str]) -> Any:
        return self._fs.get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        return self._fs.get_file_info(selector)

    def open_input_file(self, path: str) -> Any:
        hangs = Path(self.switches) / HANGS
        if hangs.exists() and path.startswith((hangs / "under").read_text()):
            os.close(os.open(hangs / "pipe", os.O_RDONLY))
        return pa.PythonFile(Stumbling(self, path), mode="r")

    def normalize_path(self, path: str) -> str:
        return path

    def fault(self) -> str:
        """Return the fault of the next read, if any, and count it down."""
        for switch in sorted(Path(self.switches).iterdir()):
            if switch.is_file():
                left = int(switch.read_text())
                if left > 1:
                    fail(Path(self.switches), switch.name, left - 1)
                else:
                    switch.unlink()
                return switch.name
        return ""

    def _no(self, *args: Any, **kw: Any) -> Any:
        raise NotImplementedError

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = (
        move
    ) = copy_file = _no
    open_input_stream = open_output_stream = open_append_stream = _no


class Stumbling:
    """An open file of a mount."""

    closed = False

    def __init__(self, mount: Mount, path: str):
        self._mount, self._file = mount, open(path, "rb", buffering=0)  # noqa: SIM115

    def read(self, n: int = -1) -> bytes:
        fault = self._mount.fault()
        if fault == "short":
            return b""
        if fault:
            raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)))
        return self._file.read(n)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        self._file.close()
        self.closed = True


def mounted(switches: Path) -> Files:
    switches.mkdir(exist_ok=True)
    return Files(pafs.PyFileSystem(Mount(str(switches))), False)


def fail(switches: Path, fault: str, times: int) -> None:
    """Set a fault atomically: readers check at any moment."""
    new = switches.with_name(f"{fault}-{times}")
    new.write_text(str(times))
    new.rename(switches / fault)


def hang(switches: Path, under: Path | str = "") -> None:
    """Let every open of a file in that folder block."""
    new = switches.with_name("new")
    new.mkdir()
    (new / "under").write_text(str(under))
    os.mkfifo(new / "pipe")
    new.rename(switches / HANGS)


def let_go(switches: Path) -> None:
    """Release blocked readers, and let no later one block."""
    (switches / HANGS).rename(switches / "was")
    pipe = switches / "was" / "pipe"
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:  # no reader is blocked
            raise
    shutil.rmtree(switches / "was")
