"""The workers of a job by node: what is reported while a share is exceeded, and which workers move
when a node joins.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.cluster import worker_factory
from overlord.cluster.worker_factory import NodePlacement, WorkerFactory, settings_of, watch
from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, JobError
from overlord.observe.tables import placement_facts
from overlord.ray.node_choice import Layout, Node
from overlord.session.cluster_runtime import ClusterRuntime
from overlord.setup.options import Options
from overlord.setup.partition import loader_placement_of
from overlord.setup.prepared_job import PreparedJob
from tests.corpus import write_rows
from tests.processes import WAIT_S

TRAINER = Node(id="t", name="gpu-0", idle_cores=4)
LAYOUT = Layout(rank_nodes=("gpu-0",), ranks_of=((0,),), share=0.5)
HOSTS = ["constructor-worker/0", *(f"loader-worker/{i}" for i in range(3))]


class Nodes:
    """The nodes of a cluster, as a control plane tells of them; what was asked of them is in their
    figures at once.
    """

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
    monkeypatch.setattr(worker_factory.time, "monotonic", lambda: clock[0])
    return clock


def crowded(*nodes: Node) -> tuple[Nodes, NodePlacement]:
    """Four workers on a node that may have two."""
    control: Any = Nodes(*nodes)
    made = NodePlacement(control, lambda: LAYOUT)
    for name in HOSTS:
        made.place(name, 0)
    return control, made


def test_an_exceeded_share_is_reported_once_in_the_log_and_for_as_long_as_it_lasts_in_the_figures(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    _, made = crowded(TRAINER)
    assert made.review() == []
    assert made.metrics() == {"sidecar": 0.5, "exceeded": []}, (
        "figures of nodes have not settled yet"
    )
    now[0] += worker_factory.SETTLED_S + 1
    for _ in range(2):
        assert made.review() == [], "there is nowhere to go"
        now[0] += 3
    [row] = made.metrics()["exceeded"]
    assert row == {"node": "gpu-0", "hosts": 4, "allowed": 2, "for_s": 6.0}
    [said] = [r.getMessage() for r in caplog.records]
    assert (
        said == "node gpu-0 runs 4 workers of this job, and sidecar=0.5 allows 2; loader workers "
        "move when another node has room"
    )
    [(what, words)] = placement_facts(made.metrics())
    assert what == "sidecar=0.5 exceeded"
    assert words.startswith("node gpu-0 has run 4 workers of this job for 6 s, 2 are allowed")
    made.forget("loader-worker/1")
    made.forget("loader-worker/2")
    assert made.review() == []
    assert made.metrics()["exceeded"] == []
    assert (
        caplog.records[-1].getMessage()
        == "node gpu-0 runs no more workers than sidecar allows; it exceeded that for 6 s"
    )


def test_workers_are_proposed_when_a_node_with_room_joins_and_their_successors_go_there_with_the_same_memory(
    now: list[float],
) -> None:
    control, made = crowded(TRAINER)
    control.there.append(Node(id="c", name="cpu-0", idle_cores=4))
    now[0] += worker_factory.SETTLED_S + 1
    assert made.review() == ["loader-worker/2", "loader-worker/1"]
    made.accept(["loader-worker/2", "loader-worker/1"])
    assert made.review() == [], "not again while it is under way"
    assert made.place("loader-worker/10000", 7)["node"] == "c"
    assert made.memory_of("loader-worker/10000") == 7
    now[0] += worker_factory.PROPOSE_AGAIN_S + 1
    assert made.review() == ["loader-worker/2", "loader-worker/1"], "unless nothing came of it"


def test_a_planner_is_placed_where_no_ranks_are_and_nothing_is_asked_where_there_is_no_cluster() -> (
    None
):
    control: Any = Nodes(TRAINER, Node(id="c", name="cpu-0", idle_cores=4))
    made = NodePlacement(control, lambda: LAYOUT)
    assert made.coordinator(restarts=True) == {"node": "c"}
    control.node_here = lambda: "mine"
    assert made.coordinator(restarts=False) == {"node": "mine"}, "no further node to be lost"
    unnamed = NodePlacement(control, Layout)
    assert unnamed.coordinator(restarts=True) == {}, "where nobody named nodes of ranks"
    alone: Any = object()
    made = NodePlacement(alone, lambda: LAYOUT)
    assert (
        made.place("loader-worker/0", 1),
        made.coordinator(restarts=True),
        made.coordinator(restarts=False),
        made.metrics(),
        made.review(),
    ) == ({}, {}, {}, {}, [])
    assert watch(made, Platform(), alone, lambda hosts, accept: None)() is None, "nor reviewed"


class Beats(Platform):
    """A clock that the test moves."""

    def every(self, seconds: float, call: Callable[[], None], name: str) -> Callable[[], None]:
        self.beat = call
        return lambda: None


def joined(now: list[float]) -> tuple[Any, NodePlacement]:
    """Two of the workers are to move: a node with room has joined."""
    control, made = crowded(TRAINER)
    control.there.append(Node(id="c", name="cpu-0", idle_cores=4))
    now[0] += worker_factory.SETTLED_S + 1
    return control, made


def test_a_move_is_told_when_it_is_accepted_and_proposed_until_then(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    control, made = joined(now)
    machine, asked = Beats(), list[tuple[list[int], Callable[[], None]]]()
    watch(made, machine, control, lambda hosts, accept: asked.append((hosts, accept)))
    for _ in range(2):
        machine.beat()  # refused, while another change runs
        now[0] += worker_factory.REVIEW_S
    assert [hosts for hosts, _ in asked] == [[2, 1], [2, 1]]
    assert not [r for r in caplog.records if "moves to" in r.getMessage()], "nothing moves yet"
    accept = asked[-1][1]
    accept()
    told = [r.getMessage() for r in caplog.records if "moves to" in r.getMessage()]
    assert (
        told[0]
        == "loader-worker/2 moves to node cpu-0, which has room: node gpu-0 exceeds sidecar=0.5"
    )
    assert len(told) == 2
    machine.beat()
    assert len(asked) == 2, "not again while it is under way"


def test_a_move_that_fails_is_told_and_reviews_go_on(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    control, made = joined(now)
    machine, asked = Beats(), list[list[int]]()

    def move(hosts: list[int], accept: Callable[[], None]) -> None:
        asked.append(hosts)
        raise RuntimeError("the planner is somewhere else")

    watch(made, machine, control, move)
    for _ in range(2):
        machine.beat()
    assert asked == [[2, 1], [2, 1]]
    faults = [r for r in caplog.records if r.exc_info is not None]
    assert [str(r.exc_info[1]) for r in faults if r.exc_info] == [
        "the planner is somewhere else"
    ] * 2


class Refusing(Nodes):
    """A cluster that starts no process."""

    refuses = True

    def spawn(self, factory: Any, *args: Any, name: str, **where: Any) -> Any:
        if self.refuses:
            raise ActorLost(name, "the cluster refused it")
        return name


def test_a_worker_that_could_not_be_started_leaves_no_place_behind(tmp_path: Path) -> None:
    source = ov.Source(
        "s", write_rows(tmp_path / "s", "parquet", [{"tokens": [1]}]), transforms=[ov.Tokens()]
    )
    job = ov.Job(
        name="ghost",
        sources=[source],
        batch=ov.Batch(samples=1, context=8),
        place=ov.ClientPlaceTree(dp=1),
    )
    control: Any = Refusing(TRAINER)
    blueprint = PreparedJob(job, Options())
    with closing(blueprint):
        hosting = loader_placement_of(blueprint)
        recipes = WorkerFactory(
            control, lambda: blueprint, settings_of(blueprint, hosting, "t", 0), hosting, [0]
        )
        for start in (
            lambda: recipes.constructor(0),
            lambda: recipes.loader_worker(0, [0], (), {}),
        ):
            with pytest.raises(ActorLost, match="the cluster refused it"):
                start()
        assert recipes.placement.metrics() == {}, "nothing is placed"
        control.refuses = False
        recipes.loader_worker(10000, [0], (), {}, instead_of=0)
        memory = recipes.placement.memory_of("loader-worker/10000")
        control.refuses = True
        with pytest.raises(ActorLost):
            recipes.loader_worker(10000, [0], (), {})
        assert recipes.placement.memory_of("loader-worker/10000") == memory, (
            "a host that is started again keeps its place for the next try"
        )


def test_a_worker_whose_source_could_not_join_leaves_no_place_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise JobError(["the planner refuses it"], "add_source")

    forgotten = list[str]()
    first, late = (
        ov.Source(
            name,
            write_rows(tmp_path / name, "parquet", [{"tokens": [1, 2]}] * 40),
            transforms=[ov.Tokens()],
        )
        for name in "ab"
    )
    job = ov.Job(
        name="late",
        sources=[first],
        batch=ov.Batch(samples=2, context=8),
        place=ov.ClientPlaceTree(dp=1),
    )
    monkeypatch.setattr(NodePlacement, "forget", lambda self, name: forgotten.append(name))
    with ov.launch(
        job, runtime="process", hosts=1, constructor_hosts=1, stall_limit_s=WAIT_S
    ) as session:
        with monkeypatch.context() as patch:
            patch.setattr(ClusterRuntime, "add_source", refuses)
            with pytest.raises(JobError, match="the planner refuses it"):
                session.add_source(late, loaders=1)
        assert forgotten == ["loader-worker/1"]
