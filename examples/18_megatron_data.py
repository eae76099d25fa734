"""Pretokenized corpora of Megatron (.bin and .idx), read as they are, with the weights of a blend.

Run it: python examples/18_megatron_data.py
"""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import numpy as np

import overlord as ov

BLEND = {"wiki": 0.7, "code": 0.3}


def write_dataset(path: Path, documents: list[np.ndarray]) -> None:
    """Write documents as Megatron's preprocess_data does: one sequence for each document."""
    lengths = np.array([len(ids) for ids in documents], np.int32)
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)  # 8: uint16
    edges = np.arange(len(lengths) + 1, dtype=np.int64)
    path.with_suffix(".bin").write_bytes(np.concatenate(documents).astype(np.uint16).tobytes())
    path.with_suffix(".idx").write_bytes(
        head + lengths.tobytes() + starts.tobytes() + edges.tobytes()
    )


def main() -> None:
    chance = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for name in BLEND:
            sizes = chance.integers(10, 400, 500)
            write_dataset(Path(folder, name), [chance.integers(0, 50_000, n) for n in sizes])
        job = ov.Job(
            name="blend",
            sources=[
                ov.Source(
                    name, f"{folder}/{name}.bin", transforms=[ov.Tokens("tokens")], weight=weight
                )
                for name, weight in BLEND.items()
            ],
            batch=ov.Batch(samples=40, context=2048),
            until=10,
        )
        with ov.launch(job, cache_dir=folder) as session:
            counts = dict.fromkeys(BLEND, 0)
            for step in session.client(0):
                for microbatch in step:
                    for piece in microbatch.samples:
                        counts[piece.sample.source] += 1
        total = sum(counts.values())
        for name, weight in BLEND.items():
            print(f"{name}: expected {weight:.0%}, read {counts[name] / total:.1%} of {total}")


if __name__ == "__main__":
    main()
