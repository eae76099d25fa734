"""Footers of Parquet files are not trusted: whatever they hold, the process goes on and the file is
named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from overlord.errors import SourceError
from overlord.sources.index import build_index
from overlord.sources.parquet_footer import BrokenFooter, parse
from tests.footers import OTHERS, ROWS, footer_of, with_footer, write_encrypted, write_valid
from tests.processes import ROOT, WAIT_S
from tests.source_reads import read_all


def apart(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, which a reader that aborts takes with it."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=env,
        timeout=4 * WAIT_S,
        check=False,
    )


def test_no_mutated_footer_ends_the_process(tmp_path: Path) -> None:
    done = apart("-m", "tests.footers", str(tmp_path))
    assert done.returncode == 0, done.stderr[-500:]
    found = json.loads(done.stdout)
    size = len(footer_of((tmp_path / "valid.parquet").read_bytes()))
    assert sum(found.values()) == size + 2 * OTHERS
    assert "refused without a name" not in found
    assert min(found["read"], found["refused"]) > size // 4, (
        "some mutations are harmless, and some are not"
    )


ENCRYPTED = """
import sys
from pathlib import Path
from overlord.errors import SourceError
from overlord.sources.base import ReadOptions
from overlord.sources.index import build_index
for columns in (None, ("text",)):
    try:
        build_index("web", sys.argv[1], options=ReadOptions(columns=columns))
    except SourceError as error:
        print(error)
"""


def test_a_file_with_an_encrypted_column_is_named_with_a_remedy(tmp_path: Path) -> None:
    path = str(write_encrypted(tmp_path / "a.parquet"))
    done = apart("-c", ENCRYPTED, path)
    assert done.returncode == 0, done.stderr[-500:]
    problem = (
        "expected readable columns, got encrypted ones: 'text'; rewrite the file without encryption"
    )
    first, second = done.stdout.splitlines()
    assert first == second
    assert path in first
    assert problem in first


def test_inspect_and_launch_name_a_file_with_an_encrypted_column(tmp_path: Path) -> None:
    """A user meets the error in both, and a local job must not end its trainer."""
    path = write_encrypted(tmp_path / "a.parquet", "tokens.list.element")
    (tmp_path / "job.yaml").write_text(
        f"name: t\nsources: {{web: {{uri: {path}, transforms: [{{tokens: "
        f"{{}}}}]}}}}\nbatch: {{samples: 2, context: 8}}\n"
    )
    launch = (
        "import sys, overlord as ov\nwith ov.launch(ov.Job.from_yaml(sys.argv[1])) as "
        "session:\n    next(session.client(0))"
    )
    for arguments in (["-m", "overlord", "inspect"], ["-c", launch]):
        done = apart(*arguments, str(tmp_path / "job.yaml"))
        said = "".join((done.stdout + done.stderr).split())
        assert done.returncode == 1, done.stderr[-500:]
        assert "gotencryptedones:'tokens'" in said
        assert "a.parquet" in said


def test_columns_beside_an_encrypted_one_can_be_read(tmp_path: Path) -> None:
    path = write_encrypted(tmp_path / "a.parquet")
    assert read_all(str(path), columns=("tokens",)).rows == [
        {"tokens": row["tokens"]} for row in ROWS
    ]


def test_a_file_with_an_encrypted_footer_is_named_with_a_remedy(tmp_path: Path) -> None:
    path = write_encrypted(tmp_path / "a.parquet", plaintext_footer=False)
    with pytest.raises(
        SourceError, match="expected a readable footer, got an encrypted one; rewrite the file"
    ):
        build_index("web", str(path))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"row_group_size": 3},
        {"use_dictionary": False, "write_page_index": True},
        {"write_statistics": False},
        {"version": "1.0"},
    ],
)
def test_the_layout_is_what_pyarrow_finds_in_a_valid_file(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    path = write_valid(tmp_path / "a.parquet", **how)
    layout, theirs = parse(footer_of(path.read_bytes())), pq.read_metadata(path)
    assert layout.rows == theirs.num_rows
    assert layout.leaves == [
        theirs.schema.column(j).path.split(".")[0] for j in range(theirs.num_columns)
    ]
    assert layout.encrypted == []
    for g, group in enumerate(layout.groups):
        found = theirs.row_group(g)
        assert (group.rows, group.nbytes) == (found.num_rows, found.total_byte_size)
        for j, column in enumerate(group.columns):
            their = found.column(j)
            start = their.dictionary_page_offset or their.data_page_offset
            assert (column.uncompressed, column.compressed) == (
                their.total_uncompressed_size,
                their.total_compressed_size,
            )
            assert column.start == start


@pytest.mark.parametrize(
    ("footer", "problem"),
    [
        (b"", "expected a complete footer"),
        (b"\x15", "expected a complete footer"),
        (b"\x00", "a number of rows and row groups"),
        (b"\x19\xff\xff\xff\xff\x0f", "a list of"),
        (b"\x16" + b"\xff" * 11 + b"\x01\x00", "a number of rows and row groups"),
        (b"\x36" + b"\xff" * 11 + b"\x01\x00", "expected numbers of at most 64 bits"),
        (b"\x1c" * 100, "expected at most 64 levels in the footer"),
        (b"\x1f\x00", "expected a known type in the footer, got type 15"),
        (b"\x29\x0c\x16\x00\x19\x0c\x00", "expected a schema in the footer, got an empty one"),
        (b"\x29\x15\x00", "expected a list of structs in the footer, got a list of type"),
        (
            b"\x29\x1c\x55\x02\x00\x16\x00\x19\x0c\x00",
            "expected more elements in the schema of the footer, got only 1",
        ),
        (
            b"\x29\x2c\x00\x00\x16\x00\x19\x0c\x00",
            "expected 1 elements in the schema of the footer, got 2",
        ),
        (b"\x29\x2c\x55\x02\x00\x55\x01\x00\x16\x00\x19\x0c\x00", "got -1 children at level"),
        (
            b"\x29\x1c\x00\x16\x02\x19\x0c\x00",
            "expected 1 rows in the row groups of the footer, got 0",
        ),
        (
            b"\x29\x1c\x00\x16\x02\x19\x1c\x36\x01\x00\x00",
            "row group 0 of the footer: .*, got 0 columns, -1 rows",
        ),
    ],
)
def test_a_broken_footer_says_what_is_wrong(footer: bytes, problem: str) -> None:
    with pytest.raises(BrokenFooter, match=problem):
        parse(footer)


def test_a_footer_longer_than_its_file_and_a_file_cut_short_are_named(tmp_path: Path) -> None:
    data = write_valid(tmp_path / "a.parquet").read_bytes()
    path = tmp_path / "b.parquet"
    for bad in (
        data[:-8] + (2**31 - 1).to_bytes(4, "little") + b"PAR1",
        with_footer(data, b"\x00"),
        data[:-1],
    ):
        path.write_bytes(bad)
        with pytest.raises(SourceError, match=r"b\.parquet"):
            build_index("web", str(path))


def test_a_footer_larger_than_the_first_read_is_read_whole(tmp_path: Path) -> None:
    path = write_valid(tmp_path / "a.parquet", row_group_size=1)
    import pyarrow as pa

    wide = pa.Table.from_pylist([{f"column number {k}": k for k in range(400)}] * 3)
    pq.write_table(wide, path, row_group_size=1)
    assert len(footer_of(path.read_bytes())) > 2**16
    assert build_index("web", str(path)).rows == 3
    assert read_all(str(path), columns=("column number 7",)).rows == [{"column number 7": 7}] * 3
