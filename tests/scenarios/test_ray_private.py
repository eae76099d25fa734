"""A cluster that Overlord starts on this machine is out of reach of other accounts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import rays

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(rays.missing()), reason=rays.missing() or "it is there"),
]

NOBODY = 65534
# Attacks of another account. Each is undone by itself, so that a success harms no other test.
ATTEMPTS = """
import errno, os, socket, sys
session = sys.argv[1]
os.setgroups([]), os.setgid(65534), os.setuid(65534)

def connect():
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(f"{session}/sockets/raylet")

def replace():
    os.rename(f"{session}/sockets/raylet", f"{session}/sockets/moved")
    os.rename(f"{session}/sockets/moved", f"{session}/sockets/raylet")

def redirect():
    os.rename(f"{session}/logs", f"{session}/moved")
    os.rename(f"{session}/moved", f"{session}/logs")

def plant():
    os.close(os.open(f"{session}/sockets/planted", os.O_CREAT | os.O_EXCL))

for attempt in (connect, replace, redirect, plant, lambda: os.listdir(session)):
    try:
        attempt()
        print("done")
    except OSError as fault:
        print(errno.errorcode[fault.errno])
"""


def session_of_ray() -> Path:
    from ray._private.worker import _global_node

    return Path(_global_node.get_session_dir_path())


def test_every_path_into_a_cluster_leads_through_a_folder_of_mode_0700(ray_cluster: None) -> None:
    session = session_of_ray()
    modes = {str(path): os.lstat(path).st_mode & 0o777 for path in session.parents}
    private = [
        path
        for path, mode in modes.items()
        if mode == 0o700 and Path(path).name.startswith("ov-ray-")
    ]
    assert len(private) == 1, modes
    assert os.lstat(private[0]).st_uid == os.geteuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try it from another account")
def test_another_account_cannot_connect_to_its_socket_replace_it_or_redirect_its_logs(
    ray_cluster: None,
) -> None:
    command = [sys.executable, "-c", ATTEMPTS, str(session_of_ray())]
    said = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    assert said == ["EACCES"] * 5
