"""The cost model of a fleet, and when payload comes to everyone: laws, and the arithmetic of a
small one by hand.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.dryrun.arrivals import arrivals
from overlord.dryrun.machines import (
    ClusterShape,
    Constants,
    colocated_memory,
    connecting_s,
    connections,
    overlord_memory,
)
from tests.laws import examples

ONES = Constants(**{f.name: 1.0 for f in fields(Constants)})
LIKELY = Constants(
    worker_bytes=20e6,
    opened_bytes=2e6,
    host_bytes=90e6,
    source_bytes=3e6,
    constructor_bytes=50e6,
    planner_bytes=90e6,
    client_bytes=5e5,
    link_bytes=6e4,
    sample_bytes=2e3,
    sample_tokens=500.0,
    built_bytes=4.0,
    wide_bytes=28.0,
    read_s=1e-4,
    build_s=1e-8,
    call_s=6e-5,
    link_s=1e-5,
    connect_s=5e-4,
    bandwidth=4e9,
)
SMALL = st.integers(1, 8)
FLEETS = st.builds(
    lambda dp, tp, cp, pp, node, sources, batch, workers, constructors: ClusterShape(
        gpus=dp * tp * cp * pp,
        tp=tp,
        cp=cp,
        pp=pp,
        gpus_per_node=node,
        sources=sources,
        batch=batch,
        workers=workers,
        constructors=constructors,
    ),
    st.integers(1, 64),
    SMALL,
    SMALL,
    SMALL,
    st.sampled_from([1, 8, 16]),
    st.integers(1, 300),
    st.integers(1, 4096),
    SMALL,
    st.booleans(),
)


def test_a_fleet_of_two_groups_by_hand() -> None:
    fleet = ClusterShape(
        gpus=8,
        tp=2,
        cp=2,
        gpus_per_node=4,
        sources=30,
        batch=4,
        workers=2,
        prefetch=2,
        read_ahead=3,
    )
    assert (fleet.dp, fleet.nodes, fleet.fetching, fleet.loader_hosts, fleet.constructor_hosts) == (
        2,
        2,
        4,
        2,
        2,
    )
    # 8 ranks x 2 workers, each with itself and 30 sources, and two batches of 2 samples.
    assert colocated_memory(fleet, ONES).by_role == {"workers": 16 * 31, "batches": 16 * 2 * 2}
    assert (
        colocated_memory(fleet, ONES, first_of_tp=True).total
        == colocated_memory(fleet, ONES).total / 2
    )
    links = connections(fleet)
    assert (links.total, links.loader_host, links.constructor, links.client, links.planner) == (
        2 * 2 + 8 + 2 + 2,
        3,
        2 + 4 + 1,
        1,
        4,
    )
    found = overlord_memory(fleet, ONES)
    # workers, sources, and five steps' samples: three ready and two kept; a connection to each of
    # two constructors and one to the planner
    assert found.by_role["loaders"] == 2 + 30 + 5 * 4 + 2 * 3
    assert found.by_role["constructors"] == 2 * (1 + 7) + 2 * 4 + 2 * 4
    assert found.by_role["clients"] == 8 * 2  # its own memory, and a connection
    assert found.per_node == found.total / 2


@given(FLEETS, st.integers(2, 9))
@examples(60)
def test_sets_of_loaders_multiply_workers_and_sources_and_share_the_samples(
    fleet: ClusterShape, copies: int
) -> None:
    one, more = replace(fleet, copies=1), replace(fleet, copies=copies)
    free = replace(LIKELY, host_bytes=0, source_bytes=0, link_bytes=0)
    shared = [overlord_memory(made, free).by_role["loaders"] for made in (one, more)]
    assert shared[0] == shared[1]
    alone = replace(free, sample_bytes=0, host_bytes=1, source_bytes=1)
    apart = [overlord_memory(made, alone).by_role["loaders"] for made in (one, more)]
    assert apart[1] == copies * apart[0]


@given(FLEETS, st.integers(1, 100))
@examples(60)
def test_more_sources_cost_a_colocated_loader_every_rank_and_overlord_once(
    fleet: ClusterShape, more: int
) -> None:
    grown = replace(fleet, sources=fleet.sources + more)
    theirs = colocated_memory(grown, LIKELY).total - colocated_memory(fleet, LIKELY).total
    ours = overlord_memory(grown, LIKELY).total - overlord_memory(fleet, LIKELY).total
    hosts = grown.loader_hosts - fleet.loader_hosts
    ends = (
        (overlord_memory(grown, LIKELY).total - overlord_memory(fleet, LIKELY).total)
        - hosts * LIKELY.host_bytes
        - more * LIKELY.source_bytes
    )
    assert theirs == pytest.approx(fleet.gpus * fleet.workers * more * LIKELY.opened_bytes)
    assert ours >= more * LIKELY.source_bytes * 0.999
    if hosts == 0:
        assert ends == pytest.approx(0.0, abs=1.0)  # nothing of it depends on ranks


@given(FLEETS)
@examples(60)
def test_more_of_anything_never_takes_less(fleet: ClusterShape) -> None:
    for name in ("workers", "batch", "sources", "prefetch", "read_ahead"):
        more = replace(fleet, **{name: getattr(fleet, name) + 1})
        assert overlord_memory(more, LIKELY).total >= overlord_memory(fleet, LIKELY).total
        assert colocated_memory(more, LIKELY).total >= colocated_memory(fleet, LIKELY).total
        assert connecting_s(more, LIKELY) >= connecting_s(fleet, LIKELY)


@given(FLEETS)
@examples(60)
def test_constructors_leave_loader_workers_no_more_connections_than_ranks_would(
    fleet: ClusterShape,
) -> None:
    with_them, without = (connections(replace(fleet, constructors=c)) for c in (True, False))
    assert with_them.loader_host <= without.loader_host
    assert with_them.client <= without.client


def test_a_mesh_that_does_not_divide_the_fleet_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"gpus: expected a multiple of tp x cp x pp = 6, got 8"):
        ClusterShape(gpus=8, tp=2, cp=3)
    with pytest.raises(ValueError, match="workers: expected at least 1, got 0"):
        ClusterShape(gpus=8, workers=0)
    with pytest.raises(ValueError, match="got no bandwidth"):
        Constants.of({f.name: 1 for f in fields(Constants) if f.name != "bandwidth"})


def slowly(
    start: np.ndarray,
    nbytes: np.ndarray,
    node_of: np.ndarray,
    free: np.ndarray,
    link_s: float,
    bandwidth: float,
) -> np.ndarray:
    """The same, message by message."""
    senders, receivers = nbytes.shape
    sent = []
    for h in range(senders):
        at = start[h]
        for k in range(receivers):
            r = (k + h * receivers // senders) % receivers
            if nbytes[h, r] > 0:
                cost = link_s + nbytes[h, r] / bandwidth
                at += cost
                sent.append((at, r, cost))
    busy, last = free.copy(), np.full(receivers, -np.inf)
    for at, r, cost in sorted(sent):
        node = node_of[r]
        busy[node] = max(at, busy[node] + cost)
        last[r] = max(last[r], busy[node])
    return last


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 3), st.integers(0, 2**31))
@examples(60)
def test_payload_comes_when_every_message_waits_for_those_before_it(
    senders: int, receivers: int, nodes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    nbytes = rng.integers(0, 4, (senders, receivers)) * rng.random((senders, receivers)) * 1e6
    start, free = rng.random(senders), rng.random(nodes) * 2
    node_of = rng.integers(0, nodes, receivers)
    last, done, busy = arrivals(start, nbytes, node_of, free=free, link_s=1e-3, bandwidth=1e6)
    assert last == pytest.approx(slowly(start, nbytes, node_of, free, 1e-3, 1e6))
    assert (done >= start).all()
    assert (busy >= free - 1e-9).all()
