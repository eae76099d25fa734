"""Resharding conserves rows: whatever number of workers and of loaders reads a source, and whenever
that changes, every row is delivered once in an epoch, and the stream is that of the run that nobody
disturbed. On the real cores, with real files, by hand (``tests/fleets.py``).
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from overlord.messages.control import StreamState
from overlord.planning.spec import Ledger
from overlord.setup.prepared_job import Options, PreparedJob
from tests.fleets import Delivered, Fleet
from tests.laws import examples
from tests.properties.test_stream import wanted
from tests.worlds import World, folder, worlds

CHANGES = st.lists(
    st.tuples(st.integers(1, 120), st.integers(0, 3), st.sampled_from((1, 2, 3, 5))),
    min_size=2,
    max_size=10,
)
SHARES = st.lists(st.sampled_from((2, 3, 5, 1)), min_size=4, max_size=4)


def fleet(
    job: Any,
    shares: list[int],
    seed: int,
    changes: Any = (),
    state: StreamState | None = None,
    prefetch: int = 3,
) -> Fleet:
    loaders = dict(zip(job.names, shares, strict=False))
    return Fleet(
        PreparedJob(job, Options(loaders=loaders, prefetch=prefetch)), seed, changes, state
    )


def assert_each_row_once(steps: list[Delivered], ledger: Ledger, world: World) -> None:
    seen = Counter(sample for step in steps for sample, _ in step)
    assert set(seen.values()) <= {1}, "delivered twice"
    rows, refused = (
        {sample[:4] for sample in seen},
        {(f"s{q.source}", q.epoch, q.file, q.row) for q in ledger.bad_rows()},
    )
    assert not rows & refused
    for i, (format, n, files, _, epochs, _, extra) in enumerate(world.sources):
        if extra in ("even", "odd"):
            continue  # what a filter drops is counted, not listed
        share, apart = -(-n // files), format not in ("dataset", "factory")
        empty = (
            sum(k * share >= n for k in range(files)) if apart else 0
        )  # files without rows: each is an entry of the quarantine
        by_epoch = Counter(row[1] for row in rows | refused if row[0] == f"s{i}")
        if dict(world.fields).get("on_long") == "drop":  # long documents are counted, not listed
            assert by_epoch.total() + int(ledger.counts()["long"][i]) == (epochs or 0) * (
                n + empty
            ), f"rows of s{i}"
            continue
        assert by_epoch == dict.fromkeys(range(epochs or 0), n + empty), f"rows of s{i} by epoch"


@given(
    worlds(endless=False, batches="samples"),
    SHARES,
    CHANGES,
    st.integers(0, 2**20),
    st.integers(1, 4),
)
@examples(36)
def test_however_a_source_is_spread_over_workers_and_whenever_each_row_comes_once(
    world: World, shares: list[int], changes: list[tuple[int, int, int]], seed: int, prefetch: int
) -> None:
    with folder() as directory:
        job = world.job(directory, until="all")
        made = fleet(job, shares, seed, changes, prefetch=prefetch).run()
        steps, broken, _ = wanted(job)
        assert made.delivered() == steps, (
            "the stream of a slow implementation that knows of no loaders"
        )
        assert (made.finish is not None and made.finish.error is not None) == broken
        if not broken:
            assert_each_row_once(made.delivered(), made.planner.ledger, world)
        for was, now in made.degrees:
            event("more hosts" if now > was else "fewer hosts" if now < was else "as many hosts")


@given(
    worlds(batches="samples"),
    SHARES,
    CHANGES,
    st.integers(0, 2**20),
    st.sampled_from(({"look_ahead": 3}, {"overflow": "defer"}, {})),
)
@examples(26)
def test_plans_counts_states_and_the_end_are_those_of_the_run_that_nobody_disturbed(
    world: World,
    shares: list[int],
    changes: list[tuple[int, int, int]],
    seed: int,
    ahead: dict[str, Any],
) -> None:
    with folder() as directory:
        job = world.job(directory, **ahead)
        whole, made = (
            fleet(job, [1, 1, 1, 1], seed).run(),
            fleet(job, shares, seed + 1, changes).run(),
        )
        assert made.delivered() == whole.delivered()
        assert (made.end, made.counted) == (whole.end, whole.counted)
        one, other = (
            {k: f.blueprint.export(s) for k, s in f.states.items()} for f in (made, whole)
        )
        assert one == other


@given(
    worlds(batches="samples"),
    st.lists(SHARES, min_size=2, max_size=3),
    CHANGES,
    st.integers(0, 2**20),
)
@examples(16)
def test_another_number_of_loaders_after_any_step_gives_the_rest_of_the_stream(
    world: World, degrees: list[list[int]], changes: list[tuple[int, int, int]], seed: int
) -> None:
    """The number of loaders of a source is fixed while a job runs: it changes where one goes on
    from a state, by the rule that gives chunk k of a group to loader k mod n.
    """
    with folder() as directory:
        job = world.job(directory)
        whole = fleet(job, [1, 1, 1, 1], seed).run()
        steps: list[Delivered] = []
        state: StreamState | None = None
        for k, shares in enumerate(degrees):
            made = fleet(job, shares, seed + k, changes, state)
            last = len(steps) + seed % 4 if k < len(degrees) - 1 else None
            made.run(last)
            steps = steps[: min(made.placed, default=len(steps))] + made.delivered()
            if made.finish is not None:
                assert made.end == whole.end
                break
            assert last is not None
            steps = steps[: last + 1]
            state = made.blueprint.restore(
                json.loads(json.dumps(made.blueprint.export(made.states[last])))
            )
        assert steps == whole.delivered()
