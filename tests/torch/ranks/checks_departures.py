"""Ranks that do not come, that come with another job, or that leave before the others: all others
say who and why, and do not wait.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import overlord as ov
import overlord.torch as ot
from overlord.errors import ActorLost, DataStall, JobError
from tests.internals import count_join
from tests.torch.ranks.checks_ends import PLACE, SERVED, joined
from tests.torch.ranks.jobs import broadcasting, job

# Nobody waits for them but gloo: it would destroy its groups only when their timeout, a minute and
# a half, has gone by.
GIVES_UP_BROADCASTS = True


LIMIT_S = 600.0


class Clock:
    """The time of a rank that joins. It is over when the rank says for whom it waits: so others may
    take as long as they like to come.
    """

    def __init__(self, wanted: str):
        self._wanted, self._ahead, self.warned = wanted, 0.0, list[str]()

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def on_stall(self, words: str, seconds: float) -> None:
        self.warned.append(words)
        if words.startswith(self._wanted):
            self._ahead = LIMIT_S


def waits_in_vain(wanted: str) -> DataStall:
    """A join that warns that it waits for these, and then gives up."""
    clock = Clock(wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("overlord.session.rendezvous.time", clock)
        with pytest.raises(DataStall, match=f"for {wanted}") as stall:
            ot.join(
                job(PLACE, SERVED), timeout_s=LIMIT_S, stall_warn_s=0.3, on_stall=clock.on_stall
            )
    assert clock.warned[-1].startswith(wanted)
    return stall.value


def a_rank_that_never_joins_is_named_by_all_others(out: Path) -> None:
    if dist.get_rank() == 3:
        count_join()  # as if it had called it: later checks join again
    else:
        assert waits_in_vain("rank 3 to join").rank == dist.get_rank()
    dist.barrier()


def a_rank_that_comes_too_late_is_told(out: Path) -> None:
    if dist.get_rank() == 3:
        dist.barrier()
        with pytest.raises(JobError, match="for rank 3 to join"):
            joined()
    else:
        waits_in_vain("rank 3 to join")
        dist.barrier()


def a_rank_zero_that_never_joins_is_named_by_all_others(out: Path) -> None:
    if dist.get_rank() == 0:
        count_join()
    else:
        waits_in_vain("rank 0 to launch the job")
    dist.barrier()


OTHERS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"seed": 9}, "seed: expected 5, as on rank 0, got 9 on rank 2"),
    (
        {"batch": {"cp_split": "contiguous"}},
        "batch.cp_split: expected 'zigzag', as on rank 0, got 'contiguous' on rank 2",
    ),
    (
        {"place": ov.ClientPlaceTree(dp=2, tp=2)},
        "place.pp: expected 2, as on rank 0, got 1 on rank 2",
    ),
    (
        {"mixture": {"web": 0.5, "code": 0.5}},
        "mixture: expected [0.7, 0.3], as on rank 0, got [0.5, 0.5] on rank 2",
    ),
)


def ranks_with_another_job_are_refused_and_all_others_told(out: Path) -> None:
    for changes, words in OTHERS:
        mine = changes if dist.get_rank() == 2 else {}
        with pytest.raises(JobError) as refused:
            joined(**mine)
        assert words in str(refused.value)
        assert dist.get_rank() == 2 or "rank 2 joined with another job than rank 0" in str(
            refused.value
        )
        dist.barrier()


def a_rank_with_another_job_is_refused_by_the_plain_join_too(out: Path) -> None:
    for changes, words in OTHERS:
        made = job(**({"place": PLACE} | (changes if dist.get_rank() == 2 else {})))
        if dist.get_rank() == 2:
            with pytest.raises(JobError) as refused:
                ov.join(made)
            assert words in str(refused.value)
            dist.barrier()
        else:
            with ov.join(made, leave_s=0.0):
                dist.barrier()


def leave(client: Any, error: Exception | None) -> None:
    with client:
        if error is not None:
            raise error


def those_whom_a_fetcher_leaves_are_told_why(out: Path) -> None:
    for error, words in (
        (ValueError("loss is nan"), "left before step 2 with ValueError: loss is nan"),
        (None, "closed its client before step 2"),
    ):
        client = joined()
        next(client), next(client)
        dist.barrier()
        if client.service.fetches:
            with (
                pytest.raises(ValueError, match="loss is nan")
                if error
                else contextlib.nullcontext()
            ):
                leave(client, error)
        else:
            with pytest.raises(
                ActorLost,
                match=f"rank {client.service.fetcher}, which fetches for this one, is lost: it "
                f"{words}",
            ) as lost:
                next(client)
            with pytest.raises(ActorLost):
                next(client)
            assert ".cc" not in str(lost.value)
            client.close()
        dist.barrier()


class PolledClock:
    """A time that passes in ``sleep`` alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def rank_zero_waits_once_for_all_that_do_not_close(out: Path) -> None:
    client = ot.join(job(PLACE, SERVED), leave_s=6.0)
    next(client)
    dist.barrier()
    if dist.get_rank() == 0:
        clock = PolledClock()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("overlord.session.rendezvous.time", clock)
            patch.setattr("overlord.session.served_ranks.time", clock)
            client.close()
        assert 6.0 <= clock.now < 6.5, "for a served rank and for one with a connection"
    dist.barrier()
    client.close()
    dist.barrier()


def a_prefetching_fetcher_that_fails_says_why(out: Path) -> None:
    steps = ot.DevicePrefetcher(joined(prefetch=4), "cpu", depth=2)
    next(steps)
    dist.barrier()
    if steps.client.service.fetches:
        with pytest.raises(ValueError, match="loss is nan"):
            leave(steps, ValueError("loss is nan"))
    else:
        with pytest.raises(
            ActorLost,
            match=r"which fetches for this one, is lost: it left before step .* with "
            r"ValueError: loss is nan",
        ):
            for _ in steps:
                pass
        steps.close()
    dist.barrier()


def a_fetcher_is_told_who_left_it(out: Path) -> None:
    client = joined()
    next(client)
    if client.service.fetches:
        with pytest.raises(
            ActorLost,
            match=f"rank {client.rank + 2} is lost: it left before step 1 with ValueError: loss "
            "is nan",
        ):
            for _ in client:
                pass
        client.close()
    else:
        with pytest.raises(ValueError, match="loss is nan"):
            leave(client, ValueError("loss is nan"))
    dist.barrier()


def a_fetcher_ends_with_the_stream_though_one_left_before_it(out: Path) -> None:
    with joined(until=3) as client:
        assert next(client).step == 0
        if client.service.fetches:
            assert [step.step for step in client] == [1, 2]
    dist.barrier()


def all_may_leave_before_the_end(out: Path) -> None:
    with ot.DevicePrefetcher(
        joined(prefetch=4), "cpu", depth=4 if dist.get_rank() < 2 else 1
    ) as steps:
        assert next(steps).step == 0
    dist.barrier()


def clients_say_how_many_fetch(out: Path) -> None:
    for axes, words in ((("PP",), "; 2 ranks fetch;"), (("PP", "DP"), "; 1 rank fetches;")):
        with joined(broadcasting(*axes)) as client:
            assert words in repr(client)
            dist.barrier()


CHECKS: dict[str, Callable[[Path], None]] = {
    check.__name__: check
    for check in (
        a_rank_that_never_joins_is_named_by_all_others,
        a_rank_zero_that_never_joins_is_named_by_all_others,
        a_rank_that_comes_too_late_is_told,
        ranks_with_another_job_are_refused_and_all_others_told,
        a_rank_with_another_job_is_refused_by_the_plain_join_too,
        those_whom_a_fetcher_leaves_are_told_why,
        rank_zero_waits_once_for_all_that_do_not_close,
        a_prefetching_fetcher_that_fails_says_why,
        a_fetcher_is_told_who_left_it,
        a_fetcher_ends_with_the_stream_though_one_left_before_it,
        all_may_leave_before_the_end,
        clients_say_how_many_fetch,
    )
}
