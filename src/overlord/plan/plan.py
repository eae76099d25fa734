"""LoadingPlan: the bucket, microbatch and slot of every sample. Arrays, not objects.

A plan is a value: it can be validated, digested, printed, sent and replayed. It does not depend on
how it was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord import late_binding
from overlord.documents import SampleDocuments
from overlord.errors import JobError, PlanError
from overlord.hashing import digest
from overlord.mesh import Mesh, broadcast_dims
from overlord.plan.module_ranks import bucket_by_rank, fetcher_by_rank, mesh_problem
from overlord.plan.tasks import PlanTasks
from overlord.sample import SampleId

if TYPE_CHECKING:
    from overlord.mesh import Batch
    from overlord.plan.routes import Routes

MODULES = ("backbone", "encoder")  # modules that constructors deliver
SAMPLE_COLUMNS = ("source", "epoch", "file", "row", "part", "tokens", "substep")
# columns of pieces of samples (packing="concat"); None where every row is a whole sample
PIECE_COLUMNS = ("offset", "remaining")
ITEM_COLUMNS = ("sample", "bucket", "microbatch", "slot", "size", "cost")
OPTIONAL_COLUMNS = ("memory", "out", "offset")  # columns of items; None where absent
# microbatches over all buckets: far above any mesh, far below what would exhaust memory
MAX_BINS = 2**26
# factor on a memory capacity: sums of floats depend on the order of addition
ROUNDING = 1 + 1e-9
MOST = 2**53  # every size is below this, so that sums neither overflow nor are rounded


def check_modules(names: Iterable[str], step: int) -> None:
    """Raise ``PlanError`` unless constructors deliver all these modules."""
    if unknown := [name for name in names if name not in MODULES]:
        problem = (
            f"module {unknown[0]!r}: expected {' or '.join(map(repr, MODULES))}, since no "
            "rank would receive any other"
        )
        raise PlanError(problem, step, "leave it out; images are the module 'encoder'")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """The placement of the items of one module (backbone, encoder).

    Item i belongs to sample ``sample[i]`` of the plan.
    """

    axis: str  # axis of the buckets: "DP", "CP", "WORLD", "PP", "TP"
    n_buckets: int
    n_microbatches: int
    sample: np.ndarray  # int64: row of the plan's sample columns
    bucket: np.ndarray  # int32
    microbatch: np.ndarray  # int32
    slot: np.ndarray  # int32: position in the microbatch
    size: np.ndarray  # int64, counts against the capacity: tokens with padding, patches of an image
    cost: np.ndarray  # float64
    capacity: int = 0  # tokens of one microbatch; 0: no limit
    # axes along which the trainer broadcasts: one rank of each group fetches
    broadcast: tuple[str, ...] = ()
    # float64: share of memory_capacity of each item; None: only tokens count
    memory: np.ndarray | None = None
    memory_capacity: float = 0.0  # memory of one microbatch, in the unit of ``memory``; 0: no limit
    # int64: number of backbone tokens that an encoder's item becomes
    out: np.ndarray | None = None
    offset: np.ndarray | None = None  # int64: position of the first of these tokens in its sample
    on: Mesh | None = None  # the module's own mesh, inside the plan's; None: the plan's mesh

    def order(self) -> np.ndarray:
        """Return item numbers by (bucket, microbatch, slot), the order of a constructor."""
        bins = self.bins()  # slots are dense, so no sort is needed
        counts = np.bincount(bins, minlength=self.n_buckets * self.n_microbatches)
        order = np.empty(len(bins), np.int64)
        order[(np.cumsum(counts) - counts)[bins] + self.slot] = np.arange(len(bins))
        return order

    def bins(self) -> np.ndarray:
        """Return the number of each item's microbatch, counted over all buckets."""
        return self.bucket.astype(np.int64) * self.n_microbatches + self.microbatch


def _is_whole(column: np.ndarray) -> bool:
    """Return whether a column has an integer type that int64 contains.

    uint64 is not one: numpy promotes uint64 with int64 to float64.
    """
    return column.dtype.kind in "iu" and np.can_cast(column.dtype, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadingPlan:
    """The plan of one step.

    Sample columns are in the order of the draw; ``modules["backbone"]`` places them.
    """

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
    # int64: tokens of the sample before and after the row's piece; ``tokens`` is that of the piece
    offset: np.ndarray | None = None
    remaining: np.ndarray | None = None
    place: Mesh | None = None  # the mesh of its buckets; None: a plan made by hand
    # JSON values for people (strategy name, target weights)
    extra: Mapping[str, Any] = field(default_factory=dict)
    # a hybrid plan: rings of ranks share samples of the backbone, whose bucket is the first of them
    tasks: PlanTasks | None = None
    # documents of samples that have several; None: no source of the job has such samples
    documents: SampleDocuments | None = None

    def __len__(self) -> int:
        return len(self.source)

    @property
    def main(self) -> Assignment:
        return self.modules["backbone"]

    def module(self, name: str) -> Assignment:
        """Return the placement of a module; raise ``PlanError`` for an unknown name."""
        if name not in self.modules:
            known = ", ".join(self.modules)
            raise PlanError(
                f"module {name!r}: expected one of {known}",
                self.step,
                "add a module to the plan with samples.plan(encoder=images)",
            )
        return self.modules[name]

    def pieces(self, module: str = "backbone") -> Assignment:
        """Return a placement with a row for each rank that holds tokens of an item.

        Samples of a hybrid plan are split over the ranks of their task; others have one row.
        """
        from overlord.plan.pieces import pieces_of  # it imports this module

        split = self.tasks is not None and module == "backbone"
        return pieces_of(self) if split else self.module(module)

    @property
    def n_microbatches(self) -> int:
        return self.main.n_microbatches

    def __repr__(self) -> str:
        a = self.main
        return (
            f"LoadingPlan(step {self.step}, {len(self)} {self.row_kind}, {int(self.tokens.sum())} "
            "tokens -> "
            f"{a.n_buckets} buckets x {a.n_microbatches} microbatches, imbalance "
            f"{self.imbalance()['bucket']:.3f})"
        )

    @property
    def row_kind(self) -> str:
        """The name of a row for people: "samples", or "pieces" of samples (packing="concat")."""
        return "samples" if self.offset is None else "pieces"

    @property
    def begun(self) -> np.ndarray:
        """The source of each sample that begins in this step: a cut one counts once."""
        return self.source if self.offset is None else self.source[self.offset == 0]

    @property
    def payload_tokens(self) -> np.ndarray:
        """The tokens that a constructor receives for each row: int64.

        A piece that its sample continues comes with the next token, the label of its last one.
        """
        return self.tokens if self.remaining is None else self.tokens + (self.remaining > 0)

    def sample_id(self, i: int) -> SampleId:
        return SampleId(
            self.names[int(self.source[i])],
            int(self.epoch[i]),
            int(self.file[i]),
            int(self.row[i]),
            int(self.part[i]),
        )

    def validate(self) -> LoadingPlan:
        """Raise ``PlanError`` for an invalid plan; otherwise return the plan itself.

        Every sample has exactly one slot of the backbone, slots are dense, capacities hold, and
        every rank is served.
        """
        if "backbone" not in self.modules:
            problem = f"modules: expected 'backbone' among them, got {', '.join(self.modules)}"
            raise PlanError(problem, self.step, "end the strategy with .plan()")
        check_modules(self.modules, self.step)
        n = len(self)
        columns = {
            label: column
            for label in (*SAMPLE_COLUMNS, *PIECE_COLUMNS)
            if (column := getattr(self, label)) is not None
        }
        if any(column.shape != (n,) for column in columns.values()):
            shapes = sorted({column.shape for column in columns.values()})
            raise PlanError(f"sample columns: expected {n} rows each, got {shapes}", self.step)
        if wrong := [
            f"{label}, got {column.dtype}"
            for label, column in columns.items()
            if not _is_whole(column)
        ]:
            raise PlanError(f"expected whole numbers in {wrong[0]}", self.step, "use int64")
        if n and not 0 <= int(self.source.min()) <= int(self.source.max()) < len(self.names):
            found = f"got {int(self.source.min())} to {int(self.source.max())}"
            raise PlanError(f"source: expected 0 to {len(self.names) - 1}, {found}", self.step)
        for label in ("tokens", *PIECE_COLUMNS):
            numbers = columns.get(label)
            if n and numbers is not None:
                low, high = int(numbers.min()), int(numbers.max())
                if not 0 <= low <= high < MOST:
                    found = f"got {low} to {high}"
                    raise PlanError(f"{label}: expected 0 to {MOST - 1}, {found}", self.step)
        if (self.offset is None) != (self.remaining is None):
            raise PlanError(
                "sample columns: expected offset and remaining together, got one of them", self.step
            )
        if self.documents is not None and (problem := self.documents.problem(self.tokens)):
            raise PlanError(f"documents: {problem}", self.step)
        for name, a in self.modules.items():
            self._validate_columns(name, a)
            self._validate_served(name, a)
            bins = a.bins()
            if self.tasks is None or name != "backbone":
                self._validate_capacity(name, a, bins, "tokens", a.size, a.capacity)
            if a.memory is not None:
                self._validate_capacity(
                    name, a, bins, "memory", a.memory, a.memory_capacity * ROUNDING
                )
            self._validate_slots(name, a, bins)
            self._validate_placeholders(name, a)
        times = np.bincount(self.main.sample, minlength=n)
        if (uneven := np.flatnonzero(times != 1)).size:
            raise PlanError(
                f"module 'backbone': expected every drawn sample exactly once, got sample "
                f"{self.sample_id(int(uneven[0]))} {times[uneven[0]]} times ({len(uneven)} such "
                "samples)",
                self.step,
                "place every sample of the buffer once; select() leaves samples out",
            )
        if self.tasks is not None:
            from overlord.plan.pieces import check_tasks

            check_tasks(self, self.tasks)
        return self

    def _validate_columns(self, name: str, a: Assignment) -> None:
        columns = {label: getattr(a, label) for label in ITEM_COLUMNS}
        columns |= {
            label: getattr(a, label) for label in OPTIONAL_COLUMNS if getattr(a, label) is not None
        }
        if (
            a.n_buckets < 1
            or a.n_microbatches < 1
            or len({column.shape for column in columns.values()}) > 1
        ):
            raise PlanError(
                f"module {name!r}: expected at least one bucket and one microbatch, and columns of "
                f"equal length, got {a.n_buckets} buckets, {a.n_microbatches} microbatches and "
                f"shapes {sorted({column.shape for column in columns.values()})}",
                self.step,
            )
        if a.n_buckets * a.n_microbatches > MAX_BINS:
            raise PlanError(
                f"module {name!r}: expected at most {MAX_BINS} microbatches over all buckets, got "
                f"{a.n_buckets} buckets of {a.n_microbatches}",
                self.step,
                "use fewer microbatches",
            )
        for label, column in columns.items():
            if not _is_whole(column) and (
                label not in ("cost", "memory") or column.dtype.kind != "f"
            ):
                raise PlanError(
                    f"module {name!r}: expected whole numbers in {label}, got {column.dtype}",
                    self.step,
                )
            top = np.inf if label in ("cost", "memory") else MOST
            if (
                label not in ("sample", "bucket", "microbatch", "slot")
                and len(column)
                and not 0 <= column.min() <= column.max() < top
            ):
                wanted = "at least 0 and finite" if top == np.inf else f"from 0 to {MOST - 1}"
                raise PlanError(
                    f"module {name!r}: expected {label} {wanted}, got {column.min()} to "
                    f"{column.max()}",
                    self.step,
                )
        for label, column, bound in (
            ("bucket", a.bucket, a.n_buckets),
            ("microbatch", a.microbatch, a.n_microbatches),
            ("sample", a.sample, len(self)),
        ):
            if len(column) and (int(column.min()) < 0 or int(column.max()) >= bound):
                raise PlanError(
                    f"module {name!r}: expected {label} from 0 to {bound - 1}, got "
                    f"{int(column.min())} to {int(column.max())}",
                    self.step,
                )

    def _validate_served(self, name: str, a: Assignment) -> None:
        """Raise ``PlanError`` unless every rank has a bucket, and a rank that fetches for it.

        A mesh gives each rank both. So only a plan for another mesh or for unknown axes is wrong.
        """
        if a.on is not None and (problem := mesh_problem(self.tree, a.on)):
            remedy = "call .distribute(axis, on=) with ranks of the place that the strategy gets"
            raise PlanError(f"module {name!r}: on: {problem}", self.step, remedy)
        mesh = a.on or self.place
        try:
            broadcast_dims(a.broadcast)
            wanted = a.n_buckets if mesh is None else mesh.n_buckets(a.axis)
        except JobError as e:
            raise PlanError(f"module {name!r}: {e.problems[0]}", self.step) from None
        multiple = mesh.count_multiple if mesh is not None and name == "backbone" else 1
        if a.n_microbatches % multiple:
            raise PlanError(
                f"module {name!r}: expected a multiple of {multiple} microbatches, since vpp="
                f"{mesh.vpp if mesh else 1} interleaves stages, got {a.n_microbatches}",
                self.step,
                "call .balance(), or place empty microbatches at the end",
            )
        if a.n_buckets != wanted:
            raise PlanError(
                f"module {name!r}: expected {wanted} buckets along {a.axis} of {mesh}, got "
                f"{a.n_buckets}",
                self.step,
                f'call .distribute("{a.axis}") on a graph with the place that the strategy gets',
            )

    def _validate_capacity(
        self,
        name: str,
        a: Assignment,
        bins: np.ndarray,
        what: str,
        load: np.ndarray,
        capacity: float,
    ) -> None:
        if not capacity or not len(bins):
            return
        held = np.bincount(bins, weights=load, minlength=a.n_buckets * a.n_microbatches)
        if held.max() > capacity:
            worst = int(held.argmax())
            raise PlanError(
                f"module {name!r}: expected at most {capacity:.12g} "
                f"{'tokens' if what == 'tokens' else 'units of memory cost'} in microbatch "
                f"{worst % a.n_microbatches} of bucket {worst // a.n_microbatches}, got "
                f"{held[worst]:.12g}",
                self.step,
                "move items to other microbatches; .balance() keeps the capacity",
            )

    def _validate_slots(self, name: str, a: Assignment, bins: np.ndarray) -> None:
        # Slots are dense if none reaches the count of its bin and none occurs twice.
        counts = np.bincount(bins, minlength=a.n_buckets * a.n_microbatches)
        place = (np.cumsum(counts) - counts)[bins] + a.slot
        if len(bins) and (
            a.slot.min() < 0
            or (a.slot >= counts[bins]).any()
            or np.bincount(place, minlength=len(bins)).max() > 1
        ):
            raise PlanError(
                f"module {name!r}: expected slots 0, 1, ... in each microbatch, got two items that "
                "share a slot, or an empty slot",
                self.step,
            )

    def _validate_placeholders(self, name: str, a: Assignment) -> None:
        """Raise unless placeholders are inside the item's document and no two items share one."""
        if (a.out is None) != (a.offset is None):
            raise PlanError(
                f"module {name!r}: expected out and offset together, got one of them", self.step
            )
        if a.out is None or a.offset is None or not len(a.out):
            return
        end = a.offset + a.out
        if (end > self.tokens[a.sample]).any():
            i = int((end > self.tokens[a.sample]).argmax())
            raise PlanError(
                f"module {name!r}: expected item {i} to end inside the "
                f"{self.tokens[a.sample[i]]} tokens of sample "
                f"{self.sample_id(int(a.sample[i]))}, got an end at token {end[i]}",
                self.step,
            )
        sends = a.out > 0
        sample, offset, end = a.sample[sends], a.offset[sends], end[sends]
        if (
            (sample[1:] < sample[:-1]) | ((sample[1:] == sample[:-1]) & (offset[1:] < offset[:-1]))
        ).any():
            order = np.lexsort((offset, sample))
            sample, offset, end = sample[order], offset[order], end[order]
        shared = (sample[1:] == sample[:-1]) & (offset[1:] < end[:-1])
        if shared.any():
            i = int(sample[int(shared.argmax())])
            raise PlanError(
                f"module {name!r}: expected items without common tokens, got: two items of sample "
                f"{self.sample_id(i)} share a token",
                self.step,
            )

    def routes(
        self, module: str = "encoder", batch: Batch | None = None, *, broadcast: bool = True
    ) -> Routes:
        """Return the rank that encodes each item, and the exchange of outputs between all ranks.

        ``batch``: the job's batch, which pads documents and slices microbatches along cp. Without
        it sizes are the planned ones, and microbatches are whole. Pieces on rings need no batch.
        ``broadcast``: False for a session that was launched so: cp ranks then get slices.
        """
        from overlord.plan.routes import make_routes  # it imports this module

        return make_routes(self, module, batch, broadcast=broadcast)

    def digest(self) -> str:
        """Return a digest that is equal for equal deliveries, on every machine.

        A broadcast along an axis of one rank does not change it.
        """
        parts: list[str | np.ndarray] = [str(self.step), "\x1f".join(self.names)]
        parts += [self.source, self.epoch, self.file, self.row, self.part, self.tokens]
        if self.offset is not None and self.remaining is not None:
            parts += ["pieces", self.offset, self.remaining]
        for name, a in sorted(self.modules.items()):
            parts += [
                name,
                a.axis,
                f"{a.n_buckets}x{a.n_microbatches}",
                a.sample,
                a.bucket,
                a.microbatch,
                a.slot,
            ]
            for label in ("out", "offset"):
                if (column := getattr(a, label)) is not None:
                    parts += [label, column]
            mesh = a.on or self.place
            dims = [
                d
                for d in broadcast_dims(a.broadcast)
                if mesh is None or getattr(mesh, d.lower()) > 1
            ]
            parts += [f"broadcast {','.join(dims)}"] if dims else []
            parts += [] if a.on is None else [f"on {a.on}"]
        if self.tasks is not None:
            parts += ["tasks", self.tasks.table.digest(), str(self.tasks.rules.multiple)]
        if (documents := self.documents) is not None:
            columns = {"lengths": documents.lengths, **documents.columns}
            for label, ragged in columns.items():
                parts += [label, ragged.lengths, ragged.compact().values]
        if self.place is not None and self.place.world_size > self.place.dp:
            # otherwise the number of buckets determines the mesh
            parts.append(f"place {self.place}")
        return digest(*parts)

    # fetchers

    def fetchers(self, module: str = "backbone") -> list[int]:
        """Return the ranks that fetch this module's microbatches; others get them by broadcast."""
        return self.mesh_of(module).fetchers(self.module(module).broadcast)

    def served_by(self, module: str = "backbone") -> np.ndarray:
        """Return the rank that fetches for each rank, which may be itself: int64 [world_size].

        It is -1 for ranks outside of the module's own mesh.
        """
        a = self.module(module)
        return fetcher_by_rank(self.tree, a.on, a.broadcast)

    def fetches(self, rank: int, module: str = "backbone") -> list[int]:
        """Return the buckets that a rank fetches: its own and those of the ranks it serves.

        The list is empty if another rank fetches for this rank.
        """
        if problem := self.tree.rank_problem(rank):
            raise PlanError(problem, self.step)
        a = self.module(module)
        buckets = bucket_by_rank(self.tree, a.on, a.axis)
        return sorted(set(buckets[self.served_by(module) == rank].tolist()))

    def delivery(self, batch: Batch, broadcast: bool = True) -> dict[str, Any]:
        """Return the clients, ranks and bytes of the step's delivery (``summary.delivery``).

        ``broadcast=False``: as if every rank fetched for itself.
        """
        from overlord.plan.summary import delivery

        return delivery(self, batch, broadcast)

    def mesh_of(self, module: str = "backbone") -> Mesh:
        """Return the mesh of a module: its own, or that of the plan."""
        return self.module(module).on or self.tree

    @property
    def tree(self) -> Mesh:
        if self.place is None:
            raise PlanError(
                "expected a plan with a mesh, got one that has no place",
                self.step,
                "give LoadingPlan(place=...)",
            )
        return self.place

    # quality

    def imbalance(self, module: str = "backbone", *, cost: Any = None) -> dict[str, float]:
        """Return costs relative to the mean bucket; all are 1 if the plan has no cost.

        Costs are those of the strategy that made the plan. Plans of several strategies compare only
        by one ``cost``: a cost of samples by their tokens, or its name.
        ``bucket``: the most expensive bucket. ``microbatch``: the sum, over microbatch indices, of
        the most expensive microbatch. ``bound`` and ``slot_bound``: lower bounds of both for every
        placement of these samples. In a hybrid plan they are those of every choice of rings, by the
        model, with the transfers that the longest sample needs; 0 if there is no model. It has
        ``waits`` too: the modelled end of the last rank, with the waits for its rings.
        """
        from overlord.plan.summary import imbalance

        if cost is None:
            return imbalance(self, module)
        if module != "backbone":
            problem = f"imbalance(cost=): expected module 'backbone', got {module!r}"
            raise PlanError(problem, self.step, "leave out cost=: a plan keeps tokens of samples")
        return imbalance(late_binding.call("measured", self, cost), module)

    def summary(self) -> dict[str, Any]:
        """Return plain values: balance and its bounds, predicted time, peak, fill, mixture."""
        from overlord.plan.summary import summary

        return summary(self)

    def to_json(self, samples: bool = True) -> str:
        """Return the summary as JSON text; with ``samples``, also every item and its slot."""
        from overlord.plan.summary import to_json

        return to_json(self, samples)

    def loads(self, module: str = "backbone") -> np.ndarray:
        """Return the sums of cost by [bucket, microbatch]: float64."""
        a = self.pieces(module)
        flat = a.bins()
        return np.bincount(flat, weights=a.cost, minlength=a.n_buckets * a.n_microbatches).reshape(
            a.n_buckets, a.n_microbatches
        )

    def fill(self) -> float:
        """Return the share of the capacity of all microbatches that is used; 1 without capacity."""
        a = self.main
        n = a.n_buckets * a.n_microbatches
        room = a.capacity * (n if self.tasks is None else len(self.tasks.table.task_rank))
        return float(a.size.sum()) / room if room else 1.0

    def to_table(self) -> str:
        """Return a text table of cost, tokens and samples, of at most 64 buckets of 16 columns."""
        from overlord.plan.summary import table

        return table(self)

    def to_bytes(self) -> bytes:
        """Return the plan in a small binary form without pickle (``plan/codec.py``)."""
        from overlord.plan import codec  # it needs the classes of this file

        return codec.write(self)

    @staticmethod
    def from_bytes(data: bytes) -> LoadingPlan:
        """Return the plan of bytes from ``to_bytes``; raise ``PlanError`` for any other bytes."""
        from overlord.plan import codec

        return codec.read(data)
