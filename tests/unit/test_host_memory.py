"""What a host does not hold: freed memory that nobody uses again, and pandas."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.runtime.process_control import ProcessControl
from overlord.sources.views import arrow_of, numpy_of
from tests.corpus import write_rows
from tests.laws import examples

SRC = Path(__file__).resolve().parents[2] / "src"
DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8", "?"]


@examples(60)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 100), max_size=40), st.integers(0, 20), st.integers(0, 40))
def test_a_view_is_what_arrow_makes_of_it(dtype: str, numbers: list[int], first: int, n: int) -> None:
    values = np.array(numbers, dtype)
    array = pa.array(values)
    assert arrow_of(values).equals(array)
    assert arrow_of(values[::2]).equals(pa.array(values[::2].copy()))
    cut = array.slice(first, n)
    found = numpy_of(cut)
    assert found.dtype == values.dtype
    assert found.tolist() == values[first : first + n].tolist()


@pytest.mark.parametrize("values", [[1, None, 3], [True, None], ["a", "b"], []])
def test_what_has_no_memory_of_numbers_is_left_to_arrow(values: list[Any]) -> None:
    array = pa.array(values)
    np.testing.assert_array_equal(numpy_of(array), array.to_numpy(zero_copy_only=False))


READ = """
import sys
import overlord as ov
if __name__ == "__main__":
    job = ov.Job(name="frugal", sources=[
        ov.Source("ids", sys.argv[1] + "/ids/*.parquet", transforms=[ov.Tokens("ids")], shuffle=True),
        ov.Source("text", sys.argv[1] + "/text/*.parquet", transforms=[ov.Tokenize(sys.argv[2])]),
    ], batch=ov.Batch(samples=8, context=64), place=ov.ClientPlaceTree(dp=1), until=4)
    with ov.launch(job) as session:
        assert sum(1 for _ in session.client(0)) == 4
    print("pandas" in sys.modules)
"""


def test_to_read_parquet_does_not_load_pandas(tmp_path: Path, tokenizer: str) -> None:
    write_rows(tmp_path / "ids", "parquet", [{"ids": list(range(1 + i % 7))} for i in range(100)], row_group_size=20)
    write_rows(tmp_path / "text", "parquet", [{"text": "one two three " * (1 + i % 5)} for i in range(100)])
    (tmp_path / "lib" / "pandas").mkdir(parents=True)
    (tmp_path / "lib" / "pandas" / "__init__.py").write_text("__version__ = '99.0'\n")  # so that there is one
    program = tmp_path / "read.py"
    program.write_text(READ)
    environ = {**os.environ, "PYTHONPATH": f"{SRC}{os.pathsep}{tmp_path / 'lib'}"}
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), tokenizer], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "False\n", done.stderr


class Pool:
    def backend(self) -> list[str | None]:
        return [pa.default_memory_pool().backend_name, os.environ.get("ARROW_DEFAULT_MEMORY_POOL")]


def test_hosts_have_arrow_take_memory_from_the_c_library_and_their_environment_does_not_show_it() -> None:
    with ProcessControl() as control:
        found = control.get(control.call(control.spawn(Pool, name="pool"), "backend"), 30.0)
    assert found == ["system", None]
