"""MDS datasets: files of both Streaming packages, selection of shards, and errors of broken ones."""

from __future__ import annotations

import json
import shutil
import struct
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import overlord as ov
from overlord.cli.main import cli
from overlord.errors import SourceError
from overlord.sources.index import build_index
from tests.corpus import write_rows
from tests.data.write_formats import COMPRESSIONS, ENCODINGS, TEXTS, mds_sample, write_mds
from tests.source_reads import read_all

DATA = Path(__file__).resolve().parents[1] / "data" / "mds"
WRITERS = ("mosaicml", "community")
PACKED = [name.replace(":", "-") for name in COMPRESSIONS]
ROWS = [{"n": k, "text": f"row {k}", "tokens": list(range(k % 9))} for k in range(30)]


def as_read(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "tokens": sample["tokens"].tolist()}


def image(png: bytes) -> tuple[str, tuple[int, int], bytes]:
    pillow = pytest.importorskip("PIL.Image")
    opened = pillow.open(BytesIO(png))
    return opened.mode, opened.size, opened.tobytes()


def check_encodings(folder: Path) -> None:
    everything = read_all(str(folder), slice_rows=5)
    assert everything.reasons == []
    assert len(everything.rows) == 12
    assert len(everything.index.files) > 3
    for k, row in enumerate(everything.rows):
        wanted = mds_sample(k)[1]
        row["pil"] = image(row["pil"])
        row["list_pil"] = [image(png) for png in row["list_pil"]]
        assert set(row) == set(ENCODINGS)
        for name, value in wanted.items():
            assert row[name] == value, (k, name)


@pytest.mark.parametrize("writer", WRITERS)
def test_every_encoding_of_both_writers_has_the_values_written(writer):
    check_encodings(DATA / writer / "encodings")


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", [*PACKED, "plain", "one"])
def test_every_compression_of_both_writers_has_the_samples_in_order(writer, name):
    everything = read_all(str(DATA / writer / name), slice_rows=3)
    wanted = [as_read(sample) for sample in (TEXTS[:1] if name == "one" else TEXTS)]
    assert everything.rows == wanted
    assert everything.reasons == []


@pytest.mark.parametrize("writer", WRITERS)
def test_a_merged_index_gives_the_order(writer):
    everything = read_all(str(DATA / writer / "merged"))
    assert everything.rows == [as_read(sample) for sample in TEXTS]
    assert "/part1/" in everything.index.files[0].path


def test_files_that_the_installed_writer_makes_now_have_its_values(tmp_path):
    pytest.importorskip("streaming")
    write_mds(tmp_path)
    check_encodings(tmp_path / "encodings")
    for name in (*PACKED, "plain", "merged"):
        assert read_all(str(tmp_path / name)).rows == [as_read(sample) for sample in TEXTS]


@pytest.mark.parametrize("named", ["", "index.json", "*.mds", "list"])
def test_the_folder_its_index_or_a_glob_names_the_dataset(tmp_path, named):
    write_rows(tmp_path, "mds", ROWS, files=3)
    path: Any = str(tmp_path / named)
    if named == "list":
        path = [str(tmp_path / f"part-0000{k}.mds") for k in (2, 0, 1)]
    everything = read_all(path)
    assert everything.rows == ROWS
    assert everything.index.format == "mds"


def test_a_glob_selects_some_shards_and_unlisted_ones_are_ignored(tmp_path):
    write_rows(tmp_path, "mds", ROWS, files=3)
    (tmp_path / "part-00009.mds").write_bytes(b"left by a writer that was stopped")
    assert read_all(str(tmp_path / "*1.mds")).rows == ROWS[10:20]
    assert read_all(str(tmp_path)).rows == ROWS


def test_a_missing_shard_is_named_and_a_plain_copy_replaces_a_compressed_one(tmp_path):
    write_rows(tmp_path / "packed", "mds.zstd", ROWS, files=3)
    write_rows(tmp_path / "plain", "mds", ROWS, files=3)
    (tmp_path / "packed/part-00001.mds.zstd").unlink()
    for path in ("packed", "packed/index.json", "packed/*0.mds.zstd"):
        with pytest.raises(SourceError, match=r"got no .*part-00001.mds.zstd"):
            build_index("web", str(tmp_path / path))
    shutil.copy(tmp_path / "plain/part-00001.mds", tmp_path / "packed")
    assert read_all(str(tmp_path / "packed")).rows == ROWS


def test_an_index_above_the_shards_is_found(tmp_path):
    shutil.copytree(DATA / "community" / "merged", tmp_path / "data")
    for path in tmp_path.glob("data/*/index.json"):
        path.unlink()
    rows = read_all(str(tmp_path / "data/part0/*.mds")).rows
    assert rows == [as_read(sample) for sample in TEXTS[5:]]


def test_an_index_json_among_lines_of_json_is_read_as_lines(tmp_path):
    (tmp_path / "index.json").write_text('{"a": 1}\n')
    (tmp_path / "b.json").write_text('{"a": 2}\n')
    assert read_all(str(tmp_path / "*.json")).rows == [{"a": 2}, {"a": 1}]
    with pytest.raises(SourceError, match=r"index.json: expected the index of an MDS dataset"):
        read_all(str(tmp_path / "index.json"))
    assert read_all(str(tmp_path / "index.json"), "jsonl").rows == [{"a": 1}]


def test_only_the_columns_of_the_job_are_read_and_pickles_never(tmp_path):
    write_rows(tmp_path, "mds", ROWS)
    index = json.loads((tmp_path / "index.json").read_text())
    for shard in index["shards"]:
        shard["column_encodings"][1] = "pkl"
    (tmp_path / "index.json").write_text(json.dumps(index))
    rows = read_all(str(tmp_path), columns=("n", "tokens")).rows
    assert rows == [{"n": row["n"], "tokens": row["tokens"]} for row in ROWS]
    with pytest.raises(SourceError, match=r"column 'text': .* a pickle, which could run code"):
        read_all(str(tmp_path))
    with pytest.raises(SourceError, match=r"expected the column 'ids', got n, text, tokens"):
        read_all(str(tmp_path), columns=("ids",))


CHANGES = [
    (lambda s: s.update(format="json"), r"expected the format mds, got 'json'"),
    (lambda s: s.update(version=1), r"expected version 2, got 1"),
    (lambda s: s.update(samples=2**40), r"expected at most 4294967295 bytes with an offset"),
    (lambda s: s.update(samples=-1), r"expected at most 4294967295 bytes"),
    (lambda s: s["raw_data"].update(bytes=2**40), r"expected at most 4294967295 bytes"),
    (lambda s: s["raw_data"].update(bytes=900), r"expected 900 bytes as in index.json, got \d+"),
    (lambda s: s["raw_data"].update(basename="../x.mds"), r"expected the name of a file below"),
    (lambda s: s["raw_data"].update(basename="/etc/passwd"), r"expected the name of a file below"),
    (lambda s: s["raw_data"].update(basename="part-00001.mds"), r"every file once, got .*00001"),
    (lambda s: s["column_sizes"].pop(), r"an encoding and a size for each column"),
    (lambda s: s["column_names"].__setitem__(0, "text"), r"every name once"),
    (lambda s: s["column_sizes"].__setitem__(0, 0), r"column 'n': expected 8 bytes for 'int'"),
    (lambda s: s["column_sizes"].__setitem__(1, 4), r"column 'text': expected no fixed number"),
    (
        lambda s: s["column_encodings"].__setitem__(1, "bf16"),
        r"column 'text': expected a known encoding, got the encoding 'bf16'",
    ),
    (lambda s: s.pop("raw_data"), r"expected a shard of an MDS dataset, got: .*raw_data"),
]


@pytest.mark.parametrize(("change", "says"), CHANGES)
def test_a_wrong_entry_of_the_index_is_named_at_launch(tmp_path, change, says):
    write_rows(tmp_path, "mds", ROWS)
    index = json.loads((tmp_path / "index.json").read_text())
    change(index["shards"][0])
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match=says):
        read_all(str(tmp_path / "index.json"))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 3, "shards": []}', "[" * 5000])
def test_an_index_that_is_none_is_named(tmp_path, text):
    write_rows(tmp_path, "mds", ROWS)
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(SourceError, match=r"index.json: expected"):
        read_all(str(tmp_path))


def test_shards_without_an_index_or_an_index_without_shards_are_named(tmp_path):
    write_rows(tmp_path, "mds", ROWS)
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(SourceError, match=r"expected shards that index.json lists, got none"):
        read_all(str(tmp_path / "index.json"))
    (tmp_path / "index.json").unlink()
    with pytest.raises(SourceError, match=r"expected index.json next to the shards .* got no"):
        read_all(str(tmp_path))


def test_a_shard_with_broken_offsets_is_quarantined_sample_by_sample(tmp_path):
    write_rows(tmp_path, "mds", ROWS, files=2)
    path = tmp_path / "part-00000.mds"
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 4 + 4 * 3, 2**31)
    path.write_bytes(data)
    everything = read_all(str(tmp_path), slice_rows=4)
    assert everything.rows == ROWS[15:]
    assert [row for row, _ in everything.reasons] == list(range(15))
    assert "expected offsets in order, got 2147483648 for sample 3" in everything.reasons[0][1]


def test_a_sample_that_does_not_fill_its_bytes_is_quarantined(tmp_path):
    write_rows(tmp_path, "mds", ROWS, files=1)
    path = tmp_path / "part-00000.mds"
    data = bytearray(path.read_bytes())
    at = np.frombuffer(data[4 : 4 * 32], "<u4")[3]
    struct.pack_into("<I", data, int(at), 2**32 - 1)  # the size of the text
    path.write_bytes(data)
    everything = read_all(str(tmp_path), slice_rows=7)
    assert everything.rows == [*ROWS[:3], *ROWS[4:]]
    [(row, reason)] = everything.reasons
    assert row == 3
    assert reason == "expected 4294967325 bytes for the values of the sample, got 35"


def test_a_compressed_shard_that_breaks_keeps_the_samples_before(tmp_path):
    rows = [{"n": k, "text": f"{k}" * 50_000, "tokens": [k]} for k in range(40)]
    write_rows(tmp_path, "mds.zstd", rows, files=1)
    path = tmp_path / "part-00000.mds.zstd"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + b"\xff" * 40 + data[len(data) // 2 + 40 :])
    everything = read_all(str(tmp_path), slice_rows=3)
    kept = len(everything.rows)
    assert everything.rows == rows[:kept]
    assert [row for row, _ in everything.reasons] == list(range(kept, 40))
    assert {r.split(":")[0] for _, r in everything.reasons} == {
        "expected valid compressed data, got"
    }


def test_a_sample_beyond_the_limit_is_quarantined_and_not_read(tmp_path):
    rows = [{"n": k, "text": "x" * (900 if k in (1, 4) else 3), "tokens": [k]} for k in range(6)]
    write_rows(tmp_path, "mds", rows, files=1)
    everything = read_all(str(tmp_path), max_sample_bytes=500)
    assert [row["n"] for row in everything.rows] == [0, 2, 3, 5]
    assert [row for row, _ in everything.reasons] == [1, 4]


def test_a_codec_that_is_missing_says_what_to_install(monkeypatch):
    import pyarrow as pa

    class NoCodec(pa.Codec):
        is_available = staticmethod(lambda name: name != "brotli")

    monkeypatch.setattr(pa, "Codec", NoCodec)
    with pytest.raises(SourceError, match=r"expected a pyarrow with brotli .* pip install"):
        build_index("web", str(DATA / "community" / "br"))


def test_inspect_suggests_a_job_that_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("OVERLORD_CACHE", str(tmp_path / "cache"))
    for path in (DATA / "community" / "plain", DATA / "community" / "plain" / "index.json"):
        done = CliRunner().invoke(cli, ["inspect", str(path)])
        assert done.exit_code == 0, done.output
        assert "plain  mds" in done.output
        text = done.output.partition("a job file for it:")[2]
        (tmp_path / "job.yaml").write_text("\n".join(text.splitlines()[1:]))
        job = ov.Job.from_yaml(tmp_path / "job.yaml")
        assert job.sources[0].transforms == (ov.Tokens("tokens"),)


@pytest.mark.parametrize("name", ["index.json", "part-00000.mds.zstd"])
def test_a_file_that_changes_in_mid_run_is_an_error_that_names_it(tmp_path, monkeypatch, name):
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "0.2")
    rows = [{"n": k, "tokens": [k + 1]} for k in range(40)]
    write_rows(tmp_path, "mds.zstd", rows, files=1)
    job = ov.Job(
        name="x",
        sources=[ov.Source("web", str(tmp_path), epochs=1)],
        batch=ov.Batch(samples=1, context=8),
        slice_rows=1,
    )
    with ov.launch(job, prefetch=1) as session:
        client = session.client(0)
        next(client)
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(SourceError, match=rf"{name}: the file changed since the source was"):
            for _ in client:
                pass
