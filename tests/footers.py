"""Footers of Parquet files, valid and hostile; as a program, what the reader makes of each:
``python -m tests.footers FOLDER``.

Old readers died of some of them (SIGABRT inside pyarrow), so tests look at them in a process of its
own.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from overlord.errors import SourceError
from overlord.sources.index import build_index
from tests.source_reads import read_all

ROWS = [{"tokens": list(range(i % 5)), "text": f"row {i}", "s": {"a": i}} for i in range(20)]
OTHERS = 300  # footers with bytes cut out, and as many with bytes put in


def write_valid(path: Path, **how: Any) -> Path:
    """Write a file of several row groups and nested columns."""
    pq.write_table(pa.Table.from_pylist(ROWS), path, **{"row_group_size": 10, **how})
    return path


def write_encrypted(path: Path, column: str = "text", *, plaintext_footer: bool = True) -> Path:
    """Write a valid file of which one column is encrypted, with a footer that anybody can read, or
    nobody.
    """
    from pyarrow.parquet import encryption as pe

    class Keys(pe.KmsClient):  # type: ignore[misc]
        def __init__(self, _: Any) -> None:
            super().__init__()

        def wrap_key(self, key: bytes, _: str) -> bytes:
            return base64.b64encode(key)

        def unwrap_key(self, key: bytes, _: str) -> bytes:
            return base64.b64decode(key)

    how = pe.EncryptionConfiguration(
        footer_key="footer", column_keys={"column": [column]}, plaintext_footer=plaintext_footer
    )
    properties = pe.CryptoFactory(Keys).file_encryption_properties(pe.KmsConnectionConfig(), how)
    table = pa.Table.from_pylist(ROWS)
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as out:
        out.write_table(table)
    return path


def footer_of(data: bytes) -> bytes:
    """Return the bytes of the footer."""
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


def with_footer(data: bytes, footer: bytes) -> bytes:
    """Return the file with another footer."""
    return (
        data[: -8 - len(footer_of(data))] + footer + len(footer).to_bytes(4, "little") + data[-4:]
    )


def mutated(data: bytes) -> Iterator[bytes]:
    """Yield the file with one bit flipped in each byte of its footer, and with bytes of its footer
    cut out or put in.
    """
    footer, rng = footer_of(data), random.Random(7)
    for at in range(len(footer)):
        yield with_footer(
            data, footer[:at] + bytes([footer[at] ^ 1 << rng.randrange(8)]) + footer[at + 1 :]
        )
    for _ in range(OTHERS):
        a, n, b = rng.randrange(len(footer)), rng.choice([1, 2, 9]), rng.randrange(len(footer))
        yield with_footer(data, footer[:a] + footer[a + n :])
        yield with_footer(data, footer[:a] + footer[b : b + n] + footer[a:])


def main(folder: Path) -> None:
    """Read every mutated file, and print how many were read and how many were refused; anything
    else ends the program.
    """
    path, found = folder / "mutated.parquet", Counter[str]()
    valid = write_valid(folder / "valid.parquet", store_schema=False).read_bytes()
    for data in mutated(valid):
        path.write_bytes(data)
        try:
            build_index("s", str(path))
        except SourceError as error:
            found["refused" if str(path) in str(error) else "refused without a name"] += 1
            continue
        try:
            read_all(str(path))
            found["read"] += 1
        except SourceError:
            found["refused later"] += 1
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
