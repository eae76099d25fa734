"""What costs most in a simulated run and cannot come out differently, remembered: what a shard
holds does not depend on who reads it, nor where samples are placed on who asks. What is read,
drawn, sent and delivered when is never remembered.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa

from overlord.content import Content
from overlord.job.job import Job
from overlord.loader.reader import SourceReader
from overlord.loader.samples import SourceOrder
from overlord.loader.windows import Window
from overlord.mesh import ClientPlaceTree
from overlord.messages.data import BlockReady, Evaluate, Read
from overlord.plan.plan import LoadingPlan
from overlord.planning.strategies import Strategy, resolve
from overlord.sample import Buffer, take_rows
from overlord.setup.options import Options
from overlord.setup.prepared_job import PreparedJob
from overlord.sources.base import RawSlice
from overlord.transforms.base import Block, RowIds, StagedRows


@dataclass(slots=True, eq=False)
class Memory:
    """Of one job. Whoever comes second is given what the first has read; arrays that are shared are
    not to be written to.
    """

    slices: dict[Any, RawSlice] = field(default_factory=dict)
    staged: dict[Any, tuple[np.ndarray, np.ndarray, StagedRows]] = field(default_factory=dict)
    tables: dict[Any, list[pa.Table]] = field(default_factory=dict)
    samples: dict[Any, Block] = field(default_factory=dict)  # of all rows of a table
    windows: dict[Any, tuple[Window, tuple[int, ...]]] = field(default_factory=dict)
    blocks: dict[Any, tuple[BlockReady, Content]] = field(default_factory=dict)
    plans: dict[Any, LoadingPlan] = field(default_factory=dict)

    def __reduce__(self) -> tuple[type[Memory], tuple[()]]:
        """What is sent remembers nothing: no process of the world is another one of this machine."""
        return Memory, ()


class _Chunks:
    """A chunk reader that is asked once for each slice."""

    may_wait = is_remote = never_hangs = False

    def __init__(self, chunks: Any, source: str, memory: Memory):
        self._chunks, self._source, self._memory = chunks, source, memory
        self.index = chunks.index

    def slices(self, chunk: int, t: int, n: int) -> RawSlice:
        key = ("slices", self._source, chunk, t, n)
        if (found := self._memory.slices.get(key)) is None:
            found = self._memory.slices[key] = self._chunks.slices(chunk, t, n)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunks, name)


@dataclass(eq=False)  # slots would make another class, which super() does not know
class RememberingReader(SourceReader):
    """Reads and evaluates as the real one does, and the same thing once."""

    _memory: Memory = field(default_factory=Memory)
    _key: tuple[Any, ...] = ()

    def _open(self, command: Read, spent: np.ndarray, n: int = 1) -> tuple[Window, tuple[int, ...]]:
        key = self._key = (
            self.order.name,
            command.epoch,
            command.chunks,
            command.window,
            command.after,
            n,
        )
        if (found := self._memory.windows.get(key)) is None:
            found = self._memory.windows[key] = super()._open(command, spent, n)
        return replace(found[0]), found[1]

    def _within_epoch(self, raw: RawSlice, command: Read, chunk: int) -> RawSlice:
        partial = self.order.partial
        if partial is None or command.epoch != partial.epoch:
            return raw
        key = (self.order.name, command.epoch, chunk, command.window)
        if (found := self._memory.slices.get(key)) is None:
            found = self._memory.slices[key] = super()._within_epoch(raw, command, chunk)
        return found

    # Rows, and what is made of them, are the same in every epoch and in whatever blocks they are
    # asked for.

    def _stage_slice(
        self, raw: RawSlice, ids: RowIds, reasons: list[str]
    ) -> tuple[np.ndarray, np.ndarray, StagedRows]:
        if (found := self._memory.staged.get(id(raw))) is None:
            found = super()._stage_slice(raw, ids, reasons)
            assert not raw.bad + found[2].bad, (
                "rows that fail have reasons, which are not remembered"
            )
            self._memory.staged[id(raw)] = found
        return found

    def _join_tables(self, tables: list[pa.Table]) -> list[pa.Table]:
        key = tuple(map(id, tables))
        if (found := self._memory.tables.get(key)) is None:
            found = self._memory.tables[key] = super()._join_tables(tables)
        return found

    def _row_stage(self, tables: list[pa.Table], at: np.ndarray) -> Block:
        (table,) = tables
        if (whole := self._memory.samples.get(id(table))) is None:
            whole = self._memory.samples[id(table)] = super()._row_stage(
                tables, np.arange(table.num_rows)
            )
            assert len(whole.index) == table.num_rows, (
                "every row is one sample: none is split, dropped or quarantined"
            )
            assert not len(whole.long), "long documents are not remembered"
        meta = {name: take_rows(column, at) for name, column in whole.meta.items()}
        return Block(
            index=np.arange(len(at)),
            part=whole.part[at],
            tokens=whole.tokens.take(at),
            meta=meta,
            bad=[],
        )

    def evaluate(self, command: Evaluate) -> tuple[BlockReady, Content]:
        window = self._window
        assert window is not None, "expected an open window, got evaluate() before read()"
        key = (self._key, window.position, command.rows)
        if (found := self._memory.blocks.get(key)) is None:
            evaluated, content = super().evaluate(command)
            # Blocks are sized by what one costs: not by this machine's clock.
            found = self._memory.blocks[key] = (replace(evaluated, seconds=0.0), content)
            _lock(found)
            return found
        window.position += found[0].rows
        window.dropped = 0
        self.stats.evaluated += found[0].rows
        self.stats.samples += len(found[0].found)
        if window.position == len(window.key):
            self._window, self.stats.raw_bytes = None, 0
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Readers:
    """Opens readers that share a memory."""

    memory: Memory

    def __call__(self, order: SourceOrder, chunks: Any, stages: Any) -> RememberingReader:
        return RememberingReader(
            order, _Chunks(chunks, order.name, self.memory), stages, _memory=self.memory
        )


def _lock(block: tuple[BlockReady, Content]) -> None:
    for array in (
        block[1].tokens.values,
        block[1].tokens.offsets,
        block[0].found.key,
        block[0].found.row,
    ):
        if isinstance(array, np.ndarray):
            array.flags.writeable = False


class _Placed(LoadingPlan):
    """A plan that was found valid when it was made: whoever is given it again finds the same, and
    the same digest.
    """

    __slots__ = ("_digest",)

    @staticmethod
    def of(plan: LoadingPlan) -> _Placed:
        plan.validate()
        placed = _Placed(**{f.name: getattr(plan, f.name) for f in fields(plan)})
        object.__setattr__(placed, "_digest", plan.digest())
        return placed

    def validate(self) -> LoadingPlan:
        return self

    def digest(self) -> str:
        digest: str = getattr(self, "_digest")  # noqa: B009
        return digest


def _asked_once(strategy: Strategy, memory: Memory) -> Strategy:
    """A strategy of ours is a function of the samples and the mesh."""

    def place(buffer: Buffer, tree: ClientPlaceTree) -> LoadingPlan:
        if buffer.wanted:  # candidates, of which it chooses
            return strategy(buffer, tree)
        columns = (buffer.source, buffer.epoch, buffer.file, buffer.row, buffer.part)
        key = (buffer.step, tree, *(column.tobytes() for column in columns))
        if (found := memory.plans.get(key)) is None:
            found = memory.plans[key] = _Placed.of(strategy(buffer, tree))
        return found

    return place


def prepared(job: Job, options: Options, memory: Memory | None) -> PreparedJob:
    """A job whose loaders and planners remember, if they are given a memory."""
    if memory is None:
        return PreparedJob(job, options)
    return PreparedJob(
        job,
        options,
        open_reader=_Readers(memory),
        strategy_named=lambda name: _asked_once(resolve(name), memory),
    )
