"""Real kills: sent data stays readable, held memory becomes free again, and nothing is
left behind.
"""

from __future__ import annotations

import gc
import os
import threading

import pytest

from overlord.errors import ActorLost, OverlordError
from overlord.transport.address import Address
from overlord.transport.server import Server
from overlord.transport.shared_memory import SharedMemoryPool
from tests.connections import (
    MB,
    SOON_S,
    TOKEN,
    Story,
    child,
    dialled,
    hold_messages,
    is_message,
    message,
    ping,
    read_nothing,
    serve_echo,
    serve_messages,
    wait_until,
)
from tests.processes import halt, in_shared_memory

TRANSPORTS = ("unix", "tcp")


def test_what_a_killed_sender_had_sent_stays_readable():
    with child(serve_messages, 6, MB) as sender:
        link = dialled(sender.hears())
        link.send("go")
        assert sender.hears() == "sent"
        sender.kill()
        assert all(is_message(link.recv(SOON_S), k) for k in range(6))
        with pytest.raises(ActorLost, match="died"):
            link.recv(SOON_S)
        with pytest.raises(ActorLost):
            link.send(1)


def test_what_was_received_stays_readable_when_sender_and_connection_are_gone():
    with child(serve_messages, 3, MB) as sender:
        link = dialled(sender.hears())
        link.send("go")
        held = [link.recv(SOON_S) for _ in range(3)]
        sender.kill()
        link.close()
        assert all(is_message(value, k) for k, value in enumerate(held))


def test_views_of_a_closed_connection_are_not_filled_by_a_sender_that_lives_on():
    ring = SharedMemoryPool(max_segments=2, name="server")
    with Story(pool=ring) as story:
        link = dialled(story.address)
        story.wait(lambda s: s.opened)
        for k in range(2):
            story.opened[0].send(message(k))
        held = [link.recv(SOON_S) for _ in range(2)]
        link.close()
        story.wait(lambda s: s.closed)
        for _ in range(4):
            ring(MB)[:] = 255
        assert all(is_message(value, k) for k, value in enumerate(held))


def test_a_killed_receiver_frees_what_it_held():
    ring = SharedMemoryPool(max_segments=3, name="server", wait_s=SOON_S)
    with Story(pool=ring) as story, child(hold_messages, story.address, 3) as lease:
        story.wait(lambda s: s.opened)
        for k in range(3):
            story.opened[0].send(message(k))
        assert lease.hears() == [0, 1, 2]
        assert ring.take(MB) is None
        waiter = threading.Thread(target=lambda: ring(MB))
        waiter.start()
        lease.kill()
        waiter.join(SOON_S)
        assert not waiter.is_alive()
        assert ring.n_segments <= 3
        story.wait(lambda s: s.closed)


def test_a_killed_server_frees_what_it_held_of_a_client_that_only_sends():
    """The client has no thread that detects the end of its connection: the pool checks it when it
    is full.
    """
    with child(serve_echo, f"holds-for-a-client-{os.getpid()}") as server:
        ring = SharedMemoryPool(max_segments=2, name="client", wait_s=SOON_S)
        link = dialled(server.hears(), pool=ring)
        halt(server.process.pid or 0)  # it accepts nothing from now on
        for k in range(2):
            link.send(message(k))
        assert ring.take(MB) is None
        waiter = threading.Thread(target=lambda: ring(MB))
        waiter.start()
        server.kill()
        waiter.join(SOON_S)
        assert not waiter.is_alive()


def test_a_client_that_read_the_end_of_its_connection_has_its_segments_back_at_once():
    with child(serve_echo, f"holds-and-ends-{os.getpid()}") as server:
        ring = SharedMemoryPool(max_segments=2, name="client")
        link = dialled(server.hears(), pool=ring)
        halt(server.process.pid or 0)
        for k in range(2):
            link.send(message(k))
        server.kill()
        with pytest.raises(ActorLost):
            link.recv(SOON_S)
        assert ring.take(MB) is not None


def test_a_killed_receiver_is_told_to_the_sender():
    with Story() as story, child(read_nothing, story.address) as peer:
        peer.hears()
        peer.kill()
        story.wait(lambda s: s.closed)
        assert "died" in story.closed[0][1]
        with pytest.raises(ActorLost, match="the deaf one is lost"):
            story.opened[0].send(1)


def test_nothing_is_left_when_both_are_killed_and_the_address_can_be_served_again():
    files, key = in_shared_memory(), f"killed-and-served-again-{os.getpid()}"
    with child(serve_echo, key) as server:
        address = server.hears()
        with child(ping, address) as client:
            assert client.hears() == "going"
            server.kill()
            client.kill()
    assert in_shared_memory() <= files
    with open("/proc/net/unix") as sockets:
        assert key not in sockets.read()
    parsed = Address.parse(address)
    with Story(echo=True, key=parsed.key, port=parsed.port) as story:
        assert story.address == address
        for transport in TRANSPORTS:
            with dialled(address, transport) as link:
                link.send(message(1))
                assert is_message(link.recv(SOON_S), 1)


def test_two_servers_cannot_have_one_key():
    with (
        Story(key=f"taken-{os.getpid()}") as story,
        pytest.raises(OverlordError, match="another server has this key"),
    ):
        Server(
            token=TOKEN, on_message=lambda link, value: None, key=Address.parse(story.address).key
        )


def test_a_closed_server_leaves_no_thread_and_no_open_file():
    gc.collect()
    files, threads = (
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
    )  # of other tests, which may end meanwhile
    for _ in range(3):
        with Story(echo=True) as story, dialled(story.address) as link:
            link.send(message(1))
            assert is_message(link.recv(SOON_S), 1)
        del link, story
    wait_until(
        lambda: (
            gc.collect() >= 0
            and len(os.listdir("/proc/self/fd")) <= files
            and threading.active_count() <= threads
        )
    )
