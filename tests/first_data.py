"""Fresh data of every format, as a newcomer may have it, for tests of the first commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests import chats
from tests.corpus import write_megatron, write_rows, write_tar, write_texts
from tests.pictures import jpeg

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "comes",
    "back",
]
IDS = [[(7 * k + j) % 90 + 1 for j in range(3 + 5 * k % 41)] for k in range(48)]


def sentence(k: int) -> str:
    return " ".join(WORDS[(k + j) % len(WORDS)] for j in range(4 + 7 * k % 45))


TEXTS = [sentence(k) for k in range(48)]
CHATS = [
    [{"role": "user", "content": f"2 + {k}?"}, {"role": "assistant", "content": f"{k + 2}"}]
    for k in range(48)
]


def tokenizer(folder: Path, model: str = "qwen") -> str:
    """Write a small chat tokenizer, and return its folder."""
    return chats.write_folder(folder, model)


def images(folder: Path) -> None:
    """Write a tar shard of pictures with captions."""
    folder.mkdir(parents=True)
    members = [
        member
        for k, text in enumerate(TEXTS[:12])
        for member in ((f"{k:04}.jpg", jpeg(60, 80, k)), (f"{k:04}.txt", text.encode()))
    ]
    write_tar(folder / "shard-000.tar", members)


def image_rows(folder: Path) -> None:
    """Write Parquet with the struct of images of Hugging Face."""
    folder.mkdir(parents=True)
    rows = [
        {"text": text, "image": {"bytes": jpeg(60, 80, k), "path": None}}
        for k, text in enumerate(TEXTS[:12])
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")


def rows_of(format: str, key: str, values: list[Any]) -> Callable[[Path], None]:
    return lambda folder: write_rows(folder, format, [{"n": 1, key: v} for v in values]) and None


def texts_of(format: str) -> Callable[[Path], None]:
    return lambda folder: write_texts(folder, format, TEXTS, 2) and None


def megatron(folder: Path) -> None:
    folder.mkdir(parents=True)
    write_megatron(folder / "wiki_text_document.bin", [[ids] for ids in IDS])


# Name -> function that writes the data into a folder.
DATA: dict[str, Callable[[Path], None]] = {
    "parquet": rows_of("parquet", "text", TEXTS),
    "jsonl": rows_of("jsonl", "content", TEXTS),
    "jsonl.gz": rows_of("jsonl.gz", "text", TEXTS),
    "jsonl.zst": rows_of("jsonl.zst", "text", TEXTS),
    "arrow": rows_of("arrow", "text", TEXTS),
    "arrow-stream": rows_of("arrow-stream", "text", TEXTS),
    "tar": rows_of("tar", "txt", TEXTS),
    "mds": rows_of("mds", "text", TEXTS),
    "mds.zstd": rows_of("mds.zstd", "tokens", IDS),
    "megatron": megatron,
    "csv": texts_of("csv"),
    "tsv.gz": texts_of("tsv.gz"),
    "csv.zst": texts_of("csv.zst"),
    "txt": texts_of("lines"),
    "txt.gz": texts_of("lines.gz"),
    "chat parquet": rows_of("parquet", "messages", CHATS),
    "chat jsonl": rows_of("jsonl", "conversations", CHATS),
    "tokens parquet": rows_of("parquet", "input_ids", IDS),
    "tokens jsonl": rows_of("jsonl", "tokens", IDS),
    "images tar": images,
    "images parquet": image_rows,
}


PAIRS = [
    {"prompt": text, "chosen": "yes it does", "rejected": f"no, never {k}"}
    for k, text in enumerate(TEXTS)
]
DATA["pairs jsonl"] = lambda folder: write_rows(folder, "jsonl", PAIRS) and None
DATA["pairs of chats"] = lambda folder: (
    write_rows(
        folder,
        "parquet",
        [{"chosen": c, "rejected": [c[0], {**c[1], "content": "?"}]} for c in CHATS],
    )
    and None
)
DATA["pairs of ids"] = lambda folder: (
    write_rows(folder, "jsonl", [{"chosen": ids, "rejected": [5, *ids]} for ids in IDS]) and None
)


def plain_json(folder: Path) -> None:
    """Write lines of JSON in a file whose name ends in .json, as many datasets have it."""
    folder.mkdir(parents=True)
    (folder / "train.json").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    (folder / "dataset_info.json").write_text("{}")


DATA["plain json"] = plain_json
