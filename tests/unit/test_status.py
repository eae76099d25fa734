"""What ``overlord status`` shows of a job on a cluster. That a cluster is asked is told in tests/scenarios/test_ray.py."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

pytest.importorskip("ray")

from overlord.cli import cli
from overlord.observe.tables import scaling_facts
from overlord.runtime import ray_jobs
from overlord.runtime.ray_jobs import Status
from overlord.runtime.watching import KEPT_DECISIONS, Watching
from overlord.scaling.scaler import CannotKeepUp, Limits, ReadAhead, Scale, Scaler

DECIDED = (
    Scale(source="photos", hosts=3, had=1, reason="the mixture will give it 10.0% in place of 0.4%"),
    ReadAhead(source="web", steps=7, reason="its slow reads take 0.5 s, usual ones 0.01 s"),
    CannotKeepUp(source="scenes", hosts=1, wanted=4, reason="62 samples a second of 95 ms", what="loaders"),
)


class Planner:
    class spec:  # noqa: N801
        names = ("web", "photos", "scenes")

    next_step = 86


class Engine(Watching):
    """Nothing but what was decided."""

    def _numbers(self, source: int) -> range:
        return range(source, source + 1)


def test_what_was_decided_is_shown_with_step_and_reason_and_who_cannot_keep_up_with_what_it_would_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    engine.planner = Planner()  # type: ignore[assignment]
    engine._watch(Scaler(Limits(cores=4)))
    engine._decided.extend((float(k), 85, decision) for k, decision in enumerate(DECIDED))
    told = engine._watch_figures(10.0)
    assert [d["what"] for d in told["decisions"]] == ["Scale", "ReadAhead", "CannotKeepUp"]
    assert engine._decided.maxlen == KEPT_DECISIONS
    scaling = tuple(f"{what}: {words}" for what, words in scaling_facts(told))
    job = Status(
        name="demo", state="running", address="tcp://here", steps=90, taken=85, clients=2, scaling=scaling,
        parts=({"name": "planner", "node": "gpu-0", "cores": 0.0, "memory": 0.0, "pid": 7, "state": "running"},),
    )  # fmt: skip
    monkeypatch.setattr(ray_jobs, "jobs", lambda address: [job])
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["status", "--address", "here:6379"])
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.output.splitlines()]
    assert "scaling: behind step 85: photos: 1 -> 3 loader hosts: the mixture will give it 10.0% in place of 0.4%" in lines
    assert "scaling: behind step 85: web: 7 steps are read ahead: its slow reads take 0.5 s, usual ones 0.01 s" in lines
    assert "cannot keep up: scenes has 1 loaders of the 4 that it would take: 62 samples a second of 95 ms" in lines
