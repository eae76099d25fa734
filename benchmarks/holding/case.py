"""The arguments and the result of one cell of benchmarks/memory.py.

Both are sent between processes as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass

from peers.work import Work

COLOCATED, LOCAL, PROCESS, RAY = "torch", "local", "process", "ray"
KINDS = {
    COLOCATED: "a DataLoader in every rank, each worker opens every source",
    LOCAL: "runtime='local': one process for all ranks",
    PROCESS: "runtime='process'",
    RAY: "runtime='ray'",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A loader with numbers of sources, ranks and workers."""

    kind: str
    folder: str
    n_sources: int
    ranks: int  # data-parallel, a process each
    workers: int  # of one rank's DataLoader; of Overlord: loading threads in all
    shuffle: bool = True  # Overlord's default; a DataLoader then has one buffer for each worker
    tp: int = 1
    context: int = 8192
    microbatches: int = 2  # of a rank in a step
    samples: int = 0  # of a step in all; 0: what fills the microbatches
    steps: int = 10  # at the pace, that count
    every_s: float = 0.5  # a step, demanded of all
    hosts: int = 0  # loader hosts; 0: as it chooses
    partition: str = ""  # launch's option, where it is known
    shadows: bool = False
    seed: int = 1

    @property
    def name(self) -> str:
        extras = {
            f"{self.hosts} hosts": self.hosts,
            f"partition={self.partition}": self.partition,
            "shadows": self.shadows,
        }
        return ", ".join([self.kind, *(words for words, said in extras.items() if said)])

    @property
    def loading(self) -> int:
        """The number of workers or threads that load, over all ranks."""
        return self.ranks * self.workers if self.kind == COLOCATED else self.workers

    def work(self, rank: int = 0) -> Work:
        ours = "overlord-shuffled" if self.shuffle else "overlord"
        return Work(
            "torch" if self.kind == COLOCATED else ours,
            "null",
            self.folder,
            self.n_sources,
            0,
            context=self.context,
            ranks=self.ranks,
            microbatches=self.microbatches,
            seed=self.seed,
            rank=rank,
            processes=self.ranks,
            equal=True,
            workers=self.workers if self.kind == COLOCATED else 1,
            shuffle=self.shuffle,
        )

    @property
    def warm(self) -> int:
        """The number of steps of a rank until memory is stable.

        By then everything that opens sources has received some samples of each.
        """
        a_step = self.microbatches * self.context // 500  # samples of a rank
        readers = self.workers if self.kind == COLOCATED else 1 / self.ranks
        return max(8, int(6 * self.n_sources * readers / a_step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """MB over all processes, minus that of ranks after their imports, and all waits."""

    case: Case
    over_mb: float  # the highest seen
    whole_mb: float  # the same with imports
    parts_mb: dict[str, float]
    shadows_mb: float  # of that, what shadow loaders hold, by their own account
    processes: int
    waits: tuple[float, ...]
    late: int  # steps that came later than the pace
    by_slope: bool = False

    @property
    def keeps_pace(self) -> bool:
        """Whether no counted step of any rank was later than the required pace."""
        return bool(self.waits) and self.late == 0
