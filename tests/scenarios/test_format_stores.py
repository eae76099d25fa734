"""Datasets of other libraries in a store: the stream, the fingerprint and the errors of a disk."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import overlord as ov
from overlord.cli.main import cli
from overlord.errors import SourceError
from overlord.sources.index import build_index
from tests.corpus import INDEXED_FORMATS, SUFFIX, TOKEN_FORMATS, write_rows
from tests.processes import WORKER_RUNTIME
from tests.source_reads import read_all
from tests.store_jobs import ROWS, delivered
from tests.stores import BUCKET, Fault

pytest.importorskip("obstore")
pytestmark = pytest.mark.timeout(200)
FORMATS = (*TOKEN_FORMATS, *INDEXED_FORMATS)
PREFIX = f"s3://{BUCKET}/formats"


@pytest.fixture(scope="module")
def datasets(server, tmp_path_factory):
    """The same rows in every format, on the disk and below PREFIX."""
    root = tmp_path_factory.mktemp("formats")
    for format in FORMATS:
        write_rows(root / format, format, ROWS)
    server.upload(root, "formats")
    return root


def source(where: str, format: str, **fields: object) -> ov.Source:
    name = format.replace(".", "-")
    path = f"{where}/{format}/*{SUFFIX[format]}"
    return ov.Source(name, path, transforms=[ov.Tokens("tokens")], **{"epochs": 1, **fields})


def job(where: str) -> ov.Job:
    return ov.Job(
        name="formats",
        sources=[source(where, format) for format in FORMATS],
        batch=ov.Batch(samples=16, context=64, microbatches=2),
        seed=5,
        slice_rows=8,
        shuffle_chunks=2,
        chunk_bytes=300,
    )


def stream(made: ov.Job, runtime: str, steps: int | None = None, **options: object) -> list:
    if runtime == "simulated":
        done = ov.simulate(made, seed=1)
        assert done.error is None
        return delivered(done.steps[0])
    with ov.launch(made, runtime=runtime, stall_limit_s=60, **options) as session:
        return delivered(session.client(0))


@pytest.mark.parametrize("runtime", ["local", WORKER_RUNTIME, "simulated"])
def test_the_stream_from_a_store_is_the_stream_from_the_disk(proxy, datasets, runtime):
    wanted = stream(job(str(datasets)), "local")
    assert wanted
    assert stream(job(PREFIX), runtime) == wanted
    assert stream(job(str(datasets)), runtime) == wanted


def test_a_state_of_every_step_goes_on_over_the_store(proxy, datasets):
    wanted, states = [], []
    with ov.launch(job(str(datasets))) as session:
        client = session.client(0)
        for step in client:
            wanted += delivered([step])
            states.append(client.state_dict())
    for done, state in enumerate(states, 1):
        assert stream(job(PREFIX), "local", resume=state) == wanted[done:]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("named", ["glob", "folder"])
def test_a_copy_in_a_store_has_the_same_fingerprint_and_rows(proxy, datasets, format, named):
    end = f"/*{SUFFIX[format]}" if named == "glob" else ""
    here, there = (
        read_all(f"{root}/{format}{end}", slice_rows=7, chunk_bytes=500)
        for root in (datasets, PREFIX)
    )
    assert here.index.fingerprint == there.index.fingerprint
    assert (here.rows, here.ids) == (there.rows, there.ids)


@pytest.mark.parametrize("fault", [503, "short", "reset", "less"])
def test_faults_of_the_store_pass(proxy, datasets, fault):
    wanted = stream(job(str(datasets)), "local")
    proxy.faults = [Fault(fault, times=2, path=f"part-00001{SUFFIX[f]}") for f in FORMATS]
    proxy.faults += [Fault(fault, times=2, path="part-00000.idx")]
    assert stream(job(PREFIX), "local") == wanted
    assert all(not f.times for f in proxy.faults)


def test_an_index_replaced_in_mid_run_is_an_error_that_names_it(
    proxy, server, datasets, tmp_path, impatient
):
    write_rows(tmp_path / "data", "megatron", ROWS)
    server.upload(tmp_path / "data", "replaced")
    uri = f"s3://{BUCKET}/replaced/*.bin"
    made = ov.Job(
        name="x",
        sources=[ov.Source("web", uri, epochs=1)],
        batch=ov.Batch(samples=4, context=64),
        slice_rows=4,
        chunk_bytes=64,
    )
    with ov.launch(made, prefetch=1) as session:
        client = session.client(0)
        next(client)
        for name in ("part-00000.idx", "part-00001.idx"):
            old = (tmp_path / "data" / name).read_bytes()
            server.bucket().put(f"replaced/{name}", old[:-1] + b"\1")
        with pytest.raises(SourceError, match="the object changed since it was indexed"):
            for _ in client:
                pass


def test_a_missing_half_is_named(proxy, server, datasets):
    server.bucket().put("half/a.bin", b"\0\0")
    with pytest.raises(SourceError, match=rf"got no s3://{BUCKET}/half/a.idx"):
        build_index("web", f"s3://{BUCKET}/half")


def test_few_requests_are_made(proxy, datasets):
    read_all(f"{PREFIX}/megatron/*.bin", slice_rows=7)
    seen = [s for s in proxy.seen if "part-" in s.path]
    # For each dataset: header, lengths, offsets and boundaries of the index at launch, then the
    # boundaries, offsets and ids of the only chunk.
    assert len(seen) <= 2 * 8


def test_plans_and_inspection_request_no_byte_of_the_data(proxy, datasets, tmp_path, monkeypatch):
    monkeypatch.setenv("OVERLORD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "job.yaml").write_text(
        f"name: x\nbatch: {{samples: 8, context: 64}}\nsources:\n  web: {{uri: "
        f"'{PREFIX}/megatron/*.bin', transforms: [tokens]}}\n"
    )
    for words in (["inspect", str(tmp_path / "job.yaml")], ["inspect", f"{PREFIX}/megatron"]):
        assert CliRunner().invoke(cli, words).exit_code == 0
    words = ["plan", str(tmp_path / "job.yaml"), "--step", "2"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    paths = {s.path.partition("?")[0].rpartition(".")[2] for s in proxy.seen if s.method == "GET"}
    assert "idx" in paths
    assert "bin" not in paths
