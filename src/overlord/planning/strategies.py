"""The strategies of the package: each turns the drawn samples of a step into a plan.

Write your own as a function ``(buffer, place) -> LoadingPlan`` from the same primitives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from overlord.checks import checked_function, did_you_mean, name_of
from overlord.errors import JobError, PlanError
from overlord.mesh import Batch, Mesh
from overlord.plan.plan import LoadingPlan
from overlord.planning.balance import binpack
from overlord.planning.balance.balance import ItemPlacement
from overlord.planning.balance.binpack import cut_inside
from overlord.planning.balance.even_counts import even_counts
from overlord.planning.balance.hybrid_rules import check_arguments
from overlord.planning.cost import CostFn, fingerprint_of, named
from overlord.planning.cost.models import DENSE_12B, VIT_1B, encoder_of, of_model
from overlord.planning.cost.on_rings import RING_12B, ring_of
from overlord.planning.graph.dgraph import DGraph
from overlord.planning.images import PER
from overlord.planning.selection import hold_long
from overlord.sample import IDS, Buffer, Columns, Ragged

Strategy = Callable[[Buffer, Mesh], LoadingPlan]
IMAGES = "image_patches"  # metadata column with the number of patches of each image of a sample


def vanilla(buffer: Buffer, place: Mesh) -> LoadingPlan:
    """Place samples without balancing: sample i goes to rank i mod D.

    Each rank's samples go in stream order into microbatches of equal counts.
    """
    return _plan(_samples(buffer, place).balance("none"))


def packed(buffer: Buffer, place: Mesh) -> LoadingPlan:
    """Divide the stream into microbatches of about equal tokens, and give them to ranks in turn."""
    graph, n, context = _samples(buffer, place), place.n_buckets("DP"), buffer.batch.context
    if buffer.chunk is not None:  # the stream is cut evenly already
        return _plan(graph.balance("none"))
    graph.check_sizes(context)
    sizes = graph.sizes()
    m = max(
        buffer.batch.microbatches, int(binpack.next_fit(sizes, context).max(initial=0)) // n + 1
    )
    m = place.microbatch_count(m)
    bins = cut_inside(
        np.zeros(len(sizes), np.int64),
        sizes,
        n_parents=1,
        n_bins=n * m,
        capacity=context,
        by_count=False,
    )
    found = ItemPlacement(
        bucket=bins % np.int32(n),
        microbatch=bins // np.int32(n),
        n_microbatches=m,
        algorithm="even cuts",
    )
    return _plan(graph.placed(found, "pack", context))


def even(buffer: Buffer, place: Mesh) -> LoadingPlan:
    """Give every microbatch of every rank the same number of samples, with levelled costs.

    It is for trainers that gather values of samples across ranks. ``Batch.samples`` must be a
    multiple of dp x microbatches.
    """
    graph, context = _samples(buffer, place), buffer.batch.context
    graph.check_sizes(context)
    assert graph.costs is not None
    m = place.microbatch_count(buffer.batch.microbatches)
    found = even_counts(graph.costs, graph.sizes(), place.n_buckets("DP"), m, context)
    assert found is not None, "every sample fits into a microbatch"
    return _plan(graph.placed(found, "even", context))


def llm_balance(buffer: Buffer, place: Mesh) -> LoadingPlan:
    """Balance cost over ranks: for every microbatch or for the step, as set by ``Job.sync``."""
    return _plan(_samples(buffer, place).balance("greedy"))


def look_ahead_balance(buffer: Buffer, place: Mesh) -> LoadingPlan:
    """Balance like ``llm_balance``, and hold back expensive samples until several share a step.

    A sample is held back if it costs more than a rank's share. The choice needs
    ``Job(look_ahead=...)`` above 1.
    """
    cost = of_model(buffer.model)
    graph = DGraph.from_buffer(buffer, place, meta="tokens").mix(prefer=hold_long(cost))
    return _plan(graph.distribute("DP").cost(cost).balance("greedy"))


def backbone_balance(buffer: Buffer, place: Mesh) -> LoadingPlan:
    """Balance cost over ranks, as set by ``Job.sync``; each rank's samples stay in stream order."""
    return _plan(_samples(buffer, place).balance("greedy", level="inter"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridStrategy:
    """The strategy that ``hdp`` returns; another process can receive it."""

    cost: CostFn | None  # None: that of the job's model
    capacity: int | None
    groups: str
    rules: tuple[tuple[str, float | bool], ...]
    hybrid: ClassVar[bool] = True  # samples may be longer than the context
    __name__: ClassVar[str] = "hdp_balance"

    @property
    def fingerprint(self) -> str:
        rules = ", ".join(f"{name}={value!r}" for name, value in self.rules)
        cost = fingerprint_of(self.cost or RING_12B)
        return f"hdp({cost}, {self.capacity}, {self.groups}, {rules})"

    def __call__(self, buffer: Buffer, place: Mesh) -> LoadingPlan:
        drawn = DGraph.from_buffer(buffer, place, meta="tokens").mix().distribute("CP")
        cost = self.cost or ring_of(buffer.model)
        split = drawn.cost(cost).split(self.capacity, self.groups, **dict(self.rules))
        split = split.broadcast_at("TP")
        if not _has_images(buffer):
            return split.plan()
        # ranks may run different numbers of microbatches: one exchange for the whole step
        return split.plan(encoder=_images(split).balance("greedy"))


def hdp(
    cost: CostFn | str | None = None,
    *,
    capacity: int | None = None,
    groups: str = "any",
    **rules: float | bool | None,
) -> HybridStrategy:
    """Return a strategy that splits samples over rings of ranks: hybrid data parallelism.

    ``Batch.context`` is the capacity of one rank, and a sample may need several. The ranks of dp
    and cp form one axis. ``cost``: ``ov.cost.RingCosts`` of your model and network, by default
    those of ``Job.model`` (or a 12B Llama) on a cluster with 400 Gb/s links. Other arguments: see
    ``DGraph.split``.
    """
    try:
        given = check_arguments(capacity, groups, rules)
    except PlanError as e:
        remedy = f"; {e.remedy}" if e.remedy else ""
        raise JobError([f"strategy.hdp: {e.problem}{remedy}"]) from None
    return HybridStrategy(
        cost=None if cost is None else named(cost),
        capacity=capacity,
        groups=groups,
        rules=tuple(sorted(given.items())),
    )


hdp_balance = hdp()


def encoder_balance(buffer: Buffer, place: Mesh) -> LoadingPlan:
    """Balance encoder cost over all ranks, once per step; samples go to ranks in turn."""
    images = (
        DGraph.from_buffer(buffer, place)
        .mix()
        .select(IMAGES)
        .distribute("WORLD")
        .cost(encoder_of(buffer.model))
        .balance("greedy")
    )
    return _samples(buffer, place).balance("none").broadcast_at("TP").plan(encoder=images)


def vlm(
    encoder: CostFn | str | None = None,
    backbone: CostFn | str | None = None,
    *,
    per: str = "iteration",
    joint: bool | None = None,
    merge: int = 1,
    images: str = IMAGES,
    method: str = "greedy",
    objective: str | None = None,
) -> Strategy:
    """Return a strategy for models with an encoder.

    Images are balanced over all ranks, samples over replicas.

    ``encoder`` and ``backbone`` are the costs of an image and of a sample, in one unit; by default
    those of ``Job.model``, or of the models of the Overlord paper. ``per``:
    the encoder runs once per step (``"iteration"``: best balance, outputs of the whole step in
    memory) or before every microbatch (``"microbatch"``). ``joint``: one cost for a sample and its
    images, which stay with the ranks of its replica, so that no output leaves it. ``None`` does so
    if replicas are single ranks or CP groups. ``merge``: see ``DGraph.select``. ``objective``: when
    replicas wait for each other, by default as set by ``Job.sync``; see ``DGraph.balance``.
    """
    if per not in PER:
        raise JobError([f"strategy.vlm: unknown per={per!r}; known: {', '.join(PER)}"])

    def vlm_hybrid(buffer: Buffer, place: Mesh) -> LoadingPlan:
        drawn = DGraph.from_buffer(buffer, place).mix()
        items = drawn.select(images, merge=merge).distribute("WORLD")
        items = items.cost(encoder_of(buffer.model) if encoder is None else encoder)
        together = place.tp * place.pp == 1 if joint is None else joint
        texts = drawn.select("tokens").distribute("DP")
        texts = texts.cost(of_model(buffer.model) if backbone is None else backbone)
        weighed = _weighed_with(texts, items) if together else texts
        samples = weighed.balance(method, objective=objective).broadcast_at("TP")
        # the plan reports the backbone's own cost
        samples = replace(samples, costs=texts.costs)
        everywhere = per == "iteration" and not together
        return samples.plan(
            encoder=items.balance(method)
            if everywhere
            else items.follow(samples, method, per=per, stay=together)
        )

    # the texts of a job without a model: a state resumes with another model
    assumed = (encoder or VIT_1B, backbone or DENSE_12B)
    costs = ", ".join(fingerprint_of(named(cost)) for cost in assumed)
    vlm_hybrid.fingerprint = (  # type: ignore[attr-defined]
        f"vlm({costs}, {per}, {joint}, {merge}, {images}, {method}, {objective})"
    )
    return vlm_hybrid


def _weighed_with(samples: DGraph, items: DGraph) -> DGraph:
    """Return the graph of samples with the costs of their items added to their own."""
    assert samples.costs is not None
    assert items.costs is not None
    return replace(
        samples,
        costs=samples.costs
        + np.bincount(items.sample, weights=items.costs, minlength=len(samples.costs)),
    )


vlm_hybrid = vlm()


def _samples(buffer: Buffer, place: Mesh) -> DGraph:
    drawn = DGraph.from_buffer(buffer, place, meta="tokens").mix().distribute("DP")
    return drawn.cost(of_model(buffer.model))


def _plan(samples: DGraph) -> LoadingPlan:
    """Return the plan of placed samples; the ranks of a replica encode its images in turn."""
    samples = samples.broadcast_at("TP")
    if not _has_images(samples.buffer):
        return samples.plan()
    return samples.plan(encoder=_images(samples).follow(samples, "none", stay=True))


def _has_images(buffer: Buffer) -> bool:
    """Return whether a source of the job has images, in this step or in others."""
    return isinstance(buffer.meta.get(IMAGES), Ragged) or IMAGES in buffer.absent


def _images(samples: DGraph) -> DGraph:
    """Return the graph of the images of these samples, on all ranks."""
    drawn = DGraph.from_buffer(samples.buffer, samples.tree).mix()
    return drawn.select(IMAGES).distribute("WORLD").cost(encoder_of(samples.buffer.model))


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        "vanilla": vanilla,
        "packed": packed,
        "even": even,
        "llm_balance": llm_balance,
        "backbone_balance": backbone_balance,
        "look_ahead_balance": look_ahead_balance,
        "hdp_balance": hdp_balance,
        "encoder_balance": encoder_balance,
        "vlm_hybrid": vlm_hybrid,
    }
)


def validates(strategy: Strategy) -> bool:
    """Return whether a strategy is one of this module, whose plans are valid when they return."""
    return any(strategy is each for each in STRATEGIES.values())


def resolve(strategy: Any) -> Strategy:
    """Return a strategy by its name, or the function itself; raise for an unknown name."""
    if callable(strategy):
        return strategy
    if strategy not in STRATEGIES:
        raise JobError(
            [f"strategy: unknown strategy {strategy!r}{did_you_mean(strategy, STRATEGIES)}"]
        )
    return STRATEGIES[strategy]


# ----------------------------------------------------------------------------
# ``plan_raw``: a strategy from a function over raw arrays.


def plan_raw(fn: RawFn, *, axis: str = "DP", broadcast: str | Sequence[str] = ("TP",)) -> RawPlan:
    """Return a strategy that calls a function over raw arrays.

    The function is ``fn(columns, place, batch, step) -> {"bucket": ..., "microbatch": ...}``.

    Use it as ``Job(strategy=ov.plan_raw(fn))``; it is called once per step. ``columns`` has a
    read-only array per column, with one row per drawn sample in the order of the draw. The columns
    are ``tokens`` and your metadata (a ``Ragged`` if a sample has several values). ``source``
    (number in the job's order), ``epoch``, ``file``, ``row`` and ``part`` identify the sample.
    ``mix_every="microbatch"`` adds ``substep``.

    The function returns an integer per sample for ``bucket`` (0 to ``place.n_buckets(axis) - 1``)
    and ``microbatch`` (the highest determines their number, at least ``batch.microbatches``).
    Optional keys are ``slot``, the position in the microbatch (default: the order of the draw), and
    ``cost`` (default: tokens), which only reports use.

        def by_row(columns, place, batch, step):
            row = columns["row"]
            return {"bucket": row % place.dp, "microbatch": np.zeros(len(row), int)}
    """
    dims = (broadcast,) if isinstance(broadcast, str) else tuple(broadcast)
    return RawPlan(
        fn=checked_function(fn, "plan_raw", ("columns", "place", "batch", "step")),
        axis=axis,
        broadcast=dims,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPlan:
    """The strategy that ``plan_raw`` returns."""

    fn: RawFn
    axis: str
    broadcast: tuple[str, ...]
    kind: ClassVar[str] = "strategy"

    @property
    def __name__(self) -> str:
        return f"plan_raw({name_of(self.fn)})"

    def __call__(self, buffer: Buffer, place: Mesh) -> LoadingPlan:
        graph = DGraph.from_buffer(buffer, place, meta="tokens").mix().distribute(self.axis)
        # look-ahead has chosen among candidates, and overflow="defer" has left out samples that do
        # not fit
        buffer = graph.buffer
        columns: dict[str, Any] = Columns(
            {n: getattr(buffer, n) for n in IDS} | dict(buffer.meta), buffer.step
        )
        columns |= {n: c for n in ("substep", "chunk") if (c := getattr(buffer, n)) is not None}
        result = self._checked(
            self.fn(columns, place, buffer.batch, buffer.step), buffer, place.n_buckets(self.axis)
        )
        if "cost" in result:
            graph = graph.cost(lambda _: result["cost"])
        graph.check_sizes(buffer.batch.context)
        least = buffer.batch.least_microbatches(place.n_buckets(self.axis))
        microbatches = max(least, int(result["microbatch"].max(initial=0)) + 1)
        found = ItemPlacement(
            bucket=result["bucket"],
            microbatch=result["microbatch"],
            n_microbatches=place.microbatch_count(microbatches),
            algorithm="raw",
        )
        plan = (
            graph.placed(found, self.__name__, buffer.batch.context)
            .broadcast_at(*self.broadcast)
            .plan()
        )
        if "slot" not in result:
            return plan
        return replace(
            plan, modules={"backbone": replace(plan.main, slot=result["slot"])}
        ).validate()

    def _checked(self, result: Any, buffer: Buffer, n_buckets: int) -> dict[str, np.ndarray]:
        known = ("bucket", "microbatch", "slot", "cost")
        keys = list(result) if isinstance(result, Mapping) else None
        if keys is None or not {"bucket", "microbatch"} <= set(keys) or not set(keys) <= set(known):
            found = type(result).__name__ if keys is None else f"keys {', '.join(map(str, keys))}"
            remedy = f"return arrays by name; known names: {', '.join(known)}"
            raise PlanError(
                f"{self.__name__}: expected a mapping with bucket and microbatch, got {found}",
                buffer.step,
                remedy,
            )
        arrays = {key: np.asarray(result[key]) for key in keys}
        for key, array in arrays.items():
            kinds = "iuf" if key == "cost" else "iu"
            if array.shape != (len(buffer),) or (array.dtype.kind not in kinds and len(buffer)):
                wanted = f"{len(buffer)} {'numbers' if key == 'cost' else 'whole numbers'}"
                raise PlanError(
                    f"{self.__name__}: expected {wanted} for {key}, got {array.dtype} "
                    f"{array.shape}",
                    buffer.step,
                )
            top = n_buckets if key == "bucket" else 2**31
            if key != "cost" and len(array) and not 0 <= int(array.min()) <= int(array.max()) < top:
                raise PlanError(
                    f"{self.__name__}: expected {key} from 0 to {top - 1}, got "
                    f"{int(array.min())} to {int(array.max())}",
                    buffer.step,
                )
        return {
            key: array.astype(np.float64 if key == "cost" else np.int32)
            for key, array in arrays.items()
        }


RawFn = Callable[[dict[str, Any], Mesh, "Batch", int], Mapping[str, Any]]
