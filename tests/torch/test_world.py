"""Which rank a process is: what is said where nobody says it, or only half of it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import overlord as ov
import overlord.torch as ot
from overlord.client.world import World, world_here
from overlord.session.rendezvous import _Board, serving_host
from tests.internals import RENDEZVOUS_STORE
from tests.torch.jobs import text_job

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


JOINS: dict[str, Callable[[ov.Job], Any]] = {
    "ov.join": ov.join,
    "ot.join": lambda job: ot.join(job),
    "ot.join, a rank": lambda job: ot.join(job, rank=1),
    "StatefulLoader": lambda job: iter(ot.StatefulLoader(job)),
    "Dataset": lambda job: iter(ot.Dataset(job, microbatches=True)),
}


@pytest.mark.parametrize("how", JOINS)
def test_a_mesh_of_several_ranks_is_refused_where_nobody_says_which_this_is(
    tmp_path: Path, how: str
):
    """Every process would launch the job for itself and train on the data of rank 0."""
    with pytest.raises(ov.JobError) as refused:
        JOINS[how](text_job(tmp_path, dp=2))
    said = str(refused.value)
    assert (
        "place: expected one rank, since this process has neither a process group nor "
        "RANK and WORLD_SIZE, got 2 in" in said
    )
    assert (
        "call torch.distributed.init_process_group() before, or start the processes with torchrun"
        in said
    )
    assert "overlord.launch(job), then session.client(rank)" in said


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "many"}, "RANK"),
    ],
)
def test_half_of_what_a_launcher_says_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, str], missing: str
):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    (pair,) = given.items()
    words = (
        f"{missing}: expected a whole number with {'='.join(pair)}, got nothing; call "
        "torch.distributed.init_process_group() before"
    )
    for join in (ov.join, ot.join):
        with pytest.raises(ov.JobError, match=re.escape(words)):
            join(text_job(tmp_path))


def test_rewinding_is_refused_where_ranks_of_a_launcher_have_no_process_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The ranks share one session, and nothing else in which they could meet before one of them
    rewinds it.
    """
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "",
        "MASTER_PORT": "",
    }.items():
        monkeypatch.setenv(name, value)
    words = "rewind=True: expected a process group of the 2 ranks of the mesh"
    with pytest.raises(ov.JobError, match=words):
        iter(ot.StatefulLoader(text_job(tmp_path, dp=2), rewind=True))


@pytest.mark.parametrize("said", ["many", "-1", "1.5"])
def test_a_size_of_the_node_that_is_no_number_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, said: str
):
    store = torch.distributed.HashStore()
    RENDEZVOUS_STORE.replace(monkeypatch, lambda *_: store)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    with pytest.raises(
        ov.JobError,
        match=f"LOCAL_WORLD_SIZE: expected a whole number, got '{re.escape(said)}'; unset it",
    ):
        serving_host(_Board(0, 2, 1.0, {}))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"RANK": "0"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, World(1, 4, "WORLD_SIZE")),
    ],
)
def test_the_environment_says_which_rank_this_is(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], wanted: World | None
):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert world_here("join") == wanted


def test_whoever_asks_does_not_load_torch():
    code = (
        "import sys; from overlord.client.world import world_here; world_here('join'); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
