"""The work of a cell.

It is separate from the kernel, so that a process that only receives need not import readers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one cell, which is sent to its processes as JSON."""

    peer: str
    job: str  # "null" or "tokenized"
    folder: str
    n_sources: int
    tokens: int  # real tokens of the whole cell
    context: int = 8192
    ranks: int = 4
    microbatches: int = 16  # of a rank in a step
    seed: int = 1
    rank: int = 0  # of this process, for peers with a process per rank
    processes: int = 1  # that share the cell
    equal: bool = False  # all sources weigh the same
    workers: int = 1  # of a rank; 0: it loads by itself
    shuffle: bool = False  # of a peer; those of Overlord have it in their names
    hosts: int = 0  # loader hosts of the process runtime, with one thread each; 0: as it chooses
    trainer: bool = True  # ranks import torch, as trainers do
    arenas: int = (
        0  # malloc arenas of the processes that load, as MALLOC_ARENA_MAX says; 0: as they choose
    )
    python: str = ""  # the interpreter that has the loader; "": the one of this program
    server: int = 0  # pid of the process that loads for all ranks, where the ranks only receive

    @property
    def label(self) -> str:
        """The name of the peer in tables."""
        name = f"{self.peer}-shuffled" if self.shuffle else self.peer
        return f"{name}@{self.arenas}" if self.arenas else name

    @property
    def column(self) -> str:
        return "tokens" if self.job == "null" else "text"

    @property
    def step(self) -> int:
        """The number of microbatches of one step that this process receives."""
        return self.ranks * self.microbatches // self.processes
