"""A job on a fleet that is not there: the real planner and assemblers on a virtual clock, and the
command that shows it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import overlord as ov
from overlord.cli.main import cli
from overlord.dryrun.constants import Measured, choose_sources, probe_sources, samples_per_step
from overlord.dryrun.estimate import (
    DryRunRequest,
    constants_of,
    estimate_sizes,
    fleet_of,
    job_at_size,
)
from overlord.dryrun.machines import ClusterShape
from overlord.dryrun.run import DryRun, DryRunResult
from overlord.dryrun.stand_ins import Probe
from overlord.errors import JobError
from overlord.setup.options import Options
from overlord.setup.prepared_job import PreparedJob
from tests.corpus import write_rows
from tests.properties.test_fleet import LIKELY

ROWS = [{"tokens": list(range(1 + i % 40))} for i in range(600)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> ov.Job:
    folder = tmp_path_factory.mktemp("fleet")
    names = [f"s{i}" for i in range(3)]
    for name in names:
        write_rows(folder / name, "parquet", ROWS, row_group_size=50)
    sources = [
        ov.Source(name, str(folder / name), transforms=[ov.Tokens("tokens")]) for name in names
    ]
    return ov.Job(
        name="fleet",
        sources=sources,
        place=ov.ClientPlaceTree(dp=2),
        batch=ov.Batch(samples=16, context=256),
        seed=3,
    )


def ran(
    job: ov.Job, fleet: ClusterShape, *, seen: list[DryRun] | None = None, row_s: float = 1e-4
) -> DryRunResult:
    blueprint = PreparedJob(job_at_size(job, fleet, LIKELY), Options())
    try:
        probes = probe_sources(blueprint, lambda what, done, of: None)
        probes = tuple(
            replace(p, row_s=row_s) for p in probes
        )  # what was measured differs from run to run
        run = DryRun(blueprint, probes, fleet, LIKELY)
        if seen is not None:
            seen.append(run)
        return run.run(8, 4)
    finally:
        blueprint.close()


@pytest.mark.parametrize("constructors", [True, False])
def test_every_rank_gets_every_step_at_the_pace_of_the_trainers(
    job: ov.Job, constructors: bool
) -> None:
    fleet, seen = (
        ClusterShape(gpus=64, tp=2, cp=2, pp=4, sources=3, batch=64, constructors=constructors),
        list[DryRun](),
    )
    found = ran(job, fleet, seen=seen)
    assert [step.has for step in found.steps] == [64] * 4
    assert found.most("waited_s") == 0.0
    assert found.wait_reason(1.0) == ""
    assert 0 < found.median("latency_s") < 0.1
    assert 7.0 <= found.seconds < 8.5  # eight steps of a second
    assert seen[0].planner.ledger.samples.sum() >= 8 * 64


def test_without_a_clock_a_run_is_the_same_every_time(job: ov.Job) -> None:
    fleet = ClusterShape(gpus=32, cp=2, sources=3, batch=64)
    assert ran(job, fleet) == ran(job, fleet)


def test_ranks_that_gather_for_themselves_get_more_bytes_and_later(job: ov.Job) -> None:
    fleet = ClusterShape(gpus=256, cp=4, gpus_per_node=8, sources=3, batch=256)
    built, direct = (ran(job, replace(fleet, constructors=c)) for c in (True, False))
    assert direct.median("nbytes") == pytest.approx(4 * built.median("nbytes"), rel=0.05)
    assert direct.median("latency_s") > built.median("latency_s")


def test_a_planner_that_is_slow_shows_in_latency_and_then_in_waits(job: ov.Job) -> None:
    """Its time is real time, put on the virtual clock."""
    fleet, ticks = ClusterShape(gpus=8, sources=3, batch=16), iter(range(10**9))
    blueprint = PreparedJob(job_at_size(job, fleet, LIKELY), Options())
    probes = tuple(
        replace(p, row_s=1e-6) for p in probe_sources(blueprint, lambda what, done, of: None)
    )
    found = DryRun(blueprint, probes, fleet, LIKELY, clock=lambda: float(next(ticks))).run(
        6, 2
    )  # every look is a second later
    blueprint.close()
    assert found.median("plan_s") >= 0.25
    assert found.median("latency_s") > 1.0
    assert found.most("waited_s") > 0.5
    assert found.planner_s > 1
    assert found.wait_reason(1.0).startswith("the planner, which needs ")


def test_what_trainers_wait_for_is_named(job: ov.Job) -> None:
    """Eight loaders of a source, 64 / 3 samples of it in a step, half a second each."""
    found = ran(job, ClusterShape(gpus=64, tp=2, cp=2, pp=4, sources=3, batch=64), row_s=0.5)
    assert found.most("waited_s") > 0
    words = (
        "source 's0': each of its 8 loaders needs 1.33 s per step, and it has no chunks for "
        "more loaders (shuffle_chunks)"
    )
    assert found.wait_reason(1.0) == words


def test_loader_workers_are_as_many_as_reading_takes(job: ov.Job) -> None:
    asked = DryRunRequest(gpus=[64], cp=2)
    few, many = (
        fleet_of(job, asked, 64, replace(LIKELY, read_s=s), True).loader_hosts for s in (1e-4, 1.0)
    )
    assert (few, fleet_of(job, asked, 64, LIKELY, True).batch) == (1, 16 * 32 // 2)
    assert many == 46  # 256 samples of a second, with 8 threads that are 0.7 busy
    with pytest.raises(JobError, match="expected a multiple of tp x cp x pp = 2, got 63"):
        fleet_of(job, asked, 63, LIKELY, True)


def test_constants_that_are_damaged_or_of_another_version_are_measured_again(job: ov.Job) -> None:
    blueprint = PreparedJob(job, Options())
    found = Measured(constants=LIKELY, probes=probe_sources(blueprint, lambda what, done, of: None))
    blueprint.close()
    kept = json.loads(json.dumps(found.to_dict()))
    assert Measured.of(kept, 3) == Measured(constants=LIKELY, probes=found.probes)
    assert Measured.of({**kept, "version": 0}, 3) is None
    assert Measured.of(kept, 4) is None
    assert Measured.of({**kept, "constants": {}}, 3) is None
    assert Measured.of([], 3) is None


@pytest.mark.parametrize("evaluation", [False, True])
def test_the_command_shows_and_writes_what_it_found(
    job: ov.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluation: bool
) -> None:
    def kept(blueprint: PreparedJob, path: Path, *, again: bool, progress: object) -> Measured:
        assert {source.epochs for source in blueprint.job.sources} == {None}
        return Measured(
            constants=LIKELY, probes=probe_sources(blueprint, lambda what, done, of: None)
        )

    monkeypatch.setattr(
        "overlord.dryrun.estimate.load_or_measure", kept
    )  # stand-in jobs have their own test
    # sources repeat, those of an evaluation too: a large cluster would finish them at once
    (tmp_path / "job.yaml").write_text(replace(job, evaluation=evaluation).to_yaml())
    done = CliRunner().invoke(
        cli,
        [
            "simulate",
            str(tmp_path / "job.yaml"),
            "--gpus",
            "32,64",
            "--cp",
            "2",
            "--save",
            str(tmp_path / "out.json"),
        ],
        env={"COLUMNS": "200"},
    )
    assert done.exit_code == 0, done.output
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert [(c["gpus"], c["constructors"]) for c in cells] == [
        (32, True),
        (32, False),
        (64, True),
        (64, False),
    ]
    assert all(
        c["planner"]["measured"] and c["memory"]["times_less"] > 0 and c["fetch_s"] > 0
        for c in cells
    )
    assert "fetch ms" in done.output
    wrong = CliRunner().invoke(cli, ["simulate", str(tmp_path / "job.yaml"), "--gpus", "many"])
    assert wrong.exit_code == 2
    assert "expected whole numbers above 0" in wrong.output


def pictured(job: ov.Job, name: str) -> ov.Job:
    """The same job, of which one source has images."""
    images = ov.Images("tokens", placeholder=7)  # a column that is there; nothing is decoded here
    sources = [
        replace(s, transforms=[*s.transforms, images]) if s.name == name else s for s in job.sources
    ]
    return replace(job, sources=sources, strategy="vlm_hybrid")


def test_constants_of_the_same_files_without_images_are_not_taken_for_those_with(
    job: ov.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "overlord.dryrun.estimate.load_or_measure",
        lambda *_, **__: Measured(constants=LIKELY, probes=()),
    )
    kept = []
    for made in (PreparedJob(job, Options()), PreparedJob(pictured(job, "s1"), Options())):
        kept.append(constants_of(made, again=False, progress=lambda what, done, of: None)[1])
        made.close()
    assert kept[0] != kept[1]


def test_constants_are_measured_again_for_another_context_treatment_of_long_documents_or_weight(
    job: ov.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "overlord.dryrun.estimate.load_or_measure",
        lambda *_, **__: Measured(constants=LIKELY, probes=()),
    )
    heavy = [replace(job.sources[0], weight=5.0), *job.sources[1:]]
    others = [
        replace(job, batch=ov.Batch(samples=16, context=8)),
        replace(job, on_long="truncate"),
        replace(job, sources=heavy),
    ]
    same = replace(job, batch=ov.Batch(samples=32, context=256), place=ov.ClientPlaceTree(dp=4))
    kept = []
    for made in (PreparedJob(j, Options()) for j in (job, same, *others)):
        kept.append(constants_of(made, again=False, progress=lambda what, done, of: None)[1])
        made.close()
    assert kept[0] == kept[1], "not for another batch or place"
    assert len(set(kept)) == 4


def test_stand_in_jobs_hold_a_source_with_images_and_few_samples_of_large_ones(job: ov.Job) -> None:
    many = replace(
        job,
        sources=[replace(job.sources[0], name=f"t{i}") for i in range(40)]
        + [replace(job.sources[0], name="s")],
    )
    assert [s.name for s in choose_sources(many, 3)] == ["t0", "t1", "t2"]
    assert [s.name for s in choose_sources(pictured(many, "s"), 3)] == ["t0", "t1", "s"]
    assert [s.name for s in choose_sources(replace(many, mixture={"t7": 1.0, "s": 1.0}), 2)] == [
        "t7",
        "s",
    ]
    large, small = (Probe(row_s=1e-3, sample_bytes=1e3, meta={"tokens": [n]}) for n in (3000, 30))
    assert samples_per_step(many, [large]) == samples_per_step(pictured(many, "s"), [small]) == 64
    assert samples_per_step(pictured(many, "s"), [small, large]) == 4


def test_a_mesh_that_no_launch_takes_is_refused_before_anything_is_measured(
    job: ov.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "overlord.dryrun.estimate.load_or_measure", lambda *_, **__: pytest.fail("measured")
    )
    with pytest.raises(
        JobError,
        match=r"simulate, 48 GPUs with cp 3, pp 1, tp 1: batch.context: expected a multiple of 6",
    ):
        estimate_sizes(job, DryRunRequest(gpus=[48], cp=3))
