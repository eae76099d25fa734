"""DGraph: the samples of a step, and their placement in progress.

A graph is a value, and every primitive returns a new one.

    graph = DGraph.from_buffer(buffer, place).mix().distribute("DP").cost(fn)
    plan = graph.balance("greedy").broadcast_at("TP").plan()

The nodes are rows of arrays: one per sample, or one per item (an image) after ``select`` of a
ragged column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.documents import LENGTHS
from overlord.errors import JobError, PlanError
from overlord.mesh import Mesh, broadcast_dims
from overlord.plan.module_ranks import own_mesh
from overlord.plan.plan import LoadingPlan, check_modules
from overlord.plan.tasks import PlanTasks
from overlord.planning.balance.balance import (
    ONCE,
    ItemPlacement,
    PackingProblem,
    method_named,
    place,
)
from overlord.planning.cost import CostFn, checked_costs, named, title_of, unit_of
from overlord.planning.document_nodes import documents_of_buffer, lengths_of, sample_sizes, summed
from overlord.planning.graph.edges import Edge, edges_of
from overlord.planning.graph.lineage import (
    Binding,
    Bound,
    assignment_of,
    check_memory,
    check_module,
    described,
    nodes,
    of_sources,
    read_only,
    unbound,
)
from overlord.planning.images import ItemSamples, Placeholders, place_by_samples, placeholders
from overlord.planning.manual_draw import draw_by_hand
from overlord.planning.schedule import Schedule, Weights
from overlord.planning.selection import Prefer, choose, preferred
from overlord.planning.shapes import fitting_rows, packing_sizes
from overlord.sample import IDS, Buffer, Column, Ragged, loader_is_hidden

if TYPE_CHECKING:
    from os import PathLike


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DGraph:
    """A step's samples or items, with the primitives applied so far. Immutable.

    ``sample`` is the buffer row of each node; ``columns`` is the metadata of the nodes.
    """

    buffer: Buffer
    tree: Mesh
    sample: np.ndarray  # int64
    columns: Mapping[str, np.ndarray]
    meta: tuple[str, ...] = ()  # as selected; empty: every column with one value per sample
    items: bool = False  # a node per item of a ragged column
    merge: int = 1  # items: side length, in patches, of one output token
    sources: tuple[str, ...] | None = None  # as selected; None: all
    mixed: bool = False
    axis: str | None = None
    on: Mesh | None = None  # the module's own mesh; None: ``tree``
    group_size: int | None = None
    costs: np.ndarray | None = None
    costs_by: CostFn | None = None  # the function that gave them
    memory: np.ndarray | None = None  # memory of each node, if cost(memory=) was given
    memory_capacity: float = 0.0
    unit: str = ""  # unit of the costs, if the cost function has one ("s")
    capacity: int = 0
    placement: ItemPlacement | None = None
    tasks: PlanTasks | None = None  # after split(): the ring of each sample
    broadcast: tuple[str, ...] = ()
    trail: tuple[str, ...] = field(default=())  # applied primitives, for display
    before: DGraph | None = None  # the graph before the last of them, for edges()
    bound: Bound | None = None  # of a planned step only: loaders, constructors, the plan itself

    def __post_init__(self) -> None:
        frozen: dict[str, Any] = {"sample": read_only(self.sample)}
        frozen["columns"] = MappingProxyType(
            {n: read_only(c) if isinstance(c, np.ndarray) else c for n, c in self.columns.items()}
        )
        if self.costs is not None:
            frozen["costs"] = read_only(self.costs)
        if self.memory is not None:
            frozen["memory"] = read_only(self.memory)
        if (p := self.placement) is not None:
            frozen["placement"] = replace(
                p, bucket=read_only(p.bucket), microbatch=read_only(p.microbatch)
            )
        for name, value in frozen.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def from_buffer(buffer: Buffer, place: Mesh, meta: str | Sequence[str] | None = None) -> DGraph:
        for what, value, kind in (("buffer", buffer, Buffer), ("place", place, Mesh)):
            if not isinstance(value, kind):
                raise PlanError(
                    f"DGraph.from_buffer: expected a {kind.__name__} as {what}, got "
                    f"{type(value).__name__}"
                )
        names = (meta,) if isinstance(meta, str) else tuple(meta or ())
        sample, columns, items = nodes(buffer, names)
        return DGraph(
            buffer=buffer, tree=place, sample=sample, columns=columns, meta=names, items=items
        )

    def select(
        self, *meta: str, sources: str | Sequence[str] | None = None, merge: int = 1
    ) -> DGraph:
        """Return the graph with these metadata columns, and nodes of these sources only.

        A ragged column gives a node per item. Costs are removed. Without ``meta`` the columns stay,
        and with ``sources=None`` the sources.

        ``merge``: the encoder makes one output token of ``merge`` x ``merge`` patches, unless
        metadata gives the number.
        """
        self._before("select", "balance", self.placement)
        if not isinstance(merge, int) or merge < 1:
            raise PlanError(
                f"select: expected merge as a whole number of at least 1, got {merge!r}",
                self.buffer.step,
            )
        buffer, names, sources = (
            self.buffer,
            meta or self.meta,
            (sources,) if isinstance(sources, str) else sources,
        )
        before = buffer.names if self.sources is None else self.sources
        narrowed = (
            self.sources
            if sources is None
            else tuple(s for s in sources if s not in buffer.names or s in before)
        )
        if narrowed is not None and not buffer.drawn:  # candidates that are left out are not drawn
            buffer = buffer.take(of_sources(buffer, narrowed))
        sample, columns, items = nodes(buffer, names, narrowed)
        what = ", ".join((*names, *(() if sources is None else (f"sources {', '.join(sources)}",))))
        return self._after(
            f"select({what})",
            buffer=buffer,
            sample=sample,
            columns=columns,
            meta=names,
            items=items,
            sources=narrowed,
            merge=merge,
            costs=None,
            memory=None,
            unit="",
        )

    def mix(
        self,
        schedule: Schedule | Weights | None = None,
        *,
        draw: str = "exact",
        seed: int = 0,
        look_ahead: int = 1,
        prefer: Prefer | None = None,
    ) -> DGraph:
        """Return the graph with the samples that the job's mixture has drawn.

        For a hand-made buffer, ``schedule`` (or weights) draws the step from the candidates. Only
        then may ``schedule``, ``draw``, ``seed`` and ``look_ahead`` be given.

        With look-ahead, ``prefer(candidates, place)`` scores each candidate, and those with the
        lowest scores are taken. The default is the preference of the job's schedule; without that,
        the first candidates are taken.
        """
        self._before("mix", "mix", self.mixed or None)
        given, drawn_by_job = self.buffer, self.buffer.drawn or bool(self.buffer.wanted)
        if drawn_by_job and (schedule is not None or look_ahead != 1 or draw != "exact" or seed):
            remedy = "call .mix(); change mixture, draw, seed or look_ahead of the job"
            problem = "mix: expected no mixture, since the job's has drawn this step already"
            raise PlanError(problem, given.step, remedy)
        if given.drawn and given.overflow == "grow":
            return self._after("mix()", mixed=True)
        self._before("mix", "balance", self.placement)  # the placement of other nodes
        self._before("mix", "cost", self.costs)
        if not drawn_by_job:
            if schedule is None:
                raise PlanError(
                    "mix: expected a schedule for a hand-made buffer, which has no draw yet",
                    given.step,
                    "give .mix() a schedule or weights",
                )
            if draw not in ("exact", "random"):
                raise PlanError(f"unknown draw {draw!r}; known: exact, random", given.step)
            given = draw_by_hand(given, schedule, draw, seed, look_ahead)
        if given.chunk is not None:  # cut by hand: every chunk has a place
            buffer = given
        elif given.drawn:
            # all samples, whatever the nodes of this graph
            whole = DGraph.from_buffer(given, self.tree)
            whole.check_sizes(given.batch.context)
            buffer = given.take(fitting_rows(given, whole.sizes(), self.tree))
        else:
            buffer = choose(
                given, given.scores if prefer is None else preferred(prefer, given, self.tree)
            )
        sample, columns, items = nodes(buffer, self.meta, self.sources)
        what = "" if drawn_by_job else draw
        if len(buffer) != len(given):
            what += f"{', ' if what else ''}{len(buffer)} of {len(given)} candidates"
        return self._after(
            f"mix({what})", buffer=buffer, sample=sample, columns=columns, items=items, mixed=True
        )

    def distribute(
        self, axis: str, group_size: int | None = None, *, on: Mesh | None = None
    ) -> DGraph:
        """Return the graph with buckets along an axis; the ranks of a bucket get the same samples.

        ``axis`` is ``DP``, ``CP``, ``WORLD``, ``PP`` or ``TP``. ``group_size``: balance over groups
        of this number of buckets first, then inside each group. The last group may have fewer.
        ``on``: the module's own mesh inside the job's, as in ``ov.Mesh(dp=2, first_rank=2)``. Other
        ranks get nothing of the module, and take part in the exchange of embeddings.
        """
        self._before("distribute", "balance", self.placement)
        own = None if on is None else own_mesh(self.tree, on, self.buffer.step)
        try:
            n = (own or self.tree).n_buckets(axis)
        except JobError as e:
            raise PlanError(e.problems[0], self.buffer.step) from None
        groups = "" if group_size is None else f", groups of {group_size}"
        where = "" if own is None else f" on {own}"
        what = f"distribute({axis}: {n} buckets{groups}{where})"
        return self._after(what, axis=axis, on=own, group_size=group_size)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the buckets: the module's own, or the job's."""
        return self.on or self.tree

    def cost(self, fn: CostFn | str, memory: CostFn | str | None = None) -> DGraph:
        """Return the graph with the cost of each node.

        ``fn`` receives the metadata columns of the nodes and returns one number for each node. It
        may also be the name of a built-in or registered cost.

        ``memory``: a second such function, for the memory of each node in any unit;
        ``balance(memory_capacity=)`` bounds its sum in a microbatch. Ragged columns of samples are
        passed as they are (the costs of ``ov.cost`` sum over a sample's items), unless ``meta`` was
        selected. The cost of a sample of several documents is the sum of their costs.
        """
        self._before("cost", "balance", self.placement)
        whole, n = len(self.sample) == len(self.buffer), len(self.sample)
        ragged = (
            {}
            if self.meta
            else {name: c for name, c in self.buffer.meta.items() if isinstance(c, Ragged)}
        )
        columns: dict[str, Column] = {
            **(ragged if whole else {name: c.take(self.sample) for name, c in ragged.items()}),
            **self.columns,
        }
        several = not self.items and LENGTHS in self.buffer.meta
        lengths = lengths_of(self.buffer, self.sample) if several else None

        def evaluated(fn: CostFn | str, what: str) -> np.ndarray:
            each = partial(checked_costs, fn, what=what)
            return each(columns, n) if lengths is None else summed(each, columns, lengths, n)

        try:
            costs = evaluated(fn, "cost")
            held = None if memory is None else evaluated(memory, "memory")
        except PlanError as e:
            raise PlanError(e.problem, self.buffer.step, e.remedy) from None
        what = f"cost({title_of(fn)}{'' if memory is None else f', memory={title_of(memory)}'})"
        by = named(fn)
        return self._after(what, costs=costs, costs_by=by, memory=held, unit=unit_of(by))

    def balance(
        self,
        method: str = "greedy",
        level: str = "both",
        objective: str | None = None,
        keep_order: bool = False,
        capacity: int | None = None,
        memory_capacity: float | None = None,
    ) -> DGraph:
        """Return the graph with buckets and microbatches for all nodes.

        ``method``: ``greedy``, ``karmarkar_karp``, ``zigzag``, ``none``, or a name given to
        ``register_balance``. ``objective``: ranks wait for each other once an ``iteration`` or
        after every ``microbatch``; by default as set by ``Job.sync``. ``level``: ``both``,
        ``inter`` (buckets only), ``intra`` (inside buckets only), or ``interleaved`` (both
        objectives at once).

        ``capacity`` is that of one microbatch. The default is the batch's context for samples, and
        none for items, which are then placed once for the whole step. ``memory_capacity`` also
        bounds the sum of ``cost(memory=)`` of a microbatch. ``keep_order``: microbatch k of all
        buckets together is the stream's k-th run, or its k-th sub-draw.
        """
        self._before("balance", "balance", self.placement)
        method_named(method)
        if self.axis is None:
            raise PlanError(
                f"balance({method!r}): expected a distributed graph, got one without buckets",
                self.buffer.step,
                "call .distribute(axis) first",
            )
        graph = (
            self if self.costs is not None else replace(self, costs=self.sizes().astype(np.float64))
        )
        batch = self.buffer.batch
        if capacity is None:
            capacity = 0 if self.items else batch.context
        if not isinstance(capacity, (int, np.integer)) or capacity < 0:
            raise PlanError(
                f"capacity: expected a whole number of tokens (0: none), got {capacity!r}",
                self.buffer.step,
            )
        self.check_sizes(capacity)
        check_memory(self, memory_capacity)
        assert graph.costs is not None
        substep = self.buffer.substep if keep_order else None
        # items placed once for the whole step have no microbatches after which ranks wait
        if objective is None:
            objective = "iteration" if level in ONCE or not capacity else self.buffer.objective
        problem = PackingProblem(
            costs=graph.costs,
            sizes=packing_sizes(self.sizes(), batch) if capacity and batch.fixed else self.sizes(),
            n_buckets=(n := self.mesh.n_buckets(self.axis)),
            capacity=capacity,
            group_size=self.group_size,
            microbatches=batch.least_microbatches(n) if capacity else 1,
            count_multiple=self.mesh.count_multiple if capacity else 1,
            method=method,
            memory=self.memory,
            memory_capacity=memory_capacity or 0.0,
            substep=None if substep is None else substep[self.sample],
            chunk=None if self.buffer.chunk is None else self.buffer.chunk[self.sample],
            # an additional padded microbatch costs compute
            spare=batch.layout == "packed" and not batch.pads and self.buffer.overflow == "grow",
        )
        try:
            found = place(problem, level=level, objective=objective, keep_order=keep_order)
        except PlanError as e:
            raise PlanError(e.problem, self.buffer.step, e.remedy) from None
        bounded = (
            graph if memory_capacity is None else replace(graph, memory_capacity=memory_capacity)
        )
        return bounded.placed(
            found,
            f"balance({method}, {level}, {objective}{', keep_order' if keep_order else ''})",
            capacity,
        )

    def split(
        self, capacity: int | None = None, groups: str = "any", **rules: float | bool | None
    ) -> DGraph:
        """Return the graph with every sample on a ring of ranks that share its tokens.

        Each bucket must be one rank: ``distribute("CP")``. ``capacity``: tokens of a rank in a
        microbatch, by default the batch's context. ``groups``: "any", or "power_of_two" for aligned
        blocks of ranks, as Megatron has them. ``padded``: samples are padded to 2 x ring size, by
        default if groups are powers of two or the batch pads. ``equal_counts`` of microbatches, by
        default as ``Job.sync`` says; ``count_multiple`` of them. ``node``: ranks of a node (8).
        ``offload_share``, ``offload_base``, ``offload_slope``, ``offload_bytes``, ``host_memory``:
        activations on the host instead of more ranks (``HybridRules``).
        """
        from overlord.planning.graph.rings import split_graph  # it imports the schedule

        self._before("split", "balance", self.placement)
        return split_graph(self, capacity, groups, rules)

    def placed(self, placement: ItemPlacement, what: str, capacity: int) -> DGraph:
        """Return the graph with a given placement, for strategies that place without ``balance``.

        ``what`` names the operation in the graph's trail.
        """
        done = f"{what}: {placement.algorithm}, M={placement.n_microbatches}"
        return self._after(done, placement=placement, capacity=capacity)

    def follow(
        self,
        samples: DGraph,
        method: str = "greedy",
        *,
        per: str = "microbatch",
        stay: bool = False,
    ) -> DGraph:
        """Return the graph with items placed after their samples, instead of by ``balance``.

        ``per="microbatch"``: items whose samples have the same microbatch index, over all buckets,
        are balanced together and keep the index. It is for a trainer that encodes before each
        microbatch. ``"iteration"``: all items are balanced together. ``stay``: items stay on the
        ranks of their sample's bucket.
        """
        self._before("follow", "balance", self.placement)
        check_module(self, "follow(): the other graph", samples)
        if self.axis is None or samples.axis is None or samples.placement is None or samples.items:
            raise PlanError(
                "follow(): expected distributed items and balanced samples",
                self.buffer.step,
                "call .distribute(axis) on both graphs, and .balance() on the samples, first",
            )
        if stay and self.mesh != samples.mesh:
            raise PlanError(
                f"follow(stay=True): expected items on the mesh of their samples, {samples.mesh}, "
                f"got {self.mesh}",
                self.buffer.step,
                "leave out stay=True, or distribute both graphs on one mesh",
            )
        graph = (
            self if self.costs is not None else replace(self, costs=self.sizes().astype(np.float64))
        )
        assert graph.costs is not None
        node = np.full(len(self.buffer), -1)
        node[samples.sample] = np.arange(len(samples.sample))
        if (at := node[self.sample]).min(initial=0) < 0:
            raise PlanError(
                "follow(): expected a placed sample for every item, but a sample of these items "
                "was not placed",
                self.buffer.step,
                "select the same sources in both graphs",
            )
        p = samples.placement
        went = ItemSamples(
            bucket=p.bucket[at],
            microbatch=p.microbatch[at],
            n_microbatches=p.n_microbatches,
            axis=samples.axis,
        )
        try:
            found = place_by_samples(
                graph.costs,
                self.sizes(),
                went,
                self.mesh,
                axis=self.axis,
                method=method,
                per=per,
                stay=stay,
            )
        except PlanError as e:
            raise PlanError(e.problem, self.buffer.step, e.remedy) from None
        return graph.placed(found, f"follow({method}, {per}{', stay' if stay else ''})", 0)

    def broadcast_at(self, *dims: str) -> DGraph:
        """Return the graph with more axes along which the trainer broadcasts.

        The axes are ``TP``, ``CP``, ``PP`` and ``DP``, nested in any order. The rank with
        coordinate 0 along them fetches for its group; the other ranks fetch nothing.
        ``plan.fetchers()`` lists the ranks that fetch.
        """
        try:
            both = broadcast_dims((*self.broadcast, *dims))
        except JobError as e:
            raise PlanError(e.problems[0], self.buffer.step) from None
        return self._after(f"broadcast_at({', '.join(dims)})", broadcast=both)

    def plan(self, **modules: DGraph) -> LoadingPlan:
        """Return the validated plan; raise ``PlanError`` if a primitive is missing.

        Other balanced graphs of the same samples become modules: ``plan(encoder=images)``.
        """
        b = self.buffer
        if "backbone" in modules:
            raise PlanError(
                "plan(): expected other modules than 'backbone', which is the graph itself",
                b.step,
                "give the other module another name",
            )
        check_modules(modules, b.step)
        for name, graph in modules.items():
            check_module(self, f"module {name!r}", graph)
        tokens = b.column("tokens")
        assert isinstance(tokens, np.ndarray)
        units = {
            name: graph.unit for name, graph in {"backbone": self, **modules}.items() if graph.unit
        }
        ends = {name: graph.placeholders() for name, graph in modules.items()}
        # items that are not sent whole
        cut = {name: e.cut for name, e in ends.items() if e is not None and e.cut}
        return LoadingPlan(
            step=b.step,
            names=b.names,
            **{n: getattr(b, n) for n in (*IDS, "substep", "offset", "remaining")},
            tokens=tokens.astype(np.int64, copy=False),
            place=self.tree,
            modules={
                "backbone": assignment_of(self, "backbone"),
                **{n: assignment_of(g, n, ends[n]) for n, g in modules.items()},
            },
            tasks=self.tasks,
            documents=documents_of_buffer(b) if LENGTHS in (*b.documents, *b.meta) else None,
            extra={
                "trail": list(self.trail),
                "weights": dict(b.weights),
                **{k: v for k, v in (("unit", units), ("cut", cut)) if v},
            },
        ).validate()

    def placeholders(self) -> Placeholders | None:
        """Return the tokens of its sample that each item's output replaces; None for samples."""
        if not self.items:
            return None
        column = next(iter(self.columns))
        return placeholders(self.buffer, self.sample, self.columns[column], column, self.merge)

    def sizes(self) -> np.ndarray:
        """Return the sizes of the nodes that count against the capacity: int64.

        The size of a sample is its tokens with the padding of its documents. That of an item is its
        value in the first selected ragged column, such as its patches.
        """
        if self.items:
            return next(iter(self.columns.values())).astype(np.int64)
        multiple = self.buffer.batch.document_multiple(self.tree)
        if self.tasks is not None or LENGTHS in self.buffer.meta:
            return sample_sizes(self.buffer, self.sample, multiple, self.tasks)
        tokens = np.asarray(self.buffer.column("tokens"), np.int64)[self.sample]
        return tokens if multiple == 1 else -(-tokens // multiple) * multiple

    def check_sizes(self, capacity: int) -> None:
        """Raise ``PlanError`` for a node larger than ``capacity``; 0: no limit."""
        sizes = self.sizes()
        if capacity and len(sizes) and int(sizes.max()) > capacity:
            i = int(sizes.argmax())
            raise PlanError(
                f"sample {self.buffer[int(self.sample[i])]}: expected at most the {capacity} "
                f"tokens of a microbatch, got {int(sizes[i])} with padding",
                self.buffer.step,
                "raise the context, or let on_long truncate or split long samples",
            )

    def _after(self, what: str, **changes: Any) -> DGraph:
        """Return the graph after one more primitive; ``what`` names it in the trail."""
        return replace(self, **changes, trail=(*self.trail, what), before=self)

    def _before(self, primitive: str, other: str, done: object) -> None:
        if done is not None:
            if done is self.placement and self.tasks is not None:
                other = "split"
            raise PlanError(
                f"{primitive}() was called after {other}()",
                self.buffer.step,
                f"call .{primitive}() earlier, and once",
            )

    def __repr__(self) -> str:
        return described(self)

    @property
    def loader(self) -> Binding:
        """The loader of each node of a planned step (``session.graph(step)``).

        In a strategy it raises ``PlanError``, since plans must not depend on loaders.
        """
        if self.bound is None:
            raise loader_is_hidden("graph.loader", self.buffer.step)
        by_sample = self.bound.loader
        return Binding(index=read_only(by_sample.index[self.sample]), names=by_sample.names)

    @property
    def constructor(self) -> tuple[str, ...]:
        """The constructor of each bucket of a planned step; in a strategy it raises."""
        if self.bound is None:
            raise unbound(self.buffer.step)
        return self.bound.constructor

    def edges(self) -> list[Edge]:
        """Return the edges of each applied primitive, between the nodes before and after it."""
        return edges_of(self)

    def to_mermaid(self) -> str:
        """Return a Mermaid flowchart, shortened, with costs over the mean bucket as loads."""
        from overlord.planning.graph.mermaid import flowchart

        return flowchart(self)

    def to_html(self, path: str | PathLike[str], **modules: DGraph) -> None:
        """Write one self-contained HTML page with the slot and cost of every sample.

        ``modules`` as in ``plan``. Of a large step only the most expensive samples are listed.
        """
        from overlord.planning.graph.page import write_page

        write_page(self, path, modules)
