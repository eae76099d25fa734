import threading
from dataclasses import replace

import pyarrow.fs as pafs
import pytest

from overlord.errors import StorageError
from overlord.sources.base import Lru, ReadOptions
from overlord.sources.chunk_reader import ChunkReader, OpenChunkCache
from overlord.sources.files import Files
from overlord.sources.index import build_index
from tests.corpus import FORMATS, write_rows
from tests.internals import LOCAL_FILES
from tests.mounts import mounted

ROWS = [{"id": i, "text": f"row {i}"} for i in range(90)]
OPTIONS = ReadOptions(slice_rows=10, columns=("text",))


def reader(tmp_path, format="parquet", cache=None, files=3):
    glob = write_rows(tmp_path / "data", format, ROWS, files=files)
    return ChunkReader(build_index("web", glob, None, OPTIONS), OPTIONS, cache or OpenChunkCache())


def texts(raw):
    return [t.decode() if isinstance(t, bytes) else t for t in raw.table["text"].to_pylist()]


@pytest.mark.parametrize("format", FORMATS)
def test_any_slice_can_be_asked_for_in_any_order(tmp_path, format):
    chunks = reader(tmp_path, format)
    for chunk, t in [(0, 0), (1, 2), (0, 1), (0, 1), (2, 1), (0, 0), (0, 2), (1, 0)]:
        raw = chunks.slice(chunk, t)
        start = chunk * 30 + t * 10
        assert texts(raw) == [f"row {i}" for i in range(start, start + 10)]
        assert raw.last == (t == 2)
        assert chunks.file_of(chunk) == chunk


def test_slices_of_a_small_row_group_of_numbers_are_read_as_one(tmp_path):
    glob = write_rows(tmp_path / "data", "parquet", ROWS, files=3)
    options = ReadOptions(slice_rows=10, columns=("id",))
    chunks = ChunkReader(build_index("web", glob, None, options), options, OpenChunkCache())
    for t, n in ((0, 2), (1, 5), (2, 1), (0, 3), (3, 1)):
        raw = chunks.slices(1, t, n)
        assert raw.table["id"].to_pylist() == list(range(30, 60))[10 * t : 10 * (t + n)]
        assert raw.row.tolist() == list(range(30))[10 * t : 10 * (t + n)]
        assert raw.last == (t + n >= 3)


@pytest.mark.parametrize("format", FORMATS)
def test_text_is_read_slice_by_slice(tmp_path, format):
    raw = reader(tmp_path, format).slices(0, 1, 2)
    assert texts(raw) == [f"row {i}" for i in range(10, 20)]
    assert not raw.last


@pytest.mark.parametrize("format", FORMATS)
def test_a_slice_past_the_end_is_empty_and_last(tmp_path, format):
    raw = reader(tmp_path, format).slice(0, 7)
    assert (len(raw.row), raw.table.num_rows, raw.last) == (0, 0, True)


@pytest.mark.parametrize("format", FORMATS)
def test_a_store_is_read_by_the_same_code_as_a_disk(tmp_path, format):
    here = reader(tmp_path, format)
    folder, fs = tmp_path / "data", pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    files = tuple(
        replace(f, path=f"data/{p.name}")
        for f, p in zip(here.index.files, sorted(folder.iterdir()), strict=True)
    )
    there = ChunkReader(
        replace(here.index, files=files, access=Files(fs, local=False)), OPTIONS, OpenChunkCache()
    )
    for chunk in range(3):
        for t in range(4):
            a, b = here.slice(chunk, t), there.slice(chunk, t)
            assert (a.row.tolist(), a.table.to_pylist(), a.last) == (
                b.row.tolist(),
                b.table.to_pylist(),
                b.last,
            )


def test_in_order_each_chunk_is_opened_once(tmp_path):
    chunks = reader(tmp_path, cache=(cache := OpenChunkCache()))
    for t in range(3):
        for chunk in range(3):
            chunks.slice(chunk, t)
    seen = cache.metrics()
    assert (seen["opens"], seen["reopens"], seen["reads"], seen["open"], seen["bytes"]) == (
        3,
        0,
        9,
        0,
        0,
    )


@pytest.mark.parametrize("bounds", [{"max_open": 1}, {"max_bytes": 1}])
def test_handles_beyond_the_bounds_are_closed_and_reopened_and_nothing_else_changes(
    tmp_path, bounds
):
    chunks = reader(tmp_path, cache=(cache := OpenChunkCache(**bounds)))
    got = {(chunk, t): texts(chunks.slice(chunk, t)) for t in range(3) for chunk in range(3)}
    assert [x for chunk in range(3) for t in range(3) for x in got[chunk, t]] == [
        r["text"] for r in ROWS
    ]
    seen = cache.metrics()
    assert seen["evictions"] > 0
    assert seen["reopens"] > 0
    assert seen["open"] <= 1


def test_closing_a_reader_closes_its_handles_and_no_others(tmp_path):
    cache = OpenChunkCache()
    a, b = reader(tmp_path / "a", cache=cache), reader(tmp_path / "b", cache=cache)
    a.slice(0, 0)
    b.slice(0, 0)
    a.close()
    assert cache.metrics()["open"] == 1
    assert texts(a.slice(0, 1)) == [f"row {i}" for i in range(10, 20)]


@pytest.mark.parametrize("bounds", [{}, {"max_open": 2}, {"max_bytes": 1}])
def test_what_is_open_is_told_by_reader_whoever_closes_it(tmp_path, bounds):
    cache = OpenChunkCache(**bounds)
    readers = [reader(tmp_path / str(i), cache=cache) for i in range(2)]
    for t in range(3):
        for chunk in range(3):
            for one in readers:
                one.slice(chunk, t)
                assert sum(r.open_bytes for r in readers) == cache.metrics()["bytes"]
                assert one.open_bytes > 0 or t == 2
    readers[0].slice(0, 0)
    readers[0].close()
    assert (readers[0].open_bytes, cache.metrics()["bytes"]) == (0, readers[1].open_bytes)


def test_threads_may_share_a_reader(tmp_path):
    chunks, wrong = reader(tmp_path, cache=OpenChunkCache(max_open=2)), []

    def work():
        for t in (0, 1, 2):
            for chunk in range(3):
                start = chunk * 30 + t * 10
                if texts(chunks.slice(chunk, t)) != [f"row {i}" for i in range(start, start + 10)]:
                    wrong.append((chunk, t))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_changed_or_went_is_named(tmp_path, format, monkeypatch):
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "0.01")
    chunks = reader(tmp_path, format)
    paths = sorted((tmp_path / "data").iterdir())
    with paths[0].open("ab") as out:
        out.write(b"more")
    paths[1].unlink()
    with pytest.raises(
        StorageError, match=r"the file changed .* expected \d+ bytes of .*, got \d+ bytes of "
    ) as caught:
        chunks.slice(0, 0)
    assert caught.value.path == str(paths[0])
    with pytest.raises(StorageError, match="disappeared after") as caught:
        chunks.slice(1, 0)
    assert caught.value.path == str(paths[1])


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_changes_between_two_slices_is_not_read_on(tmp_path, format, monkeypatch):
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "0.01")
    chunks = reader(tmp_path, format)
    chunks.slice(0, 0)
    path = min((tmp_path / "data").iterdir())
    path.write_bytes(path.read_bytes()[::-1])  # in place and of the same size: what is open sees it
    with pytest.raises(StorageError, match=r"the file changed since the source was indexed"):
        chunks.slice(0, 1)


@pytest.mark.parametrize("format", FORMATS)
def test_a_chunk_of_a_changed_file_is_refused_at_its_end_where_slices_are_not_checked(
    tmp_path, format, monkeypatch
):
    """A status of ``hdfs://`` is a request, so there is one at each end of a chunk."""
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "0.01")
    LOCAL_FILES.replace(monkeypatch, lambda: mounted(tmp_path / "switches"))
    chunks = reader(tmp_path, format)
    chunks.slice(0, 0)
    path = min((tmp_path / "data").iterdir())
    path.write_bytes(path.read_bytes())  # of the same size: only its time differs
    with pytest.raises(StorageError, match=r"the file changed since the source was indexed"):
        [chunks.slice(0, t) for t in (1, 2)]
    with pytest.raises(StorageError, match=r"the file changed since the source was indexed"):
        chunks.slice(0, 0)


def test_the_cache_keeps_what_was_used_last():
    gone = []
    lru = Lru(max_items=2, max_bytes=100, on_evict=gone.append)
    lru.put("a", "A", 10)
    lru.put("b", "B", 10)
    assert lru.get("a") == "A"
    lru.put("c", "C", 10)
    assert (gone, lru.nbytes, len(lru)) == (["B"], 20, 2)
    lru.put("d", "D", 95)
    assert (gone, lru.nbytes) == (["B", "A", "C"], 95)
    assert lru.take("d") == "D"
    assert (lru.nbytes, lru.take("d")) == (0, None)
