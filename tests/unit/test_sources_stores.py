"""Stores without a server: what a URI may hold, what texts may say, how few requests many reads
make, which faults pass.
"""

from __future__ import annotations

import io
import pickle
import sys

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.cli.main import cli
from overlord.errors import JobError, JournalError, SourceError
from overlord.journal.storage import storage_of
from overlord.sources import range_file
from overlord.sources.base import StorageUnreachable
from overlord.sources.files import Files
from overlord.sources.object_store import RemoteStore
from overlord.sources.range_file import RangeFile
from overlord.sources.retry import Failure, classify_store_error, store_give_up_error
from overlord.uris import scrub, uri_problems
from tests.internals import cached_runs, forget_store_clients, store_client, store_key

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
TOKEN = "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ0123456"

WITH_SECRETS = [
    f"s3://AKIAXYZ:{SECRET}@bucket/x.parquet",
    "s3://AKIAXYZ@bucket/x.parquet",
    "s3://AKIAXYZ:plain@bucket/x.parquet",
    f"s3://bucket/x.parquet?secret_key={SECRET}",
    f"s3://bucket/*.parquet?region=eu-west-1&X-Amz-Signature={SECRET}",
    f"s3://bucket/*.parquet?access_key={SECRET}&region=eu-west-1",
    f"az://container/x.parquet?sig={SECRET}",
    f"hdfs://user:{SECRET}@namenode:8020/x.parquet",
    f"https://user:{SECRET}@host/x.parquet",
    f"ftp://host/x.parquet?token={SECRET}",
    f"S3://{TOKEN}@bucket/x.parquet",
    f"S3://bucket/x.parquet?hidden={SECRET}",
    f"https://{TOKEN}@host/x.parquet",
    f"s3://bucket/x.parquet?region=eu;secret_key={SECRET}",
    f"s3://bucket/x.parquet?hidden={SECRET}",
    f"s3:AKIAXYZ:{SECRET}@bucket/x.parquet",
    f"s3:/AKIAXYZ:{SECRET}@bucket/x.parquet",
    f" s3://AKIAXYZ:{SECRET}@bucket/x.parquet",
]


@pytest.mark.parametrize("uri", WITH_SECRETS)
@pytest.mark.parametrize("listed", [False, True])
def test_a_uri_with_a_secret_is_refused_at_construction_and_the_secret_is_not_repeated(uri, listed):
    with pytest.raises(JobError, match="from the environment") as caught:
        ov.Source("web", [uri, "s3://bucket/other.parquet"] if listed else uri)
    assert not any(kept in (str(caught.value) + repr(caught.value)) for kept in (SECRET, TOKEN))
    with pytest.raises(SourceError, match="from the environment") as refused:
        Files.resolve(uri, source="web")
    assert not any(kept in (str(refused.value) + repr(refused.value)) for kept in (SECRET, TOKEN))


@pytest.mark.parametrize("uri", WITH_SECRETS)
def test_a_job_file_with_a_secret_is_refused_and_the_secret_is_not_repeated(tmp_path, uri):
    (tmp_path / "job.yaml").write_text(
        f"name: x\nbatch: {{samples: 4, context: 8}}\nsources:\n  web: {{uri: '{uri}'}}\n"
    )
    with pytest.raises(JobError, match="from the environment") as caught:
        ov.Job.from_yaml(tmp_path / "job.yaml")
    assert not any(kept in (str(caught.value) + repr(caught.value)) for kept in (SECRET, TOKEN))


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/web/*.parquet",
        "s3://bucket/web/*.parquet?region=eu-west-1&anonymous=true",
        "gs://bucket/x.jsonl.zst",
        "abfss://container@account.dfs.core.windows.net/x.tar",
        "hdfs://user@namenode:8020/x?replication=1",
        "file:///x/y.parquet",
        "corpus/what?.parquet",
        "/a/b@c:d/x.jsonl",
        "s3://bucket/a@b:c/x.parquet",
        "S3://bucket/x.parquet?region=us_gov-1&anonymous=TRUE",
        "s3/x.parquet",
        "https/x",
        "x s3://y",
    ],
)
def test_a_uri_without_secrets_is_none_of_our_business(uri):
    assert uri_problems(uri) == []


@pytest.mark.parametrize("uri", WITH_SECRETS)
def test_a_journal_with_a_secret_is_refused_and_the_secret_is_not_repeated(
    tmp_path, monkeypatch, uri
):
    monkeypatch.chdir(tmp_path)  # where a journal of that name would be made
    with pytest.raises(JobError, match="from the environment") as caught:
        ov.Job(
            name="x",
            sources=[ov.Source("web", "x.jsonl")],
            batch=ov.Batch(samples=4, context=8),
            journal=uri,
        )
    with pytest.raises(JournalError, match="from the environment") as refused:
        storage_of(uri)
    assert not any(
        kept in (repr(caught.value) + str(caught.value) + str(refused.value) + repr(refused.value))
        for kept in (SECRET, TOKEN)
    )
    (tmp_path / "job.yaml").write_text(
        f"name: x\nbatch: {{samples: 4, context: 8}}\nsources:\n  web: {{uri: "
        f"x.jsonl}}\njournal: '{uri}'\n"
    )
    with pytest.raises(JobError, match="from the environment") as read:
        ov.Job.from_yaml(tmp_path / "job.yaml")
    assert not any(kept in (str(read.value) + repr(read.value)) for kept in (SECRET, TOKEN))
    assert [p.name for p in tmp_path.iterdir()] == ["job.yaml"]


@pytest.mark.parametrize(
    "words",
    [
        ["run", "URI"],
        ["run", "job.yaml", "--resume", "URI"],
        ["run", "job.yaml", "--save", "URI"],
        ["serve", "job.yaml", "--save", "URI"],
    ],
)
def test_the_command_line_does_not_repeat_a_uri_where_it_wants_a_file(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"tokens": [1, 2, 3]}\n' * 20)
    (tmp_path / "job.yaml").write_text(
        "name: x\nbatch: {samples: 4, context: 8}\nuntil: 1\nsources:\n  web: {uri: "
        "x.jsonl, transforms: [tokens]}\n"
    )
    given = [f"s3://AKIAXYZ:{SECRET}@bucket/job.yaml" if word == "URI" else word for word in words]
    said = CliRunner().invoke(cli, given)
    assert said.exit_code == 2
    assert "expected a file on this machine" in said.output
    assert SECRET not in said.output


def test_inspect_does_not_repeat_a_uri_that_carries_a_secret():
    said = CliRunner().invoke(cli, ["inspect", f"s3://AKIAXYZ:{SECRET}@bucket/job.yaml"])
    assert said.exit_code == 2
    assert "expected a URI without credentials" in said.output
    assert SECRET not in said.output


@pytest.mark.parametrize(
    "given", ["127.0.0.1:9000", "minio", "http://", "http://127.0.0.1:9000/ ", f"{TOKEN}@host:9000"]
)
@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_that_is_no_address_is_told_and_not_repeated(monkeypatch, name, given):
    monkeypatch.setenv(name, given)
    with pytest.raises(SourceError, match=f"{name}: expected http://host:port") as caught:
        Files.resolve("s3://bucket/x.parquet", source="web")
    with pytest.raises(JournalError, match=f"{name}: expected http://host:port") as refused:
        storage_of("s3://bucket/journal").names()
    assert TOKEN not in str(caught.value) + str(refused.value)


def test_a_scheme_that_is_not_known_is_named_without_what_stands_behind_it():
    uri = f"https://host/x.parquet?code={SECRET}"
    with pytest.raises(SourceError, match="expected a known URI scheme, got 'https'") as caught:
        Files.resolve(uri, source="web")
    with pytest.raises(JournalError, match="got https://") as refused:
        storage_of(uri)
    assert not any(
        kept in (str(caught.value) + repr(caught.value) + str(refused.value) + repr(refused.value))
        for kept in (SECRET, TOKEN)
    )


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(
        JobError,
        match=r"expected only the options region, anonymous in .*, got 'endpoint_override'; "
        r".*AWS_ENDPOINT_URL",
    ):
        ov.Source("web", "s3://bucket/x.parquet?endpoint_override=127.0.0.1:9000")


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: AWS4-HMAC-SHA256 "
        f"Credential=AKIAXYZ/20260101/us-east-1/s3/aws4_request, Signature={SECRET}",
        f"GET http://host/x?X-Amz-Credential=AKIA&X-Amz-Signature={SECRET}&X-Amz-Date=1",
        f"http://host/x?X-Amz-Security-Token={SECRET}",
        f"https://account.blob.core.windows.net/c/x?sv=1&sig={SECRET}",
        f"<StringToSign>{SECRET}</StringToSign>",
        f'{{"client_secret": "{SECRET}"}}',
        f"authorization: Bearer {SECRET}",
        f"s3://AKIA:{SECRET}@bucket/x",
        f"Error performing GET http://{SECRET.replace('/', '')}@127.0.0.1:9/b?list-type=2",
        f"password={SECRET}; next",
    ],
)
def test_texts_lose_what_looks_like_a_secret_and_keep_the_rest(text):
    found = scrub(f"before {text} and\nafter")
    assert SECRET not in found
    assert SECRET.replace("/", "") not in found
    assert found.startswith("before")
    assert found.endswith("after")


@pytest.mark.parametrize(
    "name",
    [
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_KEY",
    ],
)
def test_texts_lose_what_the_environment_keeps_secret_wherever_it_stands(monkeypatch, name):
    monkeypatch.setenv(name, SECRET)
    assert scrub(f"it ends with({SECRET})here") == "it ends with(***)here"


def test_texts_without_secrets_stay_as_they_are():
    text = (
        "Error performing GET http://127.0.0.1:1/bucket/web/part-00001.parquet in 46 ms - "
        "503 Service Unavailable: tokens: 12 are enough"
    )
    assert "part-00001.parquet in 46 ms - 503 Service Unavailable" in scrub(text)


@given(
    st.binary(min_size=1, max_size=400),
    st.lists(st.tuples(st.integers(0, 420), st.integers(-1, 200)), max_size=30),
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 100)), max_size=5),
)
def test_a_remote_file_reads_like_the_bytes_themselves(data, reads, ranges):
    """Whatever is read, in whatever order, whatever was said about it before; and nothing past the
    end is asked for.
    """
    small = {"FIRST": 16, "READ_AHEAD": 64, "TAIL": 8, "GAP": 4, "RUNS": 2}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in small.items():
            patch.setattr(range_file, name, value)
        asked = []

        def fetch(a, b):
            assert 0 <= a < b <= len(data)
            asked.append((a, b))
            return memoryview(data)[a:b]

        told = range_file.merged([(a, min(a + n, len(data))) for a, n in ranges if a < len(data)])
        ours, theirs = RangeFile(fetch, len(data), told), io.BytesIO(data)
        for at, n in reads:
            assert ours.seek(at) == theirs.seek(at)
            assert bytes(ours.read(n)) == theirs.read(n)
            assert ours.tell() == min(max(at, theirs.tell()), max(at, len(data)))
    assert cached_runs(ours) <= (max(2, len(told)) + 1) * (64 + 200) + len(data)


@pytest.mark.parametrize(("step", "most"), [(2**16, 12), (2**18, 12), (10_000, 12)])
def test_ten_megabytes_in_short_reads_are_a_dozen_requests(step, most):
    size, asked = 10 * 2**20, []
    file = RangeFile(lambda a, b: (asked.append((a, b)), memoryview(bytes(b - a)))[1], size)
    while len(file.read(step)):
        pass
    assert len(asked) <= most
    assert sum(b - a for a, b in asked) == size  # none twice


def test_columns_in_turn_do_not_drive_each_other_out():
    size, asked = 40 * 2**20, []
    starts = [k * 2**20 for k in range(0, 40, 2)]
    file = RangeFile(
        lambda a, b: (asked.append((a, b)), memoryview(bytes(b - a)))[1],
        size,
        [(a, a + 2**20) for a in starts],
    )
    for at in range(0, 2**20, 2**16):
        for start in starts:
            file.seek(start + at)
            file.read(2**16)
    assert sorted(asked) == [(a, a + 2**20) for a in starts]


def test_a_bucket_pickles_without_client_or_credentials(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    remote, path = RemoteStore.of("S3://bucket/a/*.parquet?region=eu-west-1&anonymous=1")
    assert (remote.root, remote.region, remote.anonymous, path) == (
        "s3://bucket",
        "eu-west-1",
        True,
        "s3://bucket/a/*.parquet",
    )
    data = pickle.dumps(remote)
    assert pickle.loads(data) == remote
    assert SECRET.encode() not in data
    assert SECRET not in repr(remote)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    forget_store_clients()
    with pytest.raises(
        SourceError, match=r"expected the package obstore .*; pip install 'overlord-data\[store\]'"
    ):
        Files.resolve("s3://bucket/*.parquet", source="web")


def test_a_profile_without_the_package_that_reads_profiles_says_so(monkeypatch):
    pytest.importorskip("obstore")
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", None)
    monkeypatch.setenv("AWS_PROFILE", "team")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    with pytest.raises(SourceError, match=r"AWS_PROFILE: expected the package boto3"):
        Files.resolve("s3://bucket/*.parquet", source="web")


@pytest.mark.parametrize(
    "uri",
    [
        "gs://bucket/a/x.parquet",
        "abfss://container@account.dfs.core.windows.net/a/x.parquet",
        "s3a://bucket/a/x.parquet",
    ],
)
def test_clients_of_every_store_are_made_the_same_way(uri):
    pytest.importorskip("obstore")
    remote, path = RemoteStore.of(uri)
    assert path == uri
    assert store_key(remote, path) == "a/x.parquet"
    assert store_client(remote) is store_client(remote)


def test_a_store_that_lacks_a_setting_says_which(monkeypatch):
    pytest.importorskip("obstore")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(SourceError, match=r"could not be opened: .*Account must be specified"):
        Files.resolve("az://container/*.parquet", source="web")


@pytest.mark.parametrize("given", ["soon", "0", "-3", "inf", "nan"])
def test_a_deadline_that_is_no_number_of_seconds_is_an_error(monkeypatch, given):
    pytest.importorskip("obstore")
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", given)
    with pytest.raises(
        SourceError, match="OVERLORD_STORE_DEADLINE_S: expected a finite number of seconds"
    ):
        Files.resolve("s3://bucket/*.parquet", source="web")


LIBRARY = (
    "Generic S3 error: Error performing GET http://h/b/k in 4ms - Server returned non-2xx "
    "status code: {} Some Words: <Code>{}</Code>"
)


@pytest.mark.parametrize(
    ("text", "kind", "passes"),
    [
        (LIBRARY.format(503, "SlowDown"), "503", True),
        (LIBRARY.format(500, "InternalError"), "500", True),
        (LIBRARY.format(429, "TooMany"), "429", True),
        (LIBRARY.format(400, "RequestTimeout"), "400", True),
        (LIBRARY.format(400, "InvalidArgument"), "400", False),
        (LIBRARY.format(400, "ExpiredToken"), "denied", False),
        (LIBRARY.format(403, "AccessDenied"), "denied", False),
        (LIBRARY.format(404, "NoSuchKey"), "gone", False),
        (LIBRARY.format(412, "PreconditionFailed"), "changed", False),
        (LIBRARY.format(416, "InvalidRange"), "changed", False),
        (LIBRARY.format(301, "PermanentRedirect"), "setup", False),
        (
            "HTTP error: builder error\n\nDebug source:\n kind: Builder, source: BadScheme",
            "setup",
            False,
        ),
        (
            "HTTP error: request or response body error\n\nDebug source:\n kind: Timeout",
            "timeout",
            True,
        ),
        (
            "HTTP error: request or response body error\n\nDebug source:\n kind: "
            "Interrupted, error: IncompleteBody",
            "short body",
            True,
        ),
        ("HTTP error: error sending request\n\nDebug source:\n kind: Connect", "connection", True),
    ],
)
def test_faults_are_told_apart_by_what_the_library_says(text, kind, passes):
    found = classify_store_error(Exception(text))
    assert (found.kind, found.tries > 3) == (kind, passes)
    assert "Debug source" not in found.text


def test_a_fault_that_is_not_known_is_told_without_its_secrets(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    found = classify_store_error(
        Exception(
            f"odd: signed with {SECRET}, X-Amz-Signature=0123456789\n\nDebug source: {SECRET}"
        )
    )
    assert (found.kind, found.text, found.tries) == (
        "Exception",
        "odd: signed with ***, X-Amz-Signature=***",
        3,
    )


def test_giving_up_says_what_was_tried_how_often_how_long_and_what_to_do():
    seen = [
        Failure("503", "503 Slow Down"),
        Failure("timeout", "no byte came"),
        Failure("503", "503 Slow Down"),
    ]
    text = str(store_give_up_error("s3://b/x", "read (bytes 0 to 9)", seen, 12.34))
    assert (
        text == "could not be read (bytes 0 to 9) after 3 attempts in 12.3 s: 503 Slow Down (seen: "
        "503 x2, timeout x1)"
    )
    assert isinstance(store_give_up_error("s3://b/x", "read", seen, 1.0), StorageUnreachable)


def test_an_unreachable_file_survives_pickling():
    error = pickle.loads(pickle.dumps(StorageUnreachable("gone", "put it back", "gone")))
    assert (str(error), error.remedy, error.kind) == ("gone", "put it back", "gone")
