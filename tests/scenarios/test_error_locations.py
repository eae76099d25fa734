"""An error in a user's code names the file and the line, wherever the code runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from tests import raising_functions
from tests.corpus import write_rows
from tests.raising_functions import place_of

pytestmark = pytest.mark.timeout(200)
ROWS = [{"tokens": [k] * (1 + k % 5)} for k in range(40)]
RUNTIMES = ("local", "process")


def job(
    folder: Path, *transforms: Any, uri: Any = None, workers: str = "threads", **fields: Any
) -> ov.Job:
    data = write_rows(folder / "web", "parquet", ROWS, row_group_size=16) if uri is None else uri
    source = ov.Source(
        "web", data, transforms=[*transforms, ov.Tokens()], epochs=1, workers=workers
    )
    return ov.Job(name="raises", sources=[source], batch=ov.Batch(samples=8, context=16), **fields)


def reasons(made: ov.Job, runtime: str) -> set[str]:
    with ov.launch(made, runtime=runtime) as session:
        for _ in session.client(0):
            pass
        return {row["reason"] for row in session.quarantine()}


def error_of(made: ov.Job, runtime: str) -> str:
    """The error that ends a job, with its notes, as it comes to a trainer."""
    with pytest.raises(Exception) as caught, ov.launch(made, runtime=runtime) as session:  # noqa: PT011 - of several types
        for _ in session.client(0):
            pass
    return "\n".join([f"{caught.value}", *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize(
    ("runtime", "workers"), [("local", "threads"), ("local", "processes"), ("process", "processes")]
)
def test_a_row_in_quarantine_says_where_the_code_raised(
    tmp_path: Path, runtime: str, workers: str
) -> None:
    made = job(
        tmp_path,
        ov.Map(raising_functions.map_row, rows=True),
        ov.Meta("m", raising_functions.meta_row, rows=True),
        uri=write_rows(tmp_path / "web", "parquet", [*ROWS, {"tokens": [1] * 8}]),
        workers=workers,
    )
    found = reasons(made, runtime)
    assert found == {f"Map(map_row, rows=True): ValueError: no row (at {place_of('helper')}helper)"}


def test_the_frame_is_the_users_and_not_that_of_a_library_it_calls(tmp_path: Path) -> None:
    [reason] = reasons(job(tmp_path, ov.Map(raising_functions.map_columns)), "local")
    assert reason.startswith("Map(map_columns): JSONDecodeError: Expecting property name")
    assert reason.endswith(f"(at {place_of('map_columns')}map_columns)")


@pytest.mark.parametrize(
    ("transform", "mark"),
    [
        (ov.Filter(raising_functions.keep_row, rows=True), "keep_row"),
        (ov.Map(raising_functions.leave, rows=True), "leave"),
    ],
)
def test_code_that_fails_on_every_row_is_named_by_the_error_of_the_job(
    tmp_path: Path, transform: Any, mark: str
) -> None:
    assert place_of(mark) in error_of(job(tmp_path, transform), "local")


def test_a_dataset_and_a_factory_say_where_they_raised(tmp_path: Path) -> None:
    assert reasons(job(tmp_path, uri=raising_functions.Shelf()), "local") == {
        f"the dataset raised LookupError: three (at {place_of('Shelf')}__getitem__)"
    }
    assert place_of("rows_of") in error_of(
        job(tmp_path, uri=ov.Factory(raising_functions.rows_of, shards=1)), "local"
    )


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("fields", "mark"),
    [
        ({"strategy": raising_functions.strategy}, "strategy"),
        ({"strategy": raising_functions.misplaced}, "misplaced"),
        ({"strategy": raising_functions.costly}, "cost"),
        ({"mixture": raising_functions.schedule}, "schedule"),
        ({"hooks": [ov.loader_do_plan(raising_functions.popped)]}, "popped"),
        ({"hooks": [ov.constructor_do_plan(raising_functions.assembled)]}, "assembled"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_strategies_schedules_costs_and_hooks_say_where_they_raised(
    tmp_path: Path, runtime: str, fields: dict[str, Any], mark: str
) -> None:
    if runtime == "process" and mark in ("strategy", "misplaced", "cost"):
        fields = {
            **fields,
            "journal": str(tmp_path / "journal"),
        }  # the coordinator has a process of its own then
    assert place_of(mark) in error_of(job(tmp_path, **fields), runtime)
