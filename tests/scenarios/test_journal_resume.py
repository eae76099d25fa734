"""A job that is killed at any write of its journal goes on from it: nothing is lost, and nothing
comes again that all ranks had taken.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overlord.errors import JournalError
from overlord.journal.storage import DirectoryStorage
from tests.journal_faults import MOMENTS, SKIPPED, STEPS, Dying, job, notes, recovered, steps, train
from tests.processes import WORKER_RUNTIME, Program, program, until
from tests.stores import BUCKET, Proxy
from tests.unit.test_journal_disks import tiny

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus")
    job(path, None)
    return path


@pytest.fixture(scope="module")
def undisturbed(corpus: Path) -> list[tuple[int, str]]:
    """What a run without a journal gives."""
    found: list[Any] = []
    train(job(corpus, None), found.append)
    assert [step for step, _ in steps(found)] == [k for k in range(STEPS) if k != SKIPPED]
    return steps(found)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with program(
        tmp_path_factory.mktemp("trainer"), "from tests.journal_faults import main"
    ) as running:
        assert running.line() == "ready"
        yield running


def play(
    trainer: Program, corpus: Path, at: Path, name: str, **order: Any
) -> tuple[int, list[list[Any]]]:
    """One run in a process of its own: how it ended, and what it noted."""
    given = {
        "corpus": str(corpus),
        "journal": str(at / "journal"),
        "out": str(at / name),
        "number": -1,
        "moment": "",
        "last": None,
    }
    trainer.say(json.dumps({**given, "runtime": "local", "said": False, "resume": None, **order}))
    return int(trainer.line()), notes(at / name)


def check(
    first: list[list[Any]], then: list[list[Any]], undisturbed: list[tuple[int, str]], acked: int
) -> None:
    """Both runs joined are the undisturbed one."""
    before, behind = steps(first), steps(then)
    assert before == undisturbed[: len(before)]
    assert acked <= max([step for step, _ in before], default=-1), (
        "taken for acknowledged, and never delivered"
    )
    assert [s for s in before if s[0] <= acked] + behind == undisturbed, (
        "lost, repeated, or another"
    )
    assert then[0][1] == acked + 1


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_every_write_it_goes_on_as_if_nothing_had_happened(
    moment: str, trainer: Program, corpus: Path, undisturbed: list[tuple[int, str]], tmp_path: Path
) -> None:
    kills = 0
    for number in range(1000):
        at = tmp_path / str(number)
        at.mkdir()
        code, first = play(trainer, corpus, at, "first", number=number, moment=moment)
        if code == 0:
            assert steps(first) == undisturbed
            break
        assert code == -signal.SIGKILL
        kills += 1
        found = (
            recovered(at / "journal") if list((at / "journal").glob("*.ovj")) and number else None
        )
        acked = -1 if found is None else found.acked
        assert not steps(first) or (found is not None and steps(first)[-1][0] < found.next_step), (
            "delivered, and not in the journal"
        )
        said = ["said"] in first
        runtime = WORKER_RUNTIME if number == 5 else "local"
        code, then = play(trainer, corpus, at, "then", resume="auto", runtime=runtime, said=said)
        assert code == 0
        check(first, then, undisturbed, acked)
        assert recovered(at / "journal").acked == STEPS - 1
    assert kills > 9


def test_a_coordinator_that_is_killed_at_every_write_leaves_the_stream_as_it_is(
    corpus: Path, undisturbed: list[tuple[int, str]], tmp_path: Path
) -> None:
    """All in one run: whoever comes in the place of a coordinator is killed at the next write, or
    at the same one in another moment of it.
    """
    dying, found = Dying(tmp_path / "deaths"), list[Any]()
    made = job(corpus, str(tmp_path / "journal"), mixture=dying)
    train(
        made,
        found.append,
        runtime="process",
        max_restarts=1000,
        constructor_hosts=1,
        sources_per_host=2,
    )
    assert steps(found) == undisturbed
    tried = dying.tried()
    assert {number for number, how in tried if how != "whole"} == set(range(tried[-1][0] + 1))
    assert recovered(tmp_path / "journal").next_step == STEPS
    assert tried[-1][0] > STEPS, "fewer writes than steps"
    assert {how for _, how in tried} == {*MOMENTS, "whole"}


@pytest.mark.parametrize(
    ("runtime", "other"), [("local", WORKER_RUNTIME), (WORKER_RUNTIME, "local")]
)
def test_killed_with_all_its_processes_it_goes_on_on_another_runtime(
    runtime: str,
    other: str,
    trainer: Program,
    corpus: Path,
    undisturbed: list[tuple[int, str]],
    tmp_path: Path,
) -> None:
    """The processes of a job end with the one that launched it, so that nobody holds the journal
    for longer.
    """
    code, first = play(trainer, corpus, tmp_path, "first", runtime=runtime, last=4)
    assert code == -signal.SIGKILL
    acked = until(lambda: _resumable(tmp_path / "journal"))
    code, then = play(
        trainer, corpus, tmp_path, "then", resume="auto", runtime=other, said=["said"] in first
    )
    assert code == 0
    check(first, then, undisturbed, acked - 1)
    assert 4 - 2 <= acked <= 4 + 1


def _resumable(journal: Path) -> int:
    """The step it would go on with, as soon as nobody writes to it any more."""
    place = DirectoryStorage(str(journal))
    try:
        place.hold()
    except JournalError:
        return 0
    place.close()
    return recovered(journal).acked + 1


def test_a_journal_in_a_store_is_gone_on_from_as_one_in_a_directory(
    proxy: Proxy, corpus: Path, undisturbed: list[tuple[int, str]], tmp_path: Path
) -> None:
    pytest.importorskip("obstore")
    uri = f"s3://{BUCKET}/journaled"
    with program(
        tmp_path, "from tests.journal_faults import main"
    ) as trainer:  # it has the store's keys
        assert trainer.line() == "ready"
        code, first = play(trainer, corpus, tmp_path, "first", journal=uri, last=4)
        assert code == -signal.SIGKILL
        seen = recovered(uri).acked
        code, then = play(trainer, corpus, tmp_path, "then", journal=uri, resume="auto", said=True)
        assert code == 0
        acked = then[0][1] - 1
        assert seen <= acked <= seen + 1, (
            "the put that was on its way when it was killed may have landed since, and no more"
        )
        check(first, then, undisturbed, acked)
        code, _ = play(trainer, corpus, tmp_path, "fresh", journal=uri)
        assert code == 1
    assert recovered(uri).acked == STEPS - 1


@pytest.mark.parametrize("runtime", ["local", WORKER_RUNTIME])
def test_on_a_disk_that_is_full_every_client_is_told_and_with_room_the_job_goes_on(
    runtime: str, corpus: Path, undisturbed: list[tuple[int, str]], tmp_path: Path
) -> None:
    with tiny(tmp_path / "disk", "size=32k") as disk:
        (disk / "ballast").write_bytes(bytes(4096 * 5))
        # A long name: room is given by the page, and what the job writes but for it may just fit
        # into one.
        made, found = (
            replace(job(corpus, str(disk / "journal")), name="journaled" * 80),
            list[Any](),
        )
        with pytest.raises(JournalError, match="ENOSPC"):
            train(made, found.append, runtime=runtime)
        assert 0 < len(steps(found)) < len(undisturbed), "it is full too early, or too late"
        acked = recovered(disk / "journal").acked
        (disk / "ballast").unlink()
        then = list[Any]()
        train(made, then.append, runtime=runtime, resume="auto", said=["said"] in found)
        check(found, then, undisturbed, acked)
