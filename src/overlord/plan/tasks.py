"""Tasks of a hybrid plan: which ranks share the documents of a microbatch, and when.

A *task* is one microbatch of one rank, or of a ring of ranks that split its documents. A rank runs
its tasks by ``index``; ranks may have different numbers of tasks. Ranks of a ring wait for each
other, so a wrong order can block a job. ``check`` refuses every table that could block.

Without pipeline stages a table is safe if one global order contains the list of every rank. With
stages (1F1B) a task must have the same number in the list of each of its ranks. Equal relative
order is not enough, since warm-up forwards of one column would wait for backwards of another. The
same holds for trainers whose ranks wait for each other in every microbatch (equal counts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from overlord import ring
from overlord.errors import PlanError
from overlord.hashing import digest

TASK_COLUMNS = ("index", "order", "offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRules:
    """The requirements of a trainer for a table.

    Arguments
    ---------
    ranks: ranks of the HDP axis, that is of one pipeline stage and one tensor-parallel rank.
    stages: pipeline stages.
    capacity: most tokens of a rank in one microbatch; 0: no limit.
    multiple: 0: documents are cut unevenly. Else each is padded to a multiple of 2 x ring size x
        this number.
    equal_counts: all ranks run the same number of tasks, as FSDP and expert parallelism need, and
        wait for each other in each.
    count_multiple: the number of tasks of each rank is a multiple of it (interleaved stages).
    memory_capacity: most memory of a rank in one microbatch; 0: no limit.
    host_bytes: host memory of a token with offload ratio 1; 0: unknown.
    host_memory: bytes of host memory of a node for offload; 0: no limit.
    node: ranks of a node.
    virtual: chunks of a pipeline stage (interleaved stages).
    """

    ranks: int
    stages: int = 1
    capacity: int = 0
    multiple: int = 0
    equal_counts: bool = False
    count_multiple: int = 1
    memory_capacity: float = 0.0
    host_bytes: float = 0.0
    host_memory: float = 0.0
    node: int = 1
    virtual: int = 1

    def in_flight(self) -> int:
        """Return the microbatches of stage 0 whose backward has not run, at most.

        1F1B has one for each stage. Interleaved stages have more: stages + (stages - 1) / virtual.
        """
        more = -(-(self.stages - 1) // self.virtual) if self.virtual > 1 else 0
        return self.stages + more


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskTable:
    """The tasks of one step as columns. Members of task t: task_rank[task_ptr[t]:task_ptr[t+1]]."""

    task_ptr: np.ndarray  # int64 [tasks + 1]
    task_rank: np.ndarray  # int32: ranks of the HDP axis, in ring order
    index: np.ndarray  # int32 [tasks]: number of the microbatch, equal on all members
    order: np.ndarray  # int64 [tasks]: 0, 1, ... in the global order
    offload: np.ndarray  # float32 [tasks]: share of activations that goes to host memory

    @staticmethod
    def of(
        rings: Sequence[Sequence[int]],
        index: Sequence[int],
        order: Sequence[int] | None = None,
        offload: Sequence[float] | None = None,
    ) -> TaskTable:
        """Return a table with a task for each ring of ranks.

        ``order``: by default that of the list. ``offload``: by default 0 for every task.
        """
        n = len(rings)
        members = [np.asarray(ranks, np.int32).reshape(-1) for ranks in rings]
        return TaskTable(
            task_ptr=np.cumsum([0, *map(len, members)], dtype=np.int64),
            task_rank=np.concatenate(members) if n else np.zeros(0, np.int32),
            index=np.asarray(index, np.int32).reshape(-1),
            order=np.asarray(range(n) if order is None else order, np.int64).reshape(-1),
            offload=np.asarray([0.0] * n if offload is None else offload, np.float32).reshape(-1),
        )

    def __len__(self) -> int:
        return len(self.task_ptr) - 1

    def sizes(self) -> np.ndarray:
        """Return the number of ranks of each task: int64."""
        return np.diff(self.task_ptr)

    def ranks(self, task: int) -> np.ndarray:
        """Return the ranks of a task, in ring order."""
        return self.task_rank[int(self.task_ptr[task]) : int(self.task_ptr[task + 1])]

    def counts(self, ranks: int) -> np.ndarray:
        """Return the number of tasks of every rank: int64 [ranks]."""
        return np.bincount(self.task_rank, minlength=ranks)

    def tasks(self, rank: int) -> np.ndarray:
        """Return the tasks of a rank in the order in which it runs them: int64."""
        mine = self._task_of_member()[self.task_rank == rank]
        return mine[np.lexsort((self.order[mine], self.index[mine]))]

    def lists(self, ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ``bounds`` and the tasks of all ranks, rank by rank, each in the order of running.

        Tasks of rank r are tasks[bounds[r]:bounds[r+1]]. Both arrays are int64.
        """
        bounds, members = self.members(ranks)
        return bounds, self._task_of_member()[members]

    def members(self, ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of ``task_rank`` by rank, in the order of ``lists``, and their bounds.

        The ring position of member i of task t is i - task_ptr[t].
        """
        of = self._task_of_member()
        by = np.lexsort((self.order[of], self.index[of], self.task_rank))
        return np.concatenate(([0], np.cumsum(self.counts(ranks)))), by

    def task_of(self, members: np.ndarray) -> np.ndarray:
        """Return the tasks that rows of ``task_rank`` belong to: int64.

        It takes no time for other rows: each constructor worker asks for its own.
        """
        return np.searchsorted(self.task_ptr, members, side="right") - 1

    def take(self, tasks: np.ndarray) -> TaskTable:
        """Return the table of some tasks, which keep their index and order."""
        sizes = self.task_ptr[1:][tasks] - self.task_ptr[:-1][tasks]
        ends = np.cumsum(sizes)
        within = np.arange(int(sizes.sum())) - np.repeat(ends - sizes, sizes)
        return TaskTable(
            task_ptr=np.concatenate((np.zeros(1, np.int64), ends)),
            task_rank=self.task_rank[np.repeat(self.task_ptr[:-1][tasks], sizes) + within],
            **{name: getattr(self, name)[tasks] for name in TASK_COLUMNS},
        )

    def held(self, task: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Return the tokens of every row of ``task_rank``: int64.

        ``task`` and ``length``: of every sample, with padding if there is any.
        """
        d = self.sizes()[task]
        sample = np.repeat(np.arange(len(task)), d)
        position = np.arange(len(sample)) - np.repeat(np.cumsum(d) - d, d)
        tokens = np.zeros(len(self.task_rank), np.int64)
        piece = ring.sizes(length[sample], d[sample], position)
        np.add.at(tokens, self.task_ptr[task][sample] + position, piece)
        return tokens

    def digest(self) -> str:
        """Return a digest of all columns: of rings, index, order and offload ratios.

        It identifies the plan in journals. Offload ratios count although they change no value.
        """
        columns = (self.task_ptr, self.task_rank, self.index, self.order, self.offload)
        return digest("tasks", *columns)

    def check(
        self,
        rules: TaskRules,
        *,
        task: np.ndarray | None = None,
        tokens: np.ndarray | None = None,
        memory: np.ndarray | None = None,
        step: int = -1,
    ) -> TaskTable:
        """Return the table; raise ``PlanError`` if it breaks a rule or could block the job.

        ``task`` and ``tokens``: the task and the length of every sample. ``memory`` [tasks]: memory
        of the member that needs most, after offloading. Arrays that are None are not checked.
        """
        self._check_columns(step)
        self._check_rings(rules, step)
        self._check_order(rules, step)
        self._check_counts(rules, step)
        if task is not None and tokens is not None:
            self._check_samples(rules, np.asarray(task), np.asarray(tokens), step)
        if memory is not None and rules.memory_capacity:
            self._check_memory(rules, np.asarray(memory), step)
        return self

    def _task_of_member(self) -> np.ndarray:
        return np.repeat(np.arange(len(self)), self.sizes())

    def _check_columns(self, step: int) -> None:
        for name in ("task_ptr", "task_rank", *TASK_COLUMNS):
            column = getattr(self, name)
            wanted = "iu" if name != "offload" else "f"
            if column.ndim != 1 or column.dtype.kind not in wanted:
                raise PlanError(
                    f"tasks: expected {name} to be one column of "
                    f"{'numbers' if wanted == 'f' else 'whole numbers'}, got {column.dtype} of "
                    f"shape {column.shape}",
                    step,
                    "build the table with TaskTable.of",
                )
        for name in TASK_COLUMNS:
            if len(getattr(self, name)) != len(self):
                raise PlanError(
                    f"tasks: expected {len(self)} values in {name}, got {len(getattr(self, name))}",
                    step,
                    "give every task one value",
                )
        ends = (int(self.task_ptr[0]), int(self.task_ptr[-1])) if len(self.task_ptr) else (-1, -1)
        if ends != (0, len(self.task_rank)):
            raise PlanError(
                f"tasks: expected task_ptr from 0 to {len(self.task_rank)}, got {ends[0]} to "
                f"{ends[1]}",
                step,
                "build the table with TaskTable.of",
            )
        _refuse(
            self.sizes() < 1,
            lambda t: (f"task {t}: expected at least 1 rank, got {self.sizes()[t]}", "remove it"),
            step,
        )
        _refuse(
            self.index < 0,
            lambda t: (
                f"task {t}: expected an index of at least 0, got {self.index[t]}",
                "count microbatches from 0",
            ),
            step,
        )
        _refuse(
            ~((self.offload >= 0) & (self.offload <= 1)),
            lambda t: (
                f"task {t}: expected an offload ratio of 0 to 1, got {self.offload[t]}",
                "give the share of activations that goes to host memory",
            ),
            step,
        )

    def _check_rings(self, rules: TaskRules, step: int) -> None:
        of = self._task_of_member()
        _refuse(
            (self.task_rank < 0) | (self.task_rank >= rules.ranks),
            lambda i: (
                f"task {of[i]}: expected ranks of 0 to {rules.ranks - 1}, got {self.task_rank[i]}",
                "use ranks of the HDP axis, not global ranks",
            ),
            step,
        )
        by = np.lexsort((self.task_rank, of))
        twice = (of[by][1:] == of[by][:-1]) & (self.task_rank[by][1:] == self.task_rank[by][:-1])
        _refuse(
            twice,
            lambda i: (
                f"task {of[by[i]]}: expected distinct ranks, got rank {self.task_rank[by[i]]} "
                f"twice in {self.ranks(int(of[by[i]])).tolist()}",
                "list each rank of a ring once",
            ),
            step,
        )

    def _check_order(self, rules: TaskRules, step: int) -> None:
        """Raise unless index and order let the ranks run all tasks without a deadlock."""
        wanted, found = np.arange(len(self)), np.sort(self.order)
        _refuse(
            found != wanted,
            lambda i: (
                f"tasks: expected each order of 0 to {len(self) - 1} once, got {found[i]} in place "
                f"of {i}",
                "number the tasks in one global order",
            ),
            step,
        )
        of = self._task_of_member()
        by = np.lexsort((self.order[of], self.task_rank))
        task, rank = of[by], self.task_rank[by]
        same = rank[1:] == rank[:-1]
        _refuse(
            same & (self.index[task][1:] <= self.index[task][:-1]),
            lambda i: (
                f"rank {rank[i]}: expected task {task[i + 1]}, later in the global order than "
                f"task {task[i]}, to have a larger index than {self.index[task[i]]}, got "
                f"{self.index[task[i + 1]]}",
                "give a rank at most one task for each index, in the global order",
            ),
            step,
        )
        if rules.stages > 1 or rules.equal_counts:
            reason = f"{rules.stages} stages" if rules.stages > 1 else "equal counts"
            first = np.concatenate(([True], ~same)) if len(rank) else np.zeros(0, bool)
            starts = np.flatnonzero(first)
            number = np.arange(len(rank)) - np.repeat(starts, np.diff([*starts, len(rank)]))
            _refuse(
                self.index[task] != number,
                lambda i: (
                    f"rank {rank[i]}: expected its task {task[i]}, number {number[i]} of that "
                    f"rank, to have index {number[i]}, got {self.index[task[i]]}",
                    f"with {reason} indices have no gaps: move a task of this rank forward, or add "
                    "an empty one",
                ),
                step,
            )

    def _check_counts(self, rules: TaskRules, step: int) -> None:
        counts = self.counts(rules.ranks)
        if rules.equal_counts:
            most = int(counts.max())
            _refuse(
                counts != most,
                lambda r: (
                    f"rank {r}: expected {most} tasks as on every rank, got {counts[r]}",
                    "add empty tasks; the trainer needs equal counts",
                ),
                step,
            )
        _refuse(
            counts % rules.count_multiple != 0,
            lambda r: (
                f"rank {r}: expected a multiple of {rules.count_multiple} tasks, got {counts[r]}",
                "add empty tasks; interleaved stages need such counts",
            ),
            step,
        )

    def _check_samples(
        self, rules: TaskRules, task: np.ndarray, tokens: np.ndarray, step: int
    ) -> None:
        """Raise unless each sample has a task, its pieces cover it, and the pieces fit their ranks.

        A task of several ranks must have a sample.
        """
        if task.shape != tokens.shape or task.dtype.kind not in "iu":
            raise PlanError(
                f"tasks: expected a task for each of {len(tokens)} samples, got {task.dtype} of "
                f"shape {task.shape}",
                step,
                "give each sample exactly one task",
            )
        _refuse(
            (task < 0) | (task >= len(self)),
            lambda i: (
                f"sample {i}: expected a task of 0 to {len(self) - 1}, got {task[i]}",
                "give each sample the number of a task of the table",
            ),
            step,
        )
        size = self.sizes()
        held = np.bincount(task, minlength=len(self))
        _refuse(
            (held == 0) & (size > 1),
            lambda t: (
                f"task {t}: expected samples for its {size[t]} ranks, got none",
                "give an empty task one rank",
            ),
            step,
        )
        d = size[task]
        length = ring.padded(tokens, d, rules.multiple) if rules.multiple else tokens
        sample = np.repeat(np.arange(len(task)), d)
        first = np.concatenate(([0], np.cumsum(d)))[:-1]
        position = np.arange(len(sample)) - np.repeat(first, d)
        piece = ring.sizes(length[sample], d[sample], position)
        whole = np.add.reduceat(piece, first) if len(piece) else piece
        _refuse(
            whole != length,
            lambda i: (
                f"sample {i}: expected pieces of {length[i]} tokens in all, got {whole[i]}",
                "report this error of overlord.ring",
            ),
            step,
        )
        if not rules.capacity:
            return
        load = self.held(task, length)
        of = self._task_of_member()
        _refuse(
            load > rules.capacity,
            lambda i: (
                f"task {of[i]}, rank {self.task_rank[i]}: expected at most {rules.capacity} "
                f"tokens, got {load[i]}",
                "give the task more ranks, or fewer samples",
            ),
            step,
        )

    def _check_memory(self, rules: TaskRules, memory: np.ndarray, step: int) -> None:
        if memory.shape != (len(self),):
            raise PlanError(
                f"tasks: expected memory for {len(self)} tasks, got shape {memory.shape}",
                step,
                "give every task one value",
            )
        _refuse(
            ~(memory <= rules.memory_capacity * (1 + 1e-9)),
            lambda t: (
                f"task {t}: expected at most {rules.memory_capacity:.12g} of memory on a rank, got "
                f"{memory[t]:.12g} with offload ratio {self.offload[t]:.3g}",
                "give the task more ranks, or a larger offload ratio",
            ),
            step,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanTasks:
    """The tasks of a plan, the task of each of its samples, and the demands of the trainer."""

    table: TaskTable
    task: np.ndarray  # int32 [samples]
    rules: TaskRules
    offload_share: float = 0.0  # share of the memory of a token that offload ratio 1 moves
    # float64 [ranks]: modelled end of each rank, with the waits for its rings; None: not modelled
    end: np.ndarray | None = None
    # modelled seconds of the slowest rank that no schedule can go below; None: not modelled
    bound: float | None = None

    def lengths(self, tokens: np.ndarray) -> np.ndarray:
        """Return the lengths of all samples as their rings cut them: with padding if there is any.

        Pieces of equal size need a length that the ring size divides.
        """
        if not self.rules.multiple:
            return tokens
        return ring.padded(tokens, self.table.sizes()[self.task], self.rules.multiple)

    def of_samples(self, rows: np.ndarray, tasks: np.ndarray) -> PlanTasks:
        """Return these tasks, in rising order, for these samples, which belong to them."""
        task = np.searchsorted(tasks, self.task[rows]).astype(np.int32)
        return replace(self, table=self.table.take(tasks), task=task, end=None, bound=None)


def _refuse(wrong: np.ndarray, text: Callable[[int], tuple[str, str]], step: int) -> None:
    """Raise ``PlanError`` with ``text(i)``, a problem and a remedy, for the first wrong row i."""
    if wrong.any():
        problem, remedy = text(int(wrong.argmax()))
        raise PlanError(problem, step, remedy)
