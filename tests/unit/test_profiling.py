"""Measuring sources, keeping what was measured, and launching by it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

import overlord as ov
from overlord.cli.main import cli
from overlord.journal import job_journal
from overlord.journal.timeouts import Timeouts
from overlord.loader.reader import ReaderStats
from overlord.scaling.profile import JobProfile, SourceProfile
from overlord.setup import partition, profile_store
from overlord.setup.measure import Bounds, measure
from overlord.setup.partition import loader_placement_of, loads_of, partition_of, profiled
from overlord.setup.prepared_job import Options, PreparedJob
from overlord.setup.timeouts import Timeouts as SetupTimeouts
from tests.corpus import write_rows
from tests.worlds import Rows

pytestmark = pytest.mark.timeout(200)
WORDS = ["a", "few", "words", "of", "text"]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals are opened again by the process that closed them: a sync that takes longer than a
    second must not be in the way.
    """
    monkeypatch.setattr(job_journal, "TIMEOUTS", Timeouts(close_s=30.0))


def busy(row: dict[str, Any]) -> dict[str, Any]:
    sum(k * k for k in range(20_000))
    return row


LASTS_S = 0.002


def lasting(row: dict[str, Any]) -> dict[str, Any]:
    """Never less than that by the clock, however busy the machine is."""
    time.sleep(LASTS_S)
    return row


def third(row: dict[str, Any]) -> bool:
    return bool(row["n"] % 3 == 0)


def rows(n: int = 300) -> list[dict[str, Any]]:
    return [
        {
            "n": k,
            "tokens": [k % 50] * (1 + k % 7),
            "text": " ".join(WORDS[(k + j) % 5] for j in range(20)),
        }
        for k in range(n)
    ]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The same rows as Parquet, twelve row groups of 25, and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    write_rows(tmp_path / "web", "parquet", rows(), row_group_size=25)
    return tmp_path


def source(corpus: Path, name: str = "web", *transforms: Any, **fields: Any) -> ov.Source:
    return ov.Source(
        name,
        str(corpus / "web" / "*.parquet"),
        transforms=transforms or (ov.Tokens("tokens"),),
        **fields,
    )


def text(corpus: Path) -> ov.Tokenize:
    return ov.Tokenize(str(corpus / "tokenizer.json"), text="text")


def job(*sources: ov.Source, **fields: Any) -> ov.Job:
    usual = {"batch": ov.Batch(samples=16, context=64), "slice_rows": 8, "until": 6, "seed": 5}
    return ov.Job(name="profiled", sources=sources, **{**usual, **fields})


@contextmanager
def blueprint(made: ov.Job, **options: Any) -> Iterator[PreparedJob]:
    ready = PreparedJob(made, Options(**options))
    try:
        yield ready
    finally:
        ready.close()


def measured(made: ov.Job, **bounds: Any) -> list[SourceProfile]:
    with blueprint(made) as ready:
        return [
            measure(ready.reader_spec(i), Bounds(**{"seconds": 60.0, **bounds}))
            for i in range(len(made.sources))
        ]


# measuring


def test_a_profile_tells_a_slow_transform_from_a_light_one(corpus: Path) -> None:
    made = job(source(corpus), source(corpus, "slow", ov.Map(busy, rows=True), ov.Tokens("tokens")))
    lights, slows = zip(*(measured(made, rows=200) for _ in range(3)), strict=True)
    light, slow = (min(some, key=lambda p: p.transform_s) for some in (lights, slows))
    assert light.samples == slow.samples == 200
    assert slow.transform_s > 5 * light.transform_s > 0
    assert light.read_s > 0
    assert (light.tokens, slow.tokens) == (pytest.approx(4, abs=0.5), pytest.approx(4, abs=0.5))
    assert light.token_s == pytest.approx(light.sample_s / light.tokens)
    assert light.buffer_bytes > 0


def test_rows_and_seconds_are_bounds(corpus: Path) -> None:
    made = job(source(corpus, "slow", ov.Map(busy, rows=True), ov.Tokens("tokens")), slice_rows=25)
    [few] = measured(made, rows=10)
    assert few.samples == 10
    with blueprint(made) as ready:
        none = measure(ready.reader_spec(0), Bounds(), over=lambda: True)
    assert (none.samples, none.sample_s) == (0, 0.0)


def test_rows_that_a_filter_drops_are_paid_by_those_that_stay(corpus: Path) -> None:
    made = job(
        source(corpus), source(corpus, "some", ov.Filter(third, rows=True), ov.Tokens("tokens"))
    )
    every, some = zip(*(measured(made, rows=300) for _ in range(3)), strict=True)
    assert ({p.samples for p in every}, {p.samples for p in some}) == ({300}, {100})
    assert min(p.read_s for p in some) > 1.5 * min(p.read_s for p in every)


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_what_a_core_is_busy_with_is_told_from_what_is_waited_wherever_transforms_run(
    corpus: Path, workers: str
) -> None:
    kinds = {"busy": ov.Map(busy, rows=True), "waits": ov.Map(lasting, rows=True)}
    works, waits = measured(
        job(
            *(source(corpus, n, m, ov.Tokens("tokens"), workers=workers) for n, m in kinds.items())
        ),
        rows=64,
    )
    assert works.samples == waits.samples == 64
    assert works.core_s > 1e-5
    assert waits.transform_s >= LASTS_S
    assert waits.waited_s >= LASTS_S, "no core is busy with a function that sleeps"
    assert waits.core_s < waits.transform_s / 2


def test_file_state_is_what_open_chunks_hold(corpus: Path) -> None:
    wide = [{"tokens": [1, 2], "blob": f"{k:06d}" * 2000} for k in range(200)]
    write_rows(corpus / "wide", "parquet", wide, files=1, row_group_size=50, compression="none")
    big = ov.Source(
        "big",
        str(corpus / "wide" / "*.parquet"),
        transforms=[ov.Filter(has_blob), ov.Tokens("tokens")],
    )
    small, large = measured(job(source(corpus), big), rows=32)
    held = 200 * 12_000  # four row groups are open, each decoded in one go and delivered in slices
    assert 0.8 * held < large.file_bytes < 3 * held
    assert small.file_bytes < large.file_bytes / 10


def has_blob(columns: dict[str, Any]) -> list[bool]:
    return [bool(b) for b in columns["blob"]]


def test_a_fingerprint_is_of_files_transforms_and_slices(corpus: Path) -> None:
    same, again, tokenized = (
        source(corpus, "a"),
        source(corpus, "b"),
        source(corpus, "c", text(corpus)),
    )
    with blueprint(job(same, again, tokenized)) as one, blueprint(job(same, slice_rows=9)) as other:
        marks = [one.reader_spec(i).cost_fingerprint for i in range(3)] + [
            other.reader_spec(0).cost_fingerprint
        ]
    assert marks[0] == marks[1]
    assert len(set(marks)) == 3


# keeping


def kept(ready: PreparedJob, *costs: float) -> JobProfile:
    marks = profile_store.fingerprints(ready)
    return JobProfile.of(
        SourceProfile(
            name=n, fingerprint=marks[n], samples=100, read_s=0.0, transform_s=c, tokens=4.0
        )
        for n, c in zip(ready.job.names, costs, strict=True)
    )


def test_a_profile_is_kept_in_the_journal_or_by_names_in_the_cache(corpus: Path) -> None:
    made = job(source(corpus))
    assert Path(profile_store.path_of(made, corpus / "c")).parent == corpus / "c" / "profiles"
    assert profile_store.path_of(made, corpus / "c") != profile_store.path_of(
        job(source(corpus, "other")), corpus / "c"
    )
    assert (
        profile_store.path_of(job(source(corpus), journal=corpus / "j"), None)
        == corpus / "j" / "profile.json"
    )
    assert (
        profile_store.path_of(job(source(corpus), journal=f"file://{corpus}/j"), None)
        == corpus / "j" / "profile.json"
    )
    stored = job(source(corpus), journal="s3://bucket/j/?region=eu")
    assert profile_store.path_of(stored, corpus / "c") == "s3://bucket/j/profile.json?region=eu"


@pytest.mark.parametrize(
    "broken", [b"", b"{", b"[1]", b'{"version": 1}', b"\xff\xfe", b"[" * 100_000, b"0" * 400]
)
def test_a_broken_profile_is_ignored_with_a_warning(
    corpus: Path, caplog: pytest.LogCaptureFixture, broken: bytes
) -> None:
    path = corpus / "profile.json"
    path.write_bytes(broken)
    with caplog.at_level(logging.WARNING, "overlord"):
        assert profile_store.load(path) == JobProfile()
    assert [f"profile {path} ignored" in r.getMessage() for r in caplog.records] == [True]
    assert profile_store.load(corpus / "nowhere.json") == JobProfile()
    assert len(caplog.records) == 1, "one that is not there is no surprise"


def test_what_is_kept_counts_while_the_source_is_the_same(corpus: Path) -> None:
    with blueprint(job(source(corpus), source(corpus, "code")), cache_dir=corpus / "c") as ready:
        path = profile_store.path_of(ready.given, ready.options.cache_dir)
        assert profile_store.save(path, kept(ready, 0.5, 0.25))
        assert profile_store.known(ready) == kept(ready, 0.5, 0.25)
        assert [load.cost for load in loads_of(profiled(ready, "process"))] == [0.25, 0.125]
    with blueprint(
        job(source(corpus, "web", text(corpus)), source(corpus, "code")), cache_dir=corpus / "c"
    ) as changed:
        assert list(profile_store.known(changed).sources) == ["code"]
        assert loads_of(profiled(changed, "process"))[1].cost == 0.125
    with blueprint(
        job(source(corpus), source(corpus, "code")), cache_dir=corpus / "c", partition="off"
    ) as off:
        assert profiled(off, "process").profile is None


def test_a_profile_that_cannot_be_kept_costs_a_warning(
    corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (corpus / "file").write_text("")
    assert not profile_store.save(corpus / "file" / "profile.json", JobProfile())
    assert "not saved" in caplog.text


# the quick look


CALLS: list[int] = []


def watched(columns: dict[str, Any]) -> list[bool]:
    CALLS.append(len(columns["text"]))
    return [True] * len(columns["text"])


def test_launch_looks_at_sources_that_may_be_heavy_and_runs_no_code_of_the_users(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        profile_store, "TIMEOUTS", SetupTimeouts(probe_s=20.0)
    )  # a machine that is busy with other things
    monkeypatch.setattr(profile_store, "QUICK", Bounds(rows=64, seconds=20.0, memory=False))
    seen = ov.Source.from_dataset("held", Rows(rows(20)), transforms=[text(corpus)])
    code = source(corpus, "code", ov.Filter(watched), text(corpus))
    with blueprint(
        job(source(corpus, "text", text(corpus)), source(corpus, "ids"), code, seen)
    ) as ready:
        found = profile_store.quick(ready, loads_of(ready), JobProfile())
        assert list(found.sources) == ["text"]
        assert CALLS == [], "code of the user's does not run at launch"
        probed = found.sources["text"]
        assert 0 < probed.samples <= 64
        assert probed.tokens == 20
        again = profile_store.quick(ready, loads_of(ready), kept(ready, 1.0, 1.0, 1.0, 1.0))
        assert again == kept(ready, 1.0, 1.0, 1.0, 1.0), "what is known is not looked at again"


def test_a_job_of_small_steps_is_not_looked_at(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "quick", None)  # would fail
    with blueprint(job(source(corpus, "text", text(corpus))), cache_dir=corpus / "c") as ready:
        assert profiled(ready, "process").profile == JobProfile()


# launching by it


def test_a_measured_source_gets_loaders_by_what_it_costs(corpus: Path) -> None:
    made = job(source(corpus), source(corpus, "code"), source(corpus, "books"))
    with blueprint(made, hosts=8) as ready:
        assert set(loader_placement_of(ready).loaders) == {3}, "all are alike by their index"
        ready.profile = kept(ready, 1e-3, 6e-3, 1e-3)
        assert loader_placement_of(ready).loaders == (1, 6, 1)
        assert len(set(loader_placement_of(ready).host_of[1:7])) == 6, (
            "each of them in a host of its own"
        )
    with blueprint(made, hosts=8, loaders={"code": 2}) as named:
        named.profile = kept(named, 1e-3, 6e-3, 1e-3)
        assert loader_placement_of(named).loaders[1] == 2


def test_without_partition_sources_get_loaders_by_their_index_and_the_stored_profile_is_not_read(
    corpus: Path,
) -> None:
    made, cache = job(source(corpus), source(corpus, "code"), source(corpus, "books")), corpus / "c"
    with blueprint(made, hosts=8, cache_dir=cache) as ready:
        by_index = loader_placement_of(ready)
        profile_store.save(profile_store.path_of(made, cache), kept(ready, 1e-3, 6e-3, 1e-3))
        assert loader_placement_of(profiled(ready, "process")).loaders == (1, 6, 1)
    for off in ("off", None):
        with blueprint(made, hosts=8, cache_dir=cache, partition=off) as ready:
            assert loader_placement_of(profiled(ready, "process")) == by_index
    assert by_index.loaders == (3, 3, 3)


@pytest.mark.parametrize("partition", ["auto", "off"])
def test_in_one_process_a_source_whose_step_is_worth_it_gets_loaders_by_its_index(
    corpus: Path, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        profile_store, "TIMEOUTS", SetupTimeouts(probe_s=0.0)
    )  # nothing is measured in no time
    heavy, light = source(corpus, "text", text(corpus)), source(corpus, "ids")
    # Of four cores one is left for constructors and planner.
    for samples, loaders in ((2048, 3), (16, 1)):
        made = job(heavy, light, batch=ov.Batch(samples=samples, context=64))
        with blueprint(made, workers=4, cache_dir=corpus / "c", partition=partition) as ready:
            found = profiled(ready, "local")
            assert [found.loaders_of(0), found.loaders_of(1)] == [loaders, 1]


@pytest.mark.parametrize(
    ("autoscale", "loaders"), [(False, 1), (True, 1), ({"cores": 5}, 5), ({"cores": 99}, 8)]
)
def test_a_scaled_source_is_cut_for_the_workers_there_may_be_in_the_end(
    corpus: Path, autoscale: Any, loaders: int
) -> None:
    made = job(source(corpus, "slow", ov.Map(busy, rows=True), ov.Tokens("tokens")))
    with blueprint(made, hosts=1, autoscale=autoscale) as ready:
        assert len(ready.indexes[0].chunks) >= made.shuffle_chunks == 8
        assert loader_placement_of(ready).loaders == (loaders,)


def test_guesses_are_corrected_by_what_was_measured_of_their_kind(corpus: Path) -> None:
    made = job(
        source(corpus, "a", text(corpus)), source(corpus, "b", text(corpus)), source(corpus, "ids")
    )
    with blueprint(made) as ready:
        guessed = loads_of(ready)
        ready.profile = JobProfile.of(
            [kept(ready, 30 * guessed[0].cost, 0.0, 0.0).sources["a"]]
        )  # ten times the guess: a third is drawn
        found = loads_of(ready)
    assert [f.cost / g.cost for f, g in zip(found, guessed, strict=True)] == pytest.approx(
        [10.0, 10.0, 1.0]
    )


def test_batches_in_tokens_draw_long_samples_less_often(corpus: Path) -> None:
    made = job(source(corpus), source(corpus, "code"), batch=ov.Batch(tokens=400, context=64))
    with blueprint(made) as ready:
        marks = profile_store.fingerprints(ready)
        fields = {"samples": 9, "read_s": 0.0, "transform_s": 1.0}
        ready.profile = JobProfile.of(
            SourceProfile(name=n, fingerprint=marks[n], tokens=t, **fields)
            for n, t in (("web", 30.0), ("code", 10.0))
        )
        assert [load.cost for load in loads_of(ready)] == pytest.approx([0.25, 0.75])
        assert partition.sample_tokens(ready) == pytest.approx(15.0)
        assert partition.batch_samples(ready) == round(400 / 15)


def test_a_schedule_is_asked_how_it_begins(corpus: Path) -> None:
    mixture = ov.schedule.staged({0: {"web": 3.0, "code": 1.0}, 50: {"code": 1.0}})
    with blueprint(job(source(corpus), source(corpus, "code"), mixture=mixture)) as ready:
        assert partition.shares_of(ready) == [0.75, 0.25]


def test_in_one_process_only_sources_that_are_worth_it_are_split(corpus: Path) -> None:
    made = job(source(corpus), source(corpus, "code"))
    for code_s, loaders in ((1e-6, 1), (0.1, 4)):
        with blueprint(made, cache_dir=corpus / "c", workers=4) as ready:
            profile_store.save(profile_store.path_of(made, corpus / "c"), kept(ready, 1e-6, code_s))
        with ov.launch(made, cache_dir=corpus / "c", workers=4) as session:
            names = [a["name"] for a in session.metrics()["actors"] if a["role"] == "loader"]
            assert sum("code" in name for name in names) == loaders
            assert sum("web" in name for name in names) == 1


def test_time_that_was_waited_and_rows_that_nobody_drew_are_no_cost_of_a_source(
    corpus: Path,
) -> None:
    stats = ReaderStats(
        read_s=20.0,
        staged_s=30.0,
        transform_s=9.0,
        read_busy_s=0.2,
        staged_busy_s=0.3,
        transform_busy_s=0.25,
        rows=1000,
        evaluated=100,
        samples=100,
    )
    assert ReaderStats(rows=1000, evaluated=10, samples=400).evaluated_fraction == 0.01, (
        "a row that was split into 40 samples was read once"
    )
    with blueprint(job(source(corpus)), cache_dir=corpus / "c") as ready:
        row = {"source": "web", "loader": 0, "samples": stats.samples, "tokens": 500}
        row |= {"of_samples_s": stats.sample_seconds, "core_s": stats.work[0]}
        found = profile_store.Refresher(lambda: ready, lambda: {"loaders": [row]}).refresh()
        ready.profile = found
        assert loads_of(ready)[0].cost == pytest.approx(0.3 / 100), (
            "a tenth of what was read, and what was transformed, of a core"
        )
    web = found.sources["web"]
    assert (web.sample_s, web.cost_s, web.waited_s) == pytest.approx(
        (14.0 / 100, 0.3 / 100, 13.7 / 100)
    )
    assert (web.read_s, web.transform_s) == pytest.approx((2.0 / 100, 12.0 / 100)), (
        "slices are transformed as they are read"
    )


def test_a_source_that_is_seldom_drawn_from_counts_when_enough_of_it_has_come_together(
    corpus: Path,
) -> None:
    counted = {"samples": 0.0}
    with blueprint(job(source(corpus)), cache_dir=corpus / "c") as ready:
        row = {
            "source": "web",
            "loader": 0,
            "tokens": 4.0,
            "of_samples_s": (0.0, 1.0),
            "core_s": 1.0,
        }
        refresher = profile_store.Refresher(lambda: ready, lambda: {"loaders": [row | counted]})
        for samples, known in ((40.0, 0), (60.0, 0), (100.0, 100), (130.0, 100), (170.0, 170)):
            counted["samples"] = samples
            found = refresher.refresh().sources.get("web")
            assert (0 if found is None else found.samples) == known


def test_the_profile_of_a_job_follows_its_added_sources(corpus: Path) -> None:
    counted = {"loader": 0, "samples": 100.0, "tokens": 4.0}
    counted |= {"of_samples_s": (0.0, 1.0), "core_s": 1.0}
    with blueprint(job(source(corpus)), cache_dir=corpus / "c") as ready:
        current, read = [ready], [counted | {"source": "web"}]
        refresher = profile_store.Refresher(lambda: current[0], lambda: {"loaders": read})
        assert set(refresher.refresh().sources) == {"web"}
        late = SourceProfile(
            name="late", fingerprint="f", samples=1, read_s=1.0, transform_s=0.0, tokens=4.0
        )
        more = ready.with_source(source(corpus, "late"))
        more.profile = JobProfile.of([late])
        current[0] = more
        assert set(refresher.refresh().sources) == {"web", "late"}, "as measured when it was added"
        read.append(counted | {"source": "late"})
        found = refresher.refresh().sources["late"]
        assert (found.samples, found.fingerprint) == (100, more.reader_spec(1).cost_fingerprint)
        saved = profile_store.load(profile_store.path_of(more.given, corpus / "c"))
        assert set(saved.sources) == {"web", "late"}


def test_an_added_source_of_cheap_rows_has_one_loader_and_is_not_measured(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(partition, "known", lambda prepared: asked.append("known") or JobProfile())
    monkeypatch.setattr(
        partition, "quick", lambda *given, **more: asked.append("quick") or given[2]
    )
    with blueprint(job(source(corpus)), cache_dir=corpus / "c", hosts=8) as ready:
        cheap = partition.with_new_loaders(ready.with_source(source(corpus, "ids")), "process")
        assert (cheap.options.loaders, asked) == ({"ids": 1}, [])
        heavy = source(corpus, "text", text(corpus))
        partition.with_new_loaders(ready.with_source(heavy), "process")
        assert "known" in asked


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_what_loaders_measure_refreshes_what_is_kept(corpus: Path, workers: str) -> None:
    slow = source(corpus, "slow", ov.Map(lasting, rows=True), ov.Tokens("tokens"), workers=workers)
    made = job(source(corpus), slow, until=20, journal=corpus / "j")
    with ov.launch(made) as session:
        assert session.profile() == JobProfile(), "nothing was read yet that would tell"
        for _ in session.client(0):
            pass
        found = session.profile()
        assert session.profile() == found, "nothing new was read"
    slow, web = found.sources["slow"], found.sources["web"]
    assert slow.samples >= 64
    assert slow.tokens == pytest.approx(4, abs=0.5)
    assert slow.transform_s >= LASTS_S, "by the clock; the user's function is no reading"
    assert slow.waited_s >= LASTS_S, "no core is busy with a function that sleeps"
    assert web.core_s > 0
    assert profile_store.load(corpus / "j" / "profile.json") == found
    with ov.launch(made, resume="auto") as session:
        assert session.profile() == found


# sources that join


def loaders_of(session: ov.Session, name: str) -> int:
    return sum(
        a["name"].startswith(f"loader/{name}/")
        for a in session.metrics()["actors"]
        if a["role"] == "loader"
    )


def test_a_source_that_joins_is_looked_at_and_measured_as_the_others_are(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "WORTH_S", 0.0)  # what is read here is next to nothing
    monkeypatch.setattr(partition, "n_cores", lambda: 4)  # one core does not look
    monkeypatch.setattr(profile_store, "TIMEOUTS", SetupTimeouts(probe_s=30.0))
    made, late = job(source(corpus), until=60), source(corpus, "late", text(corpus))
    with ov.launch(made, cache_dir=corpus / "c") as session:
        client = session.client(0)
        next(client)
        session.add_source(late)
        looked = session.profile().sources["late"]
        assert 0 < looked.samples <= 64, "a quick look, before it is drawn"
        for _ in client:
            pass
        found = session.profile().sources["late"]
        assert found.samples > looked.samples, "and then by its loaders"
    again = job(source(corpus), late, until=60)
    with blueprint(again, cache_dir=corpus / "c") as ready:
        assert profile_store.known(ready).sources["late"] == found, (
            "the job that lists it begins with that"
        )


def test_a_source_that_joins_gets_loaders_by_what_is_known_of_it_unless_it_is_said(
    corpus: Path,
) -> None:
    made, both = job(source(corpus)), job(source(corpus), source(corpus, "late"))
    with blueprint(both, cache_dir=corpus / "c", workers=4) as ready:
        profile_store.save(profile_store.path_of(both, corpus / "c"), kept(ready, 1e-6, 0.1))
    for said, loaders in ((None, 4), (2, 2)):
        with ov.launch(made, cache_dir=corpus / "c", workers=4) as session:
            session.add_source(source(corpus, "late"), loaders=said)
            assert loaders_of(session, "late") == loaders
            assert len(list(session.client(0))) == 6


def test_without_partition_an_added_source_has_loaders_by_its_index_or_if_scaled_one_per_thread(
    corpus: Path,
) -> None:
    heavy = source(corpus, "late", ov.Map(busy, rows=True), ov.Tokens("tokens"))
    for samples, scaled, loaders in ((16, False, 1), (16, True, 3), (2048, False, 2)):
        made = job(source(corpus), batch=ov.Batch(samples=samples, context=64))
        with ov.launch(made, partition="off", autoscale=scaled, workers=3) as session:
            session.add_source(heavy)
            assert loaders_of(session, "late") == loaders


def test_without_partition_nothing_is_kept(corpus: Path) -> None:
    with (
        ov.launch(job(source(corpus)), partition="off", cache_dir=corpus / "c") as session,
        pytest.raises(ov.JobError, match="partition='auto'"),
    ):
        session.profile()
    assert not (corpus / "c" / "profiles").exists()


# the commands


def overlord(*args: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "140"}).invoke(cli, [str(a) for a in args])


@pytest.fixture
def job_yaml(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OVERLORD_CACHE", str(corpus / "cache"))
    made = job(source(corpus), source(corpus, "text", text(corpus)), journal=str(corpus / "j"))
    (corpus / "job.yaml").write_text(made.to_yaml())
    return corpus / "job.yaml"


def test_profile_prints_a_table_distributions_and_the_share_of_file_state(
    job_yaml: Path, tmp_path: Path
) -> None:
    result = overlord(
        "profile",
        job_yaml,
        "--rows",
        "100",
        "--seconds",
        "60",
        "--svg",
        tmp_path / "p.svg",
        "--html",
        tmp_path / "p.html",
        "--save",
    )
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert {line.split()[0] for line in result.stdout.splitlines()[1:3]} == {"web", "text"}
    assert "quantile over sources" in said
    assert "P, by token" in said
    assert "of the memory of 2 sources" in said
    assert "P: to read and transform a sample; T: to hand it to a constructor; M_b: " in said
    found = profile_store.load(tmp_path / "j" / "profile.json")
    assert {p.samples for p in found.sources.values()} == {100}
    assert (tmp_path / "p.svg").read_text().startswith("<svg xmlns=")
    assert "cost of its sources" in (tmp_path / "p.html").read_text()


def test_a_journal_in_which_only_a_profile_is_begins_without_a_word(
    job_yaml: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert overlord("profile", job_yaml, "--rows", "20", "--seconds", "60", "--save").exit_code == 0
    with (
        caplog.at_level(logging.WARNING, "overlord"),
        ov.launch(ov.Job.from_yaml(job_yaml)) as session,
    ):
        assert len(list(session.client(0))) == 6
    assert caplog.text == ""


def test_profile_tells_which_sources_cannot_be_measured(job_yaml: Path, corpus: Path) -> None:
    bad = yaml.safe_load(job_yaml.read_text())
    write_rows(corpus / "odd", "jsonl", [{"tokens": "no"}] * 3)
    bad["sources"].append(
        {
            "name": "odd",
            "uri": str(corpus / "odd" / "*.jsonl"),
            "transforms": [{"tokens": {"column": "tokens"}}],
        }
    )
    job_yaml.write_text(yaml.safe_dump(bad))
    result = overlord("profile", job_yaml, "--rows", "50", "--seconds", "60")
    assert result.exit_code == 1
    assert "1 of 3 sources could not be measured" in result.stderr
    assert "source 'odd': expected a sample, got none within 50 rows" in result.stderr


def test_partition_prints_the_configuration_with_reasons(job_yaml: Path) -> None:
    result = overlord("partition", job_yaml, "--cpus", "16", "--memory", "8GB", "--demand", "10")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "2 sources on 16 CPU cores: " in said
    assert "predicted: " in said
    assert " of the work" in said
    assert "a demand of 10 tokens/s is met" in said
    assert "1 of 2 sources measured, 1 estimated" in said or "0 of 2 sources measured" in said


def test_partition_levels_as_many_sources_together_as_is_said(corpus: Path) -> None:
    with blueprint(job(*(source(corpus, f"s{k}") for k in range(6)))) as ready:
        ready.profile = kept(ready, *[1e-3] * 6)
        sizes = [
            [len(c.sources) for c in partition_of(ready, cores=8, **said).clusters]
            for said in ({}, {"cluster": 2})
        ]
    assert sizes == [[4, 2], [2, 2, 2]]


def test_partition_says_by_how_much_a_demand_is_not_met(job_yaml: Path) -> None:
    result = overlord("partition", job_yaml, "--cpus", "2", "--demand", "1e15")
    assert result.exit_code == 1
    assert "of the demand is not met; it takes " in result.stderr
    memory = overlord("partition", job_yaml, "--cpus", "2", "--memory", "10MB")
    assert memory.exit_code == 1
    assert "memory: " in memory.stderr
    assert "more than available" in memory.stderr


@pytest.mark.parametrize(
    ("size", "nbytes"), [("256GB", 2**38), ("1.5 GiB", 3 * 2**29), ("512m", 2**29), ("77", 77)]
)
def test_sizes_are_written_as_people_do(size: str, nbytes: int) -> None:
    from overlord.cli.partition import Bytes

    assert Bytes().convert(size, None, None) == nbytes


def test_a_size_that_is_none_is_refused(job_yaml: Path) -> None:
    result = overlord("partition", job_yaml, "--memory", "much")
    assert result.exit_code == 2
    assert (
        "expected bytes, as in '64GB', '512MB' or a whole number above 0, got 'much'"
        in result.stderr
    )


def test_a_partition_is_explained_in_words(corpus: Path) -> None:
    with blueprint(job(source(corpus), source(corpus, "code")), hosts=8) as ready:
        ready.profile = kept(ready, 1e-3, 7e-3)
        made = partition_of(ready)
    assert (
        made.shares[1].reason
        == "88% of the work is worth 7.0 cores; 7 loaders, its share of the cores"
    )
    assert json.dumps([s.reason for s in made.shares])
