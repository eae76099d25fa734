"""Write the small files of ``tests/data`` with the libraries that define their formats.

    python tests/data/write_formats.py megatron      # needs torch and megatron-core
    python tests/data/write_formats.py mds mosaicml  # needs mosaicml-streaming
    python tests/data/write_formats.py mds community # needs streaming-community

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


COMPRESSIONS = ("zstd", "zstd:7", "gz", "gz:9", "br", "br:5", "bz2", "bz2:1", "snappy")
ENCODINGS = {
    "bytes": "bytes",
    "str": "str",
    "json": "json",
    "int": "int",
    **{name: name for name in ("uint8", "uint16", "uint32", "uint64")},
    **{name: name for name in ("int8", "int16", "int32", "int64")},
    **{name: name for name in ("float16", "float32", "float64")},
    "str_int": "str_int",
    "str_float": "str_float",
    "str_decimal": "str_decimal",
    "array": "ndarray",
    "array_type": "ndarray:int32",
    "array_shape": "ndarray:int16:2,3",
    "array_grid": "ndarray:float32",
    "pil": "pil",
    "jpeg": "jpeg",
    "png": "png",
    "jpeg_array": "jpeg_array",
    "list_pil": "list[pil]",
    "list_jpeg": "list[jpeg]",
    "list_png": "list[png]",
}


def mds_sample(k: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return sample k as MDSWriter takes it, and as a reader returns it."""
    from decimal import Decimal
    from io import BytesIO

    from PIL import Image

    def image(mode: str, j: int = 0) -> Any:
        size = (3 + k % 3, 2 + j)
        return Image.frombytes(mode, size, bytes((k + i) % 256 for i in range(_pixels(mode, size))))

    def file(made: Any, format: str) -> bytes:
        made.save(out := BytesIO(), format=format)
        return out.getvalue()

    mode = ("L", "RGB", "RGBA", "LA", "1")[k % 5]
    plain: dict[str, Any] = {
        "bytes": bytes(range(k % 7)),
        "str": "é" * (k % 4) + f"text {k}",
        "json": [{"a": k}, [1, None, "x"], k / 2, {}][k % 4],
        "int": -k,
        **dict.fromkeys(("uint8", "uint16", "uint32"), k),
        "uint64": 2**64 - 1 - k,
        **dict.fromkeys(("int8", "int16", "int32", "int64"), -k),
        **dict.fromkeys(("float16", "float32", "float64"), k / 4),
        "str_int": 10**15 + k,
        "str_float": k / 3,
    }
    kinds = ("<i4", "<u2", "<f8", "<i8")
    arrays = {
        "array": np.arange(1 + k % 300, dtype=kinds[k % 4]),
        "array_type": np.arange(1 + 40 * k, dtype="<i4") - k,
        "array_shape": np.arange(6, dtype="<i2").reshape(2, 3) * k,
        "array_grid": np.arange(2 + 2 * k, dtype="<f4").reshape(2, 1 + k),
    }
    images = [image(mode, j) for j in range(k % 3)]
    colour = [image("RGB", j) for j in range(k % 3)]
    files = {
        "jpeg": file(image("RGB"), "JPEG"),
        "png": file(image(mode), "PNG"),
        "jpeg_array": [file(i, "JPEG") for i in (image("RGB"), image("L"))],
        "list_jpeg": [file(i, "JPEG") for i in colour],
        "list_png": [file(i, "PNG") for i in images],
    }
    decimal = Decimal(k) / Decimal(7)
    given = {
        **plain,
        **arrays,
        "str_decimal": decimal,
        "pil": image(mode),
        "jpeg": image("RGB"),
        "png": image(mode),
        "jpeg_array": files["jpeg_array"],
        "list_pil": images,
        "list_jpeg": colour,
        "list_png": images,
    }
    read = {
        **plain,
        **{name: array.tolist() for name, array in arrays.items()},
        "str_decimal": decimal,
        "pil": (mode, image(mode).size, image(mode).tobytes()),
        **files,
        "list_pil": [(mode, i.size, i.tobytes()) for i in images],
    }
    return given, read


def _pixels(mode: str, size: tuple[int, int]) -> int:
    width, height = size
    line = (width + 7) // 8 if mode == "1" else width * len(mode)
    return line * height


def write_mds(folder: Path) -> None:
    """Write datasets with ``MDSWriter``: every encoding, every compression, a merged index.

    Streaming imports torchvision and transformers, which are not needed to write: empty modules
    of these names do.
    """
    from streaming import MDSWriter
    from streaming.base.util import merge_index

    def write(name: str, columns: dict[str, str], samples: list[dict[str, Any]], **kw: Any) -> None:
        with MDSWriter(out=str(folder / name), columns=columns, **kw) as out:
            for sample in samples:
                out.write(sample)

    every = [mds_sample(k)[0] for k in range(12)]
    write("encodings", ENCODINGS, every, size_limit=8000, hashes=["sha1", "xxh64"])
    for compression in COMPRESSIONS:
        write(
            compression.replace(":", "-"), MDS_TEXT, TEXTS, compression=compression, size_limit=900
        )
    write("plain", MDS_TEXT, TEXTS, size_limit=900)
    write("one", MDS_TEXT, TEXTS[:1])
    for part in ("part1", "part0"):  # the index has them in this order, not by name
        write(
            f"merged/{part}", MDS_TEXT, TEXTS[:5] if part == "part1" else TEXTS[5:], size_limit=400
        )
    merge_index(
        [str(folder / "merged" / part / "index.json") for part in ("part1", "part0")],
        str(folder / "merged"),
    )


MDS_TEXT = {"n": "int", "text": "str", "tokens": "ndarray:int32"}
TEXTS = [
    {"n": k, "text": f"text {k}", "tokens": np.array(ids_of(k, 60_000), "<i4")} for k in range(12)
]


if __name__ == "__main__":
    if sys.argv[1:] == ["megatron"]:
        for name, rows in write_megatron(HERE / "megatron").items():
            (HERE / "megatron" / f"{name}.json").write_text(json.dumps(rows))
    elif sys.argv[1:2] == ["mds"]:
        write_mds(HERE / "mds" / sys.argv[2])
    else:
        sys.exit(__doc__)
