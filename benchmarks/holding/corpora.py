"""Sources as in corpus.py, some of them with row groups of 16 MB and more.

The memory of current loaders depends on the row group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from corpus import FILES, GROUPS_PER_FILE, draw_lengths, make_corpus, name_of

VERSION = 1
LARGE_EVERY, LARGE_AT = 20, 3  # source 3, 23, 43, ...
GROUP_IDS = 4_400_000  # token ids of a large row group: 17 MB in memory


def is_large(number: int) -> bool:
    return number % LARGE_EVERY == LARGE_AT


def mixed_corpus(
    root: Path, n_sources: int, seed: int, on_progress: Callable[[str, int, int], None]
) -> Path:
    """Return a folder for ``corpus.open_corpus``: links to the usual sources, and large sources."""
    usual = make_corpus(root, n_sources, seed, on_progress)
    folder = root / f"mixed-v{VERSION}-seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(n_sources):
        at = folder / name_of(number)
        if is_large(number):
            if not (at / "done.json").exists():
                on_progress("large sources", number, n_sources)
                _write_large(at, number, seed)
        elif not at.exists():
            at.symlink_to(usual.folder / name_of(number))
    if not (folder / "tokenizer.json").exists():
        (folder / "tokenizer.json").symlink_to(usual.tokenizer)
    on_progress("large sources", n_sources, n_sources)
    return folder


def _write_large(folder: Path, number: int, seed: int) -> None:
    """Write token ids only, in as many files and row groups as the other sources have."""
    folder.mkdir(exist_ok=True)
    rng, rows, words = np.random.default_rng([seed, 13, number]), 0, 0
    for f in range(FILES):
        with pq.ParquetWriter(
            folder / f"part{f}.parquet",
            pa.schema({"tokens": pa.list_(pa.int32())}),
            use_dictionary=False,
        ) as writer:
            for _ in range(GROUPS_PER_FILE):
                lengths = draw_lengths(rng, GROUP_IDS)
                offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
                ids = rng.integers(0, 40_000, offsets[-1], dtype=np.int32)
                table = pa.table(
                    {"tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))}
                )
                writer.write_table(table, row_group_size=len(table))
                rows, words = rows + len(table), words + int(offsets[-1])
    part = folder / "done.part"
    part.write_text(
        json.dumps(
            {
                "files": [f"part{f}.parquet" for f in range(FILES)],
                "rows": rows,
                "words": words,
                "version": VERSION,
            }
        )
    )
    os.replace(part, folder / "done.json")
