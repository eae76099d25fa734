"""The binary encoding of a plan: small and without pickle. Reading validates the plan."""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from overlord.documents import SampleDocuments
from overlord.errors import JobError, PlanError
from overlord.mesh import AXES, Mesh
from overlord.plan.plan import (
    ITEM_COLUMNS,
    MAX_BINS,
    MOST,
    OPTIONAL_COLUMNS,
    PIECE_COLUMNS,
    SAMPLE_COLUMNS,
    Assignment,
    LoadingPlan,
)
from overlord.plan.tasks import TASK_COLUMNS, PlanTasks, TaskRules, TaskTable
from overlord.sample import Ragged

MAGIC = b"OVPL\x02"
DTYPES = frozenset({"<i4", "<i8", "<u4", "<f4", "<f8"})
TABLE_COLUMNS = ("task_ptr", "task_rank", *TASK_COLUMNS)
AMOUNTS = ("memory_capacity", "host_bytes", "host_memory")  # of the rules of tasks
NUMBERS = ("n_buckets", "n_microbatches", "capacity")
DAMAGE = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    OverflowError,
    MemoryError,
    struct.error,
    JobError,
)


def write(plan: LoadingPlan) -> bytes:
    """Encode a plan as a JSON header and raw little-endian columns."""
    columns: list[np.ndarray] = []

    def put(array: np.ndarray | None) -> list[Any] | None:
        if array is None:
            return None
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        columns.append(array)
        return [array.dtype.str, len(array)]

    head: dict[str, Any] = {"step": plan.step, "names": list(plan.names), "extra": dict(plan.extra)}
    if (place := plan.place) is not None:
        head["place"] = _mesh(place)
    head["columns"] = {n: put(getattr(plan, n)) for n in SAMPLE_COLUMNS}
    if plan.offset is not None:
        head["columns"] |= {n: put(getattr(plan, n)) for n in PIECE_COLUMNS}
    head["modules"] = {
        name: {n: getattr(a, n) for n in (*NUMBERS, "axis", "memory_capacity")}
        | {"broadcast": list(a.broadcast)}
        | ({} if a.on is None else {"on": _mesh(a.on)})
        | {"columns": {n: put(getattr(a, n)) for n in (*ITEM_COLUMNS, *OPTIONAL_COLUMNS)}}
        for name, a in plan.modules.items()
    }
    if (tasks := plan.tasks) is not None:
        columns_of = {n: getattr(tasks.table, n) for n in TABLE_COLUMNS}
        columns_of |= {"task": tasks.task, "end": tasks.end}
        head["tasks"] = {
            "rules": _rules(tasks.rules),
            "offload_share": tasks.offload_share,
            "bound": tasks.bound,
            "columns": {n: put(column) for n, column in columns_of.items()},
        }
    if (documents := plan.documents) is not None:
        head["documents"] = {
            "number": put(documents.number),
            "lengths": _ragged(documents.lengths, put),
            "columns": {n: _ragged(c, put) for n, c in documents.columns.items()},
        }
    text = json.dumps(head).encode()
    return MAGIC + struct.pack("<Q", len(text)) + text + b"".join(c.tobytes() for c in columns)


def _ragged(column: Ragged, put: Callable[[np.ndarray], Any]) -> list[Any]:
    whole = column.compact()
    return [put(whole.values), put(whole.offsets)]


def _rules(rules: TaskRules) -> dict[str, Any]:
    found = asdict(rules)
    if rules.virtual == 1:  # as plans before interleaved stages had it
        del found["virtual"]
    return found


def _mesh(mesh: Mesh) -> dict[str, Any]:
    first = {"first_rank": mesh.first_rank} if mesh.first_rank else {}
    vpp = {"vpp": mesh.vpp} if mesh.vpp > 1 else {}
    return {axis: getattr(mesh, axis) for axis in AXES} | {"order": list(mesh.order)} | first | vpp


def read(data: bytes) -> LoadingPlan:
    """Return the validated plan of bytes from ``write``; raise ``PlanError`` for any others."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise PlanError(f"expected the bytes of a plan, got {type(data).__name__}")
    if data[: len(MAGIC)] != MAGIC:
        raise PlanError(
            f"expected the bytes of a plan, which start with {MAGIC!r}, got {len(data)} bytes with "
            "another start",
            remedy="pass bytes that to_bytes() of this version returned",
        )
    try:
        return _read(data).validate()
    except DAMAGE as e:
        raise PlanError(
            f"the bytes of a plan are damaged: {type(e).__name__}: {e}",
            remedy="write the plan again with to_bytes()",
        ) from e


def _read(data: bytes) -> LoadingPlan:
    (size,) = struct.unpack_from("<Q", data, len(MAGIC))
    at = len(MAGIC) + 8 + size
    head = json.loads(data[len(MAGIC) + 8 : at])

    def get(spec: list[Any] | None) -> np.ndarray | None:
        nonlocal at
        if spec is None:
            return None
        kind, count = spec
        if kind not in DTYPES or not isinstance(count, int) or count < 0:
            raise ValueError(
                f"column: expected a known dtype and a length of at least 0, got {kind!r} and "
                f"{count!r}"
            )
        array = np.frombuffer(data, kind, count, at) if count else np.zeros(0, kind)
        at += array.nbytes
        return array

    columns: dict[str, Any] = {n: get(head["columns"][n]) for n in SAMPLE_COLUMNS}
    columns |= {n: get(head["columns"][n]) for n in PIECE_COLUMNS if n in head["columns"]}
    modules = {}
    for name, m in head["modules"].items():
        items = {n: get(m["columns"][n]) for n in (*ITEM_COLUMNS, *OPTIONAL_COLUMNS)}
        modules[str(name)] = _assignment(str(name), m, items)
    tasks = _tasks(head["tasks"], get) if "tasks" in head else None
    documents = _documents(head["documents"], get) if "documents" in head else None
    if at != len(data):
        raise ValueError(f"expected {at} bytes, as the header states, got {len(data)}")
    if any(columns[n] is None for n in SAMPLE_COLUMNS if n != "substep"):
        raise ValueError("expected every sample column, got some without values")
    place = Mesh(**head["place"]) if "place" in head else None
    if place is not None and place.world_size > MAX_BINS:
        raise ValueError(f"expected a mesh of at most {MAX_BINS} ranks, got {place.world_size}")
    return LoadingPlan(
        step=operator.index(head["step"]),
        names=tuple(str(n) for n in head["names"]),
        extra=dict(head["extra"]),
        place=place,
        modules=modules,
        tasks=tasks,
        documents=documents,
        **columns,
    )


def _documents(
    head: dict[str, Any], get: Callable[[list[Any] | None], np.ndarray | None]
) -> SampleDocuments:
    def column(spec: list[Any]) -> np.ndarray:
        if (found := get(spec)) is None:
            raise ValueError("documents: expected every column, got one without values")
        return found

    def ragged(spec: list[Any]) -> Ragged:
        values, offsets = (column(part) for part in spec)
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(values):
            raise ValueError("documents: expected offsets of all values, got others")
        if (offsets[1:] < offsets[:-1]).any():
            raise ValueError("documents: expected offsets that rise, got others")
        return Ragged(values, offsets)

    number, lengths = column(head["number"]), ragged(head["lengths"])
    columns = {str(n): ragged(spec) for n, spec in head["columns"].items()}
    return SampleDocuments(number, lengths, columns)


def _tasks(head: dict[str, Any], get: Callable[[list[Any] | None], np.ndarray | None]) -> PlanTasks:
    columns: dict[str, Any] = {n: get(head["columns"][n]) for n in (*TABLE_COLUMNS, "task", "end")}
    end = columns.pop("end")
    if any(column is None for column in columns.values()):
        raise ValueError("a column of the tasks is missing")
    task, kinds = columns.pop("task"), dict.fromkeys(AMOUNTS, float) | {"equal_counts": bool}
    given: dict[str, Any] = {
        n: kinds.get(n, operator.index)(value) for n, value in head["rules"].items()
    }
    rules = TaskRules(**given)
    if (
        min(rules.ranks, rules.stages, rules.count_multiple, rules.node, rules.virtual) < 1
        or min(rules.capacity, rules.multiple) < 0
        or max(rules.ranks, rules.multiple, rules.node) > MAX_BINS
    ):
        raise ValueError(f"rules of tasks: expected at least one rank and stage, got {rules}")
    share = float(head["offload_share"])
    if not (0 <= share <= 1 and all(0 <= getattr(rules, name) < MOST for name in AMOUNTS)):
        raise ValueError(f"offload of tasks: expected a share of 0 to 1, got {share}")
    table = TaskTable(**columns)
    bound = head["bound"]
    if bound is not None and not 0 <= (bound := float(bound)) < MOST:
        raise ValueError(f"bound of tasks: expected a time of at least 0, got {bound}")
    return PlanTasks(table=table, task=task, rules=rules, offload_share=share, end=end, bound=bound)


def _assignment(name: str, head: dict[str, Any], columns: dict[str, Any]) -> Assignment:
    if any(columns[n] is None for n in ITEM_COLUMNS):
        raise ValueError(f"module {name!r}: expected every column, got some without values")
    counts: dict[str, Any] = {n: operator.index(head[n]) for n in NUMBERS}
    # before any memory is allocated
    if (
        counts["n_buckets"] < 1
        or not 0 < counts["n_buckets"] * counts["n_microbatches"] <= MAX_BINS
    ):
        raise ValueError(
            f"module {name!r}: expected 1 to {MAX_BINS} microbatches over all buckets, got "
            f"{counts['n_buckets']} buckets of {counts['n_microbatches']}"
        )
    memory_capacity = float(head["memory_capacity"])
    if not math.isfinite(memory_capacity):
        raise ValueError(f"expected a finite memory_capacity, got {memory_capacity}")
    broadcast = tuple(str(b) for b in head["broadcast"])
    return Assignment(
        axis=str(head["axis"]),
        broadcast=broadcast,
        memory_capacity=memory_capacity,
        on=Mesh(**head["on"]) if "on" in head else None,
        **counts,
        **columns,
    )
