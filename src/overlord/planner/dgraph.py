"""DGraph: a step's samples on their way to ranks, as a value that every primitive turns into a new one.

    DGraph.from_buffer(buffer, place).mix().distribute("DP").cost(fn).balance("greedy").broadcast_at("TP").plan()

The nodes are rows of arrays: a sample each, or an item each (an image) after ``select`` of a ragged column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from overlord.errors import JobError, PlanError
from overlord.placetree import ClientPlaceTree
from overlord.plan import Assignment, LoadingPlan
from overlord.planner import kernel
from overlord.planner.balance import Placement, Problem, method_named, place
from overlord.planner.cost import CostFn
from overlord.planner.draw import Drawer, Drawn, step_order
from overlord.planner.schedule import Schedule, Weights, by_source
from overlord.sample import Buffer, Ragged

BROADCASTS = ("TP", "CP", "PP")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DGraph:
    """Immutable. ``sample`` says which row of the buffer each node belongs to; ``columns`` is the nodes' metadata."""

    buffer: Buffer
    tree: ClientPlaceTree
    sample: np.ndarray  # int64
    columns: Mapping[str, np.ndarray]
    meta: tuple[str, ...] = ()  # as selected; empty: every column that has one value a sample
    items: bool = False  # a node per item of a ragged column
    mixed: bool = False
    axis: str | None = None
    group_size: int | None = None
    costs: np.ndarray | None = None
    capacity: int = 0
    placement: Placement | None = None
    broadcast: tuple[str, ...] = ()
    trail: tuple[str, ...] = field(default=())  # what was done, for people

    @staticmethod
    def from_buffer(buffer: Buffer, place: ClientPlaceTree, meta: str | Sequence[str] | None = None) -> DGraph:
        names = (meta,) if isinstance(meta, str) else tuple(meta or ())
        sample, columns, items = _nodes(buffer, names)
        return DGraph(buffer=buffer, tree=place, sample=sample, columns=columns, meta=names, items=items)

    def select(self, *meta: str, sources: Sequence[str] | None = None) -> DGraph:
        """The graph over these metadata columns (a ragged one gives a node per item), and over these sources only."""
        self._before("select", "balance", self.placement)
        buffer, chosen = self.buffer, np.unique(self.sample) if sources is None else _rows_of(self.buffer, sources)
        if not buffer.drawn:  # candidates: what is left out is not drawn
            buffer, chosen = buffer.take(chosen), np.arange(len(chosen))
        names = meta or self.meta
        sample, columns, items = _nodes(buffer, names)
        if len(chosen) < len(buffer):
            kept = np.isin(sample, chosen)
            sample, columns = sample[kept], {n: c[kept] for n, c in columns.items()}
        what = ", ".join((*names, *(() if sources is None else (f"sources {', '.join(sources)}",))))
        return replace(
            self, buffer=buffer, sample=sample, columns=columns, meta=names, items=items, costs=None, trail=(*self.trail, f"select({what})")
        )

    def mix(self, schedule: Schedule | Weights | None = None, *, draw: str = "exact", seed: int = 0) -> DGraph:
        """The job's draw; on a hand-made buffer, the step that this mixture draws from the candidates."""
        self._before("mix", "mix", self.mixed or None)
        if self.buffer.drawn:
            if schedule is not None:
                raise PlanError(
                    "the job's mixture has drawn this step already", self.buffer.step, "call .mix(); change Job.mixture instead"
                )
            return replace(self, mixed=True, trail=(*self.trail, "mix()"))
        if schedule is None:
            raise PlanError("a hand-made buffer has no draw yet", self.buffer.step, "give .mix() a schedule or weights")
        if draw not in ("exact", "random"):
            raise PlanError(f"unknown draw {draw!r}; known: exact, random", self.buffer.step)
        buffer = _draw(self.buffer, schedule, draw, seed)
        sample, columns, items = _nodes(buffer, self.meta)
        return replace(self, buffer=buffer, sample=sample, columns=columns, items=items, mixed=True, trail=(*self.trail, f"mix({draw})"))

    def distribute(self, axis: str, group_size: int | None = None) -> DGraph:
        """Which ranks consume as one: ``DP``, ``CP`` or ``WORLD``. ``group_size``: balance over groups of buckets first."""
        self._before("distribute", "balance", self.placement)
        try:
            n = self.tree.n_buckets(axis)
        except JobError as e:
            raise PlanError(e.problems[0], self.buffer.step) from None
        groups = "" if group_size is None else f", groups of {group_size}"
        return replace(self, axis=axis, group_size=group_size, trail=(*self.trail, f"distribute({axis}: {n} buckets{groups})"))

    def cost(self, fn: CostFn, memory: CostFn | None = None) -> DGraph:
        """What each node costs. ``fn`` gets the nodes' metadata columns and returns one number each."""
        self._before("cost", "balance", self.placement)
        if memory is not None:
            raise PlanError("cost(memory=) is not available in this version", self.buffer.step, "bound microbatches by capacity= in tokens")
        costs = np.asarray(fn(self.columns), np.float64)
        if costs.shape != self.sample.shape:
            raise PlanError(f"cost function {_name(fn)}: wanted {len(self.sample)} numbers, found shape {costs.shape}", self.buffer.step)
        if len(costs) and not (np.isfinite(costs).all() and costs.min() >= 0):
            raise PlanError(f"cost function {_name(fn)} gave a number that is negative, infinite or none at all", self.buffer.step)
        return replace(self, costs=costs, trail=(*self.trail, f"cost({_name(fn)})"))

    def balance(
        self,
        method: str = "greedy",
        level: str = "both",
        objective: str = "iteration",
        keep_order: bool = False,
        capacity: int | None = None,
    ) -> DGraph:
        """Buckets and microbatches for all nodes.

        ``capacity`` is that of one microbatch, by default the batch's context for samples and none for items, which are
        then placed once for the whole step. ``keep_order``: microbatch k of all buckets together is the stream's k-th run.
        """
        self._before("balance", "balance", self.placement)
        method_named(method)
        if self.axis is None:
            raise PlanError(f"balance({method!r}) comes before distribute", self.buffer.step, "call .distribute(axis) first")
        graph = self if self.costs is not None else replace(self, costs=self.sizes().astype(np.float64))
        if capacity is None:
            capacity = 0 if self.items else self.buffer.batch.context
        least = self.buffer.batch.microbatches if capacity else 1
        self.check_sizes(capacity)
        assert graph.costs is not None
        problem = Problem(
            costs=graph.costs, sizes=self.sizes(), n_buckets=self.tree.n_buckets(self.axis), microbatches=least, capacity=capacity,
            group_size=self.group_size, method=method,
        )  # fmt: skip
        try:
            found = place(problem, level=level, objective=objective, keep_order=keep_order)
        except PlanError as e:
            raise PlanError(e.problem, self.buffer.step, e.remedy) from None
        return graph.placed(found, f"balance({method}, {level}, {objective}{', keep_order' if keep_order else ''})", capacity)

    def placed(self, placement: Placement, what: str, capacity: int) -> DGraph:
        """With a placement made elsewhere: for strategies that do not balance."""
        done = f"{what}: {placement.way}, M={placement.n_microbatches}"
        return replace(self, placement=placement, capacity=capacity, trail=(*self.trail, done))

    def broadcast_at(self, *dims: str) -> DGraph:
        """Axes along which the trainer broadcasts: one rank of each such group fetches, the others get nothing."""
        unknown = [d for d in dims if d not in BROADCASTS]
        if unknown:
            raise PlanError(f"unknown broadcast axis {unknown[0]!r}; known: {', '.join(BROADCASTS)}", self.buffer.step)
        both = (*self.broadcast, *(d for d in dict.fromkeys(dims) if d not in self.broadcast))
        return replace(self, broadcast=both, trail=(*self.trail, f"broadcast_at({', '.join(dims)})"))

    def plan(self, **modules: DGraph) -> LoadingPlan:
        """The validated plan; other balanced graphs of the same samples become modules: ``plan(encoder=images)``."""
        b = self.buffer
        if "backbone" in modules:
            raise PlanError("the graph that .plan() is called on is the backbone", b.step, "give the other module another name")
        for name, graph in modules.items():
            if not all(np.array_equal(getattr(graph.buffer, n), getattr(b, n)) for n in ("source", "epoch", "file", "row", "part")):
                raise PlanError(f"module {name!r} was made from other samples", b.step, "start both graphs from one mixed graph")
        tokens = b.column("tokens")
        assert isinstance(tokens, np.ndarray)
        return LoadingPlan(
            step=b.step, names=b.names, source=b.source, epoch=b.epoch, file=b.file, row=b.row, part=b.part,
            tokens=tokens.astype(np.int64, copy=False), substep=b.substep,
            modules={"backbone": self._assignment("backbone"), **{n: g._assignment(n) for n, g in modules.items()}},
            extra={"trail": list(self.trail), "weights": dict(b.weights)},
        ).validate()  # fmt: skip

    def _assignment(self, name: str) -> Assignment:
        if not self.mixed:
            raise PlanError(f"module {name!r} was never mixed", self.buffer.step, "call .mix() after from_buffer")
        if self.axis is None or self.placement is None:
            missing = "distribute" if self.axis is None else "balance"
            raise PlanError(f"module {name!r} was never given {missing}()", self.buffer.step, 'balance("none") keeps stream order')
        p, n = self.placement, self.tree.n_buckets(self.axis)
        costs = self.sizes().astype(np.float64) if self.costs is None else self.costs
        slot = _slots(p.bucket.astype(np.int64) * p.n_microbatches + p.microbatch, n * p.n_microbatches)
        return Assignment(
            axis=self.axis, n_buckets=n, n_microbatches=p.n_microbatches, sample=self.sample, bucket=p.bucket, microbatch=p.microbatch,
            slot=slot, size=self.sizes(), cost=costs, capacity=self.capacity, broadcast=self.broadcast,
        )  # fmt: skip

    def sizes(self) -> np.ndarray:
        """What counts against the capacity: a document's tokens with its padding; for items, the first selected column."""
        if self.items:
            return self.columns[self.meta[0]].astype(np.int64)
        tokens = self.buffer.column("tokens")
        assert isinstance(tokens, np.ndarray)
        if len(self.sample) < len(tokens):
            tokens = tokens[self.sample]
        multiple = self.buffer.batch.pad_multiple * (2 * self.tree.cp if self.tree.cp > 1 else 1)
        return tokens.astype(np.int64, copy=False) if multiple == 1 else -(-tokens.astype(np.int64) // multiple) * multiple

    def check_sizes(self, capacity: int) -> None:
        """Refuse a sample that no microbatch can hold, by its name."""
        sizes = self.sizes()
        if capacity and len(sizes) and int(sizes.max()) > capacity:
            i = int(sizes.argmax())
            raise PlanError(
                f"sample {self.buffer[int(self.sample[i])]} has {int(sizes[i])} tokens with padding, a microbatch holds {capacity}",
                self.buffer.step, "raise the context, or let on_long cut or split long samples",
            )  # fmt: skip

    def _before(self, primitive: str, other: str, done: object) -> None:
        if done is not None:
            raise PlanError(f"{primitive}() was called after {other}()", self.buffer.step, f"call .{primitive}() earlier, and once")

    def __repr__(self) -> str:
        nodes = f"{len(self.sample)} items of {len(self.buffer)} samples" if self.items else f"{len(self.sample)} samples"
        return f"DGraph(step {self.buffer.step}, {nodes} on {self.tree}" + "".join(f"\n  -> {t}" for t in self.trail) + ")"

    def to_mermaid(self) -> str:
        """A flowchart: sources, primitives, buckets with their load over the mean (the first eight of each)."""
        lines, counts = ["flowchart LR"], np.bincount(self.buffer.source[self.sample], minlength=len(self.buffer.names))
        for i, name in list(enumerate(self.buffer.names))[:8]:
            lines.append(f'  s{i}["{_label(name)}: {counts[i]}"] --> p0')
        steps = self.trail or ("samples",)
        for i, what in enumerate(steps):
            lines.append(f'  p{i}["{_label(what)}"]' + (f" --> p{i + 1}" if i + 1 < len(steps) else ""))
        if self.placement is not None and self.axis is not None and self.costs is not None:
            n = self.tree.n_buckets(self.axis)
            loads = np.bincount(self.placement.bucket, weights=self.costs, minlength=n)
            mean = float(loads.mean()) or 1.0
            lines += [f'  p{len(steps) - 1} --> b{i}["bucket {i}: {loads[i] / mean:.3f}"]' for i in range(min(n, 8))]
        return "\n".join(lines)


def _nodes(buffer: Buffer, names: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray], bool]:
    """(buffer row of each node, metadata columns, whether nodes are items)."""
    if not names:
        return np.arange(len(buffer)), {n: c for n, c in buffer.meta.items() if isinstance(c, np.ndarray)}, False
    found = {name: buffer.column(name) for name in names}
    ragged = {n: c for n, c in found.items() if isinstance(c, Ragged)}
    if not ragged:
        return np.arange(len(buffer)), {n: c for n, c in found.items() if isinstance(c, np.ndarray)}, False
    lengths = next(iter(ragged.values())).lengths
    sample = np.repeat(np.arange(len(buffer)), lengths)
    columns: dict[str, np.ndarray] = {}
    for name, column in found.items():
        if isinstance(column, Ragged) and not np.array_equal(column.lengths, lengths):
            other = next(iter(ragged))
            raise PlanError(f"metadata {name!r} has other item counts than {other!r}", buffer.step, "select them in two graphs")
        columns[name] = column.values[column.offsets[0] : column.offsets[-1]] if isinstance(column, Ragged) else column[sample]
    return sample, dict(sorted(columns.items(), key=lambda c: c[0] not in ragged)), True


def _rows_of(buffer: Buffer, sources: Sequence[str]) -> np.ndarray:
    unknown = [s for s in sources if s not in buffer.names]
    if unknown:
        raise PlanError(f"unknown source {unknown[0]!r}; known: {', '.join(buffer.names)}", buffer.step)
    return np.flatnonzero(np.isin(buffer.source, [buffer.names.index(s) for s in sources]))


def _slots(bins: np.ndarray, n_bins: int) -> np.ndarray:
    """Place of every node inside its bin, in the order of the draw."""
    order = kernel.by_key(bins, n_bins)
    counts = np.bincount(bins, minlength=n_bins)
    slot = np.empty(len(bins), np.int32)
    slot[order] = np.arange(len(bins)) - np.repeat(np.cumsum(counts) - counts, counts)
    return slot


class _Front:
    """The candidates of one source, all known: what the draw asks of a stream."""

    ended = True

    def __init__(self, tokens: np.ndarray):
        self.ready = len(tokens)
        self._ends = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])

    def samples_for(self, start: int, tokens: int) -> tuple[int, int]:
        stop = min(int(np.searchsorted(self._ends, self._ends[start] + tokens)), self.ready)
        return stop - start, int(self._ends[stop] - self._ends[start])


def _draw(buffer: Buffer, schedule: Schedule | Weights, draw: str, seed: int) -> Buffer:
    """Step ``buffer.step`` drawn from the candidates with nothing owed: the exact rule of docs/stream.md."""
    said = schedule(buffer.step, {}) if callable(schedule) else schedule
    weights = by_source(said, buffer.names)
    if draw == "random" and buffer.batch.tokens is not None:
        raise PlanError('draw="random" goes with a batch in samples', buffer.step)
    tokens = buffer.column("tokens")
    assert isinstance(tokens, np.ndarray)
    rows = [np.flatnonzero(buffer.source == i) for i in range(len(buffer.names))]
    drawer = Drawer(samples=buffer.batch.samples, tokens=buffer.batch.tokens, draws=1, random=draw == "random", seed=seed, fill=True)
    n = len(rows)
    drawn = drawer.draw(buffer.step, weights, [0] * n, [True] * n, [_Front(tokens[r]) for r in rows])
    assert isinstance(drawn, Drawn), "every front has ended, so nothing can be missing"
    source, k = step_order(drawn.counts[0])
    first = np.cumsum([0, *(len(r) for r in rows)])[:-1]
    picked = np.concatenate(rows)[first[source] + k] if len(source) else np.zeros(0, np.int64)
    return replace(buffer.take(picked), drawn=True, weights=dict(zip(buffer.names, weights, strict=True)))


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", None) or repr(fn)


def _label(text: str) -> str:
    return text.replace('"', "'")
