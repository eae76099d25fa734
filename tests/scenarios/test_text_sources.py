"""Tables and plain text give the same stream in one process, in several and in the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

import overlord as ov
from tests.corpus import TEXT_FORMATS, write_texts
from tests.source_reads import read_all
from tests.store_jobs import stream
from tests.stores import BUCKET


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {word: i for i, word in enumerate(["?", "x", *(f"w{k}" for k in range(60))])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return str(path)


def job(folder: Path, tokenizer: object) -> ov.Job:
    sources = []
    for format in ("csv", "tsv.gz", "lines", "paragraphs.zst"):
        texts = [f"w{k}\nx x" if format == "csv" else f"w{k} x x" for k in range(50)]
        glob = write_texts(folder / format, format, texts, files=2)
        kind = format.partition(".")[0]
        transforms = [ov.Tokenize(tokenizer, eos=0)]
        sources.append(ov.Source(kind, glob, format=kind, epochs=1, transforms=transforms))
    batch = ov.Batch(samples=16, context=32)
    return ov.Job(name="texts", sources=sources, batch=batch, slice_rows=8, seed=5)


def test_all_runtimes_deliver_one_stream_of_tables_and_texts(tmp_path: Path, words: str):
    from tokenizers import Tokenizer

    local = stream(job(tmp_path, words))
    assert sum(len(step) for step in local) >= 192
    assert stream(job(tmp_path, words), "simulated") == local
    assert stream(job(tmp_path, Tokenizer.from_file(words)), "process") == local


def test_tables_and_texts_in_a_store_have_the_rows_and_fingerprint_of_the_disk(
    proxy, server, tmp_path: Path
):
    pytest.importorskip("obstore")
    texts = [f"row {k} " + "x" * (k % 40) for k in range(300)]
    for format in TEXT_FORMATS:
        write_texts(tmp_path / "texts" / format, format, texts, files=2)
    server.upload(tmp_path / "texts", "texts")
    for format in TEXT_FORMATS:
        kind = format.partition(".")[0]
        here, there = (
            read_all(f"{root}/{format}/*", kind, slice_rows=7, chunk_bytes=900)
            for root in (tmp_path / "texts", f"s3://{BUCKET}/texts")
        )
        assert [row["text"] for row in there.rows] == texts
        assert (here.rows, here.ids) == (there.rows, there.ids)
        assert here.index.fingerprint == there.index.fingerprint
