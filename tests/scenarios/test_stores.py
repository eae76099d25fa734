"""Jobs over a real S3 server on loopback: what a disk gives, a store gives, and no key is seen
anywhere.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import overlord as ov
from overlord.errors import SourceError
from overlord.sources.files import Files
from overlord.sources.index import build_index
from tests.corpus import SUFFIX, write_rows
from tests.processes import WORKER_RUNTIME
from tests.source_reads import read_all
from tests.store_jobs import FORMATS, ROWS, S3, delivered, job, stream
from tests.stores import BUCKET, Fault

pytest.importorskip("obstore")
pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("runtime", ["local", WORKER_RUNTIME, "simulated"])
def test_the_stream_from_a_store_is_the_stream_from_the_disk(proxy, corpus, runtime):
    assert stream(job(S3), runtime) == stream(job(str(corpus)))


@pytest.mark.parametrize("format", FORMATS)
def test_a_copy_in_a_store_has_the_same_fingerprint_and_the_same_rows(proxy, corpus, format):
    here, there = (
        read_all(f"{root}/{format}/*{SUFFIX[format]}", slice_rows=7) for root in (corpus, S3)
    )
    assert here.index.fingerprint == there.index.fingerprint
    assert (here.rows, here.ids) == (there.rows, there.ids)
    assert [f.path for f in there.index.files] == [
        f"{S3}/{format}/{Path(f.path).name}" for f in here.index.files
    ]


def test_a_state_saved_over_the_disk_goes_on_over_the_store(proxy, corpus):
    wanted = stream(job(str(corpus)))
    with ov.launch(job(str(corpus))) as session:
        client = session.client(0)
        next(client), next(client)
        state = client.state_dict()
    with ov.launch(job(S3), resume=state) as session:
        assert delivered(session.client(0)) == wanted[2:]


def test_a_store_is_listed_like_a_disk(proxy, server, tmp_path):
    stems = ("a", "b", ".hidden", "_meta", "sub/d", "sub/deep/e f", "_tmp/g", "x[1]", "ä%20=")
    for name in [f"{stem}.jsonl" for stem in stems]:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(f'{{"n": "{name}"}}\n')
    server.upload(tmp_path / "tree", "tree")
    # Folders that other tools mark by an object without bytes.
    fs = server.filesystem()
    fs.create_dir(f"{BUCKET}/tree/mark.jsonl")
    fs.create_dir(f"{BUCKET}/tree/sub")
    with fs.open_output_stream(f"{BUCKET}/tree/mark.jsonl/inside.jsonl") as out:
        out.write(b"{}\n")
    (tmp_path / "tree/mark.jsonl").mkdir()
    (tmp_path / "tree/mark.jsonl/inside.jsonl").write_text("{}\n")
    for pattern in (
        "*.jsonl",
        "**/*.jsonl",
        "[ab].jsonl",
        "*/d.jsonl",
        "",
        "sub",
        "a.jsonl",
        "x[1].jsonl",
        "sub/deep/e f.jsonl",
    ):
        here, there = (
            [
                (f.path[len(root) :], f.size)
                for f in Files.resolve(f"{root}/{pattern}".rstrip("/"), suffixes=(".jsonl",))[1]
            ]
            for root in (str(tmp_path / "tree"), f"s3://{BUCKET}/tree")
        )
        assert here == there, pattern
    assert read_all(f"s3://{BUCKET}/tree/ä*.jsonl").rows == [{"n": "ä%20=.jsonl"}]


def test_a_long_listing_comes_in_pages_and_is_complete(proxy, server):
    bucket, names = server.bucket(), [f"many/{k:05d}.jsonl" for k in range(1100)]

    def put(mine: list[str]) -> None:
        for name in mine:
            bucket.put(name, b"{}\n")

    threads = [threading.Thread(target=put, args=(names[k::4],)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = Files.resolve(f"s3://{BUCKET}/many/*.jsonl")[1]
    assert [f.path for f in files] == [f"s3://{BUCKET}/{name}" for name in names]
    assert len([s for s in proxy.seen if "list-type" in s.path]) == 2


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("s3://no-such-bucket/x/*.parquet", r"NoSuchBucket.*check the name of the bucket"),
        (
            f"{S3}/parquet/*.csv",
            r"got no match; .*/parquet holds 2 files, for example part-00000.parquet",
        ),
        (
            f"{S3}/parquet/part-0000.parquet",
            r"no such file or directory; did you mean part-0000[01].parquet\?",
        ),
        (f"{S3}/nowhere", r"no such file or directory"),
    ],
)
def test_what_is_not_there_is_named_at_launch_with_what_is(proxy, corpus, uri, says):
    with pytest.raises(SourceError, match=says) as caught:
        build_index("web", uri)
    assert caught.value.path == uri


def test_keys_that_are_wrong_are_told_at_once(proxy, corpus, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-right-one-at-all")
    with pytest.raises(
        SourceError,
        match=r"could not be listed: 403 Forbidden, SignatureDoesNotMatch; check the keys",
    ):
        build_index("web", f"{S3}/parquet/*.parquet")
    assert len(proxy.seen) == 1


def test_plain_http_needs_to_be_allowed(proxy, corpus, monkeypatch):
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(SourceError, match="set AWS_ALLOW_HTTP=true"):
        build_index("web", f"{S3}/parquet/*.parquet")
    assert proxy.seen == []


def test_the_endpoint_for_s3_alone_is_taken_before_the_one_for_all(proxy, corpus, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert build_index("web", f"{S3}/parquet/*.parquet").rows == len(ROWS)


def test_a_second_index_reads_no_footer_and_a_replaced_object_is_read_again(
    proxy, server, tmp_path
):
    write_rows(tmp_path / "data", "parquet", ROWS)
    server.upload(tmp_path / "data", "cached")
    uri, cache = f"s3://{BUCKET}/cached/*.parquet", tmp_path / "cache"
    first = build_index("web", uri, cache_dir=cache)
    assert [s.method for s in proxy.seen if "part-" in s.path] == [
        "GET",
        "GET",
    ]  # a footer each, and nothing asked twice
    proxy.reset()
    assert build_index("web", uri, cache_dir=cache).files == first.files
    assert [s for s in proxy.seen if "part-" in s.path] == []
    same_size = (tmp_path / "data/part-00001.parquet").read_bytes()
    server.bucket().put(
        "cached/part-00001.parquet", same_size[:100] + bytes([same_size[100] ^ 1]) + same_size[101:]
    )
    build_index("web", uri, cache_dir=cache)
    assert [s.path for s in proxy.seen if "part-" in s.path] == [
        f"/{BUCKET}/cached/part-00001.parquet"
    ]


@pytest.mark.parametrize(
    ("format", "most"), [("parquet", 2 + 2 * 4), ("jsonl.zst", 2), ("tar", 2), ("arrow", 2 * 3 + 1)]
)  # footers and row groups; a file; the first batch for the index, then a file
def test_few_requests_are_made(proxy, corpus, format, most):
    read_all(f"{S3}/{format}/*{SUFFIX[format]}", slice_rows=7)
    assert len([s for s in proxy.seen if "part-" in s.path]) <= most
    assert {s.method for s in proxy.seen} == {"GET"}


@pytest.mark.parametrize("runtime", ["here", "command line"])
def test_keys_are_in_nothing_that_a_job_says_or_writes(
    proxy, server, corpus, tmp_path, caplog, capfd, monkeypatch, impatient, runtime
):
    """A store that quotes signatures and keys in its errors; whatever the failing job leaves behind
    is searched for them.
    """
    made = job(S3, ("parquet", "jsonl.zst"), name="secretive")
    proxy.faults = [
        Fault(503, times=2, path="list-type", tells=True),
        Fault(403, times=10**6, path="part-00001.jsonl", after=0, code="AccessDenied", tells=True),
    ]
    caplog.set_level(logging.DEBUG)
    said = []
    if runtime == "here":
        try:
            with ov.launch(made, cache_dir=tmp_path / "cache", prefetch=1) as session:
                client = session.client(0)
                said += [repr(session), repr(client)]
                for _ in client:
                    said += [repr(client.state_dict()), repr(session.metrics())]
        except SourceError as error:
            said += [
                "".join(traceback.format_exception(error)),
                repr(error),
                pickle.dumps(error).decode("latin1"),
            ]
            said += [repr(e) for e in chain_of(error)]
        index = build_index("web", f"{S3}/parquet/*.parquet")
        said += [repr(index), pickle.dumps(index).decode("latin1"), repr(made), caplog.text]
    else:
        made = replace(
            made, sources=[replace(s, transforms=[ov.Tokens("tokens")]) for s in made.sources]
        )
        (tmp_path / "job.yaml").write_text(made.to_yaml())
        monkeypatch.setenv(
            "OVERLORD_STORE_DEADLINE_S", "3"
        )  # which it waits for, and which ends what goes well, too
        env = {
            **os.environ,
            "OVERLORD_CACHE": str(tmp_path / "cache"),
            "RUST_LOG": "debug",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-m", "overlord.cli.main", "run", str(tmp_path / "job.yaml")]
        done = subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode != 0
        said += [done.stdout, done.stderr]
    said += [
        *capfd.readouterr(),
        *(p.read_bytes().decode("latin1") for p in tmp_path.rglob("*") if p.is_file()),
    ]
    everything = "\n".join(said)
    assert "403 Forbidden, AccessDenied" in everything  # the fault was met, and is told
    assert "part-00001.jsonl.zst" in everything
    for secret in (server.keys.secret, server.keys.access, "0123456789abcdef", "AWS4-HMAC"):
        assert secret not in everything


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
