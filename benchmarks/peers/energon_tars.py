"""Energon over WebDataset files.

A metadataset blends the sources by weight. The task encoder encodes samples one by one, and next-fit
selects the samples of a buffer that are packed together. The savable loader runs it in its workers.
"""

from __future__ import annotations

import io
import logging
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from megatron.energon import (
    Cooker,
    Sample,
    TaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from megatron.energon.edataclass import edataclass
from megatron.energon.flavors import BaseWebdatasetFactory

from corpus import Corpus, SourceFiles
from peers.conversion import folders
from peers.kernel import SHUFFLED_ROWS, Encoder, SourceRows, arrays_of, next_fit
from peers.work import Work

FORMAT = "webdataset"
SHARDS = 4  # of a source, as many as it has row groups
PACKED_ROWS = 1024  # of a packing buffer
MAX_SEQUENCE = 100  # samples that are read in sequence, in its examples


def write_source(folder: Path, source: SourceFiles, number: int, column: str) -> None:
    rows = list(SourceRows(source, column, 0, 1))
    names = []
    for shard, part in enumerate(np.array_split(np.arange(len(rows)), SHARDS)):
        names.append(f"shard_{shard}.tar")
        with tarfile.open(folder / names[-1], "w") as tar:
            for i in part.tolist():
                data = rows[i].encode() if column == "text" else rows[i].tobytes()
                member = tarfile.TarInfo(f"{i:06d}.{column}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    BaseWebdatasetFactory.prepare_dataset(
        folder, names, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=1
    )
    config = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        yaml.safe_dump(config | {"subflavors": {"source": number}})
    )


@edataclass
class Row(Sample):
    """A row and the number of its source; encoded: its ids."""

    row: Any
    source: int


@edataclass
class Microbatch(Sample):
    """The arrays of the batch contract."""

    arrays: dict[str, np.ndarray]


class Encoding(TaskEncoder):
    """Encodes rows one by one, as its interface asks, and packs those of a buffer."""

    decoder = None

    def __init__(self, corpus: Corpus, work: Work):
        super().__init__()
        self.context, self.text = work.context, work.column == "text"
        self.column = work.column
        self.encode = Encoder(corpus, work.job, work.context)
        self.ramp = np.arange(work.context, dtype=np.int64)
        self.cookers = [Cooker(self.cook)]

    @stateless
    def cook(self, sample: dict[str, Any]) -> Row:
        data = sample[self.column]
        row = bytes(data).decode() if self.text else np.frombuffer(data, np.int32)
        source = sample["__subflavors__"]["source"]
        return Row(**basic_sample_keys(sample), row=row, source=source)

    @stateless
    def encode_sample(self, sample: Row) -> Row:
        (sample.row,) = self.encode([sample.row])
        return sample

    def select_samples_to_pack(self, samples: list[Row]) -> list[list[Row]]:
        firsts = next_fit((len(sample.row) for sample in samples), self.context)
        ends = [*firsts[1:], len(samples)]
        return [samples[a:b] for a, b in zip(firsts, ends, strict=True)]

    @stateless
    def pack_selected_samples(self, samples: list[Row]) -> Microbatch:
        rows, sources = [s.row for s in samples], [s.source for s in samples]
        keys = {"__key__": samples[0].__key__, "__restore_key__": ()}
        return Microbatch(**keys, arrays=arrays_of(rows, sources, self.ramp))


def prepare(work: Work) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)


def blend(corpus: Corpus, work: Work) -> Path:
    """Write the metadataset of the run."""
    sources = zip(folders(corpus, FORMAT, work.column), corpus.weights, strict=True)
    blended = [{"path": str(folder), "weight": float(weight)} for folder, weight in sources]
    path = Path(os.environ["CELL_FOLDER"]) / f"blend-{work.rank}.yaml"
    kind = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    path.write_text(yaml.safe_dump(kind | {"splits": {"train": {"blend": blended}}}))
    return path


def microbatches(corpus: Corpus, work: Work) -> Iterator[Any]:
    config = WorkerConfig(rank=work.rank, world_size=work.processes, num_workers=work.workers)
    dataset = get_train_dataset(
        blend(corpus, work),
        worker_config=config,
        batch_size=None,
        packing_buffer_size=PACKED_ROWS,
        shuffle_buffer_size=SHUFFLED_ROWS if work.shuffle else None,
        max_samples_per_sequence=MAX_SEQUENCE if work.shuffle else None,
        shuffle_over_epochs_multiplier=1 if work.shuffle else None,
        parallel_shard_iters=None if work.shuffle else 1,
        task_encoder=Encoding(corpus, work),
    )
    ahead = max(1, work.microbatches // max(1, work.workers))
    loader = get_savable_loader(dataset, prefetch_factor=ahead)
    return (microbatch.arrays for microbatch in loader)
