"""LoadingPlan: which sample goes to which bucket, microbatch and slot. Arrays, not objects.

A plan is a value: it can be validated, digested, printed, sent and replayed. It knows nothing of how it was made.
"""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from overlord.errors import PlanError
from overlord.hashing import digest
from overlord.sample import SampleId

MAGIC = b"OVPL\x01"
DTYPES = frozenset({"<i4", "<i8", "<u4", "<u8", "<f8"})
SAMPLE_COLUMNS = ("source", "epoch", "file", "row", "part", "tokens", "substep")
ITEM_COLUMNS = ("sample", "bucket", "microbatch", "slot", "size", "cost")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """Where the items of one module (backbone, encoder) go. Item i belongs to sample ``sample[i]`` of the plan."""

    axis: str  # "DP", "CP", "WORLD"
    n_buckets: int
    n_microbatches: int
    sample: np.ndarray  # int64: row of the plan's sample columns
    bucket: np.ndarray  # int32
    microbatch: np.ndarray  # int32
    slot: np.ndarray  # int32: place inside the microbatch
    size: np.ndarray  # int64: tokens that count against the capacity, document padding included
    cost: np.ndarray  # float64
    capacity: int = 0  # tokens of one microbatch; 0: none
    broadcast: tuple[str, ...] = ()  # axes along which the trainer broadcasts: one rank of each group fetches

    def order(self) -> np.ndarray:
        """Items sorted by (bucket, microbatch, slot): the way a constructor walks them. Slots are dense, so nothing is sorted."""
        bins = self.bins()
        counts = np.bincount(bins, minlength=self.n_buckets * self.n_microbatches)
        order = np.empty(len(bins), np.int64)
        order[(np.cumsum(counts) - counts)[bins] + self.slot] = np.arange(len(bins))
        return order

    def bins(self) -> np.ndarray:
        """Number of each item's microbatch, counted over all buckets."""
        return self.bucket.astype(np.int64) * self.n_microbatches + self.microbatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadingPlan:
    """The plan of one step. Sample columns are in the order of the draw; ``modules["backbone"]`` places them."""

    step: int
    names: tuple[str, ...]  # source names
    source: np.ndarray  # int32
    epoch: np.ndarray  # int32
    file: np.ndarray  # int32
    row: np.ndarray  # int64
    part: np.ndarray  # int32
    tokens: np.ndarray  # int64
    modules: Mapping[str, Assignment]
    substep: np.ndarray | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # JSON values for people (strategy name, wanted weights)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def main(self) -> Assignment:
        return self.modules["backbone"]

    @property
    def n_microbatches(self) -> int:
        return self.main.n_microbatches

    def __repr__(self) -> str:
        a = self.main
        return (
            f"LoadingPlan(step {self.step}, {len(self)} samples, {int(self.tokens.sum())} tokens -> "
            f"{a.n_buckets} buckets x {a.n_microbatches} microbatches, imbalance {self.imbalance()['bucket']:.3f})"
        )

    def sample_id(self, i: int) -> SampleId:
        return SampleId(self.names[int(self.source[i])], int(self.epoch[i]), int(self.file[i]), int(self.row[i]), int(self.part[i]))

    def validate(self) -> LoadingPlan:
        """Every sample in exactly one slot of the backbone, slots dense, capacity kept; returns itself."""
        if "backbone" not in self.modules:
            raise PlanError("no module 'backbone'", self.step, "end the strategy with .plan()")
        n = len(self)
        if any(len(getattr(self, column)) != n for column in ("epoch", "file", "row", "part", "tokens")):
            raise PlanError("the sample columns differ in length", self.step)
        for name, a in self.modules.items():
            self._validate_module(name, a)
        main = self.main
        if len(main.sample) != n or not np.array_equal(np.bincount(main.sample, minlength=n), np.ones(n, np.int64)):
            raise PlanError(
                "the backbone does not place every drawn sample exactly once", self.step, "a strategy neither adds nor drops samples"
            )
        return self

    def _validate_module(self, name: str, a: Assignment) -> None:
        columns = {label: getattr(a, label) for label in ITEM_COLUMNS}
        if a.n_buckets < 1 or a.n_microbatches < 1 or len({column.shape for column in columns.values()}) > 1:
            raise PlanError(f"module {name!r}: no buckets, no microbatches, or columns of different length", self.step)
        for label, column in columns.items():
            if label != "cost" and column.dtype.kind not in "iu":
                raise PlanError(f"module {name!r}: wanted whole numbers in {label}, found {column.dtype}", self.step)
        for label, column, bound in (
            ("bucket", a.bucket, a.n_buckets), ("microbatch", a.microbatch, a.n_microbatches), ("sample", a.sample, len(self)),
        ):  # fmt: skip
            if len(column) and (int(column.min()) < 0 or int(column.max()) >= bound):
                raise PlanError(f"module {name!r}: {label} outside 0..{bound - 1}", self.step)
        n_bins = a.n_buckets * a.n_microbatches
        flat = a.bins()
        if a.capacity and len(flat):
            load = np.bincount(flat, weights=a.size, minlength=n_bins)
            if load.max() > a.capacity:
                worst = int(load.argmax())
                raise PlanError(
                    f"module {name!r}: microbatch {worst % a.n_microbatches} of bucket {worst // a.n_microbatches} holds "
                    f"{int(load[worst])} tokens, more than its capacity of {a.capacity}", self.step,
                )  # fmt: skip
        # Slots are dense when the slot numbers of each bin sum to n(n-1)/2, none reaches its bin's count, and none stands twice.
        counts = np.bincount(flat, minlength=n_bins)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        place = starts[flat] + a.slot
        if len(flat) and (a.slot.min() < 0 or (a.slot >= counts[flat]).any() or np.bincount(place, minlength=len(flat)).max() > 1):
            raise PlanError(f"module {name!r}: two items share a slot, or a slot is left empty", self.step)

    def digest(self) -> str:
        """Equal plans, equal digest, on every machine."""
        parts: list[str | np.ndarray] = [str(self.step), "\x1f".join(self.names)]
        parts += [self.source, self.epoch, self.file, self.row, self.part, self.tokens]
        for name, a in sorted(self.modules.items()):
            parts += [name, a.axis, f"{a.n_buckets}x{a.n_microbatches}", a.sample, a.bucket, a.microbatch, a.slot]
        return digest(*parts)

    def imbalance(self, module: str = "backbone") -> dict[str, float]:
        """``bucket``: max over mean of total cost by bucket; ``microbatch``: sum over slots of the max over the mean;
        ``bound``: what no placement can pass, the dearest single sample over the mean bucket."""
        a = self.modules[module]
        loads = self.loads(module)
        total = float(loads.sum())
        if total <= 0:
            return {"bucket": 1.0, "microbatch": 1.0, "bound": 1.0}
        mean = total / a.n_buckets
        return {
            "bucket": float(loads.sum(axis=1).max()) / mean,
            "microbatch": float(loads.max(axis=0).sum()) / mean,
            "bound": max(1.0, float(a.cost.max()) / mean),
        }

    def loads(self, module: str = "backbone") -> np.ndarray:
        """Cost by [bucket, microbatch]."""
        a = self.modules[module]
        flat = a.bins()
        return np.bincount(flat, weights=a.cost, minlength=a.n_buckets * a.n_microbatches).reshape(a.n_buckets, a.n_microbatches)

    def fill(self) -> float:
        """Share of the microbatches' capacity that holds tokens."""
        a = self.main
        room = a.capacity * a.n_buckets * a.n_microbatches
        return float(a.size.sum()) / room if room else 1.0

    def to_table(self) -> str:
        """Cost, tokens and samples by bucket and microbatch, for people."""
        a = self.main
        flat = a.bins()
        shape, n = (a.n_buckets, a.n_microbatches), a.n_buckets * a.n_microbatches
        tokens = np.bincount(flat, weights=self.tokens[a.sample], minlength=n).reshape(shape).astype(int)
        samples = np.bincount(flat, minlength=n).reshape(shape)
        loads = self.loads()
        mean = loads.sum() / a.n_buckets or 1.0
        lines = [repr(self), f"{'bucket':>6}  {'cost/mean':>9}  {'tokens':>9}  {'samples':>7}  tokens (samples) by microbatch"]
        for b in range(min(a.n_buckets, 64)):
            cells = "  ".join(f"{tokens[b, m]} ({samples[b, m]})" for m in range(min(a.n_microbatches, 16)))
            lines.append(f"{b:>6}  {loads[b].sum() / mean:>9.3f}  {tokens[b].sum():>9}  {samples[b].sum():>7}  {cells}")
        if a.n_buckets > 64:
            lines.append(f"... {a.n_buckets - 64} more buckets")
        return "\n".join(lines)

    def to_bytes(self) -> bytes:
        """A small binary form without pickle: a JSON header, then raw little-endian columns."""
        columns: list[np.ndarray] = []

        def put(array: np.ndarray | None) -> list[Any] | None:
            if array is None:
                return None
            array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            columns.append(array)
            return [array.dtype.str, len(array)]

        head: dict[str, Any] = {"step": self.step, "names": list(self.names), "extra": dict(self.extra)}
        head["columns"] = {n: put(getattr(self, n)) for n in SAMPLE_COLUMNS}
        head["modules"] = {
            name: {n: getattr(a, n) for n in ("axis", "n_buckets", "n_microbatches", "capacity")} | {"broadcast": list(a.broadcast)}
            | {"columns": {n: put(getattr(a, n)) for n in ITEM_COLUMNS}}
            for name, a in self.modules.items()
        }  # fmt: skip
        text = json.dumps(head).encode()
        return MAGIC + struct.pack("<Q", len(text)) + text + b"".join(c.tobytes() for c in columns)

    @staticmethod
    def from_bytes(data: bytes) -> LoadingPlan:
        """What ``to_bytes`` wrote. Bytes are never trusted: whatever is wrong with them is a ``PlanError``."""
        if data[: len(MAGIC)] != MAGIC:
            raise PlanError(f"these {len(data)} bytes are no plan: they do not start with {MAGIC!r}")
        try:
            return _read(data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, struct.error) as e:
            raise PlanError(f"the bytes of a plan are damaged: {type(e).__name__}: {e}", remedy="the file is cut or damaged") from e


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
            raise ValueError(f"a column of {count!r} {kind!r}")
        array = np.frombuffer(data, kind, count, at) if count else np.zeros(0, kind)
        at += array.nbytes
        return array

    columns: dict[str, Any] = {n: get(head["columns"][n]) for n in SAMPLE_COLUMNS}
    modules = {}
    for name, m in head["modules"].items():
        cols: dict[str, Any] = {n: get(m["columns"][n]) for n in ITEM_COLUMNS}
        if any(c is None for c in cols.values()):
            raise ValueError(f"module {name!r} lacks a column")
        counts: dict[str, Any] = {n: operator.index(m[n]) for n in ("n_buckets", "n_microbatches", "capacity")}
        modules[str(name)] = Assignment(axis=str(m["axis"]), broadcast=tuple(str(b) for b in m["broadcast"]), **counts, **cols)
    if at != len(data):
        raise ValueError(f"{len(data)} bytes where the header tells of {at}")
    if any(columns[n] is None for n in SAMPLE_COLUMNS if n != "substep"):
        raise ValueError("a sample column is missing")
    names = tuple(str(n) for n in head["names"])
    return LoadingPlan(step=operator.index(head["step"]), names=names, extra=dict(head["extra"]), modules=modules, **columns)
