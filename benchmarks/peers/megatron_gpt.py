"""Megatron-Core's blended GPTDataset over indexed files, in torch's DataLoader.

Every source is a dataset of a blend with its weight. A sample is a sequence of ids, in which
documents end with an extra token. Megatron's arrays have no bounds of documents: the loader's side
makes those of the batch contract. The first rank builds the indexes, for each run anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from corpus import N_WORDS, Corpus, SourceFiles
from peers import torch_loader
from peers.contract import NO_LABEL
from peers.conversion import folders
from peers.gloo import join
from peers.kernel import Microbatch, SourceRows
from peers.work import Work

FORMAT = "megatron"
END = N_WORDS  # the id after a document: the first that is no word
MORE = 2  # times the sequences of the run are indexed


class Tokenizer:
    """The attributes of a tokenizer that the dataset reads."""

    eod, pad, vocab_size = END, END + 1, END + 2
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "none"}


def write_source(folder: Path, source: SourceFiles, number: int, column: str) -> None:
    builder = IndexedDatasetBuilder(str(folder / "rows.bin"), dtype=np.uint16)
    for row in SourceRows(source, column, 0, 1):
        ids = torch.from_numpy(np.append(row, END))
        builder.add_document(ids, [len(ids)])
    builder.finalize(str(folder / "rows.idx"))


class Rows:
    """The arrays of the batch contract for the samples of a Megatron dataset."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __getitem__(self, index: int) -> Microbatch:
        sample = self.dataset[index]
        return as_microbatch(
            {name: sample[name].numpy() for name in ("tokens", "labels", "position_ids")},
            sample["loss_mask"].numpy(),
            int(sample.get("dataset_id", 0)),
        )


def as_microbatch(ids: dict[str, np.ndarray], loss_mask: np.ndarray, source: int) -> Microbatch:
    """Return a sample with bounds of documents, none of whose last tokens has a label."""
    starts = np.flatnonzero(ids["position_ids"] == 0)
    bounds = np.append(starts, len(ids["tokens"])).astype(np.int32)
    last = bounds[1:] - 1
    labels = ids["labels"].copy()
    labels[last] = NO_LABEL
    loss_mask = loss_mask.copy()
    loss_mask[last] = 0.0
    return {
        **ids,
        "labels": labels,
        "loss_mask": loss_mask,
        "cu_seqlens": bounds,
        "cu_seqlens_padded": bounds,
        "max_seqlen": np.diff(bounds).max(),
        "source_ids": np.full(len(starts), source, np.int32),
    }


def prepare(work: Work) -> None:
    torch.set_num_threads(1)
    join(work)


def blended(corpus: Corpus, work: Work) -> Any:
    paths = [str(folder / "rows") for folder in folders(corpus, FORMAT, work.column)]
    config = GPTDatasetConfig(
        random_seed=work.seed,
        sequence_length=work.context,
        blend=(paths, corpus.weights.tolist()),
        split="1,0,0",
        path_to_cache=os.environ["CELL_FOLDER"],
        tokenizer=Tokenizer(),
        reset_position_ids=True,
        reset_attention_mask=False,
        eod_mask_loss=True,
        create_attention_mask=False,
    )
    ahead = work.ranks * work.microbatches
    n = MORE * (work.tokens // work.context + ahead)
    return BlendedMegatronDatasetBuilder(GPTDataset, [n, 0, 0], lambda: True, config).build()[0]


def microbatches(corpus: Corpus, work: Work) -> Iterator[Any]:
    dataset = blended(corpus, work)
    mine = range(work.rank, len(dataset), work.processes)
    return torch_loader.load(Rows(dataset), work, as_arrays=False, sampler=mine)
