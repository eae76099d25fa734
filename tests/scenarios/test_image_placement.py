"""One stream of images, wherever its pixels are made: by loaders, by constructors, in threads or in
processes of their own.
"""

from __future__ import annotations

import io
import json
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ov
from overlord.transforms.image_header import header
from overlord.transforms.image_items import fill, item_shape
from tests.pictures import FILES, jpeg, photo, png, saved

PLACEHOLDER = 900
SPEC = {
    "placeholder": PLACEHOLDER,
    "patch": 7,
    "max_pixels": 14 * 14 * 16,
    "min_pixels": 14 * 14,
    "crop": "random",
    "flip": True,
}


def broken() -> bytes:
    """A PNG whose header is sound and whose pixels are not."""
    data = bytearray(png(40, 60))
    data[len(data) // 2] ^= 0xFF
    return bytes(data)


def rows() -> list[dict[str, Any]]:
    kinds = [
        FILES[n]
        for n in ("jpeg", "png palette", "webp", "jpeg turned 6", "jpeg cmyk", "gif animated")
    ]
    made = []
    for i in range(30):
        images = [
            {"bytes": jpeg(30 + i, 40, seed=i), "path": None},
            {"bytes": kinds[i % 6], "path": "x"},
        ][: i % 3]
        made.append({"id": i, "tokens": [1 + i] * (2 + i % 7), "images": images})
    made[3] = {"id": 3, "tokens": [1], "images": [{"bytes": b"<html>gone</html>", "path": None}]}
    made[7] = {"id": 7, "tokens": [8] * 3, "images": [{"bytes": broken(), "path": None}]}
    return made


def job(folder: Path, place: str, workers: str, **fields: Any) -> ov.Job:
    spec = ov.Images(place=place, **SPEC, **fields)
    source = ov.Source(
        "web", str(folder / "*.parquet"), transforms=[ov.Tokens(), spec], epochs=1, workers=workers
    )
    return ov.Job(
        name="places",
        sources=[source],
        batch=ov.Batch(samples=6, context=64),
        place=ov.ClientPlaceTree(dp=2),
        strategy="vlm_hybrid",
        seed=5,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("images")
    pq.write_table(pa.Table.from_pylist(rows()), made / "a.parquet", row_group_size=11)
    return made


def delivered(run: ov.Job) -> tuple[list[Any], list[tuple[int, str]], Any]:
    """Every array of every rank as bytes, the quarantine, and the figures of the source."""
    arrays = []
    with ov.launch(run, stall_limit_s=30) as session:
        for steps in zip(*(session.client(rank) for rank in range(2)), strict=True):
            for step in steps:
                for part in (*step.encoder, *step):
                    arrays.append(
                        {
                            key: (np.asarray(part[key]).dtype.str, np.asarray(part[key]).tobytes())
                            for key in part
                        }
                    )
        return (
            arrays,
            sorted((q["row"], q["reason"]) for q in session.quarantine()),
            session.metrics()["sources"]["web"],
        )


def test_a_stream_does_not_know_where_its_pixels_are_made(folder: Path) -> None:
    wanted, bad, figures = delivered(job(folder, "constructor", "threads"))
    assert any(len(part["pixel_values"][1]) for part in wanted if "pixel_values" in part)
    assert [row for row, _ in bad] == [3, 7]
    assert "image 0: expected a JPEG, PNG, WebP or GIF file, got markup" in bad[0][1]
    assert "expected a PNG that can be decoded" in bad[1][1]
    assert figures["images"]["bytes_in"] < figures["images"]["bytes_out"]
    for place, workers in (("loader", "threads"), ("auto", "threads"), ("loader", "processes")):
        arrays, reasons, told = delivered(job(folder, place, workers))
        assert arrays == wanted, (place, workers)
        assert reasons == bad, (place, workers)
        assert told["images"] == figures["images"]


def test_every_image_is_delivered_once_and_stands_at_its_placeholders(folder: Path) -> None:
    """Every image of the source, made alone from its file, is found among the pixels of the step;
    its tokens are placeholders.
    """
    spec = ov.Images(**{**SPEC, "crop": None, "flip": False})
    wanted: dict[bytes, int] = {}
    for row in rows():
        for image in row["images"] if row["id"] not in (3, 7) else ():
            item = np.frombuffer(
                spec.plan(header(image["bytes"])).pack() + image["bytes"], np.uint8
            )
            patches, dim, dtype = item_shape(item)
            out = np.empty((patches, dim), dtype)
            fill(item, out)
            wanted[out.tobytes()] = wanted.get(out.tobytes(), 0) + 1
    found: dict[bytes, int] = {}
    run = job(folder, "auto", "threads")
    plain = ov.Source("web", run.sources[0].uri, transforms=[ov.Tokens(), spec], epochs=1)
    with ov.launch(
        ov.Job(name="x", sources=[plain], batch=run.batch, place=run.place, strategy="vlm_hybrid"),
        stall_limit_s=30,
    ) as session:
        for steps in zip(*(session.client(rank) for rank in range(2)), strict=True):
            for step in steps:
                for part in step.encoder:
                    edges = part["image_cu_seqlens"]
                    for a, b in pairwise(edges):
                        pixels = np.ascontiguousarray(part["pixel_values"][a:b])
                        if pixels.any():  # not the one that cannot be decoded
                            found[pixels.tobytes()] = found.get(pixels.tobytes(), 0) + 1
                    lengths, microbatch = part["out_lens"], part["image_microbatch"]
                    index = (
                        np.split(part["image_token_index"], np.cumsum(lengths)[:-1])
                        if len(lengths)
                        else []
                    )
                    for m, where in zip(microbatch, index, strict=True):
                        assert (step[int(m)]["tokens"].reshape(-1)[where] == PLACEHOLDER).all()
    assert found == wanted


def test_images_of_tar_shards_arrive(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for i in range(12):
            members = {
                "json": str([1 + i] * 3).encode(),
                "0.jpg": jpeg(30, 30 + i, seed=i),
                "1.png": saved(photo(20, 20, i), "PNG"),
            }
            for name, data in members.items():
                info = tarfile.TarInfo(f"{i:04d}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    transforms = [ov.Select("json", "images"), ov.Map(read_ids, rows=True), ov.Images(**SPEC)]
    source = ov.Source("web", str(tmp_path / "*.tar"), transforms=transforms, epochs=1)
    run = ov.Job(
        name="tar", sources=[source], batch=ov.Batch(samples=4, context=64), strategy="vlm_hybrid"
    )
    images = 0
    with ov.launch(run, stall_limit_s=30) as session:
        for step in session.client(0):
            images += sum(len(part["grid_thw"]) for part in step.encoder)
        assert session.quarantine() == []
    assert images == 24


def read_ids(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": json.loads(row["json"]), "images": row["images"]}
