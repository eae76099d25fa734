"""Estimated load of a source (seconds and bytes of a row) from its index and transforms, before
anything is measured.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from overlord.scaling.loader_placement import SourceLoad

if TYPE_CHECKING:
    from overlord.job.job import Source
    from overlord.sources.index import Index
    from overlord.transforms.pipeline import Pipeline


# Rough costs on one core. Tokenizing costs a hundred times what reading does; the third digit does
# not matter.
READ_S = 4e-9  # of a byte in memory, in a columnar file
PARSE_S = 2e-8  # of a byte of text lines or tar members, decompressed
TOKENIZE_S = 4e-7  # of a byte of text: 2.45 MB in a CPU second
CODE_S = 2e-5  # of a row, for each transform with user code
# A cheaper row never needs a second process: ten thousand a second come from one.
HEAVY_ROW_S = 1e-4
ROW_BYTES = 2048  # of a row, where the number of rows is unknown
OWN_CODE = ("dataset", "factory")  # formats whose rows come from objects of the user
HANDLES = 3 * 2**20  # bytes of an active source besides its rows: footers, handles, codecs


def load_of(
    source: Source,
    pipeline: Pipeline,
    index: Index,
    share: float,
    *,
    shuffle_chunks: int = 8,
    slice_rows: int = 256,
) -> SourceLoad:
    """Return a source's load, estimated from its index alone.

    The estimate is rough. It assumes that rows are alike and that all bytes of tokenized rows are
    text. Compressed lines are taken as a third of their content. A row is taken as 2 kB where only
    reading can count the rows. Windows take one slice of each chunk of a group, and loaders own
    whole chunks: more loaders than a group has chunks would wait.
    """
    held, row_bytes = _held(index)
    kinds, code = (
        [t.kind for t in pipeline.transforms],
        sum(t.user_code for t in pipeline.transforms),
    )
    read_s = row_bytes * (READ_S if index.format in ("parquet", "arrow") else PARSE_S)
    encode_s = row_bytes * TOKENIZE_S * kinds.count("tokenize")
    seconds = read_s + encode_s + CODE_S * code
    open_chunks = min(shuffle_chunks if source.shuffle else 1, len(index.chunks))
    may_be_heavy = seconds >= HEAVY_ROW_S or code or "tokenize" in kinds
    rows_of_code = index.format in OWN_CODE
    window = open_chunks * slice_rows * row_bytes
    return SourceLoad(
        name=source.name,
        share=share,
        cost=share * seconds,
        memory=int(HANDLES + min(2 * window, held or 2 * window)),
        max_loaders=max(1, open_chunks),
        shares=max(1, open_chunks) if may_be_heavy else 1,
        free_s=encode_s + (0.0 if rows_of_code else read_s) if code or rows_of_code else math.inf,
    )


def _held(index: Index) -> tuple[int, float]:
    """Return the bytes of a source in memory, and those of one row."""
    held = max(index.nbytes, int(index.chunks.nbytes.clip(0).sum()))
    if any(f.path.endswith((".gz", ".zst")) for f in index.files):
        held = 3 * index.nbytes
    return held, held / index.rows if index.rows and held else ROW_BYTES


def row_tokens(index: Index) -> float:
    """Return the estimated tokens of a row: four bytes each, of text and of ids alike."""
    return max(1.0, _held(index)[1] / 4)
