"""Laws of tables and plain text: every row once and in order, and the stream of jobs over them."""

from __future__ import annotations

import csv
import io
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ov
from overlord.errors import SourceError
from tests.corpus import TEXT_FORMATS, TEXT_SUFFIX, pack, write_texts
from tests.source_reads import read_all

LAW = settings(max_examples=40, deadline=None)
ANY = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=30)
LINES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\ufeff"), max_size=30)


def kind_of(format: str) -> str:
    return format.partition(".")[0]


@pytest.mark.parametrize("format", TEXT_FORMATS)
@LAW
@given(data=st.data(), step=st.integers(1, 40), chunk=st.integers(1, 500), files=st.integers(1, 3))
def test_all_slices_of_all_chunks_are_the_rows_written(format, data, step, chunk, files):
    table = kind_of(format) in ("csv", "tsv")
    texts = data.draw(
        st.lists((ANY if table else LINES).map(lambda t: "x" + t), min_size=1, max_size=40)
    )
    files = min(files, len(texts))
    with tempfile.TemporaryDirectory() as folder:
        glob = write_texts(folder, format, texts, files)
        for columns in (None, ("text",)):
            everything = read_all(
                glob, kind_of(format), slice_rows=step, chunk_bytes=chunk, columns=columns
            )
            assert [row["text"] for row in everything.rows] == texts
            # Fewer rows than shares leave a file without rows, which is one bad row.
            assert {reason for _, reason in everything.reasons} <= {"the file has no rows"}
            assert len(set(everything.ids)) == len(everything.ids)
            assert everything.ids == sorted(everything.ids)


@LAW
@given(
    rows=st.lists(
        st.lists(
            st.text(st.characters(codec="utf-8", exclude_characters="\r")), min_size=2, max_size=2
        ),
        min_size=1,
        max_size=20,
    ),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    end=st.sampled_from(["\n", "\r\n"]),
    delimiter=st.sampled_from([",", ";", "|"]),
    header=st.booleans(),
)
def test_quoted_delimiters_quotes_and_line_breaks_are_values(rows, quoting, end, delimiter, header):
    out = io.StringIO(newline="")
    writer = csv.writer(out, quoting=quoting, lineterminator=end, delimiter=delimiter)
    writer.writerows([["a", "b"], *rows] if header else rows)
    name = {",": "csv", ";": "csv-semicolon", "|": "csv-pipe"}[delimiter]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv"
        path.write_bytes(out.getvalue().encode())
        everything = read_all(str(path), name + ("" if header else "-no-header"), slice_rows=3)
    text = out.getvalue().encode()
    if not header and text.startswith("\ufeff".encode()):
        return
    assert [list(row.values()) for row in everything.rows] == rows
    # The row number is the offset of the row's first line: reading from there gives the row.
    for (_, at), row in zip(everything.ids, rows, strict=True):
        rest = io.StringIO(text[at:].decode(), newline="")
        assert next(csv.reader(rest, delimiter=delimiter)) == row


@pytest.mark.parametrize("format", ["csv", "tsv", "lines", "paragraphs", "text"])
@LAW
@given(
    noise=st.binary(max_size=300),
    packed=st.sampled_from(["", ".gz", ".zst"]),
    limit=st.integers(1, 80),
)
def test_any_bytes_give_rows_or_named_errors(format, noise, packed, limit):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a{TEXT_SUFFIX[format]}{packed}"
        path.write_bytes(pack(noise, format + packed))
        try:
            everything = read_all(str(path), format, slice_rows=3, max_sample_bytes=limit)
        except SourceError:
            return
    assert all(len(row["text"].encode()) <= 3 * limit for row in everything.rows if "text" in row)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {word: i for i, word in enumerate(["?", "x", *(f"w{k}" for k in range(60))])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return str(path)


def steps_of(session: Any) -> list[list[tuple[str, list[int]]]]:
    return [
        [
            (str(p.sample), m["tokens"][p.offset : p.offset + p.length].tolist())
            for m in step
            for p in m.samples
        ]
        for step in session.client(0)
    ]


@pytest.mark.parametrize("format", ["csv", "tsv.gz", "lines", "lines.zst", "paragraphs"])
def test_a_stream_holds_every_row_once_and_goes_on_after_every_step(format, tmp_path, words):
    texts = [f"w{k} " + "x " * (k % 5) + "x" for k in range(40)]
    glob = write_texts(tmp_path, format, texts, files=2)
    source = ov.Source("a", glob, format=kind_of(format), epochs=1, transforms=[ov.Tokenize(words)])
    job = ov.Job(name="a", sources=[source], batch=ov.Batch(samples=8, context=32))
    with ov.launch(job) as session:
        wanted = steps_of(session)
    rows = [row for step in wanted for row in step]
    assert sorted(ids[0] for _, ids in rows) == list(range(2, 42))
    assert len({name for name, _ in rows}) == 40
    for k in range(1, len(wanted)):
        with ov.launch(job) as session:
            client = session.client(0)
            for _ in range(k):
                next(client)
            state = client.state_dict()
        with ov.launch(job, resume=state) as session:
            assert steps_of(session) == wanted[k:]
