"""Execution of the transforms of a source in a separate process.

A source whose transforms hold the interpreter lock, or with ``workers="processes"``, gets such a
process. It is an actor of this process (``docs/rpc.md``).

Code is sent once, at spawn. Afterwards only data is sent: tables as Arrow IPC in one array, results
as arrays. Nothing is unpickled on either side, so a message can never execute code.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, local
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from overlord.checks import where_raised
from overlord.content import Items
from overlord.errors import ActorLost, DataStall, TransformError
from overlord.process.code import pack_code, unpack_code
from overlord.rpc.actors import ActorHandle
from overlord.rpc.launched_actors import LaunchedActorSystem
from overlord.rpc.process_launcher import process_actors
from overlord.sample import Column, Ragged
from overlord.transforms.base import Block, RowIds, StagedRows
from overlord.transforms.pipeline import Pipeline
from overlord.transforms.timeouts import TIMEOUTS

# ----------------------------------------------------------------------------
# The actor in the child process.

Result = dict[str, Any]


class TransformService:
    """The stages of a pipeline, as an actor: arguments and results are plain values and arrays.

    ``code`` has the pipeline.
    """

    def __init__(self, code: bytes, name: str):
        self._pipeline: Pipeline = unpack_code(code)
        self._name = name

    def ready(self) -> None:
        """Return once the imports and the tokenizer of the pipeline are loaded."""

    def slice_stage(self, epoch: int, file: int, rows: np.ndarray, table: np.ndarray) -> Result:
        return self._run(
            lambda: _staged(self._pipeline.slice_stage(_from_ipc(table), RowIds(epoch, file, rows)))
        )

    def row_stage(self, table: np.ndarray) -> Result:
        return self._run(lambda: _block(self._pipeline.row_stage(_from_ipc(table))))

    def _run(self, stage: Callable[[], Result]) -> Result:
        """Run a stage, and add its CPU seconds to its result."""
        before = time.process_time()
        try:
            result = stage()
        except TransformError:
            raise
        except MemoryError as fault:
            raise MemoryError(f"{self._name}: {fault}{where_raised(fault)}") from fault
        except Exception as fault:
            raise TransformError(
                self._pipeline.source,
                self._name,
                f"{type(fault).__name__}: {fault}{where_raised(fault)}",
            ) from fault
        return {**result, "core_s": time.process_time() - before}


def _staged(staged: StagedRows) -> Result:
    return {
        "table": _to_ipc(staged.table),
        "index": _flat(staged.index),
        "bad": staged.bad,
        "dropped": staged.dropped,
    }


def _block(block: Block) -> Result:
    items = block.items
    return {
        "index": _flat(block.index),
        "part": _flat(block.part),
        "tokens": _flat_ragged(block.tokens),
        "meta": {
            name: _flat_ragged(c) if isinstance(c, Ragged) else _flat(c)
            for name, c in block.meta.items()
        },
        "bad": block.bad,
        "items": None
        if items is None
        else (_flat_ragged(items.bytes.compact()), _flat(items.counts)),
        "image_bytes": (block.image_bytes_in, block.image_bytes_out),
        "long": _flat(block.long),
        "lost": _flat(block.lost),
        "weights": None if block.weights is None else _flat_ragged(block.weights),
    }


def _flat(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array)


def _flat_ragged(ragged: Ragged) -> Ragged:
    return Ragged(_flat(ragged.values), _flat(ragged.offsets))


def _to_ipc(table: pa.Table) -> np.ndarray:
    """Return a table as Arrow IPC, in one array."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return np.frombuffer(sink.getvalue(), np.uint8)


def _from_ipc(message: np.ndarray) -> pa.Table:
    """Return the table of an array with Arrow IPC, as views of the array."""
    return pa.ipc.open_stream(pa.py_buffer(message)).read_all()


# ----------------------------------------------------------------------------
# The worker in this process, and the actor system that all workers of a process share.


class SharedActors:
    """The actor system of all transform workers of this process, while there are any.

    One thread therefore serves any number of them. Runs on: any thread.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._actors: LaunchedActorSystem | None = None
        self._users, self._pid = 0, os.getpid()
        self._numbers = itertools.count()

    def acquire(self) -> LaunchedActorSystem:
        """Return the actor system; ``release`` must follow."""
        with self._lock:
            if os.getpid() != self._pid:  # a forked copy does not own the actors of its parent
                self._actors, self._users, self._pid = None, 0, os.getpid()
            if self._actors is None:
                # a child of a worker does not outlive it, and has no children of its own
                self._actors = process_actors(daemon=True)
            self._users += 1
            return self._actors

    def release(self, actors: LaunchedActorSystem) -> None:
        """End the use of an actor system; the last use shuts it down."""
        with self._lock:
            if actors is not self._actors:  # of the parent of this forked copy
                return
            self._users -= 1
            if self._users:
                return
            self._actors = None
        actors.shutdown(TIMEOUTS.close_s)

    def unique_name(self, name: str) -> str:
        """Return a name that no other actor of this process has."""
        return f"{name} #{next(self._numbers)}"


_SHARED = SharedActors()


class _CpuSeconds(local):
    """CPU seconds that the child used for calls of the current thread of the parent."""

    seconds = 0.0


class TransformWorker:
    """Executor of the stages of a pipeline in a child process.

    Runs on: any thread. The child executes one batch at a time.
    """

    def __init__(
        self, pipeline: Pipeline, name: str = "", *, deadline_s: float = TIMEOUTS.batch_s
    ) -> None:
        self.name = name or f"transforms of {pipeline.source!r}"
        self._pipeline, self._deadline_s, self._lock = pipeline, deadline_s, Lock()
        self._cpu = _CpuSeconds()
        code = pack_code(pipeline, f"source {pipeline.source!r}")
        self._actors, self._closed = _SHARED.acquire(), False
        self._child: ActorHandle | None = None
        try:
            name = _SHARED.unique_name(self.name)
            self._child = self._actors.spawn(TransformService, code, self.name, name=name)
            self._call("start", "ready")  # waits for imports and tokenizer, raises their errors
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    separate_process = True  # a stage makes the caller wait for another process

    @property
    def has_slice_stage(self) -> bool:
        return self._pipeline.has_slice_stage

    def running(self, thread: int) -> tuple[str, int]:
        """Return a description of the transforms that may be running, and -1: the row is unknown.

        The child reports no position during a stage.
        """
        return f"{self._transforms_text()}, in process {self.pid},", -1

    def _transforms_text(self) -> str:
        code = [repr(t) for t in self._pipeline.transforms if t.user_code]
        return " or ".join(code or map(repr, self._pipeline.transforms)) or "no transform"

    def core_s(self) -> float:
        """Return the CPU seconds that the child used for calls of the calling thread.

        Several loaders may share a child.
        """
        return self._cpu.seconds

    def set_deadline(self, seconds: float) -> None:
        """Set the seconds that one batch may take from now on."""
        self._deadline_s = seconds

    def slice_stage(self, table: pa.Table, ids: RowIds) -> StagedRows:
        rows = _flat(np.asarray(ids.row, np.int64))
        found = self._call(
            "slice stage", "slice_stage", int(ids.epoch), int(ids.file), rows, _to_ipc(table)
        )
        return StagedRows(_from_ipc(found["table"]), found["index"], found["bad"], found["dropped"])

    def row_stage(self, table: pa.Table) -> Block:
        found = self._call("row stage", "row_stage", _to_ipc(table))
        meta: dict[str, Column] = found["meta"]
        bytes_in, bytes_out = found["image_bytes"]
        return Block(
            found["index"],
            found["part"],
            found["tokens"],
            meta,
            found["bad"],
            None if found["items"] is None else Items(*found["items"]),
            bytes_in,
            bytes_out,
            found["long"],
            found["lost"],
            found["weights"],
        )

    def close(self) -> None:
        """Let the child exit; kill it if it exits too late. Idempotent."""
        if self._closed:
            return
        self._closed = True
        child, self._child = self._child, None
        try:
            if child is not None:
                self._actors.stop(child, TIMEOUTS.close_s)
        finally:
            _SHARED.release(self._actors)

    def __enter__(self) -> TransformWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, what: str, method: str, *args: Any) -> Result:
        """Call the child; kill it if it does not answer in time."""
        with self._lock:
            if self._child is None:
                raise ActorLost(self.name, "the transform process was closed or lost earlier")
            try:
                answer = self._actors.call(self._child, method, *args)
                found: Result | None = self._actors.get(answer, self._deadline_s)
            except DataStall:
                self._stalled(what)
            except ActorLost as lost:
                self._lost(what, lost.reason)
        if found is None:
            return {}
        self._cpu.seconds += found["core_s"]
        return found

    def _stalled(self, what: str) -> NoReturn:
        """Kill the child, which may never finish, and raise DataStall."""
        assert self._child is not None
        child, self._child = self._child, None
        with suppress(DataStall):  # it exits later
            self._actors.kill(child)
        raise DataStall(
            f"{self.name}, {what}, to finish {self._transforms_text()}", self._deadline_s
        ) from None

    def _lost(self, what: str, reason: str) -> NoReturn:
        self._child = None
        raise ActorLost(
            self.name, reason if what == "start" else f"its process ended during a batch ({reason})"
        ) from None
