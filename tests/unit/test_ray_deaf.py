"""Who waits at a socket for somebody that is deaf goes on after a while, and that one, when it
wakes, finds what was said, and no end.
"""

from __future__ import annotations

import select
import socket
import tempfile
import threading
from collections.abc import Iterator

import pytest

from overlord.ray import raylet_exit
from overlord.ray.raylet_exit import hang_up, not_waited_for
from tests.processes import WAIT_S, until


class Line:
    """Two ends of a link; the far one is at a path."""

    def __init__(self, folder: str, name: str):
        self.path = f"{folder}/{name}"
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(self.path)
            door.listen()
            self.near = socket.socket(socket.AF_UNIX)
            self.near.connect(self.path)
            self.far = door.accept()[0]

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Line, Line]]:
    monkeypatch.setattr(raylet_exit, "_kept", kept := list[socket.socket]())
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path is short
        found = Line(folder, "deaf"), Line(folder, "other")
        yield found
        for end in (*found, *kept):
            end.close()


def hears(end: socket.socket) -> list[bytes]:
    heard = list[bytes]()
    thread = threading.Thread(target=lambda: heard.append(end.recv(100)), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return heard


def test_who_waits_goes_on_and_no_other_is_disturbed(
    lines: tuple[Line, Line], caplog: pytest.LogCaptureFixture
) -> None:
    deaf, other = lines
    deaf.near.sendall(b"I leave")
    with not_waited_for(deaf.path, 0.05):
        assert hears(deaf.near) == [b""]
    until(lambda: caplog.records)  # it is said behind that
    assert [r.getMessage() for r in caplog.records] == [
        "Ray's process of this node has not answered for 0.05 s that this program leaves "
        "it, which is not waited for"
    ]
    deaf.near.close()  # as Ray does next
    woken = select.poll()
    woken.register(deaf.far, select.POLLIN)
    assert woken.poll(0) == [(deaf.far.fileno(), select.POLLIN)], "and no hang-up"
    assert deaf.far.recv(100) == b"I leave"
    assert woken.poll(0) == []
    other.far.sendall(b"well")
    assert hears(other.near) == [b"well"]


def test_one_that_answers_in_time_is_not_hung_up_on(lines: tuple[Line, Line]) -> None:
    deaf, _ = lines
    with not_waited_for(deaf.path, WAIT_S):
        deaf.far.sendall(b"you may")
        assert hears(deaf.near) == [b"you may"]
    deaf.far.sendall(b"more")
    assert hears(deaf.near) == [b"more"]


def test_nobody_at_a_path_is_nobody() -> None:
    assert hang_up("/nowhere") == 0
    assert hang_up("") == 0
