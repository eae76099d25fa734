"""Small random jobs over real files, on which the properties of the stream are tested."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import overlord as ov
from overlord.job.job import ON_LONG
from tests.corpus import FORMATS, INDEXED_FORMATS, JSON_TEXTS, TOKEN_FORMATS, write_rows

EVERY_FORMAT = (*FORMATS, *INDEXED_FORMATS, *TOKEN_FORMATS, "dataset", "factory")


def some_steps(n: int, seed: int, most: int = 10) -> list[int]:
    """Return all of n steps, or if they are many the first, the last and some in between.

    A test that restores at each of n steps takes n * n steps.
    """
    return (
        list(range(n))
        if n <= most
        else sorted({0, n - 1, *random.Random(seed).sample(range(n), most - 2)})
    )


def decode(row: dict[str, Any]) -> dict[str, Any]:
    """Decode a row of a tar, whose members are bytes: token ids and images are JSON there."""
    lists = {name: row[name] for name in ("tokens", "image_patches") if name in row}
    lists = {
        name: json.loads(value) if isinstance(value, (bytes, str)) else value
        for name, value in lists.items()
    }
    return {**row, **lists, "n": int(row["n"])}


def parse(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row that a text holds as JSON."""
    return dict(json.loads(row["text"]))


def number(row: dict[str, Any]) -> dict[str, Any]:
    """Number a row of a format that holds token ids alone, by these."""
    return {**row, "n": sum(row["tokens"])}


def even(columns: dict[str, Any]) -> list[bool]:
    return [int(n) % 2 == 0 for n in columns["n"]]


def only_odd(row: dict[str, Any]) -> bool:
    return row["n"] % 3 != 1


def picky(row: dict[str, Any]) -> dict[str, Any]:
    """Fail on some rows, always the same ones."""
    if row["n"] % 7 == 3:
        raise ValueError(f"row {row['n']} is not to my liking")
    return row


class Rows:
    """A map-style dataset."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.rows[i]


class Shard:
    """The function of a factory: it returns the rows of a shard, the same every time."""

    def __init__(self, rows: list[dict[str, Any]], shards: int):
        self.rows, self.shards = rows, shards

    def __call__(self, shard: int) -> Any:
        return iter(self.rows[shard :: self.shards])


@dataclass(frozen=True)
class World:
    """The description of a job and its files; Hypothesis shrinks and prints it."""

    seed: int
    # format, rows, files, weight, epochs, shuffle, extra
    sources: tuple[tuple[str, int, int, float, int | None, bool, str], ...]
    fields: tuple[tuple[str, Any], ...]
    batch: tuple[tuple[str, Any], ...]
    dp: int

    def job(self, directory: str | Path, **changes: Any) -> ov.Job:
        sources = [self._source(Path(directory), i, *spec) for i, spec in enumerate(self.sources)]
        settings = {
            "name": "world",
            "sources": sources,
            "batch": ov.Batch(**dict(self.batch)),
            "place": ov.ClientPlaceTree(dp=self.dp),
            "seed": self.seed,
            **dict(self.fields),
        }
        return ov.Job(**{**settings, **changes})

    def _source(
        self,
        directory: Path,
        i: int,
        format: str,
        n: int,
        files: int,
        weight: float,
        epochs: int | None,
        shuffle: bool,
        extra: str,
    ) -> ov.Source:
        rng = random.Random(f"{self.seed}/{i}")
        rows = [
            {"n": k, "tokens": [rng.randrange(500) for _ in range(rng.choice((1, 3, 8, 20, 45)))]}
            for k in range(n)
        ]
        if extra == "empty":
            for k in range(0, n, 5):
                rows[k]["tokens"] = []
        if extra == "images":
            for k in range(n):
                rows[k]["image_patches"] = (
                    [-1]
                    if k % 7 == 5
                    else [4, None]
                    if k % 11 == 3
                    else [rng.randrange(30) for _ in range(k % 4)]
                )
        transforms: list[Any] = [ov.Map(decode, rows=True)] if format == "tar" else []
        if format in JSON_TEXTS:
            transforms = [ov.Map(parse, rows=True)]
        if format in TOKEN_FORMATS:
            extra = "" if extra == "images" else extra
            transforms += [ov.Map(number, rows=True)] if extra in ("even", "odd", "picky") else []
        transforms += {
            "even": [ov.Filter(even)],
            "odd": [ov.Filter(only_odd, rows=True)],
            "picky": [ov.Map(picky, rows=True)],
        }.get(extra, [])
        transforms += [
            ov.Tokens("tokens"),
            *([ov.Meta("image_patches", "image_patches")] if extra == "images" else []),
        ]
        path: Any
        if format == "dataset":
            path = Rows(rows)
        elif format == "factory":
            path = ov.Factory(
                Shard(rows, files), shards=files, fingerprint=f"world {self.seed} {i}"
            )
        else:
            path = write_rows(
                directory / f"s{i}", format, rows, files=files, row_group_size=7, batch_rows=5
            )
        return ov.Source(
            f"s{i}",
            path,
            format=format.partition(".")[0] if format in JSON_TEXTS else None,
            transforms=transforms,
            weight=weight,
            epochs=epochs,
            shuffle=shuffle,
        )


@st.composite
def worlds(
    draw: st.DrawFn,
    *,
    formats: tuple[str, ...] = EVERY_FORMAT,
    endless: bool = True,
    batches: str = "both",
) -> World:
    n = draw(st.integers(1, 4))
    epochs = st.sampled_from((1, 2, 3, None) if endless else (1, 2, 3))
    sources = tuple(
        (
            draw(st.sampled_from(formats)),
            draw(st.integers(4, 40)),
            draw(st.integers(1, 3)),
            draw(st.sampled_from((0.1, 0.25, 1.0, 3.0))),
            draw(epochs),
            draw(st.booleans()) or draw(st.booleans()),
            draw(st.sampled_from(("", "", "even", "odd", "picky", "empty", "images"))),
        )
        for _ in range(n)
    )
    until: Any = draw(st.sampled_from(("all", "first", 5)))
    if until != 5 and any(s[4] is None for s in sources):
        until = 7
    fields = (
        ("until", until),
        ("shuffle_chunks", draw(st.integers(1, 4))),
        ("slice_rows", draw(st.integers(1, 9))),
        ("chunk_bytes", draw(st.sampled_from((64, 300, 5000)))),
        ("on_long", draw(st.sampled_from(ON_LONG))),
        ("mix_every", draw(st.sampled_from(("step", "microbatch")))),
    )
    in_samples = batches == "samples" or (batches == "both" and draw(st.booleans()))
    size = (
        ("samples", draw(st.integers(1, 24)))
        if in_samples
        else ("tokens", draw(st.integers(5, 300)))
    )
    if in_samples:
        fields += (("draw", draw(st.sampled_from(("exact", "exact", "random")))),)
    batch = (
        size,
        ("microbatches", draw(st.integers(1, 3))),
        ("context", draw(st.sampled_from((32, 64)))),
    )
    return World(draw(st.integers(0, 1000)), sources, fields, batch, draw(st.integers(1, 3)))


def folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="overlord-world-")
