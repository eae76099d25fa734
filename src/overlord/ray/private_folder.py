"""Folders and paths that no other account of this machine can enter or replace."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from overlord.errors import OverlordError

OTHERS = 0o077  # permission bits of group and others
WRITERS = 0o022  # the write bits of these
ALL_MAPPED = "0 0 4294967295"  # /proc/self/uid_map of a process outside user namespaces
REMEDY = "set TMPDIR to a short path on a local disk that only this account and root can change"


class NotPrivate(OverlordError):
    """A folder that is open to other accounts; the message has folder, reason and remedy."""


def make_private(root: Path, prefix: str) -> Path:
    """Create a folder of a new name with mode 0700 under ``root``, and return its path.

    Raise ``NotPrivate`` if it has another owner or mode afterwards.
    """
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    try:
        check_private(made)
    except BaseException:
        os.rmdir(made)
        raise
    return made


def rename_private(made: Path, path: Path) -> None:
    """Rename a private folder to ``path``.

    Raise ``NotPrivate`` if that fails, or if ``path`` is another or an open folder afterwards.
    """
    before = os.lstat(made)
    try:
        os.rename(made, path)
    except OSError as fault:
        raise NotPrivate(
            f"{path}: expected a free name, got {_file_text(path)} ({fault.strerror}); remove "
            f"it, or {REMEDY}"
        ) from fault
    after = os.lstat(path)
    if (after.st_dev, after.st_ino) != (before.st_dev, before.st_ino):
        raise NotPrivate(
            f"{path}: expected the folder that was just renamed, got {_file_text(path)}; {REMEDY}"
        )
    check_private(path)


def check_private(path: Path) -> None:
    """Raise ``NotPrivate`` unless ``path`` is a private folder of this account.

    No other account may enter it, and it must not be a symlink.
    """
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & OTHERS:
        raise NotPrivate(
            f"{path}: expected a folder of account {os.geteuid()} with mode 0700, got "
            f"{_file_text(path)}; {REMEDY}"
        )


def exposure_of(path: Path, *, owners: bool = True) -> str:
    """Return why another account can replace ``path`` or a folder above it; empty if none can.

    ``owners=False`` accepts folders of any owner and checks their modes alone. A folder that others
    cannot enter protects everything below it.
    """
    trusted = trusted_owners() if owners else None
    # A symlink is as safe as its own folder and its target.
    written, real = Path(os.path.abspath(path)), Path(os.path.realpath(path))
    return _first_exposed(written, trusted) or (
        _first_exposed(real, trusted) if real != written else ""
    )


def _first_exposed(path: Path, trusted: set[int] | None) -> str:
    """Return why another account can replace ``path`` or a folder above it; empty if none can.

    Symlinks are not followed. ``trusted``: accounts that may own them; None: any account may.
    """
    for one in (*reversed(path.parents), path):
        try:
            found = os.lstat(one)
        except OSError as fault:
            return f"{one} cannot be checked: {fault.strerror}"
        if trusted is not None and found.st_uid not in trusted:
            return f"{one} belongs to account {found.st_uid}"
        if stat.S_ISDIR(found.st_mode) and not found.st_mode & OTHERS:
            return ""
        # In a folder with the sticky bit, such as /tmp, only the owner of an entry renames or
        # removes it.
        if (
            stat.S_ISDIR(found.st_mode)
            and found.st_mode & WRITERS
            and not found.st_mode & stat.S_ISVTX
        ):
            return f"{one} has mode {stat.S_IMODE(found.st_mode):04o}"
    return ""


def trusted_owners(uid_map: Path = Path("/proc/self/uid_map")) -> set[int]:
    """Return the user ids of this account and root.

    In a user namespace also return the id for unmapped accounts, as which the machine's root
    appears.
    """
    found = {0, os.geteuid()}
    try:
        if " ".join(uid_map.read_text().split()) != ALL_MAPPED:
            found.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    except (OSError, ValueError):  # not Linux
        pass
    return found


def _file_text(path: Path) -> str:
    try:
        found = os.lstat(path)
    except OSError as fault:
        return f"nothing ({fault.strerror})"
    kind = (
        "a symlink"
        if stat.S_ISLNK(found.st_mode)
        else "a folder"
        if stat.S_ISDIR(found.st_mode)
        else "a file"
    )
    return f"{kind} of account {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}"
