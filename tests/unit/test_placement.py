"""The hosts of a job by node: what is reported while a share is exceeded, and which hosts move when a node joins."""

from __future__ import annotations

from typing import Any

import pytest

from overlord.observe.tables import placement_facts
from overlord.runtime import placement
from overlord.runtime.machine import Machine
from overlord.runtime.placement import Placement, watch
from overlord.runtime.placing import Layout, Node

TRAINER = Node(id="t", name="gpu-0", idle_cores=4)
LAYOUT = Layout(rank_nodes=("gpu-0",), ranks_of=((0,),), share=0.5)
HOSTS = ["constructor-host/0", *(f"loader-host/{i}" for i in range(3))]


class Nodes:
    """The nodes of a cluster, as a control plane tells of them; what was asked of them is in their figures at once."""

    def __init__(self, *nodes: Node):
        self.there = list(nodes)
        self.living: dict[str, dict[str, float]] = {}

    def nodes(self) -> list[Node]:
        return self.there

    def asked(self) -> dict[str, dict[str, float]]:
        return self.living


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [1000.0]
    monkeypatch.setattr(placement.time, "monotonic", lambda: clock[0])
    return clock


def crowded(*nodes: Node) -> tuple[Nodes, Placement]:
    """Four hosts on a node that may have two."""
    control: Any = Nodes(*nodes)
    made = Placement(control, lambda: LAYOUT)
    for name in HOSTS:
        made.place(name, 0)
    return control, made


def test_an_exceeded_share_is_reported_once_in_the_log_and_for_as_long_as_it_lasts_in_the_figures(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    _, made = crowded(TRAINER)
    assert made.review() == []
    assert made.figures() == {"sidecar": 0.5, "exceeded": []}, "figures of nodes have not settled yet"
    now[0] += placement.SETTLED_S + 1
    for _ in range(2):
        assert made.review() == [], "there is nowhere to go"
        now[0] += 3
    [row] = made.figures()["exceeded"]
    assert row == {"node": "gpu-0", "hosts": 4, "allowed": 2, "for_s": 6.0}
    [said] = [r.getMessage() for r in caplog.records]
    assert said == "node gpu-0 runs 4 hosts of this job, and sidecar=0.5 allows 2: no other node had room. They move when one has"
    [(what, words)] = placement_facts(made.figures())
    assert what == "sidecar=0.5 exceeded"
    assert words.startswith("node gpu-0 runs 4 hosts of this job where 2 are allowed, for 6 s")
    made.forget("loader-host/1")
    made.forget("loader-host/2")
    assert made.review() == []
    assert made.figures()["exceeded"] == []
    assert caplog.records[-1].getMessage() == "node gpu-0 runs no more hosts than sidecar allows, again after 6 s"


def test_hosts_are_proposed_when_a_node_with_room_joins_and_their_successors_go_there_with_the_same_memory(now: list[float]) -> None:
    control, made = crowded(TRAINER)
    control.there.append(Node(id="c", name="cpu-0", idle_cores=4))
    now[0] += placement.SETTLED_S + 1
    assert made.review() == ["loader-host/2", "loader-host/1"]
    assert made.review() == [], "not again while it is under way"
    assert made.place("loader-host/10000", 7)["node"] == "c"
    assert made.memory_of("loader-host/10000") == 7
    now[0] += placement.AGAIN_S + 1
    assert made.review() == ["loader-host/2", "loader-host/1"], "unless nothing came of it"


def test_a_planner_is_placed_where_no_ranks_are_and_nothing_is_asked_where_there_is_no_cluster() -> None:
    control: Any = Nodes(TRAINER, Node(id="c", name="cpu-0", idle_cores=4))
    assert Placement(control, lambda: LAYOUT).planner() == {"node": "c"}
    assert Placement(control, Layout).planner() == {}, "where nobody named nodes of ranks"
    alone: Any = object()
    made = Placement(alone, lambda: LAYOUT)
    assert (made.place("loader-host/0", 1), made.planner(), made.figures(), made.review()) == ({}, {}, {}, [])
    assert watch(made, Machine(), alone, lambda hosts: None)() is None, "nor reviewed"
