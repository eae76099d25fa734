import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from overlord.errors import SourceError
from overlord.sources.base import ReadOptions
from overlord.sources.index import IndexSpec, build_index, build_indexes
from tests.corpus import write_rows
from tests.internals import FOOTER_READS

ROWS = [{"id": i, "text": f"row {i}"} for i in range(40)]


@pytest.fixture
def opened(monkeypatch):
    """Paths whose footers were read: what a warm cache saves."""
    seen, real = [], FOOTER_READS.real
    FOOTER_READS.replace(
        monkeypatch,
        lambda files, file: seen.append(os.path.basename(file.path)) or real(files, file),
    )
    return seen


def test_a_second_index_opens_no_file_and_is_the_same(tmp_path, opened):
    glob = write_rows(tmp_path / "data", "parquet", ROWS, files=3, row_group_size=7)
    first = build_index("web", glob, cache_dir=tmp_path / "cache")
    assert set(opened) == {f"part-0000{k}.parquet" for k in range(3)}
    opened.clear()
    second = build_index("web", glob, cache_dir=tmp_path / "cache")
    assert opened == []
    for name in ("file", "start", "stop", "unit", "rows", "nbytes"):
        a, b = getattr(first.chunks, name), getattr(second.chunks, name)
        assert (a.tolist(), a.dtype) == (b.tolist(), b.dtype)
    assert (first.fingerprint, first.schema, first.files) == (
        second.fingerprint,
        second.schema,
        second.files,
    )


def test_a_changed_file_is_looked_at_again_and_the_others_are_not(tmp_path, opened):
    glob = write_rows(tmp_path / "data", "parquet", ROWS, files=3)
    before = build_index("web", glob, cache_dir=tmp_path / "cache")
    write_rows(tmp_path / "new", "parquet", ROWS[:5], files=1)
    shutil.copy(tmp_path / "new/part-00000.parquet", tmp_path / "data/part-00001.parquet")
    opened.clear()
    after = build_index("web", glob, cache_dir=tmp_path / "cache")
    assert set(opened) == {"part-00001.parquet"}
    assert (before.rows, after.rows) == (40, 40 - 14 + 5)
    assert before.fingerprint != after.fingerprint


def test_other_columns_make_another_entry(tmp_path):
    glob = write_rows(tmp_path / "data", "parquet", ROWS)
    build_index("web", glob, options=ReadOptions(columns=("id",)), cache_dir=tmp_path / "cache")
    with pytest.raises(SourceError, match="'nope'"):
        build_index(
            "web", glob, options=ReadOptions(columns=("nope",)), cache_dir=tmp_path / "cache"
        )


@pytest.mark.parametrize("damage", [b"", b"garbage", b"\x83\xa7version\x01"])
def test_a_damaged_cache_entry_is_ignored_and_rebuilt(tmp_path, damage, opened):
    glob = write_rows(tmp_path / "data", "parquet", ROWS)
    wanted = build_index("web", glob, cache_dir=tmp_path / "cache").fingerprint
    (entry,) = (tmp_path / "cache").iterdir()
    entry.write_bytes(damage)
    assert build_index("web", glob, cache_dir=tmp_path / "cache").fingerprint == wanted
    opened.clear()
    build_index("web", glob, cache_dir=tmp_path / "cache")
    assert opened == []


def test_a_cache_that_cannot_be_written_fails_no_job(tmp_path):
    glob = write_rows(tmp_path / "data", "parquet", ROWS)
    (tmp_path / "cache").write_text("a file where the directory should be")
    assert build_index("web", glob, cache_dir=tmp_path / "cache").rows == 40


@pytest.mark.parametrize("format", ["parquet", "jsonl", "tar", "arrow"])
def test_a_copy_elsewhere_has_the_same_fingerprint_and_a_renamed_or_cut_one_has_not(
    tmp_path, format
):
    glob = write_rows(tmp_path / "here", format, ROWS, files=3)
    shutil.copytree(tmp_path / "here", tmp_path / "far/away")
    for path in (tmp_path / "far/away").iterdir():
        os.utime(path, (1, 1))
    there = glob.replace("/here/", "/far/away/")
    wanted = build_index("web", glob).fingerprint
    assert build_index("other name", there).fingerprint == wanted
    first = sorted((tmp_path / "far/away").iterdir())[0]
    first.rename(first.with_name("part-00000b" + first.suffix))
    assert build_index("web", there).fingerprint != wanted


def test_all_sources_are_indexed_in_order_with_progress(tmp_path):
    specs = [
        IndexSpec(f"s{k}", write_rows(tmp_path / f"s{k}", f, ROWS[: k + 1], files=1))
        for k, f in enumerate(["parquet", "jsonl", "arrow", "tar"])
    ]
    seen = []
    indexes = build_indexes(
        specs,
        cache_dir=tmp_path / "cache",
        workers=3,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [i.source for i in indexes] == ["s0", "s1", "s2", "s3"]
    assert [i.format for i in indexes] == ["parquet", "jsonl", "arrow", "tar"]
    assert seen[-1] == (4, 4)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_problems_of_several_sources_come_in_one_error(tmp_path):
    good = write_rows(tmp_path / "good", "parquet", ROWS)
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    with pytest.raises(SourceError) as caught:
        build_indexes(
            [
                IndexSpec("a", "/nowhere/*.parquet"),
                IndexSpec("b", good),
                IndexSpec("c", str(tmp_path / "cut.parquet")),
            ]
        )
    text = str(caught.value)
    assert "'a'" in text
    assert "a pattern that matches files" in text
    assert "'c'" in text
    assert "cut.parquet" in text
    assert "'b'" not in text


@pytest.mark.parametrize(
    ("names", "format", "says"),
    [
        (
            ["a.xyz"],
            None,
            r"with a known suffix, got .*; set format=; known formats: parquet \(\.parquet",
        ),
        (["a.parquet", "b.jsonl"], None, "expected files of one format, got jsonl"),
        (["a.jsonl"], "avro", "expected a known format, got 'avro'; known formats: arrow, csv"),
    ],
)
def test_an_unknown_format_is_an_error_that_lists_the_known_ones(tmp_path, names, format, says):
    for name in names:
        (tmp_path / name).write_text('{"a":1}\n')
    with pytest.raises(SourceError, match=says):
        build_index("web", f"{tmp_path}/*", format)


def test_a_given_format_reads_files_of_any_name(tmp_path):
    (tmp_path / "data.txt").write_text('{"a":1}\n')
    assert build_index("web", f"{tmp_path}/*", "jsonl").format == "jsonl"
    pq.write_table(pa.table({"a": [1]}), tmp_path / "data.bin")
    assert build_index("web", f"{tmp_path}/data.bin", "parquet").rows == 1


def test_a_source_without_any_row_is_an_error(tmp_path):
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="without any"):
        build_index("web", f"{tmp_path}/*.parquet")
