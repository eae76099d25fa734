"""Megatron datasets: every type and layout, what inspection reads, and errors of broken pairs."""

from __future__ import annotations

import errno
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from click.testing import CliRunner

import overlord as ov
from overlord.cli.main import cli
from overlord.errors import SourceError
from overlord.sources.base import ReadOptions
from overlord.sources.chunk_reader import ChunkReader, OpenChunkCache
from overlord.sources.files import Files
from overlord.sources.index import build_index
from tests.corpus import MEGATRON_CODES, write_megatron
from tests.data import write_formats
from tests.internals import LOCAL_FILES
from tests.mounts import Mount
from tests.source_reads import read_all

DATA = Path(__file__).resolve().parents[1] / "data"
DOCUMENTS = [[[1, 2, 3]], [[4], [], [5, 6]], [], [[]], [[7, 8], [9]]]
JOINED = [[1, 2, 3], [4, 5, 6], [], [], [7, 8, 9]]


@pytest.mark.parametrize("dtype", list(MEGATRON_CODES))
def test_every_type_of_ids_is_read(tmp_path, dtype):
    write_megatron(tmp_path / "a.bin", DOCUMENTS, dtype)
    everything = read_all(str(tmp_path / "a.bin"), slice_rows=2)
    assert [row["tokens"] for row in everything.rows] == JOINED
    assert [row["lengths"] for row in everything.rows] == [[3], [1, 0, 2], [], [0], [2, 1]]
    assert everything.ids == [(0, k) for k in range(5)]
    kind = str(pa.from_numpy_dtype(np.dtype(dtype)))
    assert everything.index.schema == {
        "tokens": f"large_list<item: {kind}>",
        "lengths": "large_list<item: int32>",
    }


def test_modes_of_a_multimodal_dataset_are_a_column(tmp_path):
    write_megatron(tmp_path / "a.bin", DOCUMENTS, "int32", modes=[0, 0, 1, 0, 2, 0, -1])
    everything = read_all(str(tmp_path / "a.idx"), slice_rows=3)
    assert [row["modes"] for row in everything.rows] == [[0], [0, 1, 0], [], [2], [0, -1]]
    assert [row["tokens"] for row in everything.rows] == JOINED


@pytest.mark.parametrize("named", ["a.bin", "a.idx", "*.bin", "*.idx", "a.*", "", "list"])
def test_either_file_a_glob_or_the_folder_names_the_dataset(tmp_path, named):
    write_megatron(tmp_path / "a.bin", DOCUMENTS)
    path = [str(tmp_path / "a.idx"), str(tmp_path / "a.bin")] if named == "list" else None
    everything = read_all(path or str(tmp_path / named))
    assert [row["tokens"] for row in everything.rows] == JOINED
    assert [f.path for f in everything.index.files] == [str(tmp_path / "a.bin")]


@pytest.mark.parametrize("step", [1, 2, 3, 100])
@pytest.mark.parametrize("chunk", [1, 4, 7, 1000])
def test_chunks_are_documents_by_the_range_in_which_they_start(tmp_path, step, chunk):
    write_megatron(tmp_path / "a.bin", DOCUMENTS)
    everything = read_all(str(tmp_path / "a.bin"), slice_rows=step, chunk_bytes=chunk)
    assert [row["tokens"] for row in everything.rows] == JOINED
    starts = [0, 6, 12, 12, 12]
    assert len(everything.index.chunks) == len({at // chunk for at in starts})


def test_only_columns_that_are_needed_are_read(tmp_path):
    write_megatron(tmp_path / "a.bin", DOCUMENTS)
    with pytest.raises(SourceError, match=r"expected the column 'text', got tokens, lengths"):
        read_all(str(tmp_path / "a.bin"), columns=("text",))
    assert read_all(str(tmp_path / "a.bin"), columns=("lengths",)).rows[1] == {"lengths": [1, 0, 2]}


def test_a_document_beyond_the_limit_is_quarantined_and_not_read(tmp_path):
    write_megatron(tmp_path / "a.bin", [[[1]], [[2] * 50], [[3]], [[4] * 60], [[5]]])
    everything = read_all(str(tmp_path / "a.bin"), max_sample_bytes=80)
    assert [row["tokens"] for row in everything.rows] == [[1], [3], [5]]
    assert everything.reasons == [
        (1, "expected a row of at most max_sample_bytes=80 bytes, got 100"),
        (3, "expected a row of at most max_sample_bytes=80 bytes, got 120"),
    ]


def test_a_dataset_without_documents_is_one_entry_among_others(tmp_path):
    write_megatron(tmp_path / "a.bin", [])
    with pytest.raises(SourceError, match="expected files with rows"):
        read_all(str(tmp_path / "a.bin"))
    write_megatron(tmp_path / "b.bin", DOCUMENTS)
    everything = read_all(str(tmp_path))
    assert everything.reasons == [(0, "the file has no rows")]
    assert [row["tokens"] for row in everything.rows] == JOINED


def patched(path: Path, at: int, data: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:at] + data + old[at + len(data) :])


# The seven sequences of DOCUMENTS: lengths at 34, offsets at 62, document boundaries at 118.
@pytest.mark.parametrize(
    ("at", "data", "says"),
    [
        (0, b"TNTIDX\0\0", r"expected an index of Megatron.*fairseq's old format"),
        (0, b"PK", r"expected the magic bytes b'MMIDIDX"),
        (9, struct.pack("<Q", 2), r"expected version 1 of the index, got 2"),
        (17, b"\x09", r"expected a type code from 1 to 8 in the index, got 9"),
        (17, b"\x02", r"sequence 1: expected it to start at byte 3 of the .bin.*got 6"),
        (18, struct.pack("<Q", 2**62), r"expected an index of \d+ bytes .*got 166"),
        (26, struct.pack("<Q", 0), r"expected at least one document boundary"),
        (26, struct.pack("<Q", 2**63), r"expected an index of \d+ bytes"),
        (34, struct.pack("<i", -3), r"sequence 0: expected a length of at least 0, got -3"),
        (38, struct.pack("<i", 2), r"sequence 2: expected it to start at byte 10"),
        (58, struct.pack("<i", 2**31 - 1), r"expected at least \d+ bytes in the .bin, got 18"),
        (58, struct.pack("<i", 0), r"expected 16 bytes in the .bin, got 18"),
        (62, struct.pack("<q", 2), r"sequence 0: expected it to start at byte 0 .*got 2"),
        (78, struct.pack("<q", 2**60), r"sequence 2: expected it to start at byte 8"),
        (118, struct.pack("<q", 1), r"document boundary 0: expected sequence 0, got 1"),
        (126, struct.pack("<q", 5), r"document boundary 2: expected at least sequence 5, got 4"),
        (126, struct.pack("<q", -1), r"document boundary 1: expected at least sequence 0, got -1"),
        (158, struct.pack("<q", 8), r"expected the last document to end at sequence 7, got 8"),
    ],
)
def test_a_wrong_entry_of_the_index_is_named_at_launch(tmp_path, at, data, says):
    write_megatron(tmp_path / "a.bin", DOCUMENTS)
    patched(tmp_path / "a.idx", at, data)
    with pytest.raises(SourceError, match=rf"source 'web', {tmp_path}/a.bin: .*a.idx: {says}"):
        build_index("web", str(tmp_path / "a.bin"))


@pytest.mark.parametrize(("name", "says"), [("a.bin", "it is truncated"), ("a.idx", "got 126")])
def test_a_truncated_file_is_named_at_launch(tmp_path, name, says):
    write_megatron(tmp_path / "a.bin", DOCUMENTS)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) - (40 if name == "a.idx" else 2)])
    with pytest.raises(SourceError, match=rf"a.idx: .*{says}"):
        build_index("web", str(tmp_path / "a.bin"))


@pytest.mark.parametrize("missing", ["a.bin", "a.idx"])
def test_a_missing_half_is_named_at_launch(tmp_path, missing):
    write_megatron(tmp_path / "a.bin", DOCUMENTS)
    (tmp_path / missing).unlink()
    with pytest.raises(SourceError, match=rf"got no {tmp_path}/{missing}"):
        build_index("web", str(tmp_path))


@pytest.mark.parametrize("name", ["a.idx", "a.bin"])
def test_a_file_that_changes_in_mid_run_is_an_error_that_names_it(tmp_path, monkeypatch, name):
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "0.2")
    write_megatron(tmp_path / "a.bin", [[[k]] for k in range(50)])
    job = ov.Job(
        name="x",
        sources=[ov.Source("web", str(tmp_path / "a.bin"), epochs=1)],
        batch=ov.Batch(samples=1, context=8),
        slice_rows=1,
        chunk_bytes=2,
    )
    with ov.launch(job, prefetch=1) as session:
        client = session.client(0)
        next(client)
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(SourceError, match=rf"{name}: the file changed since the source was"):
            for _ in client:
                pass


@pytest.mark.parametrize("runs", ["one run", "a document left out"])
def test_the_ids_of_a_slice_are_copied_once_from_the_file(tmp_path, runs):
    """All that Arrow and numpy allocate for a slice is the ids and a few bytes a document."""
    documents = [[[k] * 4000] for k in range(100)]
    if runs == "a document left out":
        documents[40] = [[7] * 5000]
    write_megatron(tmp_path / "a.bin", documents, "int32")
    options = ReadOptions(slice_rows=100, max_sample_bytes=16_000, columns=("tokens",))
    reader = ChunkReader(
        build_index("web", str(tmp_path / "a.bin"), None, options), options, OpenChunkCache()
    )
    pool = pa.default_memory_pool()
    before = pool.total_bytes_allocated()
    tracemalloc.start()
    try:
        raw = reader.slice(0, 0)
        allocated = pool.total_bytes_allocated() - before + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = 4 * sum(len(row["tokens"]) for row in raw.table.to_pylist())
    assert size == 16_000 * (100 if runs == "one run" else 99)
    # Runs around a document that is left out are joined, which is a second copy.
    copies = 1 if runs == "one run" else 2
    assert copies * size <= allocated < copies * size + 200_000
    reader.close()


def test_a_second_index_reads_nothing_and_a_changed_pair_is_read_again(tmp_path):
    write_megatron(tmp_path / "a.bin", DOCUMENTS)
    cache = tmp_path / "cache"
    first = build_index("web", str(tmp_path / "a.bin"), cache_dir=cache)
    again = build_index("web", str(tmp_path / "a.bin"), cache_dir=cache)
    assert again.fingerprint == first.fingerprint
    write_megatron(tmp_path / "a.bin", [*DOCUMENTS, [], [[]]])
    assert build_index("web", str(tmp_path / "a.bin"), cache_dir=cache).rows == 7


def test_files_of_another_format_with_the_suffix_say_what_to_do(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"weights")
    with pytest.raises(SourceError, match=r"got no .*model.idx; copy both files, or set format="):
        build_index("web", str(tmp_path))


def test_a_bin_of_another_tool_next_to_other_data_is_ignored_and_a_lost_half_is_not(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "model.bin").write_bytes(b"weights")
    assert read_all(str(tmp_path)).rows == [{"a": 1}]
    write_megatron(tmp_path / "b.bin", DOCUMENTS)
    with pytest.raises(SourceError, match="expected files of one format"):
        read_all(str(tmp_path))
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(SourceError, match=r"got no .*model.idx"):
        read_all(str(tmp_path))


def unreadable(path: Path) -> None:
    """Replace the token ids by others, so that a reader of them would fail or differ."""
    path.write_bytes(b"\xff" * path.stat().st_size)


def test_lengths_alone_are_read_from_the_index(tmp_path):
    write_megatron(tmp_path / "a.bin", DOCUMENTS, "int32")
    index = build_index("web", str(tmp_path / "a.bin"), None, ReadOptions(lengths_only=True))
    unreadable(tmp_path / "a.bin")
    everything = read_all(str(tmp_path / "a.bin"), lengths_only=True)
    assert [row["tokens"] for row in everything.rows] == [[0] * len(ids) for ids in JOINED]
    assert index.rows == 5


@pytest.mark.parametrize("chain", ["[tokens]", "[{select: [tokens]}]", "[]"])
def test_plan_and_inspect_do_not_read_the_data(tmp_path, chain, monkeypatch):
    monkeypatch.setenv("OVERLORD_CACHE", str(tmp_path / "cache"))
    write_megatron(tmp_path / "a.bin", [[[k + 1] * (k % 9 + 1)] for k in range(60)], "int32")
    (tmp_path / "job.yaml").write_text(
        f"name: x\nbatch: {{samples: 8, context: 16}}\nsources:\n  web: {{uri: a.bin, "
        f"transforms: {chain}}}\n"
    )
    plan = CliRunner().invoke(cli, ["plan", str(tmp_path / "job.yaml"), "--step", "3"])
    assert plan.exit_code == 0, plan.output
    unreadable(tmp_path / "a.bin")  # ids below 0: every row that is read would be quarantined
    for words in (
        ["plan", str(tmp_path / "job.yaml"), "--step", "3"],
        ["inspect", str(tmp_path / "job.yaml")],
        ["inspect", str(tmp_path / "a.idx")],
    ):
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.output
        if words[0] == "plan":
            assert done.output == plan.output
        else:
            assert "60" in done.output
    job = ov.Job.from_yaml(tmp_path / "job.yaml")
    with ov.launch(job) as session, pytest.raises(SourceError, match="an id below 0"):
        next(session.client(0))


class Locked(Mount):
    """The files of this machine, of which no ``.bin`` can be opened."""

    def open_input_file(self, path: str) -> Any:
        if path.endswith(".bin"):
            raise PermissionError(errno.EACCES, "no byte of it is needed", path)
        return super().open_input_file(path)

    def __reduce__(self) -> Any:
        return Locked, (self.switches,)


def test_plan_explain_and_inspect_never_open_the_data(tmp_path, monkeypatch):
    monkeypatch.setenv("OVERLORD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "0.2")
    write_megatron(tmp_path / "a.bin", [[[k + 1] * (k % 9 + 1)] for k in range(60)], "int32")
    (tmp_path / "job.yaml").write_text(
        "name: x\nbatch: {samples: 8, context: 16}\n"
        "sources: {web: {uri: a.bin, transforms: [tokens]}}\n"
    )
    (tmp_path / "switches").mkdir()
    locked = Files(pafs.PyFileSystem(Locked(str(tmp_path / "switches"))), False)
    LOCAL_FILES.replace(monkeypatch, lambda: locked)
    for words in (
        ["plan", "job.yaml", "--step", "3"],
        ["explain", "job.yaml", "--step", "3"],
        ["inspect", "job.yaml"],
        ["inspect", "a.idx"],
    ):
        words = [str(tmp_path / w) if "." in w else w for w in words]
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.output
    # What is to be delivered has to be read.
    with (
        ov.launch(ov.Job.from_yaml(tmp_path / "job.yaml")) as session,
        pytest.raises(SourceError, match=r"a\.bin: the file is no longer readable"),
    ):
        next(session.client(0))


def test_inspect_suggests_a_job_that_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("OVERLORD_CACHE", str(tmp_path / "cache"))
    write_megatron(tmp_path / "wiki.bin", DOCUMENTS)
    done = CliRunner().invoke(cli, ["inspect", str(tmp_path / "wiki.bin")])
    assert done.exit_code == 0, done.output
    assert "megatron" in done.output
    assert "3 ids" in done.output
    text = done.output.partition("a job file for it:")[2]
    (tmp_path / "job.yaml").write_text("\n".join(text.splitlines()[1:]))
    assert ov.Job.from_yaml(tmp_path / "job.yaml").sources[0].transforms == (ov.Tokens("tokens"),)


def test_files_of_megatrons_own_builder_have_its_values_and_order():
    """``tests/data/write_formats.py`` wrote the files, with Megatron-Core's builder."""
    for name in ("text", "int32", "sentences", "multimodal", "merged"):
        wanted = json.loads((DATA / "megatron" / f"{name}.json").read_text())
        everything = read_all(str(DATA / "megatron" / f"{name}.bin"), slice_rows=3)
        assert everything.rows == wanted


def test_files_that_megatrons_builder_makes_now_have_its_values_and_order(tmp_path):
    pytest.importorskip("megatron.core.datasets.indexed_dataset")
    for name, rows in write_formats.write_megatron(tmp_path).items():
        assert read_all(str(tmp_path / f"{name}.idx"), slice_rows=4, chunk_bytes=99).rows == rows
