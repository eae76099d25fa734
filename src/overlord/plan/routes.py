"""Routes of encoder outputs to the ranks that run the backbone, for one differentiable all-to-all.

    route = plan.routes("encoder").for_rank(rank, slot)
    # the encoder's rank
    rows = torch.cat([o[:n] for o, n in zip(outputs_of(route.items), route.send_lens)])
    # every rank
    got = all_to_all_single(rows, route.recv_splits, route.send_splits)
    # the backbone's rank
    embeddings[route.image_token_index] = got[route.recv_rows]

``slot`` is a microbatch of the encoder. It is the backbone's own if items kept their slots
(``follow(per="microbatch")``), and 0 if the encoder is balanced once per step. In that case rows of
all microbatches of the step come in one exchange; ``route.microbatch(m)`` selects the rows of one.

An *owner* is the rank that gets an item's rows: the first rank of the bucket of its sample. Its
coordinates are pipeline stage 0, and 0 along CP and TP if those are not axes of buckets. The owner
holds the whole microbatch, inserts the rows, and then slices or broadcasts embeddings as it does
tokens. All other ranks receive nothing and take part with zeros. Encoder and backbone may be on
meshes of their own (``distribute(on=)``); all ranks of the job's mesh take part. A rank without
items has empty arrays and must still call the collective, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlord.errors import PlanError
from overlord.hashing import in_documents, order_by_key, position_in_key
from overlord.plan.module_ranks import first_ranks
from overlord.plan.plan import Assignment, LoadingPlan
from overlord.sample import ranges


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """The sends and receives of one rank in one exchange.

    Rows are tokens of the encoder's output.
    """

    rank: int
    slot: int
    # int64 [n]: items of the module that this rank encodes, in sending order
    items: np.ndarray
    # int32 [n]: number of first rows sent of each item; fewer if its document was truncated
    send_lens: np.ndarray
    send_splits: np.ndarray  # int32 [world]: rows to every rank
    recv_splits: np.ndarray  # int32 [world]: rows from every rank
    recv_items: np.ndarray  # int64 [k]: received items, in the order of their placeholders
    # int64 [k]: number of each item in the order of arrival (by sender, then placeholders)
    recv_perm: np.ndarray
    out_lens: np.ndarray  # int32 [k]: rows of each item
    recv_rows: np.ndarray  # int64 [rows]: received[recv_rows] is in the order of the placeholders
    # int64 [rows]: position of each row in the un-sliced packed microbatch
    image_token_index: np.ndarray
    microbatches: np.ndarray  # int32 [k]: the backbone's microbatch of each item
    docs: np.ndarray  # int32 [k]: its document in the microbatch, for the padded layout
    offsets: np.ndarray  # int64 [k]: its first placeholder in the document

    def microbatch(self, m: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (recv_rows, image_token_index) of one microbatch of the backbone."""
        mine = np.repeat(self.microbatches == m, self.out_lens)
        return self.recv_rows[mine], self.image_token_index[mine]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """The routes of a whole step as columns by item, and three orders of the items.

    ``for_rank`` returns the Route of one rank.
    """

    module: str
    world_size: int
    n_slots: int  # exchanges in a step
    per: str  # "microbatch": slot m brings the rows of microbatch m; else "iteration"
    encoder: np.ndarray  # int64: rank that encodes each item
    owner: np.ndarray  # int64: rank that receives the item's rows
    slot: np.ndarray  # int32: number of the exchange of the item's rows
    number: np.ndarray  # int64: number of the item in its sample
    out: np.ndarray  # int64: number of rows of each item
    microbatch: np.ndarray  # int32: microbatch of the backbone
    doc: np.ndarray  # int32: number of the item's document in that microbatch
    offset: np.ndarray  # int64: first placeholder, from the start of its document
    position: np.ndarray  # int64: first placeholder, from the start of the packed microbatch
    sent: np.ndarray  # items by slot, encoder, owner, placeholder
    received: np.ndarray  # items by slot, owner, encoder, placeholder
    wanted: np.ndarray  # items by slot, owner, placeholder
    # int64 [slots * world + 1]: first index of each encoder in ``sent``
    sent_bounds: np.ndarray
    owned_bounds: np.ndarray  # first index of each owner in ``received`` and ``wanted``

    def __len__(self) -> int:
        return len(self.out)

    def __repr__(self) -> str:
        moved = int(self.out[self.encoder != self.owner].sum())
        return (
            f"Routes({self.module}, {len(self)} items, {int(self.out.sum())} rows, "
            f"{moved} of them between ranks; {self.world_size} ranks, "
            f"{self.n_slots} exchange{'s' if self.n_slots > 1 else ''} a step)"
        )

    def for_rank(self, rank: int, slot: int = 0) -> Route:
        for what, value, n in (("rank", rank, self.world_size), ("slot", slot, self.n_slots)):
            if not isinstance(value, (int, np.integer)) or not 0 <= value < n:
                raise PlanError(
                    f"routes of {self.module!r}: expected a {what} from 0 to {n - 1}, got {value!r}"
                )
        at = slot * self.world_size + rank
        items = self.sent[self.sent_bounds[at] : self.sent_bounds[at + 1]]
        arriving = self.received[self.owned_bounds[at] : self.owned_bounds[at + 1]]
        wanted = self.wanted[self.owned_bounds[at] : self.owned_bounds[at + 1]]
        by_item = np.argsort(arriving, kind="stable")
        perm = by_item[np.searchsorted(arriving[by_item], wanted)]
        lens = self.out[wanted]
        arrives = np.cumsum(self.out[arriving]) - self.out[arriving]
        return Route(
            rank=rank,
            slot=slot,
            items=items,
            send_lens=self.out[items].astype(np.int32),
            send_splits=self._rows(self.owner[items], items),
            recv_splits=self._rows(self.encoder[arriving], arriving),
            recv_items=wanted,
            recv_perm=perm,
            out_lens=lens.astype(np.int32),
            recv_rows=ranges(arrives[perm], lens),
            image_token_index=ranges(self.position[wanted], lens),
            microbatches=self.microbatch[wanted],
            docs=self.doc[wanted],
            offsets=self.offset[wanted],
        )

    def _rows(self, ranks: np.ndarray, items: np.ndarray) -> np.ndarray:
        return np.bincount(ranks, weights=self.out[items], minlength=self.world_size).astype(
            np.int32
        )

    def validate(self) -> Routes:
        """Return the routes; raise ``PlanError`` if they are inconsistent.

        Every item must be sent, received and wanted exactly once, by its own ranks. The rows from
        one rank to another must have the same order on both.
        """
        n, w = len(self), self.world_size
        for name in ("sent", "received", "wanted"):
            if not np.array_equal(
                np.bincount(getattr(self, name), minlength=n), np.ones(n, np.int64)
            ):
                raise PlanError(
                    f"routes of {self.module!r}: expected every item to be {name} exactly once, "
                    "got one that is missing or repeated"
                )
        for name, ranks, bounds in (
            ("sent", self.encoder, self.sent_bounds),
            ("received", self.owner, self.owned_bounds),
            ("wanted", self.owner, self.owned_bounds),
        ):
            order = getattr(self, name)
            group = self.slot[order].astype(np.int64) * w + ranks[order]
            if not np.array_equal(group, np.repeat(np.arange(self.n_slots * w), np.diff(bounds))):
                raise PlanError(
                    f"routes of {self.module!r}: expected items to be {name} by their own rank, "
                    f"got one {name} by another rank"
                )
        # The rows that a rank sends to another must be exactly the rows that the other expects from
        # it.
        as_sent = self.received[order_by_key(self.encoder[self.received], w)]
        as_sent = as_sent[order_by_key(self.slot[as_sent], self.n_slots)]
        if not np.array_equal(as_sent, self.sent):
            raise PlanError(
                f"routes of {self.module!r}: expected the same order of rows at sender and "
                "receiver, got two orders"
            )
        return self


def make_routes(plan: LoadingPlan, module: str) -> Routes:
    """Return the validated routes of a module's items to the owners of their samples."""
    a, b, place = plan.module(module), plan.main, plan.place
    if a.out is None or a.offset is None:
        raise PlanError(
            f"routes: expected a module of items, got {module!r}, which has samples",
            plan.step,
            "select a ragged column: .select('image_patches')",
        )
    if place is None:
        raise PlanError(
            "expected a plan with a mesh, got one made by hand that has no place",
            plan.step,
            "give LoadingPlan(place=...)",
        )
    w, node = place.world_size, np.empty(len(plan), np.int64)
    node[b.sample] = np.arange(len(b.sample))
    at = node[a.sample]
    encoder, owners = (
        first_ranks(a.on or place, a.axis)[a.bucket],
        first_ranks(b.on or place, b.axis),
    )
    owner, microbatch = owners[b.bucket[at]], b.microbatch[at]
    placed = _placed(a, b, owners)
    by_encoder = placed[order_by_key(encoder[placed], w)]
    received = by_encoder[order_by_key(owner[by_encoder], w)]
    sent, received, wanted = (
        order[order_by_key(a.microbatch[order], a.n_microbatches)]
        for order in (by_encoder, received, placed)
    )
    kept = a.n_microbatches == b.n_microbatches and bool((a.microbatch == microbatch).all())
    return Routes(
        module=module,
        world_size=w,
        n_slots=a.n_microbatches,
        per="microbatch" if kept else "iteration",
        encoder=encoder,
        owner=owner,
        slot=a.microbatch,
        number=position_in_key(a.sample, len(plan)),
        out=a.out,
        microbatch=microbatch,
        doc=b.slot[at],
        offset=a.offset,
        position=starts(b)[at] + a.offset,
        sent=sent,
        received=received,
        wanted=wanted,
        sent_bounds=_bounds(a.microbatch, encoder, a.n_microbatches, w),
        owned_bounds=_bounds(a.microbatch, owner, a.n_microbatches, w),
    ).validate()


def _placed(a: Assignment, b: Assignment, owners: np.ndarray) -> np.ndarray:
    """Return the items sorted by owner, microbatch, document and placeholder."""
    assert a.offset is not None
    walk = b.order()
    if (owners[1:] < owners[:-1]).any():
        walk = walk[np.argsort(owners[b.bucket[walk]], kind="stable")]
    samples = b.sample[walk]
    order = in_documents(a.sample, a.offset)
    counts = np.bincount(a.sample, minlength=len(samples))
    return order[ranges((np.cumsum(counts) - counts)[samples], counts[samples])]


def starts(b: Assignment, size: np.ndarray | None = None) -> np.ndarray:
    """Return the first position of each document of the backbone in its packed microbatch.

    ``size``: tokens of each document, by default the planned size.
    """
    order, bins = b.order(), b.bins()
    size = (b.size if size is None else size)[order]
    before = np.cumsum(size) - size
    counts = np.bincount(bins, minlength=b.n_buckets * b.n_microbatches)
    first = np.minimum(np.cumsum(counts) - counts, max(0, len(size) - 1))
    start = np.empty(len(size), np.int64)
    start[order] = before - np.repeat(before[first], counts) if len(size) else before
    return start


def _bounds(slot: np.ndarray, ranks: np.ndarray, n_slots: int, w: int) -> np.ndarray:
    counts = np.bincount(slot.astype(np.int64) * w + ranks, minlength=n_slots * w)
    return np.concatenate([[0], np.cumsum(counts)])
