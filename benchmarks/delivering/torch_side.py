"""The bare loop as torch datasets, for the worker of a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from delivering.case import Case
from delivering.rank import picture_parts, text_microbatches


class Texts(IterableDataset):
    """The microbatches of a group, for one of its ranks."""

    def __init__(self, case: Case):
        self.case = case

    def __iter__(self) -> Iterator[Any]:
        return text_microbatches(self.case)


class Parts(IterableDataset):
    """The steps of one rank: its share of the samples."""

    def __init__(self, case: Case, rank: int):
        self.case, self.rank = case, rank

    def __iter__(self) -> Iterator[Any]:
        return picture_parts(self.case, self.rank, self.case.ranks)
