"""Execution of the transforms of a source in a separate process.

A source whose transforms hold the interpreter lock, or with ``workers="processes"``, gets such a
process.

Code is sent once, at spawn. Afterwards only data is sent: a small JSON header, then Arrow IPC for
tables and raw buffers for arrays. Nothing is unpickled on either side, so a message can never
execute code.
"""

from __future__ import annotations

import signal
import socket
import struct
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Lock, local
from typing import Any, NoReturn

import msgspec
import numpy as np
import pyarrow as pa

from overlord.checks import where_raised
from overlord.errors import ActorLost, DataStall, TransformError
from overlord.process import forkserver
from overlord.process.code import pack_code, unpack_code
from overlord.process.forkserver import describe_exit
from overlord.sample import Column, Items, Ragged
from overlord.transforms.base import Block, RowIds, StagedRows
from overlord.transforms.pipeline import Pipeline
from overlord.transforms.timeouts import TIMEOUTS


class Call(msgspec.Struct, frozen=True):
    """Request of the parent to run a stage on a table.

    Row numbers (slice stage only) and the table follow it.
    """

    stage: str
    epoch: int = 0
    file: int = 0


class Reply(msgspec.Struct, frozen=True):
    """Message from child to parent.

    The arrays follow in this order, then the table if there is one.
    """

    arrays: list[tuple[str, str]] = []  # (name, dtype)
    table: bool = False
    bad: list[tuple[int, str]] = []
    dropped: int = 0
    image_bytes: tuple[int, int] = (0, 0)  # bytes of files, bytes of pixels
    # ["TransformError", its fields...], or [name, text] of another error
    error: list[str] | None = None
    core_s: float = 0.0  # CPU seconds in the child


@dataclass(slots=True, eq=False)
class _Child:
    process: Any
    pipe: Connection


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
        self._child: _Child | None = _spawn(pipeline, self.name, deadline_s)
        with self._lock:
            self._receive("start")  # waits for imports and the tokenizer, and raises their errors

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child else None

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
        if self._child is not None:
            self._deadline_s = seconds
            _set_deadline(self._child.pipe, seconds)

    def slice_stage(self, table: pa.Table, ids: RowIds) -> StagedRows:
        rows = _raw(np.asarray(ids.row, np.int64))
        reply, _, out = self._call(
            Call("slice", int(ids.epoch), int(ids.file)), [rows, _to_ipc(table)]
        )
        return StagedRows(out["table"], out["index"], reply.bad, reply.dropped)

    def row_stage(self, table: pa.Table) -> Block:
        reply, names, out = self._call(Call("row"), [_to_ipc(table)])
        meta: dict[str, Column] = {
            name.removeprefix("meta."): out[name] for name in names if name.startswith("meta.")
        }
        for name in (n.removeprefix("offsets.") for n in names if n.startswith("offsets.")):
            meta[name] = Ragged(out[f"meta.{name}"], out[f"offsets.{name}"])
        items = (
            Items(Ragged(out["items"], out["items.offsets"]), out["items.counts"])
            if "items" in out
            else None
        )
        ids = Ragged(out["values"], out["offsets"])
        weights = Ragged(out["weights"], out["weights.offsets"]) if "weights" in out else None
        return Block(
            out["index"],
            out["part"],
            ids,
            meta,
            reply.bad,
            items,
            *reply.image_bytes,
            out["long"],
            out["lost"],
            weights,
        )

    def close(self) -> None:
        """Close the pipe of the child, which then exits; kill the child if it exits too late."""
        child, self._child = self._child, None
        if child is None:
            return
        child.pipe.close()
        child.process.join(TIMEOUTS.close_s)
        if child.process.is_alive():
            child.process.kill()
            child.process.join(TIMEOUTS.close_s)
        if child.process.exitcode is not None:
            child.process.close()

    def __enter__(self) -> TransformWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, call: Call, parts: list[Any]) -> tuple[Reply, list[str], dict[str, Any]]:
        with self._lock:
            if self._child is None:
                raise ActorLost(self.name, "the transform process was closed or lost earlier")
            try:
                _send(self._child.pipe, call, parts)
            except BlockingIOError:
                self._stalled(call.stage)
            except OSError:
                self._lost(call.stage)
            return self._receive(call.stage)

    def _receive(self, stage: str) -> tuple[Reply, list[str], dict[str, Any]]:
        assert self._child is not None
        pipe, out = self._child.pipe, {}
        try:
            reply = msgspec.json.decode(pipe.recv_bytes(), type=Reply)
            for name, dtype in reply.arrays:
                out[name] = _array(pipe.recv_bytes(), dtype)
            if reply.table:
                out["table"] = _from_ipc(pipe.recv_bytes())
        except BlockingIOError:
            self._stalled(stage)
        except (OSError, EOFError):
            self._lost(stage)
        self._cpu.seconds += reply.core_s
        if reply.error is not None:
            self._raise(reply.error)
        return reply, [name for name, _ in reply.arrays], out

    def _stalled(self, stage: str) -> NoReturn:
        """Kill the child, whose pipe may hold a partial message, and raise DataStall."""
        self._end_child(wait_s=0.0)
        raise DataStall(
            f"{self.name}, {stage} stage, to finish {self._transforms_text()}", self._deadline_s
        )

    def _lost(self, stage: str) -> NoReturn:
        code = self._end_child()
        how = describe_exit(code)
        when = "during a batch"
        if stage == "start":
            when, how = "before it started", f"{how}; stderr has the reason"
        raise ActorLost(self.name, f"its process ended {when} ({how})")

    def _end_child(self, wait_s: float = TIMEOUTS.close_s) -> int | None:
        assert self._child is not None
        process = self._child.process
        process.join(wait_s)
        if process.exitcode is None:
            process.kill()
            process.join(TIMEOUTS.close_s)
        code: int | None = process.exitcode
        self.close()
        return code

    def _raise(self, error: list[str]) -> NoReturn:
        if error[0] == "MemoryError":
            raise MemoryError(f"{self.name}: {error[1]}")
        if error[0] == "TransformError":
            raise TransformError(*error[1:])
        raise TransformError(self._pipeline.source, self.name, f"{error[0]}: {error[1]}")


def _spawn(pipeline: Pipeline, name: str, deadline_s: float) -> _Child:
    code = pack_code(pipeline, f"source {pipeline.source!r}")
    ours, theirs = forkserver.context().Pipe(duplex=True)
    _set_deadline(ours, deadline_s)
    process = forkserver.process(target=_serve, args=(theirs, code), name=name, daemon=True)
    try:
        process.start()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()  # only the child has this end now, so its exit ends a wait of the parent
    return _Child(process, ours)


def _set_deadline(pipe: Connection, seconds: float) -> None:
    """Set socket timeouts for both directions.

    ``poll`` detects only the first byte of a message, and a send has no timeout.
    """
    with socket.socket(fileno=socket.dup(pipe.fileno())) as end:
        timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _serve(pipe: Connection, code: bytes) -> None:
    """Serve calls in the child until the pipe closes; an exit of the parent closes it too."""
    # Ctrl-C reaches the whole process group; the parent decides when the child exits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.die_with_parent()  # also ends the child in the middle of a batch
    pipeline: Pipeline = unpack_code(code)
    try:
        _send(pipe, Reply(), [])
        while True:
            call = msgspec.json.decode(pipe.recv_bytes(), type=Call)
            rows = _array(pipe.recv_bytes(), "<i8") if call.stage == "slice" else None
            table, before = _from_ipc(pipe.recv_bytes()), time.process_time()
            reply, parts = _work(pipeline, call, rows, table)
            _send(pipe, msgspec.structs.replace(reply, core_s=time.process_time() - before), parts)
    except (EOFError, OSError):
        return


def _work(
    pipeline: Pipeline, call: Call, rows: np.ndarray | None, table: pa.Table
) -> tuple[Reply, list[Any]]:
    try:
        if rows is not None:
            staged = pipeline.slice_stage(table, RowIds(call.epoch, call.file, rows))
            reply = Reply([("index", staged.index.dtype.str)], True, staged.bad, staged.dropped)
            return reply, [_raw(staged.index), _to_ipc(staged.table)]
        block = pipeline.row_stage(table)
    except TransformError as fault:
        return Reply(
            error=["TransformError", fault.source, fault.transform, fault.problem, fault.remedy]
        ), []
    except Exception as fault:
        return Reply(error=[type(fault).__name__, f"{fault}{where_raised(fault)}"]), []
    arrays = {
        "index": block.index,
        "part": block.part,
        "values": block.tokens.values,
        "offsets": block.tokens.offsets,
    }
    arrays |= {"long": block.long, "lost": block.lost}
    arrays |= {
        f"meta.{name}": c.values if isinstance(c, Ragged) else c for name, c in block.meta.items()
    }
    arrays |= {
        f"offsets.{name}": c.offsets for name, c in block.meta.items() if isinstance(c, Ragged)
    }
    if block.items is not None:
        items = block.items.bytes.compact()
        arrays |= {
            "items": items.values,
            "items.offsets": items.offsets,
            "items.counts": block.items.counts,
        }
    if block.weights is not None:
        arrays |= {"weights": block.weights.values, "weights.offsets": block.weights.offsets}
    sizes = (block.image_bytes_in, block.image_bytes_out)
    reply = Reply(
        [(name, a.dtype.str) for name, a in arrays.items()], False, block.bad, image_bytes=sizes
    )
    return reply, [_raw(a) for a in arrays.values()]


def _send(pipe: Connection, header: Call | Reply, parts: list[Any]) -> None:
    pipe.send_bytes(msgspec.json.encode(header))
    for part in parts:
        pipe.send_bytes(part)


def _raw(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _array(message: bytes, dtype: str) -> np.ndarray:
    return np.frombuffer(message, dtype) if message else np.zeros(0, dtype)


def _to_ipc(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


def _from_ipc(message: bytes) -> pa.Table:
    return pa.ipc.open_stream(pa.py_buffer(message)).read_all()
