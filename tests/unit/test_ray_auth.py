"""Addresses of one head, authentication of a cluster, and the interface on which a
process listens.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest

from overlord.concurrency.platform import NetworkPlatform
from overlord.errors import JobError
from overlord.ray.auth import (
    ClusterRefused,
    authentication_disabled,
    check_joined,
    check_open_cluster,
    check_token,
    same_head,
)
from overlord.ray.worker import RayLaunchSpec, adopt_environment
from overlord.transport.address import reachable

SHUT, OPEN = (
    {False: False, True: True},
    {False: True, True: True},
)  # accepts(with_token): a client with the token is accepted, one without is not


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1:6379", "10.0.0.1:6379", True),
        ("10.0.0.1:6379", "10.0.0.1:6380", False),
        ("10.0.0.1:6379", "10.0.0.2:6379", False),
        ("localhost:6379", "127.0.0.1:6379", True),
        ("[::1]:6379", "localhost:6379", True),
        ("no-such-host.invalid:6379", "no-such-host.invalid:6379", True),
        ("no-such-host.invalid:6379", "127.0.0.1:6379", False),
        (f"{socket.gethostname()}:6379", "127.0.0.1:6379", True),
    ],
)
def test_names_and_addresses_of_one_machine_lead_to_one_head(
    one: str, other: str, same: bool
) -> None:
    assert same_head(one, other) is same
    assert same_head(other, one) is same


def test_who_is_on_none_of_its_nodes_is_told_to_join_at_once(tmp_path: Path) -> None:
    (tmp_path / "raylet").touch()
    check_joined([], "head:6379")
    check_joined([("203.0.113.1", "/nowhere"), ("127.0.0.1", "/nowhere")], "head:6379")
    check_joined([("203.0.113.1", str(tmp_path / "raylet"))], "head:6379")
    words = (
        r"on this machine \(its nodes: 203\.0\.113\.1\): join it first, "
        r"ray start --address=head:6379"
    )
    with pytest.raises(ClusterRefused, match=words):
        check_joined([("203.0.113.1", "/nowhere")], "head:6379")


@pytest.mark.parametrize(
    ("mode", "has_token", "accepts", "words"),
    [
        (None, True, SHUT, ""),
        ("token", True, SHUT, ""),
        (
            None,
            False,
            SHUT,
            r"expected the token of .* RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/\.ray/auth_token, "
            r"got none.*AUTH_MODE=disabled",
        ),
        (
            None,
            True,
            OPEN,
            r"it requires no token, so everyone who reaches its ports can run code "
            r".*RAY_AUTH_MODE=disabled in the environment",
        ),
        (None, True, {False: False, True: False}, "it rejects the token in RAY_AUTH_TOKEN"),
        (
            "disabled",
            False,
            SHUT,
            "it requires a token: expected RAY_AUTH_MODE=token, got RAY_AUTH_MODE=disabled",
        ),
        ("of", True, SHUT, "RAY_AUTH_MODE: expected token or disabled, got 'of'"),
    ],
)
def test_a_cluster_is_used_with_its_token_or_not_at_all(
    mode: str | None,
    has_token: bool,
    accepts: dict[bool, bool],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    if words:
        with pytest.raises(ClusterRefused, match=words):
            check_token(lambda: has_token, accepts.__getitem__)
    else:
        check_token(lambda: has_token, accepts.__getitem__)
    assert caplog.records == []


def test_without_a_token_only_where_that_is_said_by_name_and_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert authentication_disabled()
    with caplog.at_level(logging.WARNING, "overlord"):
        check_token(lambda: False, OPEN.__getitem__)
    [said] = caplog.messages
    assert said.startswith(
        "the cluster is used without token authentication: everyone who reaches its ports can "
        "run code in it"
    )


def test_a_wrong_mode_is_a_job_error_where_the_program_connected_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "of")
    words = r"^launch: RAY_AUTH_MODE: expected token or disabled, got 'of'; set one"
    with pytest.raises(JobError, match=words):
        check_open_cluster()


def test_a_process_listens_where_the_environment_says_then_at_its_node_then_at_the_default_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OVERLORD_INTERFACE", raising=False)
    assert NetworkPlatform().inside()["host"] == reachable("")
    assert NetworkPlatform(None, "127.0.0.2").inside()["host"] == "127.0.0.2"
    monkeypatch.setenv("OVERLORD_INTERFACE", "127.0.0.3")
    assert NetworkPlatform(None, "127.0.0.2").inside()["host"] == "127.0.0.3"
    adopt_environment(RayLaunchSpec(name="part", address="", token="", lease_id=1), "127.0.0.2")
    assert os.environ["OVERLORD_INTERFACE"] == "127.0.0.3", "said where the node was started"
    monkeypatch.delenv("OVERLORD_INTERFACE")
    adopt_environment(RayLaunchSpec(name="part", address="", token="", lease_id=1), "127.0.0.2")
    assert NetworkPlatform().inside()["host"] == "127.0.0.2"
    monkeypatch.delenv("OVERLORD_INTERFACE")
