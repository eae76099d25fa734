"""Commands that only look neither write to a job's journal nor lock it, also while the job runs."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

import overlord as ov
from overlord.cli.main import cli
from overlord.dryrun.constants import Measured, probe_sources
from overlord.session.session import Session
from overlord.setup.prepared_job import PreparedJob
from tests.properties.test_fleet import LIKELY
from tests.unit.test_cli import job_file, overlord, step_lines

WRITES = {"demo", "drill", "init", "run", "serve", "stop"}  # they launch or end a job, or make one
ELSEWHERE = {"spectra", "status"}  # a checkpoint or a Ray cluster: without a job file
LOOKS: dict[str, tuple[str, ...]] = {
    "plan": ("plan", "JOB", "--step", "3"),
    "plan what-if": ("plan", "JOB", "--step", "3", "--place", "dp=4", "--strategy", "vanilla"),
    "preview a source": ("preview", "JOB", "--source", "code"),
    "preview a step": ("preview", "JOB", "--step", "2"),
    "explain a step": ("explain", "JOB", "--step", "2"),
    "explain a sample": ("explain", "JOB", "--sample", "web/e0/f0/r3"),
    "inspect": ("inspect", "JOB"),
    "profile": ("profile", "JOB", "--rows", "8", "--seconds", "0.05"),
    "partition": ("partition", "JOB", "--cpus", "4"),
    "journal show": ("journal", "show", "JOURNAL"),
    "simulate": ("simulate", "JOB", "--gpus", "8"),
    "journal verify": ("journal", "verify", "JOURNAL"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def constants(blueprint: PreparedJob, path: Path, *, again: bool, progress: object) -> Measured:
        return Measured(
            constants=LIKELY, probes=probe_sources(blueprint, lambda what, done, of: None)
        )

    monkeypatch.setattr(
        "overlord.dryrun.estimate.load_or_measure", constants
    )  # stand-in jobs have a test of their own
    monkeypatch.setenv("OVERLORD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def journaled(folder: Path) -> tuple[Path, Path]:
    return job_file(folder, journal=str(folder / "journal")), folder / "journal"


def words(command: tuple[str, ...], job: Path, journal: Path) -> list[str]:
    return [{"JOB": str(job), "JOURNAL": str(journal)}.get(word, word) for word in command]


def contents(folder: Path) -> dict[str, tuple[bytes, int, int, int]] | None:
    """Every file of a folder and the folder itself: bytes, inode, mode and time of change."""
    if not folder.exists():
        return None
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        stat = path.stat()
        found[str(path)] = (
            path.read_bytes() if path.is_file() else b"",
            stat.st_ino,
            stat.st_mode,
            stat.st_mtime_ns,
        )
    return found


def free(journal: Path) -> bool:
    """Whether a writer could take the lock now."""
    with open(journal / "journal.lock", "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(lock, fcntl.LOCK_UN)
        return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + float(os.environ.get("OVERLORD_TEST_WAIT_S", "60"))
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def running(job: Path, steps: int) -> Iterator[Session]:
    """A job that has taken so many steps, and has written all that it planned ahead."""
    with ov.launch(ov.Job.from_yaml(job), prefetch=2) as session:
        clients = [session.client(rank) for rank in range(2)]
        for _ in range(steps):
            for client in clients:
                next(client)
        until(
            lambda: (
                session.metrics()["journal"]["planned"] == steps + 1
                and session.metrics()["journal"]["acked"] == steps - 1
            )
        )
        yield session


def test_every_command_is_known_to_look_or_to_write() -> None:
    assert {command[0] for command in LOOKS.values()} | WRITES | ELSEWHERE == set(cli.commands)


@pytest.mark.parametrize(
    "command",
    [c for name, c in LOOKS.items() if not name.startswith("journal")],
    ids=lambda c: " ".join(c[:2]),
)
def test_a_command_that_looks_leaves_no_journal_so_that_the_job_can_run(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    job, journal = journaled(tmp_path)
    looked = overlord(*words(command, job, journal))
    assert looked.exit_code == 0, looked.output
    assert not journal.exists()
    assert len(step_lines(overlord("run", job, "--steps", "1", "--digest"))) == 1


def test_commands_that_look_change_nothing_of_a_job_that_has_stopped(tmp_path: Path) -> None:
    job, journal = journaled(tmp_path)
    whole = step_lines(overlord("run", job_file(tmp_path / "alone"), "--digest"))
    first = step_lines(overlord("run", job, "--steps", "4", "--digest"))
    until(lambda: free(journal))  # a last append may outlast the end of the run on a busy machine
    before = contents(journal)
    for name, command in LOOKS.items():
        looked = overlord(*words(command, job, journal))
        assert looked.exit_code == 0, looked.output
        assert contents(journal) == before, name
        assert free(journal), name
    assert first + step_lines(overlord("run", job, "--resume", "auto", "--digest")) == whole


def test_commands_that_look_change_nothing_of_a_job_that_runs(tmp_path: Path) -> None:
    job, journal = journaled(tmp_path)
    with running(job, steps=4) as session:
        before = contents(journal)
        for name, command in LOOKS.items():
            looked = overlord(*words(command, job, journal))
            assert looked.exit_code == 0, looked.output
            assert contents(journal) == before, name
            assert not free(journal), name
        assert session.plan(3).digest() in overlord("plan", job, "--step", "3").stdout
        rest = list(zip(session.client(0), session.client(1), strict=True))
        assert [step.step for step, _ in rest] == list(range(4, 10))


def test_a_journal_cut_in_the_middle_of_a_write_can_be_looked_at(tmp_path: Path) -> None:
    job, journal = journaled(tmp_path)
    overlord("run", job, "--steps", "4")
    last = max(journal.glob("*.ovj"))
    last.write_bytes(last.read_bytes()[:-7])
    before = contents(journal)
    assert overlord("plan", job, "--step", "2").exit_code == 0
    assert overlord("explain", job, "--step", "2").exit_code == 0
    assert contents(journal) == before


def test_plan_and_explain_know_what_was_changed_while_the_job_ran(tmp_path: Path) -> None:
    job, _ = journaled(tmp_path)
    with running(job, steps=2) as session:
        at = session.set_mixture({"web": 1.0, "code": 5.0})
        session.skip([at + 1])
        clients = [session.client(rank) for rank in range(2)]
        for _ in range(2):
            for client in clients:
                next(client)
        until(lambda: session.metrics()["journal"]["planned"] > at + 1)
        plan = session.plan(at + 1)
        sample = f"{plan.sample_id(0)}"
        shown = overlord("plan", job, "--step", str(at + 1))
        assert plan.digest() in shown.stdout
        assert "expected digest" not in shown.stderr
        assert (
            f"set_mixture from step {at}" in overlord("explain", job, "--step", str(at + 1)).stdout
        )
        assert "The step was skipped" in overlord("explain", job, "--sample", sample).stdout
        future = overlord("plan", job, "--step", str(session.metrics()["journal"]["planned"] + 1))
        assert "has no plan in journal" in future.stderr


def test_a_step_that_the_journal_no_longer_keeps_follows_from_the_job_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overlord.journal import job_journal
    from overlord.journal.checkpoint import Interval

    monkeypatch.setattr(Interval, "due", lambda self, snapshot, since, plans: plans >= 2)
    monkeypatch.setattr(job_journal, "SEGMENT_BYTES", 1)
    job, journal = journaled(tmp_path)
    overlord("run", job, "--steps", "8")
    with ov.launch(ov.Job.from_yaml(job_file(tmp_path / "alone"))) as session:
        step = next(session.client(0))
        sample = str(session.plan(0).sample_id(0))
    before = contents(journal)
    shown = overlord("plan", job, "--step", "0")
    assert step.plan_digest in shown.stdout
    assert re.search(
        r"expected step 0, got steps from \d+ on; the answer follows from the job file alone",
        shown.stderr,
    )
    explained = overlord("explain", job, "--sample", sample)
    assert "In step 0" in explained.stdout
    assert "the answer follows from the job file alone" in explained.stderr
    assert contents(journal) == before


def test_a_job_file_that_has_changed_since_is_planned_by_itself_and_that_is_reported(
    tmp_path: Path,
) -> None:
    job, journal = journaled(tmp_path)
    overlord("run", job, "--steps", "4")
    changed = yaml.safe_load(job.read_text())
    changed["seed"] = 9
    job.write_text(yaml.safe_dump(changed))
    before = contents(journal)
    shown = overlord("plan", job, "--step", "1")
    assert shown.exit_code == 0, shown.output
    assert "differs in seed; the answer follows from the job file alone" in shown.stderr
    assert contents(journal) == before


def test_a_plan_keeps_no_profile_and_a_profile_is_kept_only_when_asked_for(
    tmp_path: Path, cache: Path
) -> None:
    job = job_file(tmp_path)
    overlord("plan", job, "--step", "1")
    overlord("profile", job, "--rows", "8", "--seconds", "0.05")
    assert not (cache / "profiles").exists()


@pytest.mark.parametrize(
    ("setting", "words_of_it"), [({"place": {"dp": 3}}, "dp=3"), ({"sync": "step"}, "sync='step'")]
)
def test_a_plan_that_differs_from_the_journal_names_the_setting_that_moved_it(
    tmp_path: Path, setting: dict[str, object], words_of_it: str
) -> None:
    job, _ = journaled(tmp_path)
    assert overlord("run", job, "--steps", "4").exit_code == 0
    assert "expected digest" not in overlord("plan", job, "--step", "2").stderr
    job.write_text(yaml.safe_dump({**yaml.safe_load(job.read_text()), **setting}))
    said = [
        " ".join(overlord("plan", job, "--step", str(step)).stderr.split()) for step in range(4)
    ]
    other = [words for words in said if "expected digest" in words]
    assert other
    assert all(words_of_it in words.split("the job file has")[1] for words in other)
    assert all(words.count("sync=") == 2 for words in other)  # of the run and of the job file
