"""Fixed jobs over generated rows, and what makes up their stream: the digests in ``stream.json``
are of these.

Nothing here may depend on a library's version: rows come from whole-number arithmetic, Parquet and
Arrow rows are named by their number, lines by their offset in plain text, tar members by their
offset in a USTAR archive without times or owners.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import overlord as ov
from overlord.hashing import digest
from tests.corpus import write_rows
from tests.worlds import decode

FILE = Path(__file__).with_name("stream.json")
FORMATS = ("parquet", "jsonl", "jsonl.zst", "tar", "arrow")
STATE = (
    "version",
    "step",
    "cursors",
    "owed",
    "active",
    "events",
    "mix",
)  # counts depend on how far was read ahead


def rows_of(source: int, n: int) -> list[dict[str, Any]]:
    """Rows of 1 to 60 tokens, by a linear congruence: the same with every version of everything."""
    rows, x = [], 12345 + source
    for k in range(n):
        x = (x * 1103515245 + 12345) % 2**31
        length, tokens = 1 + (x >> 8) % 60, []
        for _ in range(length):
            x = (x * 1103515245 + 12345) % 2**31
            tokens.append((x >> 8) % 32000)
        rows.append({"n": k, "tokens": tokens})
    return rows


def not_every_fifth(row: dict[str, Any]) -> bool:
    return row["n"] % 5 != 4


def source(
    directory: Path,
    number: int,
    format: str,
    *,
    n: int = 60,
    filtered: bool = False,
    **settings: Any,
) -> ov.Source:
    files = write_rows(
        directory / f"s{number}",
        format,
        rows_of(number, n),
        files=3,
        row_group_size=7,
        batch_rows=5,
        tar_format=tarfile.USTAR_FORMAT,
    )
    transforms: list[Any] = [ov.Map(decode, rows=True)] if format == "tar" else []
    transforms += [ov.Filter(not_every_fifth, rows=True)] if filtered else []
    return ov.Source(
        f"s{number}",
        files,
        transforms=[*transforms, ov.Tokens("tokens")],
        **{"epochs": 1, **settings},
    )


def jobs(directory: Path) -> dict[str, ov.Job]:
    """Every format shuffled and not, batches in samples and tokens, all strategies, both draws,
    both layouts.
    """
    small = {
        "slice_rows": 4,
        "shuffle_chunks": 3,
        "chunk_bytes": 700,
        "seed": 7,
        "place": ov.ClientPlaceTree(dp=2),
    }
    found: dict[str, ov.Job] = {}
    for i, format in enumerate(FORMATS):
        shuffled, plain = (
            source(directory / "a", i, format, epochs=2),
            source(directory / "b", i, format, shuffle=False),
        )
        samples, tokens = ov.Batch(samples=20, context=64), ov.Batch(tokens=600, context=64)
        found[f"{format}, shuffled, samples, llm_balance"] = ov.Job(
            name="golden", sources=[shuffled], batch=samples, strategy="llm_balance", **small
        )
        found[f"{format}, in file order, tokens, packed"] = ov.Job(
            name="golden", sources=[plain], batch=tokens, strategy="packed", **small
        )
    mixed = [
        source(
            directory / "mixed",
            i,
            format,
            weight=weight,
            epochs=epochs,
            filtered=i == 1,
            shuffle=i != 3,
        )
        for i, (format, weight, epochs) in enumerate(
            zip(FORMATS, (3.0, 1.0, 0.1, 0.7, 1.9), (1, None, 2, 3, 1), strict=True)
        )
    ]
    for name, more in {
        "vanilla, samples": {
            "batch": ov.Batch(samples=32, microbatches=2, context=64),
            "strategy": "vanilla",
        },
        "llm_balance, tokens, split": {
            "batch": ov.Batch(tokens=900, context=32, labels="unshifted"),
            "on_long": "split",
        },
        "backbone_balance, padded": {
            "batch": ov.Batch(samples=24, context=64, layout="padded", pad_id=9),
            "strategy": "backbone_balance",
        },
        "llm_balance, sync step": {
            "batch": ov.Batch(samples=32, microbatches=3, context=64),
            "sync": "step",
        },
        "random draw": {"batch": ov.Batch(samples=32, context=64), "draw": "random"},
        "mixed by microbatch": {
            "batch": ov.Batch(samples=32, microbatches=3, context=64, pad_multiple=8),
            "mix_every": "microbatch",
        },
    }.items():
        found[f"five formats, {name}"] = ov.Job(
            name="golden", sources=mixed, **{**small, "until": 9, **more}
        )  # type: ignore[arg-type]
    found["five formats, until the first ends"] = ov.Job(
        name="golden",
        sources=mixed,
        batch=ov.Batch(samples=24, context=64),
        **{**small, "until": "first", "on_long": "quarantine"},
    )  # type: ignore[arg-type]
    return found


def arrays(steps: dict[int, list[ov.Step]], first: int = 0) -> str:
    """Every array of every rank, byte by byte."""
    return digest(
        *(
            part
            for rank in sorted(steps)
            for s in steps[rank][first:]
            for mb in s
            for key in sorted(mb)
            for part in (key, mb[key])
        )
    )


def stream_of(job: ov.Job) -> dict[str, Any]:
    """What is kept of a job: its plans, its arrays, and the state in the middle, from which the
    rest must follow.
    """
    run = ov.simulate(job)
    assert run.error is None, run.error
    half = len(run.steps[0]) // 2
    state = ov.simulate(job, steps=half).end_state
    return {
        "plans": [s.plan_digest for s in run.steps[0]],
        "arrays": arrays(run.steps),
        "state": {key: state[key] for key in STATE},
        "rest": arrays(run.steps, half),
    }


def write(directory: Path) -> None:
    kept = {name: stream_of(job) for name, job in jobs(directory).items()}
    FILE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
