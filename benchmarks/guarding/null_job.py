"""The null job of guard.py, which starts it under valgrind: few imports, one process.

    python benchmarks/guarding/null_job.py FOLDER STEPS

The folder is written if there is none. The job reads token ids from Parquet, shuffled, for four
ranks of one session, and builds every array of every microbatch. It ends after the given steps.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ov

SOURCES, FILES, GROUPS = 3, 2, 4
ROWS = 200  # of a row group
RANKS, SAMPLES, CONTEXT = 4, 256, 8192


def write_data(folder: Path) -> None:
    """Write small sources of skewed lengths, about 3 million ids in all."""
    for source in range(SOURCES):
        rng = np.random.default_rng([7, source])
        (folder / f"source{source}").mkdir(parents=True)
        for file in range(FILES):
            lengths = np.clip(rng.lognormal(6, 1, GROUPS * ROWS), 4, CONTEXT).astype(np.int32)
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)]).astype(np.int32)
            ids = rng.integers(0, 32_000, offsets[-1], dtype=np.int32)
            table = pa.table({"tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))})
            # plain pages: the time of Arrow's decoders is not ours
            where = folder / f"source{source}" / f"part{file}.parquet"
            pq.write_table(
                table, where, row_group_size=ROWS, compression="none", use_dictionary=False
            )


def make_job(folder: Path, steps: int) -> ov.Job:
    return ov.Job(
        name="guard",
        sources=[
            ov.Source(
                f"source{i}",
                str(folder / f"source{i}" / "*.parquet"),
                transforms=[ov.Tokens("tokens")],
            )
            for i in range(SOURCES)
        ],
        place=ov.ClientPlaceTree(dp=RANKS),
        batch=ov.Batch(samples=SAMPLES, context=CONTEXT),
        seed=1,
        until=steps,
        on_long="truncate",
    )


def run(folder: Path, steps: int) -> tuple[int, int]:
    """Return the steps and tokens that the ranks took."""
    # Time decides which thread does a piece of work, and when threads take turns: stop the clock.
    time.perf_counter = lambda: 0.0
    sys.setswitchinterval(3600.0)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    taken = tokens = 0
    with ov.launch(make_job(folder, steps), runtime="local", workers=1, watch_s=3600.0) as session:
        clients = [session.client(rank=rank) for rank in range(RANKS)]
        for step in zip(*clients, strict=True):
            taken += 1
            for rank in step:
                for microbatch in rank:
                    arrays = dict(microbatch)
                    tokens += int(arrays["cu_seqlens"][-1])
    return taken, tokens


if __name__ == "__main__":
    where = Path(sys.argv[1])
    if not where.exists():
        write_data(where)
    print(*run(where, int(sys.argv[2])))
