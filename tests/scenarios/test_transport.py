"""Connections between real processes: delivery, release of memory, and waits."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from overlord.errors import ActorLost, DataStall, OverlordError
from overlord.transport import server
from overlord.transport.address import Address, address_text
from overlord.transport.connection import TIMEOUT
from overlord.transport.local_connection import PAIR_MESSAGES, pair
from overlord.transport.server import Server
from overlord.transport.shared_memory import SharedMemoryPool
from tests.connections import (
    MB,
    SOON_S,
    TOKEN,
    Story,
    child,
    dialled,
    is_message,
    message,
    read_nothing,
    send_messages,
    serve_echo,
    wait_until,
)
from tests.internals import replace_receiver

TRANSPORTS = ("unix", "tcp")


def addresses_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


# delivery


def test_a_pair_within_the_process_hands_over_the_same_memory():
    left, right = pair()
    array = np.arange(1000)
    left.send({"data": array})
    assert right.recv(SOON_S)["data"] is array
    right.send("back")
    assert left.recv(SOON_S) == "back"
    assert left.recv(0.01) is TIMEOUT


def test_a_pair_is_bounded_and_ends_after_all_was_read():
    left, right = pair(names=("left", "right"))
    for k in range(PAIR_MESSAGES):
        left.send(k)
    with pytest.raises(DataStall, match="right to accept one of 64 messages"):
        left.send("one more", timeout_s=0.05)
    left.close("enough")
    assert [right.recv(SOON_S) for _ in range(PAIR_MESSAGES)] == list(range(PAIR_MESSAGES))
    with pytest.raises(ActorLost, match="left is lost: the connection was closed: enough"):
        right.recv(SOON_S)
    with pytest.raises(ActorLost):
        right.send(1)


def test_the_end_of_a_pair_can_be_waited_for_with_others():
    import select

    left, right = pair()
    left.send(1)
    assert select.select([right], [], [], SOON_S)[0] == [right]
    assert right.recv(SOON_S) == 1
    assert select.select([right], [], [], 0)[0] == []
    left.close()
    assert select.select([right], [], [], SOON_S)[0] == [right]
    right.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_values_come_back_equal_and_read_only(transport: str):
    with Story(echo=True) as story, dialled(story.address, transport) as link:
        assert link.shares_memory == (transport == "unix")
        for k, nbytes in enumerate((0, 1, 100, 40_000, 70_000, MB, 5 * MB)):
            link.send(message(k, nbytes))
            value = link.recv(SOON_S)
            assert is_message(value, k, nbytes)
            assert not value["data"].flags.writeable


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_values_of_every_shape_come_back_as_they_were(transport: str):
    values: list[Any] = [
        None,
        3,
        "text",
        [1, (2.5, b"x")],
        {"a": [np.float32(2), {"b": np.zeros((3, 0, 2))}]},
        np.arange(60_000).reshape(20, 30, 100)[:, ::2],
        np.array(5),
        np.ones((300, 300), bool),
        [np.full(20_000, i, np.int16) for i in range(20)],
        ValueError("no"),
    ]
    with Story(echo=True) as story, dialled(story.address, transport) as link:
        for value in values:
            link.send(value)
            back = link.recv(SOON_S)
            if isinstance(value, ValueError):
                assert (type(back), back.args) == (ValueError, ("no",))
            else:
                np.testing.assert_equal(back, value)


def test_dial_takes_shared_memory_where_it_can_and_tcp_where_it_must():
    with Story() as story:
        assert dialled(story.address).shares_memory
        parsed = Address.parse(story.address)
        elsewhere = str(Address(host=parsed.host, port=parsed.port, key="not-on-this-machine"))
        assert not dialled(elsewhere).shares_memory
        with pytest.raises(ActorLost, match="its local socket does not answer"):
            dialled(elsewhere, "unix")


def test_an_address_where_nobody_is_says_so():
    with Story() as story:
        address = story.address
    with pytest.raises(ActorLost, match="it does not answer"):
        dialled(address)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://a:1/k",
        "overlord://a/k",
        "overlord://a:x/k",
        "overlord://a:1/",
        "overlord://a:1/k/l",
    ],
)
def test_what_is_no_address_is_refused_with_how_one_looks(text: str):
    with pytest.raises(OverlordError, match="overlord://host:port/key"):
        Address.parse(text)


def test_an_address_reads_back():
    for host in ("127.0.0.1", "::1", "node-7.example"):
        address = Address(host=host, port=12, key="k-1")
        assert Address.parse(str(address)) == address


def test_an_address_without_a_port_is_shown_as_its_local_socket():
    assert address_text("overlord://127.0.0.1:0/abc") == "local socket @overlord-abc"
    for other in ("overlord://127.0.0.1:80/abc", "", "what is none"):
        assert address_text(other) == other


def test_an_array_of_the_pool_is_sent_without_a_copy():
    """Both sides see the same memory: a later write of the sender, which is not allowed, is
    visible.
    """
    ring = SharedMemoryPool(name="mine")
    with Story() as story, dialled(story.address, pool=ring) as link:
        array = ring(MB)
        array[:] = 1
        link.send(array[100:200_000].view(np.int16))
        story.wait(lambda s: s.got)
        array[100:102] = 9
        assert story.got[0][0] == 0x0909
        assert ring.segments_made == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_threads_may_send_on_one_connection(transport: str):
    with Story() as story, dialled(story.address, transport) as link:
        threads = [
            threading.Thread(
                target=lambda i=i: [link.send(message(100 * i + k, 50_000)) for k in range(20)]
            )
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        story.wait(lambda s: len(s.got) == 80)
        for i in range(4):
            mine = [v for v in story.got if v["k"] // 100 == i]
            assert [v["k"] % 100 for v in mine] == list(range(20))
            assert all(is_message(v, v["k"], 50_000) for v in mine)
        for thread in threads:
            thread.join()


# segments


def test_a_thousand_messages_need_a_handful_of_segments():
    with child(serve_echo, f"a-thousand-{os.getpid()}") as server, dialled(server.hears()) as link:
        for k in range(1000):
            link.send(message(k, 200_000))
            assert is_message(link.recv(SOON_S), k, 200_000)
        assert link.pool.segments_made <= 4, f"{link.pool.segments_made} segments for 1000 messages"
        assert link.remote_mapped <= 4
        assert link.remote_held == 0


def test_a_pool_of_two_segments_is_enough_when_the_reader_lets_go():
    with Story() as story:
        story.keep = False
        with child(send_messages, story.address, 300, MB, "auto", 2) as sender:
            assert sender.hears() <= 4  # the first message is a little smaller than the others


VIEWS = {
    "arrays": lambda value: value["data"],
    "slices of slices": lambda value: value["data"][10:][5:20][::2],
    "tensors": lambda value: pytest.importorskip("torch").from_numpy(value["data"])[7:],
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("kind", VIEWS)
def test_a_peers_segment_is_free_when_the_last_view_dies(kind: str):
    ring = SharedMemoryPool(max_segments=3, name="server", wait_s=0.05)
    with Story(pool=ring) as story, dialled(story.address) as link:
        story.wait(lambda s: s.opened)
        for k in range(3):
            story.opened[0].send(message(k))
        views = [VIEWS[kind](link.recv(SOON_S)) for _ in range(3)]
        gc.collect()
        assert link.remote_held == 3
        with pytest.raises(DataStall, match="holds 3"):
            ring(MB)
        views.pop()
        assert link.remote_held == 2
        assert len(ring(MB)) == MB
        assert ring.segments_made == 3


def test_a_reader_that_keeps_everything_gets_copies_and_the_pool_goes_on():
    ring = SharedMemoryPool(max_segments=4, name="server")
    with Story(pool=ring) as story, dialled(story.address) as link:
        link.max_held = 2
        story.wait(lambda s: s.opened)
        kept = []
        for k in range(30):
            story.opened[0].send(message(k), timeout_s=SOON_S)
            kept.append(link.recv(SOON_S))
        assert link.remote_held == 2
        assert link.copied == 28
        assert all(is_message(value, k) for k, value in enumerate(kept))
        assert not any(value["data"].flags.writeable for value in kept)


def test_how_much_a_reader_may_hold_is_said_by_the_server():
    with Story(hold=5) as story, dialled(story.address) as link:
        assert link.max_held == 13


def test_the_peer_unmaps_segments_that_the_pool_has_dropped():
    ring = SharedMemoryPool(max_bytes=8 * MB, name="server")
    with Story(pool=ring) as story, dialled(story.address) as link:
        story.wait(lambda s: s.opened)
        sizes = [MB, 2 * MB, 4 * MB, 8 * MB, MB // 8, 8 * MB, MB // 8, 8 * MB]
        for k, nbytes in enumerate(sizes):
            story.opened[0].send(message(k, nbytes - 4096))
            assert is_message(link.recv(SOON_S), k, nbytes - 4096)
        assert link.remote_mapped == ring.n_segments <= 2
        assert ring.nbytes <= 8 * MB


def test_a_message_larger_than_the_pool_goes_through_the_socket():
    with (
        Story(echo=True) as story,
        dialled(story.address, pool=SharedMemoryPool(name="client", max_bytes=MB)) as link,
    ):
        link.send(message(1, 3 * MB))
        assert is_message(link.recv(SOON_S), 1, 3 * MB)


def test_a_forked_child_that_ends_frees_nothing_of_its_parent():
    ring = SharedMemoryPool(max_segments=1, name="server", wait_s=0.05)
    with Story(pool=ring) as story, dialled(story.address) as link:
        story.wait(lambda s: s.opened)
        story.opened[0].send(message(4))
        value = link.recv(SOON_S)
        pid = os.fork()
        if pid == 0:
            try:
                del value
                gc.collect()
            finally:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert ring.take(MB) is None
        assert is_message(value, 4)


# Back-pressure


def send_many(link: Any) -> None:
    for k in range(100):
        link.send(message(k), timeout_s=0.1)


def test_a_sender_whose_peer_lets_nothing_go_waits_and_then_names_it():
    ring = SharedMemoryPool(max_segments=3, name="server")
    with Story(pool=ring) as story, child(read_nothing, story.address) as deaf:
        deaf.hears()
        for k in range(3):
            story.opened[0].send(message(k))
        with pytest.raises(
            DataStall, match=r"the deaf one to release what was sent: .* the deaf one holds 3"
        ):
            story.opened[0].send(message(4), timeout_s=0.1)


def test_a_sender_over_tcp_whose_peer_reads_nothing_waits_and_then_names_it():
    with Story() as story, child(read_nothing, story.address, "tcp") as deaf:
        deaf.hears()
        link = story.opened[0]
        link.max_queued_bytes = 8 * MB
        with pytest.raises(DataStall, match="the deaf one to accept"):
            send_many(link)
        assert link.queued_bytes <= 8 * MB + 2 * MB


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_client_whose_server_reads_nothing_waits_and_then_names_it(transport: str):
    """The server's thread is kept busy by a callback that does not return."""
    stuck, go_on = threading.Event(), threading.Event()

    def on_message(link: Any, value: Any) -> None:
        stuck.set()
        go_on.wait(SOON_S)

    with Server(token=TOKEN, on_message=on_message) as server:
        link = dialled(
            server.address, transport, pool=SharedMemoryPool(name="client", max_segments=4)
        )
        link.send(1)
        assert stuck.wait(SOON_S)
        with pytest.raises(DataStall, match="overlord://"):
            send_many(link)
        go_on.set()
        link.send("it goes on", timeout_s=SOON_S)
        link.close()


def test_one_slow_connection_holds_up_no_other():
    with Story(echo=True) as story:
        slow, quick = dialled(story.address, "tcp"), dialled(story.address)
        story.keep = False
        for k in range(12):
            slow.send(message(k, 4 * MB))  # echoed into a socket without a reader
        wait_until(lambda: story.opened[0].queued_bytes > 2**24)
        for k in range(50):
            quick.send(message(k))
            assert is_message(quick.recv(SOON_S), k)
        assert story.opened[0].queued_bytes > 2**24
        for k in range(12):
            assert is_message(slow.recv(SOON_S), k, 4 * MB)
        wait_until(
            lambda: story.opened[0].queued_bytes == 0
        )  # the last bytes may be read before the server counts them
        slow.close()
        quick.close()


def test_what_is_queued_when_a_connection_is_closed_still_arrives(monkeypatch: pytest.MonkeyPatch):
    # The reader may be suspended for longer than a connection lingers.
    patient = replace(server.TIMEOUTS, linger_s=SOON_S)
    monkeypatch.setattr(server, "TIMEOUTS", patient)
    with Story() as story, dialled(story.address, "tcp") as link:
        story.wait(lambda s: s.opened)
        for k in range(10):
            story.opened[0].send(message(k, 3 * MB))
        story.opened[0].close("done")
        assert all(is_message(link.recv(SOON_S), k, 3 * MB) for k in range(10))
        with pytest.raises(ActorLost, match="it closed the connection: done"):
            link.recv(SOON_S)


def test_of_several_ports_the_first_that_is_free_is_taken_and_when_all_are_taken_it_is_said():
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with Server(
            token=TOKEN, on_message=lambda link, value: None, port=range(taken, taken + 50)
        ) as server:
            assert taken < Address.parse(server.address).port < taken + 50
        with pytest.raises(
            OverlordError,
            match=f"cannot serve at 127.0.0.1: the ports {taken} to {taken} are all in use; allow "
            "more",
        ):
            Server(token=TOKEN, on_message=lambda link, value: None, port=range(taken, taken + 1))


def test_a_host_that_the_environment_names_and_this_machine_has_not_is_reported_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("OVERLORD_INTERFACE", "192.0.2.1")
    said = (
        "cannot serve at 192.0.2.1:0: .*an address of this machine, and OVERLORD_INTERFACE "
        "in the environment names this one"
    )
    with pytest.raises(OverlordError, match=said):
        Server(token=TOKEN, on_message=lambda link, value: None, host="192.0.2.1")


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_server_that_has_caught_up_has_read_what_lay_there(transport: str):
    """The sender may be dead by then, so it cannot be queried again."""
    stands, goes_on = threading.Event(), threading.Event()
    with Story() as story:

        def standing(receive: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
            def stand(link: Any, value: Any) -> None:
                receive(link, value)
                if value == "stand":
                    stands.set()
                    goes_on.wait(SOON_S)

            return stand

        replace_receiver(story.server, standing)
        with dialled(story.address) as other:
            link = dialled(story.address, transport)
            story.wait(lambda s: len(s.opened) == 2)
            other.send("stand")
            assert stands.wait(
                SOON_S
            )  # it has read its sockets, and the other connection sent nothing
            link.send("last words")
            link.close()
            threading.Timer(0.1, goes_on.set).start()
            assert story.server.caught_up(SOON_S)
            assert story.got[-1] == "last words"
