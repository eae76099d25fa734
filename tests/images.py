"""Small sources with images, written as files: JPEG and PNG in Parquet and tar, some of them broken
after their header.
"""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

import overlord as ov

PLACEHOLDER = 7
IMAGES = {
    "placeholder": PLACEHOLDER,
    "patch": 8,
    "merge": 2,
    "min_pixels": 16 * 16,
    "max_pixels": 48 * 48,
}


def picture(seed: int, kind: str = "JPEG", *, broken: bool = False) -> bytes:
    """Return an image of some size. With ``broken`` its header and its end are fine, and most of
    its body is missing.
    """
    rng = np.random.default_rng(seed)
    width, height = (int(n) for n in rng.integers(20, 90, 2))
    low = rng.integers(0, 256, (6, 6, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(low).resize((width, height), Image.Resampling.BICUBIC).save(out, kind)
    made = out.getvalue()
    if broken:
        scan = made.rindex(b"\xff\xda") + 14  # after the header of a JPEG's pixels
        made = made[: scan + (len(made) - scan) // 3] + made[-2:]
    return made


def tokens(seed: int, n: int) -> list[int]:
    return np.random.default_rng([seed, n]).integers(100, 1000, n).tolist()


def parquet(folder: Path, rows: int, *, first: int = 0, broken: tuple[int, ...] = ()) -> str:
    """Write rows of none to three JPEGs; the first JPEG of the ``broken`` rows is truncated."""
    folder.mkdir(parents=True, exist_ok=True)
    table: dict[str, list[Any]] = {"tokens": [], "images": []}
    for i in range(first, first + rows):
        table["tokens"].append(tokens(i, 3 + i % 17))
        n = max(1, i % 4) if i - first in broken else i % 4
        table["images"].append(
            [picture(10 * i + k, broken=i - first in broken and k == 0) for k in range(n)]
        )
    schema = pa.schema([("tokens", pa.list_(pa.int32())), ("images", pa.list_(pa.binary()))])
    half = -(-rows // 2)
    for k in range(2):
        part = {name: column[k * half : (k + 1) * half] for name, column in table.items()}
        pq.write_table(pa.table(part, schema), folder / f"{k}.parquet", row_group_size=8)
    return str(folder / "*.parquet")


def tar(folder: Path, rows: int, *, first: int = 0) -> str:
    """Write samples of a PNG and its text, in two shards."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as out:
            for i in range(first + shard, first + rows, 2):
                for name, data in (
                    (f"{i:05}.png", picture(i, "PNG")),
                    (f"{i:05}.json", json.dumps(tokens(i, 2 + i % 9)).encode()),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    out.addfile(member, io.BytesIO(data))
    return str(folder / "*.tar")


def ids_of(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": json.loads(row["json"]), "png": row["png"]}


def text(folder: Path, rows: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"tokens": [tokens(7000 + i, 5 + i % 30) for i in range(rows)]}),
        folder / "text.parquet",
        row_group_size=16,
    )
    return str(folder / "text.parquet")


def sources(
    folder: Path, *, broken: tuple[int, ...] = (), epochs: int | None = None, **images: Any
) -> list[ov.Source]:
    """Return sources: photos with several images a sample, drawings with one, and text."""
    how = IMAGES | images
    return [
        ov.Source(
            "photos",
            parquet(folder / "photos", 48, broken=broken),
            transforms=[ov.Tokens(), ov.Images("images", **how)],
            epochs=epochs,
        ),
        ov.Source(
            "drawings",
            tar(folder / "drawings", 30, first=900),
            transforms=[ov.Map(ids_of, rows=True), ov.Tokens(), ov.Images("png", **how)],
            epochs=epochs,
        ),
        ov.Source("text", text(folder / "text", 64), transforms=[ov.Tokens()], epochs=epochs),
    ]


def job(
    folder: Path,
    *,
    broken: tuple[int, ...] = (),
    images: dict[str, Any] | None = None,
    epochs: int | None = None,
    **fields: Any,
) -> ov.Job:
    usual: dict[str, Any] = {
        "name": "pictures",
        "sources": sources(folder, broken=broken, epochs=epochs, **(images or {})),
        "seed": 5,
        "until": 6,
        "batch": ov.Batch(samples=12, context=64, microbatches=2),
        "place": ov.ClientPlaceTree(dp=2),
        "strategy": "vlm_hybrid",
        "slice_rows": 8,
        "shuffle_chunks": 2,
    }
    return ov.Job(**{**usual, **fields})
