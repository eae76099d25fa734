"""Select the images that some ranks encode in a step, for their constructors. Pure.

The planner selects them from the plan, once per step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overlord.batch import Batch
from overlord.errors import PlanError
from overlord.mesh import BUCKET_AXES, Mesh
from overlord.messages.control import EncoderPlan
from overlord.plan.plan import LoadingPlan
from overlord.plan.routes import Routes, ranges, starts
from overlord.sample import Buffer, Ragged

ENCODER = "encoder"  # the module whose items are images
IMAGES = "image_patches"  # metadata column with the patches of each image of a sample
REMEDY = 'add .broadcast_at("CP"), or distribute samples over "CP", or set batch.cp_split="none"'


class Encodings:
    """The routes of one step; ``of(ranks)`` selects those of some ranks."""

    def __init__(self, plan: LoadingPlan, batch: Batch, multiple: int):
        self.plan, self.routes = plan, plan.routes(ENCODER)
        a, b = plan.module(ENCODER), plan.main
        node = np.empty(len(plan), np.int64)
        node[b.sample] = np.arange(len(b.sample))
        self.sample, at = a.sample, node[a.sample]
        self._home = np.stack([b.bucket[at], b.microbatch[at], b.slot[at]], axis=1).astype(np.int64)
        if batch.layout == "padded":
            first = b.slot[at].astype(np.int64) * batch.context
        # as the constructor places documents: the plan's own sizes are the strategy's choice
        else:
            first = starts(b, np.maximum(-(-plan.tokens[b.sample] // multiple), 1) * multiple)[at]
        self._position = first + self.routes.offset
        # number of each item among those that its owner receives in its exchange
        self._arrives = np.empty(len(self.routes), np.int64)
        before = np.repeat(self.routes.owned_bounds[:-1], np.diff(self.routes.owned_bounds))
        self._arrives[self.routes.received] = np.arange(len(self.routes)) - before

    def encoded_by(self, ranks: Sequence[int]) -> np.ndarray:
        """Return the items that these ranks encode, by rank and then by exchange."""
        return self.routes.sent[_rows(self.routes, ranks, self.routes.sent_bounds)[0]]

    def of(self, ranks: Sequence[int], at: np.ndarray) -> EncoderPlan:
        """Return the encoder plan of these ranks.

        ``at``: payload row of each item of ``encoded_by(ranks)``.
        """
        r, p = self.routes, self.plan
        sent, bounds = _rows(r, ranks, r.sent_bounds)
        got, recv_bounds = _rows(r, ranks, r.owned_bounds)
        item, arriving, wanted = r.sent[sent], r.received[got], r.wanted[got]
        sample = self.sample[item]
        ids = np.stack(
            [
                getattr(p, name)[sample].astype(np.int64)
                for name in ("source", "epoch", "file", "row", "part")
            ],
            axis=1,
        )
        return EncoderPlan(
            ranks=np.asarray(ranks, np.int64),
            n_slots=r.n_slots,
            per=r.per,
            item=item,
            at=at,
            ids=ids,
            number=r.number[item].astype(np.int32),
            home=self._home[item],
            send_lens=r.out[item].astype(np.int32),
            bounds=bounds,
            send_splits=_splits(bounds, r.owner[item], r.out[item], r.world_size),
            recv_splits=_splits(recv_bounds, r.encoder[arriving], r.out[arriving], r.world_size),
            recv_perm=self._arrives[wanted],
            out_lens=r.out[wanted].astype(np.int32),
            microbatch=r.microbatch[wanted].astype(np.int32),
            position=self._position[wanted],
            recv_bounds=recv_bounds,
        )


def _rows(
    routes: Routes, ranks: Sequence[int], bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the route rows that belong to these ranks, and the first row of each group."""
    groups = (
        np.arange(routes.n_slots)[None, :] * routes.world_size
        + np.asarray(ranks, np.int64)[:, None]
    ).ravel()
    counts = bounds[groups + 1] - bounds[groups]
    return ranges(bounds[groups], counts), np.concatenate([[0], np.cumsum(counts)])


def _splits(bounds: np.ndarray, peer: np.ndarray, rows: np.ndarray, world: int) -> np.ndarray:
    """Return the number of rows exchanged with every rank, group by group."""
    groups = len(bounds) - 1
    group = np.repeat(np.arange(groups), np.diff(bounds))
    return (
        np.bincount(group * world + peer, weights=rows, minlength=groups * world)
        .astype(np.int32)
        .reshape(groups, world)
    )


def check_images(plan: LoadingPlan, buffer: Buffer) -> None:
    """Raise unless every image is encoded exactly once."""
    column = buffer.column(IMAGES) if IMAGES in buffer.meta or IMAGES in buffer.absent else None
    if not isinstance(column, Ragged):
        return
    if ENCODER not in plan.modules:
        raise PlanError(
            f"the job has images, and the plan has no module {ENCODER!r}",
            plan.step,
            "end the strategy with .plan(encoder=...); plan_raw places samples alone",
        )
    wanted, found = column.lengths, np.bincount(plan.modules[ENCODER].sample, minlength=len(plan))
    if not np.array_equal(wanted, found):
        i = int(np.flatnonzero(wanted != found)[0])
        words = (
            f"sample {plan.sample_id(i)} has {wanted[i]} images, and the plan's {ENCODER!r} "
            f"{found[i]} of them"
        )
        raise PlanError(words, plan.step, f"select them all: .select({IMAGES!r})")
    main, place = plan.main, plan.place
    if (
        place is not None
        and sliced(place, buffer.batch)
        and "cp" not in BUCKET_AXES[main.axis]
        and "CP" not in main.broadcast
    ):
        raise PlanError(
            "no rank has a whole microbatch to put rows of images into: context "
            "parallelism cuts it",
            plan.step,
            REMEDY,
        )
    # Rows go to one rank of a bucket, and only the group that encodes an image learns that it is
    # broken.
    if place is not None and place.dp > 1 and "dp" not in BUCKET_AXES[main.axis]:
        words = (
            f"samples with images are distributed over {main.axis}, where several replicas "
            "train on the same ones"
        )
        raise PlanError(words, plan.step, 'distribute samples over "DP", "CP" or "WORLD"')


def valid_tokens(plan: LoadingPlan, images: bool) -> int:
    """Return the number of tokens of a step with a loss, over all ranks.

    All but the first token of a document count, without placeholders of images, which are not
    predicted. ``images``: whether the job's images are encoded; else the plan's encoder module has
    no placeholders.
    """
    found = int(np.maximum(plan.tokens - 1, 0).sum())
    a = plan.modules.get(ENCODER) if images else None
    if a is None or a.out is None or a.offset is None:
        return found
    # the first token of a document is never predicted
    first = (a.offset == 0) & (a.out > 0)
    return found - int(a.out.sum()) + int(first.sum())


def sliced(place: Mesh, batch: Batch) -> bool:
    """Return whether context-parallel ranks get slices of a microbatch, by mesh and batch alone."""
    return place.cp > 1 and batch.cp_split != "none"
