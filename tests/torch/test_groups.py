"""Who fetches for whom, from the mesh alone; and what is said where a broadcast cannot be."""

from __future__ import annotations

from datetime import timedelta
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import DataStall, JobError
from overlord.mesh import BROADCASTS, ClientPlaceTree
from overlord.torch import broadcast_frames
from overlord.torch.broadcast_frames import FrameBroadcast
from overlord.torch.process_groups import make_group, service_of
from tests.internals import broadcast_error, wait_for_broadcast

degrees = st.integers(1, 3)
SUBSETS = [axes for n in range(len(BROADCASTS) + 1) for axes in combinations(BROADCASTS, n)]


@given(
    degrees,
    degrees,
    degrees,
    degrees,
    st.sampled_from(SUBSETS),
    st.sampled_from(["DP", "CP", "WORLD"]),
)
def test_every_rank_has_a_group_and_a_seat_of_its_bucket(
    pp: int, dp: int, cp: int, tp: int, axes: tuple[str, ...], split: str
) -> None:
    place = ClientPlaceTree(pp=pp, dp=dp, cp=cp, tp=tp)
    services = [service_of(place, rank, split, axes) for rank in range(place.world_size)]
    bucket = place.bucket_of(split)
    for rank, service in enumerate(services):
        assert service.fetcher in service.members
        assert services[service.fetcher].fetches
        assert service.queue_rank in service.queue_ranks
        assert bucket[service.queue_rank] == bucket[rank]
        assert service.fetcher in service.queue_ranks, "a fetcher holds its own seat"
        assert all(services[other].members == service.members for other in service.members)
        assert len(service.queue_ranks) == len({int(bucket[m]) for m in service.members}), (
            "one mailbox for each bucket of the group"
        )
        assert service.fetchers == len(place.fetchers(axes))


def test_a_broadcast_without_process_groups_says_what_to_call() -> None:
    with pytest.raises(JobError, match="init_process_group"):
        make_group(ClientPlaceTree(dp=2, tp=2), 0, ("TP",), backend="gloo", timeout_s=1.0)
    assert make_group(ClientPlaceTree(dp=4), 0, (), backend="gloo", timeout_s=1.0) is None


def test_a_service_says_who_it_is() -> None:
    place = ClientPlaceTree(dp=2, tp=2)
    assert str(service_of(place, 2, "DP", ("TP",))) == "rank 2 fetches for ranks 2, 3"
    assert str(service_of(place, 3, "DP", ("TP",))) == "rank 3 is served by rank 2"
    assert str(service_of(place, 3, "DP", ())) == "rank 3 fetches for itself"


BROKEN = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by "
    "peer [127.0.0.1]:1" + " word" * 60
)


@pytest.mark.parametrize(
    ("rank", "degree", "whom"),
    [(0, 2, "rank 1"), (0, 3, "one of ranks 1, 2"), (1, 3, "rank 0, which fetches for this one,")],
)
def test_a_broken_broadcast_is_told_in_a_sentence(rank: int, degree: int, whom: str) -> None:
    wire = FrameBroadcast(
        service_of(ClientPlaceTree(tp=degree), rank, "DP", ("TP",)), None, torch.device("cpu"), 1.0
    )
    said = str(broadcast_error(wire, RuntimeError(BROKEN), 0))
    assert said.startswith(
        f"{whom} is lost: its process has exited, or the network to it has failed; torch "
        "reports: Connection closed by"
    )
    assert ".cc" not in said
    assert said.endswith(" word ...")
    assert str(
        broadcast_error(wire, RuntimeError("[pair.cc:1] Reset by peer. Check the logs."), 0)
    ).endswith("torch reports: Reset by peer")


class Late:
    """A broadcast that no other rank takes part in, and the time, which passes while it is waited
    for.
    """

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta) -> None:
        self.now += min(0.005, timeout.total_seconds())
        raise RuntimeError("timed out")


def test_who_waits_for_a_broadcast_says_so_before_it_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast_frames, "time", late := Late())
    said: list[tuple[str, float]] = []
    service = service_of(ClientPlaceTree(tp=2), 1, "DP", ("TP",))
    wire = FrameBroadcast(
        service,
        None,
        torch.device("cpu"),
        0.5,
        stall_warn_s=0.01,
        on_stall=lambda words, seconds: said.append((words, seconds)),
    )
    with pytest.raises(DataStall, match="rank 0 to broadcast"):
        wait_for_broadcast(wire, late, "rank 0 to broadcast")
    assert [words for words, _ in said] == ["rank 0 to broadcast"]
    assert 0.01 <= said[0][1] < 0.02
