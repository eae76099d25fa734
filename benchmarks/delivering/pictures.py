"""Image-text sources: JPEGs of about 500 x 400 pixels and their captions in Parquet.

They are written once, from a seed, and reused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from corpus import Words

VERSION = 1  # raise it when anything below changes what is written
ROWS, GROUP_ROWS = 400, 100  # of a source
WIDTH, HEIGHT, SIGMA = 500, 400, 0.25  # median sides in pixels, log-normal
QUALITY = 85
CAPTION_WORDS = 14  # median


@dataclass(frozen=True, slots=True)
class Pictures:
    """Sources of equal weight, each with one file."""

    folder: Path
    files: tuple[str, ...]
    rows: int
    image_bytes: int  # of all images
    pixels: int


def make_pictures(
    root: Path, n_sources: int, seed: int, on_progress: Callable[[int, int], None], rows: int = ROWS
) -> Pictures:
    """Return n sources; reuse those of an earlier run, since source i does not depend on n."""
    folder = root / f"pictures-v{VERSION}-seed{seed}-{rows}"
    folder.mkdir(parents=True, exist_ok=True)
    words: Words | None = None
    for number in range(n_sources):
        if not (folder / f"pictures{number}.json").exists():
            words = words or Words.invent(seed)
            _write(folder, number, seed, words, rows)
        on_progress(number + 1, n_sources)
    return open_pictures(folder, n_sources)


def open_pictures(folder: Path, n_sources: int) -> Pictures:
    notes = [json.loads((folder / f"pictures{i}.json").read_text()) for i in range(n_sources)]
    files = tuple(str(folder / f"pictures{i}.parquet") for i in range(n_sources))
    return Pictures(
        folder,
        files,
        *(sum(note[key] for note in notes) for key in ("rows", "image_bytes", "pixels")),
    )


def _write(folder: Path, number: int, seed: int, words: Words, rows: int) -> None:
    """Write the file, then the note that it is complete."""
    import simplejpeg

    rng = np.random.default_rng([seed, 23, number])
    images, pixels = [], 0
    for _ in range(rows):
        image = picture(rng)
        pixels += image.shape[0] * image.shape[1]
        images.append(simplejpeg.encode_jpeg(image, quality=QUALITY, colorsubsampling="420"))
    lengths = np.clip(rng.lognormal(np.log(CAPTION_WORDS), 0.6, rows), 3, 200).astype(np.int64)
    ends = np.cumsum(lengths)
    drawn = words.draw(rng, int(ends[-1]), shift=number * 97)
    text, stops = words.spell(rng, drawn, ends)
    captions = pa.StringArray.from_buffers(
        rows, pa.py_buffer(np.concatenate([[0], stops]).astype(np.int32)), pa.py_buffer(text)
    )
    ids = pa.ListArray.from_arrays(
        pa.array(np.concatenate([[0], ends]).astype(np.int32)), pa.array(drawn.astype(np.int32))
    )
    table = pa.table({"image": pa.array(images, pa.binary()), "text": captions, "tokens": ids})
    pq.write_table(
        table, folder / f"pictures{number}.parquet", row_group_size=GROUP_ROWS, compression="none"
    )
    part = folder / f"pictures{number}.part"
    part.write_text(
        json.dumps({"rows": rows, "image_bytes": sum(map(len, images)), "pixels": pixels})
    )
    os.replace(part, folder / f"pictures{number}.json")


def picture(rng: np.random.Generator) -> np.ndarray:
    """Return an image with shapes, edges and grain.

    Its JPEG is about as large as that of a photograph.
    """
    width, height = (
        int(np.clip(side * rng.lognormal(0, SIGMA), 64, 1600)) for side in (WIDTH, HEIGHT)
    )
    out = np.zeros((height, width, 3), np.float32)
    for cells, weight in (
        (4, 60.0),
        (12, 30.0),
        (48, 14.0),
        (160, 7.0),
    ):  # finer and fainter, as in photographs
        coarse = rng.standard_normal((cells, cells, 3), np.float32)
        y, x = np.arange(height) * cells // height, np.arange(width) * cells // width
        out += weight * coarse[y][:, x]
    out += 128.0 + 4.0 * rng.standard_normal((height, width, 1), np.float32)
    return np.ascontiguousarray(out.clip(0, 255).astype(np.uint8))
