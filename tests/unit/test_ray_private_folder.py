"""Folders of temporary files belong to this account alone; a path that another account can replace
is detected.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlord.ray import folder, private_folder
from overlord.ray.auth import check_folder
from overlord.ray.folder import MAX_ROOT, Folder, _root
from overlord.ray.private_folder import (
    NotPrivate,
    check_private,
    exposure_of,
    make_private,
    rename_private,
    trusted_owners,
)


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a folder that other accounts can enter. Folders of pytest are private, which hides
    everything below.
    """
    made = Path(tempfile.mkdtemp(dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def test_a_folder_is_private_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = Folder(tmp_path)
    finally:
        os.umask(before)
    assert os.lstat(made.path).st_mode & 0o7777 == 0o700
    assert made.for_ray.parent == made.path, (
        "Ray opens its own folder to all, and not the one above"
    )
    made.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_longest_root_leaves_room_for_the_longest_path_of_a_socket(tmp_path: Path) -> None:
    number = "4194304"  # the highest pid of Linux
    root = f"{'x' * MAX_ROOT}/ov-ray-{number}-abcdefgh/{folder.RAY}"
    assert len(f"{root}/session_2026-11-18_02-08-41_568170_{number}/sockets/plasma_store") <= 107


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_that_others_can_enter_is_refused_by_name(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(
        NotPrivate,
        match=rf"^{tmp_path}/open: expected a folder of account \d+ with mode 0700, "
        rf"got .* mode 0{mode:o}; set",
    ):
        check_private(tmp_path / "open")


def test_a_symlink_or_a_folder_of_another_account_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_private(tmp_path, "mine-")
    (tmp_path / "link").symlink_to(made)
    with pytest.raises(
        NotPrivate, match=rf"^{tmp_path}/link: .* got a symlink of account {os.geteuid()} "
    ):
        check_private(tmp_path / "link")
    owner = os.geteuid()
    monkeypatch.setattr(private_folder.os, "geteuid", lambda: owner + 1)
    with pytest.raises(
        NotPrivate,
        match=rf"expected a folder of account {owner + 1} with mode 0700, got a folder of "
        rf"account {owner} ",
    ):
        check_private(made)


def test_a_name_that_somebody_took_first_is_refused_and_nothing_of_theirs_is_touched(
    tmp_path: Path,
) -> None:
    for planted in ("folder", "link"):
        made = make_private(tmp_path, "ov-new-")
        target = tmp_path / planted
        if planted == "folder":
            (target / "inside").mkdir(parents=True)
        else:
            target.symlink_to(tmp_path / "folder")
        with pytest.raises(
            NotPrivate,
            match=rf"^{target}: expected a free name, got a (folder|symlink) of account \d+",
        ):
            rename_private(made, target)
        assert (tmp_path / "folder" / "inside").is_dir()
        made.rmdir()


def test_a_path_is_exposed_where_others_can_rename_one_of_its_folders(shared: Path) -> None:
    (shared / "open" / "mine").mkdir(parents=True)
    assert exposure_of(shared / "open" / "mine") == ""
    (shared / "open").chmod(0o1777)
    assert exposure_of(shared / "open" / "mine") == "", (
        "the sticky bit keeps entries with their owners, as in /tmp"
    )
    (shared / "open").chmod(0o777)
    assert exposure_of(shared / "open" / "mine") == f"{shared}/open has mode 0777"
    (shared / "link").symlink_to(shared / "open" / "mine")
    assert exposure_of(shared / "link") == f"{shared}/open has mode 0777", "where it leads counts"
    shared.chmod(0o700)
    assert exposure_of(shared / "link") == "", "nobody else gets there"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another account")
def test_a_path_below_a_folder_of_another_account_is_exposed_to_it(shared: Path) -> None:
    (shared / "theirs" / "mine").mkdir(parents=True)
    os.chown(shared / "theirs", 65534, 65534)
    assert exposure_of(shared / "theirs" / "mine") == f"{shared}/theirs belongs to account 65534"
    assert exposure_of(shared / "theirs" / "mine", owners=False) == ""
    os.chown(shared / "theirs", 0, 0)
    (shared / "link").symlink_to(shared / "theirs")
    os.lchown(shared / "link", 65534, 65534)
    assert exposure_of(shared / "link" / "mine") == f"{shared}/link belongs to account 65534"


def test_root_of_the_machine_is_trusted_in_a_user_namespace_too(tmp_path: Path) -> None:
    (tmp_path / "all").write_text("         0          0 4294967295\n")
    (tmp_path / "some").write_text("         0       1000          1\n")
    assert trusted_owners(tmp_path / "all") == {0, os.geteuid()}
    assert trusted_owners(tmp_path / "some") == {0, os.geteuid(), 65534}


def test_a_folder_of_temporary_files_that_others_can_change_is_passed_over(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder, "MAX_ROOT", 200)
    monkeypatch.setattr(folder.tempfile, "gettempdir", lambda: str(shared))
    assert _root() == shared
    shared.chmod(0o777)
    assert _root() == Path("/tmp")
    assert f"files of Ray put into /tmp instead of {shared}" in caplog.text
    monkeypatch.setattr(folder, "exposure_of", lambda path: f"{path} has mode 0777")
    with pytest.raises(
        NotPrivate,
        match=r"^/tmp: expected a folder where other accounts cannot rename .*; set TMPDIR to",
    ):
        _root()


def test_a_cluster_whose_sockets_others_can_replace_is_warned_of_once(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (shared / "ray" / "sockets").mkdir(parents=True)
    check_folder(str(shared / "ray" / "sockets" / "raylet"))
    check_folder("")
    assert caplog.text == ""
    (shared / "ray").chmod(0o777)
    for _ in range(2):
        check_folder(str(shared / "ray" / "sockets" / "raylet"))
    [said] = [record.getMessage() for record in caplog.records]
    assert (
        f"since {shared}/ray has mode 0777; start Ray with --temp-dir=DIR/ray, where DIR "
        "has mode 0700" in said
    )
