"""What ``overlord status`` shows of a job on a cluster. That a cluster is asked is told in
tests/scenarios/test_ray.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("ray")

from overlord.cli import detached_jobs
from overlord.cli.detached_jobs import Status
from overlord.cli.main import cli
from overlord.cluster.autoscale import KEPT_DECISIONS, LoadObserver
from overlord.errors import JobError
from overlord.observe.tables import scaling_facts
from overlord.scaling.decisions import CannotKeepUp, ReadAhead, Scale
from overlord.scaling.scaler import Scaler, ScalingLimits
from overlord.serving.session_server import ServedAddress
from tests.unit.test_cli import job_file

DECIDED = (
    Scale(
        source="photos", hosts=3, had=1, reason="the mixture will give it 10.0% in place of 0.4%"
    ),
    ReadAhead(source="web", steps=7, reason="its slow reads take 0.5 s, usual ones 0.01 s"),
    CannotKeepUp(
        source="scenes",
        hosts=1,
        wanted=4,
        reason="62 samples per second of 95 ms each",
        what="loaders",
    ),
)


class Planner:
    class spec:  # noqa: N801
        names = ("web", "photos", "scenes")

    next_step = 86


class Readers:
    """Every source has one loader."""

    def places_of(self, source: int) -> tuple[int, ...]:
        return (source,)


def test_status_shows_decisions_with_step_and_reason_and_sources_that_cannot_keep_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observer = LoadObserver(
        Scaler(ScalingLimits(cores=4)),
        Planner,  # type: ignore[arg-type]
        Readers(),  # type: ignore[arg-type]
        set_read_ahead=lambda command: None,
    )
    observer.decided.extend((float(k), 85, decision) for k, decision in enumerate(DECIDED))
    told = observer.metrics(10.0)
    assert [d["what"] for d in told["decisions"]] == ["Scale", "ReadAhead", "CannotKeepUp"]
    assert observer.decided.maxlen == KEPT_DECISIONS
    scaling = tuple(f"{what}: {words}" for what, words in scaling_facts(told))
    job = Status(
        name="demo",
        state="running",
        address="tcp://here",
        steps=90,
        taken=85,
        clients=2,
        scaling=scaling,
        placement=(
            "sidecar=0.5 exceeded: node gpu-1 runs 2 hosts of this job where 1 are allowed",
        ),
        workers=(
            {"name": "planner", "node": "gpu-0", "asked": {}, "pid": 7, "state": "running"},
            {
                "name": "loader-worker/0",
                "node": "gpu-1",
                "asked": {"cores": 1, "memory": 2.0**27, "scratch": 2},
                "pid": 8,
                "state": "new",
            },
            {
                "name": "loader-worker/1",
                "node": "gpu-1",
                "asked": {"cores": 0.0, "memory": 0.0},
                "pid": 9,
                "state": "running",
            },
        ),
    )
    monkeypatch.setattr(detached_jobs, "jobs", lambda address: [job])
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["status", "--address", "here:6379"])
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.output.splitlines()]
    assert (
        "scaling: after step 85: photos: 1 -> 3 loader workers: the mixture will give it "
        "10.0% in place of 0.4%" in lines
    )
    assert (
        "scaling: after step 85: web: read 7 steps ahead: its slow reads take 0.5 "
        "s, usual ones 0.01 s" in lines
    )
    assert ["loader-worker/0", "gpu-1", "1", "128", "2", "8", "new"] in [
        line.split() for line in lines
    ], "cores, memory, scratch"
    why = (
        "because no node had a spare core that they may use (on nodes with ranks, sidecar= sets "
        "how many)"
    )
    assert f"workers without a reserved core, {why}: loader-worker/1" in lines
    assert "sidecar=0.5 exceeded: node gpu-1 runs 2 hosts of this job where 1 are allowed" in lines
    assert (
        "cannot keep up: scenes has 1 loader, needs 4: 62 samples per second of 95 ms each" in lines
    )


def test_a_token_is_shown_to_who_asks_for_it_by_the_name_of_its_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Status(
        name="demo", state="running", address="tcp://here", steps=9, taken=8, clients=2, workers=()
    )
    monkeypatch.setattr(detached_jobs, "jobs", lambda address: [job])
    monkeypatch.setattr(
        detached_jobs,
        "served",
        lambda name, address: ServedAddress(
            "overlord://10.0.0.1:7/k", f"secret of {name} at {address}"
        ),
    )
    result = CliRunner().invoke(cli, ["status", "--address", "here:6379", "--token", "demo"])
    assert (
        result.output
        == "OVERLORD_ADDRESS=overlord://10.0.0.1:7/k\nOVERLORD_TOKEN=secret of demo at here:6379\n"
    )
    assert "secret" not in CliRunner().invoke(cli, ["status", "--address", "here:6379"]).output


def test_for_how_long_a_job_may_begin_is_an_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[float] = []

    def submit(job: Any, *, start_s: float, **more: Any) -> ServedAddress:
        asked.append(start_s)
        return ServedAddress("overlord://10.0.0.1:7/k", "secret")

    monkeypatch.setattr(detached_jobs, "submit", submit)
    command = ["serve", str(job_file(tmp_path)), "--runtime", "ray", "--address", "here:6379"]
    for more in (["--detach"], ["--detach", "--start-s", "900"]):
        result = CliRunner().invoke(cli, [*command, *more])
        assert result.exit_code == 0, result.output
    assert asked == [180.0, 900.0]
    assert (
        "--start-s needs --detach" in CliRunner().invoke(cli, [*command, "--start-s", "9"]).output
    )


@pytest.mark.parametrize("start_s", [0, -1.0, float("nan"), float("inf"), "90", True])
def test_a_time_to_begin_that_is_none_is_refused_by_name(start_s: Any) -> None:
    with pytest.raises(
        JobError, match=r"submit: start_s: expected a number of seconds above 0, got"
    ):
        detached_jobs.submit(None, address="here:6379", start_s=start_s)  # type: ignore[arg-type]
