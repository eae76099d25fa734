"""Write the small files of ``tests/data`` with the libraries that define their formats.

    python tests/data/write_formats.py megatron    # needs torch and megatron-core
    python tests/data/write_formats.py mds         # needs a Streaming package: see its function

The libraries are too large for ``make test``. Where one is installed, the tests write new files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent


def ids_of(k: int, high: int) -> list[int]:
    """Token ids of document k, by whole-number arithmetic: the same everywhere."""
    return [(k * 7919 + j * 104729) % high for j in range(1 + k * 5 % 11)]


def write_megatron(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Write datasets with ``IndexedDatasetBuilder``; return their rows by name."""
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    folder.mkdir(parents=True, exist_ok=True)

    def build(
        name: str, documents: list[list[list[int]]], dtype: Any, modes: Any = None, **kw: Any
    ) -> list[dict[str, Any]]:
        builder = IndexedDatasetBuilder(
            str(folder / f"{name}.bin"), dtype=dtype, multimodal=modes is not None
        )
        rows, at = [], 0
        for document in documents:
            lengths = [len(s) for s in document]
            flat = [i for s in document for i in s]
            row: dict[str, Any] = {"tokens": flat, "lengths": lengths}
            if modes is not None:
                row["modes"] = modes[at : at + len(document)]
                builder.add_document(torch.tensor(flat), lengths, row["modes"])
            else:
                builder.add_document(torch.tensor(flat), lengths)
            rows.append(row)
            at += len(document)
        builder.finalize(str(folder / f"{name}.idx"))
        return rows

    one = [[ids_of(k, 60_000)] for k in range(20)]
    many = [[ids_of(k + j, 60_000) for j in range(k % 4)] for k in range(12)]
    rows = {
        "text": build("text", one, DType.optimal_dtype(65_000)),
        "int32": build("int32", [[ids_of(k, 2**31 - 1)] for k in range(20)], np.int32),
        "sentences": build("sentences", many, DType.optimal_dtype(60_000)),
        "multimodal": build(
            "multimodal", many, np.int32, [k % 3 for k in range(sum(map(len, many)))]
        ),
    }
    merged = IndexedDatasetBuilder(str(folder / "merged.bin"), dtype=np.uint16)
    for name in ("sentences", "text"):
        merged.add_index(str(folder / name))
    merged.finalize(str(folder / "merged.idx"))
    rows["merged"] = rows["sentences"] + rows["text"]
    return rows


if __name__ == "__main__":
    if sys.argv[1:] == ["megatron"]:
        for name, rows in write_megatron(HERE / "megatron").items():
            (HERE / "megatron" / f"{name}.json").write_text(json.dumps(rows))
