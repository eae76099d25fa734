"""Routes of encoder outputs to the ranks that run the backbone, for one differentiable all-to-all.

    route = plan.routes("encoder").for_rank(rank, slot)
    # the encoder's rank
    rows = torch.cat([o[:n] for o, n in zip(outputs_of(route.items), route.send_lens)])
    # every rank
    got = all_to_all_single(rows[route.send_rows], route.recv_splits, route.send_splits)
    # the backbone's rank
    embeddings[route.image_token_index] = got[route.recv_rows]

``slot`` is a microbatch of the encoder. It is the backbone's own if items kept their slots
(``follow(per="microbatch")``), and 0 if the encoder is balanced once per step. In that case rows of
all microbatches of the step come in one exchange; ``route.microbatch(m)`` selects the rows of one.

An *owner* is a rank that gets rows. Without slices it is the first rank of the bucket of the item's
sample, at pipeline stage 0, and 0 along CP and TP if those are not axes of buckets. It holds the
whole microbatch and gets all rows of an item. Where ranks share a microbatch (slices of context
parallelism, pieces on rings), each of them, at stage 0 and 0 along TP, gets the rows of its own
placeholders. A *part* is a run of rows of one item that one owner gets (``owners.py``).

All other ranks receive nothing and take part with zeros. Encoder and backbone may be on meshes of
their own (``distribute(on=)``); all ranks of the job's mesh take part. A rank without items has
empty arrays and must still call the collective, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlord.errors import PlanError
from overlord.hashing import in_documents, order_by_key, position_in_key
from overlord.mesh import Batch
from overlord.plan.module_ranks import first_ranks
from overlord.plan.owners import Parts, parts_of
from overlord.plan.plan import Assignment, LoadingPlan
from overlord.sample import ranges


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """The sends and receives of one rank in one exchange.

    Rows are tokens of the encoder's output.
    """

    rank: int
    slot: int
    # int64 [n]: items of the module that this rank encodes, in the order of its outputs
    items: np.ndarray
    # int32 [n]: number of first rows sent of each item; fewer if its document was truncated
    send_lens: np.ndarray
    # int64 [rows]: rows in sending order, numbers among the sent rows of all items
    send_rows: np.ndarray
    send_splits: np.ndarray  # int32 [world]: rows to every rank
    recv_splits: np.ndarray  # int32 [world]: rows from every rank
    recv_items: np.ndarray  # int64 [k]: item of each received part, in the order of placeholders
    recv_first: np.ndarray  # int64 [k]: rows of the item before the part
    # int64 [k]: number of each part in the order of arrival (by sender, then placeholders)
    recv_perm: np.ndarray
    out_lens: np.ndarray  # int32 [k]: rows of each part
    recv_rows: np.ndarray  # int64 [rows]: received[recv_rows] is in the order of the placeholders
    # int64 [rows]: position of each row in this rank's microbatch
    image_token_index: np.ndarray
    microbatches: np.ndarray  # int32 [k]: this rank's microbatch of each part
    docs: np.ndarray  # int32 [k]: its document in the microbatch, for the padded layout
    offsets: np.ndarray  # int64 [k]: its first placeholder in the whole document

    def microbatch(self, m: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (recv_rows, image_token_index) of one microbatch of the backbone."""
        mine = np.repeat(self.microbatches == m, self.out_lens)
        return self.recv_rows[mine], self.image_token_index[mine]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """The routes of a whole step: columns by item and by part, and orders of both.

    ``for_rank`` returns the Route of one rank.
    """

    module: str
    world_size: int
    n_slots: int  # exchanges in a step
    per: str  # "microbatch": slot m brings the rows of microbatch m; else "iteration"
    encoder: np.ndarray  # int64 [items]: rank that encodes each item
    slot: np.ndarray  # int32 [items]: number of the exchange of the item's rows
    number: np.ndarray  # int64 [items]: number of the item in its sample
    out: np.ndarray  # int64 [items]: number of rows of each item
    parts: Parts  # the parts of all items, item after item
    encoded: np.ndarray  # items by slot, encoder, and the order of their first sent part
    sent: np.ndarray  # parts by slot, encoder, owner, placeholder
    received: np.ndarray  # parts by slot, owner, encoder, placeholder
    wanted: np.ndarray  # parts by slot, owner, placeholder
    # int64 [slots * world + 1]: first index of each encoder in ``encoded``, and in ``sent``
    encoded_bounds: np.ndarray
    sent_bounds: np.ndarray
    owned_bounds: np.ndarray  # first index of each owner in ``received`` and ``wanted``

    def __len__(self) -> int:
        return len(self.out)

    def __repr__(self) -> str:
        p = self.parts
        moved = int(p.count[self.encoder[p.item] != p.owner].sum())
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
        at, p = slot * self.world_size + rank, self.parts
        items = self.encoded[self.encoded_bounds[at] : self.encoded_bounds[at + 1]]
        sent = self.sent[self.sent_bounds[at] : self.sent_bounds[at + 1]]
        arriving = self.received[self.owned_bounds[at] : self.owned_bounds[at + 1]]
        wanted = self.wanted[self.owned_bounds[at] : self.owned_bounds[at + 1]]
        by_part = np.argsort(arriving, kind="stable")
        perm = by_part[np.searchsorted(arriving[by_part], wanted)]
        lens = p.count[wanted]
        arrives = np.cumsum(p.count[arriving]) - p.count[arriving]
        return Route(
            rank=rank,
            slot=slot,
            items=items,
            send_lens=self.out[items].astype(np.int32),
            send_rows=self._send_rows(items, sent),
            send_splits=self._rows(p.owner[sent], sent),
            recv_splits=self._rows(self.encoder[p.item[arriving]], arriving),
            recv_items=p.item[wanted],
            recv_first=p.first[wanted],
            recv_perm=perm,
            out_lens=lens.astype(np.int32),
            recv_rows=ranges(arrives[perm], lens),
            image_token_index=ranges(p.position[wanted], lens),
            microbatches=p.microbatch[wanted],
            docs=p.doc[wanted],
            offsets=p.offset[wanted],
        )

    def _send_rows(self, items: np.ndarray, sent: np.ndarray) -> np.ndarray:
        """Return the sent rows as numbers among the rows of ``items``, in sending order."""
        start = np.cumsum(self.out[items]) - self.out[items]
        by_item = np.argsort(items, kind="stable")
        at = by_item[np.searchsorted(items[by_item], self.parts.item[sent])]
        return ranges(start[at] + self.parts.first[sent], self.parts.count[sent])

    def _rows(self, ranks: np.ndarray, parts: np.ndarray) -> np.ndarray:
        return np.bincount(
            ranks, weights=self.parts.count[parts], minlength=self.world_size
        ).astype(np.int32)

    def validate(self) -> Routes:
        """Return the routes; raise ``PlanError`` if they are inconsistent.

        The parts of every item tile its rows. Every part must be sent, received and wanted exactly
        once, by its own ranks. The rows from one rank to another must have the same order on both.
        """
        p, w = self.parts, self.world_size
        if not p.tile(self.out):
            raise PlanError(
                f"routes of {self.module!r}: expected parts that tile the rows of every item, got "
                "a gap or an overlap"
            )
        for name, n in (("encoded", len(self)), ("sent", len(p)), ("received", len(p))):
            self._check_once(name, n)
        self._check_once("wanted", len(p))
        slot, encoder = self.slot[p.item], self.encoder[p.item]
        for name, ranks, slots, bounds in (
            ("encoded", self.encoder, self.slot, self.encoded_bounds),
            ("sent", encoder, slot, self.sent_bounds),
            ("received", p.owner, slot, self.owned_bounds),
            ("wanted", p.owner, slot, self.owned_bounds),
        ):
            order = getattr(self, name)
            group = slots[order].astype(np.int64) * w + ranks[order]
            if not np.array_equal(group, np.repeat(np.arange(self.n_slots * w), np.diff(bounds))):
                raise PlanError(
                    f"routes of {self.module!r}: expected items to be {name} by their own rank, "
                    f"got one {name} by another rank"
                )
        # The rows that a rank sends to another must be exactly the rows that the other expects from
        # it.
        as_sent = self.received[order_by_key(encoder[self.received], w)]
        as_sent = as_sent[order_by_key(slot[as_sent], self.n_slots)]
        if not np.array_equal(as_sent, self.sent):
            raise PlanError(
                f"routes of {self.module!r}: expected the same order of rows at sender and "
                "receiver, got two orders"
            )
        return self

    def _check_once(self, name: str, n: int) -> None:
        if not np.array_equal(np.bincount(getattr(self, name), minlength=n), np.ones(n, np.int64)):
            raise PlanError(
                f"routes of {self.module!r}: expected every item to be {name} exactly once, "
                "got one that is missing or repeated"
            )


def make_routes(
    plan: LoadingPlan, module: str, batch: Batch | None = None, *, broadcast: bool = True
) -> Routes:
    """Return the validated routes of a module's items to the ranks that hold their placeholders.

    ``batch``, ``broadcast``: see ``LoadingPlan.routes``.
    """
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
    w, m = place.world_size, a.n_microbatches
    encoder = first_ranks(a.on or place, a.axis)[a.bucket]
    parts = parts_of(plan, a, batch, broadcast)
    placed = _placed(a, b, parts)
    wanted = placed[order_by_key(parts.owner[placed], w)]
    by_encoder = wanted[order_by_key(encoder[parts.item[wanted]], w)]
    received = by_encoder[order_by_key(parts.owner[by_encoder], w)]
    slot = a.microbatch[parts.item]
    sent, received, wanted = (
        order[order_by_key(slot[order], m)] for order in (by_encoder, received, wanted)
    )
    items = parts.item[sent]
    _, begins = np.unique(items, return_index=True)  # every item has a part
    return Routes(
        module=module,
        world_size=w,
        n_slots=m,
        per="microbatch" if _by_microbatch(plan, m, slot, parts) else "iteration",
        encoder=encoder,
        slot=a.microbatch,
        number=position_in_key(a.sample, len(plan)),
        out=a.out,
        parts=parts,
        encoded=items[np.sort(begins)],
        sent=sent,
        received=received,
        wanted=wanted,
        encoded_bounds=_bounds(a.microbatch, encoder, m, w),
        sent_bounds=_bounds(slot, encoder[parts.item], m, w),
        owned_bounds=_bounds(slot, parts.owner, m, w),
    ).validate()


def _by_microbatch(plan: LoadingPlan, n_slots: int, slot: np.ndarray, parts: Parts) -> bool:
    """Return whether exchange m brings the rows of microbatch m on every rank."""
    b, tasks = plan.main, plan.tasks
    if tasks is not None and (tasks.table.counts(b.n_buckets) != b.n_microbatches).any():
        return False  # ranks have different numbers of microbatches
    return n_slots == b.n_microbatches and bool((slot == parts.microbatch).all())


def _placed(a: Assignment, b: Assignment, parts: Parts) -> np.ndarray:
    """Return the parts sorted by microbatch; those of one owner by document and placeholder too."""
    assert a.offset is not None
    samples = b.sample[b.order()]
    order = in_documents(a.sample, a.offset)
    counts = np.bincount(a.sample, minlength=len(samples))
    items = order[ranges((np.cumsum(counts) - counts)[samples], counts[samples])]
    held = np.bincount(parts.item, minlength=len(a.sample))
    walk = ranges((np.cumsum(held) - held)[items], held[items])
    return walk[order_by_key(parts.microbatch[walk], b.n_microbatches)]


def _bounds(slot: np.ndarray, ranks: np.ndarray, n_slots: int, w: int) -> np.ndarray:
    counts = np.bincount(slot.astype(np.int64) * w + ranks, minlength=n_slots * w)
    return np.concatenate([[0], np.cumsum(counts)])
