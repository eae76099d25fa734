"""The same job by Ray Data: ``python -m peers.ray_data``.

It reads Parquet, mixes by weight, tokenizes and packs in ``map_batches``, and splits by
``streaming_split`` to ranks that are actors.

``ray-data`` reads every source as a dataset and mixes them by ``Dataset.mix``. ``ray-data-list``
reads one list of files, drawn by weight in advance: cheaper, but the mixture cannot change. Each
choice below is the cheaper one for Ray Data. A block is a file, so it mixes files where the others
mix rows. Packed ids are sent as int32, and the rank converts them. Tokenizers stay loaded. Ranks
exist before the clock that excludes the cluster starts. Sources repeat by links to their files,
since Ray Data reads a path once.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from corpus import FILES, Corpus, SourceFiles, open_corpus
from peers.contract import NO_LABEL
from peers.imports import as_a_trainer
from peers.kernel import Encoder, next_fit, rows_of
from peers.line import Line, take_steps
from peers.work import Work

STORE_BYTES = 512 * 2**20  # Ray would take 30 % of the machine's memory, and walk through all of it
MORE = 2.0  # times the tokens that a run wants are there to be read: it must not come to its end
TOKENS_PER_WORD = {"null": 1.0, "tokenized": 1.45}
ROW_TAG = "source"
BLOCKS: dict[str, Any] = {
    "batch_size": None,
    "batch_format": "pyarrow",
    "zero_copy_batch": True,
}  # whole ones
SETTINGS = {  # the first four are what Overlord sets too
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    # The newer reader makes one block of a source of this size whatever it is asked for, which
    # cannot be mixed, and starts later.
    "RAY_DATA_USE_DATASOURCE_V2": "0",
}


# ---- in workers
# -----------------------------------------------------------------------------------------------------


def tag(table: pa.Table, number: int) -> pa.Table:
    return table.append_column(ROW_TAG, pa.array(np.full(len(table), number, np.int32)))


class Pack:
    """Packs the rows of a block by next-fit; a row of the result is a microbatch.

    The rest at the end of a block is a microbatch too. It is an actor: its tokenizer is loaded
    once, and it has a CPU core of its own. As tasks, these would wait until everything is read:
    with many sources for minutes.
    """

    def __init__(self, work: Work):
        self.work = work
        self.encode = Encoder(
            open_corpus(Path(work.folder), work.n_sources), work.job, work.context
        )

    def __call__(self, table: pa.Table) -> pa.Table:
        return packed(
            table,
            self.encode(rows_of(table.column(self.work.column).combine_chunks())),
            self.work.context,
        )


def packed(table: pa.Table, documents: list[np.ndarray], context: int) -> pa.Table:
    sizes = np.fromiter(map(len, documents), np.int64, len(documents))
    rows = np.array([*next_fit(sizes.tolist(), context), len(documents)], np.int64)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    return pa.table(
        {
            "tokens": _lists(ends[rows], np.concatenate(documents).astype(np.int32, copy=False)),
            "lengths": _lists(rows, sizes.astype(np.int32)),
            "sources": _lists(rows, sources_of(table)),
        }
    )


def sources_of(table: pa.Table) -> np.ndarray:
    if ROW_TAG in table.column_names:
        found: np.ndarray = table.column(ROW_TAG).to_numpy()
        return found
    path = table.column("path")[0].as_py()  # a block is a file
    return np.full(len(table), int(Path(path).name.split("-")[1]), np.int32)


def _lists(bounds: np.ndarray, values: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), pa.array(values))


# ---- in ranks
# -------------------------------------------------------------------------------------------------------


def widen(
    tokens: np.ndarray, lengths: np.ndarray, sources: np.ndarray, ramp: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the arrays of the batch contract from packed ids."""
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    last = bounds[1:] - 1
    wide = tokens.astype(np.int64)
    labels = np.empty_like(wide)
    labels[:-1] = wide[1:]
    labels[last] = NO_LABEL
    loss_mask = np.ones(len(wide), np.float32)
    loss_mask[last] = 0.0
    positions = ramp[: len(wide)] - np.repeat(bounds[:-1], lengths)
    return {
        "tokens": wide,
        "position_ids": positions,
        "labels": labels,
        "loss_mask": loss_mask,
        "cu_seqlens": bounds,
        "cu_seqlens_padded": bounds,
        "max_seqlen": lengths.max(),
        "source_ids": sources,
    }


def microbatches(batch: pa.Table, ramp: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    columns = [
        rows_of(batch.column(name).combine_chunks()) for name in ("tokens", "lengths", "sources")
    ]
    return (widen(*row, ramp) for row in zip(*columns, strict=True))


class Rank:
    """The worker of a trainer, which takes its split."""

    def __init__(self, path: str, work: dict[str, Any]):
        self.work = Work(**work)
        self.line = Line(path, f"rank/{self.work.rank}")

    def there(self, trainer: bool = False) -> int:
        """Return the process; ``trainer``: after the imports of a trainer."""
        if trainer:
            as_a_trainer()
        return os.getpid()

    def take(self, split: Any) -> None:
        batches = iter(
            split.iter_batches(batch_size=self.work.microbatches, batch_format="pyarrow")
        )
        ramp = np.arange(self.work.context, dtype=np.int64)
        take_steps((microbatches(batch, ramp) for batch in batches), self.work, self.line)


# ---- the driver
# -----------------------------------------------------------------------------------------------------


def links(folder: Path, sources: list[SourceFiles], wanted: list[int]) -> list[str]:
    """Return a path for each of the wanted sources, whose name has the number of the source.

    The files of a source are used in turn.
    """
    folder.mkdir()
    met, made = dict.fromkeys(wanted, 0), []
    for k, number in enumerate(wanted):
        path = folder / f"{k:06d}-{number}-.parquet"
        path.symlink_to(sources[number].files[met[number] % FILES])
        met[number] += 1
        made.append(str(path))
    return made


def files_wanted(corpus: Corpus, work: Work) -> float:
    """Return the number of files that the whole run needs."""
    tokens = (
        sum(source.words for source in corpus.sources)
        / len(corpus.sources)
        / FILES
        * TOKENS_PER_WORD[work.job]
    )
    return MORE * work.tokens / tokens + 64


def mixed(corpus: Corpus, work: Work, folder: Path) -> Any:
    import ray.data
    from ray.data import MixStoppingCondition

    datasets = []
    for number, share in enumerate(corpus.weights):
        paths = links(
            folder / str(number),
            list(corpus.sources),
            [number] * (2 + math.ceil(share * files_wanted(corpus, work))),
        )
        read = ray.data.read_parquet(paths, override_num_blocks=len(paths)).select_columns(
            [work.column]
        )
        datasets.append(read.map_batches(tag, fn_kwargs={"number": number}, **BLOCKS))
    return datasets[0].mix(
        *datasets[1:],
        weights=corpus.weights.tolist(),
        stopping_condition=MixStoppingCondition.STOP_ON_SHORTEST,
    )


def listed(corpus: Corpus, work: Work, folder: Path) -> Any:
    import ray.data

    rng = np.random.default_rng(work.seed)
    drawn = rng.choice(
        len(corpus.sources), size=math.ceil(files_wanted(corpus, work)), p=corpus.weights
    ).tolist()
    paths = links(folder / "all", list(corpus.sources), drawn)
    read = ray.data.read_parquet(paths, override_num_blocks=len(paths), include_paths=True)
    return read.select_columns([work.column, "path"])


def start_ranks(path: str, work: Work, temporary: Path, cores: int) -> list[Any]:
    """Start a cluster on this machine, and the workers of the trainers."""
    import ray

    ray.init(
        "local",
        num_cpus=cores,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
        logging_level=40,
        _temp_dir=str(temporary / "ray"),
    )
    given = {name: getattr(work, name) for name in Work.__slots__}
    return [
        ray.remote(Rank)
        .options(num_cpus=0)
        .remote(path, {**given, "rank": rank, "processes": work.ranks})
        for rank in range(work.ranks)
    ]


def take_splits(ranks: list[Any], work: Work, temporary: Path, pool: int) -> list[Any]:
    """Read, mix and pack in a pool of that many actors; every rank takes its split."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    corpus = open_corpus(Path(work.folder), work.n_sources)
    rows = (listed if work.peer == "ray-data-list" else mixed)(corpus, work, temporary)
    packing = {
        "fn_constructor_kwargs": {"work": work},
        "compute": ray.data.ActorPoolStrategy(size=pool),
        **BLOCKS,
    }
    splits = rows.map_batches(Pack, **packing).streaming_split(work.ranks)
    return [rank.take.remote(split) for rank, split in zip(ranks, splits, strict=True)]


def main() -> None:
    path, work, temporary = sys.argv[1], Work(**json.loads(sys.argv[2])), Path(sys.argv[3])
    os.environ.update(SETTINGS)
    import ray
    import ray.data  # imports come before the clock starts

    line = Line(path, "server")
    line.say(ready=True)
    line.hear()
    cores = len(os.sched_getaffinity(0))
    ranks = start_ranks(path, work, temporary, cores)
    ray.get([rank.there.remote() for rank in ranks])
    line.say(cluster=time.monotonic())
    taking = take_splits(ranks, work, temporary, max(1, cores - 1))
    line.say(serving=None, hosts=[])
    threading.Thread(target=_watch, args=(taking, line), daemon=True).start()
    while line.hear() != "end":
        line.say(ahead=None)
    ray.shutdown()


def _watch(taking: list[Any], line: Line) -> None:
    """Report a rank that failed, since nothing else reports it."""
    import ray

    try:
        ray.get(taking)
    except Exception as fault:
        line.say(failed=str(fault)[-2000:])


if __name__ == "__main__":
    from peers import ray_data  # under its own name: workers import what they are sent

    ray_data.main()
