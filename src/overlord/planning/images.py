"""Images of a step: the rank that encodes each image, and the encoder plans of ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overlord.errors import PlanError
from overlord.hashing import in_documents
from overlord.mesh import BUCKET_AXES, Batch, Mesh
from overlord.messages.control import SHARED, EncoderPlan
from overlord.plan.module_ranks import OUTSIDE, bucket_by_rank
from overlord.plan.plan import LoadingPlan
from overlord.plan.routes import Routes
from overlord.planning.balance.groups import nested
from overlord.planning.balance.placement import ItemPlacement, PackingProblem
from overlord.sample import Buffer, Ragged, ranges

# ----------------------------------------------------------------------------
# Encoder plans: the images that some ranks encode in a step, selected from the plan once per step.

ENCODER = "encoder"  # the module whose items are images
IMAGES = "image_patches"  # metadata column with the patches of each image of a sample


class Encodings:
    """The routes of all images of a step; ``of(ranks)`` returns the encoder plan of some ranks.

    ``broadcast``: whether the trainer broadcasts where the plan says so.
    """

    def __init__(self, plan: LoadingPlan, batch: Batch, broadcast: bool = True):
        self.plan, self.routes = plan, plan.routes(ENCODER, batch, broadcast=broadcast)
        a, b, r = plan.module(ENCODER), plan.main, self.routes
        node = np.empty(len(plan), np.int64)
        node[b.sample] = np.arange(len(b.sample))
        self.sample, at = a.sample, node[a.sample]
        self._home = np.stack([b.bucket[at], b.microbatch[at], b.slot[at]], axis=1).astype(np.int64)
        # number of each part among those that its owner receives in the same exchange
        self._arrives = np.empty(len(r.parts), np.int64)
        before = np.repeat(r.owned_bounds[:-1], np.diff(r.owned_bounds))
        self._arrives[r.received] = np.arange(len(r.parts)) - before
        # number of each item among those that its rank encodes in the same exchange
        self._outputs = np.empty(len(r), np.int64)
        before = np.repeat(r.encoded_bounds[:-1], np.diff(r.encoded_bounds))
        self._outputs[r.encoded] = np.arange(len(r)) - before
        self._holders()

    def _holders(self) -> None:
        """Set the items with placeholders, bucket by bucket: those whose tokens it holds."""
        plan, b = self.plan, self.plan.main
        item, bucket = np.arange(len(self.sample)), self._home[:, 0]
        self._shared = np.zeros(len(item), bool)  # several buckets hold the sample
        if plan.tasks is not None:
            table, task = plan.tasks.table, plan.tasks.task[self.sample].astype(np.int64)
            d = table.sizes()[task]
            item, self._shared = np.repeat(item, d), d > 1
            bucket = table.task_rank[ranges(table.task_ptr[task], d)]
        some = self.routes.out[item] > 0
        item, bucket = item[some], bucket[some]
        by_bucket = np.argsort(bucket, kind="stable")
        self._held = item[by_bucket]
        self._held_bounds = np.searchsorted(bucket[by_bucket], np.arange(b.n_buckets + 1))

    def encoded_by(self, ranks: Sequence[int]) -> np.ndarray:
        """Return the items that these ranks encode, in the order of ranks, then of exchanges."""
        return self.routes.encoded[_rows(self.routes, ranks, self.routes.encoded_bounds)[0]]

    def of(self, ranks: Sequence[int], at: np.ndarray) -> EncoderPlan:
        """Return the encoder plan of these ranks.

        ``at``: payload row of each item of ``encoded_by(ranks)``.
        """
        r, p, parts = self.routes, self.plan, self.routes.parts
        encoded, bounds = _rows(r, ranks, r.encoded_bounds)
        sending, sent_bounds = _rows(r, ranks, r.sent_bounds)
        got, recv_bounds = _rows(r, ranks, r.owned_bounds)
        item, sent = r.encoded[encoded], r.sent[sending]
        arriving, wanted = r.received[got], r.wanted[got]
        sample = self.sample[item]
        ids = np.stack(
            [
                getattr(p, name)[sample].astype(np.int64)
                for name in ("source", "epoch", "file", "row", "part")
            ],
            axis=1,
        )
        home = self._home[item]
        home[self._shared[item], 0] = SHARED
        return EncoderPlan(
            ranks=np.asarray(ranks, np.int64),
            n_slots=r.n_slots,
            per=r.per,
            item=item,
            at=at,
            ids=ids,
            number=r.number[item].astype(np.int32),
            home=home,
            send_lens=r.out[item].astype(np.int32),
            bounds=bounds,
            sent=np.stack(
                (self._outputs[parts.item[sent]], parts.first[sent], parts.count[sent]), axis=1
            ),
            sent_bounds=sent_bounds,
            send_splits=_splits(sent_bounds, parts.owner[sent], parts.count[sent], r.world_size),
            recv_splits=_splits(
                recv_bounds, r.encoder[parts.item[arriving]], parts.count[arriving], r.world_size
            ),
            recv_perm=self._arrives[wanted],
            out_lens=parts.count[wanted].astype(np.int32),
            microbatch=parts.microbatch[wanted],
            position=parts.position[wanted],
            recv_bounds=recv_bounds,
            placeholders=self._placeholders(ranks),
        )

    def _placeholders(self, ranks: Sequence[int]) -> np.ndarray:
        """Return the placeholders in all documents of these ranks: see ``EncoderPlan``."""
        b, a = self.plan.main, self.plan.module(ENCODER)
        assert a.offset is not None
        buckets = np.unique(bucket_by_rank(self.plan.tree, b.on, b.axis)[list(ranks)])
        buckets = buckets[buckets != OUTSIDE]
        first = self._held_bounds[buckets]
        item = np.unique(self._held[ranges(first, self._held_bounds[buckets + 1] - first)])
        return np.column_stack((self._home[item], a.offset[item], self.routes.out[item]))


def _rows(
    routes: Routes, ranks: Sequence[int], bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the route rows of these ranks, and the bounds of each (rank, exchange) in them."""
    groups = (
        np.arange(routes.n_slots)[None, :] * routes.world_size
        + np.asarray(ranks, np.int64)[:, None]
    ).ravel()
    counts = bounds[groups + 1] - bounds[groups]
    return ranges(bounds[groups], counts), np.concatenate([[0], np.cumsum(counts)])


def _splits(bounds: np.ndarray, peer: np.ndarray, rows: np.ndarray, world: int) -> np.ndarray:
    """Return the rows exchanged with every rank: int32 [groups, world].

    Parts ``bounds[g]`` to ``bounds[g + 1]`` are of group g; ``peer`` and ``rows`` are by part.
    """
    groups = len(bounds) - 1
    group = np.repeat(np.arange(groups), np.diff(bounds))
    return (
        np.bincount(group * world + peer, weights=rows, minlength=groups * world)
        .astype(np.int32)
        .reshape(groups, world)
    )


def check_images(plan: LoadingPlan, buffer: Buffer) -> None:
    """Raise ``PlanError`` unless the plan encodes every image once, where outputs can be inserted.

    A step without metadata of images passes.
    """
    column = buffer.column(IMAGES) if IMAGES in buffer.meta or IMAGES in buffer.absent else None
    if not isinstance(column, Ragged):
        return
    if ENCODER not in plan.modules:
        raise PlanError(
            f"strategy: expected a plan with module {ENCODER!r}, since the job has images, got one "
            "without it",
            plan.step,
            "end the strategy with .plan(encoder=...); plan_raw cannot place images",
        )
    wanted, found = column.lengths, np.bincount(plan.modules[ENCODER].sample, minlength=len(plan))
    if not np.array_equal(wanted, found):
        i = int(np.flatnonzero(wanted != found)[0])
        problem = (
            f"module {ENCODER!r}: expected the {wanted[i]} images of sample {plan.sample_id(i)}, "
            f"got {found[i]} of them"
        )
        raise PlanError(problem, plan.step, f"select them all: .select({IMAGES!r})")
    main, place = plan.main, plan.main.on or plan.place
    # Outputs go to one bucket of a sample, and only the encoding ranks can detect a broken image.
    if place is not None and place.dp > 1 and "dp" not in BUCKET_AXES[main.axis]:
        problem = (
            'samples with images: expected a distribution over "DP", "CP" or "WORLD", got '
            f"{main.axis}, where several replicas train on the same samples"
        )
        raise PlanError(problem, plan.step, 'distribute samples over "DP", "CP" or "WORLD"')


# ----------------------------------------------------------------------------
# Items of samples (images): the rank that encodes each, and the tokens that its output replaces.
#
# An item's output is ``out`` rows of the encoder. They replace tokens ``offset`` to ``offset +
# out`` of its sample, where the document has placeholders. For items selected by
# ``image_patches``, ``out`` is the metadata ``image_tokens`` and ``offset`` the metadata
# ``image_offset`` if they are given. Without them an item has a row for every ``merge`` x
# ``merge`` patches. The items are then at the start of their document one after another.

PER = ("iteration", "microbatch")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placeholders:
    """The rows that are sent of every item, and the tokens of its sample that they replace."""

    out: np.ndarray  # int64: number of rows of each item
    offset: np.ndarray  # int64: first token that they replace in the sample
    # number of items that are not sent whole: their document was truncated, or the next item begins
    cut: int


def placeholders(
    buffer: Buffer, sample: np.ndarray, patches: np.ndarray, column: str, merge: int
) -> Placeholders:
    """Return the placeholders of all items.

    ``sample`` and ``patches`` are by item; ``column`` is the ragged column of the patches. Rows
    neither exceed their document nor overlap the next item; only the first rows that fit are sent.
    """
    stem = column.rpartition("_")[0] or column
    out = _item_column(
        buffer, sample, f"{stem}_tokens", patches.astype(np.int64) // (merge * merge)
    )
    offset = _item_column(buffer, sample, f"{stem}_offset", _adjacent_offsets(sample, out))
    tokens = buffer.column("tokens")
    assert isinstance(tokens, np.ndarray)
    offset = np.minimum(offset, tokens[sample])
    sent = np.minimum(out, tokens[sample] - offset)
    order = in_documents(sample, offset)
    order = order[sent[order] > 0]  # items without rows limit no other
    here, at = sample[order], offset[order]
    same = here[1:] == here[:-1]
    sent[order[:-1][same]] = np.minimum(sent[order[:-1][same]], (at[1:] - at[:-1])[same])
    return Placeholders(out=sent, offset=offset, cut=int((sent < out).sum()))


def _item_column(
    buffer: Buffer, sample: np.ndarray, name: str, otherwise: np.ndarray
) -> np.ndarray:
    """Return metadata ``name`` by item; items of samples without it have ``otherwise``.

    Raise ``PlanError`` if a sample's list does not have one number for each item.
    """
    if name not in buffer.meta:
        return otherwise
    found, counts = buffer.meta[name], np.bincount(sample, minlength=len(buffer))
    lengths = found.lengths if isinstance(found, Ragged) else np.full(len(buffer), -1)
    has_column = (counts > 0) & (lengths != 0)  # a source without this metadata has empty lists
    if (lengths[has_column] != counts[has_column]).any():
        i = int(np.flatnonzero(has_column & (lengths != counts))[0])
        problem = (
            f"metadata {name!r} of sample {buffer[i]}: expected a list of {counts[i]} numbers (one "
            f"for each item), got {lengths[i] if isinstance(found, Ragged) else 'no list'}"
        )
        raise PlanError(problem, buffer.step, "correct the transform that gives this metadata")
    assert isinstance(found, Ragged) or not has_column.any()
    if not isinstance(found, Ragged) or not has_column.any():
        return otherwise
    held = found.take(np.flatnonzero(has_column)).values.astype(np.int64)
    if len(held) == len(otherwise):
        return held
    otherwise = otherwise.copy()
    otherwise[has_column[sample]] = held
    return otherwise


def _adjacent_offsets(sample: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Return the first token of each item if the items of a sample begin it without gaps."""
    before, number = np.cumsum(out) - out, np.arange(len(sample))
    first = (
        np.maximum.accumulate(np.where(np.append(True, sample[1:] > sample[:-1]), number, 0))
        if len(sample)
        else number
    )
    return before - before[first]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemSamples:
    """The placement of the samples of items: bucket and microbatch of the sample of each item."""

    bucket: np.ndarray
    microbatch: np.ndarray
    n_microbatches: int
    axis: str  # axis of the buckets


def place_by_samples(
    costs: np.ndarray,
    sizes: np.ndarray,
    samples: ItemSamples,
    tree: Mesh,
    *,
    axis: str,
    method: str,
    per: str,
    stay: bool,
) -> ItemPlacement:
    """Return a placement of items that depends on the placement of their samples.

    ``per="microbatch"``: items whose samples have the same microbatch index are balanced together
    and keep the index. ``"iteration"``: all are balanced together. ``stay``: a rank of the
    sample's bucket encodes the item.
    """
    if per not in PER:
        raise PlanError(f"follow: expected per as one of {', '.join(PER)}, got {per!r}")
    if stay and axis != "WORLD":
        raise PlanError(
            f'follow(stay=True): expected items distributed over "WORLD", got {axis!r}; '
            'call .distribute("WORLD")'
        )
    nowhere = np.zeros(len(costs), np.int32)
    slot, m = (samples.microbatch, samples.n_microbatches) if per == "microbatch" else (nowhere, 1)
    group, ranks = (
        (samples.bucket, np.array(tree.buckets(samples.axis)) - tree.first_rank)
        if stay
        else (nowhere, np.arange(tree.n_buckets(axis))[None])
    )
    parent, n_parents, n_bins = group.astype(np.int64) * m + slot, len(ranks) * m, ranks.shape[1]
    bins = nested(
        PackingProblem(costs=costs, sizes=sizes, n_buckets=n_bins, method=method),
        parent,
        n_parents,
        n_bins,
    )
    if m > 1 and n_bins > 1 and method != "none":
        bins = _renumber_bins(costs, parent, bins, len(ranks), m, n_bins)
    algorithm = ("inside the groups" if stay else "over all ranks") + (
        ", slot by slot" if per == "microbatch" else ""
    )
    return ItemPlacement(
        bucket=ranks[group, bins].astype(np.int32),
        microbatch=slot.astype(np.int32, copy=False),
        n_microbatches=m,
        algorithm=algorithm,
    )


def _renumber_bins(
    costs: np.ndarray, parent: np.ndarray, bins: np.ndarray, n_groups: int, m: int, n_bins: int
) -> np.ndarray:
    """Renumber bins slot by slot, so that the rank with the least work so far gets the heaviest.

    Without this, bin 0 would get the most expensive item of every slot: LPT (longest processing
    time first) places it there.
    """
    flat = parent * n_bins + bins
    loads = np.bincount(flat, weights=costs, minlength=n_groups * m * n_bins).reshape(
        n_groups, m, n_bins
    )
    names, done, rows = (
        np.empty(loads.shape, np.int32),
        np.zeros((n_groups, n_bins)),
        np.arange(n_groups)[:, None],
    )
    for k in range(m):
        heavy, idle = (
            np.argsort(-loads[:, k], axis=1, kind="stable"),
            np.argsort(done, axis=1, kind="stable"),
        )
        names[rows, k, heavy] = idle
        done[rows, idle] += loads[rows, k, heavy]
    renamed: np.ndarray = names.reshape(-1)[flat]
    return renamed
