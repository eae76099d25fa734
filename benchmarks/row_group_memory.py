"""Peak memory of reading one 400 MB row group: it depends on the slice, not on the row group.

    python benchmarks/row_group_memory.py [--mb 400] [--slice-rows 256]

Each method runs in a process of its own; ``peak`` is resident memory above that before the file was
opened.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = ("overlord", "pyarrow iter_batches, defaults", "pyarrow read_row_group")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--slice-rows", type=int, default=256)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child[0], args.child[1], args.slice_rows)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "one.parquet")
        rows = make(path, args.mb)
        print(
            f"one row group, {args.mb} MB of text in {rows} rows, slices of {args.slice_rows} rows"
        )
        for way in WAYS:
            command = [
                sys.executable,
                __file__,
                "--slice-rows",
                str(args.slice_rows),
                "--child",
                way,
                path,
            ]
            found = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout
            )
            assert found["rows"] == rows
            print(
                f"{way:32s} peak {found['peak_mb']:6.0f} MB, of it Arrow "
                f"{found['arrow_mb']:6.0f} MB, {found['cpu_s']:.2f} s CPU"
            )


def make(path: str, megabytes: int) -> int:
    """Write one row group of random words, 4 kB per row, which hardly compresses."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    words = ["".join(chr(c) for c in rng.integers(97, 123, n)) for n in rng.integers(3, 10, 5000)]
    text, size = [], 0
    while size < megabytes * 10**6:
        text.append(" ".join(words[k] for k in rng.integers(0, 5000, 570)))
        size += len(text[-1])
    pq.write_table(
        pa.table({"id": np.arange(len(text)), "text": text}), path, row_group_size=len(text)
    )
    return len(text)


def measure(way: str, path: str, slice_rows: int) -> dict[str, float]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from overlord.sources.base import ReadOptions
    from overlord.sources.chunk_reader import ChunkReader
    from overlord.sources.index import build_index

    base, start, rows = _peak_mb(), time.process_time(), 0
    if way == "overlord":
        options = ReadOptions(slice_rows=slice_rows, columns=("text",))
        reader, t, last = ChunkReader(build_index("one", path, None, options), options), 0, False
        while not last:
            found = reader.slice(0, t)
            rows, t, last = rows + found.table.num_rows, t + 1, found.last
    elif way == "pyarrow read_row_group":
        rows = pq.ParquetFile(path).read_row_group(0, columns=["text"]).num_rows
    else:
        rows = sum(
            b.num_rows
            for b in pq.ParquetFile(path).iter_batches(batch_size=slice_rows, columns=["text"])
        )
    arrow = pa.default_memory_pool().max_memory() / 2**20
    return {
        "rows": rows,
        "peak_mb": _peak_mb() - base,
        "arrow_mb": arrow,
        "cpu_s": time.process_time() - start,
    }


def _peak_mb() -> float:
    """Read the peak from /proc: ru_maxrss of a child starts at the peak of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


if __name__ == "__main__":
    main()
