"""Transforms of very different cost for benchmarks/autoscale.py: real work on JPEG files.

It is a module, so that loader workers can import it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter

BYTES = 400_000  # bytes that ``hashed`` processes per row, in rounds over its file
PATCH = 32  # pixels of a patch: each becomes one token, its mean brightness


def _tokens(image: Image.Image) -> list[int]:
    """Return one number per patch, at most 256, as the input of a model."""
    side = max(PATCH, int(np.sqrt(image.width * image.height / 256)))
    small = image.convert("L").resize(
        (max(1, image.width // side), max(1, image.height // side)), Image.Resampling.BOX
    )
    return (1 + np.asarray(small, np.int32).reshape(-1)).tolist()


def decoded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Decode an image, without further work."""
    with Image.open(io.BytesIO(row["image"])) as image:
        return {"tokens": _tokens(image.convert("RGB"))}


def augmented(row: Mapping[str, Any]) -> dict[str, Any]:
    """Decode, then turn, blur, sharpen and recolour, as training on images does.

    The result is the same for the same row.
    """
    with Image.open(io.BytesIO(row["image"])) as opened:
        image = opened.convert("RGB")
    angle = 5 + row["n"] % 20
    image = (
        image.rotate(angle, Image.Resampling.BICUBIC)
        .filter(ImageFilter.GaussianBlur(1.5))
        .filter(ImageFilter.UnsharpMask(2))
    )
    for enhance in (ImageEnhance.Color, ImageEnhance.Contrast, ImageEnhance.Brightness):
        image = enhance(image).enhance(0.8 + (row["n"] % 5) / 10)
    return {"tokens": _tokens(image)}


def hashed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Hash the bytes of a file in plain Python, which holds the interpreter lock all the time."""
    found, image = 1, row["image"]
    for _ in range(max(1, BYTES // len(image))):
        for byte in image:
            found = (31 * found + byte) % 1_000_003
    return {"tokens": [1 + found % 255, 1 + found // 255 % 255] * 64}


def write_jpegs(path: str, rows: int, side: int, seed: int, per_chunk: int = 4) -> None:
    """Write a Parquet file of noise images that are as smooth as photographs.

    Row groups are the chunks that are assigned to loaders.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng, images = np.random.default_rng(seed), []
    for _ in range(rows):
        coarse = rng.integers(0, 255, (16, 16, 3), np.uint8)
        out = io.BytesIO()
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(
            out, "JPEG", quality=90
        )
        images.append(out.getvalue())
    pq.write_table(
        pa.table({"n": np.arange(rows), "image": images}), path, row_group_size=per_chunk
    )


def write_texts(
    path: str, tokenizer: str, rows: int, words: int, seed: int, per_chunk: int = 64
) -> None:
    """Write documents of about equal length, and a tokenizer trained on them."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    rng = np.random.default_rng(seed)
    known = [
        "".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(2, 10))) for _ in range(3000)
    ]
    ranks = np.minimum(rng.zipf(1.3, (rows, words)), len(known)) - 1
    texts = [" ".join(known[k] for k in row) for row in ranks]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.train_from_iterator(texts[:400], trainers.BpeTrainer(vocab_size=2000, show_progress=False))
    made.save(tokenizer)
    pq.write_table(pa.table({"n": np.arange(rows), "text": texts}), path, row_group_size=per_chunk)
