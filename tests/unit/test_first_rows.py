"""A source whose rows lack the column of the token ids is refused when the job is launched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from tests.corpus import write_rows

ROWS: list[dict[str, Any]] = [{"text": "one two", "n": k} for k in range(50)]
IDS: list[dict[str, Any]] = [{"tokens": [1, 2]}] * 40


class LazyRows:
    """A dataset that opens its file at the first read, and cannot be pickled after it."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.opened = rows, None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.opened = self.opened or (part for part in ())
        return self.rows[i]


def rows_of_text(shard: int = 0) -> Any:
    yield from ROWS * 3


def job(source: ov.Source) -> ov.Job:
    return ov.Job(name="first", sources=[source], batch=ov.Batch(samples=8, context=64))


def samples(source: ov.Source, runtime: str = "local") -> int:
    with ov.launch(job(source), runtime=runtime) as session:
        return sum(len(mb.samples) for step in session.client(0) for mb in step)


def refused(source: ov.Source) -> ov.SourceError:
    with pytest.raises(ov.SourceError) as caught:
        ov.launch(job(source))
    return caught.value


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_files_without_the_column_are_refused_at_launch(form: str, tmp_path: Path):
    error = refused(ov.Source("web", write_rows(tmp_path, form, ROWS), epochs=1))
    assert error.problem == "expected the column 'tokens', got text, n"
    assert Path(error.path).parent == tmp_path
    assert "ov.Tokenize('tokenizer.json', text='text')" in error.remedy


def test_a_dataset_without_the_column_is_refused_at_launch():
    error = refused(ov.Source.from_dataset("own", ROWS, epochs=1))
    assert str(error).startswith(
        "source 'own', dataset: expected the column 'tokens', got text, n; if 'text' holds text"
    )
    other = refused(ov.Source.from_dataset("own", [{"input_ids": [1, 2]}] * 9, epochs=1))
    assert "ov.Tokens('input_ids')" in other.remedy


def test_a_misspelled_column_is_refused_at_launch(tmp_path: Path):
    uri = write_rows(tmp_path, "jsonl", IDS)
    error = refused(ov.Source("web", uri, epochs=1, transforms=[ov.Tokens("ids")]))
    assert error.problem == "expected the column 'ids', got tokens"


def test_a_factory_without_the_column_fails_with_what_its_rows_have():
    source = ov.Source.from_factory("own", rows_of_text, epochs=1)
    with pytest.raises(ov.SourceError, match="expected the column 'tokens', got text, n"):
        samples(source)


def test_rows_without_the_column_among_others_are_quarantined(tmp_path: Path):
    mixed = [*ROWS[:5], *IDS, ROWS[5]]
    path = tmp_path / "a.jsonl"
    path.write_text("not json\n" + "\n".join(map(json.dumps, mixed)))
    assert samples(ov.Source("web", str(path), epochs=1)) == len(IDS)
    assert samples(ov.Source.from_dataset("own", mixed, epochs=1)) == len(IDS)


def test_a_filter_may_drop_rows_without_the_column(tmp_path: Path):
    uri = write_rows(tmp_path, "jsonl", [*ROWS, *IDS])
    has_ids = ov.Filter(lambda row: row.get("tokens") is not None, rows=True)
    assert samples(ov.Source("web", uri, epochs=1, transforms=[has_ids])) == len(IDS)


def test_a_dataset_that_goes_to_a_worker_process_is_not_read_before():
    source = ov.Source.from_dataset("own", LazyRows(IDS), epochs=1)
    assert samples(source, runtime="process") == len(IDS)


def test_an_added_source_is_checked(tmp_path: Path):
    good = ov.Source.from_dataset("own", IDS)
    late = ov.Source("late", write_rows(tmp_path, "jsonl", ROWS))
    with ov.launch(job(good)) as session:
        with pytest.raises(ov.SourceError, match="expected the column 'tokens', got text, n"):
            session.add_source(late)
        assert next(session.client(0)).step == 0
