"""Loaders and constructors in processes: the stream is that of one process, byte for byte, wherever
who lives and whatever is said.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.constructor.compact import IDS
from overlord.hashing import digest
from tests.golden.jobs import FILE, jobs
from tests.processes import (
    WORKER_RUNTIME,
    Played,
    heard,
    launch,
    play,
    run,
    until,
    workers_of,
    written,
)
from tests.properties.test_combined import LAG, Scene
from tests.properties.test_feedback import Chaser, trainer
from tests.worlds import Rows, World, folder

pytestmark = pytest.mark.timeout(200)

APART = {
    "sources_per_host": 1,
    "hosts": 4,
    "constructor_hosts": 2,
}  # every source in a worker of its own, two workers of constructors


def world(
    *sources: tuple[Any, ...], batch: dict[str, Any], dp: int = 2, seed: int = 3, **fields: Any
) -> World:
    usual = {
        "until": 7,
        "shuffle_chunks": 2,
        "slice_rows": 5,
        "chunk_bytes": 300,
        "on_long": "truncate",
        "mix_every": "step",
    }
    return World(seed, sources, tuple((usual | fields).items()), tuple(batch.items()), dp)


PLAIN: tuple[Any, ...] = (
    (),
    "own",
    "step",
    False,
    (),
)  # look-ahead, mixture, mix_every, hooks, events

SCENES: dict[str, Scene] = {
    "filters, bad rows, epochs, split documents, steps that are skipped": Scene(
        world(
            ("parquet", 40, 3, 1.0, None, True, "even"),
            ("jsonl.zst", 31, 2, 3.0, 2, True, "picky"),
            ("tar", 25, 2, 0.25, 3, True, "odd"),
            batch={"samples": 13, "microbatches": 2, "context": 32},
            dp=3,
            on_long="split",
        ),
        (),
        "own",
        "microbatch",
        False,
        (("skip", 2, 2),),
        1,
    ),
    "batches in tokens, rows without tokens, until one ends": Scene(
        world(
            ("arrow-stream", 40, 2, 1.0, 1, True, "empty"),
            ("dataset", 33, 1, 1.0, 2, False, ""),
            ("factory", 40, 3, 0.25, 2, True, "picky"),
            batch={"tokens": 150, "context": 32},
            until="first",
            on_long="quarantine",
        ),
        *PLAIN,
        2,
    ),
    "look-ahead, a schedule that learns and chooses, a hook, sources that join": Scene(
        world(
            ("jsonl.gz", 40, 2, 1.0, 2, True, "images"),
            ("arrow", 36, 3, 1.0, None, True, ""),
            batch={"samples": 9, "context": 64},
        ),
        (("look_ahead", 3), ("max_age", 2)),
        "learns",
        "step",
        True,
        (("join", 3, 2), ("mix", 4, 3)),
        12,
    ),
    "deferring, a bandit, weights that stay for an epoch": Scene(
        world(
            ("jsonl", 30, 2, 1.0, 3, True, "odd"),
            ("parquet", 30, 1, 3.0, 2, True, ""),
            batch={"samples": 8, "context": 32},
        ),
        (("overflow", "defer"),),
        "odm",
        "epoch",
        False,
        (),
        5,
    ),
    "padded microbatches, a random draw, fewer documents than ranks": Scene(
        world(
            ("parquet", 40, 2, 1.0, 1, True, ""),
            ("tar", 20, 1, 0.25, 1, False, "images"),
            batch={"samples": 2, "microbatches": 3, "context": 64, "layout": "padded"},
            dp=4,
            draw="random",
        ),
        *PLAIN,
        7,
    ),
}


@pytest.mark.parametrize("name", SCENES)
def test_a_small_world_is_the_same_in_processes(name: str) -> None:
    scene = SCENES[name]
    with folder() as directory:
        job, _, said = scene.job(directory)
        options = {
            "prefetch": 1 + scene.salt % (LAG - 2),
            "loaders": dict.fromkeys(job.names, 1 + scene.salt % 2),
        }
        alone = run(job, "local", said=said, report=trainer(scene.salt), **options)
        apart = run(job, WORKER_RUNTIME, said=said, report=trainer(scene.salt), **options, **APART)
    assert len(alone.states) > 2
    assert apart == alone


KEPT = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ov.Job]:
    return jobs(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize(
    "name", [name for i, name in enumerate(KEPT) if i % 5 == 0 or "five" in name]
)
def test_a_fixed_job_gives_the_stream_it_always_gave(golden: dict[str, ov.Job], name: str) -> None:
    got: dict[int, list[ov.Step]] = {0: [], 1: []}
    with launch(golden[name], sources_per_host=3, constructor_hosts=1 + len(name) % 2) as session:
        clients = [session.client(rank) for rank in got]
        for steps in zip(*clients, strict=True):
            for rank, step in enumerate(steps):
                got[rank].append(step)
        assert [s.plan_digest for s in got[0]] == KEPT[name]["plans"]
        assert (
            digest(
                *(
                    p
                    for r in got
                    for s in got[r]
                    for mb in s
                    for key in sorted(mb)
                    for p in (key, mb[key])
                )
            )
            == KEPT[name]["arrays"]
        )


# one job for the stories below


def marked(samples: ov.Popped) -> ov.Ragged:
    """A loader hook: another number for every sample and step."""
    more = np.repeat(samples.row * 7 + samples.step, samples.tokens.lengths)
    return ov.Ragged(samples.tokens.values + more, samples.tokens.offsets)


def counted(assembly: ov.Assembly) -> list[dict[str, np.ndarray]]:
    """A constructor hook that sees the whole plan."""
    all_of_it = np.int64(len(assembly.plan)), assembly.plan.row.astype(np.int64)
    return [
        mb | {"whole": np.array([all_of_it[0], all_of_it[1].sum(), assembly.bucket])}
        for mb in assembly.default()
    ]


def rows(n: int, first: int) -> Rows:
    return Rows([{"n": first + k, "tokens": [first + k] * (1 + k % 7)} for k in range(n)])


def source(name: str, n: int, first: int, **settings: Any) -> ov.Source:
    return ov.Source(
        name, rows(n, first), transforms=[ov.Tokens("tokens")], **{"epochs": None, **settings}
    )


def job(**changes: Any) -> ov.Job:
    settings = {
        "name": "processes",
        "sources": [
            source("a", 60, 0),
            source("b", 90, 1000, weight=2.0),
            source("c", 40, 2000, epochs=1),
        ],
        "batch": ov.Batch(samples=10, context=32, microbatches=2),
        "place": ov.ClientPlaceTree(dp=2),
        "seed": 11,
        "slice_rows": 8,
        "shuffle_chunks": 2,
        "until": 18,
    }
    return ov.Job(**{**settings, **changes})


def mapping_of(array: np.ndarray) -> str:
    """The line of this process's memory map that an array lies in."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(x, 16) for x in line.split(maxsplit=1)[0].split("-"))
        if first <= address < end:
            return line
    raise AssertionError("it lies nowhere")


def shared_memory_at(array: np.ndarray) -> tuple[str, int]:
    """The piece of shared memory an array lies in, and where: the same in every mapping of it."""
    where, _, offset, _, inode, *name = mapping_of(array).split(maxsplit=5)
    assert "memfd:overlord-constructor-worker/" in name[0]
    return inode, array.__array_interface__["data"][0] - int(where.split("-")[0], 16) + int(
        offset, 16
    )


def test_ranks_of_one_group_read_the_same_memory_which_was_filled_once() -> None:
    made = job(place=ov.ClientPlaceTree(dp=2, tp=2), until=6)
    with launch(made, constructor_hosts=2, broadcast=False) as session:
        clients = [session.client(rank) for rank in range(4)]
        for steps in zip(*clients, strict=True):
            where = [shared_memory_at(step.bucket.wide.arrays[IDS]) for step in steps]
            assert where[0] == where[1] != where[2] == where[3]
            assert all(step.bucket.wide.arrays[IDS].itemsize == 2 for step in steps), (
                "as narrow as ids allow"
            )
            assert not any("memfd" in mapping_of(mb["tokens"]) for step in steps for mb in step), (
                "widened by each rank for itself"
            )
    apart = run(made, WORKER_RUNTIME, constructor_hosts=2, broadcast=False)
    assert apart == run(made, "local", broadcast=False)
    assert apart.steps[0] == apart.steps[1] != apart.steps[2] == apart.steps[3]


def test_slices_of_context_parallel_ranks_lie_in_one_piece_of_shared_memory() -> None:
    with launch(
        job(place=ov.ClientPlaceTree(cp=2, pp=2), batch=ov.Batch(samples=9, context=64), until=6)
    ) as session:
        clients = [session.client(rank) for rank in range(4)]
        for steps in zip(*clients, strict=True):
            where = [
                shared_memory_at(step[0][key])
                for step, key in zip(steps, ["tokens", "tokens", "labels", "labels"], strict=True)
            ]
            size = steps[0][0]["tokens"].nbytes
            assert len({inode for inode, _ in where}) == 1
            assert where[1][1] - where[0][1] == where[3][1] - where[2][1] == size, "rank after rank"


def test_the_loaders_of_a_source_may_live_in_several_processes() -> None:
    made = job(until=9)
    with launch(
        made, loaders={"b": 3}, sources_per_host=1, hosts=8, constructor_hosts=2
    ) as session:
        rows = [a for a in session.metrics()["actors"] if a["role"] == "loader"]
        assert len({a["pid"] for a in rows if a["name"].startswith("loader/b/")}) == 3
        assert len(workers_of(session)) == len(set(workers_of(session).values())) == 5 + 2
        assert play(session) == run(made, "local")


def test_connections_and_bytes_do_not_grow_with_the_ranks_of_a_group() -> None:
    def all_of(transfer: dict[str, dict[str, int]]) -> dict[str, dict[str, int]] | None:
        """Every row, once all workers have answered: the row of a worker that blocks is empty."""
        return transfer if all("links" in row for row in transfer.values()) else None

    def cost(tp: int) -> tuple[list[int], int]:
        made = job(until=6, place=ov.ClientPlaceTree(dp=2, tp=tp))
        with launch(made, hosts=2, sources_per_host=2, constructor_hosts=2) as session:
            play(session)
            transfer = until(lambda: all_of(session.metrics()["transfer"]))
        loaders = [row for name, row in transfer.items() if name.startswith("loader-worker/")]
        return [row["links"] for row in loaders], sum(row["sent_bytes"] for row in loaders)

    links, nbytes = cost(tp=1)
    assert set(links) == {2}, "one for each constructor host"
    assert nbytes > 0
    assert cost(tp=2) == (links, nbytes)


def test_hooks_see_in_processes_what_they_see_in_one() -> None:
    made = job(
        hooks=[ov.loader_do_plan(marked), ov.constructor_do_plan(counted)], until=6, look_ahead=3
    )
    apart = run(made, WORKER_RUNTIME, loaders={"b": 2}, **APART)
    assert apart == run(made, "local")
    assert apart.states


def typed(assembly: ov.Assembly) -> list[dict[str, np.ndarray]]:
    """The default, with the type of the ids that the hook was given."""
    kinds = [np.array([documents.values.dtype.num]) for documents in assembly.documents]
    return [{**mb, "kind": kind} for mb, kind in zip(assembly.default(), kinds, strict=True)]


def test_a_hook_is_given_ids_of_one_type_wherever_it_runs() -> None:
    made = job(hooks=[ov.constructor_do_plan(typed)], until=4)
    kinds = {}
    for runtime in ("local", WORKER_RUNTIME):
        with ov.launch(made, runtime=runtime) as session:
            kinds[runtime] = {int(mb["kind"][0]) for step in session.client(0) for mb in step}
    assert kinds[WORKER_RUNTIME] == kinds["local"]
    assert len(kinds["local"]) == 1


# what people do in mid-run


def busy_day(more: ov.Source) -> dict[int, Callable[[ov.Session], None]]:
    """What is said while steps 0 to 17 are trained, each with its step, so that it does not matter
    how far plans have run ahead.
    """
    return {
        1: lambda s: s.skip([9, 10]),
        2: lambda s: s.set_mixture({"a": 1.0, "b": 1.0}, at=8),
        3: lambda s: s.add_source(more, at=11, loaders=2) and None,
        6: lambda s: s.set_mixture({"a": 1.0, "d": 3.0}, at=13) and None,
    }  # type: ignore[dict-item, return-value]


def test_whatever_is_said_in_mid_run_means_the_same(tmp_path: Path) -> None:
    made = job(mixture=Chaser(("a", "b", "c")), feedback_lag=LAG)
    more, wide = source("d", 50, 3000), (*made.sources, source("d", 50, 3000))
    days = {}
    for runtime in ("local", WORKER_RUNTIME):
        days[runtime] = run(
            made, runtime, act=busy_day(more), report=trainer(4), prefetch=3, **APART
        )
    assert days[WORKER_RUNTIME] == days["local"]
    assert "d" in {
        sample[0][0] for step in days["local"].steps[0] for mb in step[4] for sample in mb
    }
    state = days[WORKER_RUNTIME].states[12]
    there = run(
        replace(made, sources=wide, mixture=Chaser(("a", "b", "c"))),
        "local",
        resume=state,
        report=trainer(4),
        prefetch=3,
    )
    assert there.numbers == [list(range(state["step"], 18))] * 2, (
        "a state of one runtime is one of the other"
    )


def test_a_state_goes_from_one_runtime_to_another_and_back() -> None:
    made = job(look_ahead=2)
    whole = run(made, "local")
    first = run(made, WORKER_RUNTIME, steps=5)
    then = run(made, "local", resume=first.states[-1], steps=5)
    last = run(made, WORKER_RUNTIME, resume=then.states[-1], loaders={"a": 2})
    for rank in whole.steps:
        assert first.steps[rank] + then.steps[rank] + last.steps[rank] == whole.steps[rank]
    assert last.states == whole.states[10:]


@pytest.fixture(scope="module")
def undisturbed() -> Played:
    return run(job(), "local")


def test_ranks_rewind_to_a_state_together_also_to_one_before_a_source_joined(
    undisturbed: Played,
) -> None:
    with launch(job(), constructor_hosts=2) as session:
        assert play(session, steps=6).steps == {r: s[:6] for r, s in undisturbed.steps.items()}
        old, before = workers_of(session), undisturbed.states[2]
        session.add_source(source("d", 20, 5000))
        clients = [session.client(rank) for rank in range(2)]
        for client in clients:
            client.load_state_dict(before)
        if WORKER_RUNTIME != "ray":  # there processes wait for the next of their name
            assert not set(old.values()) & set(workers_of(session).values()), (
                "new cores, in new processes"
            )
        again = play(session)
        assert again.steps == undisturbed.behind(2)
        session.load_state_dict(before)
        assert play(session, steps=2).steps == {r: s[:2] for r, s in undisturbed.behind(2).items()}


# sources that move


def moves(*where: tuple[int, str, tuple[str, ...]]) -> dict[int, Callable[[ov.Session], None]]:
    def move(source: str, hosts: tuple[str, ...]) -> Callable[[ov.Session], None]:
        return lambda session: session.move(source, *hosts)

    return {step: move(source, hosts) for step, source, hosts in where}


@pytest.mark.parametrize("look_ahead", [1, 3])
def test_sources_move_between_workers_and_nobody_notices(look_ahead: int) -> None:
    made = job(look_ahead=look_ahead)
    elsewhere = moves(
        (0, "a", ("loader-worker/1",)),
        (2, "b", ("loader-worker/0",)),
        (3, "b", ("loader-worker/2", "loader-worker/1")),
        (5, "c", ("loader-worker/0",)),
        (6, "a", ("loader-worker/2",)),
        (9, "b", ("loader-worker/0", "loader-worker/1", "loader-worker/2")),
        (14, "c", ("loader-worker/1",)),
    )
    with launch(made, loaders={"b": 3}, sources_per_host=2, hosts=3) as session:
        done = play(session, act=elsewhere)
        where = {a["name"]: a["pid"] for a in session.metrics()["actors"] if a["role"] == "loader"}
        hosts = workers_of(session)
    assert done == run(made, "local")
    assert [where[f"loader/b/{k}"] for k in (1, 2, 3)] == [
        hosts[f"loader-worker/{h}"] for h in (0, 1, 2)
    ]
    assert where["loader/a/0"] == hosts["loader-worker/2"]
    assert where["loader/c/4"] == hosts["loader-worker/1"], "it had ended, and moved all the same"


def test_sources_move_at_any_moment_while_everyone_trains() -> None:
    made, rng = job(until=60, look_ahead=2), Random(5)
    with launch(
        made, loaders={"b": 2}, sources_per_host=2, hosts=3, constructor_hosts=2
    ) as session:
        hosts = [name for name in workers_of(session) if name.startswith("loader-worker/")]
        clients = [session.client(rank) for rank in range(2)]
        got: dict[int, list[Any]] = {0: [], 1: []}
        threads = [
            threading.Thread(target=lambda r=r: got[r].extend(map(written, clients[r])))
            for r in range(2)
        ]
        for thread in threads:
            thread.start()
        moved = 0
        while any(thread.is_alive() for thread in threads):
            session.move(rng.choice(made.names), *rng.sample(hosts, rng.randint(1, 2)))
            moved += 1
            time.sleep(rng.random() / 50)
    assert moved > 3
    assert got == run(made, "local").steps


def slow_sum(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "tokens": [t + sum(range(50)) for t in row["tokens"]]}


def test_a_source_moves_with_its_worker_processes() -> None:
    heavy = ov.Source(
        "w",
        rows(60, 0),
        transforms=[ov.Map(slow_sum, rows=True), ov.Tokens("tokens")],
        workers="processes",
        epochs=None,
    )
    made = job(sources=[heavy, source("a", 60, 1000)], until=10)
    with launch(made, loaders={"w": 2}, sources_per_host=1, hosts=3) as session:
        before = workers(session)
        done = play(
            session,
            act=moves(
                (2, "w", ("loader-worker/2",)), (5, "w", ("loader-worker/0", "loader-worker/1"))
            ),
        )
        after = workers(session)
    assert done == run(made, "local")
    assert len(before) == len(after) == 2
    assert not before & after, (
        "worker processes do not move: new ones were started, the old ones are gone"
    )


def workers(session: ov.Session) -> set[int]:
    return {a["pid"] for a in heard(session)["actors"] if a["role"] == "worker"}


def test_a_move_that_cannot_be_is_refused_in_words_and_changes_nothing(undisturbed: Played) -> None:
    with launch(job(), sources_per_host=1, hosts=3) as session:
        session.add_source(source("d", 20, 5000), at=17)
        for move, words in {
            (
                "a",
                "loader-worker/9",
            ): "expected the name of a loader worker, got 'loader-worker/9'; there are loader-worker/0",
            ("x", "loader-worker/0"): "unknown source 'x'",
            ("a",): "expected the loader worker to move to",
            (
                "d",
                "loader-worker/0",
            ): "expected a worker with the code of 'd', got loader-worker/0, which started without it",
        }.items():
            with pytest.raises(ov.errors.JobError, match=words):
                session.move(*move)
        done = play(session, steps=17)
    assert done.steps == {r: s[:17] for r, s in undisturbed.steps.items()}
    with ov.launch(job()) as session, pytest.raises(ov.errors.JobError, match="runtime='process'"):
        session.move("a", "loader-worker/0")
