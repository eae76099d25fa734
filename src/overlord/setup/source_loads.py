"""Estimated load of a source (seconds and bytes per row) from its index and transforms, before
anything is measured.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from overlord.scaling.loader_placement import SourceLoad

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    from overlord.job.job import Source
    from overlord.sources.index import Index
    from overlord.transforms.pipeline import Pipeline


def load_of(
    source: Source,
    pipeline: Pipeline,
    index: Index,
    share: float,
    *,
    shuffle_chunks: int = 8,
    slice_rows: int = 256,
) -> SourceLoad:
    """A source's load from its index alone. Rough: it assumes that rows are alike, that all their
    bytes are text where they are tokenized, and that compressed lines are a third of what they
    hold; a row is 2 kB where only reading tells how many there are.

    Windows take one slice of each chunk of a group, and loaders own whole chunks: more loaders than
    a group has chunks would wait.
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
    """Bytes of a source in memory, and of a row of it."""
    held = max(index.nbytes, int(index.chunks.nbytes.clip(0).sum()))
    if any(f.path.endswith((".gz", ".zst")) for f in index.files):
        held = 3 * index.nbytes
    return held, held / index.rows if index.rows and held else ROW_BYTES


def row_tokens(index: Index) -> float:
    """Tokens of a row, where nobody has looked: four bytes each, of text and of ids alike."""
    return max(1.0, _held(index)[1] / 4)


# One core, roughly: what matters is that tokenizing costs a hundred times what reading does, not
# the third digit.
READ_S = 4e-9  # per byte in memory, of a columnar file


PARSE_S = 2e-8  # per byte of text lines or tar members, decompressed


TOKENIZE_S = 4e-7  # per byte of text: 2.45 MB per CPU second


CODE_S = 2e-5  # per row and transform of the user's


HEAVY_ROW_S = (
    1e-4  # a row that costs less never needs a second process: ten thousand a second come from one
)


ROW_BYTES = 2048  # of a row, where nobody knows how many rows there are


OWN_CODE = ("dataset", "factory")  # formats whose rows come from objects of the user's


HANDLES = 3 * 2**20  # bytes of an active source besides its rows: footers, handles, codecs
