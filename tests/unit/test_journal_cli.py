"""The commands that look into a journal."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import overlord as ov
from overlord.cli.main import cli
from overlord.journal.checkpoint import snapshot
from overlord.journal.job_journal import entries
from overlord.journal.log import JournalLog, read_all
from overlord.journal.record import Record
from overlord.journal.replay import Recovered
from overlord.journal.segments import Header, name_of
from overlord.journal.verify import verify
from tests.journals import JOB, plain, plan


def overlord(*args: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(cli, [str(a) for a in args])


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    with JournalLog.create(tmp_path / "j", JOB, segment_bytes=1000) as log:
        for k in range(6):
            log.append(
                [
                    Record.of("plan", k, {"step": k, "ids": np.arange(40)}),
                    Record.of("event", k, b"twelve bytes"),
                ]
            )
    return tmp_path / "j"


def test_show_lists_records_with_what_is_in_them(journal):
    found = overlord("journal", "show", journal)
    assert found.exit_code == 0, found.output
    assert "job 'demo': 12 records in" in found.stdout
    lines = [line.split(maxsplit=6) for line in found.stdout.splitlines() if " plan " in line]
    assert [line[0] for line in lines] == list("012345")
    assert '{"step": 5, "ids": "int64[40]"}' in found.stdout
    assert len(overlord("journal", "show", journal, "--last", "3").stdout.splitlines()) == 6


def test_show_as_json_is_one_document(journal):
    found = json.loads(overlord("journal", "show", journal, "--json", "--last", "2").stdout)
    assert (found["job"], found["records"], found["faults"], found["torn"]) == ("demo", 12, [], 0)
    assert [(r["kind"], r["number"], r["body"]) for r in found["list"]] == [
        ("plan", 5, {"step": 5, "ids": "int64[40]"}),
        ("event", 5, "12 bytes"),
    ]


def test_verify_ends_with_one_and_a_sentence_for_every_fault(journal):
    whole = overlord("journal", "verify", journal)
    assert (whole.exit_code, whole.stdout.splitlines()[-1]) == (0, "every record is whole")
    for k in (0, 1):
        path = journal / name_of(k)
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    found = overlord("journal", "verify", journal)
    assert found.exit_code == 1
    assert "2 faults in the journal" in found.stderr
    said = [line for line in found.stderr.splitlines() if line.startswith("  - ")]
    assert [line.split(",")[0] for line in said] == [f"  - {name_of(0)}", f"  - {name_of(1)}"]
    assert all(
        "expected" in line and "got" in line and "restore the segment" in line for line in said
    )
    assert overlord("journal", "show", journal, "--last", "1").exit_code == 1


def test_verify_takes_a_write_that_was_cut_for_no_fault(journal):
    last = max(journal.glob("*.ovj"))
    last.write_bytes(last.read_bytes()[:-3])
    found = overlord("journal", "verify", journal)
    assert found.exit_code == 0, found.output
    assert f"interrupted write, not a fault: {last.name}, byte" in found.stdout
    assert verify(journal).torn > 0


def test_a_record_that_this_version_cannot_decode_is_a_fault_of_verify(tmp_path):
    with JournalLog.create(tmp_path, JOB) as log:
        log.append([plan(0), Record("plan", 1, b"no frame", 1)])
    report = verify(tmp_path)
    assert report.first_fault.startswith("000000000000.ovj, byte")
    assert "that this version can decode, got another" in report.first_fault
    assert plain(read_all(tmp_path)[:1]) == [("plan", 0, bytes(20))]


def test_where_there_is_no_journal_the_command_says_so(tmp_path):
    found = overlord("journal", "verify", tmp_path / "nowhere")
    assert (found.exit_code, "expected a journal, got no segment" in found.stderr) == (2, True)


# what a job wrote


@pytest.fixture
def written(tmp_path: Path) -> Path:
    rows = [{"tokens": [k % 90] * (1 + k % 9)} for k in range(60)]
    sources = [
        ov.Source.from_dataset(name, rows, transforms=[ov.Tokens("tokens")])
        for name in ("web", "code")
    ]
    made = ov.Job(
        name="told",
        sources=sources,
        batch=ov.Batch(samples=4, context=32),
        journal=str(tmp_path / "told"),
    )
    with ov.launch(made) as session:
        client = session.client(0)
        for _, step in zip(range(3), client, strict=False):
            client.report(step.step, {"loss": 1.0})
        session.set_mixture({"web": 3.0, "code": 1.0}, at=20)
    return tmp_path / "told"


def test_show_says_what_a_job_wrote_in_words(written):
    found = overlord("journal", "show", written)
    assert found.exit_code == 0, found.output
    text = " ".join(found.stdout.split())
    assert "2 sources: web, code" in text
    assert "the state before step 0, of 2 sources; acked none" in text
    assert re.search(r"4 samples, digest [0-9a-f]{12}, acked none: web 2, code 2", text)
    assert "event set_mixture, at 20, weights {'web': 3.0, 'code': 1.0}" in text
    assert "acked step 2" in text
    lines = json.loads(overlord("journal", "show", written, "--json").stdout)["list"]
    assert any("acked step 2" in line["said"] for line in lines)


def test_verify_goes_through_the_steps_of_a_job(written):
    assert overlord("journal", "verify", written).exit_code == 0
    log, records = JournalLog.open(written, Header(job="told"))
    plan = next(record for record in records if record.kind == "plan")
    log.append([Record.of("plan", 99, plan.body)])
    log.close()
    found = overlord("journal", "verify", written)
    assert found.exit_code == 1
    assert re.search(
        r"expected a plan of step 99, got another record: ValueError: expected the plan of step \d",
        " ".join(found.stderr.split()),
    )


def test_a_snapshot_that_is_not_what_the_plans_give_is_a_fault(written):
    log, records = JournalLog.open(written, Header(job="told"))
    found = Recovered.of(entries(records))
    wrong = found.front()
    entry = snapshot(replace(wrong, owed=(1, *wrong.owed[1:])), found.acked)
    log.append([Record.of(entry.kind, entry.number, entry.body)])
    log.close()
    told = overlord("journal", "verify", written)
    assert (
        told.exit_code,
        "expected a snapshot equal to the state after the preceding plans, got one that differs in columns"
        in " ".join(told.stderr.split()),
    ) == (1, True)
